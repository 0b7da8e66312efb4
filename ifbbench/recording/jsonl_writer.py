"""Append-only JSON lines, buffered, on disk within a second."""

import json
from pathlib import Path
from typing import Any

FLUSH_INTERVAL_S = 1.0
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class JsonLinesWriter:
    """One JSON object a line. Lines reach the disk when `flush` is called, or `flush_if_due` after a second."""

    def __init__(self, path: Path) -> None:
        # Opened for the life of the run; `close` is called by the recorder whatever happens.
        self._file = path.open("w", encoding="utf-8")
        self._lines: list[str] = []
        self._flushed_s = 0.0

    def write(self, record: dict[str, Any]) -> None:
        self._lines.append(_encode(record))

    def flush_if_due(self, now_s: float) -> None:
        """Flush when the last flush was a second ago; `now_s` is the run's clock."""
        if now_s - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()
            self._flushed_s = now_s

    def flush(self) -> None:
        if self._lines:
            self._file.write("\n".join(self._lines) + "\n")
            self._lines.clear()
        self._file.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()
