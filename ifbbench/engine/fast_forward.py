"""Fast-forward: iterations of which the times are known run without batches, and many together between two events."""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

import numpy as np

from ifbbench.clock import NANOSECONDS, Clock, VirtualClock, to_seconds
from ifbbench.engine.active import ActiveRequests, Rows
from ifbbench.engine.batch import ContextChunk, Positions
from ifbbench.engine.config import BatchingConfig, BatchingType
from ifbbench.engine.in_flight import store_known
from ifbbench.engine.interfaces import Executor, PredictableExecutor
from ifbbench.engine.records import CacheState, IterationRecord, Stretch
from ifbbench.engine.request import Request
from ifbbench.kv.adapters import AdapterCache, AdapterUse, distinct_tasks
from ifbbench.kv.blocks import OutOfBlocks
from ifbbench.kv.counted import CountedCache, blocks_ahead, fitting_steps
from ifbbench.kv.interface import KvCache
from ifbbench.kv.manager import KvCacheManager
from ifbbench.schedulers.tensorrt_llm.admission import NextChange
from ifbbench.schedulers.tensorrt_llm.scheduler import Plan

# Longer stretches are no faster per iteration, and no progress is shown while one is computed.
MAX_STEPS = 1024


class StepsAhead:
    """The next steps of generation requests of one beam in a cache with reuse, until a sequence wraps. The blocks that
    sequences fill are stored, which may change which of the waiting requests starts. A CountedCache answers the same.

    completing: requests on their last chunk, which the first step completes and is then the only one.
    tokens: that the sequences have registered together. max_steps: how many steps are known.
    """

    def __init__(
        self, cache: KvCacheManager, active: ActiveRequests, rows: Rows, completing: Sequence[Request]
    ) -> None:
        self._cache, self._active, self._rows, self._completing = cache, active, rows, completing
        self._registered = registered = cache.registered[rows]
        self._size = cache.attention_window.tokens_per_block
        self._until_block = -registered % self._size
        self.tokens = int(np.add.reduce(registered))
        self.max_steps = cache.attention_window.capacity - int(registered.max(initial=0))
        if cache.num_reuse_changes and active.context:
            self.max_steps = min(self.max_steps, int(self._until_block.min(initial=MAX_STEPS)) + 1)

    def fitting_steps(self, steps: int, until_block: bool = False) -> int:
        """How many of the next `steps` steps, at most `max_steps`, take no more blocks than are free; with
        `until_block`, none after the first one."""
        growing: list[int] = np.bincount(self._until_block, minlength=self._size).tolist()
        self._blocks = blocks_ahead(growing, 0, steps)
        return fitting_steps(self._blocks, self._cache.free_blocks, until_block)

    def take(self, steps: int) -> tuple[list[int], list[int], list[int]]:
        """Advance the cache by `steps` steps, at most those of `fitting_steps`, with the result of as many calls of
        `add_tokens`, after the counters of the requests. Returns the blocks, the places and the blocks without known
        tokens that all requests together have taken after each step since the first, [steps]."""
        blocks, count = self._blocks[:steps], len(self._rows)
        places = [step * count for step in range(steps)]
        new_blocks = self._grow_and_store(steps) if blocks[-1] or self._completing else blocks
        self._cache.register(self._rows, self._registered + steps, steps * count)
        return [after - blocks[0] for after in blocks], places, [after - new_blocks[0] for after in new_blocks]

    def _grow_and_store(self, steps: int) -> list[int]:
        """Take blocks step by step, and store those that each step finds filled after it has taken blocks, which may
        evict what was stored before: first those of the prompts that it completes, then those of generation. Of equal
        blocks the first remains, so that the order decides when it is free. Returns the blocks without known tokens
        taken after each step, [steps]."""
        starting: dict[int, list[int]] = {}
        for index, until_block in enumerate(self._until_block.tolist()):
            for step in range(until_block, steps, self._size):
                starting.setdefault(step, []).append(index)
        counters, new_blocks = self._cache.counters, list[int]()
        before = counters.allocated_new
        for step in range(steps):
            indices = starting.get(step)
            if indices is not None:
                self._cache.grow(self._rows[indices])
            new_blocks.append(counters.allocated_new - before)
            for request in self._completing:
                self._cache.store_generated(request.slot, request.prompt_len - 1)
            if indices is not None:
                registered = self._registered[indices] + step
                for row, num_tokens in zip(self._rows[indices].tolist(), registered.tolist(), strict=True):
                    store_known(self._active.by_slot[row], self._cache, num_tokens)
        return new_blocks


