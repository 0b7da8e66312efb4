"""What a run prints when it is done: how fast, how long, what bound it, and what failed."""

import math
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.recording.run_directory import find_lines
from ifbbench.report.figures import figures
from ifbbench.report.load import RunData
from ifbbench.report.profile import profile_figures, profile_sentence, profile_table
from ifbbench.report.units import NOTHING, bar, count, percent, significant, time_unit

LATENCIES = {
    "queue_time_s": "Queue time",
    "ttft_s": "TTFT",
    "itl_s": "ITL",
    "tpot_s": "TPOT",
    "e2e_s": "E2E",
}
STATISTICS = ("mean", "p50", "p90", "p99", "max")
LIMIT_NAMES = {"batch_size": "batch size", "num_tokens": "token budget", "kv_blocks": "KV blocks", "none": "no limit"}
LIMIT_SETTINGS = {"batch_size": "max_batch_size", "num_tokens": "max_num_tokens"}
# What the line of settings says of how requests were batched, and when.
WAYS_OF_BATCHING: dict[str, Callable[[dict[str, Any]], bool]] = {
    "static batches (V1)": lambda config: config.get("type") == "v1",
    "a pass for each phase": lambda config: config.get("type") == "inflight",
    "overlap": lambda config: bool(config.get("enable_trt_overlap")),
    "beams": lambda config: (config.get("max_beam_width") or 1) > 1,
    "streaming": lambda config: bool(config.get("streaming")),
}
FAILURES_SHOWN = 5


def print_report(run: RunData, console: Console) -> None:
    """Print the figures of `run`, a partial run's marked as such."""
    known = figures(run)
    console.print()
    console.print(f"[bold]{escape(run.name)}[/bold]  {escape(settings_line(run))}", highlight=False)
    if run.partial:
        covers = "" if run.summary else " Latencies and throughput cover the requests that completed."
        console.print(f"[yellow]Partial: the run did not reach its end.{covers}[/yellow]")
    if run.recorded_every > 1:
        console.print(f"[yellow]{_thinned(run)}[/yellow]", highlight=False, soft_wrap=True)
    console.print()
    for table in (_throughput_table(known), _latency_table(known), _bound_table(known)):
        console.print(table)
        console.print()
    console.print(bound_sentence(known, run.config), highlight=False, markup=False, soft_wrap=True)
    _print_profile(run, console)
    _print_failures(run, console)


def _thinned(run: RunData) -> str:
    covers = "The figures are of all." if run.summary else "Of this partial run, ITL and padding are therefore unknown."
    return f"Thinned: one of {run.recorded_every} iterations has its statistics recorded. {covers}"


def settings_line(run: RunData) -> str:
    """What was run, in one line: trace, policy and limits, model and device."""
    config, trace = run.config, run.run.get("trace") or {}
    chunking = "chunked context" if config.get("enable_chunked_context") else None
    sizes = [f"{name} {config[name]}" for name in ("max_batch_size", "max_num_tokens") if config.get(name)]
    ways = [name for name, wanted in WAYS_OF_BATCHING.items() if wanted(config)]
    where = " on ".join(str(config[name]) for name in ("model", "device") if config.get(name))
    parts = [trace.get("name"), config.get("policy"), *sizes, chunking, *ways, where, config.get("dtype")]
    return " · ".join(str(part) for part in parts if part)


def bound_sentence(known: dict[str, Any], config: dict[str, Any]) -> str:
    """Which limit left requests out or cut their chunks, and how often, in plain words."""
    shares, failures = known["bound_by"], _failures_sentence(known)
    limits = sorted((name for name in shares if name != "none"), key=lambda name: -shares[name])
    binding = [name for name in limits if shares[name] > 0]
    if not known["iterations"]:
        return f"No iteration was run.{failures}"
    if not binding and failures:
        return f"No limit left an admitted request out: every iteration ran all of them.{failures}"
    if not binding:
        return "No limit left any request out: every iteration ran all that had arrived."
    first, *others = [f"{_limit_in_words(name, known, config)} in {percent(shares[name])}" for name in binding]
    more = f", {' and '.join(others)}" if others else ""
    rest = f"{percent(shares.get('none'))} ran all that had arrived"
    return f"Work was left out because of {first} of iterations{more}; {rest}.{failures}"


