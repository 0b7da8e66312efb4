"""vLLM's scheduler behind the border of the engine (`Scheduler` and `AsyncScheduler` of vLLM 0.32): its queue, its
running requests and their outputs. What an iteration runs is decided in planner.py."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ifbbench.clock import Clock
from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.batch import AdapterUse, BatchLayout, BlockCopy, StepInputs, StepOutputs
from ifbbench.engine.passes import confirm
from ifbbench.engine.plan import ContextChunk, LeftOut, Limit, Plan
from ifbbench.engine.records import CacheState, InFlightIteration
from ifbbench.engine.request import Request
from ifbbench.engine.stretch import Growth, Positions
from ifbbench.kv.tiers import KvTiers
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.queueing import QueueingScheduler, Submitted
from ifbbench.schedulers.vllm.blocks import NOT_SHARED
from ifbbench.schedulers.vllm.drafts import Drafts
from ifbbench.schedulers.vllm.in_flight import Scheduled, in_order_of
from ifbbench.schedulers.vllm.planner import Planner
from ifbbench.schedulers.vllm.repetition import repeat
from ifbbench.schedulers.vllm.rules import TOGETHER
from ifbbench.schedulers.vllm.state import VllmState
from ifbbench.schedulers.vllm.step import NO_MAXIMUM, Step


class VllmScheduler(QueueingScheduler):
    """A `Scheduler` with the rules of vLLM.

    running: running requests, in the order of admission.
    scheduled_rows: what the latest decision runs, in the order in which it was scheduled.
    """

    def __init__(self, limits: BatchingConfig, clock: Clock, is_predicted: bool = False) -> None:
        """ValueError without the rules of vLLM."""
        if limits.vllm is None:
            raise ValueError("the limits have no rules of vLLM; resolve a configuration with the engine vllm")
        state = VllmState(limits, limits.vllm, is_predicted)
        super().__init__("vLLM's scheduler", limits, state.table, is_predicted and not limits.drafts.max_len)
        self.rules, self.state = limits.vllm, state
        self.kv_cache, self.queue, self.running = state.kv_cache, state.queue, state.running
        tables = tuple(group.block_tables for group in self.kv_cache.groups)
        self.layout = BatchLayout(tables, limits.tokens_per_block, limits.max_in_flight)
        self.drafts = Drafts(limits.drafts, self.table) if limits.drafts.max_len else None
        self._planner = Planner(state, self.drafts)
        self._step = Step(0, 0, 0)
        self._num_arrived = 0
        self.scheduled_rows: Rows = NO_ROWS

    # The queue.

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that have not run yet."""
        if not self.state.num_with_rows:
            return self.queue.requests
        return [request for request in self.queue.requests if request.table is None]

    def _enqueue(self, request: Request) -> None:
        self._num_arrived += 1
        number = request.order[1] or self._num_arrived * TOGETHER  # a caller may have numbered it
        request.order = (-request.priority if self.rules.is_priority else 0.0, number)
        self.queue.add(request)

    def _has_room_in_queue(self, max_queue_size: int) -> bool:
        """Requests that the next iteration may start take no room."""
        return len(self.queue) < max_queue_size + self.state.max_running - len(self.running)

    def remove(self, request: Request) -> None:
        self._forget(request)
        row = request.slot
        if request in self.running.requests:
            self._leave_running(request)
            if self.kv_cache.held[row]:
                self._write_outputs(request)
                self.state.release(request)
        elif request in self.state.transferring:
            self.state.end_transfer(request)
            self.state.release(request)
            if self.state.tiers is not None:
                self.state.tiers.forget(request)
        else:
            self.queue.remove(request)
            if self.state.tiers is not None:
                self.state.tiers.forget(request)
            self.state.num_with_rows -= request.table is not None
            if request.table is not None and self.kv_cache.held[row]:
                self.state.release(request)
        self.kv_cache.forget(request)
        if request.table is not None:
            self.state.in_flight.drop(row)
            request.leave()
        request.complete()

    def _leave_running(self, request: Request) -> None:
        if self.state.generation.is_active and self.state.generation.remove(request):
            self.running.finish_scheduling(request)
        self.running.remove(request)

    # Keys and values that are sent to other engines, or come from them (connectors).

    def keep(self, request: Request) -> None:
        self._leave_running(request)
        if request.in_generation:
            request.finish_scheduling()
        self.state.in_flight.drop(request.slot)
        self.state.begin_transfer(request)

    def receive(self, requests: Sequence[Request]) -> None:
        """They go before all others; the last token of each prompt is computed again, if it has come too."""
        for request in requests:
            number = self.state.end_transfer(request)
            computed = min(request.remote_len, request.prompt_len - 1)
            self.kv_cache.filled_tokens += computed - request.position
            request.position = request.prepopulated = computed
            self.kv_cache.set_hashes(request, computed)
            self.queue.add_received(request, number)
            self.state.num_with_rows += 1

    def take_copies(self) -> tuple[BlockCopy, ...]:
        return ()

    # Stores beneath the device memory.

    def use_tiers(self, tiers: KvTiers) -> None:
        """Load blocks from stores, and write them there. Called once, before the first request."""
        self.state.tiers = tiers
        if tiers.writes_back:
            self.kv_cache.pool.evicted = []
            if not self.kv_cache.pool.has_ids:
                self.kv_cache.pool.give_ids([], [])

    def _write_outputs(self, request: Request) -> None:
        """A request ends: write the blocks that its outputs fill. Its last token was not computed."""
        if (tiers := self.state.tiers) is not None and not tiers.writes_back and not request.in_context:
            known = self.state.known_of(request)
            tiers.write_filled(self.kv_cache.names, request, request.prompt_len, known - 1)

    def _write_evicted(self, tiers: KvTiers) -> None:
        """Write the blocks that were evicted from the device: of a prompt, the last ones first."""
        if evicted := self.kv_cache.pool.evicted:
            tiers.write([None if one == NOT_SHARED else one for one in reversed(evicted)])
            evicted.clear()

    # One iteration.

    def schedule(
        self, iteration: int, now_s: float, in_flight: Sequence[InFlightIteration], collect: Callable[[], None]
    ) -> Plan:
        if self._is_predicted:
            self._join()
        step = self._step = self._planner.decide()
        for request, tokens in step.chunks.items():
            request.set_chunk(tokens)
        rows, held = step.rows, list[Request]()
        if step.has_ended:
            runs = set(rows.tolist())
            held = [one for one in self.running if one.in_generation and one.slot not in runs]
        if (first := self._first_cut(step, held)) is not None:
            step.blocked.insert(0, LeftOut(first, Limit.NUM_TOKENS))
        if self.state.tiers is not None:
            self._write_evicted(self.state.tiers)
            self.state.tiers.has_queue = len(self.queue) > 0
        self.scheduled_rows = step.order
        return Plan(
            list(step.chunks),
            rows,
            held=held,
            paused=step.paused,
            blocked=(*[LeftOut(pause.victim, pause.limit) for pause in step.paused], *step.blocked),
            chunks=tuple([ContextChunk(request, request.position, request.chunk) for request in step.chunks]),
            entered=step.entered,
            num_ending=self.running.num_ending,
            receiving=step.receiving,
            awaits_stores=step.awaits_stores,
        )

    def _join(self) -> None:
        """Let the generation requests run together, if it is likely that all of them run."""
        generation, running = self.state.generation, self.running
        if self._num_reading or self.table.shares_outputs:
            self.state.part()
        elif not (generation.is_active or running.num_ending or self._step.has_ended or self._step.paused):
            requests = [(running.numbers[one], one) for one in running if one.in_generation]
            if all(one.num_generated < int(self.table.stop_after[one.slot]) for _, one in requests):
                generation.begin(requests)

    def _first_cut(self, step: Step, held: Sequence[Request]) -> Request | None:
        """The first running request that got fewer tokens than it needs, or none, because of a budget or the cap."""
        cut = [one for one, tokens in step.chunks.items() if tokens < one.remaining_context]
        if step.has_ended:
            cut += held
            cut += [one for one in self.running if one.in_context and one not in step.chunks]
        return min(cut, key=self.running.requests.index) if cut else None

    def allocate(self, plan: Plan) -> StepInputs:
        """The blocks were taken with the decision."""
        self.kv_cache.filled_tokens += self._step.num_tokens
        drafts = None
        if self.drafts is not None:
            drafts = self.drafts.inputs([chunk.request for chunk in plan.chunks if chunk.is_last], plan.rows)
        return StepInputs(self.state.computed[plan.rows], drafts=drafts)

    def advance(self, plan: Plan, iteration: int) -> int:
        recomputed, state, rows = 0, self.state, self.scheduled_rows
        generation, is_joint = state.generation, state.generation.is_active
        if is_joint:
            generation.advance(1)
        else:
            self.table.generated[plan.rows] += 1
            state.computed[plan.rows] += 1
        tokens = self.table.step_tokens[rows] if self.kv_cache.windowed else None
        for chunk in plan.chunks:
            if tokens is not None:
                tokens[rows == chunk.request.slot] = chunk.length + chunk.request.num_draft_tokens
            recomputed += chunk.request.advance_context()
            if chunk.is_last:
                chunk.request.start_generation()
                state.computed[chunk.request.slot] = chunk.request.prompt_len
                self.running.changed()
                if is_joint:
                    generation.enter(chunk.request, generation.num_in_flight - 1)  # this one counts
                    generation.follow(self.running.numbers[chunk.request], chunk.request)
        outputs = plan.output_rows()
        scheduled = Scheduled(rows, outputs, tokens, is_joint)
        if state.tiers is not None and not state.tiers.writes_back:
            scheduled.chunks = plan.chunks
        state.in_flight.add(scheduled)
        self._finish_scheduling(outputs)
        return recomputed

    def _finish_scheduling(self, outputs: Rows) -> None:
        """Requests whose last output is among `outputs`, those of the latest iteration, do not run again."""
        generation = self.state.generation
        last = generation.finish_scheduling() if generation.is_active else self._last_outputs(outputs)
        for request in last:
            self.running.finish_scheduling(request)

    def _oldest(self) -> Scheduled:
        return self.state.in_flight.oldest

    def _confirmed(self, submitted: Submitted, times: int) -> list[Request]:
        if self.state.in_flight.oldest.is_joint:
            return self.state.generation.collect(times)
        return super()._confirmed(submitted, times)

    def update(self, iteration: InFlightIteration, outputs: Sequence[StepOutputs]) -> list[Request]:
        if iteration.is_repeated:
            return self.confirm(1)
        table, rows = self.table, iteration.output_rows
        if self.drafts is None:
            return self._collected(1, confirm(iteration, outputs, table))
        generated = table.generated[rows]
        done = confirm(iteration, outputs, table, self.drafts)
        self.state.computed[rows] += table.generated[rows] - generated
        for batch in iteration.batches:
            if batch.drafts is not None:  # what was rejected is not in the cache
                self.kv_cache.filled_tokens -= int((generated - table.generated[rows] + batch.drafts.counts).sum())
        ended = iteration.dropped.union(request.slot for request in done)
        self.drafts.propose(np.array([row for row in rows.tolist() if row not in ended], np.int64))
        return self._collected(1, done)

    def _collected(self, times: int, done: list[Request]) -> list[Request]:
        """So many of the oldest equal iterations in flight were collected. Returns `done`, the requests that they
        complete, in the order of scheduling, in which their blocks are released."""
        in_order, tiers = in_order_of(self.state.in_flight.oldest.rows, done), self.state.tiers
        if tiers is not None and not tiers.writes_back:
            for chunk in self.state.in_flight.oldest.chunks:
                if not chunk.request.has_left:
                    if chunk.start < chunk.request.remote_len:  # a prompt that another engine has computed
                        tiers.write_received(self.kv_cache.names, chunk.request, chunk.start)
                    tiers.write_filled(self.kv_cache.names, chunk.request, chunk.start, chunk.start + chunk.length)
        self.state.in_flight.collected(times)
        return in_order

    def lose(self, iteration: InFlightIteration) -> list[Request]:
        self.state.part()
        rows = self.state.in_flight.oldest.rows
        self.state.in_flight.collected(1)
        lost = [self.table.requests[row] for row in rows.tolist()]
        for request in lost:
            if self.kv_cache.held[request.slot]:
                self.kv_cache.forget_content(request.slot)
                self.kv_cache.release(request.slot, self.state.computed_by(request))
        return lost

    # Iterations of which the times are known.

    def horizon(self, plan: Plan) -> int:
        if not self._is_predicted or self._num_reading or plan.does_nothing:
            return 0
        step, num_rows, generation = self._step, len(plan.rows), self.state.generation
        if not step.repeats or plan.chunks or plan.paused or not num_rows or not generation.is_active:
            return 1
        if num_rows + plan.num_ending < len(self.running):
            return 1
        if plan.num_ending and (len(self.queue) or not self.kv_cache.is_plain):
            return 1
        if step.slack != NO_MAXIMUM and self.kv_cache.windowed:
            return 1  # a window may release blocks that the head of the queue waits for
        if self.kv_cache.pool.is_mixed:
            return 1  # which of the next blocks have content is not known
        blocks, pool, tiers = min(self.kv_cache.pool.num_free, step.slack), self.kv_cache.pool, self.state.tiers
        if tiers is not None and tiers.writes_back:
            blocks = min(blocks, pool.num_free - pool.num_evicting)  # others are written when they are taken
        return generation.horizon(blocks // len(self.kv_cache.groups))

    def positions(self, plan: Plan) -> tuple[Positions, AdapterUse | None]:
        rows, generation = plan.rows, self.state.generation
        if generation.is_active:
            return Positions(len(rows), generation.num_tokens, lambda: generation.computed_of(rows), slots=rows), None
        computed = self.state.computed[rows]
        return Positions(len(rows), int(np.add.reduce(computed)), lambda: computed, slots=rows), None

    def repeat(self, plan: Plan, count: int) -> Growth:
        if plan.chunks or not self.state.generation.is_active:
            self.kv_cache.filled_tokens += self._step.num_tokens
            recomputed = self.advance(plan, 0)
            growth = Growth(self.kv_cache.state(), [0], [0], [0])
            growth.recomputed = recomputed
            return growth
        growth = repeat(self.state, plan.rows, count)
        self.state.in_flight.add(Scheduled(self.scheduled_rows, plan.rows, None, True, count))
        self._finish_scheduling(plan.rows)
        return growth

    def used_blocks_after(self, plan: Plan, count: int) -> int | None:
        generation, cache = self.state.generation, self.kv_cache
        if plan.chunks or not generation.is_active or not cache.is_plain:  # windows release blocks
            return None
        return cache.num_used + sum(generation.starting(count + 1))  # the next one has its blocks

    def cache_state(self) -> CacheState:
        return self.kv_cache.state()

    def figures(self) -> dict[str, Any]:
        return {} if self.state.tiers is None else {"kv_tiers": self.state.tiers.figures()}

    def computed_by(self, request: Request) -> int:
        """Tokens of a running request that were computed or scheduled."""
        return self.state.computed_by(request)
