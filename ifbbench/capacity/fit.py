"""How many requests run at once, under each policy: by KV blocks, by the batch size and by the token budget.

Requests are `TraceRequest`s, all there from the start: one stands for any number like it, several are a trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ifbbench.capacity.pool import Pool
from ifbbench.engine.config import BatchingConfig
from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.policies.policy import Limit
from ifbbench.workload.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Way:
    """A policy, and the moment in a request's life (`start`, `end`) that is looked at, "" where it does not matter.

    blocks: what a request then holds of a window, or has reserved in it. starts_together: whether nobody joins a
    batch, so that all its prompts must fit into one iteration.
    """

    policy: str
    moment: str
    blocks: Callable[[TraceRequest, AttentionWindow], int]
    starts_together: bool = False

    @property
    def label(self) -> str:
        """As tables name it: V1's batches form as those of STATIC_BATCH do."""
        return f"{self.policy}, v1" if self.starts_together else self.policy


@dataclass(frozen=True, slots=True)
class Fit:
    """How many requests run at once in a Way.

    mean_blocks: of a request, in all windows. by_blocks, by_batch_size, by_tokens: how many of the mean request each
    limit allows. first: how many of the first requests of a trace run together, None for a single length.
    """

    way: Way
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
        """The limit that binds first; among equals the one that the schedulers come to first."""
        limits = {
            Limit.BATCH_SIZE: self.by_batch_size,
            Limit.KV_BLOCKS: self.by_blocks,
            Limit.NUM_TOKENS: self.by_tokens,
        }
        return min(limits, key=limits.__getitem__)


def _until_complete(request: TraceRequest, attention_window: AttentionWindow) -> int:
    return attention_window.blocks_to_completion(request.prompt_len, request.max_new_tokens, 0, request.beam_width)


def _for_prompt(request: TraceRequest, attention_window: AttentionWindow) -> int:
    return attention_window.first_chunk_need(request.prompt_len, request.max_new_tokens, 0, request.beam_width)


def _at_end(request: TraceRequest, attention_window: AttentionWindow) -> int:
    """The last token is never cached."""
    return attention_window.blocks_to_completion(request.prompt_len, request.output_len - 1, 0, request.beam_width)


WAYS = (
    Way("guaranteed_no_evict", "", _until_complete),
    Way("max_utilization", "start", _for_prompt),
    Way("max_utilization", "end", _at_end),
    Way("static_batch", "", _until_complete, starts_together=True),
)


@dataclass(frozen=True, slots=True)
class ContiguousFit:
    """A cache without blocks: each request has memory for the longest sequence, times the most beams.

    fit: how many requests the memory of the paged cache then holds. at_once: what the batch size leaves of them.
    """

    positions: int
    bytes_per_request: int
    fit: int
    at_once: int


def refusal(request: TraceRequest, limits: BatchingConfig, pool: Pool) -> str | None:
    """Why the engine would refuse `request`, or None."""
    longest = min(limits.max_input_len, limits.max_seq_len - 1)
    if request.prompt_len > longest:
        return f"a prompt of {request.prompt_len:,} tokens is longer than the {longest:,} of max_input_len"
    if request.beam_width > limits.max_beam_width:
        return f"its {request.beam_width} beams are more than the {limits.max_beam_width} of max_beam_width"
    clamped = as_admitted(request, limits)
    for window in () if pool.is_contiguous else pool.windows:
        need, there = _until_complete(clamped, window.attention_window), window.num_blocks
        if need > there:
            return f"it needs {need:,} KV cache blocks until it is complete, the cache has {there:,}"
    return None


def as_admitted(request: TraceRequest, limits: BatchingConfig) -> TraceRequest:
    """`request` with no more new tokens than max_seq_len leaves."""
    room = limits.max_seq_len - request.prompt_len
    return replace(request, max_new_tokens=min(request.max_new_tokens, room), output_len=min(request.output_len, room))


def fit(way: Way, requests: Sequence[TraceRequest], limits: BatchingConfig, pool: Pool) -> Fit:
    """How many of `requests`, none of them refused and each as admitted, run at once."""
    totals = [sum(way.blocks(request, window.attention_window) for request in requests) for window in pool.windows]
    means = [Fraction(total, len(requests)) for total in totals]
    return Fit(
        way,
        sum(means, Fraction()),
        min(window.num_blocks // mean for window, mean in zip(pool.windows, means, strict=True)),
        limits.max_batch_size,
        _by_tokens(way, requests, limits),
        _pack(way, requests, limits, pool) if len(requests) > 1 else None,
    )


def contiguous_fit(limits: BatchingConfig, pool: Pool) -> ContiguousFit:
    """What a contiguous cache would hold in the memory of the blocks."""
    positions = limits.max_seq_len * limits.max_beam_width
    bytes_per_request = positions * pool.bytes_per_token
    number = pool.kv_bytes // bytes_per_request
    return ContiguousFit(positions, bytes_per_request, number, min(number, limits.max_batch_size))


def prompts_per_iteration(requests: Sequence[TraceRequest], limits: BatchingConfig) -> float:
    """How many prompts of the mean length one iteration takes when nothing else runs."""
    return limits.max_num_tokens / (sum(request.prompt_len for request in requests) / len(requests))


def _by_tokens(way: Way, requests: Sequence[TraceRequest], limits: BatchingConfig) -> int:
    """How many requests of the mean length the token budget allows. Of static batches with chunked context this is the
    first; those after it begin with prompts that were cut before."""
    prompt = Fraction(sum(request.prompt_len for request in requests), len(requests))
    beams = Fraction(sum(request.beam_width for request in requests), len(requests))
    if way.starts_together:
        return max(limits.max_num_tokens // prompt, 1)
    first = prompt if limits.chunk_unit is None else min(prompt, Fraction(limits.chunk_unit))
    # The last to join does so beside a token for each beam of the others.
    return max(1, min((limits.max_num_tokens - first) // beams + 1, limits.max_num_tokens // beams))


def _pack(way: Way, requests: Sequence[TraceRequest], limits: BatchingConfig, pool: Pool) -> int:
    """How many of the first requests run together: up to the first one that does not fit, which others wait behind."""
    free = [window.num_blocks for window in pool.windows]
    tokens = 0
    for count, request in enumerate(requests):
        free = [
            left - way.blocks(request, window.attention_window)
            for left, window in zip(free, pool.windows, strict=True)
        ]
        prompt = request.prompt_len if limits.chunk_unit is None else min(request.prompt_len, limits.chunk_unit)
        needs = request.prompt_len if way.starts_together else max(prompt, request.beam_width)
        too_long = tokens + needs > limits.max_num_tokens and count > 0
        if min(free) < 0 or too_long or count >= limits.max_batch_size:
            return count
        tokens += request.prompt_len if way.starts_together else request.beam_width
    return len(requests)
