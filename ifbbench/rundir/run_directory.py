"""The run directory: its files, the checks that protect its content, and the environment that `run.json` describes."""

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.json import format as format_json

from ifbbench.errors import InputError
from ifbbench.files import (
    TakenError,
    check_new_directory,
    check_not_input,
    is_part,
    part_beside,
    removed,
    replace_file,
    restored,
    sole_writer,
    writing,
)
from ifbbench.settings.engines import LOGGED_ENGINES
from ifbbench.settings.groups.recording import RECORDING_FORMATS

if TYPE_CHECKING:
    from ifbbench.workload.trace import Trace

RESULTS = Path("results")
# What was run; a directory with this file is a run directory.
RUN = "run.json"
WriteStart = Callable[[Path, str], None]
# Spans that were open when a run was last flushed; only a killed run leaves it behind.
OPEN_SPANS = "open_spans.jsonl"
# The result of `--result_format` without a file of its own.
RESULT = "result.json"
# Logs of servers, by `--iteration_stats_format`.
SERVER_LOGS = {engine: f"{engine}.log" for engine in LOGGED_ENGINES}
# What other settings did on the trace of the run; `why` writes it.
WHAT_IF = "what_if.json"
# The steps of static batches (V1), which `iterations` reports as a whole: iterations of the token generation loop.
STEPS = "steps"
# Metrics of the server of a run against an endpoint.
METRICS = "metrics"
# Files of one JSON object a line, by their names without suffix, which is the recording format.
LINE_FILES = ("iterations", STEPS, "spans", "requests", "trace", METRICS)
# What `plot` and `export` write.
RESULT_DIRECTORIES = ("charts", "export")
# The beginning of the names of the run directories of replicas in that of a fleet.
REPLICA_DIRECTORIES = "replica="
# The LINE_FILES that `--recording summary` leaves out.
NOT_IN_SUMMARY = ("iterations", STEPS, "spans")
# The table of the repeats of a run, beside the mean of their summaries.
REPEATS_FILE = "repeats.csv"
# What a sweep was asked to do, as a config file of `ifbbench sweep`.
SWEEP_CONFIG = "sweep.yaml"
# Packages that results depend on.
PACKAGES = ("ifbbench", "torch", "triton", "numpy")
_log = logging.getLogger("ifbbench")


def find_lines(directory: Path, name: str) -> Path:
    """The file of lines called `name`, in the format that `directory` has it in; in the first format if in none.
    InputError if the run was recorded without it."""
    paths = _line_files(directory, name)
    found = next((path for path in paths if path.exists()), None)
    if found is None and name in NOT_IN_SUMMARY and (replicas := _replicas(directory)):
        raise InputError(
            f"{directory}: a fleet of {len(replicas)} replicas, which have iterations and spans; name the directory of "
            f"one, such as {min(replicas)}."
        )
    if found is None and name in NOT_IN_SUMMARY and _has_only_summary(directory / "run.json"):
        raise InputError(
            f"{directory}: recorded with --recording summary, which leaves out iterations and spans; run again with "
            "--recording full."
        )
    return found or paths[0]


def _has_only_summary(path: Path) -> bool:
    described = json.loads(path.read_bytes() or b"{}") if path.is_file() else {}
    return (described.get("config") or {}).get("recording") == "summary"


def find_iterations(directory: Path) -> Path:
    """The file of the iterations of the token generation loop: of static batches, their steps."""
    steps = find_lines(directory, STEPS)
    return steps if steps.exists() else find_lines(directory, "iterations")


def numbered(path: Path) -> Iterator[Path]:
    """`path` and the same name with -2, -3 and so on, as far as they do not exist."""
    names = chain([path.name], (f"{path.name}-{number}" for number in count(2)))
    return (path.with_name(name) for name in names if not os.path.exists(path.with_name(name)))


def default_directory(name: str, overwrite: bool) -> Path:
    """results/`name`, where results go without --output: numbered if it exists, unless it is to be replaced."""
    path = RESULTS / name
    return path if overwrite else say_number(path, next(numbered(path)))


def say_number(default: Path, path: Path) -> Path:
    """`path`, where results go; a warning says so if it is not `default`, because that exists."""
    if path != default:
        _log.warning("%s exists; results are written to %s. --overwrite replaces the earlier ones.", default, path)
    return path


def check(path: Path, overwrite: bool) -> None:
    """Raise InputError when a run may not write to `path`: it is a file, it cannot be written, it holds results and
    `overwrite` is off, or it holds something else or a file that the command reads, which are never replaced."""
    check_new_directory(path, "--output")
    if path.is_dir() and not all(map(is_part, path.iterdir())):
        if not overwrite:
            raise TakenError(f"--output {path}: already holds results; add --overwrite, or give another directory.")
        if not (path / RUN).exists():
            raise InputError(f"--output {path}: holds files that are not of a run; give another directory.")
        for file in (path / RUN, *_line_files(path, "trace"), *_results(path)):
            check_not_input(file, "--output")


def check_some(places: Iterable[Path], overwrite: bool) -> None:
    """Raise InputError when a run may write to none of `places`; `begun` may still find that another process has taken
    the first free one since."""
    taken = InputError("no directory was given.")
    for path in places:
        try:
            check(path, overwrite)
        except TakenError as error:
            taken = error
        else:
            return
    raise taken


@contextmanager
def begun(places: Iterable[Path], overwrite: bool, write_start: WriteStart) -> Iterator[Path]:
    """The first of `places` that no other process takes, as a run directory without results. Until the end of the
    block, no other process can begin a run there. InputError if there is none.

    write_start(directory, name): writes the trace, then run.json, of a run with this name. A new directory appears
    in one step, with these files, or not at all. One of an earlier run is at each moment that run, with fewer and fewer
    results, or the new one; files that are not of a run are kept.
    """
    taken = InputError("no directory was given.")
    for path in places:
        with ExitStack() as stack:
            try:
                (_refill if path.exists() else _create)(path, overwrite, write_start, stack)
            except TakenError as error:
                taken = error
                continue
            with _keeping_trace(path):
                yield path
            return
    raise taken


