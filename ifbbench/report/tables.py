"""Reports as text: of a run (throughput, latencies, limits, profile, failures), and of a sweep (a row a point)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.recording.run_directory import find_lines
from ifbbench.report import NOTHING, bar, count, percent, significant, time_unit
from ifbbench.report.figures import figures
from ifbbench.report.load import RunData

LATENCIES = {"queue_time_s": "Queue time", "ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "TPOT", "e2e_s": "E2E"}
STATISTICS = ("mean", "p50", "p90", "p99", "max")
LIMIT_NAMES = {"batch_size": "batch size", "num_tokens": "token budget", "kv_blocks": "KV blocks", "none": "no limit"}
LIMIT_SETTINGS = {"batch_size": "max_batch_size", "num_tokens": "max_num_tokens"}
# Figures with a band of the expected error.
EXPECTED_ERRORS = {"ttft_s": "TTFT", "itl_s": "ITL", "output_throughput_tokens_per_s": "output throughput"}
# Words in the line of settings, and the runs that have them.
BATCHING_TYPES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "static batches (V1)": lambda config: config.get("type") == "v1",
    "a pass for each phase": lambda config: config.get("type") == "inflight",
    "overlap": lambda config: bool(config.get("enable_trt_overlap")),
    "beams": lambda config: (config.get("max_beam_width") or 1) > 1,
    "streaming": lambda config: bool(config.get("streaming")),
}
FAILURES_SHOWN = 5
# Parts of a profiled iteration, by the field that has their time: of a CPU, and of a GPU.
ON_CPU = {"schedule": "Schedule", "prepare": "Prepare", "device_busy": "Forward pass", "collect": "Collect"}
ON_GPU = {"schedule": "Schedule", "prepare": "Prepare", "launch": "Launch", "collect": "Wait for the GPU"}
REST = "Answer, record, wait"
SCALES = {"T": 1e12, "G": 1e9, "M": 1e6}

SweepRow = Mapping[str, Any]
"""A point of a sweep: its settings and flattened summary (`ttft_s.p99`). A point that failed has no figures."""
# Figures of a sweep: heading, function that formats a value (None for a time, in the unit that suits its column), and
# function that chooses the best value (None where neither low nor high is better).
SWEEP_COLUMNS: dict[str, tuple[str, Callable[[float | None], str] | None, Callable[[list[float]], float] | None]] = {
    "output_throughput_tokens_per_s": ("output\ntokens/s", significant, max),
    "request_throughput_per_s": ("requests/s", significant, max),
    "ttft_s.p50": ("TTFT\np50", None, min),
    "ttft_s.p99": ("TTFT\np99", None, min),
    "tpot_s.p50": ("TPOT\np50", None, min),
    "tpot_s.p99": ("TPOT\np99", None, min),
    "prefix_hit_rate": ("prefix\nhit rate", percent, max),
    "pauses": ("pauses", count, None),
    "requests.failed": ("failed", count, None),
}


def print_report(run: RunData, console: Console) -> None:
    """Print the figures of `run`, a partial run's marked as such."""
    known = figures(run)
    console.print()
    console.print(f"[bold]{escape(run.name)}[/bold]  {escape(settings_line(run))}", highlight=False)
    if run.partial:
        covers = "" if run.summary else " Latencies and throughput cover the requests that completed."
        console.print(f"[yellow]Partial: the run did not reach its end.{covers}[/yellow]")
    if run.recorded_every > 1:
        covers = "The figures are of all." if run.summary else "ITL and padding of this partial run are unknown."
        thinned = f"Thinned: one of {run.recorded_every} iterations has its statistics recorded. {covers}"
        console.print(f"[yellow]{thinned}[/yellow]", highlight=False, soft_wrap=True)
    console.print()
    for table in (_throughput_table(known), _latency_table(known), _bound_table(known)):
        console.print(table)
        console.print()
    console.print(bound_sentence(known, run.config), highlight=False, markup=False, soft_wrap=True)
    if expected := known.get("expected_error"):
        console.print(expected_error_sentence(expected), highlight=False, markup=False, soft_wrap=True)
    _print_profile(run, console)
    _print_failures(run, console)


