"""Reading files of one JSON object a line, as a run killed in the middle leaves them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError


def read_object(path: Path) -> dict[str, Any]:
    """The one JSON object in `path`; InputError if it is not one."""
    try:
        return _object(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path}: {error}; expected one JSON object. Restore the file, or run again.") from error


def read_lines(path: Path, required: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    """The objects in `path`, one a line, each with the fields `required`, and whether the last line was cut.

    Only a last line that lacks its line end counts as cut: it is what a killed run was writing. Every other bad line
    raises InputError. A missing file is an empty one: the run was killed before it wrote to it.
    """
    if not path.exists():
        return [], False
    *whole, rest = path.read_bytes().split(b"\n")
    rows = [_row(path, number, line, required) for number, line in enumerate(whole, 1) if line.strip()]
    if not rest.strip():
        return rows, False
    try:
        return [*rows, _row(path, len(whole) + 1, rest, required)], False
    except InputError:
        return rows, True


def _row(path: Path, number: int, line: bytes, required: Sequence[str]) -> dict[str, Any]:
    try:
        row = _object(line)
        missing = [name for name in required if name not in row]
        if missing:
            raise ValueError(f"field {missing[0]!r} is missing")
    except ValueError as error:
        raise InputError(
            f"{path}, line {number}: {error}; expected a JSON object with {', '.join(required)}. "
            "Restore the file, or remove the line to go on without it."
        ) from error
    return row


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at character {error.pos + 1})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    return value
