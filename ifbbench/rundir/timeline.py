"""The timeline of a run: what each recorded iteration did, as columns of numbers.

Analyses, pages and traces for Perfetto are made from it; the tables of charts and exports have the same columns, with
those that only people read (see `columns`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import fields
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.rundir.columns import (
    KV_STATISTICS,
    Column,
    columns_of_line,
    iteration_columns,
)
from ifbbench.rundir.line_types import (
    ExecutorLine,
    InflightLine,
    IterationDetails,
    KvCacheStats,
    StaticLine,
)
from ifbbench.rundir.rows import Id, find_iteration

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NO_REQUEST = -1
# The fields of lines that the columns are made from, and all others.
USED = frozenset(
    {
        "iteration_counter",
        "active_request_count",
        "used_kv_cache_blocks",
        "kv_cache",
        "ifbbench",
        "start_s",
        "latency_ms",
        "host_ms",
        "delivery_ms",
        "queued",
        "waiting",
        "budget_used",
        "bound_by",
        "first_left_out",
        "queue_head",
        "paused",
        KV_STATISTICS,
    }
)
UNUSED = frozenset(
    item.name
    for line in (InflightLine, StaticLine, ExecutorLine, KvCacheStats, IterationDetails)
    for item in fields(line)
    if item.name not in USED
)
# Columns without which there is no timeline, and the largest number of seconds that 64 bits hold in nanoseconds.
REQUIRED = ("iteration_counter", "start_s", "latency_ms", "queued", "waiting", "active_request_count", "budget_used")
MAX_S = 9e9


@dataclass(frozen=True)
class PauseEvent:
    """One pause: `victim` lost its KV blocks in an iteration to make room for `beneficiary`."""

    iteration: int
    victim: Id
    beneficiary: Id


@dataclass(frozen=True)
class Iterations:
    """The recorded iterations, one element each: every one, unless the statistics were thinned.

    number: number of the iteration.
    start_s, end_s, host_s: seconds.
    delivered_s: when its tokens reached their clients.
    limit: position in `limits` of what bound it.
    left_out: position in `left_out_pairs` of the first request that was left out and the reason; NO_REQUEST if none.
    queue_head: what holds the queue, in the form of `left_out`, where lines say that it is another request; otherwise
        equal to that.
    used_blocks: blocks in use; NaN for a cache without blocks.
    blocks_of_window: blocks in use (NaN where a line lacks them) and in all of each of several attention windows, by
        its tokens.
    """

    number: Integers
    start_s: Floats
    end_s: Floats
    delivered_s: Floats
    host_s: Floats
    limit: Integers
    limits: list[str]
    left_out: Integers
    queue_head: Integers
    left_out_pairs: list[tuple[Id, str]]
    queued: Integers
    waiting: Integers
    active: Integers
    budget_used: Integers
    used_blocks: Floats
    blocks_of_window: dict[str, tuple[Floats, int]]
    pauses: list[PauseEvent]

    def __len__(self) -> int:
        return len(self.number)

    def delivered_at(self, iterations: Integers) -> Floats:
        """When the tokens of these iterations reached their clients (s); interpolated for those not recorded."""
        first, last = int(self.number[0]), int(self.number[-1])
        if last - first + 1 == len(self.number):  # each is there, and need not be searched for
            return self.delivered_s[np.clip(iterations, first, last) - first]
        return np.interp(iterations, self.number, self.delivered_s)

    def start_of(self, iteration: int) -> float:
        """When an iteration began (s); interpolated for one that was not recorded."""
        return self._interpolated(iteration, self.start_s)

    def end_of(self, iteration: int) -> float:
        """When an iteration ended (s); interpolated for one that was not recorded."""
        return self._interpolated(iteration, self.end_s)

    def _interpolated(self, iteration: int, times_s: Floats) -> float:
        """As np.interp, which converts all of `number` each time."""
        right = min(int(self.number.searchsorted(iteration)), len(self.number) - 1)
        after = int(self.number[right])
        if right == 0 or after <= iteration:
            return float(times_s[right])
        before = int(self.number[right - 1])
        share = (iteration - before) / (after - before)
        return float(times_s[right - 1] + share * (times_s[right] - times_s[right - 1]))

    def position(self, iteration: int) -> int:
        """The element of `iteration`, or of the last recorded one before it."""
        return max(int(np.searchsorted(self.number, iteration, side="right")) - 1, 0)


class _Numbered(dict[Any, int]):
    """Numbers keys from 0 in the order in which they are first looked up."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def read_iterations(path: Path, config: Mapping[str, Any]) -> Iterations:
    """All recorded iterations of the file at `path`, of a run with the settings `config`. InputError for a bad one."""
    return _iterations(path, iteration_columns(path, config, UNUSED))


