"""The charts of a trace, as PNG and SVG: lengths, arrivals over time, and reuse of prompt tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.report.colours import INK, MUTED, SERIES
from ifbbench.report.figure_files import save
from ifbbench.report.style import in_percent, label_mean, round_ticks, steps, styled, title
from ifbbench.workload.reuse import reuse_distances
from ifbbench.workload.statistics import TraceStatistics
from ifbbench.workload.trace import RequestColumns, Trace, columns_of

MARKS = (50, 90, 99)
TIME_BINS = 120
MAX_LENGTH_BINS = 60
MINUTES_FROM_S, HOURS_FROM_S = 600, 3 * 3600


def plot_trace(trace: Trace, statistics: TraceStatistics, directory: Path) -> list[Path]:
    """Draw the charts of `trace` into `directory`; return the files written.

    They are lengths, arrivals (not if all requests arrive at once) and reuse (if the trace records equal tokens).
    """
    columns = columns_of(trace.requests)
    with styled():
        figures = {"lengths": draw_lengths(trace.name, columns, statistics)}
        if statistics.span_s > 0:
            figures["arrivals"] = draw_arrivals(trace.name, columns, statistics)
        if statistics.seen_before_share is not None:
            figures["reuse"] = draw_reuse(trace, statistics)
        return [path for name, figure in figures.items() for path in save(figure, directory, name)]


def draw_lengths(name: str, columns: RequestColumns, statistics: TraceStatistics) -> Figure:
    """Histograms above and cumulative shares below: prompts at the left, outputs at the right."""
    figure = Figure(figsize=(9, 5))
    grid = figure.subplots(2, 2, sharex="col", gridspec_kw={"height_ratios": [1.4, 1]})
    lengths = {"prompt": columns.prompt_len, "output": columns.output_len}
    for column, (what, values) in enumerate(lengths.items()):
        _lengths(grid[0, column], grid[1, column], values, what, SERIES[2 * column])
    grid[0, 0].set_ylabel("requests")
    grid[1, 0].set_ylabel("share of requests up to here")
    title(grid[0, 0], f"Lengths: {name}", f"{count(statistics.requests)} requests")
    figure.align_ylabels(grid[:, 0])
    return figure


def _lengths(shape: Axes, shares: Axes, lengths: Sequence[int], what: str, colour: str) -> None:
    values = np.sort(np.asarray(lengths))
    low, high = int(values[0]), int(values[-1])
    bins = int(np.clip(np.sqrt(len(values)), 8, MAX_LENGTH_BINS))
    logarithmic = high >= 10 * low
    edges = np.unique(np.rint((np.geomspace if logarithmic else np.linspace)(low, high + 1, bins + 1)))
    shape.hist(values, bins=edges.tolist(), color=colour)
    round_ticks(shape.yaxis, 5, whole=True)
    if logarithmic:
        shares.set_xscale("log")
    round_ticks(shares.xaxis)
    shares.ecdf(values, color=colour, linewidth=1.6)
    shares.set(xlabel=f"{what} tokens", ylim=(0, 1.06))
    round_ticks(shares.yaxis, text=in_percent)
    percentiles = np.percentile(values, MARKS)
    shares.plot(percentiles, np.array(MARKS) / 100, "o", color=INK, markersize=4, zorder=3)
    texts = [f"p{mark} {value:,.0f}" for mark, value in zip(MARKS, percentiles, strict=True)]
    shares.set_title(" · ".join([f"mean {values.mean():,.0f}", *texts]), fontsize=8.5, color=MUTED)


def draw_arrivals(name: str, columns: RequestColumns, statistics: TraceStatistics) -> Figure:
    """Requests/s above; prompt and output tokens/s that they bring below."""
    figure = Figure(figsize=(9, 5.2))
    requests, prompts, outputs = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [1.6, 1, 1]})
    arrivals_s = np.asarray(columns.arrival_s)
    edges_s = np.linspace(arrivals_s[0], arrivals_s[-1], TIME_BINS + 1)
    unit, per_unit = _time_unit(statistics.span_s)
    width_s = statistics.span_s / TIME_BINS
    panels = (
        (requests, None, "requests/s", SERIES[0]),
        (prompts, columns.prompt_len, "prompt tokens/s", SERIES[0]),
        (outputs, columns.output_len, "output tokens/s", SERIES[2]),
    )
    for axes, weights, label, colour in panels:
        amounts, _ = np.histogram(arrivals_s, edges_s, weights=None if weights is None else np.asarray(weights))
        steps(axes, amounts / width_s, edges_s / per_unit, fill=True, color=colour, linewidth=0)
        mean = float(amounts.sum() / statistics.span_s)
        axes.axhline(mean, color=INK, linewidth=0.8, linestyle=":")
        label_mean(axes, mean)
        axes.set_ylabel(label)
        round_ticks(axes.yaxis, 4)
        axes.set_ylim(bottom=0)
    outputs.set_xlabel(f"time since the start of the trace ({unit})")
    outputs.set_xlim(edges_s[0] / per_unit, edges_s[-1] / per_unit)
    round_ticks(outputs.xaxis)
    variation = f"gaps with a coefficient of variation of {significant(statistics.gap_cv)}"
    title(requests, f"Arrivals: {name}", f"bins of {significant(width_s)} s · {variation}")
    figure.align_ylabels()
    return figure


def _time_unit(span_s: float) -> tuple[str, float]:
    if span_s >= HOURS_FROM_S:
        return "h", 3600.0
    return ("min", 60.0) if span_s >= MINUTES_FROM_S else ("s", 1.0)


def draw_reuse(trace: Trace, statistics: TraceStatistics) -> Figure:
    """The share of prompt tokens that an earlier prompt began with too, over the tokens since their last use."""
    distances, lengths, prompt_tokens = reuse_distances(trace)
    figure = Figure(figsize=(7.5, 4.2))
    axes = figure.subplots()
    order = np.argsort(distances)
    shares = np.cumsum(lengths[order]) / prompt_tokens * 100
    if len(shares):
        tokens = np.maximum(distances[order], 1)
        axes.plot(tokens, shares, color=SERIES[0], linewidth=1.6, drawstyle="steps-post")
        axes.set_xscale("log")
        axes.fill_between(tokens, shares, step="post", color=SERIES[0], alpha=0.15, linewidth=0)
        axes.set_xlim(tokens[0] * 0.8, tokens[-1] * 1.25)
    else:
        axes.text(0.5, 0.5, "no prompt begins like an earlier one", transform=axes.transAxes, ha="center", color=MUTED)
    axes.set(xlabel="tokens of all requests since their last use", ylabel="prompt tokens seen before (%)")
    axes.set_ylim(0, max(float(shares[-1]) * 1.15, 1.0) if len(shares) else 1.0)
    round_ticks(axes.xaxis)
    share = statistics.seen_before_share or 0.0
    title(
        axes,
        f"Reuse: {trace.name}",
        f"{percent(share, 1)} of {count(prompt_tokens)} prompt tokens were seen before · at x: what a cache of the "
        "last x tokens finds",
    )
    return figure
