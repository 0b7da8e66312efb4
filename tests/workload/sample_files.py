"""The sample of each trace format as rows that a test can change and write again."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.workload.formats import write_trace
from ifbbench.workload.reading import read_trace
from ifbbench.workload.trace import Trace

SAMPLES = Path(__file__).parent / "samples"
NAMES = sorted(path.name for path in SAMPLES.iterdir())
Rows = list[dict[str, Any]]


def rows_of(name: str) -> tuple[Rows, Callable[[list[Any]], str]]:
    """The rows of a sample, and a function that writes rows in their place."""
    content = (SAMPLES / name).read_text(encoding="utf-8")
    if name.endswith(".csv"):
        return list(csv.DictReader(io.StringIO(content))), _csv
    if name.endswith(".jsonl"):
        return list(map(json.loads, content.splitlines())), _json_lines
    document = json.loads(re.sub(r"^\s*//.*$", "", content, flags=re.MULTILINE))
    if isinstance(document, list):
        return document, json.dumps
    if "samples" in document or "data" in document:
        key = "samples" if "samples" in document else "data"
        return document[key], lambda rows: json.dumps(document | {key: rows})
    if "resourceSpans" in document:
        spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
        return spans, lambda rows: json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": rows}]}]})
    if "benchmarks" in document:
        successful = document["benchmarks"][0]["requests"]["successful"]
        return successful, lambda rows: json.dumps({"benchmarks": [{"requests": {"successful": rows}}]})
    keys = ("input_lens", "output_lens", "start_times", "errors")
    found = [dict(zip(keys, values, strict=True)) for values in zip(*(document[key] for key in keys), strict=True)]
    return found, lambda rows: json.dumps(
        {key: [row.get(key) if isinstance(row, dict) else row for row in rows] for key in keys}
    )


def _json_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _csv(rows: list[Any]) -> str:
    """Rows as CSV under the keys of the first object; other values in the first column."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(next(row for row in rows if isinstance(row, dict))), extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        writer.writerow(row if isinstance(row, dict) else {next(iter(writer.fieldnames)): row})
    return file.getvalue()


def read_or_refused(path: Path, **options: Any) -> Trace | None:
    """The trace at `path` with all its requests made and written; None if it is refused, with a clear message."""
    try:
        trace = read_trace(path, **options)
    except InputError as error:
        message = str(error)
        if str(path) not in message or "\n" in message or len(message) > 1_000:
            raise AssertionError(f"no clear message: {message[:2_000]}") from error
        return None
    copy = path.with_name("copy")
    write_trace(trace, copy, overwrite=True)
    if list(read_trace(copy)) != list(trace) or not len(trace):
        raise AssertionError(f"not the same when written and read again: {list(trace)[:3]}")
    return trace
