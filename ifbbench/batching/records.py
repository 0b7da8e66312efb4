"""What the loop tells of each iteration: enough to explain every decision, and no more than what changed."""

from dataclasses import dataclass
from typing import Protocol

from ifbbench.batching.batch import ContextChunk
from ifbbench.batching.capacity.policy import LeftOut, Pause
from ifbbench.batching.request import IntArray, Request


@dataclass(frozen=True, slots=True)
class Response:
    """What goes back to the client: the output tokens (None from executors that make none), or an error."""

    request: Request
    output_tokens: IntArray | None
    is_final: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CacheState:
    """The KV cache while an iteration ran: `fragmentation` is the share of places in used blocks that hold no token."""

    max_blocks: int
    used_blocks: int
    tokens_per_block: int
    allocated_total: int
    fragmentation: float


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """One iteration. Times are seconds on the run's clock.

    start_s, submit_s, end_s: the iteration began, its batch went to the executor, its tokens were there.
    activated: requests that became active in it.
    context: the chunks it ran, `recomputed` tokens of which had been computed before a pause.
    num_generation: generation requests that it ran. All active ones did, but those in `held` and the paused.
    finished: requests that it completed.
    left_out: the first request, in the order of the active list and then of the queue, that did not run or whose chunk
        was cut. `blocked` are the first such requests of each scheduler: all that wait behind them wait for them.
    queued: requests that have arrived and are not active.
    """

    iteration: int
    start_s: float
    submit_s: float
    end_s: float
    timestamp: float
    active: int
    queued: int
    activated: list[Request]
    context: tuple[ContextChunk, ...]
    recomputed: int
    num_generation: int
    held: list[Request]
    paused: list[Pause]
    finished: list[Request]
    left_out: LeftOut | None
    blocked: tuple[LeftOut, ...]
    cache: CacheState

    @property
    def num_context_tokens(self) -> int:
        return sum(chunk.length for chunk in self.context)

    @property
    def budget_used(self) -> int:
        """Tokens of the packed batch."""
        return self.num_context_tokens + self.num_generation


class Observer(Protocol):
    """Hears of each iteration after it has run, and of each request that was refused."""

    def iteration(self, record: IterationRecord) -> None: ...

    def refused(self, request: Request, error: str) -> None: ...
