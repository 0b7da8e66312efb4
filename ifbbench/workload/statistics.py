"""Statistics of a trace: lengths, arrival rates, and the share of prompt tokens that requests have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ifbbench.workload.distributions import Histogram
from ifbbench.workload.histograms import measured
from ifbbench.workload.reuse import blocks_seen_before_share, tokens_seen_before
from ifbbench.workload.trace import NO_ORIGIN, RequestColumns, Trace, columns_of

HISTOGRAM_BINS = 12
RATE_WINDOWS = 40
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths in tokens; percentiles by linear interpolation."""

    mean: float
    min: int
    p10: float
    p25: float
    p50: float
    p75: float
    p90: float
    p99: float
    max: int
    total: int
    histogram: Histogram


@dataclass(frozen=True)
class ClassStatistics:
    """How many requests a class has, their share of the trace, and the mean lengths (tokens)."""

    requests: int
    share: float
    prompt_mean: float
    output_mean: float


@dataclass(frozen=True)
class TraceStatistics:
    """The figures of a trace. Rates are over the span from first to last arrival, None if all requests arrive at once.

    length_correlation: Pearson's, of prompt and output lengths; None if one of them does not vary.
    seen_before_share: share of prompt tokens that an earlier request began with as well, an upper bound on the hit rate
        of a prefix cache; None if the trace does not say which tokens are equal.
    blocks_seen_before_share: share of the named blocks of prompts (prefix_ids, hash_ids) that an earlier prompt has
        too; None if the trace names none.
    classes: figures of each request class by its name.
    rates_per_s: rates in RATE_WINDOWS windows of `rate_window_s` seconds.
    """

    requests: int
    skipped_rows: int
    span_s: float
    request_rate_per_s: float | None
    gap_cv: float | None
    prompt_tokens: LengthStatistics
    output_tokens: LengthStatistics
    max_new_tokens: LengthStatistics
    length_correlation: float | None
    seen_before_share: float | None
    blocks_seen_before_share: float | None
    classes: dict[str, ClassStatistics]
    rate_window_s: float | None
    rates_per_s: tuple[float, ...]


def trace_statistics(trace: Trace) -> TraceStatistics:
    """The statistics of `trace`, which must have a request."""
    columns = columns_of(trace.requests)
    arrivals_s = np.asarray(columns.arrival_s)
    span_s = float(arrivals_s[-1] - arrivals_s[0])
    gaps_s = np.diff(arrivals_s)
    prompt_tokens = length_statistics(columns.prompt_len)
    # Requests that are numbers only have no tokens to compare.
    may_repeat = any(origin != NO_ORIGIN for origin in columns.origin)
    seen_before = tokens_seen_before(trace) if may_repeat else None
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
        length_correlation=_correlation(columns.prompt_len, columns.output_len),
        seen_before_share=None if seen_before is None else seen_before / prompt_tokens.total,
        blocks_seen_before_share=blocks_seen_before_share(trace) if may_repeat else None,
        classes=_classes(columns),
        rate_window_s=span_s / RATE_WINDOWS if span_s > 0 else None,
        rates_per_s=tuple((windows * RATE_WINDOWS / span_s).tolist()) if span_s > 0 else (),
    )


def length_statistics(lengths: Sequence[int]) -> LengthStatistics:
    """Statistics of at least one length, each of at least 1 token."""
    values = np.asarray(lengths, dtype=np.int64)
    p10, p25, p50, p75, p90, p99 = np.percentile(values, (10, 25, 50, 75, 90, 99)).tolist()
    return LengthStatistics(
        mean=float(values.mean()),
        min=int(values.min()),
        p10=p10,
        p25=p25,
        p50=p50,
        p75=p75,
        p90=p90,
        p99=p99,
        max=int(values.max()),
        total=int(values.sum()),
        histogram=measured(lengths, HISTOGRAM_BINS),
    )


def _correlation(some: Sequence[int], others: Sequence[int]) -> float | None:
    if min(some) == max(some) or min(others) == max(others):
        return None
    return float(np.corrcoef(some, others)[0, 1])


def _classes(columns: RequestColumns) -> dict[str, ClassStatistics]:
    found = {}
    numbers = np.asarray([] if columns.class_of is None else columns.class_of)
    prompts, outputs = np.asarray(columns.prompt_len), np.asarray(columns.output_len)
    for number, name in enumerate(columns.class_names):
        members = np.flatnonzero(numbers == number)
        if len(members):
            share = len(members) / len(columns)
            means = (float(lengths[members].mean()) for lengths in (prompts, outputs))
            found[name] = ClassStatistics(len(members), share, *means)
    return found


def sparkline(values: Sequence[float]) -> str:
    """One block character per value, from empty (0) to full (the largest value)."""
    largest = max(values, default=0)
    if largest <= 0:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[min(int(value / largest * len(SPARKS)), len(SPARKS) - 1)] for value in values)


def histogram_lines(histogram: Histogram, width: int = 40) -> list[str]:
    """One line per bin: its range, a bar of at most `width` characters, its count."""
    largest = max(histogram.counts)
    ranges = [f"{low:,}" if low == end - 1 else f"{low:,}-{end - 1:,}" for low, end in pairwise(histogram.edges)]
    column = max(map(len, ranges))
    return [
        f"{text:>{column}} {'█' * round(count / largest * width):{width}} {count:,}"
        for text, count in zip(ranges, histogram.counts, strict=True)
    ]
