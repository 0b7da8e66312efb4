"""A run directory as tables: what every report reads."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from ifbbench.errors import InputError
from ifbbench.recording.run_directory import OPEN_SPANS, find_lines
from ifbbench.report.jsonl import read_lines, read_object
from ifbbench.report.row_table import table_of
from ifbbench.report.thinned import filled

ITERATION_FIELDS = ("Iteration Counter", "ifbbench")
ITERATION_COLUMNS = (
    "iteration_counter", "active_request_count", "max_request_count", "max_kv_cache_blocks", "free_kv_cache_blocks",
    "used_kv_cache_blocks", "tokens_per_kv_cache_block", "scheduled_requests", "context_requests",
    "generation_requests", "total_context_tokens", "paused_requests", "start_s", "latency_ms", "host_ms", "device_ms",
    "queued", "waiting", "bound_by", "first_left_out_request", "first_left_out_reason", "paused", "pauses",
    "tokens_recomputed", "budget_used", "kv_fragmentation",
)  # fmt: skip
SPAN_FIELDS = ("request_id", "phase", "first_iteration", "last_iteration", "tokens")
SPAN_COLUMNS = (*SPAN_FIELDS, "cause", "chunks", "first_output", "produced")
REQUEST_FIELDS = ("request_id", "outcome")
REQUEST_COLUMNS = (
    "request_id", "index", "arrival_s", "prompt_len", "output_len", "max_new_tokens", "queue_time_s", "ttft_s",
    "tpot_s", "e2e_s", "pauses", "recomputed_tokens", "reused_tokens", "outcome", "error",
    "first_scheduled_s", "first_token_s", "end_s",
)  # fmt: skip
NOT_NUMBERS = frozenset({
    "request_id", "outcome", "error", "bound_by", "first_left_out_request", "first_left_out_reason", "paused", "phase",
    "cause", "chunks",
})  # fmt: skip


@dataclass(frozen=True)
class RunData:
    """One run directory.

    `run` is run.json and `summary` summary.json, None where the run was killed. `partial` says that the run did not
    reach its end, so that figures cover only what it had done. Tables are read when they are asked for.
    """

    path: Path
    run: dict[str, Any]
    summary: dict[str, Any] | None

    @property
    def partial(self) -> bool:
        """Whether the run broke off."""
        return self.summary is None or bool(self.run.get("partial") or self.summary.get("partial"))

    @property
    def name(self) -> str:
        """The run's name; its directory's where run.json has none."""
        return str(self.run.get("name") or self.path.resolve().name)

    @property
    def config(self) -> dict[str, Any]:
        """Setting name to resolved value."""
        return dict(self.run.get("config") or {})

    @property
    def recorded_every(self) -> int:
        """Of how many iterations one is recorded; more than 1 where statistics were thinned."""
        return int(self.config.get("iteration_stats_every") or 1)

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """A row an iteration, in order of `iteration_counter`. Thinned ones are filled in: see `thinned.filled`.

        Fields are in snake_case, those under "ifbbench" beside them, and `pauses` is the number of requests that the
        iteration paused.
        """
        rows = map(_flat_iteration, read_lines(find_lines(self.path, "iterations"), ITERATION_FIELDS))
        recorded = table_of(rows, ITERATION_COLUMNS, NOT_NUMBERS)
        recorded = recorded.sort_values("iteration_counter", kind="stable", ignore_index=True)
        return filled(recorded, self.spans) if self.recorded_every > 1 else recorded

    @cached_property
    def spans(self) -> pd.DataFrame:
        """A row a span, by request and first iteration. Request ids are texts."""
        rows = chain(read_lines(find_lines(self.path, "spans"), SPAN_FIELDS), self._open_spans())
        table = table_of(rows, SPAN_COLUMNS, NOT_NUMBERS)
        table["request_id"] = table["request_id"].astype(str)
        # Those that were open in the moment of a flush may have been closed in it too.
        table = table.drop_duplicates(["request_id", "first_iteration"])
        return table.sort_values(["request_id", "first_iteration"], kind="stable", ignore_index=True)

    def _open_spans(self) -> Iterator[dict[str, Any]]:
        """What was going on when a killed run was last flushed."""
        return read_lines(self.path / OPEN_SPANS, SPAN_FIELDS)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row a request, by index in the trace. Request ids are texts; each part of `attribution_s` is a column."""
        rows = map(_flat_request, read_lines(find_lines(self.path, "requests"), REQUEST_FIELDS))
        table = table_of(rows, REQUEST_COLUMNS, NOT_NUMBERS)
        table["request_id"] = table["request_id"].astype(str)
        return table.sort_values("index", kind="stable", ignore_index=True)

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
    """The run directory `path`, of a finished or of a killed run; InputError names the file and line at fault, that of
    a table when it is asked for."""
    path = find_run(path)
    summary = read_object(path / "summary.json") if (path / "summary.json").exists() else None
    return RunData(path, read_object(path / "run.json"), summary)


def find_run(path: Path) -> Path:
    """The one run directory at or below `path`; InputError if there are several or none."""
    found = find_runs(path)
    if len(found) > 1:
        names = ", ".join(str(item) for item in found[:3])
        raise InputError(f"{path}: holds {len(found)} runs; expected one. Name one of them: {names}, ….")
    return found[0]


def _flat_iteration(row: dict[str, Any]) -> dict[str, Any]:
    flat = {_snake_case(name): value for name, value in row.items() if name != "ifbbench"}
    extra = dict(row["ifbbench"])
    left_out = extra.pop("first_left_out", None) or {}
    flat["first_left_out_request"] = left_out.get("request_id")
    flat["first_left_out_reason"] = left_out.get("reason")
    flat["pauses"] = len(extra.get("paused") or ())
    return flat | extra


def _flat_request(row: dict[str, Any]) -> dict[str, Any]:
    attribution = row.pop("attribution_s", None) or {}
    return row | {f"attribution_s.{name}": seconds for name, seconds in attribution.items()}


def _snake_case(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())
