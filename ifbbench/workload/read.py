"""Reading a trace file: which format it is, its rows one by one, and what becomes of bad ones."""

import csv
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TextIO

from ifbbench.errors import InputError
from ifbbench.workload.azure import COLUMNS, AzureFormat
from ifbbench.workload.fields import BadRow, UnknownFormat
from ifbbench.workload.gpt_manager import GptManagerFormat
from ifbbench.workload.jsonl import JsonlFormat
from ifbbench.workload.mooncake import FIELDS as MOONCAKE_FIELDS
from ifbbench.workload.mooncake import MooncakeFormat
from ifbbench.workload.trace import Trace, TraceRequest

LINES_TO_RECOGNISE = 8
UNDERSTOOD = (
    f".jsonl with `arrival_s` (ifbbench) or with {', '.join(MOONCAKE_FIELDS)} (Mooncake), .json with `samples` or a "
    f"list of {{input_ids, output_len}} (gptManagerBenchmark), .csv with {', '.join(COLUMNS)} (Azure LLM inference)"
)


class TraceFormat(Protocol):
    """How one kind of file is read: its rows with where they stand, and the request in a row."""

    name: str

    def rows(self, file: TextIO) -> Iterator[tuple[str, Any]]: ...

    def request(self, row: Any, index: int) -> TraceRequest: ...


def read_trace(path: Path, max_num_samples: int | None = None, skip_bad_rows: bool = False) -> Trace:
    """The first `max_num_samples` good rows of the file at `path`, in order of arrival (equal ones as in the file).

    Reading stops at the last row needed (a .json document is parsed whole). InputError if the file cannot be read,
    is of no known format, has no request, or has a bad row and `skip_bad_rows` is not set.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            trace_format = _recognise(path.suffix.lower(), file)
            file.seek(0)
            requests, skipped = _read_rows(path, file, trace_format, max_num_samples, skip_bad_rows)
        with path.open("rb") as binary:
            sha256 = hashlib.file_digest(binary, "sha256").hexdigest()
    except UnknownFormat as error:
        raise InputError(f"{path}: unknown trace format ({str(error)[:200]}). Understood: {UNDERSTOOD}.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Give a trace file that you can read.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a text file in UTF-8 ({error}). Understood: {UNDERSTOOD}.") from error
    return Trace(path.stem, _by_arrival(requests), sha256, str(path), skipped)


def _read_rows(
    path: Path, file: TextIO, trace_format: TraceFormat, limit: int | None, skip_bad_rows: bool
) -> tuple[list[TraceRequest], int]:
    requests: list[TraceRequest] = []
    first_seen: dict[int, str] = {}
    skipped, first_problem = 0, ""
    for index, (where, row) in enumerate(trace_format.rows(file)):
        try:
            request = trace_format.request(row, index)
            if request.request_id in first_seen:
                raise BadRow(
                    f"field 'request_id' is {request.request_id}, as in {first_seen[request.request_id]}; "
                    "expected each id once"
                )
        except BadRow as error:
            problem = f"{path}, {where}: {error}."
            if not skip_bad_rows:
                raise InputError(f"{problem} Correct the row, or go on past such rows with --skip-bad-rows.") from None
            skipped, first_problem = skipped + 1, first_problem or problem
            continue
        first_seen[request.request_id] = where
        requests.append(request)
        if len(requests) == limit:
            break
    if not requests:
        reason = f"all {skipped} rows are bad; the first: {first_problem}" if skipped else "it has no rows."
        raise InputError(f"{path} holds no request: {reason} Give a trace with at least one request.")
    return requests, skipped


def _by_arrival(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Sorted stably; moved to start at 0 where a row out of order came before the one that times count from."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    earliest_s = ordered[0].arrival_s
    if earliest_s >= 0:
        return ordered
    return [replace(request, arrival_s=request.arrival_s - earliest_s) for request in ordered]


def _recognise(suffix: str, file: TextIO) -> TraceFormat:
    if suffix == ".jsonl":
        return _recognise_jsonl(file)
    if suffix == ".csv":
        return _recognise_csv(file)
    if suffix == ".json":
        return GptManagerFormat()
    raise UnknownFormat(f"suffix {suffix!r}" if suffix else "a name without suffix")


def _recognise_jsonl(file: TextIO) -> TraceFormat:
    """By the first rows that are objects; where none is, the ifbbench reader has the better message."""
    keys: set[str] = set()
    for line in itertools.islice((line for line in file if line.strip()), LINES_TO_RECOGNISE):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        keys |= row.keys() if isinstance(row, dict) else set()
    if "arrival_s" not in keys and keys.issuperset(MOONCAKE_FIELDS):
        return MooncakeFormat()
    if keys and "arrival_s" not in keys:
        raise UnknownFormat(f"rows with {', '.join(sorted(keys))}")
    return JsonlFormat()


def _recognise_csv(file: TextIO) -> TraceFormat:
    header = next(csv.reader(file), [])
    if header and not set(COLUMNS) <= set(header):
        raise UnknownFormat(f"columns {', '.join(header)}")
    return AzureFormat()
