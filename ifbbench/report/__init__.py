"""Reports of run directories: tables, charts and exports. Here: bars and plain tables."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace

from rich.console import Console
from rich.table import Column, Table

BAR_CELLS = 16


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
