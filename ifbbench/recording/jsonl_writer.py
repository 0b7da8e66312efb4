"""Append-only JSON lines, buffered until flushed."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ifbbench.compressed import open_to_write
from ifbbench.recording.run_directory import replace_text

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
LINES_AT_ONCE = 64


class JsonLinesWriter:
    """One JSON object a line, compressed if the path ends in .gz. All lines can be read once `flush` or `close` was
    called; until then some are in memory, never many."""

    def __init__(self, path: Path) -> None:
        self._writer = open_to_write(path)
        self._lines: list[str] = []

    def write(self, record: dict[str, Any]) -> None:
        """Add the line of `record`."""
        self.write_line(encode(record))

    def write_line(self, line: str) -> None:
        """Add a line of JSON that is ready but for its end."""
        self._lines.append(line)
        if len(self._lines) >= LINES_AT_ONCE:
            self._write_gathered()

    def write_lines(self, lines: Iterable[str]) -> None:
        """Add many such lines."""
        self._lines.extend(lines)
        if len(self._lines) >= LINES_AT_ONCE:
            self._write_gathered()

    def flush(self) -> None:
        """Make every line readable."""
        self._write_gathered()
        self._writer.flush()

    def close(self) -> None:
        """End the file; every line is readable."""
        self._write_gathered()
        self._writer.close()

    def _write_gathered(self) -> None:
        if self._lines:
            self._lines.append("")  # so that the last line ends too
            self._writer.write("\n".join(self._lines).encode())
            self._lines.clear()


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a whole file of lines at once."""
    replace_text(path, "".join(f"{line}\n" for line in lines))