def settings_line(run: RunData) -> str:
    """The settings of a run in one line: trace, policy and limits, model and device."""
    config, trace = run.config, run.run.get("trace") or {}
    chunking = "chunked context" if config.get("enable_chunked_context") else None
    sizes = [f"{name} {config[name]}" for name in ("max_batch_size", "max_num_tokens") if config.get(name)]
    types = [name for name, applies in BATCHING_TYPES.items() if applies(config)]
    where = " on ".join(str(config[name]) for name in ("model", "device") if config.get(name))
    engine = f"with {config['engine_overhead']}" if config.get("engine_overhead") else None
    parts = [trace.get("name"), config.get("policy"), *sizes, chunking, *types, where, engine, config.get("dtype")]
    return " · ".join(str(part) for part in parts if part)


def bound_sentence(known: dict[str, Any], config: dict[str, Any]) -> str:
    """Which limits left requests out or cut their chunks, and how often."""
    shares, requests, failures = known["bound_by"], known.get("requests") or {}, ""
    if requests.get("failed"):  # limits of an iteration do not explain these
        failed = f"{count(requests['failed'])} of {count(requests['total'])} requests"
        failures = f" {failed} failed without a complete answer; the reasons are listed below."
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


def expected_error_sentence(expected: dict[str, Any]) -> str:
    """How far the figures of a simulated run may be from a real server's."""
    if not expected["compared"]:
        return f"Expected error: unknown, {expected['reason']}."
    bands = [
        f"{100 * low:+.0f} to {100 * high:+.0f} % of the predicted {label}"
        for key, label in EXPECTED_ERRORS.items() if key in expected for low, high in [expected[key]]
    ]  # fmt: skip
    of = f"{count(expected['rows'])} published measurements with {expected['load']} requests at a time"
    return f"Expected error, from {of}: {percent(expected['coverage'])} of them are within {', '.join(bands)}."


def _limit_in_words(name: str, known: dict[str, Any], config: dict[str, Any]) -> str:
    if name == "kv_blocks":
        return f"the KV cache ({count(known['kv_blocks']['max'])} blocks)" if known.get("kv_blocks") else "the KV cache"
    setting = LIMIT_SETTINGS.get(name, name)
    return f"{setting} ({config[setting]})" if config.get(setting) else setting


