"""Reading a trace file: its rows, its format, what becomes of bad rows, and how a request is read again.

Every row is read once, up to the last one needed, but only numbers are kept. The other fields of a row (tokens, prefix,
priority) are read from the file again when its request is asked for.
"""

import hashlib
import json
import logging
import os
import re
import weakref
from array import array
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from ifbbench.compressed import STANDARD_INPUT, DamagedFile, bounded_lines, content_path, open_to_read
from ifbbench.errors import InputError
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.settings.fields import shown
from ifbbench.workload.containers import (
    ROWS_TO_RECOGNISE,
    SPANS,
    CsvTable,
    DoubledColumn,
    JsonDocument,
    UnknownFormat,
    parquet_as_json_lines,
)
from ifbbench.workload.formats import IfbbenchFormat, ReadOptions, Row, TraceFormat, json_object, json_row
from ifbbench.workload.recorded_formats import (
    AzureFormat,
    BailianFormat,
    BurstGptFormat,
    LengthsFormat,
    MooncakeFormat,
    TableFormat,
    table_format,
)
from ifbbench.workload.server_formats import OpenTelemetryFormat, UsageLogFormat, has_usage
from ifbbench.workload.tool_formats import (
    AiperfFormat,
    GptManagerFormat,
    GuidellmFormat,
    OpenAiBatchFormat,
    OpenAiBatchOutputFormat,
    ShareGptFormat,
    TrtllmBenchFormat,
    VllmDatasetFormat,
    VllmResultFormat,
)
from ifbbench.workload.trace import ID, ColumnsBuilder, Recall, Trace, TraceRequest

FORMATS: dict[str, type[TraceFormat]] = {
    "ifbbench": IfbbenchFormat,
    "table": TableFormat,
    "azure": AzureFormat,
    "burstgpt": BurstGptFormat,
    "lengths": LengthsFormat,
    "bailian": BailianFormat,
    "opentelemetry": OpenTelemetryFormat,
    "usage-log": UsageLogFormat,
    "aiperf": AiperfFormat,
    "mooncake": MooncakeFormat,
    "gptmanager": GptManagerFormat,
    "trtllm-bench": TrtllmBenchFormat,
    "sharegpt": ShareGptFormat,
    "openai-batch": OpenAiBatchFormat,
    "openai-batch-output": OpenAiBatchOutputFormat,
    "vllm-result": VllmResultFormat,
    "guidellm": GuidellmFormat,
    "vllm-dataset": VllmDatasetFormat,
}
"""By the names of --trace_format, in the order in which they are tried."""

ROWS_BETWEEN_REPORTS = 10_000
MAX_PARTS = 1 << 16
"""Requests that one row may hold: an origin is that of the row times this, plus the position among its requests."""

_log = logging.getLogger("ifbbench")


def read_trace(
    path: Path,
    max_num_samples: int | None = None,
    skip_bad_rows: bool = False,
    accept_cut: bool = False,
    options: ReadOptions | None = None,
    progress: Progress = NO_PROGRESS,
) -> Trace:
    """The first `max_num_samples` good requests of the file at `path` (`-`: standard input), by arrival, stably.

    accept_cut: an incomplete last line, as a killed process leaves it, is skipped. InputError if the file cannot be
    read, has an unknown format, no request, or a bad row where `skip_bad_rows` is not set.
    """
    options = options or ReadOptions()
    try:
        file = given = open_to_read(path, accept_cut)
        try:
            sha256 = _sha256(path, file)
            given.seek(0)
            is_parquet = given.read(len(PARQUET)) == PARQUET
            given.seek(0)
            if is_parquet:
                file = parquet_as_json_lines(path, given)
            size = os.fstat(file.fileno()).st_size
            container = _container(file)
            if file is not given:
                container.row_name = "row {}"
            trace_format = _recognise(container, options)

            def report(rows: int) -> None:
                if file.closed or max_num_samples:
                    progress.update(rows, max_num_samples, "rows")
                else:
                    progress.update(file.tell(), size, f"{rows:,} rows")

            builder, num_skipped, num_failed = _read_rows(
                path, container, trace_format, max_num_samples, skip_bad_rows, accept_cut, report
            )
            requests = builder.columns(_recall(path, container, trace_format))
        except BaseException:
            file.close()
            raise
    except DoubledColumn as error:
        raise InputError(f"{path}, line 1: {error}") from None
    except UnknownFormat as error:
        found, nearest = str(error.args[0])[:200], "".join(error.args[1:])
        raise InputError(f"{path}: unknown trace format ({found}).{nearest} {ADVICE}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Give a trace file that you can read.") from error
    except (EOFError, DamagedFile) as error:
        raise InputError(f"{path}: {error}. Give the whole file.") from error
    left_out = [f"{trace_format.left_out} are left out: {num_failed:,}"] if num_failed else []
    notes = trace_format.notes() + left_out
    for note in notes:
        _log.warning("%s: %s.", path, note, extra={"once": True})
    name = "stdin" if str(path) == STANDARD_INPUT else content_path(path).stem
    return Trace(name, requests.by_arrival(), sha256, str(path), num_skipped, tuple(notes))


