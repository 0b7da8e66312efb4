"""A calibrated profile with its errors: the file, the table and the chart of predicted against measured times."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from ifbbench.analysis.number_texts import count, percent
from ifbbench.errors import InputError
from ifbbench.files import check_new_file
from ifbbench.report import plain_table
from ifbbench.report.colours import INK, MUTED, SERIES
from ifbbench.simulated.hardware import SUFFIX, HardwareProfile
from ifbbench.studies.fit import FitError, Floats, Timed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MILLISECONDS = 1000
# The colours of iterations by their phases, and of the figures of load tests.
COLOURS = {
    "context": SERIES[0],
    "generation": SERIES[1],
    "mixed": SERIES[2],
    "throughput": SERIES[3],
    "TTFT": "#E69F00",
    "ITL": "#56B4E9",
}
# The band around the line of equal times, as a share of the time.
BAND = 0.1
MARGIN = 1.5
# Labelled ticks of each decade, for an axis of fewer decades than the key.
LABELS: tuple[tuple[float, tuple[int, ...]], ...] = ((2, (1, 2, 5)), (4, (1, 3)), (np.inf, (1,)))


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibrated profile, its file, the measurements that it was fitted to, and the seconds predicted for each,
    [points]."""

    path: Path
    profile: HardwareProfile
    points: Sequence[Timed]
    predicted_s: Floats


def chart_beside(output: Path, overwrite: bool) -> Path:
    """The path of the chart. InputError if it or the profile exists, without `overwrite`, or cannot be written."""
    if output.suffix != SUFFIX:
        raise InputError(f"--output {output}: expected a file name that ends in {SUFFIX}.")
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: {output.parent} is no directory; make it, or give another one.")
    chart = output.with_suffix(".png")
    for path in (output, chart):
        check_new_file(path, "--output", overwrite)
    return chart


def error_table(found: Calibration) -> Table:
    """The errors of the predictions, for each kind of point."""
    table = plain_table("Predicted against measured", numbers=("points", "median", "p90", "worst"))
    for kind in (*COLOURS, "all"):
        chosen = [index for index, point in enumerate(found.points) if kind in (point.kind, "all")]
        if not chosen:
            continue
        error = FitError.of([found.points[index] for index in chosen], found.predicted_s[chosen])
        table.add_row(
            kind,
            count(len(chosen)),
            percent(error.median),
            percent(error.p90),
            percent(error.worst),
            style="bold" if kind == "all" else None,
        )
    return table


def write_chart(found: Calibration, path: Path) -> None:
    """Draw predicted over measured time of each point, as a PNG file without a date: equal figures are equal files."""
    from matplotlib.figure import Figure  # a fit without a chart does not wait for it

    from ifbbench.report.figure_files import save
    from ifbbench.report.style import styled, title

    with styled():
        figure = Figure(figsize=(6.4, 6.2))
        axes = figure.subplots()
        measured = np.array([point.seconds for point in found.points]) * MILLISECONDS
        predicted = found.predicted_s * MILLISECONDS
        for kind, colour in COLOURS.items():
            chosen = np.array([point.kind == kind for point in found.points])
            if not chosen.any():
                continue
            axes.scatter(
                measured[chosen],
                predicted[chosen],
                s=16,
                color=colour,
                alpha=0.75,
                linewidths=0,
                zorder=3,
                label=f"{kind} ({int(chosen.sum())})",
            )
        both = np.concatenate([measured, predicted])
        _scale(axes, both.min() / MARGIN, both.max() * MARGIN)
        axes.legend(loc="upper left", handletextpad=0.3)
        error = FitError.of(found.points, found.predicted_s)
        about = found.profile.calibration
        subtitle = (
            f"model {about['model']} in {about['dtype']} · error median {percent(error.median)}, "
            f"p90 {percent(error.p90)}, worst {percent(error.worst)}"
        )
        title(axes, f"Predicted and measured times: {found.profile.name}", subtitle)
        save(figure, path.parent, path.stem, ("png",))


def _scale(axes: "Axes", low: float, high: float) -> None:
    """The same logarithmic scale on both axes, the line of equal times, and the band around it."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    ends = np.array([low, high])
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color=MUTED, alpha=0.13, linewidth=0)
    axes.plot(ends, ends, color=INK, linewidth=0.9)
    axes.annotate(
        f"within {percent(BAND)}",
        (high, high),
        xytext=(-12, -40),
        textcoords="offset points",
        color=MUTED,
        fontsize=8,
        ha="right",
        rotation=45,
        rotation_mode="anchor",
    )
    axes.set(xscale="log", yscale="log")
    decades = np.log10(high / low)
    labelled = next(ticks for limit, ticks in LABELS if decades < limit)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=labelled, numticks=100))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", xlabel="measured (ms)", ylabel="predicted (ms)")
    axes.grid(visible=True, axis="both")
    axes.tick_params(which="minor", length=0)
