"""How many requests run at once under each policy: by KV blocks, by batch size and by token budget.

All requests are there from the start. One request stands for any number of equal ones; several are a trace. Pools are
the attention windows of a KV cache with their numbers of blocks, as in `BatchingConfig.pools`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ifbbench.engine.config import BatchingConfig
from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.policies.policy import Limit
from ifbbench.workload.trace import TraceRequest

Pools = Sequence[tuple[AttentionWindow, int]]


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """A policy at one moment of its requests: `start`, `end`, or "" where the moment does not matter.

    blocks: blocks of one attention window that a request then holds or reserves. is_static: no request joins a running
    batch, so all its prompts must fit one iteration.
    """

    policy: str
    moment: str
    blocks: Callable[[TraceRequest, AttentionWindow], int]
    is_static: bool = False

    @property
    def label(self) -> str:
        """The name in tables. Static batches (V1) form as under STATIC_BATCH."""
        return f"{self.policy}, v1" if self.is_static else self.policy


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


@dataclass(frozen=True, slots=True)
class Fit:
    """How many requests run at once in one case.

    mean_blocks: of a request, in all windows. by_blocks, by_batch_size, by_tokens: requests of mean length that each
    limit allows. first: how many of the first requests of a trace run together; None for one request.
    """

    case: PolicyCase
    mean_blocks: Fraction
    by_blocks: int
    by_batch_size: int
    by_tokens: int
    first: int | None = None

    @property
    def at_once(self) -> int:
        return min(self.by_blocks, self.by_batch_size, self.by_tokens)

    @property
    def bound_by(self) -> Limit:
        """The smallest limit; of equal ones the one that the schedulers check first."""
        limits = {
            Limit.BATCH_SIZE: self.by_batch_size,
            Limit.KV_BLOCKS: self.by_blocks,
            Limit.NUM_TOKENS: self.by_tokens,
        }
        return min(limits, key=limits.__getitem__)

    def as_dict(self) -> dict[str, Any]:
        return {
            "policy": self.case.policy, "moment": self.case.moment or None,
            "mean_blocks_per_request": float(self.mean_blocks),
            "by_kv_blocks": self.by_blocks, "by_batch_size": self.by_batch_size, "by_num_tokens": self.by_tokens,
            "at_once": self.at_once, "bound_by": self.bound_by.value, "first_requests": self.first,
        }  # fmt: skip


def fit(case: PolicyCase, requests: Sequence[TraceRequest], limits: BatchingConfig, pools: Pools) -> Fit:
    """How many of `requests`, as the engine admits them, run at once."""
    means = [Fraction(sum(case.blocks(request, window) for request in requests), len(requests))
             for window, _ in pools]  # fmt: skip
    return Fit(
        case,
        sum(means, Fraction()),
        min(num_blocks // mean for (_, num_blocks), mean in zip(pools, means, strict=True)),
        limits.max_batch_size,
        _by_tokens(case, requests, limits),
        _first(case, requests, limits, pools) if len(requests) > 1 else None,
    )


def _by_tokens(case: PolicyCase, requests: Sequence[TraceRequest], limits: BatchingConfig) -> int:
    """Requests of mean length that the token budget allows. For static batches with chunked context this is the first
    batch; later ones begin with prompts that were cut before."""
    prompt = Fraction(sum(request.prompt_len for request in requests), len(requests))
    beams = Fraction(sum(request.beam_width for request in requests), len(requests))
    if case.is_static:
        return max(limits.max_num_tokens // prompt, 1)
    first = prompt if limits.chunk_unit is None else min(prompt, Fraction(limits.chunk_unit))
    # The last request joins while the others generate one token per beam.
    return max(1, min((limits.max_num_tokens - first) // beams + 1, limits.max_num_tokens // beams))


def _first(case: PolicyCase, requests: Sequence[TraceRequest], limits: BatchingConfig, pools: Pools) -> int:
    """How many of the first requests run together. The others wait behind the first one that does not fit."""
    free = [num_blocks for _, num_blocks in pools]
    tokens = 0
    for count, request in enumerate(requests):
        free = [left - case.blocks(request, window) for left, (window, _) in zip(free, pools, strict=True)]
        prompt = request.prompt_len if limits.chunk_unit is None else min(request.prompt_len, limits.chunk_unit)
        needed = request.prompt_len if case.is_static else max(prompt, request.beam_width)
        too_long = tokens + needed > limits.max_num_tokens and count > 0
        if min(free) < 0 or too_long or count >= limits.max_batch_size:
            return count
        tokens += request.prompt_len if case.is_static else request.beam_width
    return len(requests)


@dataclass(frozen=True, slots=True)
class ContiguousFit:
    """A contiguous cache in the memory of the blocks: each request has memory for the longest sequence of each beam.

    positions, bytes_per_request: of each request. fit: requests that memory has room for. at_once: the smaller of this
    and the batch size.
    """

    positions: int
    bytes_per_request: int
    fit: int
    at_once: int


def contiguous_fit(limits: BatchingConfig, kv_bytes: int, bytes_per_token: int) -> ContiguousFit:
    """kv_bytes: of the cache. bytes_per_token: in all layers."""
    positions = limits.max_seq_len * limits.max_beam_width
    number = kv_bytes // (positions * bytes_per_token)
    return ContiguousFit(positions, positions * bytes_per_token, number, min(number, limits.max_batch_size))
