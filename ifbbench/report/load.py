"""A run directory as tables: what every report reads."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ifbbench.errors import InputError
from ifbbench.recording.run_directory import OPEN_SPANS
from ifbbench.report.jsonl import read_lines, read_object

ITERATION_FIELDS = ("Iteration Counter", "ifbbench")
ITERATION_COLUMNS = (
    "iteration_counter", "active_request_count", "max_request_count", "max_kv_cache_blocks", "free_kv_cache_blocks",
    "used_kv_cache_blocks", "tokens_per_kv_cache_block", "scheduled_requests", "context_requests",
    "generation_requests", "total_context_tokens", "paused_requests", "start_s", "latency_ms", "host_ms", "device_ms",
    "queued", "bound_by", "first_left_out_request", "first_left_out_reason", "paused", "pauses", "tokens_recomputed",
    "budget_used", "kv_fragmentation",
)  # fmt: skip
SPAN_FIELDS = ("request_id", "phase", "first_iteration", "last_iteration", "tokens")
SPAN_COLUMNS = (*SPAN_FIELDS, "cause", "chunks", "first_output", "produced")
REQUEST_FIELDS = ("request_id", "outcome")
REQUEST_COLUMNS = (
    "request_id", "index", "arrival_s", "prompt_len", "output_len", "max_new_tokens", "queue_time_s", "ttft_s",
    "tpot_s", "e2e_s", "pauses", "recomputed_tokens", "reused_tokens", "attribution_s", "outcome", "error",
    "first_scheduled_s", "first_token_s", "end_s",
)  # fmt: skip
NOT_NUMBERS = {
    "request_id", "attribution_s", "outcome", "error", "bound_by", "first_left_out_request", "first_left_out_reason",
    "paused", "phase", "cause", "chunks",
}  # fmt: skip


@dataclass(frozen=True)
class RunData:
    """One run directory.

    `run` is run.json and `summary` summary.json, None where the run was killed. The tables have one row a line of
    their file. `iterations`, in order of `iteration_counter`, has the fields in snake_case, those under "ifbbench"
    beside them, and `pauses`, the number of requests that the iteration paused; `spans` are by request and first
    iteration; `requests` by their index in the trace. Request ids are texts. `partial` says that the run did not reach
    its end, so that figures cover only what it had done.
    """

    path: Path
    run: dict[str, Any]
    iterations: pd.DataFrame
    spans: pd.DataFrame
    requests: pd.DataFrame
    summary: dict[str, Any] | None
    partial: bool

    @property
    def name(self) -> str:
        """The run's name; its directory's where run.json has none."""
        return str(self.run.get("name") or self.path.resolve().name)

    @property
    def config(self) -> dict[str, Any]:
        """Setting name to resolved value."""
        return dict(self.run.get("config") or {})

    @property
    def completed(self) -> pd.DataFrame:
        """The requests that were answered in full: those that latencies are of."""
        return self.requests[self.requests["outcome"] == "completed"]


def find_runs(path: Path) -> list[Path]:
    """`path` itself if it is a run directory, or else every run directory below it, by name; InputError if none."""
    if (path / "run.json").is_file():
        return [path]
    found = sorted(file.parent for file in path.rglob("run.json")) if path.is_dir() else []
    if not found:
        what = "holds no run" if path.is_dir() else "is not a directory"
        raise InputError(
            f"{path}: {what}; expected a directory with run.json, or one above such directories. "
            "`ifbbench run` writes them, by default below results/."
        )
    return found


def load_run(path: Path) -> RunData:
    """Read the run directory `path`, of a finished or of a killed run; InputError names the file and line at fault."""
    path = find_run(path)
    iterations, iterations_cut = read_lines(path / "iterations.jsonl", ITERATION_FIELDS)
    spans, spans_cut = read_lines(path / "spans.jsonl", SPAN_FIELDS)
    spans += _open_spans(path, spans)
    requests, requests_cut = read_lines(path / "requests.jsonl", REQUEST_FIELDS)
    run = read_object(path / "run.json")
    summary = read_object(path / "summary.json") if (path / "summary.json").exists() else None
    marked = bool(run.get("partial") or (summary or {}).get("partial"))
    return RunData(
        path=path,
        run=run,
        iterations=_iteration_table(iterations),
        spans=_span_table(spans),
        requests=_request_table(requests),
        summary=summary,
        partial=marked or summary is None or iterations_cut or spans_cut or requests_cut,
    )


def _open_spans(path: Path, closed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was going on when a killed run was last flushed; spans that were closed in that moment are known already."""
    if not (path / OPEN_SPANS).exists():
        return []
    known = {(span["request_id"], span["first_iteration"]) for span in closed}
    rows, _ = read_lines(path / OPEN_SPANS, SPAN_FIELDS)
    return [row for row in rows if (row["request_id"], row["first_iteration"]) not in known]


def find_run(path: Path) -> Path:
    """The one run directory at or below `path`; InputError if there are several or none."""
    found = find_runs(path)
    if len(found) > 1:
        names = ", ".join(str(item) for item in found[:3])
        raise InputError(f"{path}: holds {len(found)} runs; expected one. Name one of them: {names}, ….")
    return found[0]


def _iteration_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    table = _table([_flat_iteration(row) for row in rows], ITERATION_COLUMNS)
    return table.sort_values("iteration_counter", kind="stable", ignore_index=True)


def _flat_iteration(row: dict[str, Any]) -> dict[str, Any]:
    flat = {_snake_case(name): value for name, value in row.items() if name != "ifbbench"}
    extra = dict(row["ifbbench"])
    left_out = extra.pop("first_left_out", None) or {}
    flat["first_left_out_request"] = left_out.get("request_id")
    flat["first_left_out_reason"] = left_out.get("reason")
    flat["pauses"] = len(extra.get("paused") or ())
    return flat | extra


def _span_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    table = _table(rows, SPAN_COLUMNS)
    table["request_id"] = table["request_id"].astype(str)
    return table.sort_values(["request_id", "first_iteration"], kind="stable", ignore_index=True)


def _request_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    table = _table(rows, REQUEST_COLUMNS)
    table["request_id"] = table["request_id"].astype(str)
    return table.sort_values("index", kind="stable", ignore_index=True)


def _table(rows: list[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """`rows` with `columns` first, each there even where no row has it, so that readers need not ask."""
    table = pd.DataFrame(rows)
    more = [name for name in table.columns if name not in columns]
    table = table.reindex(columns=[*columns, *more])
    # Nulls (the times of a refused request, the blocks of a contiguous cache) become NaN, which every mean leaves out.
    for name in set(columns) - NOT_NUMBERS:
        table[name] = pd.to_numeric(table[name])
    return table


def _snake_case(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())
