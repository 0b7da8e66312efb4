"""The table of a sweep as text: a row a point, and what bound it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from ifbbench.report import NOTHING, count, percent, plain_table, significant, time_unit

SweepRow = Mapping[str, Any]
"""A point of a sweep: its settings and flattened summary (`ttft_s.p99`). A point that failed has no figures."""
# Figures of a sweep: heading, function that formats a value (None for a time, in the unit that suits its column), and
# function that chooses the best value (None where neither low nor high is better).
SWEEP_COLUMNS: dict[str, tuple[str, Callable[[float | None], str] | None, Callable[[list[float]], float] | None]] = {
    "output_throughput_tokens_per_s": ("output\ntokens/s", significant, max),
    "request_throughput_per_s": ("\nrequests/s", significant, max),
    "ttft_s.p50": ("TTFT\np50", None, min),
    "ttft_s.p99": ("TTFT\np99", None, min),
    "tpot_s.p50": ("TPOT\np50", None, min),
    "tpot_s.p99": ("TPOT\np99", None, min),
    "goodput_requests_per_s": ("goodput\nrequests/s", significant, max),
    "goodput_share": ("good", percent, max),
    "prefix_hit_rate": ("prefix\nhit rate", percent, max),
    "pauses": ("pauses", count, None),
    "requests.failed": ("failed", count, None),
}
# The limit with the largest share of the time, and of the waiting: prefix of the keys, and heading.
SHARES = {"bound_by_time": "bound by\n(time)", "waiting_by_limit": "waits for\n(request-s)"}
SHORT_NAMES = {"batch_size": "batch", "num_tokens": "tokens", "kv_blocks": "KV"}
# Columns that are left out where no point has any.
WHERE_ANY = ("goodput_requests_per_s", "goodput_share", "prefix_hit_rate", "pauses", "requests.failed")


def print_sweep(rows: Sequence[SweepRow], over: str, console: Console) -> None:
    """Print a row for each point of a sweep over the setting `over`, the best of each column marked.

    Figures that a point lacks are dashes. There is no column of WHERE_ANY where no point has any.
    """
    table = plain_table()
    table.padding = (0, 1)
    table.add_column(over, style="bold", justify="right")
    cells = [[largest_share(row, key) for row in rows] for key in SHARES]
    for heading in SHARES.values():
        table.add_column(heading)
    for key, (heading, text, best_of) in SWEEP_COLUMNS.items():
        values = [number_in(row, key) for row in rows]
        if key in WHERE_ANY and not any(values):
            continue
        # Percentiles of one latency have one unit.
        figure = key.partition(".")[0]
        unit, scale = time_unit(number_in(row, other) for row in rows for other in SWEEP_COLUMNS
                                if other.startswith(f"{figure}."))  # fmt: skip
        table.add_column(heading if text else f"{heading} {unit}", justify="right")
        texts = [text(value) if text else significant(value, scale) for value in values]
        known = [value for value in values if value is not None]
        best = best_of(known) if best_of and len(set(known)) > 1 else None
        cells.append([
            f"{cell} " if best is None or value != best else f"[bold green]{cell}*[/bold green]"
            for value, cell in zip(values, texts, strict=True)
        ])  # fmt: skip
    for row, *texts in zip(rows, *cells, strict=True):
        table.add_row(str(row.get(over, NOTHING)), *texts)
    console.print(table)
    console.print("[dim]* best of the column[/dim]", highlight=False)


def number_in(row: SweepRow, key: str) -> float | None:
    """The number in a row; None for anything else, such as NaN and the empty cells of a point that failed."""
    value = row.get(key)
    try:
        number = None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return number if number == number else None


def largest_share(row: SweepRow, key: str) -> str:
    """The limit with the largest share of `key`, such as `KV 83 %`; a dash if no limit has any."""
    amounts = {name.partition(".")[2]: number_in(row, name) or 0.0 for name in row if name.startswith(f"{key}.")}
    largest = max((name for name in amounts if name != "none"), key=amounts.__getitem__, default=None)
    if largest is None or not amounts[largest]:
        return NOTHING
    return f"{escape(SHORT_NAMES.get(largest, largest))} {percent(amounts[largest] / sum(amounts.values()))}"
