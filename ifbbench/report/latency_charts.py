"""Charts of latencies: distributions, TTFT against prompt length, and gaps between tokens over time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ifbbench.analysis.number_texts import percent, significant, time_unit
from ifbbench.analysis.token_times import TokenGaps
from ifbbench.analysis.words import Words, words_of
from ifbbench.report.colours import INK, LIMIT, MUTED, PAUSE, PERCENTILES, SERIES, limit_colours
from ifbbench.report.style import WIDTH, TimeBins, heading, in_percent, legend_above, note_inside, round_ticks, steps
from ifbbench.rundir.figures import PART_OF_ATTRIBUTION
from ifbbench.rundir.fleet import replica_directories
from ifbbench.rundir.metrics import limit_waited_for
from ifbbench.rundir.reader import Floats, RunData, load_run

# A request is coloured by the limit that it waited for if that took more than this share of its TTFT.
NOTABLE_WAIT = 0.1
MEDIAN_BINS = 14
LOG_FROM_RATIO = 20
# Percentiles that the chart of latencies marks, and from which ratio of values its axis is logarithmic.
MARKS = (50, 90, 99)
LOG_LATENCY_FROM_RATIO = 10
RARE_RATIO = 15
MAX_CURVE_POINTS = 2000
# A stall is a gap of more than so many times the median one.
STALL_RATIO, POINTS_OF_A_BIN = 5.0, 12


@dataclass(frozen=True)
class Pool:
    """Numbers in ascending order, and up to each of them how many there are, equal ones included."""

    values: Floats
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, values: Floats, counts: NDArray[np.int64] | None = None) -> "Pool":
        """counts: how often each value is there; once by default."""
        order = np.argsort(values)
        return cls(values[order], np.arange(1, len(values) + 1) if counts is None else np.cumsum(counts[order]))

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def at(self, positions: NDArray[np.int64]) -> Floats:
        """The values at positions of the list of all, equal ones included."""
        return self.values[np.searchsorted(self.ends, positions, side="right")]

    def below(self, limits: Floats) -> NDArray[np.int64]:
        """How many values are less than each of `limits`."""
        return np.concatenate([[0], self.ends])[np.searchsorted(self.values, limits)]

    def percentiles(self, marks: Sequence[float]) -> Floats:
        """As of `np.percentile`: straight between neighbouring values."""
        positions = np.array(marks) / 100 * (len(self) - 1)
        low = positions.astype(np.int64)
        begin, end = self.at(low), self.at(np.minimum(low + 1, len(self) - 1))
        return begin + (end - begin) * (positions - low)


def draw_latency(run: RunData) -> Figure:
    """TTFT of each request at the left, every gap between tokens (ITL) at the right."""
    figure = Figure(figsize=(WIDTH, 5.2))
    grid = figure.subplots(2, 2, sharex="col", gridspec_kw={"height_ratios": [1, 1.6]})
    ttft = run.completed["ttft_s"].dropna().to_numpy(dtype=float)
    _distribution(grid[0, 0], grid[1, 0], Pool.of(ttft), "TTFT", "requests", SERIES[0])
    runs = [run]
    if run.is_fleet and not run.is_disaggregated:
        runs = [load_run(path) for path in replica_directories(run.path)]
    if any(one.recorded_every > 1 or one.has_only_summary for one in runs):
        _unrecorded_gaps(grid[0, 1], grid[1, 1], run)
    else:
        of_runs = [TokenGaps.of(one) for one in runs]
        gaps = np.concatenate([np.empty(0), *(one.seconds for one in of_runs)])
        counts = np.concatenate([np.empty(0, np.int64), *(one.count for one in of_runs)])
        _distribution(grid[0, 1], grid[1, 1], Pool.of(gaps, counts), "ITL", "gaps", SERIES[0])
    grid[1, 0].set_ylabel("share of values up to here")
    heading(grid[0, 0], "Latency", run)
    figure.align_ylabels(grid[:, 0])
    return figure


def _distribution(shape: Axes, shares: Axes, seconds: Pool, name: str, counted: str, colour: str) -> None:
    unit, scale = time_unit(seconds.percentiles([50]).tolist() if len(seconds) else [])
    pool = replace(seconds, values=seconds.values * scale)
    shape.set_ylabel(counted)
    round_ticks(shape.yaxis, 5, whole=True)
    shares.set_xlabel(f"{name} ({unit})")
    shares.set_ylim(0, 1.06)
    round_ticks(shares.yaxis, text=in_percent)
    if not len(pool):
        shares.text(0.5, 0.5, f"no {counted}", transform=shares.transAxes, ha="center", color=MUTED)
        return
    low, high = float(pool.values[0]), float(pool.values[-1])
    logarithmic = low > 0 and high / low >= LOG_LATENCY_FROM_RATIO
    if logarithmic:
        shares.set_xscale("log")
    round_ticks(shares.xaxis)
    high_value = high
    if low == high:
        low, high = low * 0.95, high * 1.05 or 1.0
    # More bins for more values; even ones, and on a logarithmic axis evenly growing ones.
    bins = int(np.clip(np.sqrt(len(pool)), 6, 60))
    edges = (np.geomspace if logarithmic else np.linspace)(low, high, bins + 1)
    counts = np.diff(np.append(pool.below(edges[:-1]), len(pool)))
    steps(shape, counts.astype(float), edges, fill=True, color=colour, linewidth=0)
    if np.max(counts) > RARE_RATIO * len(pool) / bins:
        # A few long stalls among many short gaps are visible on a logarithmic axis only.
        shape.set_yscale("log")
        shape.set_ylim(bottom=0.5)
        round_ticks(shape.yaxis)
    # As percentiles are computed: straight between neighbouring values. The curve of many values needs few of them.
    grid = np.unique(np.linspace(0, len(pool) - 1, min(len(pool), MAX_CURVE_POINTS)).astype(int))
    shares.plot(pool.at(grid), grid / max(len(pool) - 1, 1), color=colour, linewidth=1.6)
    percentiles = pool.percentiles(MARKS)
    shares.plot(percentiles, np.array(MARKS) / 100, "o", color=INK, markersize=4, zorder=3)
    shares.plot([high_value], [1.0], "D", color=LIMIT, markersize=4, zorder=3)
    texts = [f"p{mark} {significant(value)}" for mark, value in zip(MARKS, percentiles, strict=True)]
    shares.set_title(" · ".join([*texts, f"max {significant(high_value)} {unit}"]), fontsize=8.5, color=MUTED)


def _unrecorded_gaps(shape: Axes, shares: Axes, run: RunData) -> None:
    """Without all iterations the time of each token is unknown: the percentiles of summary.json stand in its place."""
    why = f"not drawn: only one of {run.recorded_every}\niterations has its time recorded"
    if run.has_only_summary:
        why = "not drawn: --recording summary\nhas no times of iterations"
    if run.is_disaggregated:
        why = "not drawn: tokens of a request\ncome from two replicas"
    shape.text(0.5, 0.5, why, transform=shape.transAxes, ha="center", va="center", color=MUTED)
    known = {mark: ((run.summary or {}).get("itl_s") or {}).get(f"p{mark}") for mark in MARKS}
    unit, scale = time_unit(known.values())
    texts = [f"p{mark} {significant(value, scale)} {unit}" for mark, value in known.items() if value is not None]
    shares.set_title(" · ".join(texts), fontsize=8.5, color=MUTED)
    shares.set_xlabel("ITL")
    for axes in (shape, shares):
        axes.set(xticks=[], yticks=[])


def draw_ttft(run: RunData) -> Figure:
    """TTFT of each request against the length of its prompt, in the colour of what it mainly waited for."""
    figure = Figure(figsize=(WIDTH, 5.2))
    axes = figure.subplots()
    done = run.completed.dropna(subset=["ttft_s"])
    ttft_s, lengths = done["ttft_s"].to_numpy(dtype=float), done["prompt_len"].to_numpy(dtype=float)
    unit, scale = time_unit([float(np.median(ttft_s))] if len(ttft_s) else [])
    causes = _main_waits(done)
    colours = limit_colours(causes) | ({"none": MUTED} if "none" in causes else {})
    size, opacity = (22, 0.85) if len(done) <= 400 else (8, 0.5) if len(done) <= 4000 else (4, 0.3)
    for cause, colour in reversed(colours.items()):
        chosen = causes == cause
        computing = "computing" if run.endpoint is None else "in the server"
        name = computing if cause == "none" else words_of(run.config).limit_name(cause)
        axes.scatter(
            lengths[chosen],
            ttft_s[chosen] * scale,
            s=size,
            color=colour,
            alpha=opacity,
            linewidths=0,
            label=f"{name} ({percent(chosen.mean())})",
            rasterized=len(done) > 2000,
        )
    axes.set(xlabel="prompt length (tokens)", ylabel=f"TTFT ({unit})")
    if not len(done):
        axes.text(0.5, 0.5, "no completed request", transform=axes.transAxes, ha="center", color=MUTED)
    else:
        if ttft_s.min() > 0 and ttft_s.max() / ttft_s.min() > LOG_FROM_RATIO:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, float(ttft_s.max()) * scale * 1.1 or 1.0)
        if lengths.min() > 0 and lengths.max() / lengths.min() > LOG_FROM_RATIO:
            axes.set_xscale("log")
        _median_line(figure, lengths, ttft_s * scale, axes.get_xscale() == "log")
        legend = legend_above(axes, min(len(colours) + 1, 5))
        for handle in legend.legend_handles:
            if isinstance(handle, PathCollection):
                handle.set_alpha(1)
                handle.set_sizes([25])
    axes.grid(visible=True, axis="both")
    for axis in (axes.xaxis, axes.yaxis):
        round_ticks(axis)
    heading(axes, "TTFT by prompt length", run, legend=True)
    return figure


def _main_waits(done: pd.DataFrame) -> "np.ndarray[tuple[int], np.dtype[np.object_]]":
    """The limit that each request waited for longest before its first token; `none` if that was short."""
    waited: dict[str, Floats] = {}
    for column in done.columns:
        if column.startswith(PART_OF_ATTRIBUTION):
            limit = limit_waited_for(column.removeprefix(PART_OF_ATTRIBUTION))
            if limit not in (None, "none"):
                values = done[column].fillna(0).to_numpy(dtype=float)
                waited[str(limit)] = waited.get(str(limit), np.zeros(len(done))) + values
    causes = np.full(len(done), "none", dtype=object)
    longest = NOTABLE_WAIT * done["ttft_s"].to_numpy(dtype=float)
    for limit, values in waited.items():
        causes[values > longest] = limit
        longest = np.maximum(longest, values)
    return causes


def _median_line(figure: Figure, lengths: Floats, values: Floats, logarithmic: bool) -> None:
    """The median of each of a few ranges of prompt lengths."""
    if len(lengths) < 4 * MEDIAN_BINS or lengths.min() == lengths.max():
        return
    space = np.geomspace if logarithmic else np.linspace
    bins = np.clip(np.digitize(lengths, space(lengths.min(), lengths.max(), MEDIAN_BINS + 1)) - 1, 0, MEDIAN_BINS - 1)
    table = pd.DataFrame({"bin": bins, "length": lengths, "value": values}).groupby("bin")
    medians = table.median()[table.size() >= 5]
    figure.axes[0].plot(medians["length"], medians["value"], color=INK, linewidth=1.6, label="median")


def draw_itl(run: RunData) -> Figure:
    """Gaps between the tokens of requests over time, by when they ended: percentiles, and each stall as a point."""
    bins = TimeBins.of(run)
    gaps = TokenGaps.of(run) if run.recorded_every == 1 else None
    if gaps is None or not len(gaps.seconds):
        why = f"not drawn: only one of {run.recorded_every} iterations has its time recorded"
        return _no_gaps(run, why if gaps is None else "no request has two tokens")
    median = float(Pool.of(gaps.seconds, gaps.count).percentiles([50])[0])
    if has_stalls := bool(gaps.seconds.max() > STALL_RATIO * median):
        figure = Figure(figsize=(WIDTH, 5.6))
        shares, last = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2]})
    else:
        figure = Figure(figsize=(WIDTH, 4))
        shares = last = figure.subplots()
    heading(shares, "Inter-token latency over time", run, legend=True)
    unit, scale = time_unit([median])
    indices = np.clip(np.searchsorted(bins.edges_s, gaps.end_s, side="left") - 1, 0, len(bins.edges_s) - 2)
    # By bin, then by length: the stable sort of small integers takes one pass.
    order = np.argsort(gaps.seconds)
    order = order[np.argsort(indices[order].astype(np.int16), kind="stable")]
    ordered = Pool(gaps.seconds[order], np.cumsum(gaps.count[order]))
    counts = np.bincount(indices, gaps.count, len(bins.edges_s) - 1).astype(np.int64)
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    highest = 0.0
    # Where both are equal, the wide line is seen behind the narrow one.
    for mark, colour, width, name in ((99, PERCENTILES[1], 2.4, "p99"), (50, PERCENTILES[0], 1.2, "p50")):
        positions = np.minimum(firsts + ((counts - 1) * mark // 100).clip(min=0), len(ordered) - 1)
        values = np.where(counts > 0, ordered.at(positions) * scale, np.nan)
        highest = max(highest, float(np.nanmax(values)))
        steps(shares, values, bins.edges, baseline=None, color=colour, linewidth=width, label=name)
    shares.set_ylabel(f"ITL ({unit})")
    shares.set_ylim(0, highest * 1.12 or 1.0)
    round_ticks(shares.yaxis)
    legend_above(shares, 2)
    if has_stalls:
        _stalls(figure, bins, gaps, median, words_of(run.config))
    else:
        longest = significant(float(gaps.seconds.max()) * scale)
        note_inside(shares, f"no gap exceeds {STALL_RATIO:.0f} × the median; the longest is {longest} {unit}")
    bins.label(last)
    figure.align_ylabels()
    return figure


def _no_gaps(run: RunData, why: str) -> Figure:
    figure = Figure(figsize=(WIDTH, 2.4))
    axes = figure.subplots()
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=MUTED)
    axes.set(xticks=[], yticks=[])
    heading(axes, "Inter-token latency over time", run)
    return figure


def _stalls(figure: Figure, bins: TimeBins, gaps: TokenGaps, median: float, words: Words) -> None:
    """The gaps of more than STALL_RATIO medians, those over a pause in a colour of their own."""
    axes = figure.axes[1]
    chosen = np.flatnonzero(gaps.seconds > STALL_RATIO * median)
    chosen = np.repeat(chosen, gaps.count[chosen])
    total = len(chosen)
    # The longest gaps of each bin alone are drawn: many others would hide them.
    bin_of = np.searchsorted(bins.edges_s, gaps.end_s[chosen])
    order = np.lexsort((-gaps.seconds[chosen], bin_of))
    ordered_bins = bin_of[order]
    drawn = chosen[order[np.arange(total) - np.searchsorted(ordered_bins, ordered_bins) < POINTS_OF_A_BIN]]
    few = "" if len(drawn) == total else f"\n({POINTS_OF_A_BIN} longest of each bin)"
    unit, scale = time_unit([float(np.median(gaps.seconds[drawn]))])
    for over_pause, colour, name in (
        (False, SERIES[0], "while the request ran"),
        (True, PAUSE, f"over a {words.pause}"),
    ):
        points = drawn[gaps.over_pause[drawn] == over_pause]
        count = int((gaps.over_pause[chosen] == over_pause).sum())
        if count:
            axes.plot(
                bins.scaled(gaps.end_s[points]),
                gaps.seconds[points] * scale,
                "o",
                color=colour,
                markersize=4,
                alpha=0.6,
                markeredgewidth=0,
                label=f"{name} ({count:,})",
                rasterized=True,
            )
    axes.set_ylabel(f"stalls ({unit}){few}")
    if gaps.seconds[drawn].max() / gaps.seconds[drawn].min() > LOG_FROM_RATIO:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    round_ticks(axes.yaxis)
    longest = time_unit([float(gaps.seconds.max())])
    axes.set_title(
        f"{total:,} gaps ({percent(total / gaps.count.sum())}) exceed {STALL_RATIO:.0f} × the median; "
        f"the longest is {significant(float(gaps.seconds.max()), longest[1])} {longest[0]}",
        fontsize=8.5,
        color=MUTED,
    )
    legend_above(axes, 2)
