"""Confidence intervals: of means over repeats with different seeds, and of the figures of a single run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from statistics import fmean, variance
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ifbbench.rundir.metrics import PER_REQUEST, PERCENTILES, distribution

CONFIDENCE = 0.95
Floats: TypeAlias = NDArray[np.float64]
Interval: TypeAlias = tuple[float, float]


def half_width(values: Sequence[float] | Floats) -> float | None:
    """Half of the confidence interval of the mean of independent `values`, by Student's t distribution; None with fewer
    than two."""
    if len(values) < 2:
        return None
    return student_t(CONFIDENCE, len(values) - 1) * float(np.std(values, ddof=1)) / sqrt(len(values))


def half_width_of_difference(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Half of the confidence interval of the difference of the means of two independent samples, of different variances
    (Welch's); None with fewer than two values in either."""
    if min(len(a), len(b)) < 2:
        return None
    parts = variance(a) / len(a), variance(b) / len(b)
    total = sum(parts)
    if not total:
        return 0.0
    degrees = total**2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    return student_t(CONFIDENCE, max(int(degrees), 1)) * sqrt(total)


@dataclass(frozen=True)
class Margin:
    """Half of the confidence interval of a figure or, if is_log, of its logarithm."""

    half: float
    is_log: bool = False

    def around(self, value: float) -> Interval:
        """The interval of a figure that is `value`. Of its difference from another one: less that one."""
        if self.is_log:
            return value * exp(-self.half), value * exp(self.half)
        return value - self.half, value + self.half


OF_BLOCKS = "95 % intervals: for other requests like these, by Student's t over {} blocks of consecutive arrivals."
# A run is cut into a few long blocks: the variance of a tail is that of a few bursts, which short blocks cut, and the
# interval of t over any fixed number of blocks is right in the limit (Glynn and Iglehart, Simulation output analysis
# using standardized time series, 1990), while more blocks make it hardly narrower (Schmeiser, Batch size effects in
# the analysis of simulation output, 1982). Each block has MIN_REQUESTS requests or more, and is MIN_LENGTH times as
# long as the mean latency or longer. A percentile has MIN_BEYOND requests or more above it. Of one run alone it has
# MIN_BEYOND_ALONE: with fewer, percentiles vary by more upwards than downwards, and an interval misses their mean more
# often than it says. In the difference of two runs that cancels.
BLOCKS = 5
MIN_REQUESTS, MIN_LENGTH, MIN_BEYOND, MIN_BEYOND_ALONE = 20, 10.0, 8.0, 400.0
# The time after which the state of a server is forgotten, in mean latencies. Half of it on each side of an edge couples
# two blocks.
MEMORY = 2.0
# Half of the interval of a logarithm that says nothing.
MAX_HALF = 20.0


