"""Fast-forward: iterations between two events, in which requests only generate, are advanced together."""

import numpy as np

from ifbbench.clock import NANOSECONDS, VirtualClock
from ifbbench.engine.active import ActiveRequests, Int64Array
from ifbbench.engine.admission import NextChange
from ifbbench.engine.batch import PredictableExecutor
from ifbbench.engine.config import BatchingConfig
from ifbbench.engine.in_flight import store_generated
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.kv_cache.manager import StepsAhead
from ifbbench.engine.lora import AdapterCache, AdapterUse, distinct_tasks
from ifbbench.engine.records import CacheState, IterationRecord, Stretch
from ifbbench.engine.scheduler import Plan, Scheduler

# Longer stretches are no faster per iteration, and no progress is shown while one is computed.
MAX_STEPS = 1024


class FastForward:
    """Advances counters, cache and clock over iterations in which each generation request generates a token.

    A stretch ends with the first iteration that completes a request, before the one that starts after more requests
    have arrived, and before blocks run out. Columns are computed at once, with the same results as one by one.
    """

    def __init__(
        self, config: BatchingConfig, executor: PredictableExecutor, clock: VirtualClock, active: ActiveRequests,
        kv_cache: KvCache, scheduler: Scheduler, next_change: NextChange, adapters: AdapterCache | None = None,
    ) -> None:  # fmt: skip
        self._adapters = adapters
        self._config = config
        self._executor = executor
        self._clock = clock
        self._active = active
        self._kv_cache = kv_cache
        self._scheduler = scheduler
        self._next_change = next_change
        self._change_s: float | None = None
        self._stands_until_block = False

    def next_plan(self, now_s: float) -> Plan | None:
        """The plan of the next iterations; None if it is not certain. To be called before `advance`."""
        standing = self._scheduler.standing_plan()
        # With reuse, a block that generation fills may let a waiting request start.
        if standing and (standing.context or standing.held or standing.paused or self._kv_cache.reuse.enabled):
            standing = None
        active, config = self._active, self._config
        if active.table.num_special:
            return None
        # Otherwise it is certain only that generation requests alone run, if all fit into a batch.
        if standing is None and (
            active.context or active.mixed_beam_widths or len(active.generation) > config.max_batch_size
            or active.step_tokens(active.generation_rows) > config.token_budget
        ):  # fmt: skip
            return None
        self._change_s = self._next_change(now_s)
        self._stands_until_block = standing is not None and standing.stands_until_block
        return standing or Plan([], active.batch_rows)

    def advance(self, plan: Plan, first: IterationRecord) -> Stretch | None:
        """Advance as many iterations of `plan` as are certain; None, with nothing changed, if that is not even one.

        first: record of the first iteration, without its times; it becomes part of the result."""
        table, rows = self._active.table, plan.rows
        ahead = self._kv_cache.steps_ahead(rows)
        if ahead is None:
            return None
        adapters, tasks = None, list[int]()
        if self._adapters is not None and self._active.num_with_lora:
            adapters = AdapterUse(table.lora_tasks[rows])
            tasks = distinct_tasks(adapters.tasks)
            if not self._adapters.has(tasks):  # an adapter is loaded by a batch
                return None
        # Tokens computed again after a pause are counted one by one.
        if table.any_paused and (ahead.positions < table.cached_before_pause[rows]).any():
            return None
        confirmed = table.confirmed[rows]
        until_end = int(np.minimum.reduce(table.stop_after[rows] - confirmed))
        steps = min(until_end, ahead.max_steps, MAX_STEPS)
        if steps < 1:
            return None
        blocks = ahead.blocks(steps)
        max_blocks = 0 if self._stands_until_block else self._kv_cache.free_blocks
        steps = int(blocks.cumsum().searchsorted(max_blocks, side="right"))
        if not steps:
            return None
        start_ns, submit_ns, end_ns = self._times(ahead, steps, adapters)
        steps = len(start_ns)
        if self._adapters is not None and adapters is not None:
            self._adapters.use(tasks, steps)
        table.generated[rows] += steps
        confirmed += steps
        table.confirmed[rows] = confirmed
        ahead.take(steps)
        if self._kv_cache.reuse.enabled:
            store_generated(self._active, self._kv_cache, rows, steps)
        self._clock.wait_until_ns(int(end_ns[-1]))
        finished = [self._active.by_slot[row] for row in rows[confirmed == table.stop_after[rows]].tolist()]
        more_blocks = blocks[:steps].cumsum() - blocks[0]
        start_s, submit_s, end_s = start_ns / NANOSECONDS, submit_ns / NANOSECONDS, end_ns / NANOSECONDS
        first.submit_s, first.end_s = float(submit_s[0]), float(end_s[0])
        first.cache = CacheState.of(self._kv_cache).moved(-int(more_blocks[-1]), (1 - steps) * first.num_generation)
        return Stretch(first, finished, start_s, submit_s, end_s, more_blocks, self._clock.epoch_s)

    def _times(
        self, ahead: StepsAhead, steps: int, adapters: AdapterUse | None
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Start, submission and end of each iteration, up to the one that starts after requests have arrived."""
        now_ns = self._clock.now_ns
        host_ns, device_ns = self._executor.generation_times(ahead.positions, steps, adapters)
        end_ns = (device_ns + host_ns).cumsum() + now_ns
        start_ns = np.empty_like(end_ns)
        start_ns[0], start_ns[1:] = now_ns, end_ns[:-1]
        if self._change_s is not None:
            steps = int((start_ns / NANOSECONDS).searchsorted(self._change_s))
            start_ns, end_ns = start_ns[:steps], end_ns[:steps]
        return start_ns, start_ns + host_ns, end_ns
