"""The charts of a sweep: metrics against each setting, heat maps, throughput against latency, and limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter

from ifbbench.errors import InputError
from ifbbench.report import significant, time_unit
from ifbbench.report.load import Floats
from ifbbench.report.style import INK, LIMIT_COLOURS, MUTED, SERIES, save, styled, thousands, title
from ifbbench.report.sweep_table import SHORT_NAMES, SweepRow, number_in, shares
from ifbbench.report.tables import LIMIT_NAMES

THROUGHPUT, HIT_RATE, BOUND_BY = "output_throughput_tokens_per_s", "prefix_hit_rate", "bound_by_time"
# The ratio of settings from which their axis is logarithmic, and the setting from which its ticks are abbreviated.
LOG_POSITIONS_FROM_RATIO = 8
LONG_FROM = 1e5
LETTERS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
# Lines of other settings' values are told apart up to this number; of more, the median is drawn over all of them.
MAX_LINES = 6
MAX_BARS = 48
MAX_TICKS = 12
LINE_COLOURS = (*SERIES, "#E69F00", "#56B4E9")
# One of many lines, and a limit of a user policy.
FAINT, OWN_LIMIT = "#BBBBBB", "#7A5195"


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of the points. keys: column of the table to its name in a legend, empty for the only one. unit: of its
    axis, None for seconds. first_colour: position in LINE_COLOURS."""

    label: str
    keys: dict[str, str]
    unit: str | None = ""
    scale: float = 1.0
    first_colour: int = 0
    is_better_low: bool = False

    def values(self, rows: Sequence[SweepRow]) -> list[list[float]]:
        """The values of each key at the points; NaN, which is not drawn, where a point has none."""
        known = [[number_in(row, key) for row in rows] for key in self.keys]
        return [[float("nan") if value is None else value for value in of_key] for of_key in known]

    def is_in(self, rows: Sequence[SweepRow]) -> bool:
        """Whether any point has a value but 0."""
        return any(value > 0 for values in self.values(rows) for value in values)

    def unit_of(self, rows: Sequence[SweepRow]) -> tuple[str, float]:
        """The unit of the axis, and the factor that values take."""
        if self.unit is not None:
            return self.unit, self.scale
        return time_unit(value for values in self.values(rows) for value in values)


METRICS = (
    Metric("output tokens/s", {THROUGHPUT: ""}),
    Metric("TTFT", {"ttft_s.p50": "p50", "ttft_s.p99": "p99"}, None, first_colour=1, is_better_low=True),
    Metric("TPOT", {"tpot_s.p50": "p50", "tpot_s.p99": "p99"}, None, first_colour=1, is_better_low=True),
    Metric("goodput", {"goodput_share": ""}, "%", 100, first_colour=4),
    Metric("prefix hit rate", {HIT_RATE: ""}, "%", 100, first_colour=3),
)
# The metrics that are drawn in any case, and those of heat maps.
ALWAYS, HEATED = 2, METRICS[:3]
LATENCIES = {"ttft_s.p99": "TTFT p99", "tpot_s.p99": "TPOT p99"}


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
    varied = [name for name in over if len({row[name] for row in rows}) > 1] or list(over[:1])
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
    ticks = _ticks(rows, over)
    metrics = [one for number, one in enumerate(METRICS) if number < ALWAYS or one.is_in(rows)]
    with_limits = not others and any(shares(row, BOUND_BY) for row in rows)
    count = len(metrics) + with_limits
    figure = Figure(figsize=(7.5, 1.1 + 2.1 * count))
    panels = list(np.atleast_1d(figure.subplots(count, 1, sharex=True)))
    place = dict(zip(ticks, _positions(panels[0], ticks, numeric), strict=True))
    groups: dict[str, list[SweepRow]] = {}
    for row in sorted(rows, key=lambda row: place[row[over]]):
        groups.setdefault(", ".join(_text(row[name]) for name in others), []).append(row)
    line = "o-" if numeric else "o"  # there is nothing between two texts
    for axes, metric in zip(panels, metrics, strict=False):
        if len(groups) == 1:
            _draw_metric(axes, metric, rows, place, over, line)
        else:
            _draw_groups(axes, metric, groups, place, over, line)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
        thousands(axes.yaxis)
    if with_limits:
        _draw_shares(panels[-1], [place[row[over]] for row in rows], rows)
    panels[-1].set_xlabel(over)
    title(panels[0], f"Sweep over {over}", f"a line for each {' and '.join(others)}" if others else "")
    if 1 < len(groups) <= MAX_LINES:
        lines = [Line2D([], [], color=colour, marker="o", markersize=4, label=name)
                 for name, colour in zip(groups, LINE_COLOURS, strict=False)]  # fmt: skip
        figure.legend(handles=lines, loc="outside lower center", ncols=min(len(lines), 4))
    elif len(groups) > 1:
        lines = [Line2D([], [], color=INK, linewidth=2, label="median"),
                 Line2D([], [], color=FAINT, label=f"each of {len(groups)} combinations of the others")]  # fmt: skip
        figure.legend(handles=lines, loc="outside lower center", ncols=2)
    figure.align_ylabels()
    return figure


