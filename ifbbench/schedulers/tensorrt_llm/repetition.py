"""Iterations of a plan that is certain to be decided again: counters, blocks and ends after many of them at once."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ifbbench.clock import Clock
from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.batch import AdapterUse, StepInputs, StepOutputs
from ifbbench.engine.plan import Plan
from ifbbench.engine.records import InFlightIteration
from ifbbench.engine.request import NO_MICRO_BATCH, Request
from ifbbench.engine.stretch import Growth, Positions
from ifbbench.kv.adapters import AdapterCache, OutOfAdapterPages
from ifbbench.kv.attention_window import UNLIMITED, ceil_div
from ifbbench.kv.interface import KvCache
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.paged import PagedCache
from ifbbench.schedulers.ends import NEVER, End, Ends
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.balance import PartsBalance
from ifbbench.schedulers.tensorrt_llm.dynamic_limits import DynamicLimits
from ifbbench.schedulers.tensorrt_llm.policies import CapacityPolicy, make_policy
from ifbbench.schedulers.tensorrt_llm.scheduler import TensorRtLlmScheduler
from ifbbench.settings.modes import BatchingType

# Phase, index of the chunk or LoRA task, and order of a request in a batch.
_Order = tuple[int, int, tuple[float, int]]


class Repetition:
    """Iterations of an executor that returns no tokens, whose decisions are certain: counters, cache and ends follow
    from the plan alone, with the same results as batches.

    Iterations of a plan that is certain to be decided again are advanced together, up to the first one that completes a
    request. Streaming requests get their final response only.

    Such iterations are counted when they are scheduled and when they are collected, and a request ends with a number of
    the latter. The counters in the table lack these steps while plans repeat (`RequestTable.deferred_steps`). With
    overlap, a request whose last step was scheduled is parked until it is collected. With several micro batches, all
    iterations count, in which a request runs at each turn of its own, and the counters are up to date.
    """

    def __init__(
        self,
        config: BatchingConfig,
        active: ActiveRequests,
        kv_cache: KvCache,
        pauses: bool,
        dynamic_limits: DynamicLimits | None = None,
        balance: PartsBalance | None = None,
    ) -> None:
        """pauses: whether the policy may pause requests.
        dynamic_limits: limits of batch size and tokens, where they are tuned.
        balance: balance of the parts of the devices.
        """
        self._active, self._kv_cache = active, kv_cache
        self._config, self._pauses, self._dynamic_limits = config, pauses, dynamic_limits
        self._balance = balance
        self._windows = [window for window in kv_cache.of_windows() if isinstance(window, PagedCache)]
        self._reuses_blocks = config.reuse.enabled
        # Context has a pass of its own, or is padded.
        self._runs_context = config.batching_type is BatchingType.INFLIGHT_FUSED
        self._is_static = config.batching_type is BatchingType.V1
        self._max_in_flight, self._num_turns, self._turn = config.max_in_flight, config.num_micro_batches, 0
        # The ends of the generation requests `_rows`, which are None where they are unknown.
        self._ends = Ends(active.table, config.is_async)
        self._rows: Rows | None = None
        # By row, of requests that end with their first token: the index of their chunk in its batch.
        self._chunk_index: dict[int, int] = {}
        # With several micro batches: the generation requests of those that repeat, the next one first; and of each
        # iteration in flight, its number and the rows that get a token in it.
        self._rows_of: list[Rows] = []
        self._outputs_of: deque[tuple[int, Rows]] = deque()

    @staticmethod
    def works_with(config: BatchingConfig) -> bool:
        """Whether what iterations do follows from their plans."""
        if config.drafts.max_len or config.is_contiguous:
            return False
        if config.max_beam_width > 1 and (config.shares_blocks or config.num_micro_batches > 1):
            return False
        if config.max_in_flight == 1:
            return True
        # An iteration with two passes has two batches in flight.
        return config.batching_type is not BatchingType.INFLIGHT

    @property
    def num_in_flight(self) -> int:
        """Repeated iterations in flight that `confirmed` of a new generation request has to leave out."""
        return 0 if self._num_turns > 1 else self._ends.scheduled - self._ends.collected

    def collected_batch(self) -> None:
        """The oldest iteration in flight, which ran as a batch, was collected."""
        if self._num_turns > 1:
            self._ends.collected += 1

    def horizon(self, plan: Plan, admits: bool, iteration: int, in_flight: Sequence[InFlightIteration]) -> int:
        """For how many iterations `plan` is certain to run, of which only the last one completes a request; 0 if it
        needs a batch.

        admits: whether the policy let a context request run.
        iteration: number of the first.
        """
        if not self._needs_no_batch(plan):
            return 0
        return self._max_steps(plan, self._times_certain(plan, admits), iteration, in_flight)

    def _times_certain(self, plan: Plan, admits: bool) -> int:
        """In how many iterations `plan`, which was just made, is certain to run, this one included, while nothing but
        generation changes what requests can reuse: the one prompt that it has may have tokens for more chunks of the
        same size."""
        active, limits = self._active, self._dynamic_limits
        if self._is_static:
            return UNLIMITED
        if self._num_turns > 1:
            # What fits, and has no chunk in flight, runs in this turn or in one of the next.
            in_flight = active.table.in_other_micro_batch
            may_differ = self._pauses and len(active.context) > 0
            may_differ |= admits and any(not in_flight(request.slot) for request in active.context)
            return 1 if may_differ or limits is not None else UNLIMITED
        if len(plan.context) > 1 or plan.held or plan.paused:
            return 1
        if limits is not None and not limits.is_settled and (active.context or len(plan.rows) > limits.least):
            return 1
        if not plan.context:
            if self._balance is None or not self._balance.holds:
                return UNLIMITED
            return 1 if self._pauses else self._balance.certain
        request, size = plan.context[0], plan.context[0].chunk
        # The first chunk may begin after tokens to reuse.
        may_differ = self._reuses_blocks and request.is_first_chunk
        if self._pauses or may_differ or request.num_draft_tokens:
            return 1
        return 1 + max(0, (request.remaining_context - size - (self._config.chunk_unit or 0)) // size)

    def _needs_no_batch(self, plan: Plan) -> bool:
        """Whether iterations of `plan` need no batches. Those generate tokens again that a pause has dropped, and
        overwrite blocks with ids."""
        active, table, cache, rows = self._active, self._active.table, self._kv_cache, plan.rows
        if active.num_reading_tokens or (plan.held and not self._is_static):
            return False
        # The time of adapters is divided evenly among stages, and counts the tokens of beams.
        if active.num_with_lora and (table.any_wide_steps or self._config.pp_size > 1):
            return False
        if table.any_wide_steps and active.mixed_beam_widths:
            return False
        if not (plan.context or len(rows)) and not table.num_in_flight:
            return False
        if self._num_turns > 1:
            if active.num_with_lora or plan.paused:
                return False
            rows = active.generation_rows
        if plan.context and (table.max_draft_tokens or not self._runs_context):
            return False
        window = cache.attention_window
        if (
            self._reuses_blocks
            and window.wraps
            and (cache.cached_tokens(rows) >= window.capacity - window.bubble).any()
        ):
            return False
        return not (table.any_paused and (cache.cached_tokens(rows) < table.cached_before_pause[rows]).any())

    def _max_steps(self, plan: Plan, certain: int, iteration: int, in_flight: Sequence[InFlightIteration]) -> int:
        """In how many iterations of `plan`, at most `certain`, only the last one completes a request, and blocks
        suffice.

        iteration: number of the first.
        in_flight: the iterations in flight.
        """
        if self._num_turns > 1:
            self._begin_turn(plan, iteration, in_flight)
        batches = [iteration for iteration in in_flight if not (iteration.is_repeated or iteration.is_empty)]
        self._find_events(batches)
        steps = min(certain, *[max_steps(window, self._turn) for window in self._windows])
        if self._reuses_blocks and self._active.context and self._kv_cache.num_reuse_changes:
            # What generation fills is stored, which may change which of the waiting requests starts.
            steps = min(steps, 1 if self._num_turns > 1 else steps_until_block(self._windows[0]))
        if self._num_turns > 1:
            steps = self._certain_turns(plan, steps)
        steps = min(steps, self._ends.steps_to_first(self._max_in_flight, with_ending=True))
        # What a batch in flight completes is not known here. What is stored depends on what was collected, which with
        # several micro batches is each earlier token of a request.
        if self._max_in_flight > 1 and (batches or (self._reuses_blocks and self._num_turns == 1)):
            steps = min(steps, 1)
        for window in self._windows:
            steps = min(steps, fitting_steps(window, steps, plan.valid_until_next_allocation, self._turn))
        return steps

    def _begin_turn(self, plan: Plan, iteration: int, in_flight: Sequence[InFlightIteration]) -> None:
        """Find the generation requests of each micro batch, the one that has its turn first."""
        count = self._num_turns
        turn = self._turn = iteration % count
        self._ends.scheduled = iteration
        self._ends.collected = in_flight[0].record.iteration if in_flight else iteration
        self._kv_cache.join(plan.rows, turn)
        self._rows_of = [plan.rows]
        if not plan.context:
            generation = self._active.generation_rows
            of_each = self._active.table.micro_batch[generation]
            self._rows_of += [generation[of_each == (turn + after) % count] for after in range(1, count)]

    def _certain_turns(self, plan: Plan, steps: int) -> int:
        """For how many iterations, at most `steps`, the plans of the micro batches are certain: each runs its
        generation requests as before, which are no more than its share of the active ones."""
        active, table, config = self._active, self._active.table, self._config
        if plan.context or len(active.generation) > config.max_active:
            return 1
        share = min(config.micro_batch_size, ceil_div(len(active), self._num_turns), config.token_budget)
        for turn, rows in enumerate(self._rows_of):
            if len(rows) > share:
                steps = min(steps, max(turn, 1))
        for request in active.context:  # with chunks in flight, the next one of which runs in the turn of the last
            if (micro_batch := int(table.micro_batch[request.slot])) != NO_MICRO_BATCH:
                steps = min(steps, (micro_batch - self._turn) % self._num_turns)
        if self._pauses:  # none does while each request has the blocks of its next two steps, too
            for window in self._windows:
                if window.count:
                    tokens = window.free_blocks // window.count * config.tokens_per_block
                    steps = min(steps, max((tokens - 2) * self._num_turns, 1))
        return steps

    def cycle(self, plan: Plan) -> list[Plan]:
        """`plan`, and those of the other micro batches in turn."""
        return [plan] + [Plan([], rows, blocked=plan.blocked) for rows in self._rows_of[1:]]

    def positions(self, plan: Plan) -> Positions:
        """Positions of the generation requests of `plan`."""
        cache, rows = self._kv_cache, plan.rows
        if not len(rows):
            return Positions(0, 0, lambda: NO_ROWS)
        group = int(self._windows[0].micro_batches[rows[0]]) if self._num_turns > 1 else 0
        total = self._windows[0].groups[group].tokens - len(rows) * cache.attention_window.bubble
        idle = plan.idle
        if len(idle):
            idle = cache.cached_tokens(idle) - 1
        beam_width = int(self._active.table.step_tokens[rows[0]])
        return Positions(len(rows), total, lambda: cache.cached_tokens(rows), idle, beam_width, rows)

    def repeat(self, plan: Plan, count: int) -> Growth:
        """Schedule `count` iterations of `plan`, at most those of `horizon`."""
        active, windows = self._active, self._windows
        if self._dynamic_limits is not None:
            self._dynamic_limits.skip(active, count - 1)
        if self._balance is not None:
            self._balance.skip(count - 1)
        self._ends.scheduled += count
        if self._num_turns > 1:
            self._run_turns(plan, count)
        else:
            active.table.deferred_steps += count
        if self._max_in_flight == 1:  # now, because what is stored depends on it
            self._collect(count)
        cache, more_new = self._kv_cache, None
        if isinstance(cache, KvCacheManager):
            more_new = self._grow_and_store(cache, plan, count)
            cache.take_copies()  # nothing is copied on such a device
        more_blocks, more_tokens = windows[0].take(count, self._turn)
        more_of_windows: list[list[int]] = []
        if len(windows) > 1:
            taken = [(more_blocks, more_tokens), *[window.take(count, self._turn) for window in windows[1:]]]
            more_of_windows = [of_window[0] for of_window in taken]
            more_blocks, more_tokens = np.sum(taken, axis=0).tolist()
        more_new = more_blocks if more_new is None else more_new
        growth = Growth(cache.state(), more_blocks, more_tokens, more_new, more_of_windows)
        growth.recomputed = self._advance_context(plan.context, count)
        for request in self._ends.finish_scheduling():
            self._park(request)
        self._rows = None if self._awaits_turn else active.generation_rows
        return growth

    def used_blocks_after(self, count: int) -> int:
        """Blocks in use once `count` iterations of the plan that was just decided have run."""
        more = [sum(window.starting(count, self._turn)) for window in self._windows]
        return self._kv_cache.num_used + sum(more)

    @property
    def _awaits_turn(self) -> bool:
        """Whether a generation request waits for its first turn, which need not be the next iteration: its end is found
        again."""
        if self._num_turns == 1:
            return False
        micro_batches = self._active.table.micro_batch[self._active.generation_rows]
        return bool((micro_batches == NO_MICRO_BATCH).any())

    def _grow_and_store(self, cache: KvCacheManager, plan: Plan, steps: int) -> list[int]:
        """Take the blocks of `steps` steps, one step after the other, and store those that each step finds filled after
        it has taken blocks, which may evict what was stored before: first those of the prompts that it completes, then
        those of generation. Of equal blocks the first remains, so that the order decides when it is free. Returns the
        blocks without known tokens that were taken after each step since the first, [steps]."""
        completing = [request for request in plan.context if request.is_last_chunk]
        if not completing and self._num_turns == 1 and steps_until_block(cache) > steps:
            return [0] * steps
        size, turns, table = cache.attention_window.tokens_per_block, self._num_turns, self._active.table
        # By step, of each request that starts a block in it: its row, its tokens, and how many steps it has had before.
        starting: dict[int, list[tuple[int, int, int]]] = {}
        for turn, rows in enumerate([plan.rows] if turns == 1 else self._rows_of[:steps]):
            all_registered = (cache.cached_tokens(rows) + cache.attention_window.bubble).tolist()
            for row, registered in zip(rows.tolist(), all_registered, strict=True):
                for before in range(-registered % size, (steps - turn + turns - 1) // turns, size):
                    starting.setdefault(turn + before * turns, []).append((row, registered + before, before))
        counters, new_blocks = cache.counters, list[int]()
        for step in range(steps):
            growing = starting.get(step, ())
            if growing:
                cache.grow(np.array([row for row, _, _ in growing]), np.array([tokens for _, tokens, _ in growing]))
            new_blocks.append(counters.allocated_new)
            for request in completing:
                cache.store_generated(request.slot, request.prompt_len - 1)
            for row, tokens, before in growing:
                # By then the tokens of its steps before this one are collected. They are counted after the last step.
                uncounted = before if turns > 1 else 0
                table.confirmed[row] += uncounted
                cache.store_known(self._active.by_slot[row], tokens)
                table.confirmed[row] -= uncounted
        return [after - new_blocks[0] for after in new_blocks]

    def _run_turns(self, plan: Plan, count: int) -> None:
        """`count` iterations are scheduled, of which each micro batch has its turns."""
        table, first = self._active.table, self._ends.scheduled - count
        for turn, rows in enumerate(self._rows_of[:count]):
            table.generated[rows] += ceil_div(count - turn, self._num_turns)
        table.micro_batch[plan.rows] = self._turn
        table.micro_batch[[request.slot for request in plan.context]] = self._turn
        for after in range(count):
            rows = self._rows_of[after % len(self._rows_of)]
            if plan.context:
                completing = [request.slot for request in plan.context if request.is_last_chunk]
                rows = np.concatenate([np.array(completing, np.int64), rows])
            if len(rows):
                self._outputs_of.append((first + after, rows))

    def confirm(self, count: int) -> list[Request]:
        """The oldest `count` repeated iterations in flight are collected. Returns the requests that they complete."""
        if self._max_in_flight > 1:
            self._collect(count)
        is_known = self._rows is self._active.generation_rows
        if not is_known:  # batches have run since these iterations were scheduled
            self._active.settle()
            self._find_events([])
        finished = self._ends.completed()
        for request in finished:
            self._end(request)
        self._rows = self._active.generation_rows if is_known else None
        return finished

    def _collect(self, count: int) -> None:
        table = self._active.table
        self._ends.collect(count)
        if self._num_turns > 1:
            while self._outputs_of and self._outputs_of[0][0] < self._ends.collected:
                table.confirmed[self._outputs_of.popleft()[1]] += 1
            return
        table.deferred_confirmed += count

    def leave(self, iteration: int) -> None:
        """`iteration`, the next one, runs as a batch."""
        self._active.settle()
        self._rows = None
        if self._num_turns > 1:
            self._ends.scheduled = iteration + 1

    def joined(self, requests: Sequence[Request], before: Rows) -> None:
        """`requests`, which have their prompts from elsewhere, are in generation. before: its rows without them."""
        for request in requests:  # the iterations in flight do not count for it
            self._active.table.confirmed[request.slot] -= self.num_in_flight
        if self._rows is before and self._num_turns == 1:
            for request in requests:
                self._ends.add(self._order_of(request), request)
            self._rows = self._active.generation_rows

    def parked(self, request: Request) -> None:
        """The last step of `request` is in flight, in a batch."""
        self._ends.ending[request] = NEVER, self._order_of(request)  # until it is known

    def forget(self, request: Request) -> None:
        """`request` has left."""
        self._ends.left(request)
        self._chunk_index.pop(request.slot, None)
        if self._outputs_of:
            self._outputs_of = deque([(number, rows[rows != request.slot]) for number, rows in self._outputs_of])

    def _find_events(self, batches: Sequence[InFlightIteration]) -> None:
        """Find when requests end, unless it is known of these generation requests. batches: in flight."""
        active, table, rows = self._active, self._active.table, self._active.generation_rows
        if self._rows is rows:
            return
        in_batches = set[int]()
        for iteration in batches:
            in_batches.update(iteration.output_rows.tolist())
        ends, ending = list[tuple[int, Any, Request]](), dict[Request, End]()
        for request in [*active.generation, *self._ends.ending]:
            row, order, end = request.slot, self._order_of(request), NEVER
            remaining = int(table.stop_after[row]) - int(table.confirmed[row])
            if request.in_generation:
                remaining -= table.deferred_confirmed
            if self._num_turns > 1:
                end = self._end_of_turns(row, remaining)
            elif row not in in_batches or remaining > 1:  # else it ends with that batch
                end = self._ends.collected + remaining - (row in in_batches)
            if request.in_generation:
                ends.append((end, order, request))
            else:
                ending[request] = end, order
        self._ends.replace(ends, ending)
        self._rows = None if self._awaits_turn else rows

    def _end_of_turns(self, row: int, remaining: int) -> int:
        """The collected number with which the generation request in `row` has `remaining` more tokens, one at each turn
        of its micro batch."""
        turns, following = self._num_turns, self._ends.scheduled
        micro_batch = int(self._active.table.micro_batch[row])
        if micro_batch != NO_MICRO_BATCH:  # else it runs in the next iteration
            following -= (following - 1 - micro_batch) % turns + 1
            if following < self._ends.collected:  # its latest iteration, which was collected
                following += turns
        return following + 1 + (remaining - 1) * turns

    def _order_of(self, request: Request) -> _Order:
        """The requests that end with one iteration are in the order of its batch: first those that end with the first
        token after their prompt, by chunk, then those in generation."""
        index = self._chunk_index.get(request.slot)
        if index is not None:
            return 0, index, request.order
        return 1, -1 if request.lora_task_id is None else request.lora_task_id, request.order

    def _park(self, request: Request) -> None:
        """The last step of a request is in flight."""
        table, row = self._active.table, request.slot
        table.generated[row] += table.deferred_steps
        table.confirmed[row] += table.deferred_confirmed
        self._active.park(row)
        self._kv_cache.end_generation(row)

    def _end(self, request: Request) -> None:
        """A request has all its tokens."""
        table, row = self._active.table, request.slot
        if request.in_generation:
            self._active.park(row)
            self._kv_cache.end_generation(row)
        self._ends.left(request)
        table.generated[row] = table.confirmed[row] = table.stop_after[row]

    def _advance_context(self, context: list[Request], steps: int) -> int:
        """Advance prompts by their chunk, `steps` times; returns how many of these tokens were computed before a
        pause."""
        table, active, recomputed = self._active.table, self._active, 0
        for index, request in enumerate(context):
            is_last = request.is_last_chunk
            request.chunk *= steps
            recomputed += request.advance_context()
            if is_last:
                row = request.slot
                request.start_generation()
                active.move_to_generation(request)
                self._kv_cache.begin_generation(row, self._turn)
                table.generated[row] = 1 - table.deferred_steps
                # The iterations in flight before this one do not count for it.
                table.confirmed[row] = 1 - table.deferred_confirmed - self.num_in_flight
                if self._num_turns > 1:
                    table.confirmed[row] = 0
                if int(table.stop_after[row]) == 1:
                    self._chunk_index[row] = index
                self._ends.add(self._order_of(request), request, self._num_turns)
        return recomputed


def max_steps(cache: PagedCache, first: int = 0) -> int:
    """The maximum number of steps from now on, up to the one with which a sequence reaches the capacity. Steps are
    those of all groups in turn. first: the group that has its turn."""
    steps, count = UNLIMITED, len(cache.groups)
    for turn in range(count):
        group = cache.groups[(first + turn) % count]
        if group.wraps:
            steps = min(steps, turn + (group.wraps[0][0] - group.step) * count)
    return steps


def steps_until_block(cache: PagedCache) -> int:
    """In how many steps of the first group a block is taken, that step included."""
    group = cache.groups[0]
    for step, blocks in enumerate(group.starting(len(group.growing)), start=1):
        if blocks:
            return step
    return UNLIMITED


def fitting_steps(cache: PagedCache, steps: int, until_block: bool = False, first: int = 0) -> int:
    """How many of the next `steps` steps, at most `max_steps`, take no more blocks than are free; with `until_block`,
    none after the first one."""
    free, width = cache.free_blocks, cache.attention_window.max_beam_width
    if not until_block and cache.count * width * -(-steps // cache.attention_window.tokens_per_block) <= free:
        return steps
    blocks = list(accumulate(cache.starting(steps, first)))
    limit = min(free, blocks[0] if until_block else blocks[-1])
    return steps if blocks[-1] <= limit else bisect_right(blocks, limit)


class RepeatingScheduler(TensorRtLlmScheduler):
    """A scheduler on a device whose times are known in advance: iterations of a plan that repeats run together."""

    def __init__(
        self, config: BatchingConfig, clock: Clock, policy: CapacityPolicy, adapters: AdapterCache | None
    ) -> None:
        super().__init__(config, clock, policy, adapters, False)
        self._repetition = Repetition(
            config, self.active, self.kv_cache, self._may_pause, self._dynamic_limits, self._balance
        )
        self._in_flight: Sequence[InFlightIteration] = ()
        # Whether iterations were collected during the latest decision: what they completed left batch slots, which the
        # next iteration may give to requests that wait.
        self._has_collected = False

    # Single iterations.

    def remove(self, request: Request) -> None:
        if request.table is not None:
            self._repetition.forget(request)
        super().remove(request)

    def keep(self, request: Request) -> None:
        self._repetition.forget(request)
        super().keep(request)

    def receive(self, requests: Sequence[Request]) -> None:
        before = self.active.generation_rows
        super().receive(requests)
        if self._loads is None:
            self._repetition.joined(requests, before)

    def schedule(
        self, iteration: int, now_s: float, in_flight: Sequence[InFlightIteration], collect: Callable[[], None]
    ) -> Plan:
        num_before = len(in_flight)
        plan = super().schedule(iteration, now_s, in_flight, collect)
        self._in_flight, self._has_collected = in_flight, len(in_flight) < num_before
        return plan

    def allocate(self, plan: Plan) -> StepInputs:
        self._repetition.leave(self._iteration)
        return super().allocate(plan)

    def advance(self, plan: Plan, iteration: int) -> int:
        recomputed = super().advance(plan, iteration)
        for chunk in plan.chunks:
            if chunk.is_last:
                self.table.confirmed[chunk.request.slot] = -self._repetition.num_in_flight
        return recomputed

    def update(self, iteration: InFlightIteration, outputs: Sequence[StepOutputs]) -> list[Request]:
        if iteration.is_repeated:
            return self.confirm(1)
        self._repetition.collected_batch()
        self.active.settle()
        return super().update(iteration, outputs)

    def _park(self, row: int) -> None:
        super()._park(row)
        self._repetition.parked(self.table.requests[row])

    # Many iterations.

    def horizon(self, plan: Plan) -> int:
        steps = self._repetition.horizon(plan, self._admits, self._iteration, self._in_flight)
        is_alone = self._has_collected or (self._loads is not None and len(plan.context) > 0)
        return min(steps, 1) if is_alone else steps

    def cycle(self, plan: Plan) -> Sequence[Plan]:
        return [plan] if self.num_micro_batches == 1 else self._repetition.cycle(plan)

    def positions(self, plan: Plan) -> tuple[Positions, AdapterUse | None]:
        adapters = None
        if self.adapters is not None and self.active.num_with_lora:
            try:
                adapters = self._use_adapters(self.adapters, plan)
            except OutOfAdapterPages as error:
                raise self._does_not_fit(error) from error
        return self._repetition.positions(plan), adapters

    def repeat(self, plan: Plan, count: int) -> Growth:
        if self.adapters is not None and self.active.num_with_lora and count > 1:
            self._use_adapters(self.adapters, plan, count - 1)
        growth = self._repetition.repeat(plan, count)
        if self._loads is not None:
            self._loads.submitted(plan.chunks, count)
        if self._any_retention:
            self.kv_cache.refresh(self._now_s)
        return growth

    def used_blocks_after(self, plan: Plan, count: int) -> int | None:
        return self._repetition.used_blocks_after(count)

    def confirm(self, count: int) -> list[Request]:
        done = self._repetition.confirm(count)
        if self._loads is not None:
            self._loads.collected(count)
        return done if self._v1_batch is None else self._v1_batch.add_complete(done)


def make_scheduler(config: BatchingConfig, clock: Clock, is_predicted: bool = False) -> TensorRtLlmScheduler:
    """TensorRT-LLM's scheduler. is_predicted: whether the loop knows in advance how long iterations take, so that those
    of a plan that repeats can run together."""
    adapters = AdapterCache(config.lora) if config.lora else None
    policy = make_policy(config, adapters)
    if is_predicted and getattr(policy, "is_steady", False) and Repetition.works_with(config):
        return RepeatingScheduler(config, clock, policy, adapters)
    return TensorRtLlmScheduler(config, clock, policy, adapters, config.reads_block_tables)
