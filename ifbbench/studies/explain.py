"""`ifbbench explain-step`: the time of one iteration by operation, for a batch given by its lengths."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from ifbbench.analysis.number_texts import percent
from ifbbench.build.drafts import parse_acceptance
from ifbbench.build.resolve import cache_layout, resolve_limits, windows_of_layers
from ifbbench.clock import NANOSECONDS
from ifbbench.errors import InputError
from ifbbench.kv.sizing import CacheLayout
from ifbbench.models.config import ModelConfig
from ifbbench.models.named_models import load_model_config
from ifbbench.report import bar, plain_table, print_fitting
from ifbbench.settings.config import HOST_SETTINGS, RunConfig
from ifbbench.settings.fields import memory_size
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.engines import EngineOverhead, load_overhead
from ifbbench.simulated.hardware import hardware_names, load_hardware
from ifbbench.simulated.shard import MemoryPlan, Shard, as_states_allow, plan_memory
from ifbbench.simulated.step_work import OperationCost, StepWork

MAX_REQUESTS = 1_000_000
DEFAULT_MAX_BATCH_SIZE = 2048
BAR_WIDTH = 20
LIMIT_STYLES = {"compute": "magenta", "memory": "cyan", "network": "yellow", "latency": "blue", "launch": "red"}
DRAFT_PASS = "draft pass"
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Step:
    """A batch by its lengths in tokens.

    chunks: start and length of each context chunk.
    groups: number of generation requests, and the KV length of each of them, its new token included.
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

    def work(self, windows: Sequence[tuple[int | None, float]], drafts: int = 0) -> StepWork:
        """The work in a mean layer, with `windows` as in SimulatedExecutor. Each chunk is the last of its prompt.

        drafts: draft tokens of each generation request."""
        chunks = [(start, length, True) for start, length in self.chunks]
        lengths = [length for count, length in self.groups for _ in range(count)]
        work = StepWork.mean([(StepWork.of_lengths(chunks, lengths, window), share) for window, share in windows])
        more = drafts * len(lengths)
        return work._replace(
            generation_tokens=work.generation_tokens + more,
            generation_kv_tokens=work.generation_kv_tokens + more,
            outputs=work.outputs + more,
        )

    def parts(self, number: int) -> "list[Step]":
        """The requests divided among parts of the devices, in turn."""
        groups = [
            tuple((count // number + (part < count % number), length) for count, length in self.groups)
            for part in range(number)
        ]
        return [Step(self.chunks[part::number], groups[part]) for part in range(number)]

    def kv_tokens(self, layout: CacheLayout) -> int:
        """Tokens that the requests keep in the KV cache of a mean layer; a cyclic window limits them."""
        layers = sum(len(window.layers) for window in layout.windows)
        kept = sum(
            len(window.layers) * count * min(length, window.attention_window.kept_tokens)
            for window in layout.windows
            for count, length in self.sequences
        )
        return round(kept / layers)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The predicted time and memory of one iteration.

    operations: those that take time, in the order of the forward pass.
    device_ns, host_ns: nanoseconds of the devices and of the host's scheduling.
    host: seconds of the host's parts.
    ttft: parts of the time to first token of a prompt of this batch, see `ttft_parts`; empty without a context chunk.
    engine: title and version of the engine overhead, if there is one.
    memory: memory of one device.
    kv_tokens: capacity of its KV cache in tokens.
    step_kv_tokens: tokens of this batch in it.
    tokens_out: that the requests get, with draft tokens on average.
    """

    model: str
    cost_model: CostModel
    step: Step
    work: StepWork
    operations: tuple[OperationCost, ...]
    device_ns: int
    host_ns: int
    host: dict[str, float]
    ttft: dict[str, float]
    overlap: bool
    engine: str
    memory: MemoryPlan
    kv_tokens: int
    step_kv_tokens: int
    tokens_out: float

    def as_dict(self) -> dict[str, Any]:
        """All figures, for `--json`: times in seconds, sizes in bytes."""
        shard, hardware = self.cost_model.shard, self.cost_model.hardware
        return {
            "model": self.model,
            "hardware": hardware.name,
            "dtype": shard.dtype,
            "kv_cache_dtype": shard.kv_cache_dtype,
            "engine": self.engine,
            "tp_size": shard.tp_size,
            "pp_size": shard.pp_size,
            **({"ep_size": shard.ep_size} if shard.ep_size > 1 else {}),
            **({"attention_dp_size": shard.attention_dp_size} if shard.attention_dp_size > 1 else {}),
            "work": self.work._asdict(),
            "operations": [asdict(operation) for operation in self.operations],
            "device_s": self.device_ns / NANOSECONDS,
            "host_s": self.host_ns / NANOSECONDS,
            "host": self.host,
            "ttft": self.ttft | ({"total": sum(self.ttft.values())} if self.ttft else {}),
            "memory": _known(asdict(self.memory))
            | {"kv_cache_tokens": self.kv_tokens, "step_tokens": self.step_kv_tokens},
        }


def _known(memory: dict[str, Any]) -> dict[str, Any]:
    """`memory` without states of recurrent layers where there are none."""
    names = ("states", "max_states")
    return {name: value for name, value in memory.items() if memory["states"] or name not in names}


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
    shard, overhead = Shard.of_config(model, config), None
    if config.engine_overhead is not None:
        overhead = load_overhead(config.engine_overhead)
        hardware = overhead.applied_to(hardware, shard.kv_cache_dtype, shard.dtype, shard.expert_shape)
    two_batches, draft_mtp = config.enable_two_batch_overlap, config.draft_mtp or 0
    cost_model = CostModel(shard, hardware, cuda_graphs, two_batches, draft_mtp)
    config = as_states_allow(model, hardware, config)
    memory = plan_memory(cost_model.shard, hardware, config)
    engine = f"{overhead.title} {overhead.version}" if overhead else ""
    # Only the attention windows of the layout are used. Host memory is left out: its pages would be counted.
    layout = cache_layout(config.without(*HOST_SETTINGS), model, memory_bytes=None)
    windows = windows_of_layers(layout, model)
    parts, drafts = step.parts(shard.attention_dp_size), config.draft_len or 0
    work = cost_model.of_largest([part.work(windows, drafts) for part in parts])
    generation = cost_model.of_largest([replace(part, chunks=()).work(windows, drafts) for part in parts])
    requests = max(part.num_requests for part in parts)
    operations = cost_model.operations(work)
    if draft_mtp:
        operations = (*operations, *_draft_passes(cost_model, model.draft_layer, parts, windows, draft_mtp))
    draft_s = sum(one.seconds for one in operations if one.name.startswith(DRAFT_PASS))
    host = {
        "iteration": hardware.host_iteration_s,
        "requests": requests * hardware.host_request_s,
        "prompt tokens": work.context_tokens * hardware.host_prompt_token_s,
    }
    return Explanation(
        model=config.model,
        cost_model=cost_model,
        step=step,
        work=work,
        operations=tuple(operation for operation in operations if operation.seconds > 0),
        device_ns=cost_model.device_ns(work) + round(draft_s * NANOSECONDS),
        host_ns=cost_model.host_ns(requests, work.context_tokens),
        host={name: seconds for name, seconds in host.items() if seconds},
        ttft=ttft_parts(cost_model, step, work, generation, overhead, config.overlap is not None),
        overlap=config.overlap is not None,
        engine=engine,
        memory=memory,
        kv_tokens=int(shard.attention_dp_size * memory.kv_cache / shard.kv_bytes_per_token),
        step_kv_tokens=step.kv_tokens(layout),
        tokens_out=len(step.chunks) + sum(count for count, _ in step.groups) * (1 + _accepted(config)),
    )


def _accepted(config: RunConfig) -> float:
    """Expected draft tokens of a step that are accepted."""
    if not config.draft_len or config.acceptance_rate is None:
        return 0.0
    rates, chance, total = parse_acceptance(config.acceptance_rate), 1.0, 0.0
    for index in range(config.draft_len):
        chance *= rates[min(index, len(rates) - 1)]
        total += chance
    return total


def _draft_passes(
    cost_model: CostModel,
    layer: ModelConfig,
    parts: Sequence[Step],
    windows: Sequence[tuple[int | None, float]],
    count: int,
) -> list[OperationCost]:
    """The passes of a layer for multi-token prediction, each as one operation; see `mtp_passes`."""
    draft = CostModel(replace(cost_model.shard, model=layer), cost_model.hardware)
    passes = list[OperationCost]()
    for index in range(count):
        works = [
            (part.work(windows, count) if index == 0 else replace(part, chunks=()).work(windows, 0)) for part in parts
        ]
        work = draft.of_largest(works)
        if work.num_tokens:
            done = draft.operations(work)
            longest = max(done, key=lambda one: one.seconds)
            flops, moved = sum(one.flops for one in done), sum(one.bytes for one in done)
            name = f"{DRAFT_PASS} {index + 1}"
            passes.append(OperationCost(name, flops, moved, draft.device_ns(work) / NANOSECONDS, longest.limit))
    return passes


def ttft_parts(
    cost_model: CostModel,
    step: Step,
    work: StepWork,
    generation: StepWork,
    overhead: EngineOverhead | None,
    overlap: bool,
) -> dict[str, float]:
    """Where the TTFT of the last of the chunks of `step` goes, in seconds, if each is a whole prompt and all arrive
    together, at any moment of an iteration in which only the generation requests run. Empty without chunks.

    generation: the work of that iteration. With overlap the next one has been submitted too when a prompt arrives."""
    if not step.chunks:
        return {}
    before_s = cost_model.device_ns(generation) / NANOSECONDS if generation.num_tokens else 0.0
    before_host_s = cost_model.host_ns(generation.generation_tokens) / NANOSECONDS if generation.num_tokens else 0.0
    device_s = cost_model.device_ns(work) / NANOSECONDS
    host_s = cost_model.host_ns(step.num_requests, work.context_tokens) / NANOSECONDS
    iteration_s = max(before_s, before_host_s) if overlap else before_s + before_host_s
    parts = {
        "server: request in": 0.0,
        "rest of the iteration that runs": iteration_s / 2,
        "iteration submitted before": iteration_s if overlap else 0.0,
        "host": max(0.0, host_s - before_s) if overlap else host_s,
        "context": device_s - before_s,
        "generation beside it": before_s,
    }
    if overhead is not None:
        lengths = [start + length for start, length in step.chunks]
        parts["server: request in"] = (
            len(lengths) * overhead.serving_request_s + sum(lengths) * overhead.serving_token_in_s
        )
        parts["server: tokens out"] = work.outputs * overhead.serving_token_out_s
    return {name: seconds for name, seconds in parts.items() if seconds}


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
    print_fitting(console, _operations_table(explained), _operations_table(explained, with_bars=False))
    console.print()
    device_s, host_s = explained.device_ns / NANOSECONDS, explained.host_ns / NANOSECONDS
    outputs = explained.tokens_out
    hidden = "hidden behind the device" if explained.overlap else "hidden behind the device with --overlap async"
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in explained.host.items())
    console.print(
        f"The host takes [bold]{duration(host_s)}[/bold] to schedule {explained.step.num_requests:,} requests, "
        f"{hidden}: {parts}.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"{round(outputs):,} tokens come out: [bold]{outputs / (device_s + host_s):,.0f}[/bold] a second if iterations "
        f"like this one follow each other, {outputs / max(device_s, host_s):,.0f} with overlap.",
        highlight=False,
    )
    console.print()
    if explained.ttft:
        console.print(_ttft_table(explained.ttft))
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
    sizes = {"TP": shard.tp_size, "PP": shard.pp_size, "EP": shard.ep_size, "attention DP": shard.attention_dp_size}
    degrees = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    devices = shard.tp_size * shard.pp_size
    machine = f"{devices} × {hardware.title}" if devices > 1 else hardware.title
    facts = [f"weights {shard.dtype}", f"KV cache {shard.kv_cache_dtype}", *degrees]
    facts += [explained.engine] if explained.engine else []
    return f"[bold]{escape(explained.model)}[/bold] on [bold]{escape(machine)}[/bold]  [dim]{' · '.join(facts)}[/dim]"


def _batch_line(explained: Explanation) -> str:
    work, step = explained.work, explained.step
    parts = []
    if step.chunks:
        chunks = ", ".join(f"{length:,}@{start:,}" for start, length in step.chunks)
        parts.append(f"{work.context_tokens:,} context tokens ({chunks})")
    if step.groups:
        groups = ", ".join(f"{count:,} with {length:,} keys each" for count, length in step.groups)
        count = sum(count for count, _ in step.groups)
        parts.append(f"{count:,} requests in generation ({groups})")
    return f"One iteration: {' and '.join(parts)}"


def _operations_table(explained: Explanation, with_bars: bool = True) -> Table:
    total = sum(operation.seconds for operation in explained.operations)
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False, show_footer=True, footer_style="bold")
    table.add_column("operation", "total")
    table.add_column("time", duration(total), justify="right")
    table.add_column("share", "100 %", justify="right")
    if with_bars:
        table.add_column("", "", width=BAR_WIDTH)
    flops = sum(operation.flops for operation in explained.operations)
    table.add_column("FLOPs", scaled(flops, "FLOP"), justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("limited by")
    table.add_column("reaches")
    for operation in explained.operations:
        share, style = operation.seconds / total, LIMIT_STYLES[operation.limit]
        table.add_row(
            operation.name,
            duration(operation.seconds),
            percent(share),
            *([f"[{style}]{bar(share, BAR_WIDTH)}[/{style}]"] if with_bars else []),
            scaled(operation.flops, "FLOP") if operation.flops else "",
            scaled(operation.bytes, "B") if operation.bytes else "",
            f"[{style}]{operation.limit}[/{style}]",
            _reached(operation),
        )
    return table


def _ttft_table(parts: Mapping[str, float]) -> Table:
    total = sum(parts.values())
    table = plain_table("TTFT of a prompt that arrives while the others generate", numbers=[duration(total), "100 %"])
    for name, seconds in parts.items():
        table.add_row(name, duration(seconds), percent(seconds / total))
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
    left -= memory.adapters + memory.states
    table = plain_table("memory of a device", numbers=[memory_size(memory.total)])
    table.add_column("")
    per_token = memory_size(explained.cost_model.shard.kv_bytes_per_token)
    rows = (
        ("weights", memory.weights, ""),
        ("activations", memory.activations, "of the largest iteration"),
        ("runtime", memory.runtime, ""),
        *([("LoRA adapters", memory.adapters, "")] if memory.adapters else ()),
        *([("states", memory.states, f"of {memory.max_states:,} requests")] if memory.states else ()),
        ("KV cache", memory.kv_cache, f"{explained.kv_tokens:,} tokens of {per_token}"),
        ("left free", left, ""),
    )
    for name, size, note in rows:
        table.add_row(name, memory_size(size), f"[dim]{note}[/dim]")
    fits = (
        f"This batch takes {step_tokens:,} of these tokens, {percent(step_tokens / explained.kv_tokens)}."
        if step_tokens <= explained.kv_tokens
        else f"[red]This batch does not fit: it takes {step_tokens:,} tokens of KV cache.[/red]"
    )
    return Group(table, "", fits)
