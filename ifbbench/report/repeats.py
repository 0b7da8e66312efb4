"""The report of a run with --repeat: the mean of each figure over the repeats, and half of its confidence interval."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.analysis.number_texts import NOTHING, count, significant
from ifbbench.analysis.words import Words
from ifbbench.report import plain_table, print_fitting
from ifbbench.report.tables import LATENCIES, STATISTICS, common_unit

THROUGHPUTS = {
    "request_throughput_per_s": ("Request throughput", "requests/s"),
    "output_throughput_tokens_per_s": ("Output throughput", "tokens/s"),
    "total_throughput_tokens_per_s": ("Total throughput", "tokens/s"),
    "duration_s": ("Duration", "s"),
    "pauses": ("", ""),
}


def print_repeats(name: str, known: Mapping[str, Any], words: Words, console: Console) -> None:
    """Print throughput and latencies of repeats called `name`, as mean ± half of the 95 % confidence interval.

    known: their summary.
    words: words of their engine.
    """
    intervals = known["confidence_interval_95"]
    completed, total = (known["repeats"][name] for name in ("completed", "total"))
    console.print()
    ended = f"{count(completed)} of {count(total)} repeats completed, each with its own seed"
    console.print(f"[bold]{escape(name)}[/bold]  {ended}", highlight=False)
    console.print("[dim]mean ± half of the 95 % confidence interval of the mean (Student's t)[/dim]", highlight=False)
    console.print()
    table = Table.grid(padding=(0, 3))
    for key, (title, unit) in THROUGHPUTS.items():
        title = title or words.pauses.capitalize()
        table.add_row(f"[dim]{title}[/dim]", f"{with_half_width(known.get(key), intervals.get(key))} {unit}")
    console.print(table)
    console.print()
    unit, scale = common_unit([dict(known)])
    latencies = plain_table(f"Latency ({unit})", numbers=STATISTICS.values())
    for key, title in LATENCIES.items():
        means, limits = known.get(key) or {}, intervals.get(key) or {}
        latencies.add_row(title, *(with_half_width(means.get(name), limits.get(name), scale) for name in STATISTICS))
    print_fitting(console, latencies)


def with_half_width(mean: float | None, interval: list[float] | None, scale: float = 1.0) -> str:
    """`12.3 ± 0.4`, the mean alone if there is no interval, a dash if there is neither."""
    if mean is None:
        return NOTHING
    if interval is None:
        return significant(mean, scale)
    return f"{significant(mean, scale)} ± {significant((interval[1] - interval[0]) / 2, scale)}"
