"""The run directory: its files, the checks that protect its content, and the environment that `run.json` describes."""

import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifbbench.config import RECORDING_FORMATS
from ifbbench.errors import InputError

if TYPE_CHECKING:
    from ifbbench.workload.trace import Trace

RESULTS = Path("results")
# Spans that were open when a run was last flushed; only a killed run leaves it behind.
OPEN_SPANS = "open_spans.jsonl"
# The result of `--result_format` without a file of its own.
RESULT = "result.json"
# Of static batches (V1), which `iterations` reports as a whole, the steps: iterations of the token generation loop.
STEPS = "steps"
# Metrics of the server of a run against an endpoint.
METRICS = "metrics"
# Files of one JSON object a line, by their names without suffix, which is the recording format.
LINE_FILES = ("iterations", STEPS, "spans", "requests", "trace", METRICS)
# The table of the repeats of a run, beside the mean of their summaries.
REPEATS_FILE = "repeats.csv"
# What a sweep was asked to do, as a config file of `ifbbench sweep`.
SWEEP_CONFIG = "sweep.yaml"
# Packages that results depend on.
PACKAGES = ("ifbbench", "torch", "triton", "numpy")


def find_lines(directory: Path, name: str) -> Path:
    """The file of lines called `name`, in the format that `directory` has it in; in the first format if in none."""
    paths = [directory / f"{name}.{recording_format}" for recording_format in RECORDING_FORMATS]
    return next((path for path in paths if path.exists()), paths[0])


def find_iterations(directory: Path) -> Path:
    """The file of the iterations of the token generation loop: of static batches, their steps."""
    steps = find_lines(directory, STEPS)
    return steps if steps.exists() else find_lines(directory, "iterations")


def check(path: Path, overwrite: bool) -> None:
    """Raise InputError when a run may not write to `path`: it is a file, it holds results and `overwrite` is off, or it
    holds something else, which is never replaced."""
    if path.exists() and not path.is_dir():
        raise InputError(f"--output {path}: is a file; expected a directory that does not exist yet.")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise InputError(f"--output {path}: already holds results; add --overwrite, or give another directory.")
        if not (path / "run.json").exists():
            raise InputError(f"--output {path}: holds files that are not of a run; give another directory.")


def prepare(path: Path, overwrite: bool) -> Path:
    """Make `path` an empty run directory. Raises InputError as `check` does, and when it cannot be written."""
    check(path, overwrite)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lines = [f"{name}.{recording_format}" for name in LINE_FILES for recording_format in RECORDING_FORMATS]
        for name in ("run.json", "summary.json", OPEN_SPANS, RESULT, "report.html", *lines):
            (path / name).unlink(missing_ok=True)
        for name in ("charts", "export"):
            shutil.rmtree(path / name, ignore_errors=True)
        (path / "run.json").touch()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"--output {path}: cannot be written ({reason}); give a writable directory.") from error
    return path


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file in one step."""
    replace_file(path, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step, so that a reader never sees half of it."""
    partial = path.with_suffix(".part")
    partial.write_bytes(content)
    partial.replace(path)


def trace_identity(trace: "Trace") -> dict[str, Any]:
    """What `run.json` says of the trace."""
    return {"name": trace.name, "source": trace.source, "sha256": trace.sha256, "requests": len(trace),
            "skipped_rows": trace.skipped_rows, "notes": list(trace.notes)}  # fmt: skip


def versions() -> dict[str, str | None]:
    """Versions of Python and PACKAGES; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def hardware(device: str | None = None) -> dict[str, Any]:
    """Processor, usable cores and memory in bytes, and the GPU if `device` is "cuda"."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines() if cpu_info.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "machine": platform.machine(),
        "cpu": next(models, None) or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "gpu": _gpu() if device == "cuda" else None,
    }


def _gpu() -> dict[str, Any]:
    """Name and memory in bytes of the GPU that torch uses."""
    import torch

    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"name": facts.name, "memory_bytes": facts.total_memory}


def git_revision() -> str | None:
    """The commit of the checkout that this package is in, with `-dirty` if it has changes; None outside a checkout."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
