"""`ifbbench capacity`: the KV cache that fits beside a model, and how many requests run in it at once."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from msgspec.structs import replace

from ifbbench.build.resolve import batching_config, cache_layout, kv_value_bytes, resolve_limits
from ifbbench.engine.plan import Limit
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import OutputOptions
from ifbbench.errors import InputError
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout, WindowLayout, max_attention_window
from ifbbench.models.config import ModelConfig
from ifbbench.models.named_models import load_model_config
from ifbbench.schedulers.limits import UNLIMITED, BatchingConfig
from ifbbench.schedulers.refusals import AdmissionLimits
from ifbbench.settings.bounds import MAX_BATCH
from ifbbench.settings.config import RunConfig
from ifbbench.settings.fields import memory_size
from ifbbench.settings.modes import BatchingType
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard, as_states_allow, kv_memory_bytes, requests_of_part
from ifbbench.torch import host
from ifbbench.workload.trace import TraceRequest

CPU, CUDA, NULL, GIVEN_MEMORY = "cpu", "cuda", "null", "a device with this memory"
# So large that memory, not the batch, limits the blocks of a cache.
UNLIMITED_BATCH_SIZE = MAX_BATCH


@dataclass(frozen=True, slots=True)
class Device:
    """Where a run would take place.

    free_bytes: memory of each device before the weights are loaded; None if unknown and not needed.
    max_kv_bytes: upper limit of the KV cache; None for none.
    is_cpu: whether limits default to those of a CPU.
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
        free_bytes = host.available_host_bytes() if memory_bytes is None else memory_bytes
        return Device(CPU, free_bytes, host.MAX_CPU_KV_BYTES, is_cpu=True)
    if config.hardware is not None:
        hardware = load_hardware(config.hardware)
        if memory_bytes is None:
            return Device(config.device, hardware.memory_bytes, is_cpu=hardware.is_cpu)
        return Device(GIVEN_MEMORY, memory_bytes, is_cpu=hardware.is_cpu)
    if memory_bytes is not None:
        return Device(GIVEN_MEMORY, memory_bytes)
    # Imported here because torch takes seconds to load.
    import torch

    from ifbbench.torch.build import choose_device

    device = choose_device(config)
    if device.type == CPU:
        return find_device(config.with_values(device=CPU))
    return Device(str(device), torch.cuda.mem_get_info(device)[0])


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache of all devices together.

    layout: the cache of a run, on a real device with no more blocks than a full batch can fill.
    windows: the same attention windows with the blocks that memory has room for.
    layer_bytes: bytes of one token in one layer.
    weight_bytes: weights on each device.
    budget_bytes: memory that the cache may take; None if the settings alone decide its size.
    state_bytes: bytes of the recurrent layers of a full batch, on each device.
    """

    layout: CacheLayout
    windows: tuple[WindowLayout, ...]
    layer_bytes: int
    weight_bytes: int
    budget_bytes: int | None = None
    state_bytes: float = 0.0

    @property
    def bytes_per_token(self) -> int:
        return sum(len(window.layers) for window in self.windows) * self.layer_bytes

    @property
    def pools(self) -> Sequence[WindowLayout]:
        """A window of each pool of blocks; the largest where all windows share one."""
        if self.layout.shares_blocks:
            return [max(self.windows, key=lambda window: len(window.layers))]
        return self.windows

    @property
    def kv_bytes(self) -> int:
        return sum(self.bytes_per_block(window) * window.num_blocks for window in self.pools)

    def bytes_per_block(self, window: WindowLayout) -> int:
        return len(window.layers) * self.layer_bytes * window.attention_window.tokens_per_block


def make_pool(config: RunConfig, model: ModelConfig, device: Device) -> Pool:
    """The KV cache that fits on `device` beside the weights of `model`.

    config: with resolved limits.

    InputError if the weights, or a single block beside them, do not fit.
    """
    shard = Shard.of_config(model, config)
    budget = _kv_budget(config, model, device, shard)
    layout = room = cache_layout(config, model, budget)
    if budget is not None and config.max_tokens_in_paged_kvcache is None:
        room = cache_layout(config.with_values(max_batch_size=UNLIMITED_BATCH_SIZE), model, budget)
    layer_bytes = model.kv_values_per_layer * kv_value_bytes(config)
    states = shard.state_bytes_per_request * requests_of_part(config)
    return Pool(layout, room.windows, layer_bytes, shard.parameter_bytes, budget, states)


def _kv_budget(config: RunConfig, model: ModelConfig, device: Device, shard: Shard) -> int | None:
    """Bytes for keys and values on all devices together. A simulated device plans its memory as in a run; elsewhere the
    weights, which are not loaded yet, are subtracted from free memory."""
    if config.hardware is not None and device.name != GIVEN_MEMORY:
        return kv_memory_bytes(model, load_hardware(config.hardware), config)
    if device.free_bytes is None:
        return None
    states = round(shard.state_bytes_per_request * requests_of_part(config))
    left = device.free_bytes - shard.parameter_bytes - states
    if left <= 0:
        of_states = f", the states of --max_batch_size requests {memory_size(states)}" if states else ""
        on_each = " on each device" if config.tp_size * config.pp_size > 1 else ""
        raise InputError(
            f"the weights of model {config.model} take {memory_size(shard.parameter_bytes)} in {config.dtype}"
            f"{on_each}{of_states}, {device.name} has {memory_size(device.free_bytes)} free; choose a smaller --dtype "
            "or model, or give more memory."
        )
    if config.gpu_memory_utilization is not None:
        budget = max(0, left - int((1 - config.gpu_memory_utilization) * device.free_bytes))
    else:
        budget = int(config.kv_cache_free_gpu_mem_fraction * left)
    return shard.kv_bytes_of_all_devices(budget if device.max_kv_bytes is None else min(budget, device.max_kv_bytes))


# How many requests run at once under each policy. All arrive at the start; one stands for any number of equal ones.
# Pools are attention windows with their numbers of blocks, as in `BatchingConfig.pools`.

Pools = Sequence[tuple[AttentionWindow, int]]


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """A policy at one moment of its requests: `start`, `end`, or "" where the moment does not matter.

    blocks: blocks of one attention window that a request then holds or reserves.
    is_static: no request joins a running batch, so all its prompts must fit one iteration.
    """

    policy: str
    moment: str
    blocks: Callable[[TraceRequest, AttentionWindow], int]
    is_static: bool = False


def _until_complete(request: TraceRequest, window: AttentionWindow) -> int:
    return window.blocks_to_completion(request.prompt_len, request.max_new_tokens, 0, request.beam_width)


def _for_prompt(request: TraceRequest, window: AttentionWindow) -> int:
    return window.first_chunk_need(request.prompt_len, request.max_new_tokens, 0, request.beam_width)


def _at_end(request: TraceRequest, window: AttentionWindow) -> int:
    # The last token is never cached.
    return window.blocks_to_completion(request.prompt_len, request.output_len - 1, 0, request.beam_width)


POLICY_CASES = (
    PolicyCase("guaranteed_no_evict", "", _until_complete),
    PolicyCase("max_utilization", "start", _for_prompt),
    PolicyCase("max_utilization", "end", _at_end),
    PolicyCase("static_batch", "", _until_complete, is_static=True),
)


def cases_of(limits: BatchingConfig) -> Sequence[PolicyCase]:
    """The policies of the engine: one, if it is not TensorRT-LLM."""
    if not limits.has_one_policy:
        return POLICY_CASES
    of_rank = limits.of_any_rank

    def blocks(request: TraceRequest, output_len: int) -> int:
        ((needed, _),) = of_rank.blocks_to_completion(request.prompt_len, output_len, 1)
        return needed

    return (
        PolicyCase(limits.engine, "start", lambda request, _: blocks(request, 0)),
        PolicyCase(limits.engine, "end", lambda request, _: blocks(request, request.output_len - 1)),
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """How many requests run at once in one case.

    mean_blocks: mean number of blocks of a request, in all windows.
    by_limit: requests of mean length that each limit allows, in the order of the schedulers' checks.
    first: how many of the first requests of a trace run together; None for one request.
    """

    case: PolicyCase
    mean_blocks: Fraction
    by_limit: Mapping[Limit, int]
    first: int | None = None

    @property
    def at_once(self) -> int:
        return min(self.by_limit.values())

    @property
    def bound_by(self) -> Limit:
        """The smallest limit; of equal ones the one that the schedulers check first."""
        return min(self.by_limit, key=self.by_limit.__getitem__)


def fit(case: PolicyCase, requests: Sequence[TraceRequest], limits: BatchingConfig, pools: Pools) -> Fit:
    """How many of `requests`, as the engine admits them, run at once."""
    means = [Fraction(sum(case.blocks(request, window) for request in requests), len(requests)) for window, _ in pools]
    by_limit = {
        Limit.BATCH_SIZE: limits.max_batch_size,
        Limit.KV_BLOCKS: min(num_blocks // mean for (_, num_blocks), mean in zip(pools, means, strict=True)),
        Limit.NUM_TOKENS: _by_tokens(case, requests, limits),
    }
    first = _first(case, requests, limits, pools) if len(requests) > 1 else None
    return Fit(case, sum(means, Fraction()), by_limit, first)


def _by_tokens(case: PolicyCase, requests: Sequence[TraceRequest], limits: BatchingConfig) -> int:
    """Requests of mean length that the token budget allows. For static batches with chunked context this is the first
    batch; later ones begin with prompts that were cut before."""
    prompt, beams, outputs = (
        Fraction(sum(getattr(request, name) for request in requests), len(requests))
        for name in ("prompt_len", "beam_width", "output_len")
    )
    if case.is_static:
        return max(limits.generation_budget // prompt, 1)
    if limits.generation_budget == UNLIMITED:
        return UNLIMITED // beams
    budget, count = _TokenBudget(limits), 0
    while count < UNLIMITED_BATCH_SIZE and budget.starts(prompt, outputs, beams):
        count += 1
    return max(count, 1)


class _TokenBudget:
    """The token budget of each iteration, for requests that start one after the other until the first of them ends.

    (After that, with short outputs, the rest of a prompt that was cut may run beside as many others.)"""

    def __init__(self, limits: BatchingConfig) -> None:
        self._budget, self._unit = limits.generation_budget, limits.chunk_unit
        self._left: Fraction | int = limits.generation_budget
        self._iteration, self._first_end = 1, math.inf
        # Beams that generate a token in the current iteration, and in the next one.
        self._beams: Fraction | int = 0
        self._next_beams: Fraction | int = 0

    def starts(self, prompt: Fraction | int, output_len: Fraction | int, beams: Fraction | int) -> bool:
        """Whether the next request starts before another one ends. Each iteration generates a token for each beam, and
        the rest of its budget is for prompts: whole ones, or with chunked context multiples of the chunk unit. A
        request with more beams than prompt tokens needs the budget of its beams."""
        rest = prompt = max(prompt, beams)
        while rest > self._left:
            chunk = 0 if self._unit is None else self._left // self._unit * self._unit
            rest -= chunk
            if self._next_beams == self._beams and not chunk:
                return rest < prompt  # no iteration has more left
            if self._iteration >= self._first_end:
                self._left, self._unit = 0, None
                return rest < prompt
            self._iteration += 1
            self._beams = self._next_beams
            self._left = self._budget - self._beams
        self._left -= rest
        self._next_beams += beams
        # The prompt yields the first token.
        self._first_end = min(self._first_end, self._iteration + math.ceil(output_len) - 1)
        return True


def _first(case: PolicyCase, requests: Sequence[TraceRequest], limits: BatchingConfig, pools: Pools) -> int:
    """How many of the first requests run together. The others wait behind the first one that does not fit."""
    free = [num_blocks for _, num_blocks in pools]
    budget, prompts = _TokenBudget(limits), 0
    for count, request in enumerate(requests):
        free = [left - case.blocks(request, window) for left, (window, _) in zip(free, pools, strict=True)]
        if min(free) < 0 or count >= limits.max_batch_size:
            return count
        prompts += request.prompt_len
        is_in_time = budget.starts(request.prompt_len, request.output_len, request.beam_width)
        if count > 0 and not (prompts <= limits.generation_budget if case.is_static else is_in_time):
            return count
    return len(requests)


class ContiguousFit(NamedTuple):
    """A contiguous cache in the memory of the blocks: each request has memory for the longest sequence of each beam.

    positions, bytes_per_request: size of each request.
    fit: requests that memory has room for.
    at_once: the smaller of this and the batch size.
    """

    positions: int
    bytes_per_request: int
    fit: int
    at_once: int


def contiguous_fit(limits: BatchingConfig, kv_bytes: int, bytes_per_token: int) -> ContiguousFit:
    """kv_bytes: size of the cache.
    bytes_per_token: bytes of a token in all layers.
    """
    positions = limits.max_seq_len * limits.max_beam_width
    number = kv_bytes // (positions * bytes_per_token)
    return ContiguousFit(positions, positions * bytes_per_token, number, min(number, limits.max_batch_size))


@dataclass(frozen=True)
class Study:
    """The question and its answer.

    config: settings with resolved limits.
    contiguous: the same memory as a contiguous cache.
    requests: as admitted, those that the engine refuses (`refused`) left out.
    fits: one for each of the engine's policies, empty without requests.
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
        if self.limits.has_one_policy:
            policy = self.limits.engine
        known = [found for found in self.fits if found.case.policy == policy]
        return known[-1] if known else None

    @property
    def longest_sequence(self) -> int:
        """Maximum tokens, prompt and output, of a request that has the cache to itself, with attention data parallelism
        that of its rank. The output is taken to be one block, because beams share only the prompt."""
        limits, ranks = self.limits.of_any_rank, self.limits.attention_dp_size
        longest = limits.max_seq_len
        if limits.vllm is not None:
            num_blocks = self.pool.windows[0].num_blocks // ranks
            return bisect_right(
                range(1, longest + 1), num_blocks, key=lambda length: limits.blocks_to_completion(length, 0, 1)[0][0]
            )
        output_len = min(limits.tokens_per_block, limits.max_seq_len)
        for window in self.pool.windows:
            attention_window, num_blocks = window.attention_window, window.num_blocks // ranks
            if num_blocks < attention_window.max_blocks_per_sequence * attention_window.max_beam_width:
                longest = min(
                    longest,
                    max_attention_window(
                        limits.max_seq_len - output_len,
                        output_len,
                        attention_window.sink,
                        num_blocks,
                        attention_window.max_beam_width,
                        attention_window.tokens_per_block,
                    ),
                )
        return longest

    def mean(self, name: str) -> float:
        """The mean of a field of `requests`."""
        total: int = sum(getattr(request, name) for request in self.requests)
        return total / len(self.requests)


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
    if resolved.hardware is not None and memory_bytes is None:
        resolved = as_states_allow(model, load_hardware(resolved.hardware), resolved)
    pool = make_pool(resolved, model, device)
    limits = batching_config(resolved, pool.layout, vocab_size=None)
    admitted, refusals = admit(requests, limits, OutputOptions(streaming=resolved.streaming))
    if refusals and not admitted:
        which = "this request" if len(refusals) == 1 else f"all {len(refusals):,} requests, the first"
        raise InputError(f"the engine refuses {which}: {refusals[0]}; shorten it, or raise the limit.")
    pools = [(window.attention_window, window.num_blocks) for window in pool.pools]
    return Study(
        resolved,
        model,
        device,
        pool,
        limits,
        contiguous_fit(limits, pool.kv_bytes, pool.bytes_per_token),
        admitted,
        len(refusals),
        tuple(fit(case, admitted, limits, pools) for case in cases_of(limits) if admitted),
    )


def admit(
    requests: Sequence[TraceRequest], limits: BatchingConfig, options: OutputOptions
) -> tuple[list[TraceRequest], list[str]]:
    """The requests that the engine admits, with the new tokens that it allows, and why it refuses the others."""
    admission = AdmissionLimits(limits)
    admitted, refusals = list[TraceRequest](), list[str]()
    for row in requests:
        request = Request(
            row.request_id,
            row.prompt_len,
            row.max_new_tokens,
            output_len=row.output_len,
            priority=row.priority,
            beam_width=row.beam_width,
            options=options,
        )
        if (refusal := admission.refusal(request)) is not None:
            refusals.append(refusal)
        else:
            admitted.append(replace(row, max_new_tokens=request.max_new_tokens, output_len=request.output_len))
    return admitted, refusals
