"""The engine of a run: an executor, its clock and the resolved limits, built from the settings."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ifbbench.build.adapters import lora_config
from ifbbench.build.drafts import load_draft_config
from ifbbench.build.kv_tiers import check_tiers, make_tiers, remote_store
from ifbbench.build.resolve import batching_config, cache_layout, resolve_limits, windows_of_layers
from ifbbench.clock import Clock, WallClock
from ifbbench.engine.arrays import IntArray
from ifbbench.engine.interfaces import NO_LIMIT, Executor, WarmingExecutor
from ifbbench.engine.loop import ExecutorFailed, TokenGenerationLoop
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.engine.sampling_params import EarlyStopping, OutputOptions, SamplingParams, StopConditions
from ifbbench.engine.step_profile import StepProfile
from ifbbench.errors import InputError
from ifbbench.kv.adapters import AdapterSource, LoraConfig
from ifbbench.kv.sizing import CacheLayout
from ifbbench.kv.tiers import KvTiers
from ifbbench.models.config import ModelConfig
from ifbbench.models.named_models import load_model_config
from ifbbench.models.quantization import quantization_of
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.engines import EngineOverhead, load_overhead
from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.lora_cost import LoraCost
from ifbbench.simulated.shard import Shard, as_states_allow, kv_memory_bytes, plan_memory
from ifbbench.simulated.step_work import StepWork, least_work
from ifbbench.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from ifbbench.torch.communicator import Communicator
    from ifbbench.torch.model.llama import LlamaModel

WARM_UP_PROMPT_LEN = 8
LONG_WARM_UP_PROMPT_LEN = 2048
CPU_WARM_UP_FLOPS = 5e10
WARM_UP_NEW_TOKENS = 3
_log = logging.getLogger("ifbbench")
# Runs of a process share cost models, and with them the times that were computed before.
_cost_model = lru_cache(maxsize=16)(CostModel)


@dataclass(frozen=True, slots=True)
class Profile:
    """What a run with --profile measures.

    steps: the times of iterations.
    flops_per_s, bytes_per_s: measured speed of large matrix products and copies on the device.
    """

    steps: StepProfile
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Engine:
    """An executor, the clock of its time, and the resolved settings that it was made for.

    makes_tokens: false without a model.
    profile: times of a run with --profile.
    overhead: overheads of a run with --engine_overhead.
    tiers: the stores beneath its memory, None without any.
    """

    executor: Executor
    clock: Clock
    config: RunConfig
    limits: BatchingConfig
    model: ModelConfig
    device: str
    makes_tokens: bool
    profile: Profile | None = None
    overhead: EngineOverhead | None = None
    communicator: "Communicator | None" = None
    tiers: KvTiers | None = None

    def describe_model(self) -> dict[str, Any]:
        """The model's entry in `run.json`."""
        known: dict[str, Any] = {
            "name": self.config.model,
            "parameters": self.model.num_parameters,
            "layers": self.model.num_layers,
            "hidden_size": self.model.hidden_size,
            "dtype": self.config.dtype,
            "device": self.device,
        }
        if (found := quantization_of(self.config.model)) is not None and found.dtype == self.config.dtype:
            known["quantization"] = str(found)
        if self.device == "cpu" and self.makes_tokens:
            from ifbbench.torch.model.compiled import missing_kernels

            known |= {"missing_kernels": reason} if (reason := missing_kernels()) else {}
        return known


