"""Reading a trace file: which format it is, its rows one by one, and what becomes of bad ones."""

import csv
import hashlib
import itertools
import json
from pathlib import Path
from typing import BinaryIO

from ifbbench.compressed import DamagedFile, content_path, open_to_read
from ifbbench.errors import InputError
from ifbbench.workload.azure import COLUMNS, AzureFormat
from ifbbench.workload.fields import UnknownFormat
from ifbbench.workload.gpt_manager import GptManagerFormat
from ifbbench.workload.jsonl import JsonlFormat
from ifbbench.workload.mooncake import FIELDS as MOONCAKE_FIELDS
from ifbbench.workload.mooncake import MooncakeFormat
from ifbbench.workload.row_reader import RowReader
from ifbbench.workload.rows import TraceFormat, stored_lines, text_lines
from ifbbench.workload.trace import Trace

LINES_TO_RECOGNISE = 8
UNDERSTOOD = (
    f".jsonl with `arrival_s` (ifbbench) or with {', '.join(MOONCAKE_FIELDS)} (Mooncake), .json with `samples` or a "
    f"list of {{input_ids, output_len}} (gptManagerBenchmark), .csv with {', '.join(COLUMNS)} (Azure LLM inference); "
    "each may be compressed (.gz)"
)


def read_trace(
    path: Path, max_num_samples: int | None = None, skip_bad_rows: bool = False, accept_cut: bool = False
) -> Trace:
    """The first `max_num_samples` good rows of the file at `path`, in order of arrival (equal ones as in the file).

    Every row is looked at now, up to the last one needed (a .json document is parsed whole), but only numbers are kept:
    what else a row holds is read again when the request is asked for. `accept_cut`: an end that was cut off, as a
    killed process leaves it, is a row to be skipped. InputError if the file cannot be read, is of no known format, has
    no request, or has a bad row and `skip_bad_rows` is not set.
    """
    try:
        file = open_to_read(path, accept_cut)
        try:
            trace_format = _recognise(content_path(path).suffix.lower(), file)
            file.seek(0)
            rows = RowReader(path, trace_format, skip_bad_rows, accept_cut)
            rows.read(file, max_num_samples)
            requests = rows.builder.columns(trace_format.recall(file, path))
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
    return Trace(content_path(path).stem, requests.by_arrival(), sha256, str(path), rows.skipped)


def _recognise(suffix: str, file: BinaryIO) -> TraceFormat:
    if suffix == ".jsonl":
        return _recognise_jsonl(file)
    if suffix == ".csv":
        return _recognise_csv(file)
    if suffix == ".json":
        return GptManagerFormat()
    raise UnknownFormat(f"suffix {suffix!r}" if suffix else "a name without suffix")


def _recognise_jsonl(file: BinaryIO) -> TraceFormat:
    """By the first rows that are objects; where none is, the ifbbench reader has the better message."""
    keys: set[str] = set()
    for _, _, line in itertools.islice(stored_lines(file), LINES_TO_RECOGNISE):
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


def _recognise_csv(file: BinaryIO) -> TraceFormat:
    header = next(csv.reader(text_lines(file)), [])
    if header and not set(COLUMNS) <= set(header):
        raise UnknownFormat(f"columns {', '.join(header)}")
    return AzureFormat()
