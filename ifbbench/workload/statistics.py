"""Statistics of a trace: lengths, arrival rates, and the share of prompt tokens that requests have in common."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.workload.prompts import tokens_seen_before
from ifbbench.workload.trace import Trace, columns_of

HISTOGRAM_BINS = 12
RATE_WINDOWS = 40
SPARKS = "▁▂▃▄▅▆▇█"


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

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return asdict(self)


def trace_statistics(trace: Trace) -> TraceStatistics:
    """The statistics of `trace`, which must have a request."""
    columns = columns_of(trace.requests)
    arrivals_s = np.asarray(columns.arrival_s)
    span_s = float(arrivals_s[-1] - arrivals_s[0])
    gaps_s = np.diff(arrivals_s)
    prompt_tokens = length_statistics(columns.prompt_len)
    seen_before = tokens_seen_before(trace)
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
        rates_per_s=_rates(arrivals_s, span_s),
    )


def length_statistics(lengths: Sequence[int]) -> LengthStatistics:
    """Statistics of at least one length, each of at least 1 token."""
    values = np.asarray(lengths, dtype=np.int64)
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return LengthStatistics(
        mean=float(values.mean()),
        min=int(values.min()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=int(values.max()),
        total=int(values.sum()),
        histogram=_histogram(values),
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
    ranges = [_range(low, high - 1) for low, high in pairwise(histogram.edges)]
    column = max(map(len, ranges))
    return [
        f"{text:>{column}} {'█' * round(count / largest * width):{width}} {count:,}"
        for text, count in zip(ranges, histogram.counts, strict=True)
    ]


def _range(shortest: int, longest: int) -> str:
    return f"{shortest:,}" if shortest == longest else f"{shortest:,}-{longest:,}"


def _histogram(values: NDArray[np.int64]) -> Histogram:
    """Bins that grow by a constant factor: lengths are skewed, and in equal bins a long tail would hide the rest."""
    low, high = int(values.min()), int(values.max())
    edges = np.unique(np.rint(np.geomspace(low, high + 1, HISTOGRAM_BINS + 1)).astype(np.int64))
    counts, _ = np.histogram(values, bins=edges)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


def _rates(arrivals_s: NDArray[np.float64], span_s: float) -> tuple[float, ...]:
    """Requests per second in each of RATE_WINDOWS equal windows of the span; empty if there is no span."""
    if span_s <= 0:
        return ()
    counts, _ = np.histogram(arrivals_s, bins=RATE_WINDOWS)
    return tuple((counts * RATE_WINDOWS / span_s).tolist())