def _failures_sentence(known: dict[str, Any]) -> str:
    """How many requests failed: limits of an iteration do not explain these."""
    requests = known.get("requests") or {}
    if not requests.get("failed"):
        return ""
    failed = f"{count(requests['failed'])} of {count(requests['total'])} requests"
    return f" {failed} failed without a complete answer; the reasons are listed below."


def _limit_in_words(name: str, known: dict[str, Any], config: dict[str, Any]) -> str:
    if name == "kv_blocks":
        return f"the KV cache ({count(known['kv_blocks']['max'])} blocks)" if known.get("kv_blocks") else "the KV cache"
    setting = LIMIT_SETTINGS.get(name, name)
    return f"{setting} ({config[setting]})" if config.get(setting) else setting


def _throughput_table(known: dict[str, Any]) -> Table:
    requests, blocks = known["requests"], known.get("kv_blocks") or {}
    peak, most = blocks.get("peak_used"), blocks.get("max")
    completed = f"{count(requests['completed'])} of {count(requests['total'])}"
    if requests["failed"]:
        completed += f" ([red]{count(requests['failed'])} failed[/red])"
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    table.add_column()
    table.add_column(style="dim")
    table.add_column()
    rows = [
        ("Requests completed", completed, "Iterations", count(known["iterations"])),
        ("Duration", f"{significant(known['duration_s'])} s", "Pauses", count(known["pauses"])),
        ("Request throughput", f"{significant(known['request_throughput_per_s'])} requests/s",
         "Recomputed tokens", count(known["recomputed_tokens"])),
        ("Output throughput", f"[bold]{significant(known['output_throughput_tokens_per_s'])} tokens/s[/bold]",
         "Prefix hit rate", percent(known.get("prefix_hit_rate"))),
        ("Total throughput", f"{significant(known['total_throughput_tokens_per_s'])} tokens/s", "KV blocks, peak use",
         f"{count(peak)} of {count(most)} ({percent(peak / most)})" if peak is not None and most else NOTHING),
    ]  # fmt: skip
    if known.get("padding_waste"):
        rows.append(("Empty slots", count(known["empty_generation_slots"]), "Padding",
                     percent(known["padding_waste"])))  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _latency_table(known: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    table.add_column("Latency")
    table.add_column("")
    for name in STATISTICS:
        table.add_column(name, justify="right")
    for key, title in LATENCIES.items():
        values = [(known.get(key) or {}).get(name) for name in STATISTICS]
        unit, scale = time_unit(values)
        table.add_row(title, f"[dim]{unit}[/dim]", *(significant(_scaled(value, scale)) for value in values))
    return table


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None or math.isnan(value) else value * scale


def _bound_table(known: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    table.add_column("Iterations bound by")
    table.add_column("")
    table.add_column("share", justify="right")
    shares = known["bound_by"]
    own = [name for name in shares if name not in LIMIT_NAMES]  # reasons of a user policy
    for name in (*(name for name in LIMIT_NAMES if name != "none"), *own, "none"):
        share = shares.get(name, 0.0)
        colour = "dim" if name == "none" else "cyan"
        table.add_row(escape(LIMIT_NAMES.get(name, name)), f"[{colour}]{bar(share)}[/{colour}]", percent(share))
    return table


def _print_profile(run: RunData, console: Console) -> None:
    profile = profile_figures(run)
    if profile is None:
        return
    console.print()
    console.print(profile_table(profile))
    console.print()
    console.print(profile_sentence(profile), highlight=False, soft_wrap=True)


def _print_failures(run: RunData, console: Console) -> None:
    failed = run.requests[run.requests["outcome"] == "failed"]
    if failed.empty:
        return
    console.print()
    console.print(f"[red]{len(failed)} failed requests[/red]", highlight=False)
    for request, error in list(zip(failed["request_id"], failed["error"], strict=True))[:FAILURES_SHOWN]:
        console.print(f"  {request}: {error}", highlight=False, markup=False, soft_wrap=True)
    if len(failed) > FAILURES_SHOWN:
        more = f"{len(failed) - FAILURES_SHOWN} more in {find_lines(run.path, 'requests')}"
        console.print(f"  and {more}", highlight=False)