def is_lost(directory: Path) -> bool:
    """Whether the directory of a run that has ended was removed, or its main files."""
    return not (directory / RUN).is_file() or not (directory / "summary.json").is_file()


@contextmanager
def _keeping_trace(directory: Path) -> Iterator[None]:
    """Write the trace again if it is no longer there at the end of the block; OutputError then, unless the block ended
    with another error. A directory without run.json was removed when its results were complete: nothing is written."""
    path = find_lines(directory, "trace")
    with path.open("rb") as file:
        try:
            yield
        except BaseException:
            if not path.exists() and not is_lost(directory):
                restored(path, file.fileno())
            raise
        if not path.exists() and not is_lost(directory) and restored(path, file.fileno()):
            raise removed(directory)


def _create(path: Path, overwrite: bool, write_start: WriteStart, stack: ExitStack) -> None:
    part = part_beside(path)
    with writing(path):
        part.mkdir(parents=True)
        try:
            stack.enter_context(sole_writer(part))
            write_start(part, path.name)
            part.rename(path)
        except BaseException as error:
            shutil.rmtree(part, ignore_errors=True)
            if isinstance(error, OSError) and path.exists():
                raise TakenError(f"--output {path}: another run has begun there; give another directory.") from None
            raise


def _refill(path: Path, overwrite: bool, write_start: WriteStart, stack: ExitStack) -> None:
    with writing(path):
        stack.enter_context(sole_writer(path))
        check(path, overwrite)
        traces = {file: file.stat().st_ino for file in _line_files(path, "trace") if file.exists()}
        for file in (*_results(path), *filter(is_part, path.iterdir())):
            file.unlink(missing_ok=True)
        for name in (*RESULT_DIRECTORIES, *(one.name for one in _replicas(path))):
            shutil.rmtree(path / name, ignore_errors=True)
        write_start(path, path.name)
        for trace, inode in traces.items():
            if trace.stat().st_ino == inode:  # it was not replaced: the new one has another format
                trace.unlink()


def _results(directory: Path) -> Iterator[Path]:
    """The files in which a run has results, whether they are there or not, and those that were made of them."""
    yield from (
        directory / name for name in ("summary.json", OPEN_SPANS, RESULT, *SERVER_LOGS.values(), WHAT_IF, "report.html")
    )
    yield from (file for name in LINE_FILES if name != "trace" for file in _line_files(directory, name))
    directories = (*(directory / name for name in RESULT_DIRECTORIES), *_replicas(directory))
    yield from (file for one in directories for file in one.rglob("*") if file.is_file())


def _replicas(directory: Path) -> list[Path]:
    return [path.parent for path in directory.glob(f"{REPLICA_DIRECTORIES}*/{RUN}")]


def _line_files(directory: Path, name: str) -> list[Path]:
    return [directory / f"{name}.{recording_format}" for recording_format in RECORDING_FORMATS]


def write_begun(directory: Path, description: Mapping[str, Any]) -> None:
    """Write the `run.json` of a run that has begun."""
    write_json(directory / RUN, {**description, "schedule_digest": None, "partial": True})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file in one step."""
    # With `indent`, json encodes in Python, which takes several times as long as both steps.
    replace_file(path, format_json(json.dumps(content, allow_nan=False), indent=2) + "\n")


def trace_identity(trace: "Trace") -> dict[str, Any]:
    """What `run.json` says of the trace."""
    return {
        "name": trace.name,
        "source": trace.source,
        "sha256": trace.sha256,
        "requests": len(trace),
        "skipped_rows": trace.skipped_rows,
        "notes": list(trace.notes),
    }


@cache
def versions() -> Mapping[str, str | None]:
    """Versions of Python and PACKAGES; None for a package that is not installed."""
    return {"python": platform.python_version()} | {package: _installed_version(package) for package in PACKAGES}


def _installed_version(package: str) -> str | None:
    """The version in the name of the directory that describes an installed package (`torch-2.11.0.dist-info`).

    `importlib.metadata` finds the same, but its parser of e-mails takes a tenth of the time of a short run to import
    and to read the description of torch."""
    for place in map(Path, sys.path):
        for described in sorted(place.glob(f"{package}-*.dist-info")) if place.is_dir() else ():
            return described.name.removeprefix(f"{package}-").removesuffix(".dist-info")
    return None


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
        "system": _system(),
        "gpu": _gpu() if device == "cuda" else None,
    }


def _system() -> str:
    """The operating system as `platform.platform` names it, which on Linux starts a process to ask for a processor that
    it then leaves out."""
    if sys.platform != "linux":
        return platform.platform()
    system, library = os.uname(), "".join(platform.libc_ver())
    return "-".join(filter(None, (system.sysname, system.release, system.machine, library and f"with-{library}")))


def _gpu() -> dict[str, Any]:
    """Name and memory in bytes of the GPU that torch uses."""
    import torch

    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"name": facts.name, "memory_bytes": facts.total_memory}


@cache
def git_revision() -> str | None:
    """The commit of the checkout that this package is in, with `-dirty` if it has changes; None outside a checkout. As
    it was at the first call: what runs is what was imported."""
    if not any((directory / ".git").exists() for directory in Path(__file__).parents):
        return None
    try:
        # Threads that read the index in advance take longer to start than they save.
        answer = subprocess.run(
            ["git", "-c", "core.preloadIndex=false", "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
