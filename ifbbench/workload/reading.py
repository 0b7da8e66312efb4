"""Reading a trace file: its rows, its format, what becomes of bad rows, and how a request is read again.

Every row is read once, up to the last one needed, but only numbers are kept. The other fields of a row (tokens, prefix,
priority) are read from the file again when its request is asked for.
"""

import csv
import hashlib
import json
import os
import re
import weakref
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import msgspec

from ifbbench.clock import NO_PROGRESS, Progress
from ifbbench.compressed import DamagedFile, content_path, open_to_read
from ifbbench.errors import InputError
from ifbbench.fields import shown
from ifbbench.workload.formats import FORMATS, UNDERSTOOD, Row, TraceFormat
from ifbbench.workload.trace import ID, ColumnsBuilder, Recall, Trace, TraceRequest, no_recall

ROWS_TO_RECOGNISE = 8
ROWS_BETWEEN_REPORTS = 10_000
MakeRequest: TypeAlias = Callable[[Row, int], TraceRequest]


class UnknownFormat(ValueError):
    """What was found where a trace file of a known format was expected. `read_trace` adds the file."""


def read_trace(
    path: Path, max_num_samples: int | None = None, skip_bad_rows: bool = False, accept_cut: bool = False,
    progress: Progress = NO_PROGRESS,
) -> Trace:
    """The first `max_num_samples` good rows of the file at `path`, in order of arrival (equal ones as in the file).

    accept_cut: an incomplete last line, as a killed process leaves it, is skipped. InputError if the file cannot be
    read, has an unknown format, no request, or a bad row where `skip_bad_rows` is not set.
    """
    try:
        file = open_to_read(path, accept_cut)
        size = os.fstat(file.fileno()).st_size
        try:
            suffix = content_path(path).suffix.lower()
            if suffix not in CONTAINERS:
                raise UnknownFormat(f"suffix {suffix!r}" if suffix else "a name without suffix")
            container = CONTAINERS[suffix](file)
            trace_format = _recognise(suffix, container)

            def report(rows: int) -> None:
                if file.closed or max_num_samples:
                    progress.update(rows, max_num_samples, "rows")
                else:
                    progress.update(file.tell(), size, f"{rows:,} rows")

            builder, num_skipped = _read_rows(
                path, container, trace_format, max_num_samples, skip_bad_rows, accept_cut, report
            )
            requests = builder.columns(container.recall(trace_format.request, path))
        except BaseException:
            file.close()
            raise
        with path.open("rb") as binary:
            sha256 = hashlib.file_digest(binary, "sha256").hexdigest()
    except UnknownFormat as error:
        raise InputError(f"{path}: unknown trace format ({str(error)[:200]}). Understood: {UNDERSTOOD}.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Give a trace file that you can read.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a text file in UTF-8 ({error}). Understood: {UNDERSTOOD}.") from error
    except (EOFError, DamagedFile) as error:
        raise InputError(f"{path}: {error}. Give the whole file.") from error
    return Trace(content_path(path).stem, requests.by_arrival(), sha256, str(path), num_skipped)


def _recognise(suffix: str, container: "Container") -> TraceFormat:
    """By the keys of the first rows. Of a file without any, the first format of the suffix has the better message."""
    keys = container.first_keys()
    for trace_format in FORMATS[suffix]:
        if not keys or keys >= trace_format.keys:
            return trace_format()
    raise UnknownFormat(f"rows with {', '.join(sorted(keys))}")


def _read_rows(
    path: Path, container: "Container", trace_format: TraceFormat, limit: int | None, skip_bad_rows: bool,
    accept_cut: bool, report: Callable[[int], None],
) -> tuple[ColumnsBuilder, int]:  # fmt: skip
    """The first `limit` requests, and the number of bad rows among theirs. InputError at a bad row that is not to be
    skipped, and if there is no good one."""
    builder, ids = ColumnsBuilder(), _RowsOfIds()
    num_skipped, first_problem = 0, ""
    parse, make_request = container.parse, trace_format.request
    for index, (row_number, origin, content) in enumerate(container.rows()):
        try:
            request = make_request(parse(content), index)
            first_row = ids.add(request.request_id, row_number)
            if first_row is not None:
                where = container.row_name.format(first_row)
                raise InputError(f"request_id is {request.request_id}, as in {where}; expected each id once.")
        except InputError as error:
            problem = f"{path}, {container.row_name.format(row_number)}: {error}"
            was_cut = accept_cut and isinstance(content, str) and not content.endswith("\n")
            if not skip_bad_rows and not was_cut:
                raise InputError(f"{problem} Correct the row, or skip such rows with --skip-bad-rows.") from None
            num_skipped += 1
            first_problem = first_problem or problem
            continue
        builder.append(request, origin)
        if not len(builder) % ROWS_BETWEEN_REPORTS:
            report(len(builder))
        if len(builder) == limit:
            break
    if not len(builder):
        reason = f"all {num_skipped} rows are bad; the first: {first_problem}" if num_skipped else "it has no rows."
        raise InputError(f"{path} holds no request: {reason} Give a trace with at least one request.")
    return builder, num_skipped


class _RowsOfIds:
    """The row of each request id. While ids ascend, as in most files, they take 16 bytes each."""

    def __init__(self) -> None:
        self._ids, self._rows = array(ID), array(ID)
        self._largest = -1
        self._row_of: dict[int, int] | None = None

    def add(self, request_id: int, row: int) -> int | None:
        """Note an id; returns the row that has it already, None for a new one."""
        if request_id > self._largest:
            self._largest = request_id
        else:
            if self._row_of is None:
                self._row_of = dict(zip(self._ids, self._rows, strict=True))
            if request_id in self._row_of:
                return self._row_of[request_id]
        if self._row_of is not None:
            self._row_of[request_id] = row
        else:
            self._ids.append(request_id)
            self._rows.append(row)
        return None


