"""The chart of a calibration: what was predicted against what was measured, for each point."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ifbbench.calibration.calibrate import Calibration
from ifbbench.calibration.fit import FitError
from ifbbench.report.style import INK, MUTED, SERIES, styled, title
from ifbbench.report.units import percent

KINDS = {"context": SERIES[0], "mixed": SERIES[2], "generation": SERIES[1]}
# Points between these lines are predicted to a tenth.
BAND = 0.1
MILLISECONDS = 1000
MARGIN = 1.5
# Of an axis of fewer decades than this, the ticks of each that have room for a label.
LABELS: tuple[tuple[float, tuple[int, ...]], ...] = ((2, (1, 2, 5)), (4, (1, 3)), (np.inf, (1,)))


def write_chart(found: Calibration, path: Path) -> None:
    """Draw the calibration into a PNG file, without a date, so that equal figures are equal files."""
    with styled():
        _draw(found).savefig(path, metadata={"Software": None})


def _draw(found: Calibration) -> Figure:
    """Measured time of an iteration from left to right, predicted time upwards; on the line they are the same."""
    figure = Figure(figsize=(6.4, 6.2))
    axes = figure.subplots()
    measured = np.array([point.seconds for point in found.points]) * MILLISECONDS
    predicted = found.predicted_s * MILLISECONDS
    for kind, colour in KINDS.items():
        chosen = np.array([point.kind == kind for point in found.points])
        axes.scatter(
            measured[chosen], predicted[chosen], s=16, color=colour, alpha=0.75, linewidths=0, zorder=3,
            label=f"{kind} ({int(chosen.sum())})",
        )  # fmt: skip
    both = np.concatenate([measured, predicted])
    _scale(axes, both.min() / MARGIN, both.max() * MARGIN)
    axes.legend(loc="upper left", handletextpad=0.3)
    title(axes, f"Predicted and measured iterations: {found.profile.name}", _subtitle(found))
    return figure


def _scale(axes: Axes, low: float, high: float) -> None:
    """The same logarithmic scale both ways, the line of equal times, and the band around it."""
    ends = np.array([low, high])
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color=MUTED, alpha=0.13, linewidth=0)
    axes.plot(ends, ends, color=INK, linewidth=0.9)
    axes.annotate(f"within {percent(BAND)}", (high, high), xytext=(-12, -40), textcoords="offset points", color=MUTED,
                  fontsize=8, ha="right", rotation=45, rotation_mode="anchor")  # fmt: skip
    axes.set(xscale="log", yscale="log")
    decades = np.log10(high / low)
    labelled = next(subs for most, subs in LABELS if decades < most)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=labelled, numticks=100))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", xlabel="measured (ms)", ylabel="predicted (ms)")
    axes.grid(visible=True, axis="both")
    axes.tick_params(which="minor", length=0)


def _subtitle(found: Calibration) -> str:
    error = FitError.of(found.points, found.predicted_s)
    about = found.profile.calibration
    return (
        f"model {about['model']} in {about['dtype']} · error median {percent(error.median)}, "
        f"p90 {percent(error.p90)}, worst {percent(error.worst)}"
    )