def _sha256(path: Path, content: BinaryIO) -> str:
    """The digest of the bytes of the file; of its content, if it can be read only once."""
    if not path.is_file():
        return hashlib.file_digest(cast(BufferedReader, content), "sha256").hexdigest()
    with path.open("rb") as binary:
        return hashlib.file_digest(binary, "sha256").hexdigest()


def _read_rows(
    path: Path,
    container: "Container",
    trace_format: TraceFormat,
    limit: int | None,
    skip_bad_rows: bool,
    accept_cut: bool,
    report: Callable[[int], None],
) -> tuple[ColumnsBuilder, int, int]:
    """The first `limit` requests, and the numbers of bad rows and of failed requests before the last of them.
    InputError at a bad row that is not to be skipped, and if there is no good one."""
    builder, ids = ColumnsBuilder(), _RowsOfIds()
    num_skipped, num_failed, first_problem = 0, 0, ""
    parse, make_requests = container.parse, trace_format.requests
    index = 0
    for row_number, origin, content in container.rows():
        try:
            requests = make_requests(parse(content), index)
            if len(requests) > MAX_PARTS:
                raise InputError(f"it holds {len(requests)} requests; expected at most {MAX_PARTS} in a row.")
            for request in requests:
                first_row = ids.add(request.request_id, row_number)
                if first_row is not None:
                    where = container.row_name.format(first_row)
                    raise InputError(f"request_id is {request.request_id}, as in {where}; expected each id once.")
        except InputError as error:
            index += 1
            problem = f"{path}, {container.row_name.format(row_number)}: {error}"
            was_cut = accept_cut and isinstance(content, bytes) and not content.endswith(b"\n")
            if not skip_bad_rows and not was_cut:
                raise InputError(f"{problem} Correct the row, or skip such rows with --skip-bad-rows.") from None
            num_skipped += 1
            first_problem = first_problem or problem
            continue
        index += len(requests) or 1
        num_failed += not requests
        for part, request in enumerate(requests):
            builder.append(request, origin * MAX_PARTS + part)
            if not len(builder) % ROWS_BETWEEN_REPORTS:
                report(len(builder))
            if len(builder) == limit:
                return builder, num_skipped, num_failed
    if not len(builder):
        reason = f"all {num_skipped} rows are bad; the first: {first_problem}" if num_skipped else "it has no rows."
        if num_failed and not num_skipped:
            reason = f"{trace_format.left_out} are left out, and all {num_failed} are such."
        raise InputError(f"{path} holds no request: {reason} Give a trace with at least one request.")
    return builder, num_skipped, num_failed


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


def _recall(path: Path, container: "Container", trace_format: TraceFormat) -> Recall:
    """Makes the request of an origin again."""

    def request_at(origin: int) -> TraceRequest:
        row, part = divmod(origin, MAX_PARTS)
        try:
            return trace_format.requests(container.row_at(row), 0)[part]
        except (InputError, OSError, IndexError, StopIteration) as error:
            raise InputError(
                f"{path} was changed during the replay: {error}, at byte {row}. Replay it again, and do not write to "
                "it meanwhile."
            ) from error

    container.close_with(request_at)
    return request_at


# Recognising.

SAMPLE_BYTES = 1 << 16
PARQUET = b"PAR1"
BINARY_FILES = {
    b"PK": "zip",
    b"SQLite": "SQLite",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"%PDF": "PDF",
    b"ARROW1": "Arrow",
}
ADVICE = (
    f"Known formats: {', '.join(FORMATS)} (docs/traces.md has their keys). Name one with --trace_format, or the "
    "columns of any CSV, JSON lines or Parquet with --columns prompt_len=NAME,output_len=NAME,arrival_s=NAME."
)
DOCUMENT_KEYS = frozenset({"samples", "data", "benchmarks", "input_lens"})
_DOCUMENT = re.compile(rf'(?<!\\)"(?:{"|".join(DOCUMENT_KEYS)})"\s*:\s*\['.encode())