# Where rows are in a file.

_decode = msgspec.json.Decoder().decode


def json_object(text: str) -> dict[str, Any]:
    """The JSON object in `text`, or InputError."""
    try:
        value = _decode(text)
    except (ValueError, RecursionError):
        try:
            value = json.loads(text)  # takes NaN as well, and has the better messages
        except (ValueError, RecursionError) as error:
            raise InputError(f"not valid JSON ({error}); expected one JSON object.") from None
    return checked_object(value)


def checked_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{shown(value)} is not valid; expected a JSON object.")
    return value


class Container(Protocol):
    """A kind of file that holds rows. row_name: template of what a message calls the row of a number."""

    row_name: str

    def __init__(self, file: BinaryIO) -> None: ...

    def first_keys(self) -> set[str]:
        """The keys of the first ROWS_TO_RECOGNISE rows."""
        ...

    def rows(self) -> Iterator[tuple[int, int, Any]]:
        """(number, origin, content) of each row; `parse` takes the content, and `recall` finds the row by origin."""
        ...

    def parse(self, content: Any) -> Row:
        """The keys and values of a row; InputError if it has none."""
        ...

    def recall(self, make_request: MakeRequest, path: Path) -> Recall:
        """Makes the request of an origin again. The container closes the file when it is not needed any more."""
        ...


class JsonLines:
    """JSON objects, one a line. The origin of a row is its first byte."""

    row_name = "line {}"
    parse = staticmethod(json_object)

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def first_keys(self) -> set[str]:
        keys: set[str] = set()
        for _, _, line in islice(self.rows(), ROWS_TO_RECOGNISE):
            with suppress(InputError):
                keys |= json_object(line).keys()
        return keys

    def rows(self) -> Iterator[tuple[int, int, str]]:
        """Each line that is not blank."""
        self._file.seek(0)
        end = 0
        for line_number, line in enumerate(self._file, start=1):
            start, end = end, end + len(line)
            if start == 0 and line.startswith(BOM_UTF8):
                start, line = len(BOM_UTF8), line.removeprefix(BOM_UTF8)
            if not line.isspace():
                yield line_number, start, line.decode()

    def recall(self, make_request: MakeRequest, path: Path) -> Recall:
        file = self._file

        def request_at(origin: int) -> TraceRequest:
            file.seek(origin)
            line = file.readline()
            try:
                return make_request(json_object(line.decode()), 0)
            except (InputError, UnicodeDecodeError, OSError) as error:
                raise InputError(
                    f"{path} was changed during the replay: {error}, at byte {origin}. Replay it again, and do not "
                    "write to it meanwhile."
                ) from error

        weakref.finalize(request_at, file.close)
        return request_at


class CsvTable:
    """Rows of a CSV file with a header, as texts by column name. All formats in CSV have only numbers."""

    row_name = "line {}"

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def first_keys(self) -> set[str]:
        return set(next(csv.reader(_text_lines(self._file)), []))

    def rows(self) -> Iterator[tuple[int, int, Row]]:
        """Each row that is not empty."""
        self._file.seek(0)
        reader = csv.reader(_text_lines(self._file))
        header = next(reader, [])
        for row in reader:
            if row:
                yield reader.line_num, reader.line_num, dict(zip(header, row, strict=False))

    def parse(self, content: Row) -> Row:
        return content

    def recall(self, make_request: MakeRequest, path: Path) -> Recall:
        self._file.close()
        return no_recall


class JsonDocument:
    """A list of JSON objects, alone or as `samples` of an object; `//` comments are ignored. It is kept in memory."""

    row_name = "samples[{}]"
    parse = staticmethod(checked_object)

    def __init__(self, file: BinaryIO) -> None:
        text = "".join(_text_lines(file))
        file.close()
        document = _commented_json(text) if text.strip() else []
        if isinstance(document, dict) and "samples" not in document:
            raise UnknownFormat(f"an object with {', '.join(map(str, document)) or 'no keys'}")
        self._samples = document["samples"] if isinstance(document, dict) else document
        if not isinstance(self._samples, list):
            raise UnknownFormat("no list of samples")

    def first_keys(self) -> set[str]:
        return {key for sample in self._samples[:ROWS_TO_RECOGNISE] if isinstance(sample, dict) for key in sample}

    def rows(self) -> Iterator[tuple[int, int, Any]]:
        return ((index, index, sample) for index, sample in enumerate(self._samples))

    def recall(self, make_request: MakeRequest, path: Path) -> Recall:
        return lambda index: make_request(self._samples[index], index)


CONTAINERS: dict[str, type[Container]] = {".jsonl": JsonLines, ".csv": CsvTable, ".json": JsonDocument}
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*')


def _commented_json(text: str) -> Any:
    """The JSON document in `text` without its `//` comments; UnknownFormat (with the line) if it is not JSON."""
    if "//" in text:
        text = _STRING_OR_COMMENT.sub(lambda match: match[0] if match[0].startswith('"') else "", text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnknownFormat(f"not valid JSON: {error}") from None


def _text_lines(file: BinaryIO) -> Iterator[str]:
    """The lines of a file in UTF-8, without a byte order mark."""
    for index, line in enumerate(file):
        yield (line if index else line.removeprefix(BOM_UTF8)).decode()
