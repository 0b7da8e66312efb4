"""Rows that stay in their file: each is read and parsed again when it is asked for."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ifbbench.errors import InputError
from ifbbench.workload.fields import BadRow
from ifbbench.workload.trace import TraceRequest


class StoredRows:
    """The rows of an open file by the byte that they begin with. The file is closed when nobody asks for rows any more.

    parse(line): the request in a row, or BadRow. path: what the file is called in messages.
    """

    def __init__(self, file: BinaryIO, parse: Callable[[str], TraceRequest], path: Path) -> None:
        self._file = file
        self._parse = parse
        self._path = path
        weakref.finalize(self, file.close)

    def __call__(self, offset: int) -> TraceRequest:
        """The request in the row that begins at `offset`, which was read before."""
        self._file.seek(offset)
        line = self._file.readline()
        try:
            return self._parse(line.decode())
        except (BadRow, UnicodeDecodeError, OSError) as error:
            raise InputError(
                f"{self._path} was changed while it was being replayed: {error}, at byte {offset}. Replay it again, "
                "and leave it alone meanwhile."
            ) from error
