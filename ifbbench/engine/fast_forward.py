"""Fast-forward: iterations of which the times are known run without batches, and many together between two events."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ifbbench.clock import NANOSECONDS, VirtualClock
from ifbbench.engine.active import ActiveRequests, Rows
from ifbbench.engine.admission import NextChange
from ifbbench.engine.batch import ContextChunk
from ifbbench.engine.config import BatchingConfig, BatchingType
from ifbbench.engine.in_flight import store_generated, store_known
from ifbbench.engine.interfaces import PredictableExecutor
from ifbbench.engine.kv_cache.attention_window import ceil_div
from ifbbench.engine.kv_cache.blocks import OutOfBlocks
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.kv_cache.manager import KvCacheManager
from ifbbench.engine.lora import AdapterCache, AdapterUse, distinct_tasks
from ifbbench.engine.records import CacheState, IterationRecord, Stretch
from ifbbench.engine.request import Request
from ifbbench.engine.scheduler import Plan, Scheduler

# Longer stretches are no faster per iteration, and no progress is shown while one is computed.
MAX_STEPS = 1024
STEPS = np.arange(MAX_STEPS)


class StepsAhead:
    """The next steps of generation requests of one beam that each generate a token in every step, with no other change
    of the cache in between.

    positions: [requests], position of each one's next token. max_steps: how many steps are known. With reuse the blocks
    that sequences fill are stored, which may change which of the waiting requests starts.
    """

    def __init__(self, cache: KvCacheManager, active: ActiveRequests, rows: Rows) -> None:
        self._cache = cache
        self._active = active
        self._rows = rows
        self._size = size = cache.attention_window.tokens_per_block
        self._registered = registered = cache.registered[rows]
        self._until_block = -registered % size
        bubble = cache.attention_window.bubble
        self.positions = registered - bubble if bubble else registered
        # Steps before a sequence first wraps: from then on it takes no blocks, because its beams share none.
        self.max_steps = self._until_wrap = MAX_STEPS
        if cache.attention_window.wraps:
            self._until_wrap = cache.attention_window.capacity - int(np.maximum.reduce(registered))
        if cache.num_reuse_changes:
            until_change = int(np.minimum.reduce(self._until_block)) + 1 if active.context else MAX_STEPS
            self.max_steps = min(self._until_wrap, until_change)

    def fitting_steps(self, steps: int, may_take: bool = True) -> int:
        """How many of the next `steps` steps take no more blocks than are free, or none unless `may_take`."""
        self._blocks = blocks = self._blocks_of(steps)
        limit = self._cache.free_blocks if may_take else 0
        return steps if blocks[-1] <= limit else bisect_right(blocks, limit)

    def take(self, steps: int) -> tuple[list[int], list[int], list[int]]:
        """Advance the cache by `steps` steps, at most those of `fitting_steps`, with the result of as many calls of
        `add_tokens`, after the counters of the requests. Returns the blocks, the places and the blocks without known
        tokens that all requests together have taken after each step since the first, [steps]."""
        blocks, count, room = self._blocks[:steps], len(self._rows), None
        if steps > self._until_wrap:
            room = self._room()
        new_blocks = blocks
        if blocks[-1] and self._cache.num_reuse_changes:
            new_blocks = self._grow_and_store(steps)
        elif blocks[-1]:
            self._grow(steps, room)
        if room is None:
            tokens, new = list(range(0, steps * count, count)), steps * count
        else:
            filled = np.minimum(room, STEPS[:steps, None] + 1).sum(axis=1)
            new = int(filled[-1])
            tokens = (filled - filled[0]).tolist()
        self._cache.register(self._rows, self._registered + steps, new)
        if not blocks[-1]:
            return blocks, tokens, blocks
        more_blocks = [after - blocks[0] for after in blocks]
        more_new = more_blocks if new_blocks is blocks else [after - new_blocks[0] for after in new_blocks]
        return more_blocks, tokens, more_new

    def _grow(self, steps: int, room: Rows | None) -> None:
        """Take the blocks of the next `steps` steps, in the order of the steps."""
        order = self._until_block.argsort(kind="stable")
        ordered_rows, until_block = self._rows[order], self._until_block[order]
        for step in range(0, steps, self._size):
            growing = int(until_block.searchsorted(steps - step))
            rows = ordered_rows[:growing]
            if room is not None:
                rows = rows[step + until_block[:growing] < room[order][:growing]]
            if len(rows):
                self._cache.grow(rows)

    def _grow_and_store(self, steps: int) -> list[int]:
        """`_grow`, and store the blocks that each step finds filled after it has taken blocks, which may evict what was
        stored before. Returns the blocks without known tokens taken after each step, [steps]."""
        starting: dict[int, list[int]] = {}
        for index, until_block in enumerate(self._until_block.tolist()):
            for step in range(until_block, steps, self._size):
                starting.setdefault(step, []).append(index)
        counters, new_blocks = self._cache.counters, list[int]()
        before = counters.allocated_new
        for step in range(steps):
            if (indices := starting.get(step)) is not None:
                rows, registered = self._rows[indices], self._registered[indices] + step
                self._cache.grow(rows)
                for row, num_tokens in zip(rows.tolist(), registered.tolist(), strict=True):
                    store_known(self._active.by_slot[row], self._cache, num_tokens)
            new_blocks.append(counters.allocated_new - before)
        return new_blocks

    def _room(self) -> Rows:
        """[requests], steps before each one's sequence wraps."""
        return np.maximum(self._cache.attention_window.capacity - self._registered, 0)

    def _blocks_of(self, steps: int) -> list[int]:
        """[steps], blocks that all requests together have taken after each of their next steps."""
        until_block, size = self._until_block, self._size
        if steps > self._until_wrap:
            starts = until_block + np.arange(0, steps, size)[:, None]
            starts = starts[starts < np.minimum(self._room(), steps)]
            taken: list[int] = np.bincount(starts, minlength=steps).cumsum().tolist()
            return taken
        in_turn = np.bincount(until_block, minlength=size).tolist()
        return list(accumulate((in_turn * ceil_div(steps, size))[:steps]))