def read_iteration(path: Path, number: int) -> Iterations | None:
    """One iteration, as columns of one element; None if it is not recorded. Other lines of a plain file are not
    read."""
    row = find_iteration(path, number)
    return None if row is None else _iterations(path, columns_of_line(row))


def _iterations(path: Path, columns: Mapping[str, Column]) -> Iterations:
    number, start_s, latency_ms, *counts = (_numbers(path, columns, name) for name in REQUIRED)
    host_ms, delivery_ms = (_optional(columns, name, len(number), 0.0) for name in ("host_ms", "delivery_ms"))
    for values, unit in ((start_s, 1.0), (latency_ms, 1e3), (host_ms, 1e3), (delivery_ms, 1e3)):
        if np.abs(values).max(initial=0.0) > MAX_S * unit:
            raise InputError(f"{path}: has a time of more than {MAX_S:,.0f} s. Restore the file, or run again.")
    queued, waiting, active, budget_used = (values.astype(np.int64) for values in counts)
    limits, pairs = _Numbered(), _Numbered()
    named = zip(columns["first_left_out_request"], columns["first_left_out_reason"], strict=True)
    left_out = [NO_REQUEST if one is None else pairs[one, why] for one, why in named]
    sizes = dict.fromkeys(name.split(".")[1] for name in columns if name.startswith(f"{KV_STATISTICS}."))
    return Iterations(
        number.astype(np.int64),
        start_s,
        start_s + latency_ms / 1000,
        start_s + (latency_ms + delivery_ms) / 1000,
        host_ms / 1000,
        np.array([limits[one] for one in columns["bound_by"]], np.int64),
        list(limits),
        np.array(left_out, np.int64),
        np.array(_queue_heads(columns, left_out, pairs), np.int64),
        list(pairs),
        queued,
        waiting,
        active,
        budget_used,
        _optional(columns, "used_kv_cache_blocks", len(number)),
        {size: _blocks(columns, size, len(number)) for size in sizes},
        [
            PauseEvent(iteration, pause["request_id"], pause["for"])
            for iteration, pauses in zip(number.tolist(), columns["paused"], strict=True)
            for pause in pauses or ()
        ],
    )


def _queue_heads(columns: Mapping[str, Column], left_out: list[int], pairs: _Numbered) -> list[int]:
    """The number of what holds the queue in each iteration. left_out: of what was left out first."""
    if (reasons := columns.get("queue_head_reason")) is None:
        return left_out
    named = zip(columns.get("queue_head_request") or [None] * len(left_out), reasons, left_out, strict=True)
    return [
        first if why is None else NO_REQUEST if request is None else pairs[request, why]
        for request, why, first in named
    ]


def _numbers(path: Path, columns: Mapping[str, Column], name: str) -> NDArray[Any]:
    """A column of numbers; InputError if a line lacks its own."""
    values = np.asarray(columns[name])
    if values.dtype == np.float64 and (missing := np.isnan(values)).any():
        raise InputError(
            f"{path}, line {int(missing.argmax()) + 1}: {name} is missing; expected a line as `ifbbench run` "
            "writes it. Run again, or remove the line."
        )
    return values


def _optional(columns: Mapping[str, Column], name: str, length: int, default: float = np.nan) -> Floats:
    """A column of numbers, with `default` where lines have none."""
    values = np.asarray(columns.get(name, np.full(length, np.nan)), np.float64)
    return np.where(np.isnan(values), default, values)


def _blocks(columns: Mapping[str, Column], size: str, length: int) -> tuple[Floats, int]:
    used, pool = (
        _optional(columns, f"{KV_STATISTICS}.{size}.primary{one}NumBlocks", length) for one in ("Used", "Max")
    )
    return used, int(np.nanmax(pool))
