"""Files that hold rows: CSV tables, JSON documents and Parquet. JSON lines are in `reading`."""

import csv
import json
import re
import weakref
from array import array
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from io import SEEK_END
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np

from ifbbench.compressed import DamagedFile, bounded_lines
from ifbbench.errors import InputError
from ifbbench.settings.fields import shown
from ifbbench.workload.formats import TOO_LONG, Row, checked_object, json_row, json_value, objects
from ifbbench.workload.trace import ID

ROWS_TO_RECOGNISE = 8
ROWS_OF_BATCH = 1_000
SPANS = "resourceSpans"


class UnknownFormat(ValueError):
    """What was found where a trace file of a known format was expected, and what comes near. `read_trace` adds the
    file."""


class DoubledColumn(InputError):
    """A column that the header of a table names twice. `read_trace` adds the file."""


class CsvTable:
    """Rows of a CSV file with a header, as texts by column name. The origin of a row is its first byte."""

    row_name = "line {}"

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._dialect = ","
        self._header = self._read_header()

    def _read_header(self) -> list[str]:
        first = next((line for _, _, line in bounded_lines(self._file) if line is None or not line.isspace()), b"")
        if first is None:
            raise UnknownFormat(f"the first line is {TOO_LONG}")
        line = first.decode(errors="replace")
        self._dialect = max((",", "\t", ";"), key=line.count)
        try:
            header = [name.strip() for name in next(csv.reader([line], delimiter=self._dialect), [])]
        except csv.Error as error:
            raise UnknownFormat(f"the first line is no header of CSV: {error}") from None
        doubled = next((name for name, count in Counter(filter(None, header)).items() if count > 1), None)
        if doubled is not None:
            raise DoubledColumn(f"the column {shown(doubled)} is there twice; expected each name once. Rename one.")
        return header

    def first_keys(self) -> set[str]:
        return set(self._header)

    def rows(self) -> Iterator[tuple[int, int, list[str] | str]]:
        """Each row that is not empty; a text instead of a row that cannot be read, saying why."""
        starts: list[int] = []  # of the lines of the row that is read; quoted fields may hold line breaks
        too_long = False

        def texts() -> Iterator[str]:
            nonlocal too_long
            for _, start, line in bounded_lines(self._file):
                starts.append(start)
                too_long = line is None
                yield "" if line is None else line.decode(errors="replace")

        reader = csv.reader(texts(), delimiter=self._dialect)
        is_header = True
        while True:
            starts.clear()
            try:
                row: list[str] | str = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                row = f"not valid CSV ({error})."
            if too_long:
                row = TOO_LONG
            if is_header and row:
                is_header = False
            elif row:
                yield reader.line_num, starts[0], row

    def parse(self, content: list[str] | str) -> dict[str, str]:
        if isinstance(content, str):
            raise InputError(content)
        return dict(zip(self._header, content, strict=False))

    def row_at(self, origin: int) -> dict[str, str]:
        """The row of an origin again."""
        self._file.seek(origin)
        texts = (line.decode(errors="replace") for line in iter(self._file.readline, b""))
        return self.parse(next(csv.reader(texts, delimiter=self._dialect)))

    def close_with(self, owner: Any) -> None:
        """Close the file when `owner` is not needed any more."""
        weakref.finalize(owner, self._file.close)


class JsonDocument:
    """A JSON file that is one list of objects, or an object that holds them; `//` comments are ignored.

    Rows are those of `samples` (gptManagerBenchmark), of `data` (aiperf, Jaeger), of the requests of `benchmarks`
    (guidellm), the spans of `resourceSpans` (OTLP), or one for each value of `input_lens` (vLLM). The first two, and a
    list alone, are read from the file row by row; a document with comments or NaN, and those of results, are kept in
    memory.
    """

    row_name = "samples[{}]"

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._values: list[Any] | None = None
        self._starts, self._lengths = array(ID), array(ID)
        if file.seek(0, SEEK_END):
            try:
                self._find_rows(mmap(file.fileno(), 0, access=ACCESS_READ))
            except InputError as error:
                raise UnknownFormat(str(error)) from None

    def _find_rows(self, text: mmap) -> None:
        try:
            document = msgspec.json.decode(text, type=list[msgspec.Raw] | _Document)
        except (ValueError, RecursionError):
            document = _commented_json(text[:].removeprefix(BOM_UTF8))
        parts: dict[str, Any] = {}
        if isinstance(document, _Document):
            parts = {name: part for name, part in msgspec.structs.asdict(document).items() if part is not msgspec.UNSET}
            parts = parts or msgspec.json.decode(text, type=dict[str, Any])
        elif isinstance(document, dict):
            parts = document
        elif not isinstance(document, list):
            raise UnknownFormat(f"one JSON value, {shown(document)}")
        rows = document if isinstance(document, list) else self._rows_of(parts)
        if rows and isinstance(rows[0], msgspec.Raw):
            base = _address(text)
            self._starts.extend(_address(row) - base for row in rows)
            self._lengths.extend(len(memoryview(row)) for row in rows)
        else:
            self._values = rows

    def _rows_of(self, parts: dict[str, Any]) -> list[Any]:
        for name in ("samples", "data"):
            if name in parts:
                self.row_name = f"{name}[{{}}]"
                if not isinstance(parts[name], list):
                    raise UnknownFormat(f"no list of {name}")
                return list(parts[name])
        self.row_name = "request {}"
        if SPANS in parts:
            self.row_name = "span {}"
            return sorted(otlp_spans(parts), key=end_of_span)
        if "benchmarks" in parts:
            return list(_guidellm_rows(_value(parts["benchmarks"])))
        if "input_lens" in parts:
            return list(_vllm_rows({name: _value(parts[name]) for name in VLLM_COLUMNS if name in parts}))
        raise UnknownFormat(f"an object with {', '.join(shown(name)[1:-1] for name in parts) or 'no keys'}")

    def __len__(self) -> int:
        return len(self._starts if self._values is None else self._values)

    def first_keys(self) -> set[str]:
        keys: set[str] = set()
        for index in range(min(len(self), ROWS_TO_RECOGNISE)):
            with suppress(InputError):
                keys |= self.row_at(index).keys()
        return keys

    def rows(self) -> Iterator[tuple[int, int, int]]:
        return ((index, index, index) for index in range(len(self)))

    def row_at(self, origin: int) -> dict[str, Any]:
        if self._values is not None:
            return checked_object(self._values[origin])
        self._file.seek(self._starts[origin])
        return checked_object(json_value(self._file.read(self._lengths[origin])))

    def parse(self, content: int) -> dict[str, Any]:
        if self._values is not None:
            return self.row_at(content)
        self._file.seek(self._starts[content])
        return json_row(self._file.read(self._lengths[content]))

    def close_with(self, owner: Any) -> None:
        weakref.finalize(owner, self._file.close)


