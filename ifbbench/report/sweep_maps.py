"""The charts of a sweep that compare all of its points: heat maps of two settings, throughput against latency with the
Pareto front, and the limits."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from ifbbench.analysis.number_texts import significant, time_unit
from ifbbench.analysis.words import words_of
from ifbbench.report.colours import INK
from ifbbench.report.style import in_percent, round_ticks, title
from ifbbench.report.sweep_metrics import (
    LOG_FROM_RATIO,
    METRICS,
    MISSED_COLOUR,
    MISSED_MARKS,
    THROUGHPUT,
    colour_of,
    is_complete,
    main_limit,
    shares_by_limit,
    subject_of,
    text_of,
    ticks_of,
)
from ifbbench.report.sweep_table import SweepRow, gpus_of, have_unequal_gpus, meets_objectives, number_in
from ifbbench.rundir.reader import Floats

# The metrics of heat maps, and the latencies that throughput is drawn against.
HEATED = METRICS[:3]
LATENCIES = {"ttft_s.p99": "TTFT p99", "tpot_s.p99": "TPOT p99"}
# Labels of points: where one may stand, (offset in points, alignment across and up), the best first; the radius of a
# mark in points; and the pieces of each stretch of the front.
OFFSETS = tuple(
    ((across * far, up * far), {-1: "right", 0: "center", 1: "left"}[across], {-1: "top", 0: "center", 1: "bottom"}[up])
    for far in (5, 9, 14, 20)
    for across, up in ((-1, 1), (1, -1), (1, 0), (-1, 0), (1, 1), (-1, -1), (0, 1), (0, -1))
)
MARK_RADIUS, LINE_PIECES = 3.5, 40
# How many times as far as from its own point a label is from each other point.
CLEARLY_NEARER = 1.5
# The frame of the cells of points that meet every objective, which colours of limits and figures leave free.
MET_COLOUR, MET_CELLS = "#ff9f1c", " · framed: meets every objective"
# Points that the chart of limits has a bar for, and those up to which its bars are wide.
MAX_BARS, MAX_WIDE_BARS = 300, 48


def draw_heat_maps(rows: Sequence[SweepRow], varied: Sequence[str]) -> Figure:
    """Throughput, TTFT p99, TPOT p99 and the limit that bound most of the time, over two settings."""
    axis_values = [ticks_of(rows, name) for name in varied]
    figure = Figure(figsize=(9.0, 1.6 + 2 * min(5.0, 0.9 + 0.42 * len(axis_values[0]))))
    panels = figure.subplots(2, 2).ravel()
    by_place = {tuple(row[name] for name in varied): row for row in rows}
    cells = [[by_place.get((y, x), {}) for x in axis_values[1]] for y in axis_values[0]]
    for axes, metric in zip(panels, HEATED, strict=False):
        unit, scale = metric.unit_of(rows)
        key = list(metric.keys)[-1]
        grid = np.array([metric.values(line)[-1] for line in cells]) * scale
        label = f"{metric.label} {metric.keys[key]}".strip() + (f" ({unit})" if unit else "")
        _draw_cells(axes, grid, [[significant(value) for value in line] for line in grid], metric.is_better_low)
        axes.set_title(f"{label} · darker is better", fontsize=9, color=INK)
    limits = [[main_limit(row) for row in line] for line in cells]
    axes = panels[-1]
    colours = [[to_rgb(colour_of(limit) if limit else "white") for limit in line] for line in limits]
    axes.imshow(colours, aspect="auto")
    for y, line in enumerate(limits):
        for x, limit in enumerate(line):
            axes.text(
                x,
                y,
                words_of(*rows).column(limit),
                ha="center",
                va="center",
                fontsize=7,
                color=INK if limit in ("none", "") else "white",
            )
    axes.set_title("bound by (the limit with the largest share of time)", fontsize=9, color=INK)
    coordinates = [(row, column) for row in range(len(cells)) for column in range(len(cells[row]))]
    met = [(row, column) for row, column in coordinates if meets_objectives(cells[row][column])]
    for row, column in met:
        for axes in panels:
            axes.add_patch(
                Rectangle((column - 0.46, row - 0.44), 0.92, 0.88, fill=False, edgecolor=MET_COLOUR, linewidth=2)
            )
    for axes in panels:
        axes.grid(False)
        axes.set_xticks(
            range(len(axis_values[1])),
            [text_of(value) for value in axis_values[1]],
            rotation=0 if len(axis_values[1]) <= 6 else 45,
        )
        axes.set_yticks(range(len(axis_values[0])), [text_of(value) for value in axis_values[0]])
        axes.set(xlabel=varied[1], ylabel=varied[0])
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    figure.suptitle(
        f"Sweep over {varied[0]} and {varied[1]}{MET_CELLS if met else ''}\n{subject_of(rows)}".strip(),
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    return figure


def _draw_cells(axes: Axes, grid: Floats, texts: Sequence[Sequence[str]], is_better_low: bool) -> None:
    """A cell for each value, darker if better."""
    known = grid[~np.isnan(grid)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if low == high:  # equal values are neither the best nor the worst
        low, high = low - 1.0, high + 1.0
    colours = "Blues_r" if is_better_low else "Blues"
    axes.imshow(grid, aspect="auto", cmap=colours, vmin=low, vmax=high)
    for y, line in enumerate(texts):
        for x, text in enumerate(line):
            share = (grid[y, x] - low) / (high - low)
            dark = 1 - share if is_better_low else share
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark > 0.55 else INK)


def draw_pareto(rows: Sequence[SweepRow], varied: Sequence[str]) -> Figure:
    """Throughput, for each GPU where points have different numbers of them, against TTFT p99 and TPOT p99: points by
    the limit that bound them, and the Pareto front, of points that no other one beats in both."""
    figure = Figure(figsize=(9.0, 4.8))
    panels = figure.subplots(1, 2, sharey=True)
    complete = [row for row in rows if is_complete(row)]
    unequal = have_unequal_gpus(complete)
    drawn: list[tuple[Axes, list[tuple[float, float]], list[tuple[float, float, SweepRow]]]] = []
    for axes, (key, name) in zip(panels, LATENCIES.items(), strict=True):
        unit, scale = time_unit(number_in(row, key) for row in complete)
        points = [(number_in(row, key), number_in(row, THROUGHPUT), row) for row in complete]
        known = [
            (x * scale, y / gpus_of(row) if unequal else y, row)
            for x, y, row in points
            if x is not None and y is not None
        ]
        for x, y, row in known:
            axes.plot(
                x,
                y,
                "o",
                color=colour_of(main_limit(row) or "none"),
                markersize=5,
                zorder=2,
                markerfacecolor=MISSED_COLOUR if meets_objectives(row) is False else None,
            )
        front = pareto_front([(x, y) for x, y, _ in known])
        axes.plot([known[i][0] for i in front], [known[i][1] for i in front], "-", color=INK, linewidth=1.2, zorder=1)
        xs = [x for x, _, _ in known]
        if xs and min(xs) > 0 and max(xs) / min(xs) >= LOG_FROM_RATIO:
            axes.set_xscale("log")
        axes.margins(x=0.12)
        axes.autoscale_view()
        axes.set_xlabel(f"{name} ({unit})")
        axes.set_ylim(0, max((y for _, y, _ in known), default=1.0) * 1.15)
        round_ticks(axes.xaxis)
        drawn.append((axes, [(x, y) for x, y, _ in known], [known[i] for i in front]))
    panels[0].set_ylabel("output tokens/s of each GPU" if unequal else "output tokens/s")
    round_ticks(panels[0].yaxis)
    limits = dict.fromkeys(main_limit(row) or "none" for row in complete)
    handles = [
        Line2D(
            [],
            [],
            color=colour_of(limit),
            marker="o",
            linestyle="",
            label=f"bound by {words_of(*rows).limit_name(limit)}",
        )
        for limit in limits
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.2, label="Pareto front"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    left_out = len(rows) - len(complete)
    note = f"{left_out} points with failed requests are left out" if left_out else f"labels: {', '.join(varied)}"
    missed = MISSED_MARKS if any(meets_objectives(row) is False for row in complete) else ""
    title(panels[0], "Throughput against latency", " · ".join(filter(None, (subject_of(rows), note, missed))))
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    for axes, marks, of_front in drawn:
        _label_front(axes, marks, of_front, varied)
    return figure


def _label_front(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    front: Sequence[tuple[float, float, SweepRow]],
    varied: Sequence[str],
) -> None:
    """Write the settings beside points of the front: the last, the first, then those between them. A label covers no
    point, no other label and not the line of the front, is within the axes, and clearly nearer to its point than to any
    other, but for the two ends; a point without room has none.

    After the layout, which decides where there is room. points: all marks of these axes, front included."""
    renderer: Any = FigureCanvasAgg(axes.figure).get_renderer()  # type: ignore[arg-type,no-untyped-call]
    to_pixels = axes.transData.transform
    size = axes.figure.dpi / 72
    marks = to_pixels(points) if points else np.empty((0, 2))
    corners = to_pixels([(x, y) for x, y, _ in front]) if front else np.empty((0, 2))
    steps = np.linspace(0, 1, LINE_PIECES)[:, None]
    line = [begin + (end - begin) * steps for begin, end in pairwise(corners)]
    taken = [
        Bbox.from_extents(x - r, y - r, x + r, y + r)
        for coordinates, r in (
            (marks, MARK_RADIUS * size),
            (np.concatenate(line) if line else marks, size),
        )
        for x, y in coordinates
    ]
    inside = axes.get_window_extent().padded(-MARK_RADIUS * size)
    for index in dict.fromkeys((len(front) - 1, *range(len(front)))) if front else ():
        x, y, row = front[index]
        text = ", ".join(text_of(row[name]) for name in varied)
        label = axes.annotate(text, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=7, color=INK)
        label.set_in_layout(False)
        # How much nearer to its own point than to any other, of each position that is free.
        free: list[tuple[float, tuple[Any, str, str], Bbox]] = []
        for offset, across, up in OFFSETS:
            label.set(position=offset, ha=across, va=up)
            box = label.get_window_extent(renderer)
            is_inside = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if is_inside and not box.count_overlaps(taken):
                own, *others = _distances(
                    box, np.concatenate([corners[[index]], marks[(marks != corners[index]).any(1)]])
                )
                free.append((min(others, default=np.inf) / max(own, 1e-9), (offset, across, up), box))
        clear = [one for one in free if one[0] > CLEARLY_NEARER]
        if not clear and free and index in (0, len(front) - 1):  # the ends of the front are labelled in a crowd, too
            clear = [max(free, key=lambda one: one[0])]
        if not clear:
            label.remove()
            continue
        _, (offset, across, up), box = clear[0]
        label.set(position=offset, ha=across, va=up)
        taken.append(box)


def _distances(box: Bbox, points: Floats) -> list[float]:
    """The distance of `box` from each point, of shape [points, 2]."""
    nearest = np.clip(points, [box.x0, box.y0], [box.x1, box.y1])
    return np.hypot(*(points - nearest).T).tolist()  # type: ignore[no-any-return]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The positions of the points (latency, throughput) that no other point beats in both, by ascending latency."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def draw_limits(rows: Sequence[SweepRow], varied: Sequence[str]) -> Figure:
    """Which limit bound each point, as shares of its time: a bar a point."""
    shown = rows[:MAX_BARS]
    height, font_size = (0.22, 8) if len(shown) <= MAX_WIDE_BARS else (0.12, 5.5)
    figure = Figure(figsize=(9.0, 1.2 + height * len(shown)))
    axes = figure.subplots()
    left = np.zeros(len(shown))
    for limit, values in shares_by_limit(shown).items():
        axes.barh(range(len(shown)), values, left=left, color=colour_of(limit), label=words_of(*rows).limit_name(limit))
        left += values
    names = [", ".join(text_of(row[name]) for name in varied) for row in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=font_size)
    axes.set(xlim=(0, 1), ylim=(len(shown) - 0.4, -0.6), xlabel="share of time")
    round_ticks(axes.xaxis, text=in_percent)
    axes.grid(False)
    figure.legend(loc="outside lower center", ncols=5)
    more = f" (the first {len(shown)} of {len(rows)} points)" if len(rows) > len(shown) else ""
    title(axes, f"What bound each point{more}", " · ".join(filter(None, (subject_of(rows), ", ".join(varied)))))
    return figure
