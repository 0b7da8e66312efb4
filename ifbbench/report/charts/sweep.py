"""Throughput, TTFT and what of the prompts was reused, against the setting that a sweep varied."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ifbbench.report.charts.style import INK, SERIES, thousands, title
from ifbbench.report.units import significant, time_unit

Row = Mapping[str, Any]
THROUGHPUT = "output_throughput_tokens_per_s"
TTFTS = {"ttft_s.p50": "p50", "ttft_s.p99": "p99"}
HIT_RATE = "prefix_hit_rate"
PERCENT = 100
LOG_FROM_RATIO = 8
# From here on a number of the x-axis is written with a letter.
LONG_FROM = 1e5
LETTERS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def draw_sweep(rows: Sequence[Row], over: str) -> Figure:
    """Throughput above, TTFT p50 and p99 below, and the prefix hit rate below that where any point reused something;
    points in order of the setting, or of the rows if it is a text."""
    rows = sorted(rows, key=lambda row: float(row[over])) if _numeric(rows, over) else list(rows)
    hit_rates = [value * PERCENT for value in _values(rows, HIT_RATE)]
    with_hit_rates = any(value > 0 for value in hit_rates)
    figure = Figure(figsize=(7.5, 7.5 if with_hit_rates else 5.4))
    panels = figure.subplots(3 if with_hit_rates else 2, 1, sharex=True)
    throughput, ttft = panels[:2]
    positions = _positions(throughput, rows, over)
    # Between texts there is nothing that a line could stand for.
    line = "o-" if _numeric(rows, over) else "o"
    _mark(throughput, _line(throughput, positions, _values(rows, THROUGHPUT), line, SERIES[0]))
    throughput.set_ylabel("output tokens/s")
    unit, scale = time_unit([value for key in TTFTS for value in _values(rows, key)])
    for (key, name), colour in zip(TTFTS.items(), SERIES[1:], strict=False):
        _line(ttft, positions, [value * scale for value in _values(rows, key)], line, colour, name)
    ttft.set_ylabel(f"TTFT ({unit})")
    if with_hit_rates:
        _mark(panels[2], _line(panels[2], positions, hit_rates, line, SERIES[3]), " %")
        panels[2].set_ylabel("prefix hit rate (%)")
    panels[-1].set_xlabel(over)
    for axes in panels:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
        thousands(axes.yaxis)
    ttft.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    title(throughput, f"{'Throughput, TTFT and hit rate' if with_hit_rates else 'Throughput and TTFT'} over {over}")
    figure.align_ylabels()
    return figure


def _line(
    axes: Axes, positions: list[float], values: list[float], line: str, colour: str, name: str | None = None
) -> tuple[float, float] | None:
    """Draw the points; return the highest."""
    axes.plot(positions, values, line, color=colour, markersize=5, linewidth=1.6, label=name)
    known = [point for point in zip(positions, values, strict=True) if not np.isnan(point[1])]
    return max(known, key=lambda point: point[1], default=None)


def _mark(axes: Axes, best: tuple[float, float] | None, unit: str = "") -> None:
    """Write the highest value over its point."""
    if best is not None:
        axes.annotate(f"{significant(best[1])}{unit}", best, xytext=(0, 7), textcoords="offset points", ha="center",
                      fontsize=8, fontweight="bold", color=INK)  # fmt: skip


def _positions(axes: Axes, rows: Sequence[Row], over: str) -> list[float]:
    """Where each row stands on the x-axis, whose ticks are the values swept."""
    if not _numeric(rows, over):
        positions, labels = [float(number) for number in range(len(rows))], [str(row[over]) for row in rows]
        axes.set_xlim(-0.5, len(rows) - 0.5)
    else:
        positions = [float(row[over]) for row in rows]
        labels = [_short(position) for position in positions]
        if min(positions) > 0 and max(positions) / min(positions) >= LOG_FROM_RATIO:
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(positions, labels)
    return positions


def _short(number: float) -> str:
    """250000 as 250k, 64000000 as 64M; five digits and fewer as they are."""
    if abs(number) < LONG_FROM:
        return f"{number:g}"
    size, letter = next(pair for pair in LETTERS if float(f"{abs(number):.3g}") >= pair[0])
    return f"{float(f'{number:.3g}') / size:g}{letter}"


def _numeric(rows: Sequence[Row], over: str) -> bool:
    return all(_is_number(row.get(over)) for row in rows)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and float(value) == float(value)
    except (TypeError, ValueError):
        return False


def _values(rows: Sequence[Row], key: str) -> list[float]:
    """The figure of each row; NaN, which is not drawn, where a point failed."""
    return [float(row[key]) if _is_number(row.get(key)) else float("nan") for row in rows]
