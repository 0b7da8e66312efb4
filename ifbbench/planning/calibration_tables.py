"""The output of `ifbbench calibrate`: tables of the constants and the errors, and a chart of the predictions."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.planning.calibrate import Calibration
from ifbbench.planning.fit import FITTED_SHARES, FitError
from ifbbench.report import count, percent, significant
from ifbbench.report.style import INK, MUTED, SERIES, styled, title

GIGA = 1e9
MICROSECONDS = 1e6
MILLISECONDS = 1000
# A median error above this is reported as large.
LARGE_ERROR = 0.15
COLOURS = {"context": SERIES[0], "generation": SERIES[1], "mixed": SERIES[2]}
SHARE_NAMES = {
    "matmul": "Matrix products", "context_attention": "Attention of prompts", "memory": "Weights and activations",
    "generation_attention": "Attention of generation",
}  # fmt: skip
# The band around the line of equal times, as a share of the time.
BAND = 0.1
MARGIN = 1.5
# Labelled ticks of each decade, for an axis of fewer decades than the key.
LABELS: tuple[tuple[float, tuple[int, ...]], ...] = ((2, (1, 2, 5)), (4, (1, 3)), (np.inf, (1,)))


def print_calibration(found: Calibration, console: Console) -> None:
    """Print the constants of the profile and the errors of its predictions."""
    profile = found.profile
    console.print()
    console.print(f"[bold]{escape(profile.name)}[/bold]  {escape(profile.title)}", highlight=False)
    for table in (_constants_table(found), _error_table(found)):
        console.print()
        console.print(table)
    console.print()
    if FitError.of(found.points, found.predicted_s).median > LARGE_ERROR:
        console.print(
            "These errors are large. Other programs may have disturbed the measurement; measure again when this "
            "machine is idle.\n",
            style="yellow", soft_wrap=True,
        )  # fmt: skip


def _constants_table(found: Calibration) -> Table:
    profile, constants = found.profile, found.profile.constants
    (flops_per_s,) = profile.peak_flops.values()
    table = _table("Constant", "reached", "of the peak")
    for name in FITTED_SHARES:
        is_arithmetic = name in ("matmul", "context_attention")
        peak, unit = (flops_per_s, "GFLOP/s") if is_arithmetic else (profile.memory_bandwidth, "GB/s")
        share = getattr(constants, name)
        table.add_row(SHARE_NAMES[name], f"{significant(share * peak / GIGA)} {unit}", percent(share))
    times = {
        "Start of a kernel": constants.kernel_s,
        "Start of context": constants.context_s,
        "Host, each iteration": profile.host_iteration_s,
        "Host, each request": profile.host_request_s,
    }
    for label, seconds in times.items():
        table.add_row(label, f"{significant(seconds * MICROSECONDS)} µs", "")
    return table


def _error_table(found: Calibration) -> Table:
    table = _table("Predicted against measured", "points", "median", "p90", "worst")
    for kind in (*COLOURS, "all"):
        chosen = [index for index, point in enumerate(found.points) if kind in (point.kind, "all")]
        if not chosen:
            continue
        error = FitError.of([found.points[index] for index in chosen], found.predicted_s[chosen])
        table.add_row(
            kind, count(len(chosen)), percent(error.median), percent(error.p90), percent(error.worst),
            style="bold" if kind == "all" else None,
        )  # fmt: skip
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def write_chart(found: Calibration, path: Path) -> None:
    """Draw predicted over measured time of each point, as a PNG file without a date: equal figures are equal files."""
    with styled():
        _draw(found).savefig(path, metadata={"Software": None})


def _draw(found: Calibration) -> Figure:
    figure = Figure(figsize=(6.4, 6.2))
    axes = figure.subplots()
    measured = np.array([point.seconds for point in found.points]) * MILLISECONDS
    predicted = found.predicted_s * MILLISECONDS
    for kind, colour in COLOURS.items():
        chosen = np.array([point.kind == kind for point in found.points])
        axes.scatter(
            measured[chosen], predicted[chosen], s=16, color=colour, alpha=0.75, linewidths=0, zorder=3,
            label=f"{kind} ({int(chosen.sum())})",
        )  # fmt: skip
    both = np.concatenate([measured, predicted])
    _scale(axes, both.min() / MARGIN, both.max() * MARGIN)
    axes.legend(loc="upper left", handletextpad=0.3)
    error = FitError.of(found.points, found.predicted_s)
    about = found.profile.calibration
    subtitle = (
        f"model {about['model']} in {about['dtype']} · error median {percent(error.median)}, "
        f"p90 {percent(error.p90)}, worst {percent(error.worst)}"
    )
    title(axes, f"Predicted and measured iterations: {found.profile.name}", subtitle)
    return figure


def _scale(axes: Axes, low: float, high: float) -> None:
    """The same logarithmic scale on both axes, the line of equal times, and the band around it."""
    ends = np.array([low, high])
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color=MUTED, alpha=0.13, linewidth=0)
    axes.plot(ends, ends, color=INK, linewidth=0.9)
    axes.annotate(f"within {percent(BAND)}", (high, high), xytext=(-12, -40), textcoords="offset points", color=MUTED,
                  fontsize=8, ha="right", rotation=45, rotation_mode="anchor")  # fmt: skip
    axes.set(xscale="log", yscale="log")
    decades = np.log10(high / low)
    labelled = next(ticks for limit, ticks in LABELS if decades < limit)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=labelled, numticks=100))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", xlabel="measured (ms)", ylabel="predicted (ms)")
    axes.grid(visible=True, axis="both")
    axes.tick_params(which="minor", length=0)