def build_engine(
    config: RunConfig,
    beam_width: int = 1,
    *,
    owns_process: bool = False,
    communicator: "Communicator | None" = None,
    make_simulated_clock: Callable[[], VirtualClock] = VirtualClock,
    num_sharing: int = 1,
    sends: bool = False,
) -> Engine:
    """Load the model, size the KV cache and make the executor. InputError if the settings do not fit together.

    beam_width: the largest of any request, where the settings do not say.
    owns_process: whether a CPU engine may set malloc options and the number of threads for the whole process; without
        it only the number that `config` asks for is set.
    communicator: connects the ranks that share the model, where there are several; all call this together.
    make_simulated_clock: makes the clock of a simulated device.
    num_sharing: number of engines, or their ranks, that share the memory of a host.
    sends: whether keys and values are sent to another engine.
    """
    if config.is_fleet:
        raise InputError("--replicas, --router: this is one engine, and they are for a fleet; leave them out.")
    model = load_model_config(config.model)
    if config.stop_at_end_token and not model.eos_token_ids:
        raise InputError(f"--stop_at_end_token: model {config.model} has no end token (eos_token_id); leave it out.")
    if config.makes_no_tokens:
        return _engine_without_model(config, model, beam_width, make_simulated_clock, sends)

    if communicator is None and config.num_ranks > 1:
        raise InputError(
            f"--tp_size {config.tp_size} --pp_size {config.pp_size}: this runs in one process, and they "
            f"need {config.num_ranks}; leave them out, or give a batch manager a communicator."
        )
    if communicator is not None:
        num_sharing = communicator.local_size
    return _engine_with_model(config, model, beam_width, owns_process, communicator, num_sharing, sends)


def _engine_with_model(
    config: RunConfig,
    model: ModelConfig,
    beam_width: int,
    owns_process: bool,
    communicator: "Communicator | None",
    num_sharing: int,
    sends: bool,
) -> Engine:
    """A device that computes `model`; see `build_engine`."""
    # Imported here because torch takes seconds to load; other devices and invalid settings do not need it.
    from ifbbench.torch import build, host
    from ifbbench.torch.device import copy_bytes_per_s, matmul_flops_per_s

    device = build.choose_device(config) if communicator is None else communicator.device
    resolved = resolve_limits(config, model.max_position_embeddings, device.type == "cpu", beam_width)
    if device.type == "cpu":
        resolved = resolved.with_values(cpu_threads=_threads(resolved, owns_process))
    draft = None if resolved.draft_model is None else load_draft_config(resolved, model)
    weight_bytes = sum(Shard.of_config(one, resolved).parameter_bytes for one in (model, draft) if one is not None)
    on_device = num_sharing if device.type == "cpu" else 1
    build.check_weights_fit(resolved, on_device * weight_bytes, device)
    loaded = build.load_model(resolved, communicator)
    draft_model = None if draft is None else build.load_model(resolved.with_values(model=resolved.draft_model))
    if communicator is not None:
        communicator.smallest([])  # all have loaded: from here on they answer quickly
    if device.type == "cpu" and owns_process:  # only now, so that memory freed by loading returns to the system
        host.keep_freed_memory()
    lora = _adapters(resolved, model, loaded, num_sharing, communicator) if resolved.uses_lora else None
    lora_bytes = lora.device_pages * lora.page_bytes if lora else 0
    memory_bytes = build.kv_memory(resolved, loaded, device, lora_bytes, num_sharing)
    layout = cache_layout(resolved, model, memory_bytes, loaded.part)
    if communicator is not None:
        layout = _smallest(layout, communicator)
    limits = batching_config(resolved, layout, model.vocab_size, model.hidden_size, lora, sends=sends)
    if resolved.tier_settings:
        check_tiers(resolved, limits)
    steps, profile = None, None
    if config.profile:
        shard, windows = Shard.of_config(model, resolved), windows_of_layers(layout, model)
        steps = StepProfile(lambda batch: least_work(shard, StepWork.of_windows(batch, windows)))
    executor = build.make_executor(
        loaded,
        limits.num_slots,
        limits.max_seq_len,
        layout=layout,
        kv_cache_dtype=resolved.kv_cache_dtype,
        profile=steps,
        lora=lora,
        draft_model=draft_model,
        normalize_log_probs=resolved.normalize_log_probs,
    )
    if steps is not None:
        profile = Profile(steps, matmul_flops_per_s(device, loaded.dtype), copy_bytes_per_s(device))
    clock: Clock = WallClock()
    if communicator is not None:
        from ifbbench.build.ranks import LeadingClock

        clock = LeadingClock(communicator) if communicator.rank == 0 else clock
    return Engine(
        executor,
        clock,
        _with_cache_size(resolved, limits),
        limits,
        model,
        device.type,
        makes_tokens=True,
        profile=profile,
        communicator=communicator,
    )


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What another process needs to know of the engine here.

    blocks: blocks of each attention window, on the device and in host memory.
    adapter_pages: pages of LoRA adapters on the device and in host memory; None without adapters.
    adapter_bytes: bytes of a page, and of a value; None without adapters.
    """

    device: str
    cpu_threads: int | None
    blocks: tuple[tuple[int, int], ...]
    adapter_pages: tuple[int, int] | None = None
    adapter_bytes: tuple[int, int] | None = None

    @classmethod
    def of(cls, engine: Engine) -> "EngineSizes":
        limits = engine.limits
        blocks = tuple([(window.num_blocks, window.num_host_blocks) for window in limits.windows])
        own = ((limits.num_blocks, limits.num_host_blocks),)
        sizes = engine.device, engine.config.cpu_threads, blocks or own
        if (lora := limits.lora) is None:
            return cls(*sizes)
        return cls(*sizes, (lora.device_pages, lora.host_pages), (lora.page_bytes, lora.value_bytes))


def engine_elsewhere(
    config: RunConfig,
    beam_width: int,
    executor: Executor,
    clock: Clock,
    sizes: EngineSizes,
    sends: bool = False,
    adapters_of: Callable[[AdapterSource], AdapterSource] = lambda source: source,
) -> Engine:
    """The engine of `config` here, whose `executor` runs batches in another process, which has built it as one of these
    `sizes`. adapters_of(source): its LoRA adapters, made of those that are known here without their values."""
    model = load_model_config(config.model)
    resolved = resolve_limits(config, model.max_position_embeddings, sizes.device == "cpu", beam_width)
    resolved = resolved.with_values(cpu_threads=sizes.cpu_threads)
    layout = cache_layout(resolved, model, None)
    windows = tuple(
        replace(window, num_blocks=primary, num_host_blocks=secondary)
        for window, (primary, secondary) in zip(layout.windows, sizes.blocks, strict=True)
    )
    lora = None
    if sizes.adapter_pages is not None and sizes.adapter_bytes is not None:
        known = lora_config(resolved, model, None, sizes.adapter_bytes[1])
        lora = LoraConfig(adapters_of(known.source), *sizes.adapter_pages, *sizes.adapter_bytes)
    layout = replace(layout, windows=windows)
    limits = batching_config(resolved, layout, model.vocab_size, model.hidden_size, lora, sends=sends)
    resolved = _with_cache_size(resolved, limits)
    return Engine(executor, clock, resolved, limits, model, sizes.device, makes_tokens=True)


def _threads(resolved: RunConfig, owns_process: bool) -> int:
    """The number of threads of a CPU engine, which are set if they are asked for, or the process is the engine's."""
    import torch

    from ifbbench.torch import host

    threads = resolved.cpu_threads
    return host.use_threads(threads) if owns_process or threads else torch.get_num_threads()


