"""What the loop tells of each iteration: enough to explain every decision, and no more than what changed."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.batch import ContextChunk
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.policies.policy import LeftOut, Pause
from ifbbench.engine.request import Request

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class CacheState(NamedTuple):
    """The KV cache while an iteration ran. Blocks are those of the device, None in a cache without blocks;
    allocated_total, allocated_new and reused are sums since the start (see BlockCounters). max_tokens, held_tokens:
    places for tokens, in all and those that requests hold. filled_tokens: those with a token in them."""

    max_blocks: int | None
    used_blocks: int | None
    tokens_per_block: int | None
    allocated_total: int | None
    allocated_new: int | None
    reused: int | None
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
        if not cache.num_blocks:
            return cls(None, None, None, None, None, None, cache.places, cache.held_places, cache.filled_places)
        counters = cache.counters
        most, used, size = cache.num_blocks, cache.num_used, cache.attention_window.tokens_per_block
        return cls(
            most, used, size, counters.allocated_total, counters.allocated_new, counters.reused, most * size,
            used * size, cache.filled_places,
        )  # fmt: skip


@dataclass(slots=True)
class IterationRecord:
    """One iteration. Times are seconds on the run's clock.

    start_s, submit_s, end_s: the iteration began, its batch went to the executor, its tokens were there. With overlap
        an iteration begins before the one before it ends.
    context_end_s: when the context pass was done, where context and generation have a pass each.
    activated: requests that became active in it.
    context: the chunks it ran, of num_context_tokens in all. `recomputed` tokens of them had been computed before a
        pause, and `padding` tokens (V1) were computed beside.
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
    num_context_tokens: int
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
    def budget_used(self) -> int:
        """Tokens of the packed batch."""
        return self.num_context_tokens + self.num_generation_tokens


class Stretch(NamedTuple):
    """Consecutive iterations that all do the same: the generation requests of the first make a token in each.

    first: the record of the first one, without `finished`: they are those that the last iteration completed.
    start_s, submit_s, end_s: [iterations], as in an IterationRecord. more_blocks: [iterations], blocks that were taken
    since the first one ran. epoch_s: what the run's second zero is on the clock of time stamps.
    """

    first: IterationRecord
    finished: list[Request]
    start_s: Floats
    submit_s: Floats
    end_s: Floats
    more_blocks: Integers
    epoch_s: int

    @property
    def length(self) -> int:
        """How many iterations it has."""
        return len(self.start_s)

    @property
    def last_iteration(self) -> int:
        return self.first.iteration + self.length - 1

    def cache(self, index: int) -> CacheState:
        """The KV cache while the iteration at `index` of the stretch ran."""
        cache, more = self.first.cache, int(self.more_blocks[index])
        filled = cache.filled_tokens + self.first.num_generation * index
        if cache.used_blocks is None or cache.tokens_per_block is None:
            return cache._replace(filled_tokens=filled)
        assert cache.allocated_total is not None
        assert cache.allocated_new is not None
        return cache._replace(
            used_blocks=cache.used_blocks + more, allocated_total=cache.allocated_total + more,
            allocated_new=cache.allocated_new + more, held_tokens=cache.held_tokens + more * cache.tokens_per_block,
            filled_tokens=filled,
        )  # fmt: skip

    def records(self) -> Iterator[IterationRecord]:
        """One for each iteration."""
        times = zip(self.start_s.tolist(), self.submit_s.tolist(), self.end_s.tolist(), strict=True)
        for index, (start_s, submit_s, end_s) in enumerate(times):
            yield replace(
                self.first, iteration=self.first.iteration + index, cache=self.cache(index), start_s=start_s,
                submit_s=submit_s, end_s=end_s, timestamp=self.epoch_s + start_s,
                finished=self.finished if index == self.length - 1 else [],
            )  # fmt: skip


class Observer(Protocol):
    """Hears of each iteration after it has run, and of each request that leaves without being complete."""

    def iteration(self, record: IterationRecord) -> None: ...

    def stretch(self, stretch: Stretch) -> None:
        """Several iterations at once."""
        ...

    def left(self, request: Request, error: str | None) -> None:
        """`request` was refused or failed for `error`, or was stopped (None) by its client."""
        ...


class Unobserved:
    """An observer that looks away."""

    def iteration(self, record: IterationRecord) -> None:
        pass

    def stretch(self, stretch: Stretch) -> None:
        pass

    def left(self, request: Request, error: str | None) -> None:
        pass
