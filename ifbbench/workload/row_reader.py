"""From the rows of a trace file to columns: what becomes of bad rows, and of ids that come twice."""

from array import array
from pathlib import Path
from typing import Any, BinaryIO

from ifbbench.errors import InputError
from ifbbench.workload.columns import ID, ColumnsBuilder
from ifbbench.workload.fields import BadRow
from ifbbench.workload.rows import TraceFormat


class RowReader:
    """Reads the rows of the file at `path`.

    builder: the requests in good rows. skipped: bad rows, which are an error unless `skip_bad_rows`. accept_cut: a last
    line without its end may be broken, and is skipped then.
    """

    def __init__(self, path: Path, trace_format: TraceFormat, skip_bad_rows: bool, accept_cut: bool) -> None:
        self.builder = ColumnsBuilder()
        self.skipped = 0
        self._path = path
        self._format = trace_format
        self._skip_bad_rows = skip_bad_rows
        self._accept_cut = accept_cut
        self._first_problem = ""

    def read(self, file: BinaryIO, limit: int | None) -> None:
        """Read until there are `limit` requests. InputError at a bad row, and if there is no good one."""
        ids = _RowsOfIds()
        for index, (number, origin, row) in enumerate(self._format.rows(file)):
            try:
                request = self._format.request(row, index)
                first = ids.find(request.request_id)
                if first is not None:
                    raise BadRow(
                        f"field 'request_id' is {request.request_id}, as in {self._format.row_name.format(first)}; "
                        "expected each id once"
                    )
            except BadRow as error:
                self._skip(number, row, error)
                continue
            ids.add(request.request_id, number)
            self.builder.append(request, origin)
            if len(self.builder) == limit:
                break
        if not len(self.builder):
            problem = f"all {self.skipped} rows are bad; the first: {self._first_problem}"
            reason = problem if self.skipped else "it has no rows."
            raise InputError(f"{self._path} holds no request: {reason} Give a trace with at least one request.")

    def _skip(self, number: int, row: Any, error: BadRow) -> None:
        problem = f"{self._path}, {self._format.row_name.format(number)}: {error}."
        was_cut = self._accept_cut and isinstance(row, str) and not row.endswith("\n")
        if not self._skip_bad_rows and not was_cut:
            raise InputError(f"{problem} Correct the row, or go on past such rows with --skip-bad-rows.") from None
        self.skipped += 1
        self._first_problem = self._first_problem or problem


class _RowsOfIds:
    """The row of each id. While ids ascend, as they mostly do, they take 16 bytes each."""

    def __init__(self) -> None:
        self._ids, self._rows = array(ID), array(ID)
        self._largest = -1
        self._row_of: dict[int, int] | None = None

    def find(self, request_id: int) -> int | None:
        """The row with this id, None if there was none."""
        if request_id > self._largest:
            return None
        if self._row_of is None:
            self._row_of = dict(zip(self._ids, self._rows, strict=True))
        return self._row_of.get(request_id)

    def add(self, request_id: int, row: int) -> None:
        """Take in an id that was not there before."""
        self._largest = max(self._largest, request_id)
        if self._row_of is not None:
            self._row_of[request_id] = row
        else:
            self._ids.append(request_id)
            self._rows.append(row)