def loop_maker(config: RunConfig, communicator: "Communicator | None") -> Callable[..., TokenGenerationLoop]:
    """The class of the loop of a resolved `config`; with a communicator, that of one rank."""
    if communicator is None:
        return make_loop
    from ifbbench.build.ranks import RankLoop  # it imports torch

    return partial(RankLoop, communicator, config.check_ranks)


def _adapters(
    resolved: RunConfig,
    model: ModelConfig,
    loaded: "LlamaModel",
    num_sharing: int,
    communicator: "Communicator | None",
) -> LoraConfig:
    """LoRA adapters and their caches, with pages in as much memory as all ranks have.

    num_sharing: ranks that share the device's memory."""
    from ifbbench.torch import build
    from ifbbench.torch.model.lora_store import pages_in_host_memory

    make_pages = pages_in_host_memory(loaded.dtype, pinned=loaded.device.type == "cuda")
    memory = build.adapter_memory(loaded.device) // num_sharing
    if communicator is not None:
        (memory,) = communicator.smallest([memory])
    return lora_config(resolved, model, memory, loaded.dtype.itemsize, make_pages, loaded.part)


def _smallest(layout: CacheLayout, communicator: "Communicator") -> CacheLayout:
    """`layout` with the numbers of blocks for which all ranks have memory."""
    windows = layout.windows
    blocks = communicator.smallest([window.num_blocks for window in windows])
    host_blocks = communicator.smallest([window.num_host_blocks for window in windows])
    return replace(
        layout,
        windows=tuple(
            replace(window, num_blocks=primary, num_host_blocks=secondary)
            for window, primary, secondary in zip(windows, blocks, host_blocks, strict=True)
        ),
    )


