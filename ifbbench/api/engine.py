"""What a run executes on: the executor with its limits, built from the settings."""

from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from ifbbench.api.cache_layout import cache_layout
from ifbbench.api.profile import Profile, step_profile
from ifbbench.api.progress import Progress
from ifbbench.api.resolve import batching_config, resolve_limits
from ifbbench.clock import Clock, WallClock
from ifbbench.config import RunConfig
from ifbbench.engine.batch import Executor, WarmingExecutor
from ifbbench.engine.config import BatchingConfig
from ifbbench.engine.manager import ExecutorFailed, TokenGenerationLoop
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import OutputOptions, SamplingParams
from ifbbench.errors import InputError
from ifbbench.execution.null import NullExecutor
from ifbbench.model.config import ModelConfig, load_model_config
from ifbbench.simulation.shard import Shard

WARM_UP_PROMPT_LEN = 8
LONG_WARM_UP_PROMPT_LEN = 2048
CPU_WARM_UP_FLOPS = 5e10
WARM_UP_NEW_TOKENS = 3


@dataclass(frozen=True)
class Engine:
    """An executor, the clock that its time passes on, and the resolved settings that it was made for. `makes_tokens` is
    false without a model. profile: of a run with --profile."""

    executor: Executor
    clock: Clock
    config: RunConfig
    limits: BatchingConfig
    model: ModelConfig
    device: str
    makes_tokens: bool
    profile: Profile | None = None

    def describe_model(self) -> dict[str, Any]:
        """What `run.json` says of the model."""
        return {
            "name": self.config.model,
            "parameters": self.model.num_parameters,
            "layers": self.model.num_layers,
            "hidden_size": self.model.hidden_size,
            "dtype": self.config.dtype,
            "device": self.device,
        }


def build_engine(config: RunConfig, beam_width: int = 1, *, owns_process: bool = False) -> Engine:
    """Load the model, size the KV cache and make the executor. InputError if the settings do not fit together.

    beam_width: the largest of any request, where the settings do not say. owns_process: whether a CPU engine may set
    malloc options and the number of threads for the whole process; without it only the number that `config` asks for
    is set."""
    model = load_model_config(config.model)
    if config.stop_at_end_token and not model.eos_token_ids:
        raise InputError(f"--stop_at_end_token: model {config.model} has no end token (eos_token_id); leave it out.")
    if config.device == "null":
        # Nothing is computed, so the model's positions are no limit to what is asked for.
        longest = max(model.max_position_embeddings, config.max_seq_len or 0)
        resolved = resolve_limits(config, longest, on_cpu=False, trace_beam_width=beam_width)
        limits = batching_config(resolved, cache_layout(resolved, model, memory_bytes=None), vocab_size=None)
        clock = WallClock()
        return Engine(
            NullExecutor(), clock, with_cache_size(resolved, limits), limits, model, "null", makes_tokens=False
        )
    if config.hardware is not None:
        from ifbbench.api.simulated import simulated_engine

        return simulated_engine(config, model, beam_width)

    # Imported here because torch takes seconds to load, and a null device or a bad setting does not need it.
    from ifbbench.execution import build, host_memory
    from ifbbench.execution.cpu_threads import current_threads, use_threads
    from ifbbench.execution.device_speed import DeviceSpeed

    device = build.choose_device(config)
    resolved = resolve_limits(config, model.max_position_embeddings, device.type == "cpu", beam_width)
    if device.type == "cpu":
        threads = resolved.cpu_threads
        threads = use_threads(threads) if owns_process or threads else current_threads()
        resolved = resolved.with_values(cpu_threads=threads)
    weights = Shard(model, resolved.weight_dtype, resolved.kv_cache_dtype or resolved.weight_dtype)
    build.check_weights_fit(resolved, weights.parameter_bytes, device)
    loaded = build.load_model(resolved)
    if device.type == "cpu" and owns_process:  # only now, so that memory freed by loading returns to the system
        host_memory.keep_freed_memory()
    layout = cache_layout(resolved, model, build.kv_memory(resolved, loaded))
    limits = batching_config(resolved, layout, model.vocab_size)
    steps = step_profile(resolved, model, layout) if config.profile else None
    executor = build.make_executor(
        loaded, limits.num_slots, limits.num_blocks, limits.tokens_per_block, limits.max_seq_len, layout=layout,
        kv_cache_dtype=resolved.kv_cache_dtype, profile=steps,
    )  # fmt: skip
    profile = None
    if steps is not None:
        speed = DeviceSpeed.measured(device, loaded.dtype)
        profile = Profile(steps, speed.flops_per_s, speed.bytes_per_s)
    return Engine(
        executor, WallClock(), with_cache_size(resolved, limits), limits, model, str(device), makes_tokens=True,
        profile=profile,
    )  # fmt: skip