def plain_table(*texts: str, numbers: Iterable[str] = ()) -> Table:
    """An empty table without lines: columns of text, and columns of numbers, by their headings."""
    table = Table(*texts, box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _throughput_table(known: dict[str, Any]) -> Table:
    requests, blocks = known["requests"], known.get("kv_blocks") or {}
    peak, pool = blocks.get("peak_used"), blocks.get("max")
    completed = f"{count(requests['completed'])} of {count(requests['total'])}"
    if requests["failed"]:
        completed += f" ([red]{count(requests['failed'])} failed[/red])"
    table = Table.grid(padding=(0, 3))
    for style in ("dim", None, "dim", None):
        table.add_column(style=style)
    rows = [
        ("Requests completed", completed, "Iterations", count(known["iterations"])),
        ("Duration", f"{significant(known['duration_s'])} s", "Pauses", count(known["pauses"])),
        ("Request throughput", f"{significant(known['request_throughput_per_s'])} requests/s",
         "Recomputed tokens", count(known["recomputed_tokens"])),
        ("Output throughput", f"[bold]{significant(known['output_throughput_tokens_per_s'])} tokens/s[/bold]",
         "Prefix hit rate", percent(known.get("prefix_hit_rate"))),
        ("Total throughput", f"{significant(known['total_throughput_tokens_per_s'])} tokens/s", "KV blocks, peak use",
         f"{count(peak)} of {count(pool)} ({percent(peak / pool)})" if peak is not None and pool else NOTHING),
    ]  # fmt: skip
    if known.get("padding_waste"):
        rows.append(("Empty slots", count(known["empty_generation_slots"]), "Padding",
                     percent(known["padding_waste"])))  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _latency_table(known: dict[str, Any]) -> Table:
    table = plain_table("Latency", "", numbers=STATISTICS)
    for key, title in LATENCIES.items():
        values = [(known.get(key) or {}).get(name) for name in STATISTICS]
        unit, scale = time_unit(values)
        table.add_row(title, f"[dim]{unit}[/dim]", *(significant(value, scale) for value in values))
    return table


def _bound_table(known: dict[str, Any]) -> Table:
    table = plain_table("Iterations bound by", "", numbers=["share"])
    shares = known["bound_by"]
    own = [name for name in shares if name not in LIMIT_NAMES]  # reasons of a user policy
    for name in (*(name for name in LIMIT_NAMES if name != "none"), *own, "none"):
        share = shares.get(name, 0.0)
        colour = "dim" if name == "none" else "cyan"
        table.add_row(escape(LIMIT_NAMES.get(name, name)), f"[{colour}]{bar(share)}[/{colour}]", percent(share))
    return table


@dataclass(frozen=True, slots=True)
class Reached:
    """What a device did a second while it was busy, in FLOPs or bytes, and the maximum that large operations reach."""

    per_s: float
    max_per_s: float

    @property
    def share(self) -> float:
        return self.per_s / self.max_per_s

    def __str__(self) -> str:
        """`12.3 of 19.8 G`."""
        letter, scale = next((item for item in SCALES.items() if self.max_per_s >= item[1]), ("M", 1e6))
        return f"{significant(self.per_s / scale)} of {significant(self.max_per_s / scale)} {letter}"


@dataclass(frozen=True, slots=True)
class ProfileFigures:
    """Of a whole run. parts: mean seconds an iteration of what the host does, which together are the run's duration.

    device_busy: share of the duration in which the device computes. bandwidth: reached in iterations of generation
    alone, by weights, keys and values. arithmetic: reached in iterations with context. None where there were none.
    """

    parts: dict[str, float]
    device_busy: float
    bandwidth: Reached | None
    arithmetic: Reached | None


def profile_figures(run: RunData) -> ProfileFigures | None:
    """The figures of a run with --profile; None of others, and where nothing was run."""
    limits = run.run.get("device_limits")
    # The table of iterations is read only then: it is large, and other runs do not need it.
    if limits is None or (iterations := run.iterations).empty:
        return None
    names = ON_CPU if str(run.config.get("device")).startswith("cpu") else ON_GPU
    ends_s = iterations["start_s"] + iterations["latency_ms"] / 1000
    duration_s, count = float(ends_s.iloc[-1] - iterations["start_s"].iloc[0]), len(iterations)
    parts = {title: float(iterations[f"{name}_ms"].sum()) / 1000 / count for name, title in names.items()}
    parts[REST] = max(0.0, duration_s / count - sum(parts.values()))
    busy_s = iterations["device_busy_ms"] / 1000
    has_context = iterations["total_context_tokens"] > 0

    def reached(kind: str, max_per_s: float) -> Reached | None:
        rows = (has_context if kind == "flops" else ~has_context) & (busy_s > 0)
        if not rows.any():
            return None
        return Reached(float(iterations.loc[rows, kind].sum() / busy_s[rows].sum()), max_per_s)

    return ProfileFigures(
        parts, float(busy_s.sum()) / duration_s, reached("bytes", limits["bytes_per_s"]),
        reached("flops", limits["flops_per_s"]),
    )  # fmt: skip


def profile_sentence(profile: ProfileFigures) -> str:
    """How busy the device was, and with what."""
    sentence = f"The device was busy {percent(profile.device_busy)} of the time"
    if (reached := profile.bandwidth) is not None:
        sentence += (f"; in generation it read and wrote weights, keys and values at {percent(reached.share)} of the "
                     f"speed of a large copy (MBU, {reached}B/s)")  # fmt: skip
    if (reached := profile.arithmetic) is not None:
        sentence += (f"; in iterations with context it computed at {percent(reached.share)} of the speed of a large "
                     f"matrix product (MFU, {reached}FLOP/s)")  # fmt: skip
    return f"{sentence}."


def _print_profile(run: RunData, console: Console) -> None:
    profile = profile_figures(run)
    if profile is None:
        return
    unit, scale = time_unit(profile.parts.values())
    table = plain_table("Where the time goes", "", numbers=("share", f"{unit} an iteration"))
    for title, seconds in profile.parts.items():
        share = seconds / sum(profile.parts.values())
        table.add_row(title, f"[cyan]{bar(share)}[/cyan]", percent(share), significant(seconds, scale))
    console.print()
    console.print(table)
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
    if (more := len(failed) - FAILURES_SHOWN) > 0:
        console.print(f"  and {more} more in {find_lines(run.path, 'requests')}", highlight=False)


def print_sweep(rows: Sequence[SweepRow], over: str, console: Console) -> None:
    """Print a row for each point of a sweep over the setting `over`, the best of each column marked.

    Figures that a point lacks are dashes. There is no column of hit rates where no point reused anything.
    """
    table = plain_table()
    table.add_column(over, style="bold", justify="right")
    cells = []
    for key, (heading, text, best_of) in SWEEP_COLUMNS.items():
        values = [number_in(row, key) for row in rows]
        if key == "prefix_hit_rate" and not any(values):
            continue
        unit, scale = time_unit(values)
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
