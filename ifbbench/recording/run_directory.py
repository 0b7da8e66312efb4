"""The run directory: its files, and the checks that protect what it already holds."""

import json
import shutil
from pathlib import Path
from typing import Any

from ifbbench.config import RECORDING_FORMATS
from ifbbench.errors import InputError

RESULTS = Path("results")
# Spans that were open when a run was last flushed; only a killed run leaves it behind.
OPEN_SPANS = "open_spans.jsonl"
# Files of one JSON object a line, by their names without suffix, which is the recording format.
LINE_FILES = ("iterations", "spans", "requests", "trace")
RUN_FILES = (
    "run.json",
    *(f"{name}.{recording_format}" for name in LINE_FILES for recording_format in RECORDING_FORMATS),
    "summary.json",
    OPEN_SPANS,
)


def find_lines(directory: Path, name: str) -> Path:
    """The file of lines called `name`, in the format that `directory` has it in; in the first format if in none."""
    paths = [directory / f"{name}.{recording_format}" for recording_format in RECORDING_FORMATS]
    return next((path for path in paths if path.exists()), paths[0])


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
        for name in (*RUN_FILES, "report.html"):
            (path / name).unlink(missing_ok=True)
        shutil.rmtree(path / "charts", ignore_errors=True)
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