class FastForward:
    """Runs iterations on a virtual clock without batches and outputs: of an executor that can predict its times and
    returns no tokens. It advances counters, cache and clock, with the same results as batches.

    Iterations that a plan is certain to stand for are advanced together. Such a stretch ends with the first iteration
    that completes a request, before the one that starts after more requests have arrived, and before blocks run out.
    Streaming requests get their final response only.
    """

    def __init__(
        self,
        config: BatchingConfig,
        executor: Executor,
        clock: Clock,
        active: ActiveRequests,
        kv_cache: KvCache,
        next_change: NextChange | None,
        adapters: AdapterCache | None = None,
    ) -> None:
        """With these, `can_run` is true."""
        assert isinstance(executor, PredictableExecutor)
        assert isinstance(clock, VirtualClock)
        assert next_change is not None
        self._executor, self._clock, self._active, self._adapters = executor, clock, active, adapters
        self._kv_cache = kv_cache
        self._counted = [window for window in kv_cache.of_windows() if isinstance(window, CountedCache)]
        self._next_change = next_change
        self._runs_context = config.batching_type is not BatchingType.INFLIGHT
        # Steps of the generation requests so far. A heap of the steps with which those in `_rows` end, with their rows,
        # in the order of a batch.
        self._step = 0
        self._ends: list[tuple[int, int, tuple[float, int], int]] = []
        self._rows: Rows | None = None

    @staticmethod
    def can_run(config: BatchingConfig, executor: Executor, clock: Clock, next_change: NextChange | None) -> bool:
        """Whether the times of iterations can be predicted, and what they do follows from their plan."""
        if not isinstance(executor, PredictableExecutor) or not isinstance(clock, VirtualClock) or next_change is None:
            return False
        if config.batching_type is BatchingType.V1 or config.has_dynamic_limits or config.drafts.max_len:
            return False
        return config.max_in_flight == config.max_beam_width == 1 and not config.is_contiguous

    def may_run(self, plan: Plan) -> bool:
        """Whether iterations of `plan` need no batches. Those load adapters, count tokens that are computed again after
        a pause, and overwrite blocks with ids."""
        active, table, cache, rows = self._active, self._active.table, self._kv_cache, plan.rows
        if active.num_reading_tokens or plan.paused or plan.held or not (plan.context or len(rows)):
            return False
        if plan.context and (
            active.num_with_lora or table.any_paused or table.max_draft_tokens or not self._runs_context
        ):
            return False
        may_wrap = not self._counted and cache.attention_window.wraps
        if may_wrap and (cache.registered[rows] >= cache.attention_window.capacity).any():
            return False
        if table.any_paused and (cache.cached_tokens(rows) < table.cached_before_pause[rows]).any():
            return False
        if self._adapters is None or not active.num_with_lora:
            return True
        return self._adapters.has(distinct_tasks(table.lora_tasks[rows]))

    def start_context(self, plan: Plan) -> list[ContextChunk]:
        """The chunks of the first iteration of `plan`, for which the blocks of new prompts are taken."""
        for request in plan.context:
            if request.is_first_chunk:
                reused = self._kv_cache.add_request(request, self._clock.now())
                request.set_prepopulated(reused, self._kv_cache.attention_window.tokens_per_block)
        self._kv_cache.take_copies()  # nothing is copied on this device
        return [ContextChunk(request, request.position, request.chunk) for request in plan.context]

    def advance(self, plan: Plan, first: IterationRecord, max_steps: int) -> Stretch:
        """Advance at most `max_steps` iterations of `plan`. Raises OutOfBlocks if the first one takes more blocks than
        are free.

        first: record of the first iteration, without its times; it becomes part of the result."""
        active, table, rows = self._active, self._active.table, plan.rows
        ahead: Sequence[CountedCache | StepsAhead] = self._counted
        if not ahead and isinstance(self._kv_cache, KvCacheManager):
            completing = [request for request in plan.context if request.is_last_chunk]
            ahead = [StepsAhead(self._kv_cache, active, rows, completing)]
        self._find_ends()
        max_steps = min(max_steps, MAX_STEPS, *[window.max_steps for window in ahead])
        if self._ends:
            max_steps = min(max_steps, self._ends[0][0] - self._step)
        positions = Positions(self._kv_cache, rows, ahead[0].tokens)
        has_adapters = self._adapters is not None and active.num_with_lora > 0
        adapters = AdapterUse(table.lora_tasks[rows]) if has_adapters else None
        host_ns, times_ns = self._times(first.context, positions, max_steps, adapters)
        steps = len(times_ns) - 1
        for window in ahead:
            steps = min(steps, window.fitting_steps(steps, plan.stands_until_block))
        if not steps:
            raise OutOfBlocks("generation needs more KV cache blocks than are free")
        if self._adapters is not None and adapters is not None:
            self._adapters.use(distinct_tasks(adapters.tasks), steps)
        self._step += steps
        table.unsettled += steps
        more_blocks, more_tokens, more_new = ahead[0].take(steps)
        more_of_windows: list[list[int]] = []
        if len(ahead) > 1:
            taken = [(more_blocks, more_tokens, more_new), *[window.take(steps) for window in ahead[1:]]]
            more_of_windows = [of_window[0] for of_window in taken]
            more_blocks, more_tokens, more_new = np.sum(taken, axis=0).tolist()
        cache = CacheState.of(self._kv_cache)
        finished = self._advance_context(plan.context, steps)
        while self._ends and self._ends[0][0] == self._step:
            finished.append(self._end(heappop(self._ends)[3]))
        self._rows = active.generation_rows
        self._clock.wait_until_ns(times_ns[steps])
        start_s = [to_seconds(time_ns) for time_ns in times_ns[: steps + 1]]
        submit_s = [to_seconds(time_ns + host_ns) for time_ns in times_ns[:steps]]
        first.cache = cache
        if steps > 1:
            of_windows = [-more[-1] for more in more_of_windows]
            first.cache = cache.moved(-more_blocks[-1], -more_tokens[-1], -more_new[-1], of_windows)
        first.submit_s, first.end_s = submit_s[0], start_s[1]
        return Stretch(
            first,
            finished,
            start_s[:-1],
            submit_s,
            start_s[1:],
            more_blocks,
            more_tokens,
            more_new,
            cache,
            self._clock.epoch_s,
            more_of_windows,
        )

    def leave(self) -> None:
        """The next iteration runs as a batch."""
        self._active.settle()
        self._rows = None

    def _find_ends(self) -> None:
        """Find when requests end, unless it is known of these generation requests."""
        active, rows = self._active, self._active.generation_rows
        if self._rows is rows:
            return
        self._ends = [self._end_of(request) for request in active.generation]
        heapify(self._ends)
        self._rows = rows

    def _end_of(self, request: Request) -> tuple[int, int, tuple[float, int], int]:
        table, row = self._active.table, request.slot
        remaining = int(table.stop_after[row] - table.confirmed[row])
        task = -1 if request.lora_task_id is None else request.lora_task_id
        return self._step - table.unsettled + remaining, task, request.order, row

    def _end(self, row: int) -> Request:
        """The request in `row` has all its tokens."""
        table, request = self._active.table, self._active.by_slot[row]
        self._active.park(row)
        table.generated[row] = table.confirmed[row] = table.stop_after[row]
        return request

    def _advance_context(self, context: list[Request], steps: int) -> list[Request]:
        """Advance prompts by their chunk, `steps` times; returns the requests that are complete."""
        finished, table, active = [], self._active.table, self._active
        for request in context:
            is_last = request.is_last_chunk
            request.chunk *= steps
            request.advance_context()
            if is_last:
                row = request.slot
                request.start_generation()
                active.move_to_generation(request)
                self._kv_cache.begin_generation(row)
                table.generated[row] = table.confirmed[row] = 1 - table.unsettled
                if table.stop_after[row] == 1:
                    finished.append(self._end(row))
                else:
                    heappush(self._ends, self._end_of(request))
        return finished

    def _times(
        self, context: Sequence[ContextChunk], positions: Positions, steps: int, adapters: AdapterUse | None
    ) -> tuple[int, list[int]]:
        """The host's time in each of at most `steps` iterations, and the start of each and the end of the last,
        [iterations + 1], up to the one that starts after requests have arrived; both in nanoseconds."""
        start_ns = self._clock.now_ns
        change_s = self._next_change(to_seconds(start_ns)) if steps > 1 else None
        within_ns = None if change_s is None else int(change_s * NANOSECONDS) - start_ns + 1
        host_ns, device_ns = self._executor.step_times(context, positions, steps, within_ns, adapters)
        times_ns = list(accumulate([time_ns + host_ns for time_ns in device_ns], initial=start_ns))
        if change_s is not None and to_seconds(times_ns[-2]) >= change_s:
            del times_ns[bisect_left(times_ns, change_s, hi=len(times_ns) - 1, key=to_seconds) + 1 :]
        return host_ns, times_ns
