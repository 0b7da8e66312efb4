"""The decision for one iteration, in words that all schedulers share: what runs, what was paused for what, what waits.

Generation requests are rows of the request table, so that those that run as before cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import numpy as np

from ifbbench.engine.arrays import NO_ROWS, IntArray, Rows
from ifbbench.engine.request import Request


class Limit(StrEnum):
    """Why a request does not run in an iteration, or has its chunk cut: the only list of the engine's reasons."""

    BATCH_SIZE = "batch_size"
    NUM_TOKENS = "num_tokens"
    KV_BLOCKS = "kv_blocks"
    WATERMARK = "watermark"
    FULL_PROMPT = "full_prompt"
    PREFILL = "prefill"
    LORA_PAGES = "lora_pages"
    STATIC_BATCH = "static_batch"
    BEAM_WIDTH = "beam_width"
    REUSE_DELAY = "reuse_delay"
    ATTENTION_DP = "attention_dp"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A request that does not run in this iteration, and why: a `Limit`, or a policy's own word for its reason."""

    request: Request
    limit: Limit | str


@dataclass(frozen=True, slots=True)
class Pause:
    """`victim` loses its KV blocks because `beneficiary` did not fit for `limit`. The beneficiary is before it in the
    order, or is the victim itself: the last started request, which needs blocks that are not free."""

    victim: Request
    beneficiary: Request
    limit: Limit | str


class ContextChunk:
    """A part of one prompt to compute: positions `start` to `start + length - 1` of `request`.

    is_last: whether it completes the prompt, so that it yields a token.
    is_again: whether the prompt was paused before.

    The last two do not change when the request is paused while the chunk is in flight.
    """

    def __init__(self, request: Request, start: int, length: int) -> None:
        self.request, self.start, self.length = request, start, length
        self.is_last, self.is_again = start + length == request.prompt_len, request.pauses > 0

    def tokens(self) -> IntArray:
        """Token ids of the chunk, [length]. ValueError if the prompt is symbolic."""
        return self.request.tokens_between(self.start, self.start + self.length)


@dataclass(slots=True)
class Plan:
    """The decision for one iteration.

    context: requests with a chunk to run.
    rows: table rows of the generation requests to run, in batch order.
    idle: rows of complete members of a static batch.
    held: generation requests that do not run.
    paused: requests to pause, in this order.
    blocked: the first request that each part of the scheduler left out, and the paused ones.
    valid_until_next_allocation: the decision may differ as soon as a generation request takes a block.
    chunks: chunks of `context`, once their requests have blocks and it is known how many of their tokens are reused.
    entered: requests that this decision takes from the queue into the running set.
    in_flight: number of requests in other micro batches, which are in flight.
    num_ending: number of requests that do not run because their last token is in flight.
    awaits_in_flight: whether iterations in flight change the KV cache after the first one of this plan was submitted.
    receiving: requests that got blocks for the keys and values that another engine sends.
    continued: requests that generate from now on without a chunk, as their keys and values have come, and the number of
        outputs of each.
    loaded_tokens: tokens whose keys and values are copied from host memory for the chunks.
    awaits_stores: whether requests in the queue wait for what a store sends.
    valid_until_s: time from which an iteration may find that other blocks have become free.
    queue_head: the entry of `blocked` that holds the whole queue, in an engine that keeps its queue apart from its
        running requests; None if nothing holds it.
    """

    context: list[Request]
    rows: Rows
    idle: Rows = field(default_factory=lambda: NO_ROWS)
    held: list[Request] = field(default_factory=list)
    paused: list[Pause] = field(default_factory=list)
    blocked: tuple[LeftOut, ...] = ()
    valid_until_next_allocation: bool = False
    chunks: tuple[ContextChunk, ...] = ()
    entered: Sequence[Request] = ()
    in_flight: int = 0
    num_ending: int = 0
    awaits_in_flight: bool = False
    receiving: Sequence[Request] = ()
    continued: Sequence[tuple[Request, int]] = ()
    loaded_tokens: int = 0
    awaits_stores: bool = False
    valid_until_s: float = inf
    queue_head: LeftOut | None = None

    @property
    def does_nothing(self) -> bool:
        return not (self.context or len(self.rows) or len(self.idle) or self.paused)

    @property
    def generation_rows(self) -> Rows:
        """Rows of all requests in the generation part of the batch."""
        return np.concatenate([self.rows, self.idle]) if len(self.idle) else self.rows

    def output_rows(self) -> Rows:
        """[outputs], the table row of each, in batch order: of last chunks, of `rows`, and of `idle`."""
        completing = [chunk.request.slot for chunk in self.chunks if chunk.is_last]
        if not len(self.idle) and not (completing and len(self.rows)):
            return np.array(completing, np.int64) if completing else self.rows
        return np.concatenate([np.array(completing, np.int64), self.rows, self.idle])

    def first_left_out(self, waiting: Sequence[Request]) -> LeftOut | None:
        """The first request that does not run or has its chunk cut. waiting: requests that are not active yet."""
        if self.blocked:
            return min(self.blocked, key=lambda left_out: left_out.request.order)
        return LeftOut(waiting[0], Limit.BATCH_SIZE) if waiting else None
