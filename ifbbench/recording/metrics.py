"""The figures of a run: latencies of each request, and the summary over all of them."""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ifbbench.batching.records import CacheState, IterationRecord
from ifbbench.batching.request import Request
from ifbbench.recording.life import FloatArray, Life

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9}
PER_REQUEST = ("queue_time_s", "ttft_s", "tpot_s", "e2e_s")
BOUND_BY = ("batch_size", "num_tokens", "kv_blocks", "none")


def distribution(values: "Sequence[float] | FloatArray | array[float]") -> dict[str, float | None]:
    """mean, min, percentiles (linear interpolation) and max of `values`, in their unit; all None if there are none."""
    data = np.asarray(values, np.float64)
    names = ("mean", "min", *PERCENTILES, "max")
    if data.size == 0:
        return dict.fromkeys(names)
    ranks = np.percentile(data, list(PERCENTILES.values()))
    return dict(zip(names, map(float, (data.mean(), data.min(), *ranks, data.max())), strict=True))


def bound_by(record: IterationRecord) -> str:
    """Which limit of the settings left out the first request that did not run, or cut its chunk."""
    limit = record.left_out.limit.value if record.left_out else "none"
    return limit if limit in BOUND_BY else "none"


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
        self._itl: list[FloatArray] = []

    def add_iteration(self, record: IterationRecord) -> None:
        self.iterations += 1
        self.peak_scheduled = max(self.peak_scheduled, len(record.context) + record.num_generation)
        self.pauses += len(record.paused)
        self.recomputed_tokens += record.recomputed
        self.computed_tokens += record.budget_used
        self.empty_generation_slots += record.idle
        self.padded_slots += record.padding + record.idle
        self.slots += record.budget_used + record.padding + record.idle
        self._add_cache(record.cache)
        self.bound_by[bound_by(record)] += 1

    def _add_cache(self, cache: CacheState) -> None:
        self.max_blocks, self.tokens_per_block = cache.max_blocks, cache.tokens_per_block
        if cache.used_blocks is not None:
            self.peak_used_blocks = max(self.peak_used_blocks or 0, cache.used_blocks)
        self.max_tokens = cache.max_tokens
        self.peak_held_tokens = max(self.peak_held_tokens, cache.held_tokens)
        self.peak_filled_tokens = max(self.peak_filled_tokens, cache.filled_tokens)

    def add_request(self, life: Life, starts: FloatArray, ends: FloatArray) -> dict[str, Any]:
        """Take in a completed request; returns its line of `requests.jsonl`. starts, ends: [iterations], seconds."""
        request, times = life.request, life.token_times(ends)
        first_scheduled = float(starts[_first_run(life)])
        first, last = float(times[0]), float(times[-1])
        # Later than the last token where a static batch held the request back.
        end = float(ends[life.last_iteration])
        latencies: dict[str, float | None] = {
            "queue_time_s": first_scheduled - life.arrival_s,
            "ttft_s": first - life.arrival_s,
            "tpot_s": (last - first) / (len(times) - 1) if len(times) > 1 else None,
            "e2e_s": end - life.arrival_s,
        }
        for name, value in latencies.items():
            if value is not None:
                self._samples[name].append(value)
        self._itl.append(np.diff(times))
        self.completed += 1
        self.prompt_tokens += request.original_prompt_len
        self.reused_tokens += request.reused_tokens
        self.output_tokens += len(times)
        self.first_arrival_s = min(self.first_arrival_s, life.arrival_s)
        self.last_end_s = max(self.last_end_s, end)
        return {
            **_identity(request.request_id, request.index, life.arrival_s, request.original_prompt_len, len(times)),
            **latencies,
            "first_scheduled_s": first_scheduled,
            "first_token_s": first,
            "end_s": end,
            "max_new_tokens": _asked_for(request),
            "pauses": request.pauses,
            "recomputed_tokens": request.recomputed_tokens,
            "reused_tokens": request.reused_tokens,
            "attribution_s": life.attribution(starts, end),
            "outcome": "completed",
            "error": None,
        }

    def add_failure(self, request: Request, arrival_s: float, error: str | None) -> dict[str, Any]:
        """Take in a request that was refused, failed, or was stopped by its client (`error` None); returns its line of
        `requests.jsonl`."""
        self.failed += error is not None
        self.first_arrival_s = min(self.first_arrival_s, arrival_s)
        nothing = dict.fromkeys(
            ("queue_time_s", "ttft_s", "tpot_s", "e2e_s", "first_scheduled_s", "first_token_s", "end_s")
        )
        return {
            **_identity(request.request_id, request.index, arrival_s, request.original_prompt_len, request.num_outputs),
            **nothing,
            "max_new_tokens": _asked_for(request),
            "pauses": request.pauses,
            "recomputed_tokens": request.recomputed_tokens,
            "reused_tokens": 0,
            "attribution_s": {},
            "outcome": "stopped" if error is None else "failed",
            "error": error,
        }

    def summary(self, schedule_digest: str, partial: bool) -> dict[str, Any]:
        """The content of `summary.json`."""
        span = self.last_end_s - self.first_arrival_s if self.completed else 0.0
        # A run without duration (an executor that answers at once, on a virtual clock) has no rates.
        per_second = 1.0 / span if span > 0 else 0.0
        shares = {name: self.bound_by[name] / self.iterations if self.iterations else 0.0 for name in BOUND_BY}
        return {
            "requests": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "duration_s": span,
            "request_throughput_per_s": self.completed * per_second,
            "output_throughput_tokens_per_s": self.output_tokens * per_second,
            "total_throughput_tokens_per_s": (self.prompt_tokens + self.output_tokens) * per_second,
            **{name: distribution(values) for name, values in self._samples.items()},
            "itl_s": distribution(np.concatenate(self._itl) if self._itl else []),
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


def _identity(request_id: int, index: int, arrival_s: float, prompt_len: int, output_len: int) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "index": index,
        "arrival_s": arrival_s,
        "prompt_len": prompt_len,
        "output_len": output_len,
    }


def _asked_for(request: Request) -> int:
    """Output tokens reserved at first: pauses join tokens to the prompt, and take as many off."""
    return request.max_new_tokens + request.prompt_len - request.original_prompt_len
