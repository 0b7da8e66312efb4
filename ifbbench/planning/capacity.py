"""`ifbbench capacity`: the KV cache that fits beside a model, and how many requests run in it at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ifbbench.api.resolve import batching_config, cache_layout, kv_value_bytes, resolve_limits
from ifbbench.config import RunConfig
from ifbbench.engine.admission import AdmissionLimits
from ifbbench.engine.config import BatchingConfig, BatchingType
from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.kv_cache.sizing import CacheLayout, WindowLayout, max_attention_window
from ifbbench.engine.policies import find_policy
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import OutputOptions
from ifbbench.errors import InputError
from ifbbench.model.config import ModelConfig
from ifbbench.model.named_models import load_model_config
from ifbbench.planning.concurrency import POLICY_CASES, ContiguousFit, Fit, contiguous_fit, fit
from ifbbench.simulation.hardware import load_hardware
from ifbbench.simulation.shard import Shard, kv_memory_bytes
from ifbbench.workload.trace import TraceRequest

CPU, CUDA, NULL, GIVEN_MEMORY = "cpu", "cuda", "null", "a device with this memory"
# So large that memory, not the batch, limits the blocks of a cache.
UNLIMITED_BATCH_SIZE = 2**40


@dataclass(frozen=True, slots=True)
class Device:
    """Where a run would take place.

    free_bytes: memory of each device before the weights are loaded; None if unknown and not needed. max_kv_bytes: upper
    limit of the KV cache; None for none. is_cpu: whether limits default to those of a CPU.
    """

    name: str
    free_bytes: int | None = None
    max_kv_bytes: int | None = None
    is_cpu: bool = False


def find_device(config: RunConfig, memory_bytes: int | None = None) -> Device:
    """The device that `config` names, with its free memory, or with `memory_bytes` instead.

    With `memory_bytes` no device is queried, and `auto` means a GPU. A `cuda` device is not queried either if the
    settings give the size of the KV cache. InputError if a device is to be queried and there is none.
    """
    has_size = memory_bytes is not None or config.max_tokens_in_paged_kvcache is not None
    if config.device == NULL or (has_size and config.device == CUDA):
        return Device(config.device, memory_bytes)
    if config.device == CPU:
        return _cpu(memory_bytes)
    if config.hardware is not None:
        hardware = load_hardware(config.hardware)
        if memory_bytes is None:
            return Device(config.device, hardware.memory_bytes, is_cpu=hardware.is_cpu)
        return Device(GIVEN_MEMORY, memory_bytes, is_cpu=hardware.is_cpu)
    if memory_bytes is not None:
        return Device(GIVEN_MEMORY, memory_bytes)
    # Imported here because torch takes seconds to load.
    import torch

    from ifbbench.execution.build import choose_device

    device = choose_device(config)
    return _cpu(None) if device.type == CPU else Device(str(device), torch.cuda.mem_get_info(device)[0])


def _cpu(memory_bytes: int | None) -> Device:
    from ifbbench.execution.host import MAX_CPU_KV_BYTES, available_host_bytes

    free_bytes = available_host_bytes() if memory_bytes is None else memory_bytes
    return Device(CPU, free_bytes, MAX_CPU_KV_BYTES, is_cpu=True)


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """The blocks of the layers that share an attention window.

    layout: as a run has it, with no more blocks than a full batch can fill. bytes_per_token: in all of these layers.
    num_blocks: what memory has room for.
    """

    layout: WindowLayout
    bytes_per_token: int
    num_blocks: int

    @property
    def attention_window(self) -> AttentionWindow:
        return self.layout.attention_window

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.attention_window.tokens_per_block


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache of all devices together.

    layout: the cache of a run. windows: one for each size of attention window. weight_bytes: weights on each device.
    budget_bytes: memory that the cache may take; None if the settings alone decide its size.
    """

    layout: CacheLayout
    windows: tuple[PoolWindow, ...]
    weight_bytes: int
    budget_bytes: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return sum(window.bytes_per_token for window in self.windows)

    @property
    def kv_bytes(self) -> int:
        return sum(window.bytes_per_block * window.num_blocks for window in self.windows)