class FastForward:
    """Runs iterations on a virtual clock without batches and outputs: of an executor that can predict its times and
    returns no tokens. It advances counters, cache and clock, with the same results as batches.

    Iterations that a plan is certain to stand for are advanced together. Such a stretch ends with the first iteration
    that completes a request, before the one that starts after more requests have arrived, and before blocks run out.
    Streaming requests get their final response only.
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
        self._caches = kv_cache.of_windows()
        self._scheduler = scheduler
        self._next_change = next_change
        self._runs_context = config.batching_type is not BatchingType.INFLIGHT

    @staticmethod
    def knows_steps_of(config: BatchingConfig) -> bool:
        """Whether what iterations do follows from their plan, with these settings."""
        if config.batching_type is BatchingType.V1 or config.has_dynamic_limits or config.drafts.max_len:
            return False
        return config.max_in_flight == config.max_beam_width == 1 and not config.is_contiguous

    def next_plan(self) -> Plan | None:
        """The plan of the next iterations, if it is certain without a decision of the policy."""
        standing = self._scheduler.standing_plan()
        if standing and (standing.context or standing.held or standing.paused):
            standing = None
        active, config = self._active, self._config
        # Otherwise it is certain only that generation requests alone run, if all fit into a batch.
        if standing is None and (
            active.context or active.mixed_beam_widths or len(active.generation) > config.max_batch_size
            or active.step_tokens(active.generation_rows) > config.token_budget
        ):  # fmt: skip
            return None
        return standing or Plan([], active.batch_rows)

    def may_run(self, plan: Plan) -> bool:
        """Whether iterations of `plan` need no batches. Tokens computed again after a pause are counted one by one."""
        active = self._active
        if active.num_reading_tokens or plan.paused:
            return False
        if plan.context:
            has_more = active.num_with_lora or active.table.any_paused or active.table.max_draft_tokens
            return self._runs_context and not has_more
        if not len(plan.rows):
            return False
        if not active.table.any_paused:
            return True
        cached = self._kv_cache.registered[plan.rows] - self._kv_cache.attention_window.bubble
        return not (cached < active.table.cached_before_pause[plan.rows]).any()

    def start_context(self, plan: Plan) -> list[ContextChunk]:
        """The chunks of the first iteration of `plan`, for which the blocks of new prompts are taken."""
        for request in plan.context:
            if request.is_first_chunk:
                reused = self._kv_cache.add_request(request, self._clock.now())
                request.set_prepopulated(reused, self._kv_cache.attention_window.tokens_per_block)
        self._kv_cache.take_copies()  # nothing is copied on this device
        return [ContextChunk(request, request.position, request.chunk) for request in plan.context]

    def advance(self, plan: Plan, first: IterationRecord, max_steps: int) -> Stretch | None:
        """Advance at most `max_steps` iterations of `plan`; None, with nothing changed, if not even one is certain.

        first: record of the first iteration, without its times; it becomes part of the result."""
        active, table, rows = self._active, self._active.table, plan.rows
        if max_steps == 1 and not active.num_with_lora:
            return self._advance_once(plan, first)
        # A plan that was made before may stand only until a block is taken.
        may_take = not plan.stands_until_block or max_steps == 1
        ahead = [StepsAhead(cache, active, rows) for cache in self._caches] if len(rows) else []
        adapters, tasks = None, list[int]()
        if self._adapters is not None and active.num_with_lora:
            adapters = AdapterUse(table.lora_tasks[rows])
            tasks = distinct_tasks(adapters.tasks)
            if not self._adapters.has(tasks):  # an adapter is loaded by a batch
                return None
        remaining, until_end, positions = rows, max_steps, rows
        if ahead:
            remaining = table.stop_after[rows] - table.confirmed[rows]
            until_end = int(np.minimum.reduce(remaining))
            max_steps = min(max_steps, until_end, ahead[0].max_steps)
            positions = ahead[0].positions
        if max_steps < 1:
            return None
        host_ns, times_ns = self._times(first.context, positions, max_steps, adapters)
        steps = len(times_ns) - 1
        for window in ahead:
            steps = min(steps, window.fitting_steps(steps, may_take))
        if not steps:
            if plan.context:
                raise OutOfBlocks("generation needs more KV cache blocks than are free")
            return None
        if self._adapters is not None and adapters is not None:
            self._adapters.use(tasks, steps)
        table.generated[rows] += steps
        table.confirmed[rows] += steps
        more_blocks = more_tokens = more_new = [0] * steps
        if len(taken := [window.take(steps) for window in ahead]) == 1:
            more_blocks, more_tokens, more_new = taken[0]
        elif taken:
            more_blocks, more_tokens, more_new = np.add.reduce(taken).tolist()
        self._advance_context(plan.context, steps)
        finished = []
        if steps == until_end:
            finished = [active.by_slot[row] for row in rows[remaining == steps].tolist()]
        self._clock.wait_until_ns(times_ns[steps])
        start_s = [time_ns / NANOSECONDS for time_ns in times_ns[: steps + 1]]
        submit_s = [(time_ns + host_ns) / NANOSECONDS for time_ns in times_ns[:steps]]
        cache = CacheState.of(self._kv_cache)
        first.cache = cache.moved(-more_blocks[-1], -more_tokens[-1], -more_new[-1])
        first.submit_s, first.end_s = submit_s[0], start_s[1]
        return Stretch(
            first, finished, start_s[:-1], submit_s, start_s[1:], more_blocks, more_tokens, more_new, cache,
            self._clock.epoch_s,
        )  # fmt: skip

    def _advance_once(self, plan: Plan, first: IterationRecord) -> Stretch:
        """`advance` by one iteration of a plan that was just made."""
        table, rows, kv_cache, now_ns = self._active.table, plan.rows, self._kv_cache, self._clock.now_ns
        positions = kv_cache.add_tokens(rows)
        if bubble := kv_cache.attention_window.bubble:
            positions = positions - bubble
        host_ns, device_ns = self._executor.step_times(first.context, positions, 1)
        first.submit_s = (now_ns + host_ns) / NANOSECONDS
        self._clock.wait_until_ns(now_ns + host_ns + device_ns[0])
        first.end_s = self._clock.now()
        first.cache = cache = CacheState.of(kv_cache)
        finished = self._advance_context(plan.context, 1)
        confirmed = table.confirmed[rows] + 1
        table.confirmed[rows] = confirmed
        table.generated[rows] += 1
        if kv_cache.num_reuse_changes:
            store_generated(self._active, kv_cache, rows, positions)
        finished += [self._active.by_slot[row] for row in rows[confirmed == table.stop_after[rows]].tolist()]
        times_s = [first.start_s], [first.submit_s], [first.end_s]
        return Stretch(first, finished, *times_s, [0], [0], [0], cache, self._clock.epoch_s)

    def _advance_context(self, context: list[Request], steps: int) -> list[Request]:
        """Advance prompts by their chunk, `steps` times; returns the requests that are complete."""
        finished, table = [], self._active.table
        for request in context:
            is_last = request.is_last_chunk
            request.chunk *= steps
            request.advance_context()
            if is_last:
                request.start_generation()
                self._active.move_to_generation(request)
                table.confirmed[request.slot] = 1
                if self._kv_cache.num_reuse_changes:
                    self._kv_cache.store_generated(request.slot, request.prompt_len - 1)
                if table.stop_after[request.slot] == 1:
                    finished.append(request)
        return finished

    def _times(
        self, context: Sequence[ContextChunk], positions: Rows, steps: int, adapters: AdapterUse | None
    ) -> tuple[int, list[int]]:
        """The host's time in each of at most `steps` iterations, and the start of each and the end of the last,
        [iterations + 1], up to the one that starts after requests have arrived; both in nanoseconds."""
        start_ns = self._clock.now_ns
        change_s = self._next_change(start_ns / NANOSECONDS) if steps > 1 else None
        within_ns = None if change_s is None else int(change_s * NANOSECONDS) - start_ns + 1
        host_ns, device_ns = self._executor.step_times(context, positions, steps, within_ns, adapters)
        times_ns = list(accumulate([time_ns + host_ns for time_ns in device_ns], initial=start_ns))
        if change_s is not None and times_ns[-2] / NANOSECONDS >= change_s:
            del times_ns[bisect_left(times_ns, change_s, hi=len(times_ns) - 1, key=_seconds) + 1 :]
        return host_ns, times_ns


def _seconds(time_ns: int) -> float:
    return time_ns / NANOSECONDS
