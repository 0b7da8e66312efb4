"""How a kind of trace file is read: its rows, what becomes of one, and how it is found again."""

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

from ifbbench.workload.columns import Recall
from ifbbench.workload.trace import TraceRequest

Row: TypeAlias = tuple[int, int, Any]
"""What number it has in its file, by what `recall` finds it again, and the row itself."""

LINE = "line {}"


class TraceFormat(Protocol):
    """How one kind of file is read. `row_name` is a template that says where the row of a number stands."""

    name: str
    row_name: str

    def rows(self, file: BinaryIO) -> Iterator[Row]:
        """The rows of `file`, from its start."""
        ...

    def request(self, row: Any, index: int) -> TraceRequest:
        """The request in a row, the `index`-th; BadRow says what is wrong with it. To be called in the rows' order."""
        ...

    def recall(self, file: BinaryIO, path: Path) -> Recall:
        """What finds the requests of `file` again. It takes the file over; `path` is its name in messages."""
        ...


def text_lines(file: BinaryIO) -> Iterator[str]:
    """The lines of a file in UTF-8, whether it begins with a byte order mark or not."""
    for index, line in enumerate(file):
        yield (line if index else line.removeprefix(BOM_UTF8)).decode()


def stored_lines(file: BinaryIO) -> Iterator[Row]:
    """Each line that is not blank, with the byte that it begins with."""
    end = 0
    for line_number, line in enumerate(file, start=1):
        start, end = end, end + len(line)
        if start == 0 and line.startswith(BOM_UTF8):
            start, line = len(BOM_UTF8), line.removeprefix(BOM_UTF8)
        if not line.isspace():
            yield line_number, start, line.decode()
