"""`ifbbench explain-step`: the time of one iteration by operation, for a batch given by its lengths."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from ifbbench.api.resolve import cache_layout, resolve_limits, windows_of_layers
from ifbbench.config import RunConfig
from ifbbench.engine.kv_cache.sizing import CacheLayout
from ifbbench.errors import InputError
from ifbbench.model.named_models import load_model_config
from ifbbench.report import bar, percent, plain_table
from ifbbench.simulation.cost_model import NANOSECONDS, CostModel, OperationCost
from ifbbench.simulation.hardware import hardware_names, load_hardware
from ifbbench.simulation.shard import MemoryPlan, Shard, plan_memory
from ifbbench.simulation.step_work import StepWork

MAX_REQUESTS = 1_000_000
DEFAULT_MAX_BATCH_SIZE = 2048
BAR_WIDTH = 20
LIMIT_STYLES = {"compute": "magenta", "memory": "cyan", "network": "yellow", "latency": "blue", "launch": "red"}
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Step:
    """A batch by its lengths in tokens.

    chunks: start and length of each context chunk. groups: number of generation requests, and the KV length of each of
    them, its new token included.
    """

    chunks: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, int], ...]

    @property
    def num_requests(self) -> int:
        return len(self.chunks) + sum(count for count, _ in self.groups)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Number of requests and KV length, new tokens included, of the chunks and then of the groups."""
        return [*((1, start + length) for start, length in self.chunks), *self.groups]

    def work(self, windows: Sequence[tuple[int | None, float]]) -> StepWork:
        """The work in a mean layer, with `windows` as in SimulatedExecutor. Each chunk is the last of its prompt."""
        chunks = [(start, length, True) for start, length in self.chunks]
        lengths = [length for count, length in self.groups for _ in range(count)]
        return StepWork.mean([(StepWork.of_lengths(chunks, lengths, window), share) for window, share in windows])

    def kv_tokens(self, layout: CacheLayout) -> int:
        """Tokens that the requests keep in the KV cache of a mean layer; a cyclic window limits them."""
        layers = sum(len(window.layers) for window in layout.windows)
        kept = sum(
            len(window.layers) * count * min(length, window.attention_window.kept_tokens)
            for window in layout.windows for count, length in self.sequences
        )  # fmt: skip
        return round(kept / layers)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The predicted time and memory of one iteration.

    operations: those that take time, in the order of the forward pass. device_ns, host_ns: nanoseconds of the devices
    and of the host's scheduling. memory: of one device. kv_tokens: capacity of its KV cache in tokens. step_kv_tokens:
    tokens of this batch in it.
    """

    model: str
    cost_model: CostModel
    step: Step
    work: StepWork
    operations: tuple[OperationCost, ...]
    device_ns: int
    host_ns: int
    memory: MemoryPlan
    kv_tokens: int
    step_kv_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """All figures, for `--json`: times in seconds, sizes in bytes."""
        shard, hardware = self.cost_model.shard, self.cost_model.hardware
        return {
            "model": self.model, "hardware": hardware.name, "dtype": shard.dtype,
            "kv_cache_dtype": shard.kv_cache_dtype, "tp_size": shard.tp_size, "pp_size": shard.pp_size,
            "work": self.work._asdict(),
            "operations": [asdict(operation) for operation in self.operations],
            "device_s": self.device_ns / NANOSECONDS, "host_s": self.host_ns / NANOSECONDS,
            "memory": asdict(self.memory) | {"kv_cache_tokens": self.kv_tokens, "step_tokens": self.step_kv_tokens},
        }  # fmt: skip


def explain(config: RunConfig, step: Step, cuda_graphs: bool = True) -> Explanation:
    """The cost of `step` with the model and the simulated device of `config`. Its limits need not be resolved.

    InputError for an unknown model or device, and for a model that does not fit the device.
    """
    if config.hardware is None:
        raise InputError(
            f"--device: {config.device} is not simulated; expected a hardware profile: {', '.join(hardware_names())}, "
            "or the path of a .toml file."
        )
    model, hardware = load_model_config(config.model), load_hardware(config.hardware)
    # A step may be longer than max_seq_len.
    longest = max(length for _, length in step.sequences)
    max_seq_len = max(config.max_seq_len or model.max_position_embeddings, longest)
    max_batch_size = config.max_batch_size or DEFAULT_MAX_BATCH_SIZE
    config = config.with_values(max_seq_len=max_seq_len, max_batch_size=max_batch_size)
    config = resolve_limits(config, max_seq_len, hardware.is_cpu)
    cost_model = CostModel(Shard.of_config(model, config), hardware, cuda_graphs)
    memory = plan_memory(cost_model.shard, hardware, config)
    layout = cache_layout(config, model, memory_bytes=None)
    work = step.work(windows_of_layers(layout, model))
    return Explanation(
        model=config.model, cost_model=cost_model, step=step, work=work,
        operations=tuple(operation for operation in cost_model.operations(work) if operation.seconds > 0),
        device_ns=cost_model.device_ns(work), host_ns=cost_model.host_ns(step.num_requests), memory=memory,
        kv_tokens=int(memory.kv_cache / cost_model.shard.kv_bytes_per_token), step_kv_tokens=step.kv_tokens(layout),
    )  # fmt: skip


def parse_step(context: Iterable[str], generation: Iterable[str]) -> Step:
    """A batch from texts: `LENGTH@START,…` for context chunks and `REQUESTSxLENGTH,…` for generation requests.

    A chunk without `@START` is the first of its prompt. InputError for other texts, and for an empty batch.
    """
    chunks = _pairs(context, "--context", "@", "LENGTH@START, as 512@0")
    groups = _pairs(generation, "--generation", "x", "REQUESTSxLENGTH, as 64x2048")
    step = Step(tuple((start, length) for length, start in chunks), tuple(groups))
    if not 0 < step.num_requests <= MAX_REQUESTS:
        raise InputError(
            f"a batch of {step.num_requests:,} requests; expected 1 to {MAX_REQUESTS:,}. Describe it by "
            "--context 512@0, --generation 64x2048, or both."
        )
    return step


def _pairs(texts: Iterable[str], option: str, separator: str, expected: str) -> list[tuple[int, int]]:
    """The two numbers of each part. With the separator `@` the second is optional, and 0 by default."""
    pairs = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        match = re.fullmatch(rf"(\d{{1,9}})(?:{separator}(\d{{1,9}}))?", part.lower())
        if match is None or int(match[1]) < 1 or (match[2] is None and separator != "@"):
            raise InputError(f"{option}: {part!r} is not valid; expected {expected}, several with commas between.")
        pairs.append((int(match[1]), int(match[2] or 0)))
    return pairs


def print_explanation(explained: Explanation, console: Console) -> None:
    """Print the time of each operation, the time of the host, and the use of memory."""
    console.print()
    console.print(_title(explained), highlight=False)
    console.print(_batch_line(explained), style="dim", highlight=False)
    console.print()
    console.print(_operations_table(explained))
    console.print()
    device_s, host_s = explained.device_ns / NANOSECONDS, explained.host_ns / NANOSECONDS
    outputs = explained.work.outputs
    console.print(
        f"The host takes [bold]{duration(host_s)}[/bold] to schedule {explained.step.num_requests:,} requests, hidden "
        "behind the device with --enable_trt_overlap.", highlight=False,
    )  # fmt: skip
    console.print(
        f"{outputs:,} tokens come out: [bold]{outputs / (device_s + host_s):,.0f}[/bold] a second if iterations like "
        f"this one follow each other, {outputs / max(device_s, host_s):,.0f} with overlap.", highlight=False,
    )  # fmt: skip
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
    table.add_column("bytes", justify="right")
    table.add_column("limited by")
    table.add_column("reaches")
    for operation in explained.operations:
        share, style = operation.seconds / total, LIMIT_STYLES[operation.limit]
        table.add_row(
            operation.name, duration(operation.seconds), percent(share), f"[{style}]{bar(share, BAR_WIDTH)}[/{style}]",
            scaled(operation.flops, "FLOP") if operation.flops else "",
            scaled(operation.bytes, "B") if operation.bytes else "",
            f"[{style}]{operation.limit}[/{style}]", _reached(operation),
        )  # fmt: skip
    return table


def _reached(operation: OperationCost) -> str:
    """The rate at which the limiting resource is used."""
    if operation.limit == "compute":
        return scaled(operation.flops / operation.seconds, "FLOP/s")
    if operation.limit in ("memory", "network"):
        return scaled(operation.bytes / operation.seconds, "B/s")
    return ""


def _memory_table(explained: Explanation) -> Group:
    memory, step_tokens = explained.memory, explained.step_kv_tokens
    left = memory.total - memory.runtime - memory.weights - memory.activations - memory.kv_cache
    table = plain_table("memory of a device", numbers=[scaled(memory.total, "B")])
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
    fits = (
        f"This batch takes {step_tokens:,} of these tokens, {100 * step_tokens / explained.kv_tokens:.0f} %."
        if step_tokens <= explained.kv_tokens
        else f"[red]This batch does not fit: it takes {step_tokens:,} tokens of KV cache.[/red]"
    )
    return Group(table, "", fits)
