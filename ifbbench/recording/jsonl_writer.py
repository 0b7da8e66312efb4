"""Append-only JSON lines, buffered until flushed."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ifbbench.recording.run_directory import replace_text

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class JsonLinesWriter:
    """One JSON object a line. Lines reach the disk when `flush` or `close` is called."""

    def __init__(self, path: Path) -> None:
        # Opened for the life of the run; the recorder closes it whatever happens.
        self._file = path.open("w", encoding="utf-8")
        self._lines: list[str] = []

    def write(self, record: dict[str, Any]) -> None:
        self._lines.append(_encode(record))

    def flush(self) -> None:
        if self._lines:
            self._file.write("\n".join(self._lines) + "\n")
            self._lines.clear()
        self._file.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()


def replace_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a whole file of JSON lines at once."""
    replace_text(path, "".join(_encode(record) + "\n" for record in records))
