"""The trace of live traffic: rows that are written as requests end, and ordered at the end."""

from array import array
from collections.abc import Iterator
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.compressed import open_to_read
from ifbbench.rundir.lines import JsonLinesWriter
from ifbbench.workload.formats import trace_lines, write_lines
from ifbbench.workload.trace import TraceRequest


class TrafficTrace:
    """Writes the trace of a server. A request becomes a row when it ends, because its output length is known only then.
    Its id must be its number in the order of arrival."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, JsonLinesWriter(path)

    def add(self, row: TraceRequest) -> None:
        self._lines.write(line.rstrip("\n").encode() for line in trace_lines([row]))

    def flush(self) -> None:
        self._lines.flush()

    def close(self, num_requests: int) -> dict[str, Any]:
        """Put the rows in order of arrival; returns what `run.json` says of them. num_requests: that arrived."""
        self._lines.close()
        numbers, begins, begin = array("q"), array("q"), 0
        with open_to_read(self._path) as file:
            for line in file:
                numbers.append(int(line.partition(b":")[2].partition(b",")[0]))
                begins.append(begin)
                begin += len(line)

            def in_order() -> Iterator[str]:  # the rows of a long recording would not fit into memory
                for index in np.argsort(np.asarray(numbers), kind="stable").tolist():
                    file.seek(begins[index])
                    yield file.readline().decode()

            write_lines(in_order(), self._path, overwrite=True)
        with self._path.open("rb") as file:
            return {"requests": num_requests, "sha256": file_digest(file, "sha256").hexdigest()}
