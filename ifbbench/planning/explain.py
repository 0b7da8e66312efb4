"""Where the time of one iteration goes, for a batch described by its lengths: what `ifbbench explain-step` shows."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ifbbench.api.cache_layout import cache_layout, windows_of_layers
from ifbbench.config import RunConfig
from ifbbench.engine.kv_cache.sizing import CacheLayout
from ifbbench.errors import InputError
from ifbbench.model.config import ModelConfig, load_model_config
from ifbbench.simulation.cost_model import NANOSECONDS, CostModel, OperationCost
from ifbbench.simulation.hardware import hardware_names, load_hardware
from ifbbench.simulation.memory import MemoryPlan, plan_memory
from ifbbench.simulation.shard import Shard
from ifbbench.simulation.step_work import StepWork

MAX_REQUESTS = 1_000_000
DEFAULT_MAX_BATCH_SIZE = 2048


@dataclass(frozen=True, slots=True)
class Step:
    """A batch by its lengths, in tokens.

    chunks: start and length of each context chunk. groups: requests in generation, and the KV length of each one of
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
        """The work in a mean layer; `windows` as SimulatedExecutor takes them. Each chunk is its prompt's last."""
        chunks = [(start, length, True) for start, length in self.chunks]
        lengths = [length for count, length in self.groups for _ in range(count)]
        return StepWork.mean([(StepWork.of_lengths(chunks, lengths, window), share) for window, share in windows])

    def kv_tokens(self, layout: CacheLayout) -> int:
        """Places in the KV cache that the requests take in a mean layer: a cyclic window keeps no more than itself."""
        layers = sum(len(window.layers) for window in layout.windows)
        places = sum(
            len(window.layers) * count * min(length, window.attention_window.kept_tokens)
            for window in layout.windows for count, length in self.sequences
        )  # fmt: skip
        return round(places / layers)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One iteration, explained.

    operations: those that take time, in the order of the forward pass. device_ns, host_ns: nanoseconds of the devices,
    and of the host's scheduling. memory: of one device. kv_tokens: how many its KV cache holds. step_kv_tokens: how
    many of them this batch takes.
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
        """All figures, for `--json`; times in seconds, sizes in bytes."""
        shard, hardware = self.cost_model.shard, self.cost_model.hardware
        return {
            "model": self.model,
            "hardware": hardware.name,
            "dtype": shard.dtype,
            "kv_cache_dtype": shard.kv_cache_dtype,
            "tp_size": shard.tp_size,
            "pp_size": shard.pp_size,
            "work": self.work._asdict(),
            "operations": [asdict(operation) for operation in self.operations],
            "device_s": self.device_ns / NANOSECONDS,
            "host_s": self.host_ns / NANOSECONDS,
            "memory": asdict(self.memory) | {"kv_cache_tokens": self.kv_tokens, "step_tokens": self.step_kv_tokens},
        }


def explain(config: RunConfig, step: Step, cuda_graphs: bool = True) -> Explanation:
    """What `step` costs with the model and the simulated device of `config`, whose limits need not be resolved.

    InputError for an unknown model or device, and for a model that does not fit it."""
    if config.hardware is None:
        raise InputError(
            f"--device: {config.device} is not simulated; expected a hardware profile: {', '.join(hardware_names())}, "
            "or the path of a .toml file."
        )
    model, hardware = load_model_config(config.model), load_hardware(config.hardware)
    cost_model = CostModel(
        model, hardware, dtype=config.dtype or hardware.default_dtype, kv_cache_dtype=config.kv_cache_dtype,
        tp_size=config.tp_size, pp_size=config.pp_size, cuda_graphs=cuda_graphs,
    )  # fmt: skip
    memory = plan_memory(
        cost_model.shard, hardware, max_num_tokens=config.max_num_tokens,
        max_batch_size=config.max_batch_size or DEFAULT_MAX_BATCH_SIZE,
        kv_fraction=config.kv_cache_free_gpu_mem_fraction,
    )  # fmt: skip
    layout = _layout(config, model, cost_model.shard, step)
    work = step.work(windows_of_layers(layout, model))
    return Explanation(
        model=config.model,
        cost_model=cost_model,
        step=step,
        work=work,
        operations=tuple(operation for operation in cost_model.operations(work) if operation.seconds > 0),
        device_ns=cost_model.device_ns(work),
        host_ns=cost_model.host_ns(step.num_requests),
        memory=memory,
        kv_tokens=int(memory.kv_cache / cost_model.shard.kv_bytes_per_token),
        step_kv_tokens=step.kv_tokens(layout),
    )


def _layout(config: RunConfig, model: ModelConfig, shard: Shard, step: Step) -> CacheLayout:
    """The KV cache of a run with these settings, its number of blocks aside: which layers have which window. A step may
    be longer than max_seq_len."""
    longest = max(length for _, length in step.sequences)
    max_seq_len = max(config.max_seq_len or model.max_position_embeddings, longest)
    config = config.with_values(max_seq_len=max_seq_len, dtype=shard.dtype, kv_cache_dtype=shard.kv_cache_dtype)
    return cache_layout(config, model, memory_bytes=None)


def parse_step(context: Iterable[str], generation: Iterable[str]) -> Step:
    """A batch from texts: `LENGTH@START,…` of context chunks and `REQUESTSxLENGTH,…` of requests in generation.

    A chunk without `@START` is a prompt's first. InputError for other texts, and for a batch of nothing."""
    chunks = [_pair(part, "--context", "@", "LENGTH@START, as 512@0") for part in _parts(context)]
    groups = [_pair(part, "--generation", "x", "REQUESTSxLENGTH, as 64x2048") for part in _parts(generation)]
    step = Step(tuple((start, length) for length, start in chunks), tuple(groups))
    if not 0 < step.num_requests <= MAX_REQUESTS:
        raise InputError(
            f"a batch of {step.num_requests:,} requests; expected 1 to {MAX_REQUESTS:,}. Say what is in it with "
            "--context 512@0, --generation 64x2048, or both."
        )
    return step


def _parts(texts: Iterable[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]


def _pair(text: str, option: str, separator: str, expected: str) -> tuple[int, int]:
    """The two numbers of `text`; the second may be left out after a first with `@`, and is 0 then."""
    match = re.fullmatch(rf"(\d{{1,9}})(?:{separator}(\d{{1,9}}))?", text.lower())
    if match is None or int(match[1]) < 1 or (match[2] is None and separator != "@"):
        raise InputError(f"{option}: {text!r} is not valid; expected {expected}, several with commas between.")
    return int(match[1]), int(match[2] or 0)
