"""SGLang's scheduler behind the border of the engine (`Scheduler` of SGLang 0.5.23): a prefill batch where one can be
made (prefill.py), else a decode batch (decode.py).

The rules have the names of their sections in docs/engines.md.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ifbbench.clock import Clock
from ifbbench.engine.arrays import NO_ROWS
from ifbbench.engine.batch import AdapterUse, BatchLayout, BlockCopy, StepInputs, StepOutputs
from ifbbench.engine.interfaces import RequestSource
from ifbbench.engine.passes import confirm
from ifbbench.engine.plan import ContextChunk, LeftOut, Limit, Plan
from ifbbench.engine.records import CacheState, InFlightIteration
from ifbbench.engine.request import Request
from ifbbench.engine.stretch import Growth, Positions
from ifbbench.kv.tiers import KvTiers
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.queueing import QueueingScheduler, Submitted
from ifbbench.schedulers.sglang.admission import MAX_EXPECTED, NONE_RUNNING, Need, PrefillPass, Verdict
from ifbbench.schedulers.sglang.decode import decide_decode
from ifbbench.schedulers.sglang.drafts import Drafts
from ifbbench.schedulers.sglang.in_flight import Scheduled
from ifbbench.schedulers.sglang.order import max_outputs
from ifbbench.schedulers.sglang.prefill import decide_prefill
from ifbbench.schedulers.sglang.remote import RemoteRequests
from ifbbench.schedulers.sglang.repetition import certain_steps, more_pages, repeat
from ifbbench.schedulers.sglang.state import Decision, SglangState
from ifbbench.schedulers.sglang.storage import Storage

NO_POSITIONS = Positions(0, 0, lambda: NO_ROWS)


class SglangScheduler(QueueingScheduler):
    """A `Scheduler` with the rules of SGLang."""

    def __init__(self, limits: BatchingConfig, clock: Clock, is_predicted: bool = False) -> None:
        """ValueError without the rules of SGLang."""
        if limits.sglang is None:
            raise ValueError("the limits have no rules of SGLang; resolve a configuration with the engine sglang")
        state = self.state = SglangState(limits, limits.sglang)
        self.drafts = Drafts(limits.drafts, state.table) if limits.drafts.max_len else None
        super().__init__("SGLang's scheduler", limits, state.table, is_predicted and self.drafts is None)
        self.rules, self.kv_cache = limits.sglang, state.kv_cache
        self.remote = RemoteRequests(state)
        self.layout = BatchLayout((self.kv_cache.block_tables,), limits.tokens_per_block, limits.max_in_flight)
        self._source: RequestSource | None = None
        self._joined: list[tuple[Request, int]] = []  # `Plan.continued` of the next iteration that runs
        # Keys and values come from another engine, or go to one, so that requests join and leave between iterations:
        # what they gain is then counted one by one.
        self._is_side = False
        self._num_decided = 0  # iterations that were decided and not submitted: 1, or 0 in the middle of a stretch

    # The queue.

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that have not run yet."""
        state = self.state
        queued = [request for request in state.queue if request.table is None]
        return queued + self.remote.waiting + state.arrived.requests

    def admit(self, source: RequestSource) -> Sequence[Request]:
        self._source = source
        return super().admit(source)

    def _has_room_in_queue(self, max_queue_size: int) -> bool:
        queued = len(self.state.queue) + len(self.remote.waiting)
        return queued + len(self.state.arrived.requests) < max_queue_size

    def _never_fits(self, request: Request) -> str | None:
        """A request must be admitted when no other runs, also after a retraction, when its first tokens may take a page
        more."""
        cache = self.kv_cache
        pool, tree = cache.num_pages * cache.page_size, cache.tree is not None
        if request.remote_len:
            reserved, most = self.rules.reserved_tokens, min(request.max_new_tokens, MAX_EXPECTED)
            if request.prompt_len + max(reserved, most) <= pool:
                return None
            return (
                f"needs more than the {pool} tokens of KV cache for its prompt and {max(reserved, most)} tokens "
                "(kv_blocks, num_reserved_decode_tokens)"
            )
        longest = request.prompt_len + cache.page_size - 1 + self.limits.drafts.max_len
        if longest + max_outputs(request) + 2 * cache.page_size + 1 < pool:  # more than any rule asks for
            return None
        batch = PrefillPass(self.rules, cache.page_size, lambda: pool, NONE_RUNNING, 1.0, keeps_prefixes=tree)
        need = Need(longest, 0, max_outputs(request), 0, self.state.ignores_eos(request))
        if batch.judge(need)[0] is not Verdict.NO_TOKEN or batch.num_chosen:
            return None
        return f"needs more than the {pool} tokens of KV cache to start, outputs that it may have included (kv_blocks)"

    def _enqueue(self, request: Request) -> None:
        arrived = self.state.arrived
        self._is_side = self._is_side or request.remote_len > 0 or request.is_sent_on
        if len(self._by_id) == 1 and self.limits.rank is None:  # the engine was idle
            self.begin()
        arrived.requests.append(request)

    def begin(self) -> None:
        """A request has arrived while there was none, in no rank either."""
        self.state.ratio.reset()
        self.state.arrived.prefilled()

    def remove(self, request: Request) -> None:
        state = self.state
        self._forget(request)
        state.order.left(request)
        state.judged.pop(request, None)
        state.leave_batches(request)
        self.remote.remove(request)
        if request in state.kept:
            state.kept.remove(request)
            self.table.num_transferring -= 1
        if request in state.queue:
            state.queue.remove(request)
            if state.storage is not None:
                state.storage.leave(request)
        if request in state.arrived.requests:
            state.arrived.requests.remove(request)
        if request.table is not None:
            state.leave_generation(request)
            if self.kv_cache.holds(request.slot):
                state.release(request)
            for batch in state.in_flight:
                batch.drop(request.slot)
            request.leave()
        request.complete()

    # Keys and values that are sent to other engines, or come from them.

    def keep(self, request: Request) -> None:
        self.state.leave_batches(request)
        request.complete()
        for batch in self.state.in_flight:
            batch.drop(request.slot)
        self.state.kept.add(request)
        self.table.num_transferring += 1

    def receive(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.remote.receive(request)

    def use_tiers(self, tiers: KvTiers) -> None:
        """Prefetch from a store, and write there. Called once, before the first request."""
        self.state.storage = storage = Storage(tiers, self.kv_cache, self.rules)
        self.kv_cache.held_by_storage = storage.held_pages

    def take_copies(self) -> tuple[BlockCopy, ...]:
        return () if self.kv_cache.host is None else self.kv_cache.host.take_copies()

    # The decision for one iteration.

    def schedule(
        self, iteration: int, now_s: float, in_flight: Sequence[InFlightIteration], collect: Callable[[], None]
    ) -> Plan:
        return self.decide_others(self.decide_prompts(in_flight))

    def decide_prompts(self, in_flight: Sequence[InFlightIteration]) -> Decision:
        """The first part of `schedule`: a prefill batch, if one can be made."""
        state, decision = self.state, Decision(in_flight)
        for request in state.arrived.received():
            if request.remote_len:
                self.remote.waiting.append(request)
            else:
                state.enqueue(request)
        if state.storage is not None:
            state.storage.check()
        self._join()
        self._decide_prompts(decision)
        return decision

    def decide_others(self, decision: Decision, decodes: bool = True) -> Plan:
        """The second part: a decode batch, if there is no prefill batch, and if it `decodes`: another rank may not let
        it."""
        state = self.state
        decision.is_held = not decodes
        if not decision.is_prefill and decodes:
            decide_decode(state, decision)
        while (aborted := decision.aborted) is not None:
            decision.aborted = None
            self._abort(aborted)
            if self.remote.is_used:  # others may join now
                self._decide_prompts(decision)
                if not decision.is_prefill:
                    decide_decode(state, decision)
        self._num_decided = 1
        plan = self._plan(decision)
        if plan.does_nothing:
            state.arrived.passed(1)
        else:
            self._joined = []
        return plan

    def _decide_prompts(self, decision: Decision) -> None:
        if self.remote.is_used:
            self.remote.decide(decision)
        decision.is_prefill = decide_prefill(self.state, decision)

    def _join(self) -> None:
        """The requests of the latest prefill batch decode from now on (The loop)."""
        state = self.state
        if state.chunked is not None and state.chunked in state.last:
            self.kv_cache.publish(state.chunked, state.chunked.position)
            state.last.remove(state.chunked)
            state.has_left = True
        if state.has_left or not len(state.running):
            state.is_full = state.has_left = False
        counts_alone = self._num_reading > 0 or self.rules.mixes_chunks or self._is_side
        state.join(self._is_predicted and not counts_alone)

    def _abort(self, request: Request) -> None:
        """The only running request does not fit."""
        self.remove(request)
        if self._source is not None:
            self._source.refuse(request, "the KV cache has no room for its next token, although no other request runs")

    def _plan(self, decision: Decision) -> Plan:
        state, chosen = self.state, decision.chosen
        chunks = tuple([ContextChunk(request, request.position, request.chunk) for request in chosen])
        blocked = [LeftOut(pause.victim, pause.limit) for pause in decision.paused]
        if decision.continued or self._joined:
            retracted = {pause.victim for pause in decision.paused}
            joined = self._joined + [(one, one.num_outputs) for one in decision.continued]
            self._joined = [one for one in joined if one[0] not in retracted]
        cut = queue_head = None
        if state.chunked is not None:
            blocked.append(cut := LeftOut(state.chunked, Limit.NUM_TOKENS))
        # A prompt that is sent on makes no token here but the one in flight: it does not stand aside.
        held = [one for one in state.running.requests if not one.is_sent_on] if chosen or decision.is_held else []
        if held:
            blocked.append(LeftOut(held[0], Limit.PREFILL))
        if state.queue and state.limit_of_head is not None:
            is_behind = state.left_out is not None and state.left_out in state.queue
            head = state.left_out if is_behind and state.left_out is not None else state.queue[0]
            blocked.append(queue_head := LeftOut(head, state.limit_of_head))
        if cut is not None and (queue_head is None or queue_head.limit is Limit.NUM_TOKENS):
            queue_head = cut  # it has the tokens that the queue lacks
        if self.remote.waiting and self.remote.limit is not None:
            blocked.append(queue_head := LeftOut(self.remote.waiting[0], self.remote.limit))
        return Plan(
            list(chosen),
            decision.rows,
            held=held,
            paused=decision.paused,
            blocked=tuple(blocked),
            chunks=chunks,
            entered=decision.entered,
            num_ending=decision.num_ending,
            receiving=decision.receiving,
            continued=tuple(self._joined),
            loaded_tokens=0 if self.kv_cache.host is None else self.kv_cache.host.take_loaded(),
            queue_head=queue_head,
            awaits_stores=decision.awaits and not decision.has_lost,
        )

    # One iteration.

    def allocate(self, plan: Plan) -> StepInputs:
        """The pages were taken with the decision."""
        self._count_tokens(plan)
        copies = self.take_copies()
        drafts = None
        if self.drafts is not None:
            drafts = self.drafts.inputs(len([chunk for chunk in plan.chunks if chunk.is_last]), plan.rows)
        return StepInputs(self.state.computed(plan.rows), copies, drafts=drafts, loaded_tokens=plan.loaded_tokens)

    def _count_tokens(self, plan: Plan) -> None:
        decoded = len(plan.rows) * (1 + self.limits.drafts.max_len)
        self.kv_cache.filled_tokens += sum([chunk.length for chunk in plan.chunks]) + decoded

    def advance(self, plan: Plan, iteration: int) -> int:
        recomputed = 0
        for chunk in plan.chunks:
            recomputed += chunk.request.advance_context()
            self.state.order.num_computed += chunk.length
            if chunk.is_last:
                chunk.request.start_generation()
        self._ran(plan, 1)
        is_joint = self.state.generation.is_active and not plan.chunks
        if is_joint:
            self.state.generation.advance(1)
        elif len(plan.rows):
            self.table.generated[plan.rows] += 1
        self._submitted(Scheduled(plan.chunks, plan.output_rows(), is_joint=is_joint))
        if plan.chunks:
            self.state.enter_generation([chunk.request for chunk in plan.chunks if chunk.is_last])
        return recomputed

    def _ran(self, plan: Plan, count: int) -> None:
        """So many iterations of `plan` run (Receiving)."""
        if plan.chunks:
            self.state.arrived.prefilled()
        else:
            self.state.arrived.passed(count)

    def _submitted(self, batch: Scheduled) -> None:
        """A batch is in flight. With overlap, requests whose last output is in it do not decode again (Overlap)."""
        state = self.state
        state.in_flight.append(batch)
        if batch.is_joint:
            last = state.generation.finish_scheduling()
        else:
            prompts = [chunk.request for chunk in batch.chunks if chunk.is_last]
            last = [request for request in prompts if self._is_async and request.max_new_tokens == 1]
            if len(batch.outputs) > len(prompts):
                last += self._last_outputs(batch.outputs[len(prompts) :])
        for request in last:
            request.finish_scheduling()
            state.has_finishing = True

    def _oldest(self) -> Scheduled:
        return self.state.in_flight[0]

    def _confirmed(self, submitted: Submitted, times: int) -> list[Request]:
        table, joint = self.table, self.state.generation
        if submitted.is_joint:
            return joint.collect(times)
        if not joint.is_active:
            return super()._confirmed(submitted, times)
        done = list[Request]()
        for row in submitted.outputs.tolist():
            request, confirmed = table.requests[row], int(table.confirmed[row]) + times
            table.confirmed[row] = confirmed
            if confirmed + (table.deferred_confirmed if request.in_generation else 0) == int(table.stop_after[row]):
                done.append(request)
        return done

    def update(self, iteration: InFlightIteration, outputs: Sequence[StepOutputs]) -> list[Request]:
        if iteration.is_repeated:
            return self.confirm(1)
        table, rows = self.table, iteration.output_rows
        if self.drafts is None:
            return self._collected(1, confirm(iteration, outputs, table))
        generated = table.generated[rows]
        done = confirm(iteration, outputs, table, self.drafts)
        for batch in iteration.batches:
            if batch.drafts is not None:  # what was rejected is not in the cache
                self.kv_cache.filled_tokens -= int((generated - table.generated[rows] + batch.drafts.counts).sum())
        return self._collected(1, done)

    def _collected(self, times: int, done: list[Request]) -> list[Request]:
        """So many of the oldest equal batches in flight were collected. Publishes the prompts that they computed, and
        releases what `done`, the requests that they complete, hold, in batch order."""
        state = self.state
        batch = state.in_flight[0]
        batch.times -= times
        if not batch.times:
            state.in_flight.popleft()
        for chunk in batch.chunks:
            if not chunk.is_last:
                continue
            if chunk.request in done and not chunk.request.is_sent_on:
                state.leave_generation(chunk.request)
                state.release(chunk.request)
            else:
                self.kv_cache.publish(chunk.request, chunk.start + chunk.length)
        batch.chunks = ()
        for request in done:
            if self.kv_cache.holds(request.slot) and not request.is_sent_on:
                state.leave_generation(request)
                state.release(request)
        return done

    def lose(self, iteration: InFlightIteration) -> list[Request]:
        self.state.part()
        batch, cache = self.state.in_flight[0], self.kv_cache
        rows = dict.fromkeys([chunk.request.slot for chunk in batch.chunks] + batch.outputs.tolist())
        batch.chunks = ()
        self._collected(1, [])
        lost = [self.table.requests[row] for row in rows]
        for request in lost:
            if cache.holds(request.slot):
                cache.release(request.slot, self.state.computed_by(request))
        cache.forget()  # parts of what was lost may be in the tree
        return lost

    # Iterations of which the times are known.

    def horizon(self, plan: Plan) -> int:
        state = self.state
        if not self._is_predicted or self._num_reading or plan.does_nothing:
            return 0
        if state.storage is not None and self.kv_cache.host is not None and self.kv_cache.host.writes_back:
            return 1  # what is evicted is written when it is
        is_tried = bool(state.queue) and (not state.is_full or self.rules.preempts)
        if plan.chunks or plan.paused or state.chunked is not None or (is_tried and not state.awaits_only):
            return 1
        if plan.continued or not self.remote.is_settled or (state.storage is not None and state.storage.is_freeing):
            return 1
        plan.awaits_in_flight = any(batch.chunks for batch in state.in_flight)
        steps, to_receiving = certain_steps(state, plan.rows), state.arrived.steps_to_receiving()
        if is_tried:  # while the queue waits for storage
            steps = min(steps, state.order.passes_to_change)
        return steps if to_receiving is None else min(steps, to_receiving)

    def positions(self, plan: Plan) -> tuple[Positions, AdapterUse | None]:
        rows, joint = plan.rows, self.state.generation
        if not len(rows):
            return NO_POSITIONS, None
        if joint.is_active:
            return Positions(len(rows), joint.num_tokens, lambda: joint.computed_of(rows), slots=rows), None
        computed = self.state.computed(rows)
        return Positions(len(rows), int(np.add.reduce(computed)), lambda: computed, slots=rows), None

    def repeat(self, plan: Plan, count: int) -> Growth:
        num_decided, self._num_decided = self._num_decided, 0
        if plan.chunks:
            self._count_tokens(plan)
            recomputed = self.advance(plan, 0)
            growth = Growth(self.kv_cache.state(), [0], [0], [0])
            growth.recomputed = recomputed
            return growth
        growth = repeat(self.state, plan.rows, count, num_decided)
        self._ran(plan, count)
        if self.state.awaits_only:
            self.state.order.passed(count - num_decided)
        self.state.ratio.decay(count - num_decided)
        self._submitted(Scheduled((), plan.rows, count, self.state.generation.is_active))
        return growth

    def used_blocks_after(self, plan: Plan, count: int) -> int | None:
        if plan.awaits_in_flight:  # a prompt that becomes complete may share its pages
            return None
        # The next one has its pages. What they replace is not in use.
        return self.kv_cache.num_used + more_pages(self.state, plan.rows, count + 1, self._num_decided)[-1]

    def cache_state(self) -> CacheState:
        return self.kv_cache.state()

    def figures(self) -> dict[str, Any]:
        host, storage = self.kv_cache.host, self.state.storage
        found = {} if host is None else {"host_cache": host.figures()}
        return found if storage is None else found | {"kv_tiers": storage.tiers.figures()}

    def computed_by(self, request: Request) -> int:
        """Tokens of a running request that were computed or are in flight."""
        return self.state.computed_by(request)
