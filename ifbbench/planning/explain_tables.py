"""The tables of `ifbbench explain-step`."""

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from ifbbench.planning.explain import Explanation
from ifbbench.simulation.cost_model import NANOSECONDS, OperationCost

BAR_WIDTH = 20
EIGHTHS = " ▏▎▍▌▋▊▉"
LIMIT_STYLES = {"compute": "magenta", "memory": "cyan", "network": "yellow", "latency": "blue", "launch": "red"}
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def print_explanation(explained: Explanation, console: Console) -> None:
    """Print where the time goes, what the host adds, and what fits into memory."""
    console.print()
    console.print(_title(explained), highlight=False)
    console.print(_batch_line(explained), style="dim", highlight=False)
    console.print()
    console.print(_operations_table(explained))
    console.print()
    for sentence in _sentences(explained):
        console.print(sentence, highlight=False)
    console.print()
    console.print(_memory_table(explained))
    console.print()


def scaled(value: float, unit: str) -> str:
    """Three significant digits and a decimal prefix: 1.23 TFLOP, 456 MB."""
    factor, prefix = next(((factor, prefix) for factor, prefix in PREFIXES if value >= factor * 0.9995), (1.0, ""))
    return f"{_digits(value / factor)} {prefix}{unit}"


def duration(seconds: float) -> str:
    """Three significant digits in s, ms or µs."""
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= f * 0.9995), (1e-6, "µs"))
    return f"{_digits(seconds / factor)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _title(explained: Explanation) -> str:
    shard, hardware = explained.cost_model.shard, explained.cost_model.hardware
    degrees = [f"TP {shard.tp_size}"] * (shard.tp_size > 1) + [f"PP {shard.pp_size}"] * (shard.pp_size > 1)
    devices = shard.tp_size * shard.pp_size
    place = f"{devices} × {hardware.title}" if devices > 1 else hardware.title
    facts = [f"weights {shard.dtype}", f"KV cache {shard.kv_cache_dtype}", *degrees]
    return f"[bold]{escape(explained.model)}[/bold] on [bold]{escape(place)}[/bold]  [dim]{' · '.join(facts)}[/dim]"


def _batch_line(explained: Explanation) -> str:
    work, step = explained.work, explained.step
    parts = []
    if step.chunks:
        chunks = ", ".join(f"{length:,}@{start:,}" for start, length in step.chunks)
        parts.append(f"{work.context_tokens:,} context tokens ({chunks})")
    if step.groups:
        groups = ", ".join(f"{count:,} with {length:,} keys each" for count, length in step.groups)
        parts.append(f"{work.generation_tokens:,} requests in generation ({groups})")
    return f"One iteration: {' and '.join(parts)}"


def _operations_table(explained: Explanation) -> Table:
    total = sum(operation.seconds for operation in explained.operations)
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False, show_footer=True, footer_style="bold")
    table.add_column("operation", "total")
    table.add_column("time", duration(total), justify="right")
    table.add_column("share", "100 %", justify="right")
    table.add_column("", "", width=BAR_WIDTH)
    flops = sum(operation.flops for operation in explained.operations)
    table.add_column("FLOPs", scaled(flops, "FLOP"), justify="right")
    table.add_column("bytes", "", justify="right")
    table.add_column("limited by", "")
    table.add_column("reaches", "")
    for operation in explained.operations:
        share, style = operation.seconds / total, LIMIT_STYLES[operation.limit]
        table.add_row(
            operation.name,
            duration(operation.seconds),
            "<1 %" if share < 0.01 else f"{100 * share:.0f} %",
            f"[{style}]{_bar(share)}[/{style}]",
            scaled(operation.flops, "FLOP") if operation.flops else "",
            scaled(operation.bytes, "B") if operation.bytes else "",
            f"[{style}]{operation.limit}[/{style}]",
            _reached(operation),
        )
    return table


def _bar(share: float) -> str:
    eighths = round(share * BAR_WIDTH * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _reached(operation: OperationCost) -> str:
    """The rate in what limits the operation."""
    if operation.limit == "compute":
        return scaled(operation.flops / operation.seconds, "FLOP/s")
    if operation.limit in ("memory", "network"):
        return scaled(operation.bytes / operation.seconds, "B/s")
    return ""


def _sentences(explained: Explanation) -> list[str]:
    device_s, host_s = explained.device_ns / NANOSECONDS, explained.host_ns / NANOSECONDS
    outputs = explained.work.outputs
    hidden = max(device_s, host_s)
    return [
        f"The host takes [bold]{duration(host_s)}[/bold] to schedule {explained.step.num_requests:,} requests, "
        f"hidden behind the device with --enable_trt_overlap.",
        f"{outputs:,} tokens come out: [bold]{outputs / (device_s + host_s):,.0f}[/bold] a second if iterations like "
        f"this one follow each other, {outputs / hidden:,.0f} with overlap.",
    ]


def _memory_table(explained: Explanation) -> Group:
    memory, step_tokens = explained.memory, explained.step_kv_tokens
    left = memory.total - memory.runtime - memory.weights - memory.activations - memory.kv_cache
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    table.add_column("memory of a device")
    table.add_column(scaled(memory.total, "B"), justify="right")
    table.add_column("")
    per_token = scaled(explained.cost_model.shard.kv_bytes_per_token, "B")
    rows = (
        ("weights", memory.weights, ""),
        ("activations", memory.activations, "of the largest iteration"),
        ("runtime", memory.runtime, ""),
        ("KV cache", memory.kv_cache, f"{explained.kv_tokens:,} tokens of {per_token}"),
        ("left free", left, ""),
    )
    for name, size, note in rows:
        table.add_row(name, scaled(size, "B"), f"[dim]{note}[/dim]")
    share = step_tokens / explained.kv_tokens if explained.kv_tokens else float("inf")
    fits = (
        f"This batch takes {step_tokens:,} of these tokens, {100 * share:.0f} %."
        if share <= 1
        else f"[red]This batch does not fit: it takes {step_tokens:,} tokens of KV cache.[/red]"
    )
    return Group(table, "", fits)
