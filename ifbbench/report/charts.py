"""The charts of a run, as PNG and SVG."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

from ifbbench.errors import InputError
from ifbbench.recording.run_directory import find_lines
from ifbbench.report import percent, significant, time_unit
from ifbbench.report.figures import figures, inter_token_gaps, output_tokens
from ifbbench.report.load import Floats, RunData
from ifbbench.report.style import (
    INK,
    LIMIT,
    LIMIT_COLOURS,
    LIMIT_DASHES,
    MUTED,
    PHASE_COLOURS,
    SERIES,
    TimeBins,
    draw_limit,
    heading,
    save,
    styled,
    thousands,
)
from ifbbench.report.tables import LIMIT_NAMES
from ifbbench.report.timeline import draw_timeline

# Percentiles that the chart of latencies marks.
MARKS = (50, 90, 99)
LOG_FROM_RATIO = 10


def plot_run(run: RunData, directory: Path | None = None) -> list[Path]:
    """Draw the charts of `run` into `directory`, by default `charts` in the run directory; return the files written.

    They are throughput, kv_cache (not for a contiguous cache), latency and timeline, each as .png and .svg.
    InputError if the run has no iteration to draw.
    """
    if run.iterations.empty:
        raise InputError(
            f"{find_lines(run.path, 'iterations')}: no iterations, so there is nothing to draw; expected those of a "
            "run that began its work. Run again, or name another run."
        )
    charts = {"throughput": draw_throughput, "latency": draw_latency, "timeline": draw_timeline}
    if run.iterations["max_kv_cache_blocks"].max() > 0:
        charts["kv_cache"] = draw_kv_cache
    directory = directory or run.path / "charts"
    with styled():
        return [path for name, draw in sorted(charts.items()) for path in save(draw(run), directory, name)]


def draw_throughput(run: RunData) -> Figure:
    """Requests that wait by the limit that held the first of them, output tokens/s, context tokens/s and requests in
    the batch, one above the other on one axis of time."""
    figure = Figure(figsize=(9, 8))
    panels = figure.subplots(4, 1, sharex=True, gridspec_kw={"height_ratios": [1.6, 2, 1.4, 2]})
    waiting, output, context, batch = panels
    bins, iterations = TimeBins.of(run), run.iterations
    _rate(output, bins, output_tokens(run), "generation", "output tokens/s")
    _rate(context, bins, iterations["total_context_tokens"].to_numpy(dtype=float), "context", "context tokens/s")
    generation = bins.means(iterations["generation_requests"].to_numpy(dtype=float))
    total = generation + bins.means(iterations["context_requests"].to_numpy(dtype=float))
    batch.stairs(total, bins.edges, baseline=generation, fill=True, color=PHASE_COLOURS["context"], linewidth=0,
                 label="in context phase")  # fmt: skip
    batch.stairs(generation, bins.edges, fill=True, color=PHASE_COLOURS["generation"], linewidth=0,
                 label="in generation phase")  # fmt: skip
    batch.set_ylabel("requests in the batch")
    draw_limit(batch, "max_batch_size", run.config.get("max_batch_size"), float(total.max()))
    batch.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    batch.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    _waiting(waiting, bins, run)
    bins.label(batch)
    heading(waiting, "Throughput", run)
    figure.align_ylabels()
    return figure


def _waiting(axes: Axes, bins: TimeBins, run: RunData) -> None:
    """Requests that have arrived and do not run, by the limit that bound the iteration."""
    number, below = run.iterations["waiting"].to_numpy(dtype=float), np.zeros(len(bins.edges) - 1)
    shares = figures(run).get("waiting_by_limit") or {}
    for limit, colour in LIMIT_COLOURS.items():
        above = below + bins.means(np.where(run.iterations["bound_by"] == limit, number, 0.0))
        if above.max() > below.max() or shares.get(limit):
            share = f" ({percent(shares[limit] / sum(shares.values()))})" if sum(shares.values()) else ""
            axes.stairs(above, bins.edges, baseline=below, fill=True, color=colour, linewidth=0,
                        label=f"{LIMIT_NAMES[limit]}{share}")  # fmt: skip
        below = above
    axes.set_ylabel("requests waiting")
    axes.set_ylim(0, max(1.0, float(below.max())) * 1.35)  # the legend is above the highest value
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    thousands(axes.yaxis)
    if axes.patches:
        axes.legend(loc="upper right", ncols=4, borderaxespad=0)


def _rate(axes: Axes, bins: TimeBins, tokens: Floats, phase: str, label: str) -> None:
    rates = bins.rates(tokens)
    axes.stairs(rates, bins.edges, fill=True, color=PHASE_COLOURS[phase], linewidth=0)
    mean = tokens[tokens == tokens].sum() / (bins.edges_s[-1] - bins.edges_s[0])
    axes.axhline(mean, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate(
        f"mean {significant(mean)}", (1, mean), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", color=INK, fontsize=8, va="center",
    )  # fmt: skip
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    thousands(axes.yaxis)


def draw_kv_cache(run: RunData) -> Figure:
    """Used blocks and the size of the pool above, pauses below."""
    figure = Figure(figsize=(9, 4.6))
    blocks, pauses = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
    bins, iterations = TimeBins.of(run), run.iterations
    pool, size = (iterations[name].max() for name in ("max_kv_cache_blocks", "tokens_per_kv_cache_block"))
    used = bins.peaks(iterations["used_kv_cache_blocks"].to_numpy(dtype=float))
    blocks.stairs(used, bins.edges, fill=True, color=SERIES[0], alpha=0.25, linewidth=0)
    blocks.stairs(used, bins.edges, baseline=None, color=SERIES[0], linewidth=1.2)
    blocks.axhline(pool, color=LIMIT, linewidth=1, linestyle=LIMIT_DASHES)
    blocks.annotate(
        f"pool: {pool:,.0f} blocks of {size:.0f} tokens", (0, pool), xycoords=("axes fraction", "data"),
        xytext=(4, 4), textcoords="offset points", color=LIMIT, fontsize=8,
    )  # fmt: skip
    blocks.set(ylabel="KV blocks used", ylim=(0, pool * 1.14))
    blocks.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    thousands(blocks.yaxis)
    to_percent, to_blocks = 100 / pool, pool / 100
    share = blocks.secondary_yaxis("right", functions=(lambda y: np.asarray(y) * to_percent,
                                                       lambda y: np.asarray(y) * to_blocks))  # fmt: skip
    share.set(ylabel="% of the pool", yticks=[0, 25, 50, 75, 100])
    share.spines["right"].set_visible(False)
    share.tick_params(length=0)
    paused = iterations["pauses"].to_numpy(dtype=float)
    counts, _ = np.histogram(bins.clock.start_s, bins.edges_s, weights=paused)
    pauses.stairs(counts, bins.edges, fill=True, color=SERIES[1], linewidth=0)
    pauses.set_ylabel(f"pauses{bins.per_bin}")
    pauses.set_ylim(0, max(1.0, float(counts.max())) * 1.2)
    pauses.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
    if not paused.any():
        pauses.text(0.5, 0.5, "no request was paused", transform=pauses.transAxes, ha="center", va="center",
                    color=MUTED)  # fmt: skip
    bins.label(pauses)
    heading(blocks, "KV cache", run)
    figure.align_ylabels()
    return figure


def draw_latency(run: RunData) -> Figure:
    """TTFT of each request at the left, every gap between tokens (ITL) at the right."""
    figure = Figure(figsize=(9, 5))
    grid = figure.subplots(2, 2, sharex="col", gridspec_kw={"height_ratios": [1, 1.6]})
    ttft = run.completed["ttft_s"].dropna().to_numpy(dtype=float)
    _distribution(grid[0, 0], grid[1, 0], ttft, "TTFT", "requests", SERIES[0])
    if run.recorded_every > 1:
        _unrecorded_gaps(grid[0, 1], grid[1, 1], run)
    else:
        _distribution(grid[0, 1], grid[1, 1], inter_token_gaps(run), "ITL", "gaps", SERIES[2])
    grid[1, 0].set_ylabel("share of values up to here")
    heading(grid[0, 0], "Latency", run)
    figure.align_ylabels(grid[:, 0])
    return figure


def _distribution(shape: Axes, shares: Axes, seconds: Floats, name: str, counted: str, colour: str) -> None:
    unit, scale = time_unit([float(np.median(seconds))] if seconds.size else [])
    values = np.sort(seconds) * scale
    shape.set_ylabel(counted)
    shape.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    thousands(shape.yaxis)
    shares.set_xlabel(f"{name} ({unit})")
    shares.set_ylim(0, 1.06)
    shares.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    if not values.size:
        shares.text(0.5, 0.5, f"no {counted}", transform=shares.transAxes, ha="center", color=MUTED)
        return
    logarithmic = values[0] > 0 and values[-1] / values[0] >= LOG_FROM_RATIO
    if logarithmic:
        shares.set_xscale("log")
        shares.xaxis.set_minor_formatter(NullFormatter())
    thousands(shares.xaxis)
    low, high = float(values[0]), float(values[-1])
    if low == high:
        low, high = low * 0.95, high * 1.05 or 1.0
    # More bins for more values; even ones, and on a logarithmic axis evenly growing ones.
    bins = int(np.clip(np.sqrt(values.size), 6, 60))
    edges = (np.geomspace if logarithmic else np.linspace)(low, high, bins + 1)
    shape.hist(values, bins=list(edges), color=colour)
    shares.ecdf(values, color=colour, linewidth=1.6)
    percentiles = np.percentile(values, MARKS)
    shares.plot(percentiles, np.array(MARKS) / 100, "o", color=INK, markersize=4, zorder=3)
    texts = [f"p{mark} {significant(value)} {unit}" for mark, value in zip(MARKS, percentiles, strict=True)]
    shares.set_title(" · ".join(texts), fontsize=8.5, color=MUTED)


def _unrecorded_gaps(shape: Axes, shares: Axes, run: RunData) -> None:
    """Thinned statistics lack the time of each token: the percentiles of summary.json stand in their place."""
    why = f"not drawn: only one of {run.recorded_every}\niterations has its time recorded"
    shape.text(0.5, 0.5, why, transform=shape.transAxes, ha="center", va="center", color=MUTED)
    known = {mark: ((run.summary or {}).get("itl_s") or {}).get(f"p{mark}") for mark in MARKS}
    unit, scale = time_unit(known.values())
    texts = [f"p{mark} {significant(value, scale)} {unit}" for mark, value in known.items() if value is not None]
    shares.set_title(" · ".join(texts), fontsize=8.5, color=MUTED)
    shares.set_xlabel("ITL")
    for axes in (shape, shares):
        axes.set(xticks=[], yticks=[])
