"""The charts of a sweep: metrics against each setting, heat maps, throughput against latency, and limits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ifbbench.analysis.number_texts import significant
from ifbbench.analysis.words import words_of
from ifbbench.errors import InputError
from ifbbench.report.colours import FAINT, INK, MUTED
from ifbbench.report.figure_files import save
from ifbbench.report.style import LIMIT_DASHES, chosen_ticks, in_percent, line_styles, round_ticks, styled, title
from ifbbench.report.sweep_maps import draw_heat_maps, draw_limits, draw_pareto
from ifbbench.report.sweep_metrics import (
    BOUND_BY,
    LOG_FROM_RATIO,
    METRICS,
    MISSED_COLOUR,
    MISSED_MARKS,
    Metric,
    colour_of,
    is_complete,
    knee_of,
    shares_by_limit,
    subject_of,
    text_of,
    ticks_of,
    varied_in,
)
from ifbbench.report.sweep_table import SweepRow, best_meeting, meets_objectives, number_in, point_of, shares

# The number of METRICS that are drawn in any case.
ALWAYS = 2
SWEEP_WIDTH, LEGEND_LETTERS = 9.0, 110
# Up to so many lines have a colour each; of more, the median is drawn over all of them.
MAX_LINES = 6
# Values of a setting that are texts: letters of all of them from which their labels are slanted.
MAX_LETTERS = 80
LOG_LATENCIES_FROM_RATIO = 100
# The distance of marks of several groups at a value that is a text.
ASIDE = 0.07


def plot_sweep(rows: Sequence[SweepRow], over: Sequence[str], directory: Path) -> list[Path]:
    """Draw the charts of a sweep over the settings `over` into `directory`; return the files written.

    `sweep` is the metrics against the setting, with several ones `sweep-SETTING` against each; `heat_map` is for two
    settings, `limits` for several. InputError if a row lacks a setting.
    """
    for name in over:
        if not rows or any(name not in row for row in rows):
            raise InputError(
                f"sweep: not every row has a value of {name!r}; expected the rows of `ifbbench sweep --over {name}=…`."
            )
    varied = varied_in(rows, over)
    with styled():
        charts = {f"sweep-{name}" if len(varied) > 1 else "sweep": draw_sweep(rows, name, varied) for name in varied}
        if len(varied) == 2 and len(rows) > 2:
            charts["heat_map"] = draw_heat_maps(rows, varied)
        if len(varied) > 1 and any(shares(row, BOUND_BY) for row in rows):
            charts["limits"] = draw_limits(rows, varied)
        if sum(map(is_complete, rows)) > 1:
            charts["pareto"] = draw_pareto(rows, varied)
        return [path for name, figure in charts.items() for path in save(figure, directory, name)]


def draw_sweep(rows: Sequence[SweepRow], over: str, varied: Sequence[str] = ()) -> Figure:
    """Each metric that any point has against the setting `over`, a panel each; points in order of the setting, or of
    the rows if it is a text. With other settings in `varied`, a line for each combination of them. Alone, the limits
    that bound each point are in the last panel."""
    others = [name for name in varied if name != over]
    numeric = all(number_in(row, over) is not None for row in rows)
    ticks = ticks_of(rows, over)
    metrics = [one for number, one in enumerate(METRICS) if number < ALWAYS or one.is_in(rows)]
    with_limits = not others and any(shares(row, BOUND_BY) for row in rows)
    count = len(metrics) + with_limits
    figure = Figure(figsize=(SWEEP_WIDTH, 1.1 + 2.1 * count))
    panels = list(np.atleast_1d(figure.subplots(count, 1, sharex=True)))
    position_of = dict(zip(ticks, _positions(panels[0], ticks, numeric), strict=True))
    groups: dict[str, list[SweepRow]] = {}
    for row in sorted(rows, key=lambda row: position_of[row[over]]):
        groups.setdefault(", ".join(text_of(row[name]) for name in others), []).append(row)
    groups = _without_equal(groups, metrics)
    line = "o-" if numeric else "o"  # there is nothing between two texts
    for axes, metric in zip(panels, metrics, strict=False):
        if len(groups) == 1:
            _draw_metric(axes, metric, rows, position_of, over, line)
        else:
            _draw_groups(axes, metric, groups, position_of, over, line)
        known = [value for values in metric.values(rows) for value in values if value > 0]
        if metric.unit is None and known and max(known) / min(known) >= LOG_LATENCIES_FROM_RATIO:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
        round_ticks(axes.yaxis)
    if with_limits:
        _draw_shares(panels[-1], [position_of[row[over]] for row in rows], rows)
    best = best_meeting(rows)
    named = f"\nbest that meets the objectives: {point_of(best, [over, *others])}" if best is not None else ""
    panels[-1].set_xlabel(f"{over}{named}")
    knee = None if others else knee_of(rows, over)
    if knee is not None:
        for axes in panels[: len(metrics)]:
            axes.axvline(knee, color=MUTED, linewidth=1, linestyle=LIMIT_DASHES, zorder=1)
        panels[0].annotate(
            f"knee: {text_of(knee)}", (knee, 0), xytext=(4, 4), textcoords="offset points", fontsize=8, color=MUTED
        )
    each = "a line for each" if len(groups) > 1 else "the same for each"
    missed = MISSED_MARKS if any(meets_objectives(row) is False for row in rows) else ""
    notes = [subject_of(rows), f"{each} {' and '.join(others)}" if others else "", missed]
    title(panels[0], f"Sweep over {over}", " · ".join(filter(None, notes)))
    if 1 < len(groups) <= MAX_LINES:
        lines = [
            Line2D([], [], marker="o", label=name, **how)
            for name, how in zip(groups, _group_styles(len(groups), numeric), strict=True)
        ]
        longest = max(map(len, groups))
        figure.legend(
            handles=lines,
            loc="outside lower center",
            handlelength=2.6,
            ncols=int(np.clip(LEGEND_LETTERS // (longest + 8), 1, 4)),
        )
    elif len(groups) > 1:
        lines = [
            Line2D([], [], color=INK, linewidth=2, label="median"),
            Line2D([], [], color=FAINT, label=f"each of {len(groups)} combinations of the others"),
        ]
        figure.legend(handles=lines, loc="outside lower center", ncols=2)
    figure.align_ylabels()
    return figure


def _without_equal(groups: Mapping[str, list[SweepRow]], metrics: Sequence[Metric]) -> dict[str, list[SweepRow]]:
    """`groups` with one of those that are equal in all that is drawn, under the names of all of them."""
    names: dict[str, list[str]] = {}
    for name, group in groups.items():
        values = str([metric.values(group)[-1] for metric in metrics])
        names.setdefault(values, []).append(name)
    return {" and ".join(equal) + (" (equal)" if len(equal) > 1 else ""): groups[equal[0]] for equal in names.values()}


def _group_styles(count: int, numeric: bool) -> list[dict[str, Any]]:
    """The line style of each group, and the size of its marks, which is smaller for what is drawn later. Between
    values that are no numbers there are no lines, and marks are beside each other."""
    if not numeric:
        return [how | {"markersize": 5, "linestyle": ""} for how in line_styles(count)]
    return [how | {"markersize": 4 + 1.5 * (count - 1 - index)} for index, how in enumerate(line_styles(count))]


def _draw_metric(
    axes: Axes, metric: Metric, rows: Sequence[SweepRow], position_of: Mapping[Any, float], over: str, line: str
) -> None:
    """All keys of a metric; of a single one, the best value is written."""
    unit, scale = metric.unit_of(rows)
    rows = sorted(rows, key=lambda row: position_of[row[over]])
    positions = [position_of[row[over]] for row in rows]
    of_key = zip(metric.keys.values(), metric.values(rows), metric.colours, strict=True)
    for number, (name, values, colour) in enumerate(of_key):
        # Equal percentiles are both seen: the first is wider.
        axes.plot(
            positions,
            [value * scale for value in values],
            line,
            color=colour,
            markersize=7 - 2 * number,
            linewidth=2.4 - 0.8 * number,
            label=name,
        )
        _draw_missed(axes, positions, [value * scale for value in values], rows, colour, 7 - 2 * number)
    if len(metric.keys) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(metric.keys), borderaxespad=0)
    else:
        known = [(x, y * scale) for x, y in zip(positions, metric.values(rows)[0], strict=True) if not np.isnan(y)]
        if known:
            best = (min if metric.is_better_low else max)(known, key=lambda point: point[1])
            text = significant(best[1]) + (f" {unit}" if unit else "")
            axes.annotate(
                text,
                best,
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                fontweight="bold",
                color=INK,
            )
    axes.set_ylabel(metric.label + (f" ({unit})" if unit else ""))


def _draw_missed(
    axes: Axes, positions: Sequence[float], values: Sequence[float], rows: Sequence[SweepRow], colour: str, size: float
) -> None:
    """Empty the marks of the points that miss an objective."""
    missed = [(x, y) for x, y, row in zip(positions, values, rows, strict=True) if meets_objectives(row) is False]
    if missed:
        axes.plot(
            *zip(*missed, strict=True), "o", color=colour, markersize=size, markerfacecolor=MISSED_COLOUR, zorder=3
        )


def _draw_groups(
    axes: Axes,
    metric: Metric,
    groups: Mapping[str, Sequence[SweepRow]],
    position_of: Mapping[Any, float],
    over: str,
    line: str,
) -> None:
    """The last key of a metric, a line for each group; the median over them, if they are many."""
    of_all = [row for group in groups.values() for row in group]
    unit, scale = metric.unit_of(of_all)
    is_few = len(groups) <= MAX_LINES
    by_place: dict[float, list[float]] = {}
    numeric = line != "o"
    faint = {"color": FAINT, "markersize": 2, "linewidth": 0.8, "linestyle": "-" if numeric else ""}
    styles = _group_styles(len(groups), numeric) if is_few else [faint] * len(groups)
    for number, (group, how) in enumerate(zip(groups.values(), styles, strict=True)):
        positions, values = (
            [position_of[row[over]] for row in group],
            [value * scale for value in metric.values(group)[-1]],
        )
        aside = ASIDE * (number - (len(groups) - 1) / 2) if is_few and not numeric else 0.0
        axes.plot([position + aside for position in positions], values, marker="o", **how)
        if is_few:
            shifted = [position + aside for position in positions]
            _draw_missed(axes, shifted, values, group, how["color"], how["markersize"])
        for position, value in zip(positions, values, strict=True):
            if not np.isnan(value):
                by_place.setdefault(position, []).append(value)
    if not is_few:
        medians = sorted((position, float(np.median(values))) for position, values in by_place.items())
        axes.plot(*zip(*medians, strict=True), line, color=INK, markersize=5, linewidth=2)
    name = list(metric.keys.values())[-1]
    axes.set_ylabel(f"{metric.label} {name}".strip() + (f" ({unit})" if unit else ""))


def _draw_shares(axes: Axes, positions: Sequence[float], rows: Sequence[SweepRow]) -> None:
    """The share of time that each limit bound, as stacked bars at the points."""
    is_log = axes.get_xscale() == "log"
    gap = min(np.diff(np.unique(np.log(positions) if is_log else positions)), default=1.0)
    left = [x * float(np.exp(-0.3 * gap)) if is_log else x - 0.3 * gap for x in positions]
    right = [x * float(np.exp(0.3 * gap)) if is_log else x + 0.3 * gap for x in positions]
    below = np.zeros(len(rows))
    for limit, values in shares_by_limit(rows).items():
        axes.bar(
            left,
            values,
            np.subtract(right, left),
            bottom=below,
            align="edge",
            color=colour_of(limit),
            label=words_of(*rows).limit_name(limit),
        )
        below += values
    axes.set(ylabel="bound by, of time", ylim=(0, 1))
    round_ticks(axes.yaxis, text=in_percent)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0)


def _positions(axes: Axes, ticks: Sequence[Any], numeric: bool) -> list[float]:
    """The position of each value on the x-axis, with the values as ticks: not all of them, if there are many."""
    if not numeric:
        positions = [float(number) for number in range(len(ticks))]
        axes.set_xlim(-0.5, len(ticks) - 0.5)
    else:
        positions = [float(tick) for tick in ticks]
        if min(positions) > 0 and max(positions) / min(positions) >= LOG_FROM_RATIO:
            axes.set_xscale("log")
        chosen_ticks(axes.xaxis, positions, text_of)
        return positions
    texts = [text_of(tick) for tick in ticks]
    is_long = sum(map(len, texts)) > MAX_LETTERS
    slanted: dict[str, Any] = {"rotation": 20, "ha": "right"} if is_long else {}
    axes.set_xticks(positions, texts, **slanted)
    return positions