def warm_up(engine: Engine, progress: Progress | None = None) -> None:
    """Run made-up requests, so that what happens once (allocation, threads, kernels, CUDA graphs) is not in the
    measurement.

    They run in a batch manager of their own, so they leave no blocks behind. The second comes an iteration after the
    first: there are batches of context, of generation and of both. Its prompt is long, and on a GPU every graph is
    recorded. InputError if memory does not have what that takes."""
    if not engine.makes_tokens:
        return
    requests = list(map(_warm_up_request, range(2), _warm_up_lengths(engine), repeat(engine.config)))

    def get_requests(count: int) -> list[Request]:
        return [requests.pop(0)] if requests and count else []

    def hear(done: int, total: int) -> None:
        if progress:
            progress.update(done, total, "warming up")

    manager = TokenGenerationLoop(engine.limits, engine.executor, WallClock(), get_requests, lambda response: None)
    try:
        while manager.step():
            pass
    except ExecutorFailed as failure:
        if isinstance(failure.__cause__, InputError):
            raise failure.__cause__ from failure
        raise
    if isinstance(engine.executor, WarmingExecutor):
        engine.executor.warm_up(hear)
    if engine.profile is not None:
        engine.profile.steps.clear()


def _warm_up_lengths(engine: Engine) -> tuple[int, int]:
    """Prompt lengths of the two requests. The second is long, so that memory for large batches is there, and on a GPU
    all kernels; on a CPU not longer than what it computes in a moment, for nothing is compiled there."""
    limits, short = engine.limits, min(WARM_UP_PROMPT_LEN, engine.limits.max_input_len)
    in_cache = limits.num_blocks * limits.tokens_per_block // 2 - WARM_UP_NEW_TOKENS
    in_batch = min(limits.max_num_tokens - 1, limits.max_input_len, limits.max_seq_len - WARM_UP_NEW_TOKENS)
    if engine.device == "cpu":
        affordable = int(CPU_WARM_UP_FLOPS / (2 * engine.model.num_parameters))
        return short, max(short, min(affordable, LONG_WARM_UP_PROMPT_LEN, in_batch, in_cache))
    # Longer than a window, for what a chunk does when it leaves its window behind has a kernel of its own.
    windows = [window.attention_window.size for window in limits.windows
               if window.attention_window.size < limits.max_seq_len]  # fmt: skip
    longest = max([LONG_WARM_UP_PROMPT_LEN, *(size + 1 for size in windows)])
    return short, max(short, min(longest, in_batch, in_cache))


def _warm_up_request(number: int, prompt_len: int, config: RunConfig) -> Request:
    """It asks for what the run's requests will ask for."""
    return Request(
        number, prompt_len, WARM_UP_NEW_TOKENS, prompt_tokens=np.zeros(prompt_len, np.int32),
        sampling=SamplingParams(
            config.temperature, config.top_k, config.top_p, config.seed, config.repetition_penalty
        ),
        options=OutputOptions(return_log_probs=config.return_log_probs),
    )  # fmt: skip


def with_cache_size(config: RunConfig, limits: BatchingConfig) -> RunConfig:
    """The size of the cache as resolved. Windows of different sizes have no size in common."""
    if limits.is_contiguous or len(limits.windows) > 1:
        return config
    return config.with_values(max_tokens_in_paged_kvcache=limits.num_blocks * limits.tokens_per_block)
