"""The figures of a run: latencies of each request, and the summary over all of them."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.policies.policy import Limit
from ifbbench.engine.records import CacheState, IterationRecord, Stretch
from ifbbench.engine.request import Request
from ifbbench.recording.lines import RequestLine, encode, number
from ifbbench.recording.spans import RequestTimeline

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

PER_REQUEST = ("queue_time_s", "ttft_s", "tpot_s", "e2e_s")
BOUND_BY = ("batch_size", "num_tokens", "kv_blocks", "none")
# The name of a limit in `bound_by`. A reason of a user policy is not among these: it keeps its own name.
_BOUND_BY = {limit.value: limit.value if limit.value in BOUND_BY else "none" for limit in Limit}
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9}
STATISTICS = ("mean", "min", *PERCENTILES, "max")


def bound_by(record: IterationRecord) -> str:
    """The limit of the settings, or the reason of a user policy, for which the first request did not run in full."""
    if record.left_out is None:
        return "none"
    limit = record.left_out.limit
    return _BOUND_BY.get(limit) or str(limit)


def distribution(values: Sequence[float] | Floats) -> dict[str, float | None]:
    """mean, min, percentiles (linear interpolation) and max of `values`, in their unit; all None if there are none."""
    data = np.asarray(values, np.float64)
    if data.size == 0:
        return dict.fromkeys(STATISTICS)
    ranks = np.percentile(data, list(PERCENTILES.values()))
    return dict(zip(STATISTICS, map(float, (data.mean(), data.min(), *ranks, data.max())), strict=True))


def counted_distribution(values: Floats, counts: Integers) -> dict[str, float | None]:
    """`distribution` of `values`, the i-th of them `counts[i]` times (at least once), without repeating them."""
    if values.size == 0:
        return dict.fromkeys(STATISTICS)
    order = values.argsort(kind="stable")
    values, counts = values[order], counts[order]
    ends = counts.cumsum()  # the number of values up to and including the i-th
    total = int(ends[-1])
    # The arithmetic of numpy's percentile, to the last bit: between the values before and after the rank.
    ranks = (total - 1) * (np.array(list(PERCENTILES.values())) / 100)
    before = np.floor(ranks).astype(np.int64)
    after = np.minimum(before + 1, total - 1)
    lower, upper = (values[ends.searchsorted(places, side="right")] for places in (before, after))
    share, step = ranks - before, upper - lower
    percentiles = np.where(share < 0.5, lower + step * share, upper - step * (1 - share))
    mean = (values * counts).sum() / total
    return dict(zip(STATISTICS, map(float, (mean, values[0], *percentiles, values[-1])), strict=True))


class TokenGaps:
    """The gaps between consecutive output tokens of all requests (ITL), counted rather than stored.

    A request that produces a token in two consecutive iterations adds one gap: the time between their ends. So it is
    enough to count, for each iteration, the requests that produced a token both in it and in the one before: 8 bytes an
    iteration. Only gaps over several iterations, where a request was skipped or paused, are stored, in 8 bytes each.
    """

    def __init__(self) -> None:
        # The number of requests with a gap that ends with an iteration, as its differences from one to the next.
        self._steps = array("q", [0])
        self._long_s = array("d")

    def add(self, stretches: Iterable[tuple[int, int]], ends: Sequence[float]) -> None:
        """Take in a request that produced a token in each iteration of `stretches`, [first, last] in order of time.

        ends: of each iteration, in seconds."""
        before: int | None = None
        for first, last in stretches:
            if before is None:
                self._count(first + 1, last)
            elif first == before + 1:
                self._count(first, last)
            else:
                self._long_s.append(ends[first] - ends[before])
                self._count(first + 1, last)
            before = last

    def _count(self, first: int, last: int) -> None:
        """One more gap that ends with each of these iterations."""
        if first > last:
            return
        missing = last + 2 - len(self._steps)
        if missing > 0:
            self._steps.frombytes(bytes(missing * self._steps.itemsize))
        self._steps[first] += 1
        self._steps[last + 1] -= 1

    def counted(self, ends: Sequence[float]) -> tuple[Floats, Integers]:
        """Gaps in seconds and the number of times that each occurs; both of shape [different gaps], in no order."""
        counts = np.asarray(self._steps).cumsum()
        (iterations,) = counts.nonzero()
        seconds = np.asarray(ends, np.float64)
        gaps = seconds[iterations] - seconds[iterations - 1]
        ones = np.ones(len(self._long_s), np.int64)
        return np.concatenate([gaps, self._long_s]), np.concatenate([counts[iterations], ones])


class RunMetrics:
    """Sums and samples of a run, taken in as iterations run and requests end."""

    def __init__(self, total_requests: int) -> None:
        self.total = total_requests
        self.completed = self.failed = 0
        self.slots = self.padded_slots = self.empty_generation_slots = 0
        self.pauses = self.recomputed_tokens = self.computed_tokens = 0
        self.prompt_tokens = self.output_tokens = self.reused_tokens = 0
        self.iterations = self.peak_scheduled = 0
        # None where the cache has no blocks.
        self.peak_used_blocks: int | None = None
        self.max_blocks: int | None = None
        self.tokens_per_block: int | None = None
        self.max_tokens = self.peak_held_tokens = self.peak_filled_tokens = 0
        self.bound_by: Counter[str] = Counter()
        self.first_arrival_s = float("inf")
        self.last_end_s = 0.0
        self._samples = {name: array("d") for name in PER_REQUEST}
        self._gaps = TokenGaps()

    def add_iteration(self, record: IterationRecord, limit: str) -> None:
        """Take in one iteration. limit: what bound it."""
        computed, padded = record.budget_used, record.padding + record.idle
        scheduled = len(record.context) + record.num_generation
        self.iterations += 1
        if scheduled > self.peak_scheduled:
            self.peak_scheduled = scheduled
        self.pauses += len(record.paused)
        self.recomputed_tokens += record.recomputed
        self.computed_tokens += computed
        self.empty_generation_slots += record.idle
        self.padded_slots += padded
        self.slots += computed + padded
        self._add_cache(record.cache)
        self.bound_by[limit] += 1

    def add_stretch(self, stretch: Stretch, limit: str) -> None:
        """Take in all iterations of a stretch."""
        first, count = stretch.first, stretch.length
        self.iterations += count
        self.peak_scheduled = max(self.peak_scheduled, first.num_generation)
        self.computed_tokens += first.budget_used * count
        self.slots += first.budget_used * count
        # What requests hold only grows within a stretch.
        self._add_cache(stretch.cache(stretch.length - 1))
        self.bound_by[limit] += count

    def _add_cache(self, cache: CacheState) -> None:
        self.max_blocks, self.tokens_per_block = cache.max_blocks, cache.tokens_per_block
        if cache.used_blocks is not None and cache.used_blocks > (self.peak_used_blocks or -1):
            self.peak_used_blocks = cache.used_blocks
        self.max_tokens = cache.max_tokens
        if cache.held_tokens > self.peak_held_tokens:
            self.peak_held_tokens = cache.held_tokens
        if cache.filled_tokens > self.peak_filled_tokens:
            self.peak_filled_tokens = cache.filled_tokens

    def add_request(self, timeline: RequestTimeline, starts: Sequence[float], ends: Sequence[float]) -> bytes:
        """Take in a completed request; returns its line of `requests.jsonl`. starts, ends: [iterations], seconds."""
        request, arrival_s, stretches = timeline.request, timeline.arrival_s, timeline.token_iterations
        output_len = sum([last - first + 1 for first, last in stretches])
        # On a real clock, a request may arrive after the start of the iteration that fetches it.
        first_scheduled_s = max(starts[next(first for name, first in timeline.closed if name == "context")], arrival_s)
        first_token_s, last_token_s = ends[stretches[0][0]], ends[stretches[-1][1]]
        # Later than the last token where a static batch held the request back.
        end_s = ends[timeline.last_iteration]
        queue_time_s, ttft_s, e2e_s = first_scheduled_s - arrival_s, first_token_s - arrival_s, end_s - arrival_s
        tpot_s = (last_token_s - first_token_s) / (output_len - 1) if output_len > 1 else None
        samples = self._samples
        samples["queue_time_s"].append(queue_time_s)
        samples["ttft_s"].append(ttft_s)
        samples["e2e_s"].append(e2e_s)
        if tpot_s is not None:
            samples["tpot_s"].append(tpot_s)
        self._gaps.add(stretches, ends)
        self.completed += 1
        self.prompt_tokens += request.original_prompt_len
        self.reused_tokens += request.reused_tokens
        self.output_tokens += output_len
        self.first_arrival_s = min(self.first_arrival_s, arrival_s)
        self.last_end_s = max(self.last_end_s, end_s)
        attribution_s = {name: number(spent) for name, spent in timeline.attribution(starts, end_s).items()}
        return encode(RequestLine(
            request.request_id, request.index, number(arrival_s), request.original_prompt_len, output_len,
            number(queue_time_s), number(ttft_s), None if tpot_s is None else number(tpot_s), number(e2e_s),
            number(first_scheduled_s), number(first_token_s), number(end_s), _requested_tokens(request), request.pauses,
            request.recomputed_tokens, request.reused_tokens, attribution_s, "completed", None,
        ))  # fmt: skip

    def add_failure(self, request: Request, arrival_s: float, error: str | None) -> bytes:
        """Take in a request that was refused, failed, or was stopped by its client (`error` None); returns its line of
        `requests.jsonl`."""
        self.failed += error is not None
        self.first_arrival_s = min(self.first_arrival_s, arrival_s)
        # An error that quotes a file name may have characters that UTF-8 has not.
        text = None if error is None else error.encode(errors="backslashreplace").decode()
        return encode(RequestLine(
            request.request_id, request.index, number(arrival_s), request.original_prompt_len, request.num_outputs,
            None, None, None, None, None, None, None, _requested_tokens(request), request.pauses,
            request.recomputed_tokens, 0, {}, "stopped" if error is None else "failed", text,
        ))  # fmt: skip

    def summary(self, schedule_digest: str, partial: bool, ends: Sequence[float]) -> dict[str, Any]:
        """The content of `summary.json`. ends: of each iteration, in seconds."""
        span = self.last_end_s - self.first_arrival_s if self.completed else 0.0
        # A run without duration (an executor that answers at once, on a virtual clock) has no rates.
        per_second = 1.0 / span if span > 0 else 0.0
        limits, iterations = dict.fromkeys((*BOUND_BY, *self.bound_by)), max(self.iterations, 1)
        blocks = self.max_blocks, self.peak_used_blocks, self.tokens_per_block
        tokens = self.max_tokens, self.peak_held_tokens, self.peak_filled_tokens
        return {
            "requests": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "duration_s": span,
            "request_throughput_per_s": self.completed * per_second,
            "output_throughput_tokens_per_s": self.output_tokens * per_second,
            "total_throughput_tokens_per_s": (self.prompt_tokens + self.output_tokens) * per_second,
            **{name: distribution(values) for name, values in self._samples.items()},
            "itl_s": counted_distribution(*self._gaps.counted(ends)),
            "iterations": self.iterations,
            "pauses": self.pauses,
            "recomputed_tokens": self.recomputed_tokens,
            "recomputed_share": self.recomputed_tokens / self.computed_tokens if self.computed_tokens else 0.0,
            "empty_generation_slots": self.empty_generation_slots,
            "padding_waste": self.padded_slots / self.slots if self.slots else 0.0,
            "prefix_hit_rate": self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            "kv_blocks": dict(zip(("max", "peak_used", "tokens_per_block"), blocks, strict=True)),
            "kv_tokens": dict(zip(("max", "peak_held", "peak_filled"), tokens, strict=True)),
            "peak_scheduled_requests": self.peak_scheduled,
            "bound_by": {name: self.bound_by[name] / iterations for name in limits},
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "schedule_digest": schedule_digest,
            "partial": partial,
        }


def _requested_tokens(request: Request) -> int:
    """max_new_tokens as requested: a pause appends output tokens to the prompt and lowers max_new_tokens by them."""
    return request.max_new_tokens + request.prompt_len - request.original_prompt_len