def _engine_without_model(
    config: RunConfig, model: ModelConfig, beam_width: int, make_clock: Callable[[], VirtualClock], sends: bool
) -> Engine:
    """Device null, or simulated hardware with a clock of `make_clock`. InputError if the hardware is unknown or the
    model does not fit."""
    hardware = None if config.hardware is None else load_hardware(config.hardware)
    # Nothing is computed, so sequences may be longer than the model's positions.
    longest = max(model.max_position_embeddings, config.max_seq_len or 0)
    resolved = resolve_limits(config, longest, hardware is not None and hardware.is_cpu, beam_width)
    overhead = None if resolved.engine_overhead is None else load_overhead(resolved.engine_overhead)
    if hardware is not None:
        resolved = as_states_allow(model, hardware, resolved)
    memory_bytes = None if hardware is None else kv_memory_bytes(model, hardware, resolved)
    layout, lora = cache_layout(resolved, model, memory_bytes), None
    if resolved.uses_lora:
        shard = Shard.of_config(model, resolved)
        free_bytes = None if hardware is None else plan_memory(shard, hardware, resolved).beside_weights
        lora = lora_config(resolved, model, free_bytes, int(shard.compute_bytes))
    limits = batching_config(resolved, layout, vocab_size=None, lora=lora, reads_block_tables=False, sends=sends)
    if resolved.tier_settings:
        check_tiers(resolved, limits)
    executor: Executor = NullExecutor()
    clock: Clock = WallClock()
    if hardware is not None:
        clock = simulated_clock = make_clock()
        shard = Shard.of_config(model, resolved)
        if overhead is not None:
            hardware = overhead.applied_to(hardware, shard.kv_cache_dtype, shard.dtype, shard.expert_shape)
        two_batches, draft_mtp = resolved.enable_two_batch_overlap, resolved.draft_mtp or 0
        cost_model, draft_cost = _cost_model(shard, hardware, True, two_batches, draft_mtp), None
        if draft_mtp:
            draft_cost = _cost_model(replace(shard, model=model.draft_layer), hardware, True, two_batches)
        elif resolved.draft_model is not None:
            draft_cost = _cost_model(Shard.of_config(load_draft_config(resolved, model), resolved), hardware)
        executor = SimulatedExecutor(
            cost_model,
            simulated_clock,
            windows_of_layers(layout, model),
            LoraCost(cost_model, lora) if lora else None,
            draft_cost,
            draft_mtp,
            hides_host=bool(draft_mtp) and resolved.overlap is not None,
        )
    return Engine(
        executor,
        clock,
        _with_cache_size(resolved, limits),
        limits,
        model,
        config.device,
        makes_tokens=False,
        overhead=overhead,
        tiers=make_tiers(resolved, model, clock, remote_store(resolved, model)) if resolved.tier_settings else None,
    )


def _with_cache_size(config: RunConfig, limits: BatchingConfig) -> RunConfig:
    """`config` with the resolved sizes of the caches; windows of different sizes have no common size."""
    if limits.lora is not None:
        config = config.with_values(lora_host_cache_bytes=limits.lora.host_pages * limits.lora.page_bytes)
    if limits.is_contiguous or (len(limits.windows) > 1 and limits.vllm is None):
        return config
    return config.with_values(max_tokens_in_paged_kvcache=limits.num_blocks * limits.tokens_per_block)