def _draw_metric(
    axes: Axes, metric: Metric, rows: Sequence[SweepRow], place: Mapping[Any, float], over: str, line: str
) -> None:
    """All keys of a metric; of a single one, the highest value is written."""
    unit, scale = metric.unit_of(rows)
    rows = sorted(rows, key=lambda row: place[row[over]])
    positions = [place[row[over]] for row in rows]
    colours = LINE_COLOURS[metric.first_colour :]
    for name, values, colour in zip(metric.keys.values(), metric.values(rows), colours, strict=False):
        axes.plot(positions, [value * scale for value in values], line, color=colour, markersize=5, linewidth=1.6,
                  label=name)  # fmt: skip
    if len(metric.keys) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(metric.keys), borderaxespad=0)
    else:
        known = [(x, y * scale) for x, y in zip(positions, metric.values(rows)[0], strict=True) if not np.isnan(y)]
        if known:
            highest = max(known, key=lambda point: point[1])
            text = significant(highest[1]) + (f" {unit}" if unit else "")
            axes.annotate(text, highest, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8,
                          fontweight="bold", color=INK)  # fmt: skip
    axes.set_ylabel(metric.label + (f" ({unit})" if unit else ""))


def _draw_groups(
    axes: Axes, metric: Metric, groups: Mapping[str, Sequence[SweepRow]], place: Mapping[Any, float], over: str,
    line: str,
) -> None:  # fmt: skip
    """The last key of a metric, a line for each group; the median over them, if they are many."""
    of_all = [row for group in groups.values() for row in group]
    unit, scale = metric.unit_of(of_all)
    is_few = len(groups) <= MAX_LINES
    by_place: dict[float, list[float]] = {}
    for group, colour in zip(groups.values(), LINE_COLOURS if is_few else [FAINT] * len(groups), strict=False):
        positions, values = [place[row[over]] for row in group], [value * scale for value in metric.values(group)[-1]]
        size, width = (4, 1.4) if is_few else (2, 0.8)
        axes.plot(positions, values, line, color=colour, markersize=size, linewidth=width)
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
    for limit, values in _shares_by_limit(rows).items():
        axes.bar(left, values, np.subtract(right, left), bottom=below, align="edge", color=_colour(limit),
                 label=LIMIT_NAMES.get(limit, limit))  # fmt: skip
        below += values
    axes.set(ylabel="bound by, of time", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0)


def draw_limits(rows: Sequence[SweepRow], varied: Sequence[str]) -> Figure:
    """Which limit bound each point, as shares of its time: a bar a point."""
    shown = rows[:MAX_BARS]
    figure = Figure(figsize=(7.5, 1.2 + 0.22 * len(shown)))
    axes = figure.subplots()
    left = np.zeros(len(shown))
    for limit, values in _shares_by_limit(shown).items():
        axes.barh(range(len(shown)), values, left=left, color=_colour(limit), label=LIMIT_NAMES.get(limit, limit))
        left += values
    axes.set_yticks(range(len(shown)), [", ".join(_text(row[name]) for name in varied) for row in shown])
    axes.set(xlim=(0, 1), ylim=(len(shown) - 0.4, -0.6), xlabel="share of time")
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0)
    more = f" (the first {len(shown)} of {len(rows)} points)" if len(rows) > len(shown) else ""
    title(axes, f"What bound each point{more}", ", ".join(varied))
    axes.title.set_position((0, 1))
    return figure