def make_pool(config: RunConfig, model: ModelConfig, device: Device) -> Pool:
    """The KV cache that fits on `device` beside the weights of `model`.

    config: with resolved limits. InputError if the weights, or a single block beside them, do not fit.
    """
    shard = Shard.of_config(model, config)
    budget = _kv_budget(config, model, device, shard)
    layout = room = cache_layout(config, model, budget)
    if budget is not None and config.max_tokens_in_paged_kvcache is None:
        room = cache_layout(config.with_values(max_batch_size=UNLIMITED_BATCH_SIZE), model, budget)
    per_layer = model.kv_bytes_per_token(kv_value_bytes(config)) // model.num_layers
    windows = tuple(
        PoolWindow(window, len(window.layers) * per_layer, in_memory.num_blocks)
        for window, in_memory in zip(layout.windows, room.windows, strict=True)
    )
    return Pool(layout, windows, shard.parameter_bytes, budget)


def _kv_budget(config: RunConfig, model: ModelConfig, device: Device, shard: Shard) -> int | None:
    """Bytes for keys and values on all devices together. A simulated device plans its memory as in a run; elsewhere the
    weights, which are not loaded yet, are subtracted from free memory."""
    if config.hardware is not None and device.name != GIVEN_MEMORY:
        return kv_memory_bytes(model, load_hardware(config.hardware), config)
    if device.free_bytes is None:
        return None
    left = device.free_bytes - shard.parameter_bytes
    if left <= 0:
        on_each = " on each device" if config.tp_size * config.pp_size > 1 else ""
        raise InputError(
            f"the weights of model {config.model} take {shard.parameter_bytes:,} bytes in {config.dtype}{on_each}, "
            f"{device.name} has {device.free_bytes:,} free; choose a smaller --dtype or model, or give more memory."
        )
    budget = int(config.kv_cache_free_gpu_mem_fraction * left)
    return shard.kv_bytes_of_all_devices(budget if device.max_kv_bytes is None else min(budget, device.max_kv_bytes))


