"""The figures of a run: latencies of each request, and the summary over all of them."""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ifbbench.engine.policies.policy import Limit
from ifbbench.engine.records import CacheState, IterationRecord, Stretch
from ifbbench.engine.request import Request
from ifbbench.recording.distribution import counted_distribution, distribution
from ifbbench.recording.life import Life
from ifbbench.recording.request_line import RequestTimes, completed_line, failed_line
from ifbbench.recording.token_gaps import TokenGaps

PER_REQUEST = ("queue_time_s", "ttft_s", "tpot_s", "e2e_s")
BOUND_BY = ("batch_size", "num_tokens", "kv_blocks", "none")
# The name that a reason has in `bound_by`. A reason of a user policy is not among these: it keeps its own name.
_BOUND_BY = {limit.value: limit.value if limit.value in BOUND_BY else "none" for limit in Limit}


def bound_by(record: IterationRecord) -> str:
    """The limit of the settings, or the reason of a user policy, for which the first request did not run in full."""
    if record.left_out is None:
        return "none"
    limit = record.left_out.limit
    return _BOUND_BY.get(limit) or str(limit)


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

    def add_iteration(self, record: IterationRecord) -> None:
        """Take in one iteration."""
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
        self.bound_by[bound_by(record)] += 1

    def add_stretch(self, stretch: Stretch) -> None:
        """Take in all iterations of a stretch."""
        first, count = stretch.first, stretch.length
        self.iterations += count
        self.peak_scheduled = max(self.peak_scheduled, first.num_generation)
        self.computed_tokens += first.budget_used * count
        self.slots += first.budget_used * count
        # What requests hold only grows within a stretch.
        self._add_cache(stretch.cache(stretch.length - 1))
        self.bound_by[bound_by(first)] += count

    def _add_cache(self, cache: CacheState) -> None:
        self.max_blocks, self.tokens_per_block = cache.max_blocks, cache.tokens_per_block
        if cache.used_blocks is not None and cache.used_blocks > (self.peak_used_blocks or -1):
            self.peak_used_blocks = cache.used_blocks
        self.max_tokens = cache.max_tokens
        if cache.held_tokens > self.peak_held_tokens:
            self.peak_held_tokens = cache.held_tokens
        if cache.filled_tokens > self.peak_filled_tokens:
            self.peak_filled_tokens = cache.filled_tokens

    def add_request(self, life: Life, starts: Sequence[float], ends: Sequence[float]) -> str:
        """Take in a completed request; returns its line of `requests.jsonl`. starts, ends: [iterations], seconds."""
        request, arrival_s, stretches = life.request, life.arrival_s, life.token_iterations
        output_len = sum([last - first + 1 for first, last in stretches])
        first_scheduled = starts[_first_run(life)]
        first, last = ends[stretches[0][0]], ends[stretches[-1][1]]
        # Later than the last token where a static batch held the request back.
        end = ends[life.last_iteration]
        times = RequestTimes(
            first_scheduled,
            first,
            end,
            queue_time_s=first_scheduled - arrival_s,
            ttft_s=first - arrival_s,
            tpot_s=(last - first) / (output_len - 1) if output_len > 1 else None,
            e2e_s=end - arrival_s,
        )
        self._add_times(times)
        self._gaps.add(stretches, ends)
        self.completed += 1
        self.prompt_tokens += request.original_prompt_len
        self.reused_tokens += request.reused_tokens
        self.output_tokens += output_len
        self.first_arrival_s = min(self.first_arrival_s, arrival_s)
        self.last_end_s = max(self.last_end_s, end)
        return completed_line(request, arrival_s, output_len, times, life.attribution(starts, end))

    def _add_times(self, times: RequestTimes) -> None:
        samples = self._samples
        samples["queue_time_s"].append(times.queue_time_s)
        samples["ttft_s"].append(times.ttft_s)
        samples["e2e_s"].append(times.e2e_s)
        if times.tpot_s is not None:
            samples["tpot_s"].append(times.tpot_s)

    def add_failure(self, request: Request, arrival_s: float, error: str | None) -> str:
        """Take in a request that was refused, failed, or was stopped by its client (`error` None); returns its line of
        `requests.jsonl`."""
        self.failed += error is not None
        self.first_arrival_s = min(self.first_arrival_s, arrival_s)
        return failed_line(request, arrival_s, error)

    def summary(self, schedule_digest: str, partial: bool, ends: Sequence[float]) -> dict[str, Any]:
        """The content of `summary.json`. ends: when each iteration ended, in seconds."""
        span = self.last_end_s - self.first_arrival_s if self.completed else 0.0
        # A run without duration (an executor that answers at once, on a virtual clock) has no rates.
        per_second = 1.0 / span if span > 0 else 0.0
        limits, iterations = dict.fromkeys((*BOUND_BY, *self.bound_by)), max(self.iterations, 1)
        shares = {name: self.bound_by[name] / iterations for name in limits}
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
            "kv_blocks": {
                "max": self.max_blocks,
                "peak_used": self.peak_used_blocks,
                "tokens_per_block": self.tokens_per_block,
            },
            "kv_tokens": {
                "max": self.max_tokens,
                "peak_held": self.peak_held_tokens,
                "peak_filled": self.peak_filled_tokens,
            },
            "peak_scheduled_requests": self.peak_scheduled,
            "bound_by": shares,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "schedule_digest": schedule_digest,
            "partial": partial,
        }


def _first_run(life: Life) -> int:
    """The iteration of its first context chunk."""
    return next(first for name, first in life.closed if name == "context")
