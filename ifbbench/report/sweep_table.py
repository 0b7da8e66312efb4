"""A sweep as a table: a row a point, the best of each column marked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ifbbench.report.units import NOTHING, count, percent, significant, time_unit

Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Column:
    key: str
    title: str
    best: Callable[[list[float]], float] | None = None


COLUMNS = (
    _Column("output_throughput_tokens_per_s", "output\ntokens/s", max),
    _Column("request_throughput_per_s", "requests/s", max),
    _Column("ttft_s.p50", "TTFT\np50", min),
    _Column("ttft_s.p99", "TTFT\np99", min),
    _Column("tpot_s.p50", "TPOT\np50", min),
    _Column("tpot_s.p99", "TPOT\np99", min),
    _Column("prefix_hit_rate", "prefix\nhit rate", max),
    _Column("pauses", "pauses"),
    _Column("requests.failed", "failed"),
)
COUNTS = {"pauses", "requests.failed"}
SHARES = {"prefix_hit_rate"}
# Columns that are left out where all is zero.
OPTIONAL = {"prefix_hit_rate"}


def print_sweep(rows: Sequence[Row], over: str, console: Console) -> None:
    """Print a row for each point of a sweep over the setting `over`.

    A row is a flattened summary with the settings beside it; figures that it lacks (a point that failed) are dashes.
    """
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    table.add_column(over, style="bold", justify="right")
    cells = []
    for column in COLUMNS:
        values = [_number(row.get(column.key)) for row in rows]
        if column.key in OPTIONAL and not any(values):
            continue
        unit, texts = _texts(column, values)
        table.add_column(column.title + unit, justify="right")
        cells.append(_mark_best(column, values, texts))
    for row, *texts in zip(rows, *cells, strict=True):
        table.add_row(str(row.get(over, NOTHING)), *texts)
    console.print(table)
    console.print("[dim]* best of the column[/dim]", highlight=False)


def _texts(column: _Column, values: list[float | None]) -> tuple[str, list[str]]:
    """The unit to put in the heading, and the values in it."""
    if column.key in COUNTS:
        return "", [count(value) for value in values]
    if column.key in SHARES:
        return "", [percent(value) for value in values]
    if "_s." not in column.key:
        return "", [significant(value) for value in values]
    unit, scale = time_unit(values)
    return f" {unit}", [significant(None if value is None else value * scale) for value in values]


def _mark_best(column: _Column, values: list[float | None], texts: list[str]) -> list[str]:
    known = [value for value in values if value is not None]
    if column.best is None or len(known) < 2 or min(known) == max(known):
        return [f"{text} " for text in texts]
    best = column.best(known)
    pairs = zip(values, texts, strict=True)
    return [f"[bold green]{text}*[/bold green]" if value == best else f"{text} " for value, text in pairs]


def _number(value: Any) -> float | None:
    """`value` as a number; None for what a failed point, or an empty CSV cell, has in its place."""
    if value is None or value == "" or value != value:
        return None
    return float(value)