@dataclass(frozen=True)
class Study:
    """The question and its answer.

    config: with resolved limits. requests: as admitted, those that the engine refuses (`refused`) left out. fits: one
    for each of POLICY_CASES, empty without requests. contiguous: the same memory as a contiguous cache.
    """

    config: RunConfig
    model: ModelConfig
    device: Device
    pool: Pool
    limits: BatchingConfig
    contiguous: ContiguousFit
    requests: Sequence[TraceRequest]
    refused: int
    fits: tuple[Fit, ...]

    @property
    def fit_of_policy(self) -> Fit | None:
        """The fit under the policy and batching type of `config`; for MAX_UTILIZATION with all requests at full length,
        so that none is paused. None without requests, and for a policy that is not built in."""
        policy = "static_batch" if self.limits.batching_type is BatchingType.V1 else self.config.policy
        known = [found for found in self.fits if found.case.policy == policy]
        return known[-1] if known else None

    @property
    def longest_sequence(self) -> int:
        """Maximum tokens, prompt and output, of a request that has the cache to itself. The output is taken to be one
        block, because beams share only the prompt."""
        limits = self.limits
        output_len = min(limits.tokens_per_block, limits.max_seq_len)
        longest = limits.max_seq_len
        for window in self.pool.windows:
            attention_window = window.attention_window
            if window.num_blocks < attention_window.max_blocks_per_sequence * attention_window.max_beam_width:
                longest = min(longest, max_attention_window(
                    limits.max_seq_len - output_len, output_len, attention_window.sink, window.num_blocks,
                    attention_window.max_beam_width, attention_window.tokens_per_block,
                ))  # fmt: skip
        return longest

    def mean(self, name: str) -> float:
        """The mean of a field of `requests`."""
        total: int = sum(getattr(request, name) for request in self.requests)
        return total / len(self.requests)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON. Sizes are in bytes, tokens or blocks, as their names say."""
        config, model, pool, contiguous = self.config, self.model, self.pool, self.contiguous
        limits = ("policy", "type", "max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len",
                  "max_beam_width", "tokens_per_block", "enable_chunked_context")  # fmt: skip
        requests = None
        if self.requests:
            means = ("prompt_len", "output_len", "max_new_tokens", "beam_width")
            # Prompts of mean length in an iteration without other requests.
            prompts_per_iteration = self.limits.max_num_tokens / self.mean("prompt_len")
            requests = {
                "count": len(self.requests), "refused": self.refused, "prompts_per_iteration": prompts_per_iteration,
                **{f"mean_{name}": self.mean(name) for name in means},
            }  # fmt: skip
        windows = [
            {
                "attention_window": window.attention_window.size,
                "sink_tokens": window.attention_window.sink,
                "layers": len(window.layout.layers),
                "bytes_per_token": window.bytes_per_token,
                "bytes_per_block": window.bytes_per_block,
                "blocks": window.num_blocks,
                "tokens": window.num_blocks * window.attention_window.tokens_per_block,
                "blocks_of_run": window.layout.num_blocks,
                "host_blocks": window.layout.num_host_blocks,
            }
            for window in pool.windows
        ]
        return {
            "model": {"name": config.model, "parameters": model.num_parameters, "layers": model.num_layers,
                      "dtype": config.dtype},
            "device": self.device.name,
            "memory": {"free_bytes": self.device.free_bytes, "weight_bytes": pool.weight_bytes,
                       "kv_budget_bytes": pool.budget_bytes},
            "limits": {name: getattr(config, name) for name in limits},
            "kv_cache": {
                "type": config.kv_cache_type, "dtype": config.kv_cache_dtype or config.dtype, "bytes": pool.kv_bytes,
                "bytes_per_token": pool.bytes_per_token, "longest_sequence_tokens": self.longest_sequence,
                "windows": windows,
            },
            "requests": requests,
            "at_once": [found.as_dict() for found in self.fits],
            "contiguous": {
                "positions_per_request": contiguous.positions, "bytes_per_request": contiguous.bytes_per_request,
                "by_memory": contiguous.fit, "at_once": contiguous.at_once,
            },
        }  # fmt: skip


def study(config: RunConfig, requests: Sequence[TraceRequest] = (), memory_bytes: int | None = None) -> Study:
    """What fits with `config`. One request stands for any number of equal ones; several are a trace.

    memory_bytes: free memory of each device before the model is loaded. InputError if settings and memory do not fit
    together, or the engine refuses every request.
    """
    if config.beam_width is not None:
        requests = [replace(request, beam_width=config.beam_width) for request in requests]
    model = load_model_config(config.model)
    device = find_device(config, memory_bytes)
    # As in a run, the positions of the model are no limit where nothing is computed.
    asked = config.max_seq_len or 0 if config.makes_no_tokens else 0
    max_beam_width = max((request.beam_width for request in requests), default=1)
    resolved = resolve_limits(config, max(model.max_position_embeddings, asked), device.is_cpu, max_beam_width)
    pool = make_pool(resolved, model, device)
    limits = batching_config(resolved, pool.layout, vocab_size=None)
    admitted, refusals = admit(requests, limits, OutputOptions(streaming=resolved.streaming))
    if refusals and not admitted:
        which = "this request" if len(refusals) == 1 else f"all {len(refusals):,} requests, the first"
        raise InputError(f"the engine refuses {which}: {refusals[0]}; shorten it, or raise the limit.")
    pools = [(window.attention_window, window.num_blocks) for window in pool.windows]
    return Study(
        resolved, model, device, pool, limits, contiguous_fit(limits, pool.kv_bytes, pool.bytes_per_token), admitted,
        len(refusals), tuple(fit(case, admitted, limits, pools) for case in POLICY_CASES if admitted),
    )  # fmt: skip


def admit(
    requests: Sequence[TraceRequest], limits: BatchingConfig, options: OutputOptions
) -> tuple[list[TraceRequest], list[str]]:
    """The requests that the engine admits, with the new tokens that it allows, and why it refuses the others."""
    policy = find_policy(limits.effective_policy)(limits.max_batch_size)
    admission = AdmissionLimits(limits, policy_may_pause=getattr(policy, "may_pause", True))
    admitted, refusals = list[TraceRequest](), list[str]()
    for row in requests:
        request = Request(
            row.request_id, row.prompt_len, row.max_new_tokens, output_len=row.output_len, priority=row.priority,
            beam_width=row.beam_width, options=options,
        )  # fmt: skip
        if (refusal := admission.refusal(request)) is not None:
            refusals.append(refusal)
        else:
            admitted.append(replace(row, max_new_tokens=request.max_new_tokens, output_len=request.output_len))
    return admitted, refusals