class RunSample:
    """The figures of one run as a sample: how much they would vary with other requests like these.

    Requests share batches and wait for each other, so that neighbours are not independent, but parts of the run that
    are long against a request's latency nearly are. The run is cut into blocks of as many consecutive arrivals. Each
    figure is computed without each block in turn (the jackknife with groups), which works for means, percentiles and
    rates alike; the pseudo-values of the blocks have Student's t distribution.

    lengths: its arrivals last so many mean latencies. An overloaded run, in which latencies grow with the run, is
        always too short.
    blocks: 0 if the run is too short.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], window: Interval | None = None) -> None:
        """rows: lines of `requests.jsonl`.
        window: (start, end) in seconds, of a run with a steady state; only requests that end in it count.
        """
        counted = [
            row
            for row in rows
            if row.get("arrival_s") is not None and (row["outcome"] == "failed" or _is_complete(row))
        ]
        if window is not None:
            counted = [row for row in counted if _is_complete(row) and window[0] <= row["end_s"] <= window[1]]
        counted.sort(key=lambda row: (row["arrival_s"], row.get("index") or 0))
        completed = [row for row in counted if row["outcome"] == "completed"]
        ranks = [rank for rank, row in enumerate(counted) if row["outcome"] == "completed"]
        self._count, self._rank = len(counted), np.array(ranks, np.int64)
        self._arrival_s = _column(counted, "arrival_s")
        has_goodput = bool(counted) and "slo_met" in counted[0]
        self._met = np.array([bool(row.get("slo_met")) for row in counted]) if has_goodput else None
        self._latencies = {name: _column(completed, name) for name in PER_REQUEST}
        self._prompt, self._output = _column(completed, "prompt_len"), _column(completed, "output_len")
        self._reused = np.nan_to_num(_column(completed, "reused_tokens"))
        self._span, self.lengths = (0.0, 0.0), 0.0
        if completed:
            self._span = window or (float(self._arrival_s[0]), max(row["end_s"] for row in completed))
            latency_s = float(self._latencies["e2e_s"].mean())
            self.lengths = float(self._arrival_s[-1] - self._arrival_s[0]) / latency_s if latency_s > 0 else np.inf

    @property
    def blocks(self) -> int:
        return 0 if self.too_short else BLOCKS

    @property
    def too_short(self) -> str:
        """Why there are no blocks; empty if there are."""
        if len(self._rank) < BLOCKS * MIN_REQUESTS:
            return f"it completed {len(self._rank)} requests, and {BLOCKS * MIN_REQUESTS} are needed"
        if (needed := BLOCKS * MIN_LENGTH) > self.lengths:
            return f"its arrivals last {self.lengths:.2g} times the mean latency, and {needed:.0f} times are needed"
        return ""

    def left_out(self, min_beyond: float = MIN_BEYOND) -> dict[str, tuple[float, Floats]]:
        """Each figure by its dotted name: of the whole run, and without each block, [BLOCKS].

        min_beyond: how many requests a percentile has above it at least."""
        blocks = BLOCKS
        of_all = np.arange(self._count) * blocks // max(self._count, 1)
        of_completed = of_all[self._rank]
        found: dict[str, tuple[float, Floats]] = {}
        with np.errstate(divide="ignore"):
            columns = self._latencies | {"per_user_output_speed_tokens_per_s": 1 / self._latencies["tpot_s"]}
        for name, column in columns.items():
            is_known = np.isfinite(column)
            values, block = column[is_known], of_completed[is_known]
            whole, parts = distribution(values), [distribution(values[block != one]) for one in range(blocks)]
            for statistic in ("mean", *PERCENTILES):
                beyond = len(values) * (1 - PERCENTILES.get(statistic, 0.0) / 100)
                if (statistic == "mean" or beyond >= min_beyond) and all(part[statistic] is not None for part in parts):
                    left = np.array([part[statistic] for part in parts], np.float64)
                    found[f"{name}.{statistic}"] = whole[statistic] or 0.0, left

        def ratio(name: str, over: Floats, under: Floats) -> None:
            """over, under: their sums in each block."""
            totals = over.sum(), under.sum()
            if (under < totals[1]).all():
                found[name] = float(totals[0] / totals[1]), (totals[0] - over) / (totals[1] - under)

        def sums(values: Floats) -> Floats:
            return np.bincount(of_completed, values, minlength=blocks).astype(np.float64)

        begins = self._arrival_s[np.searchsorted(of_all, np.arange(1, blocks))]
        seconds = np.diff([self._span[0], *begins, self._span[1]])
        ratio("request_throughput_per_s", sums(np.ones(len(self._rank))), seconds)
        ratio("output_throughput_tokens_per_s", sums(self._output), seconds)
        ratio("total_throughput_tokens_per_s", sums(self._prompt + self._output), seconds)
        if self._met is not None:
            met, requests = (
                np.bincount(of_all, each, minlength=blocks).astype(np.float64)
                for each in (self._met, np.ones(self._count))
            )
            ratio("goodput_requests_per_s", met, seconds)
            ratio("goodput_share", met, requests)
        ratio("prefix_hit_rate", sums(self._reused), sums(self._prompt))
        gaps = np.maximum(self._output - 1, 0)
        ratio("itl_s.mean", sums(np.nan_to_num(self._latencies["tpot_s"]) * gaps), sums(gaps))
        return found


def margins(run: RunSample, than: RunSample | None = None) -> dict[str, Margin]:
    """The confidence interval of each figure of `run`, or of its difference from that of `than`: for other requests
    like these. Empty if a run is too short to tell.

    Blocks at the same position of two runs are paired: what both have in common, such as the requests themselves or a
    rate that changes over the day, does not count as uncertainty. Figures that are positive are taken by their
    logarithms, as a jackknife should be where the variance grows with the figure (Miller, The jackknife - a review,
    1974): a run with a high percentile has a wide interval, and one with a low one a narrow interval."""
    runs = [run] if than is None else [run, than]
    if not all(one.blocks for one in runs):
        return {}
    of_runs = [one.left_out(MIN_BEYOND_ALONE if than is None else MIN_BEYOND) for one in runs]
    correlated = 1 / sqrt(1 - MEMORY * BLOCKS / min(one.lengths for one in runs))
    found = {}
    for name in of_runs[0]:
        if not all(name in figures for figures in of_runs):
            continue
        values = [figures[name] for figures in of_runs]
        is_log = all(whole > 0 and (left > 0).all() for whole, left in values)
        if is_log:
            values = [(log(whole), np.log(left)) for whole, left in values]
        pseudo_values = [BLOCKS * whole - (BLOCKS - 1) * left for whole, left in values]
        half = half_width(pseudo_values[0] if than is None else pseudo_values[0] - pseudo_values[1])
        if half is not None and np.isfinite(half) and not (is_log and half * correlated > MAX_HALF):
            found[name] = Margin(half * correlated, is_log)
    return found


def _is_complete(row: Mapping[str, Any]) -> bool:
    return row["outcome"] == "completed" and row.get("e2e_s") is not None and row.get("end_s") is not None


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> Floats:
    """The values of a field, NaN where a row has none."""
    return np.array([np.nan if (value := row.get(name)) is None else value for row in rows], np.float64)


def summary_of(summaries: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """The summary of `count` repeats, of which `summaries` ended: the mean of each figure under its name, and under
    `confidence_interval_95` its limits [low, high], None with fewer than two values. Figures that are not numbers are
    kept where all repeats agree."""
    return {
        "repeats": {"total": count, "completed": len(summaries)},
        **combined(summaries, fmean),
        "confidence_interval_95": combined(summaries, _interval),
    }


def combined(tables: Sequence[Mapping[str, Any]], combine: Callable[[Sequence[float]], Any]) -> dict[str, Any]:
    """Each number of nested tables as `combine` makes one of those of all tables that have it."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [value for table in tables if (value := table.get(name)) is not None]
        if values and all(isinstance(value, Mapping) for value in values):
            found[name] = combined(values, combine)
        elif values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            found[name] = combine(values)
        elif combine is fmean:
            found[name] = values[0] if values and all(value == values[0] for value in values) else None
    return found


def _interval(values: Sequence[float]) -> list[float] | None:
    """The limits of the confidence interval of the mean of `values`."""
    half = half_width(values)
    return None if half is None else [fmean(values) - half, fmean(values) + half]


@cache
def student_t(confidence: float, degrees: int) -> float:
    """The t that a value of Student's t distribution stays within, on both sides, with probability `confidence`."""
    from scipy.special import stdtrit  # takes as long to import as a short simulated run

    return float(stdtrit(degrees, (1 + confidence) / 2))