def warm_up(engine: Engine, progress: Progress = NO_PROGRESS) -> None:
    """Run `warm_up` requests with the options of the run's, so that allocation, threads, kernels and CUDA graphs are
    not part of the measurement.

    They are made for it, and run in a token generation loop with a KV cache manager of its own, so that no block holds
    anything of them afterwards. Short and long prompts alternate, and one request arrives in each iteration, so that
    there are batches of context, of generation and of both. On a GPU all graphs are recorded. A device without a model
    has nothing to warm up. InputError if memory does not suffice."""
    config = engine.config
    count = config.warm_up or 0
    if count and not engine.makes_tokens:
        _log.warning(
            "--warm_up: device %s has no state to warm up; no request is run before the measured ones.", config.device
        )
    if not count or not engine.makes_tokens:
        return
    progress.stage("warming up")
    lengths, lora = _warm_up_lengths(engine), engine.limits.lora
    # Every second warm-up request uses an adapter, so that batches with and without adapters run.
    adapter = None if lora is None else next(iter(lora.source.tasks()), None)
    requests = [
        Request(
            number,
            lengths[number % 2],
            WARM_UP_NEW_TOKENS,
            prompt_tokens=np.zeros(lengths[number % 2], np.int32),
            sampling=sampling_params(config, config.seed),
            options=OutputOptions(return_log_probs=config.return_log_probs),
            lora_task_id=adapter if number % 2 else None,
        )
        for number in range(count)
    ]

    def get_requests(count: int) -> list[Request]:
        return [requests.pop(0)] if requests and count else []

    loop = make_loop(engine.limits, engine.executor, WallClock(), get_requests, lambda response: None)
    try:
        while loop.step():
            pass
    except ExecutorFailed as failure:
        if isinstance(failure.__cause__, InputError):
            raise failure.__cause__ from failure
        raise
    if isinstance(engine.executor, WarmingExecutor):
        engine.executor.warm_up(lambda done, total: progress.update(done, total, ""))
    if engine.profile is not None:
        engine.profile.steps.clear()


def _warm_up_lengths(engine: Engine) -> tuple[int, int]:
    """Prompt lengths of the two requests. The second is long, so that memory for large batches is allocated and a GPU
    compiles all kernels; on a CPU, which compiles none, it is limited to what takes a moment."""
    limits, short = engine.limits, min(WARM_UP_PROMPT_LEN, engine.limits.max_input_len)
    in_cache = limits.num_blocks * limits.tokens_per_block // 2 - WARM_UP_NEW_TOKENS
    in_batch = min(limits.token_budget - 1, limits.max_input_len, limits.max_seq_len - WARM_UP_NEW_TOKENS)
    if engine.device == "cpu":
        affordable = int(CPU_WARM_UP_FLOPS / (2 * engine.model.num_parameters))
        return short, max(short, min(affordable, LONG_WARM_UP_PROMPT_LEN, in_batch, in_cache))
    # Longer than a window: chunks that leave their window behind have a kernel of their own.
    windows = [window.attention_window for window in limits.windows]
    longest = max([LONG_WARM_UP_PROMPT_LEN, *(window.size + 1 for window in windows if window.is_limited)])
    return short, max(short, min(longest, in_batch, in_cache))


def sampling_params(config: RunConfig, seed: int) -> SamplingParams:
    """How the tokens of a request with this seed are chosen."""
    return SamplingParams(
        config.temperature,
        config.top_k,
        config.top_p,
        seed,
        config.repetition_penalty,
        config.length_penalty,
        EarlyStopping(config.early_stopping),
        config.presence_penalty,
        config.frequency_penalty,
        config.min_length,
    )


def generate(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[IntArray]:
    """The output tokens of each of `prompts` (token ids), in their order; all run at the same time.

    An output ends with the model's end token, or after `max_new_tokens`. InputError if a prompt cannot be run.
    """
    waiting = [
        Request(
            index,
            len(tokens),
            max_new_tokens,
            index=index,
            prompt_tokens=np.array(tokens, dtype=np.int32),
            sampling=sampling_params(engine.config, engine.config.seed + index),
            stop=StopConditions(engine.model.eos_token_ids),
        )
        for index, tokens in enumerate(prompts)
    ]
    outputs: dict[int, IntArray] = {}

    def get_requests(count: int) -> list[Request]:
        taken = waiting[:] if count == NO_LIMIT else waiting[:count]
        del waiting[: len(taken)]
        return taken

    def send_response(response: Response) -> None:
        if response.error is not None:
            raise InputError(f"prompt {response.request.request_id + 1}: {response.error}")
        assert response.output_tokens is not None
        outputs[response.request.request_id] = response.output_tokens

    loop = make_loop(engine.limits, engine.executor, WallClock(), get_requests, send_response)
    while loop.step():
        pass
    return [outputs[index] for index in range(len(prompts))]
