"""KV cache blocks in use over time, against the pool, and when requests were paused."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from ifbbench.report.charts.style import LIMIT, LIMIT_DASHES, MUTED, SERIES, heading, thousands
from ifbbench.report.charts.time_axis import TimeBins
from ifbbench.report.load import RunData


def draw_kv_cache(run: RunData) -> Figure:
    """Used blocks with the size of the pool above them, and below, where there were any, the pauses."""
    figure = Figure(figsize=(9, 4.6))
    blocks, pauses = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
    bins = TimeBins.of(run)
    _blocks(blocks, bins, run)
    _pauses(pauses, bins, run)
    bins.label(pauses)
    heading(blocks, "KV cache", run)
    figure.align_ylabels()
    return figure


def _blocks(axes: Axes, bins: TimeBins, run: RunData) -> None:
    iterations = run.iterations
    pool = float(iterations["max_kv_cache_blocks"].max())
    used = bins.peaks(iterations["used_kv_cache_blocks"].to_numpy(dtype=float))
    axes.stairs(used, bins.edges, fill=True, color=SERIES[0], alpha=0.25, linewidth=0)
    axes.stairs(used, bins.edges, baseline=None, color=SERIES[0], linewidth=1.2)
    axes.axhline(pool, color=LIMIT, linewidth=1, linestyle=LIMIT_DASHES)
    size = int(iterations["tokens_per_kv_cache_block"].max())
    axes.annotate(
        f"pool: {pool:,.0f} blocks of {size} tokens", (0, pool), xycoords=("axes fraction", "data"),
        xytext=(4, 4), textcoords="offset points", color=LIMIT, fontsize=8,
    )  # fmt: skip
    axes.set_ylabel("KV blocks used")
    axes.set_ylim(0, pool * 1.14)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    thousands(axes.yaxis)
    share = axes.secondary_yaxis("right", functions=(_scaled_by(100 / pool), _scaled_by(pool / 100)))
    share.set_ylabel("% of the pool")
    share.set_yticks([0, 25, 50, 75, 100])
    share.spines["right"].set_visible(False)
    share.tick_params(length=0)


def _scaled_by(factor: float) -> Callable[[ArrayLike], ArrayLike]:
    return lambda values: np.asarray(values, dtype=float) * factor


def _pauses(axes: Axes, bins: TimeBins, run: RunData) -> None:
    paused = run.iterations["pauses"].to_numpy(dtype=float)
    counts, _ = np.histogram(bins.clock.start_s, bins.edges_s, weights=paused)
    axes.stairs(counts, bins.edges, fill=True, color=SERIES[1], linewidth=0)
    axes.set_ylabel("pauses" if bins.singly else f"pauses\nper {bins.width}")
    axes.set_ylim(0, max(1.0, float(counts.max())) * 1.2)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
    if not paused.any():
        axes.text(0.5, 0.5, "no request was paused", transform=axes.transAxes, ha="center", va="center", color=MUTED)