class _Document(msgspec.Struct):
    """The parts of a document that hold rows."""

    samples: list[msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET
    data: list[msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET
    benchmarks: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input_lens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    output_lens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    start_times: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    errors: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _address(buffer: Any) -> int:
    """The address of the first byte of a buffer."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _value(content: Any) -> Any:
    """The JSON value of a part of a document."""
    return json_value(content) if isinstance(content, msgspec.Raw) else content


VLLM_COLUMNS = ("input_lens", "output_lens", "start_times", "errors")


def _vllm_rows(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each value of the columns; UnknownFormat if they differ in length."""
    for name, column in columns.items():
        if not isinstance(column, list):
            raise UnknownFormat(f"no list of {name}")
        if len(column) != len(columns["input_lens"]):
            raise UnknownFormat(f"{len(column)} {name} for {len(columns['input_lens'])} input_lens")
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _guidellm_rows(benchmarks: Any) -> Iterator[Any]:
    """The requests of all benchmarks, each with its `status`."""
    for benchmark in benchmarks if isinstance(benchmarks, list) else [None]:
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        if isinstance(requests, list):
            yield from requests
        elif isinstance(requests, dict):
            for status, rows in requests.items():
                for row in rows if isinstance(rows, list) else ():
                    yield row | {"status": status} if isinstance(row, dict) else row
        else:
            raise UnknownFormat("benchmarks without requests")


def otlp_spans(document: Row) -> Iterator[Row]:
    """The spans of an object in the JSON of OTLP. InputError where they are no objects."""
    for number, resource in enumerate(objects(document, SPANS)):
        # Before version 0.19 of OTLP it was instrumentationLibrarySpans.
        name = "scopeSpans" if "scopeSpans" in resource else "instrumentationLibrarySpans"
        for scope in objects(resource, name, f"{SPANS}[{number}]."):
            yield from objects(scope, "spans", f"{SPANS}[{number}].{name}[].")


def end_of_span(span: Row) -> tuple[float, float]:
    """The order of spans in which one comes before a span that contains it: by end, then the latest start first."""
    try:
        if "startTimeUnixNano" in span:
            return float(span.get("endTimeUnixNano") or 0), -float(span["startTimeUnixNano"])
        start_us = float(span.get("startTime") or 0)
        return start_us + float(span.get("duration") or 0), -start_us
    except (TypeError, ValueError, OverflowError):
        return 0.0, 0.0  # its format names what is wrong


def parquet_as_json_lines(path: Path, file: BinaryIO) -> BinaryIO:
    """A temporary file of the rows of `file`, the Parquet content of `path`, as JSON lines; `file` is closed. Times are
    texts. InputError without the package pyarrow, DamagedFile if the content is not valid."""
    from tempfile import TemporaryFile

    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(
            f"{path}: reading a Parquet file needs the package pyarrow; install it with "
            "`pip install 'ifbbench[parquet]'`, or write the trace as JSON lines."
        ) from None
    lines = TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with file:
            for batch in ParquetFile(file).iter_batches(ROWS_OF_BATCH):
                for row in batch.to_pylist():
                    lines.write(json.dumps(row, default=str).encode() + b"\n")
    except (ArrowException, OSError, ValueError) as error:
        lines.close()
        raise DamagedFile(f"not a valid Parquet file ({str(error).splitlines()[0][:200]})") from error
    except BaseException:
        lines.close()
        raise
    lines.seek(0)
    return cast(BinaryIO, lines)


_STRING_OR_COMMENT = re.compile(rb'"(?:\\.|[^"\\])*"|//[^\n]*')


def _commented_json(text: bytes) -> Any:
    """The JSON document in `text`, without its `//` comments; UnknownFormat (with the line) if it is not JSON."""
    if not text.strip():
        return []
    if b"//" in text:
        text = _STRING_OR_COMMENT.sub(lambda match: match[0] if match[0].startswith(b'"') else b"", text)
    try:
        return json.loads(text)  # takes NaN as well, and has the better messages
    except (ValueError, RecursionError) as error:
        raise UnknownFormat(f"not valid JSON: {str(error)[:200]}") from None
