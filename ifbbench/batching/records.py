"""What the loop tells of each iteration: enough to explain every decision, and no more than what changed."""

from dataclasses import dataclass, field
from typing import Protocol

from ifbbench.batching.batch import ContextChunk
from ifbbench.batching.capacity.policy import LeftOut, Pause
from ifbbench.batching.kv_cache.blocks import BlockCounters
from ifbbench.batching.kv_cache.interface import KvCache
from ifbbench.batching.request import Request


@dataclass(frozen=True, slots=True)
class CacheState:
    """The KV cache while an iteration ran. Blocks are those of the device, None in a cache without blocks; counters are
    sums since the start. max_tokens, held_tokens: places for tokens, in all and those that requests hold.
    filled_tokens: those with a token in them."""

    max_blocks: int | None
    used_blocks: int | None
    tokens_per_block: int | None
    counters: BlockCounters | None
    max_tokens: int
    held_tokens: int
    filled_tokens: int

    @property
    def fragmentation(self) -> float:
        """Share of the held places that have no token in them. Beams share tokens, so it is 0 at least."""
        return max(0.0, 1.0 - self.filled_tokens / self.held_tokens) if self.held_tokens else 0.0

    @classmethod
    def of(cls, cache: KvCache) -> "CacheState":
        """The cache as it is now."""
        has_blocks = cache.num_blocks > 0
        return cls(
            max_blocks=cache.num_blocks if has_blocks else None,
            used_blocks=cache.num_used if has_blocks else None,
            tokens_per_block=cache.geometry.tokens_per_block if has_blocks else None,
            counters=cache.counters if has_blocks else None,
            max_tokens=cache.places,
            held_tokens=cache.held_places,
            filled_tokens=cache.filled_places,
        )


@dataclass(slots=True)
class IterationRecord:
    """One iteration. Times are seconds on the run's clock.

    start_s, submit_s, end_s: the iteration began, its batch went to the executor, its tokens were there. With overlap
        an iteration begins before the one before it ends.
    context_end_s: when the context pass was done, where context and generation have a pass each.
    activated: requests that became active in it.
    context: the chunks it ran, `recomputed` tokens of which had been computed before a pause, and `padding` tokens
        (V1) were computed beside.
    num_generation: generation requests that it ran. All active ones did, but those in `held` and the paused.
    idle: requests of a static batch that are complete and keep their place in the batch until all others are (V1);
        they are among the held ones.
    finished: requests that it completed; `errors` of those that failed in it.
    left_out: the first request, in the order of the active list and then of the queue, that did not run or whose chunk
        was cut. `blocked` are the first such requests of each scheduler: all that wait behind them wait for them.
    queued: requests that have arrived and are not active.
    """

    iteration: int
    micro_batch: int
    start_s: float
    timestamp: float
    active: int
    queued: int
    activated: list[Request]
    context: tuple[ContextChunk, ...]
    recomputed: int
    num_generation: int
    num_generation_tokens: int
    held: list[Request]
    paused: list[Pause]
    left_out: LeftOut | None
    blocked: tuple[LeftOut, ...]
    cache: CacheState
    idle: int = 0
    padding: int = 0
    submit_s: float = 0.0
    context_end_s: float | None = None
    end_s: float = 0.0
    finished: list[Request] = field(default_factory=list)

    @property
    def num_context_tokens(self) -> int:
        return sum(chunk.length for chunk in self.context)

    @property
    def budget_used(self) -> int:
        """Tokens of the packed batch."""
        return self.num_context_tokens + self.num_generation_tokens


class Observer(Protocol):
    """Hears of each iteration after it has run, and of each request that leaves without being complete."""

    def iteration(self, record: IterationRecord) -> None: ...

    def left(self, request: Request, error: str | None) -> None:
        """`request` was refused or failed for `error`, or was stopped (None) by its client."""
        ...


class Unobserved:
    """An observer that looks away."""

    def iteration(self, record: IterationRecord) -> None:
        pass

    def left(self, request: Request, error: str | None) -> None:
        pass
