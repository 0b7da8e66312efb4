"""Statistics of a trace: lengths, arrival rates, and the share of prompt tokens that requests have in common."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from ifbbench.workload.trace import PrefixRun, Trace, TraceRequest, columns_of

HISTOGRAM_BINS = 12
RATE_WINDOWS = 40
SPARKS = "▁▂▃▄▅▆▇█"

Prompt = TypeVar("Prompt", bytes, list[PrefixRun])


@dataclass(frozen=True)
class Histogram:
    """Counts of lengths: bin i holds those of at least `edges[i]` and below `edges[i + 1]` tokens."""

    edges: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths in tokens; percentiles by linear interpolation."""

    mean: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int
    total: int
    histogram: Histogram


@dataclass(frozen=True)
class TraceStatistics:
    """The figures of a trace. Rates are over the span from first to last arrival, None if all requests arrive at once.

    seen_before_share: share of prompt tokens that an earlier request began with as well, an upper bound on the hit rate
        of a prefix cache; None if the trace does not say which tokens are equal.
    rates_per_s: in RATE_WINDOWS windows of `rate_window_s` seconds.
    """

    requests: int
    skipped_rows: int
    span_s: float
    request_rate_per_s: float | None
    gap_cv: float | None
    prompt_tokens: LengthStatistics
    output_tokens: LengthStatistics
    max_new_tokens: LengthStatistics
    seen_before_share: float | None
    rate_window_s: float | None
    rates_per_s: tuple[float, ...]


def trace_statistics(trace: Trace) -> TraceStatistics:
    """The statistics of `trace`, which must have a request."""
    columns = columns_of(trace.requests)
    arrivals_s = np.asarray(columns.arrival_s)
    span_s = float(arrivals_s[-1] - arrivals_s[0])
    gaps_s = np.diff(arrivals_s)
    prompt_tokens = length_statistics(columns.prompt_len)
    seen_before = tokens_seen_before(trace)
    windows, _ = np.histogram(arrivals_s, bins=RATE_WINDOWS)
    return TraceStatistics(
        requests=len(trace),
        skipped_rows=trace.skipped_rows,
        span_s=span_s,
        request_rate_per_s=len(gaps_s) / span_s if span_s > 0 else None,
        gap_cv=float(gaps_s.std() / gaps_s.mean()) if span_s > 0 else None,
        prompt_tokens=prompt_tokens,
        output_tokens=length_statistics(columns.output_len),
        max_new_tokens=length_statistics(columns.max_new_tokens),
        seen_before_share=None if seen_before is None else seen_before / prompt_tokens.total,
        rate_window_s=span_s / RATE_WINDOWS if span_s > 0 else None,
        rates_per_s=tuple((windows * RATE_WINDOWS / span_s).tolist()) if span_s > 0 else (),
    )


def length_statistics(lengths: Sequence[int]) -> LengthStatistics:
    """Statistics of at least one length, each of at least 1 token."""
    values = np.asarray(lengths, dtype=np.int64)
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    low, high = int(values.min()), int(values.max())
    # Bins grow by a constant factor: lengths are skewed, and in equal bins a long tail would hide the rest.
    edges = np.unique(np.rint(np.geomspace(low, high + 1, HISTOGRAM_BINS + 1)).astype(np.int64))
    counts, _ = np.histogram(values, bins=edges)
    return LengthStatistics(
        mean=float(values.mean()),
        min=low,
        p50=p50,
        p90=p90,
        p99=p99,
        max=high,
        total=int(values.sum()),
        histogram=Histogram(tuple(edges.tolist()), tuple(counts.tolist())),
    )


def sparkline(values: Sequence[float]) -> str:
    """One block character per value, from empty (0) to full (the largest value)."""
    largest = max(values, default=0)
    if largest <= 0:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[min(int(value / largest * len(SPARKS)), len(SPARKS) - 1)] for value in values)


def histogram_lines(histogram: Histogram, width: int = 40) -> list[str]:
    """One line per bin: its range, a bar of at most `width` characters, its count."""
    largest = max(histogram.counts)
    ranges = [
        f"{low:,}" if low == end - 1 else f"{low:,}-{end - 1:,}" for low, end in pairwise(histogram.edges)
    ]
    column = max(map(len, ranges))
    return [
        f"{text:>{column}} {'█' * round(count / largest * width):{width}} {count:,}"
        for text, count in zip(ranges, histogram.counts, strict=True)
    ]


# What a perfect prefix cache could save.


def tokens_seen_before(requests: Iterable[TraceRequest]) -> int | None:
    """The sum over all prompts of the tokens that the prompt has in common with the beginning of an earlier one.

    Exact to the token, nothing evicted: no prefix cache finds more. None if the trace does not say which tokens are
    equal.
    """
    recorded: list[bytes] = []
    named: list[list[PrefixRun]] = []
    for request in requests:
        if request.prompt_tokens is not None:
            # In big-endian bytes, the order of texts is that of tokens.
            recorded.append(np.asarray(request.prompt_tokens, dtype=">i4").tobytes())
        elif request.prefix_ids is not None:
            named.append(request.prefix_runs())
    if not recorded and not named:
        return None
    return _seen_before(recorded, _common_tokens) + _seen_before(named, _common_runs)


def _seen_before(prompts: Sequence[Prompt], num_common: Callable[[Prompt, Prompt], int]) -> int:
    """In sorted order, neighbours have the longest common beginnings. The prompts are removed from the latest to the
    first: at its removal, a prompt has only earlier ones beside it, and the longest beginning that it shares with any
    of them is the one that it shares with a neighbour."""
    count = len(prompts)
    before, after = [count] * (count + 1), [count] * (count + 1)
    common_with_before = [0] * (count + 1)  # the last entry stands for no prompt, at either end
    for left, right in pairwise(sorted(range(count), key=prompts.__getitem__)):
        before[right], after[left] = left, right
        common_with_before[right] = num_common(prompts[left], prompts[right])
    total = 0
    for index in reversed(range(count)):
        left, right = before[index], after[index]
        total += max(common_with_before[index], common_with_before[right])
        common_with_before[right] = min(common_with_before[index], common_with_before[right])
        before[right], after[left] = left, right
    return total


def _common_tokens(some: bytes, others: bytes) -> int:
    length = min(len(some), len(others)) // 4
    equal = np.frombuffer(some, np.int32, length) == np.frombuffer(others, np.int32, length)
    return length if equal.all() else int(equal.argmin())


def _common_runs(some: list[PrefixRun], others: list[PrefixRun]) -> int:
    common = 0
    for (prefix_id, length), (other_id, other_length) in zip(some, others, strict=False):
        if prefix_id != other_id:
            break
        common += min(length, other_length)
        if length != other_length:
            break
    return common
