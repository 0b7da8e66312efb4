"""How TTFT and ITL are distributed: the shape above, and below it the share of values up to each latency."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

from ifbbench.report.charts.style import INK, MUTED, SERIES, heading, thousands
from ifbbench.report.charts.time_axis import Floats
from ifbbench.report.load import RunData
from ifbbench.report.token_times import inter_token_gaps
from ifbbench.report.units import significant, time_unit

MARKS = (50, 90, 99)
LOG_FROM_RATIO = 10


def draw_latency(run: RunData) -> Figure:
    """TTFT of each request at the left, every gap between tokens (ITL) at the right."""
    figure = Figure(figsize=(9, 5))
    grid = figure.subplots(2, 2, sharex="col", gridspec_kw={"height_ratios": [1, 1.6]})
    ttft = run.completed["ttft_s"].dropna().to_numpy(dtype=float)
    _distribution(grid[0, 0], grid[1, 0], ttft, "TTFT", "requests", SERIES[0])
    if run.recorded_every > 1:
        _untold_gaps(grid[0, 1], grid[1, 1], run)
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
    shape.hist(values, bins=list(_bin_edges(values, logarithmic)), color=colour)
    shares.ecdf(values, color=colour, linewidth=1.6)
    percentiles = np.percentile(values, MARKS)
    shares.plot(percentiles, np.array(MARKS) / 100, "o", color=INK, markersize=4, zorder=3)
    texts = [f"p{mark} {significant(value)} {unit}" for mark, value in zip(MARKS, percentiles, strict=True)]
    shares.set_title(" · ".join(texts), fontsize=8.5, color=MUTED)


def _untold_gaps(shape: Axes, shares: Axes, run: RunData) -> None:
    """Thinned statistics do not tell when each token came; the run's own figures do, in a few numbers."""
    why = f"not drawn: only one of {run.recorded_every}\niterations has its time recorded"
    shape.text(0.5, 0.5, why, transform=shape.transAxes, ha="center", va="center", color=MUTED)
    known = {mark: ((run.summary or {}).get("itl_s") or {}).get(f"p{mark}") for mark in MARKS}
    unit, scale = time_unit(known.values())
    told = [f"p{mark} {significant(value * scale)} {unit}" for mark, value in known.items() if value is not None]
    shares.set_title(" · ".join(told), fontsize=8.5, color=MUTED)
    shares.set_xlabel("ITL")
    for axes in (shape, shares):
        axes.set_xticks([])
        axes.set_yticks([])


def _bin_edges(values: Floats, logarithmic: bool) -> Floats:
    """Even bins, evenly growing ones on a logarithmic axis; more of them for more values."""
    low, high = float(values[0]), float(values[-1])
    if low == high:
        low, high = low * 0.95, high * 1.05 or 1.0
    bins = int(np.clip(np.sqrt(values.size), 6, 60))
    return (np.geomspace if logarithmic else np.linspace)(low, high, bins + 1)
