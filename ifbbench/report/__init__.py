"""Reports of run directories: tables, charts and exports. Here: how all of them write numbers, and plain tables."""

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace

from rich.console import Console
from rich.table import Column, Table

NOTHING = "–"
MAX_DECIMALS = 6
BAR_CELLS = 16


def significant(value: float | None, scale: float = 1.0) -> str:
    """`value` times `scale` to three significant digits and at most MAX_DECIMALS decimals, without exponent: 1,234 ·
    12.3 · 0.0123; a dash for None or NaN. What rounds to nothing is 0, without a sign."""
    if value is None or math.isnan(value):
        return NOTHING
    value *= scale
    if abs(value) < 0.5 * 10**-MAX_DECIMALS:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(decimals, 0), MAX_DECIMALS)}f}"


def count(value: float | None) -> str:
    """A whole number with thousands separators; a dash for None or NaN."""
    if value is None or math.isnan(value):
        return NOTHING
    text = f"{value:,.0f}"
    return "0" if text == "-0" else text


def percent(share: float | None, decimals: int = 0) -> str:
    """A share in percent; `<1 %` for a small one, so that it does not read as never, and `>99 %` for one that is not
    all."""
    if share is None or math.isnan(share):
        return NOTHING
    least = 10.0 ** -(decimals + 2)
    if 0 < share < least:
        return f"<{100 * least:.{decimals}f} %"
    if 1 - least < share < 1:
        return f">{100 * (1 - least):.{decimals}f} %"
    return f"{round(100 * share, decimals) + 0.0:,.{decimals}f} %"  # + 0.0: never -0


def time_unit(seconds: Iterable[float | None]) -> tuple[str, float]:
    """The unit (s, ms or µs) that suits the middle of these durations, and the number of them in a second."""
    known = sorted(value for value in seconds if value is not None and not math.isnan(value))
    middle = known[len(known) // 2] if known else 1.0
    if middle >= 1:
        return "s", 1.0
    return ("µs", 1e6) if 0 < middle < 1e-4 else ("ms", 1e3)


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """A bar of `share` (0 to 1) of `cells` characters, to an eighth of a character."""
    eighths = max(round(share * cells * 8), int(share > 0))
    rest = " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return ("█" * (eighths // 8) + rest).ljust(cells)


def print_fitting(console: Console, *tables: Table, keys: int = 1) -> None:
    """Print the first of `tables`, forms of the same one, that is not wider than the console; else the last in parts,
    each with its first `keys` columns and as many of the others as fit. rich would cut cells."""
    any_width = console.options.update_width(1000)

    def fits(table: Table) -> bool:
        return console.measure(table, options=any_width).maximum <= console.width

    if (whole := next(filter(fits, tables), None)) is not None:
        console.print(whole)
        return
    table = tables[-1]
    part = table.columns[:keys]
    for column in table.columns[keys:]:
        if len(part) > keys and not fits(_with_columns(table, [*part, column])):
            console.print(_with_columns(table, part))
            console.print()
            part = table.columns[:keys]
        part.append(column)
    console.print(_with_columns(table, part))


def _with_columns(table: Table, columns: Sequence[Column]) -> Table:
    """The same rows with these columns only."""
    part = copy(table)
    part.columns = [replace(column, _index=index) for index, column in enumerate(columns)]
    return part


def plain_table(*texts: str, numbers: Iterable[str] = ()) -> Table:
    """An empty table without lines: columns of text, and columns of numbers, by their headings."""
    table = Table(*texts, box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
