"""Reading files of one JSON object a line, compressed or not, as a run killed in the middle leaves them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ifbbench.compressed import DamagedFile, read_pieces
from ifbbench.errors import InputError

_decode = json.JSONDecoder().decode


def read_object(path: Path) -> dict[str, Any]:
    """The one JSON object in `path`; InputError if it is not one."""
    try:
        return _object(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path}: {error}; expected one JSON object. Restore the file, or run again.") from error


def read_lines(path: Path, required: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects in `path`, one a line, each with the fields `required`.

    What a killed run was writing is left out: a last line that lacks its line end and is no such object, and the rest
    of a compressed file that was cut off. Every other bad line raises InputError. A missing file is an empty one: the
    run was killed before it wrote to it.
    """
    if not path.exists():
        return
    number, rest = 0, b""
    try:
        for piece in read_pieces(path):
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                number += 1
                if line.strip():
                    yield _row(path, number, line, required)
    except EOFError:
        pass  # cut off behind the last whole line
    except DamagedFile as error:
        raise InputError(f"{path}: {error}. Restore the file, or remove it to go on without it.") from error
    try:
        last = _row(path, number + 1, rest, required) if rest.strip() else None
    except InputError:
        return
    if last is not None:
        yield last


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
        value = _decode(text.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at character {error.pos + 1})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    return value