def _container(file: BinaryIO) -> "Container":
    """The kind of file, by the beginning of its content."""
    file.seek(0)
    sample = file.read(SAMPLE_BYTES)
    kind = next((kind for magic, kind in BINARY_FILES.items() if sample.startswith(magic)), None)
    if kind or not _is_text(sample):
        raise UnknownFormat(f"a {kind} file" if kind else "not a text file in UTF-8")
    start = sample.removeprefix(BOM_UTF8).lstrip()
    if start.startswith((b"[", b"//")) or (start.startswith(b"{") and _is_document(start)):
        return JsonDocument(file)
    lines = start.splitlines()[:ROWS_TO_RECOGNISE]
    objects = sum(line.lstrip().startswith(b"{") for line in lines)
    return JsonLines(file) if start.startswith(b"{") or 2 * objects >= len(lines) else CsvTable(file)


def _is_text(sample: bytes) -> bool:
    """Whether a file that starts with `sample` is text in UTF-8. The sample may end within a character."""
    try:
        return "\0" not in getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False


def _is_document(start: bytes) -> bool:
    """Whether a file that starts with an object is one JSON document, not JSON lines."""
    line, _, rest = start.partition(b"\n")
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        goes_on = line.rstrip().endswith((b"{", b"[", b",")) and rest.lstrip().startswith(b'"')
        return goes_on or line.strip() == b"{" or bool(_DOCUMENT.search(start))
    return not rest.strip() and not (DOCUMENT_KEYS | {SPANS}).isdisjoint(first)


def _recognise(container: "Container", options: ReadOptions) -> TraceFormat:
    """The format asked for, or by the keys of the first rows. ifbbench's own has the best messages for a file without
    any."""
    keys = container.first_keys()
    if options.columns is not None:
        if options.trace_format is not None:
            raise InputError("--columns and --trace_format exclude each other. Leave out one of them.")
        return table_format(options.columns, keys)(keys, options)
    if options.trace_format is not None:
        return FORMATS[options.trace_format](keys, options)
    if not keys:
        return IfbbenchFormat(keys, options)
    missing = {name: _missing(one, keys, container) for name, one in FORMATS.items()}
    for name, needs in missing.items():
        if not needs:
            return FORMATS[name](keys, options)
    if _has_usage(container):
        return UsageLogFormat(keys, options)
    found = ", ".join(sorted(shown(key)[1:-1] for key in keys))
    name = min(missing, key=lambda one: (len(missing[one]) / len(FORMATS[one].needs), len(missing[one])))
    nearest = ""
    if len(missing[name]) < len(FORMATS[name].needs):
        wanted = ", ".join(need.replace("|", " or ") for need in missing[name])
        nearest = f" The nearest format is {name}; missing: {wanted}."
    raise UnknownFormat(f"rows with {found}", nearest)


def _has_usage(container: "Container") -> bool:
    """Whether one of the first rows has the usage of a request in a nested object."""
    for _, _, content in islice(container.rows(), ROWS_TO_RECOGNISE):
        with suppress(InputError):
            if has_usage(container.parse(content)):
                return True
    return False


def _missing(trace_format: type[TraceFormat], keys: Collection[str], container: "Container") -> list[str]:
    """The keys that rows of a format need and the file does not have."""
    if trace_format is IfbbenchFormat and isinstance(container, CsvTable):
        return list(trace_format.needs)  # its values are no texts: a table with these names is `table`
    if trace_format.mark in keys:
        return []
    return [need for need in trace_format.needs if not any(key in keys for key in need.split("|"))]


class Container(Protocol):
    """A kind of file that holds rows.

    row_name: template of what a message calls the row of a number.
    """

    row_name: str

    def __init__(self, file: BinaryIO) -> None: ...

    def first_keys(self) -> set[str]:
        """The keys of the first ROWS_TO_RECOGNISE rows."""
        ...

    def rows(self) -> Iterator[tuple[int, int, Any]]:
        """(number, origin, content) of each row; `parse` takes the content."""
        ...

    def parse(self, content: Any) -> Row:
        """The keys and values of a row; InputError if it has none."""
        ...

    def row_at(self, origin: int) -> Row:
        """The row of an origin again."""
        ...

    def close_with(self, owner: Any) -> None:
        """Close the file when `owner` is not needed any more."""
        ...


class JsonLines:
    """JSON objects, one a line. The origin of a row is its first byte."""

    row_name = "line {}"
    parse = staticmethod(json_row)

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def first_keys(self) -> set[str]:
        keys: set[str] = set()
        for _, _, line in islice(self.rows(), ROWS_TO_RECOGNISE):
            with suppress(InputError):
                keys |= json_object(line).keys()
        return keys

    def rows(self) -> Iterator[tuple[int, int, bytes | None]]:
        """Each line that is not blank; None for one that is too long."""
        return (row for row in bounded_lines(self._file) if row[2] is None or (row[2] and not row[2].isspace()))

    def row_at(self, origin: int) -> dict[str, Any]:
        self._file.seek(origin)
        return json_object(self._file.readline())

    def close_with(self, owner: Any) -> None:
        weakref.finalize(owner, self._file.close)
