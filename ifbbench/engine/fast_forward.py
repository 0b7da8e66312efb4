"""Fast-forward: iterations between two events, which only generate, advanced together."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ifbbench.clock import NANOSECONDS, VirtualClock
from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.admission import NextChange
from ifbbench.engine.batch import PredictableExecutor
from ifbbench.engine.batching_config import BatchingConfig
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.kv_cache.manager import StepsAhead
from ifbbench.engine.records import CacheState, IterationRecord, Stretch
from ifbbench.engine.request import Request
from ifbbench.engine.scheduler import Plan

Integers = NDArray[np.int64]
# Longer stretches cost no less for each iteration, and nothing of them is on the screen while they are made.
MOST_STEPS = 1024


class Advance(NamedTuple):
    """Iterations that have been advanced together. All are [iterations].

    start_ns, submit_ns, end_ns: since the start of the run. blocks: that each took.
    """

    start_ns: Integers
    submit_ns: Integers
    end_ns: Integers
    blocks: Integers

    def stretch(self, first: IterationRecord, finished: list[Request], cache: KvCache, epoch_s: int) -> Stretch:
        """What there is to tell. first: the record of the first iteration, but for its times and the cache. cache: as
        it is now, after the last one."""
        taken = self.blocks.cumsum()
        more_blocks = taken - taken[0]
        start_s, submit_s, end_s = self.start_ns / NANOSECONDS, self.submit_ns / NANOSECONDS, self.end_ns / NANOSECONDS
        first.submit_s, first.end_s = float(submit_s[0]), float(end_s[0])
        first.cache = _cache_before(CacheState.of(cache), len(taken) - 1, int(more_blocks[-1]), first.num_generation)
        return Stretch(first, finished, start_s, submit_s, end_s, more_blocks, epoch_s)


def _cache_before(cache: CacheState, steps: int, blocks: int, num_requests: int) -> CacheState:
    """The cache that became `cache` by `steps` of so many requests, which took `blocks`."""
    most, used, size, total, new, reused, max_tokens, held, filled = cache
    filled -= steps * num_requests
    if used is None or size is None or total is None or new is None:
        return cache._replace(filled_tokens=filled)
    return CacheState(
        most, used - blocks, size, total - blocks, new - blocks, reused, max_tokens, held - blocks * size, filled
    )


class FastForward:
    """Advances counters, cache and clock over iterations in which all active requests make a token, and no more.

    The stretch ends with the first iteration that completes a request, before the one at whose start more requests have
    arrived, and before blocks run out. What an iteration does then follows from the one before, so that whole columns
    are computed at once; each is what it would have been one by one.
    """

    def __init__(
        self,
        config: BatchingConfig,
        executor: PredictableExecutor,
        clock: VirtualClock,
        active: ActiveRequests,
        kv_cache: KvCache,
        next_change: NextChange,
    ) -> None:
        self._config = config
        self._executor = executor
        self._clock = clock
        self._active = active
        self._kv_cache = kv_cache
        self._next_change = next_change
        self.epoch_s = clock.epoch_s
        self._change_s: float | None = None
        self._stands_until_block = False
        # The latest decision, and how often requests had come or gone then.
        self._latest: tuple[Plan, int] | None = None

    def remember_decision(self, plan: Plan) -> None:
        """This was decided last. It stands until requests come or go; but with reuse, a block that generation fills may
        let somebody in who waits."""
        stands = plan.is_steady and not self._kv_cache.reuse.enabled
        self._latest = (plan, self._active.num_changes) if stands else None

    def next_plan(self, now_s: float) -> Plan | None:
        """What is sure to be decided next, and again after that; None if that is not known. To be asked before
        `advance`."""
        active = self._active
        standing = self._latest[0] if self._latest and self._latest[1] == active.num_changes else None
        if active.table.num_special or (standing is None and not self._runs_all()):
            return None
        self._change_s = self._next_change(now_s)
        self._stands_until_block = standing is not None and standing.stands_until_block
        return standing or Plan([], active.rows_by_lora)

    def _runs_all(self) -> bool:
        """Whether there are generation requests only, and all fit into a batch."""
        active, config = self._active, self._config
        if active.context or active.mixed_beam_widths:
            return False
        return (
            len(active.generation) <= config.max_batch_size and active.generation_tokens <= config.max_num_tokens
        )

    def advance(self) -> Advance | None:
        """Advance as far as is known; None, with nothing changed, if that is not even one iteration."""
        table, rows = self._active.table, self._active.rows_by_lora
        ahead = self._kv_cache.steps_ahead(rows)
        if ahead is None or self._some_make_tokens_again(ahead):
            return None
        confirmed = table.confirmed[rows]
        until_end = int(np.minimum.reduce(table.stop_after[rows] - confirmed))
        steps = min(until_end, ahead.max_steps, MOST_STEPS)
        if steps < 1:
            return None
        blocks = ahead.blocks(steps)
        most_blocks = 0 if self._stands_until_block else self._kv_cache.free_blocks
        steps = int(blocks.cumsum().searchsorted(most_blocks, side="right"))
        if not steps:
            return None
        start_ns, submit_ns, end_ns = self._times(ahead, steps)
        steps = len(start_ns)
        table.generated[rows] += steps
        table.confirmed[rows] = confirmed + steps
        ahead.take(steps)
        self._clock.wait_until_ns(int(end_ns[-1]))
        return Advance(start_ns, submit_ns, end_ns, blocks[:steps])

    def _some_make_tokens_again(self, ahead: StepsAhead) -> bool:
        """Whether some tokens are made for the second time after a pause, which is counted one by one."""
        table = self._active.table
        if not table.any_paused:
            return False
        return bool((ahead.positions < table.cached_before_pause[self._active.rows_by_lora]).any())

    def _times(self, ahead: StepsAhead, steps: int) -> tuple[Integers, Integers, Integers]:
        """When each iteration starts, is submitted and ends, up to the one before which something changes."""
        now_ns = self._clock.now_ns
        host_ns, device_ns = self._executor.generation_times(ahead.positions, steps)
        end_ns = (device_ns + host_ns).cumsum() + now_ns
        start_ns = np.empty_like(end_ns)
        start_ns[0], start_ns[1:] = now_ns, end_ns[:-1]
        if self._change_s is not None:
            steps = int((start_ns / NANOSECONDS).searchsorted(self._change_s))
            start_ns, end_ns = start_ns[:steps], end_ns[:steps]
        return start_ns, start_ns + host_ns, end_ns