def draw_heat_maps(rows: Sequence[SweepRow], varied: Sequence[str]) -> Figure:
    """Throughput, TTFT p99, TPOT p99 and the limit that bound most of the time, over two settings."""
    axis_values = [_ticks(rows, name) for name in varied]
    figure = Figure(figsize=(9.5, 1.6 + 2 * min(5.0, 0.9 + 0.42 * len(axis_values[0]))))
    panels = figure.subplots(2, 2).ravel()
    by_place = {tuple(row[name] for name in varied): row for row in rows}
    cells = [[by_place.get((y, x), {}) for x in axis_values[1]] for y in axis_values[0]]
    for axes, metric in zip(panels, HEATED, strict=False):
        unit, scale = metric.unit_of(rows)
        key = list(metric.keys)[-1]
        grid = np.array([metric.values(line)[-1] for line in cells]) * scale
        label = f"{metric.label} {metric.keys[key]}".strip() + (f" ({unit})" if unit else "")
        _draw_cells(axes, grid, [[significant(value) for value in line] for line in grid], metric.is_better_low)
        axes.set_title(label, fontsize=9, color=INK)
    limits = [[_main_limit(row) for row in line] for line in cells]
    axes = panels[-1]
    axes.imshow([[to_rgb(_colour(limit)) if limit else (1, 1, 1) for limit in line] for line in limits], aspect="auto")
    for y, line in enumerate(limits):
        for x, limit in enumerate(line):
            axes.text(x, y, SHORT_NAMES.get(limit, limit), ha="center", va="center", fontsize=7,
                      color=INK if limit in ("none", "") else "white")  # fmt: skip
    axes.set_title("bound by (the limit with the largest share of time)", fontsize=9, color=INK)
    for axes in panels:
        axes.grid(False)
        axes.set_xticks(range(len(axis_values[1])), [_text(value) for value in axis_values[1]],
                        rotation=0 if len(axis_values[1]) <= 6 else 45)  # fmt: skip
        axes.set_yticks(range(len(axis_values[0])), [_text(value) for value in axis_values[0]])
        axes.set(xlabel=varied[1], ylabel=varied[0])
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    figure.suptitle(f"Sweep over {varied[0]} and {varied[1]}", x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    return figure


def _draw_cells(axes: Axes, grid: Floats, texts: Sequence[Sequence[str]], is_better_low: bool) -> None:
    """A cell for each value, darker if better."""
    known = grid[~np.isnan(grid)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    colours = "Blues_r" if is_better_low else "Blues"
    axes.imshow(grid, aspect="auto", cmap=colours, vmin=low, vmax=max(high, low + 1e-12))
    for y, line in enumerate(texts):
        for x, text in enumerate(line):
            place = (grid[y, x] - low) / (high - low) if high > low else 0.0
            dark = 1 - place if is_better_low else place
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark > 0.55 else INK)


def draw_pareto(rows: Sequence[SweepRow], varied: Sequence[str]) -> Figure:
    """Throughput against TTFT p99 and TPOT p99: points by the limit that bound them, and the Pareto front, of points
    that no other one beats in both."""
    figure = Figure(figsize=(9.5, 4.8))
    panels = figure.subplots(1, 2, sharey=True)
    complete = [row for row in rows if is_complete(row)]
    for axes, (key, name) in zip(panels, LATENCIES.items(), strict=True):
        unit, scale = time_unit(number_in(row, key) for row in complete)
        points = [(number_in(row, key), number_in(row, THROUGHPUT), row) for row in complete]
        known = [(x * scale, y, row) for x, y, row in points if x is not None and y is not None]
        for x, y, row in known:
            axes.plot(x, y, "o", color=_colour(_main_limit(row) or "none"), markersize=5, zorder=2)
        front = pareto_front([(x, y) for x, y, _ in known])
        axes.plot([known[i][0] for i in front], [known[i][1] for i in front], "-", color=INK, linewidth=1.2, zorder=1)
        xs = [x for x, _, _ in known]
        if xs and min(xs) > 0 and max(xs) / min(xs) >= LOG_POSITIONS_FROM_RATIO:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
        _label_front(axes, [known[i] for i in front], varied)
        axes.set_xlabel(f"{name} ({unit})")
        axes.set_ylim(0, max((y for _, y, _ in known), default=1.0) * 1.15)
        thousands(axes.xaxis)
    panels[0].set_ylabel("output tokens/s")
    thousands(panels[0].yaxis)
    limits = dict.fromkeys(_main_limit(row) or "none" for row in complete)
    names = {"none": "no limit", **{limit: name for limit, name in LIMIT_NAMES.items() if limit != "none"}}
    handles = [Line2D([], [], color=_colour(limit), marker="o", linestyle="", label=f"bound by {names.get(limit, limit)}")
               for limit in limits]  # fmt: skip
    handles.append(Line2D([], [], color=INK, linewidth=1.2, label="Pareto front"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    left_out = len(rows) - len(complete)
    note = f"{left_out} points with failed requests are left out" if left_out else f"labels: {', '.join(varied)}"
    title(panels[0], "Throughput against latency", note)
    return figure


def _label_front(axes: Axes, front: Sequence[tuple[float, float, SweepRow]], varied: Sequence[str]) -> None:
    """Write the settings beside points of the front: the first, the last, and those far enough from a label before."""
    if not front:
        return
    top = max(y for _, y, _ in front) or 1.0
    labelled: list[float] = []
    for index in (len(front) - 1, 0, *range(1, len(front) - 1)):
        x, y, row = front[index]
        if all(abs(y - other) > 0.06 * top for other in labelled):
            labelled.append(y)
            axes.annotate(", ".join(_text(row[name]) for name in varied), (x, y), xytext=(5, -3), color=MUTED,
                          textcoords="offset points", fontsize=7, va="top")  # fmt: skip


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The positions of the points (latency, throughput) that no other point beats in both, by ascending latency."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def is_complete(row: SweepRow) -> bool:
    """Whether no request of the point failed."""
    return number_in(row, THROUGHPUT) is not None and not number_in(row, "requests.failed")


def _shares_by_limit(rows: Sequence[SweepRow]) -> dict[str, Floats]:
    """The share of time that each limit bound at each point, `none` last."""
    names = dict.fromkeys(name for row in rows for name in shares(row, BOUND_BY) if name != "none")
    of_all = {name: np.array([shares(row, BOUND_BY).get(name, 0.0) for row in rows]) for name in (*names, "none")}
    return {name: values for name, values in of_all.items() if values.any()}


def _main_limit(row: SweepRow) -> str:
    """The limit that bound most of the time, `none` included; empty where the point has no figures."""
    amounts = shares(row, BOUND_BY)
    return max(amounts, key=amounts.__getitem__) if any(amounts.values()) else ""


def _colour(limit: str) -> str:
    return LIMIT_COLOURS.get(limit, OWN_LIMIT)


def _ticks(rows: Sequence[SweepRow], name: str) -> list[Any]:
    ticks = list(dict.fromkeys(row[name] for row in rows))
    if all(number_in(row, name) is not None for row in rows):
        ticks.sort(key=float)
    return ticks


def _positions(axes: Axes, ticks: Sequence[Any], numeric: bool) -> list[float]:
    """The position of each value on the x-axis, with the values as ticks: not all of them, if there are many."""
    if not numeric:
        positions = [float(number) for number in range(len(ticks))]
        axes.set_xlim(-0.5, len(ticks) - 0.5)
    else:
        positions = [float(tick) for tick in ticks]
        if min(positions) > 0 and max(positions) / min(positions) >= LOG_POSITIONS_FROM_RATIO:
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
    every = -(-len(ticks) // MAX_TICKS)
    axes.set_xticks(positions[::every], [_text(tick) for tick in ticks[::every]])
    return positions


def _text(value: Any) -> str:
    """A value of a setting: 250000 as 250k, 64000000 as 64M; five digits and fewer as they are, the end of a path."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).rpartition("/")[2]
    if abs(value) < LONG_FROM:
        return f"{value:g}"
    size, letter = next(pair for pair in LETTERS if float(f"{abs(value):.3g}") >= pair[0])
    return f"{float(f'{value:.3g}') / size:g}{letter}"
