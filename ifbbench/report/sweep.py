"""A sweep as a table, a row a point, and as a chart of throughput, TTFT and prefix hit rate."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console
from rich.table import Table

from ifbbench.report.style import INK, SERIES, thousands, title
from ifbbench.report.units import NOTHING, count, percent, significant, time_unit

Row = Mapping[str, Any]
"""A flattened summary (`ttft_s.p99`) with the settings beside it. A point that failed has no figures."""

THROUGHPUT = "output_throughput_tokens_per_s"
TTFTS = {"ttft_s.p50": "p50", "ttft_s.p99": "p99"}
HIT_RATE = "prefix_hit_rate"


class _Column(NamedTuple):
    """best: of its values, None where neither few nor many are better. text: None for a time, in a unit of its own."""

    key: str
    title: str
    best: Callable[[list[float]], float] | None
    text: Callable[[float | None], str] | None


COLUMNS = (
    _Column(THROUGHPUT, "output\ntokens/s", max, significant),
    _Column("request_throughput_per_s", "requests/s", max, significant),
    _Column("ttft_s.p50", "TTFT\np50", min, None),
    _Column("ttft_s.p99", "TTFT\np99", min, None),
    _Column("tpot_s.p50", "TPOT\np50", min, None),
    _Column("tpot_s.p99", "TPOT\np99", min, None),
    _Column(HIT_RATE, "prefix\nhit rate", max, percent),
    _Column("pauses", "pauses", None, count),
    _Column("requests.failed", "failed", None, count),
)
LOG_FROM_RATIO = 8
# From here on a number of the x-axis is written with a letter.
LONG_FROM = 1e5
LETTERS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def print_sweep(rows: Sequence[Row], over: str, console: Console) -> None:
    """Print a row for each point of a sweep over the setting `over`, the best of each column marked.

    Figures that a point lacks are dashes. There is no column of hit rates where no point reused anything.
    """
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    table.add_column(over, style="bold", justify="right")
    cells = []
    for column in COLUMNS:
        values = [_number(row.get(column.key)) for row in rows]
        if column.key == HIT_RATE and not any(values):
            continue
        unit, scale = time_unit(values)
        table.add_column(column.title if column.text else f"{column.title} {unit}", justify="right")
        texts = [column.text(value) if column.text else significant(value, scale) for value in values]
        cells.append(_mark_best(column, values, texts))
    for row, *texts in zip(rows, *cells, strict=True):
        table.add_row(str(row.get(over, NOTHING)), *texts)
    console.print(table)
    console.print("[dim]* best of the column[/dim]", highlight=False)


def _mark_best(column: _Column, values: list[float | None], texts: list[str]) -> list[str]:
    known = [value for value in values if value is not None]
    if column.best is None or len(known) < 2 or min(known) == max(known):
        return [f"{text} " for text in texts]
    best = column.best(known)
    pairs = zip(values, texts, strict=True)
    return [f"[bold green]{text}*[/bold green]" if value == best else f"{text} " for value, text in pairs]


def draw_sweep(rows: Sequence[Row], over: str) -> Figure:
    """Throughput above, TTFT p50 and p99 below, and the prefix hit rate below that where any point reused something;
    points in order of the setting, or of the rows if it is a text."""
    numeric = all(_number(row.get(over)) is not None for row in rows)
    if numeric:
        rows = sorted(rows, key=lambda row: float(row[over]))
    hit_rates = [value * 100 for value in _values(rows, HIT_RATE)]
    with_hit_rates = any(value > 0 for value in hit_rates)
    figure = Figure(figsize=(7.5, 7.5 if with_hit_rates else 5.4))
    panels = figure.subplots(3 if with_hit_rates else 2, 1, sharex=True)
    throughput, ttft = panels[:2]
    positions = _positions(throughput, rows, over, numeric)
    line = "o-" if numeric else "o"  # there is nothing between two texts
    _mark_highest(throughput, _line(throughput, positions, _values(rows, THROUGHPUT), line, SERIES[0]))
    throughput.set_ylabel("output tokens/s")
    unit, scale = time_unit([value for key in TTFTS for value in _values(rows, key)])
    for (key, name), colour in zip(TTFTS.items(), SERIES[1:], strict=False):
        _line(ttft, positions, [value * scale for value in _values(rows, key)], line, colour, name)
    ttft.set_ylabel(f"TTFT ({unit})")
    if with_hit_rates:
        _mark_highest(panels[2], _line(panels[2], positions, hit_rates, line, SERIES[3]), " %")
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


def _mark_highest(axes: Axes, point: tuple[float, float] | None, unit: str = "") -> None:
    if point is not None:
        axes.annotate(f"{significant(point[1])}{unit}", point, xytext=(0, 7), textcoords="offset points", ha="center",
                      fontsize=8, fontweight="bold", color=INK)  # fmt: skip


def _positions(axes: Axes, rows: Sequence[Row], over: str, numeric: bool) -> list[float]:
    """The position of each row on the x-axis, with the values swept as ticks."""
    if not numeric:
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


def _values(rows: Sequence[Row], key: str) -> list[float]:
    """The figure of each row; NaN, which is not drawn, where a point failed."""
    values = (_number(row.get(key)) for row in rows)
    return [float("nan") if value is None else value for value in values]


def _number(value: Any) -> float | None:
    """`value` as a number; None for anything else, such as NaN and the empty cells of a point that failed."""
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return number if number == number else None
