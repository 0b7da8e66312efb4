"""What a run executes on: the executor with its limits, built from the settings."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ifbbench.api.cache_layout import cache_layout
from ifbbench.api.profile import Profile, step_profile
from ifbbench.api.resolve import batching_config, resolve_limits
from ifbbench.batching.batch import Executor
from ifbbench.batching.batching_config import BatchingConfig
from ifbbench.batching.manager import BatchManager
from ifbbench.batching.request import Request
from ifbbench.clock import Clock, WallClock
from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.execution.null import NullExecutor
from ifbbench.model.config import ModelConfig, load_model_config

WARM_UP_PROMPT_LEN = 8
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


def build_engine(config: RunConfig, beam_width: int = 1) -> Engine:
    """Load the model, size the KV cache and make the executor. InputError if the settings do not fit together.

    beam_width: the most beams of a request, where the settings do not say."""
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
    from ifbbench.execution import build
    from ifbbench.execution.device_speed import DeviceSpeed

    device = build.choose_device(config)
    resolved = resolve_limits(config, model.max_position_embeddings, device.type == "cpu", beam_width)
    loaded = build.load_model(resolved)
    layout = cache_layout(resolved, model, build.kv_memory(resolved, loaded))
    limits = batching_config(resolved, layout, model.vocab_size)
    steps = step_profile(resolved, model, layout) if config.profile else None
    try:
        executor = build.make_executor(
            loaded, limits.num_slots, limits.num_blocks, limits.tokens_per_block, limits.max_seq_len, layout=layout,
            kv_cache_dtype=resolved.kv_cache_dtype, profile=steps,
        )  # fmt: skip
    except (RuntimeError, MemoryError) as error:  # torch tells of missing memory by a RuntimeError
        held_by = "--max_batch_size or --max_seq_len" if layout.is_contiguous else "--max_tokens_in_paged_kvcache"
        raise InputError(
            f"the KV cache does not fit into memory ({str(error).splitlines()[0]}); lower {held_by}."
        ) from error
    profile = None
    if steps is not None:
        speed = DeviceSpeed.measured(device, loaded.dtype)
        profile = Profile(steps, speed.flops_per_s, speed.bytes_per_s)
    return Engine(
        executor, WallClock(), with_cache_size(resolved, limits), limits, model, str(device), makes_tokens=True,
        profile=profile,
    )  # fmt: skip


def warm_up(engine: Engine) -> None:
    """Run two made-up requests, so that what happens once (allocation, threads, kernels) is not in the measurement.

    They run in a batch manager of their own, so they leave no blocks behind."""
    if not engine.makes_tokens:
        return
    prompt_len = min(WARM_UP_PROMPT_LEN, engine.limits.max_input_len)
    prompt = np.zeros(prompt_len, np.int32)
    requests = [Request(i, prompt_len, WARM_UP_NEW_TOKENS, prompt_tokens=prompt) for i in range(2)]

    def get_requests(count: int) -> list[Request]:
        taken = requests[:count]
        del requests[:count]
        return taken

    manager = BatchManager(engine.limits, engine.executor, WallClock(), get_requests, lambda response: None)
    while manager.step():
        pass
    if engine.profile is not None:
        engine.profile.steps.clear()


def with_cache_size(config: RunConfig, limits: BatchingConfig) -> RunConfig:
    """The size of the cache as resolved. Windows of different sizes have no size in common."""
    if limits.is_contiguous or len(limits.windows) > 1:
        return config
    return config.with_values(max_tokens_in_paged_kvcache=limits.num_blocks * limits.tokens_per_block)
