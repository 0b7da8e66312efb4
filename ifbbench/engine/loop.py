"""The token generation loop: admits, schedules, runs and answers requests, one iteration after the other."""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from mypy_extensions import mypyc_attr

from ifbbench.clock import Clock
from ifbbench.engine.active import NO_MICRO_BATCH, ActiveRequests, RequestTable
from ifbbench.engine.batch import BatchBuilder, ContextChunk
from ifbbench.engine.config import BatchingConfig, BatchingType
from ifbbench.engine.drafts import Drafts
from ifbbench.engine.fast_forward import FastForward
from ifbbench.engine.in_flight import (
    InFlightIteration,
    Response,
    confirm,
    forget_empty_turns,
    is_pause_in_flight,
    response_of,
    store_generated,
    streamed,
)
from ifbbench.engine.interfaces import Executor, Observer, Unobserved
from ifbbench.engine.records import NO_CACHE_STATE, CacheState, IterationRecord
from ifbbench.engine.request import Request
from ifbbench.errors import IfbbenchError
from ifbbench.kv.adapters import AdapterCache, OutOfAdapterPages
from ifbbench.kv.blocks import OutOfBlocks
from ifbbench.schedulers.tensorrt_llm.admission import Admission, AdmissionLimits, NextChange
from ifbbench.schedulers.tensorrt_llm.policies import (
    GuaranteedNoEvict,
    MaxRequests,
    MaxUtilization,
    find_policy,
    is_steady,
)
from ifbbench.schedulers.tensorrt_llm.scheduler import Plan, Scheduler


class SchedulerStalled(IfbbenchError):
    """Requests are active, but the policy runs none of them, or more than fit."""


class ExecutorFailed(IfbbenchError):
    """The executor raised. The requests of its batch have ended with an error; the loop can continue with others."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenGenerationLoop:
    """The loop over one executor. `step()` runs one iteration in the caller's thread.

    get_requests(n): returns at most n requests that have arrived; called at the start of an iteration.
    send_response(response): called at the end of the iteration that yields it.
    queued(): how many requests have arrived that `get_requests` has not returned.
    poll_stop_signals(): ids of requests to stop, called at the end of an iteration. Unknown ids are ignored.
    next_change(now_s): when requests will arrive next, None for never. If it is given and the executor can predict its
        times, iterations between two events are advanced together, without a call to any of these functions.
    next_priority(): see `Admission`.
    """

    def __init__(
        self,
        config: BatchingConfig,
        executor: Executor,
        clock: Clock,
        get_requests: Callable[[int], list[Request]],
        send_response: Callable[[Response], None],
        observer: Observer | None = None,
        queued: Callable[[], int] = lambda: 0,
        poll_stop_signals: Callable[[], Collection[int]] = lambda: (),
        next_change: NextChange | None = None,
        next_priority: Callable[[], float | None] | None = None,
    ) -> None:
        self.config, self.table = config, RequestTable(config.num_slots)
        self.active = ActiveRequests(self.table)
        self._executor, self._clock = executor, clock
        self._queued, self._poll_stop_signals = queued, poll_stop_signals
        self._send_response, self._observer = send_response, (observed := observer or Unobserved())
        policy = find_policy(config.effective_policy)(config.max_active)
        self.adapters = AdapterCache(config.lora) if config.lora else None
        if self.adapters is not None and isinstance(policy, GuaranteedNoEvict | MaxUtilization | MaxRequests):
            policy.lora = self.adapters.limits
        runs_without_batches = is_steady(policy) and FastForward.can_run(config, executor, clock, next_change)
        self.kv_cache, self.iteration = config.make_cache(is_counted=runs_without_batches), 0

        def refuse(request: Request, error: str) -> None:  # no method: a cycle would keep all blocks after the last use
            observed.left(request, error)
            send_response(Response(request, is_final=True, error=error))

        self._admission = Admission(
            AdmissionLimits(config, policy, self.adapters),
            config.max_active,
            get_requests,
            refuse,
            next_change,
            next_priority,
            config.max_queue_size,
        )
        self._scheduler = Scheduler(config, policy, self.active, self.kv_cache)
        self._drafts = Drafts(config.drafts, self.active, self.kv_cache)
        self._builder = BatchBuilder(
            config.batching_type, self.active, self.kv_cache, self._drafts, config.max_in_flight, self.adapters
        )
        self._fast_forward: FastForward | None = None
        if runs_without_batches:
            self._fast_forward = FastForward(
                config, executor, clock, self.active, self.kv_cache, next_change, self.adapters
            )
        self._is_static = config.batching_type is BatchingType.V1
        self._max_in_flight, self._num_micro_batches = config.max_in_flight, config.num_micro_batches
        self._in_flight: deque[InFlightIteration] = deque()
        self._activated: list[Request] = []
        self._failure: ExecutorFailed | None = None

    @property
    def num_waiting(self) -> int:
        """Fetched requests that are not active yet."""
        return len(self._admission.waiting)

    def step(self) -> bool:
        """Run one iteration; False, with nothing done, if no request is active.

        With overlap or pipeline stages, the iteration that this call submits is collected by a later one. Raises
        ExecutorFailed after the requests of the failed batch were answered, SchedulerStalled, and PolicyFailed."""
        start_s = self._clock.now()

        # Admit: fetch requests, refuse those that can never run, activate by priority.
        if activated := self._admission.admit(self.active, start_s):
            self._activated += activated
            start_s = self._clock.now()  # in real time, they may have arrived since the step began
        if not self.active.by_slot:
            # Turns of micro batches without requests since the last one ended did not happen.
            self.iteration -= forget_empty_turns(self._in_flight)
            if not self._in_flight:
                return False

        # Schedule: the capacity policy, then the micro-batch scheduler.
        if self._scheduler.tune_limits is not None:
            self._scheduler.tune_limits(self.active)
        if self._num_micro_batches > 1:
            self.table.begin_turn(self.iteration % self._num_micro_batches)
        if self.config.drafts.max_len:
            self._drafts.propose()
        plan = self._scheduler.plan()
        if self._fast_forward is not None:
            # On a simulated device, all iterations up to the next event may be known: no batch is built.
            if self._step_many(self._fast_forward, plan, start_s):
                return True
            self._fast_forward.leave()
        while plan.paused and is_pause_in_flight(self._in_flight, plan, self.table, self.config.is_async):
            # The token in flight of a request to pause will join its prompt: collect it, then decide again.
            while is_pause_in_flight(self._in_flight, plan, self.table, self.config.is_async):
                self._complete_oldest()
            plan = self._scheduler.plan()

        stays_in_flight = 0
        if not plan.does_nothing or self._has_empty_turn:
            # Pause, build the batches (which takes the blocks they write to), submit.
            for pause in plan.paused:
                self._pause(pause.victim)
            submitted = self._submit(plan, start_s)
            # All but the oldest of a full set of iterations stay in flight. After an error none is built upon another.
            if submitted.error is None:
                stays_in_flight = self._max_in_flight - 1
        elif not self._in_flight and len(self.active) and self._failure is None:
            blocked = ", ".join(f"request {item.request.request_id} by {item.limit}" for item in plan.blocked)
            raise SchedulerStalled(
                f"policy {self.config.policy} runs none of {len(self.active)} active requests (blocked: {blocked})"
            )

        # Collect outputs, confirm them, record the iteration and respond.
        while len(self._in_flight) > stays_in_flight:
            self._complete_oldest()

        for request_id in self._poll_stop_signals():
            self.stop(request_id)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return True

    def stop(self, request_id: int, error: str | None = None) -> None:
        """End a waiting or active request now: its blocks are released, and its final response has the tokens generated
        so far, or `error`. An unknown id is ignored."""
        request = self._admission.find(request_id)
        if request is None:
            return
        self._observer.left(request, error)
        if request.table is None:
            response = Response(request, is_final=True, error=error)
            self._admission.withdraw(request)
        else:
            response = Response(request, is_final=True, error=error) if error else response_of(request, is_final=True)
            self._remove(request)
        self._send_response(response)

    def truncate_blocks(self, conversation: Request, num_tokens: int) -> None:
        """Release the reusable blocks of a conversation after its first `num_tokens` tokens."""
        if (known := conversation.known_tokens()) is not None:
            self.kv_cache.truncate(known, conversation.prompt_len, num_tokens)

    def abort(self, error: str) -> None:
        """End everything: iterations in flight are discarded, and every fetched request fails with `error`."""
        while self._in_flight:
            self._in_flight.popleft().collect(self._executor, self._clock.now)
        for request in [*self.active.by_slot.values(), *self._admission.waiting]:
            self.stop(request.request_id, error)

    # The stages of an iteration, in order.

    @property
    def _has_empty_turn(self) -> bool:
        """Whether an iteration without requests is run: the turn of a micro batch while others are in flight, or wait
        for their turn because their iterations were collected before a pause, or after an error."""
        if self._num_micro_batches == 1 or not len(self.active):
            return False
        return self.table.num_in_flight > 0 or any(iteration.batches for iteration in self._in_flight)

    def _step_many(self, fast_forward: FastForward, plan: Plan, start_s: float) -> bool:
        """Run the iterations in which `plan` is certain to stand; False, with nothing done, if they need batches."""
        if not fast_forward.may_run(plan):
            return False
        try:
            first = self._record(plan, fast_forward.start_context(plan), NO_CACHE_STATE, start_s)
            stretch = fast_forward.advance(plan, first, self._scheduler.times_certain(plan))
        except OutOfBlocks as error:
            raise self._does_not_fit(error) from error
        self._activated = []
        self.iteration += stretch.length
        self._observer.stretch(stretch)
        self._finish(stretch.finished)
        return True

    def _does_not_fit(self, error: Exception) -> SchedulerStalled:
        return SchedulerStalled(f"policy {self.config.policy} let requests run that do not fit: {error}")

    def _pause(self, request: Request) -> None:
        """Release the blocks of `request`. It starts again from its prompt, which its generated tokens have joined."""
        self._release_blocks(request)
        request.pause(self.config.max_input_len)
        self.table.micro_batch[request.slot] = NO_MICRO_BATCH
        self.active.move_to_context(request)

    def _submit(self, plan: Plan, start_s: float) -> InFlightIteration:
        """Build and submit the iteration, and advance its requests as far as is known without its tokens."""
        try:
            batches = self._builder.build(self.iteration, plan.context, plan.rows, plan.idle, start_s)
        except (OutOfBlocks, OutOfAdapterPages) as error:
            raise self._does_not_fit(error) from error
        completing = [request for request in plan.context if request.is_last_chunk]
        record = self._record(plan, batches[0].context if batches else (), CacheState.of(self.kv_cache), start_s)
        if batches:
            record.idle, record.loads = len(plan.idle), batches[0].adapters.loads if batches[0].adapters else ()
        iteration = InFlightIteration(record, batches, plan.output_rows(completing), set(plan.idle.tolist()))
        iteration.submit(self._executor)
        record.submit_s = self._clock.now()
        record.recomputed = self._advance(plan, completing)
        if self._num_micro_batches > 1:
            self.table.micro_batch[plan.rows] = turn = self.iteration % self._num_micro_batches
            self.table.micro_batch[[request.slot for request in plan.context]] = turn
        self._in_flight.append(iteration)
        self._activated = []
        self.iteration += 1
        return iteration

    def _record(self, plan: Plan, chunks: Sequence[ContextChunk], cache: CacheState, start_s: float) -> IterationRecord:
        """The record of an iteration that began at `start_s` and runs these chunks."""
        lengths = [chunk.length for chunk in chunks]
        padding = max(lengths) * len(lengths) - sum(lengths) if self._is_static and chunks else 0
        tokens = num_generation = len(plan.rows)
        if self.table.any_wide_steps:
            tokens = int(self.table.step_tokens[plan.rows].sum())
            tokens += sum(chunk.request.num_draft_tokens for chunk in chunks if chunk.is_last)
        waiting = self._admission.waiting
        return IterationRecord(
            self.iteration,
            micro_batch=self.iteration % self._max_in_flight,
            start_s=start_s,
            timestamp=self._clock.timestamp(),
            active=len(self.active),
            queued=len(waiting) + self._queued(),
            activated=self._activated,
            context=tuple(chunks),
            num_context_tokens=sum(lengths),
            recomputed=0,
            num_generation=num_generation,
            num_generation_tokens=tokens,
            held=plan.held,
            paused=plan.paused,
            left_out=plan.first_left_out(waiting),
            blocked=plan.blocked,
            cache=cache,
            padding=padding,
            num_micro_batches=self._num_micro_batches,
            in_flight=self.table.num_in_flight,
        )

    def _advance(self, plan: Plan, completing: list[Request]) -> int:
        """Advance all submitted requests by their chunk or token; returns how many of these tokens were recomputed."""
        table, rows, reuses_blocks = self.table, plan.rows, self.kv_cache.num_reuse_changes > 0
        recomputed = sum([request.advance_context() for request in plan.context])
        if table.any_paused and len(rows):
            recomputed += self.active.count_recomputed(rows, self.kv_cache.cached_tokens(rows))
        table.generated[rows] += 1
        for request in completing:
            request.start_generation()
            self.active.move_to_generation(request)
            self.kv_cache.begin_generation(request.slot)
            if reuses_blocks:
                self.kv_cache.store_generated(request.slot, request.prompt_len - 1)
        if reuses_blocks:
            computed = table.original_prompt_len[rows] + table.joined[rows] + table.generated[rows] - 2
            store_generated(self.active, self.kv_cache, rows, computed)
        if self.config.is_async:
            rows = self.active.generation_rows
            for row in rows[table.generated[rows] == table.reserved[rows]].tolist():
                self.active.park(row)
        return recomputed

    def _complete_oldest(self) -> None:
        """Collect the oldest iteration in flight, confirm its outputs, record it and send the responses."""
        iteration = self._in_flight.popleft()
        outputs = iteration.collect(self._executor, self._clock.now)
        record = iteration.record
        record.end_s = self._clock.now() if iteration.batches else record.submit_s
        if iteration.error is not None:
            self._fail(iteration, iteration.error)
            return
        if outputs:
            self.table.makes_tokens = outputs[-1].tokens is not None or outputs[-1].candidates is not None
        done = confirm(iteration, outputs, self.active, self._drafts)
        record.finished = self._scheduler.end_together(done) if self._is_static else done
        self._observer.iteration(record)
        if self.table.num_special and not self._is_static:
            for response in streamed(iteration, self.active):
                self._send_response(response)
        self._finish(record.finished)

    def _finish(self, requests: list[Request]) -> None:
        for request in requests:
            response = response_of(request, is_final=True)
            self._remove(request)
            self._send_response(response)

    def _fail(self, iteration: InFlightIteration, error: Exception) -> None:
        """The executor failed: all requests of the batch end, because the contents of their KV blocks are unknown."""
        self._failure = ExecutorFailed(f"the executor failed in iteration {iteration.record.iteration}: {error}")
        self._failure.__cause__ = error
        self._observer.iteration(iteration.record)
        if self.adapters is not None:
            self.adapters.forget_device()
            for later in self._in_flight if iteration.record.loads else ():  # may need what was not copied
                later.error = error
        rows = [chunk.request.slot for batch in iteration.batches for chunk in batch.context]
        rows += [slot for batch in iteration.batches for slot in batch.slots.tolist()]
        for row in rows:  # -1 if the request has left
            if row in self.active.by_slot and row not in iteration.dropped:
                self.kv_cache.forget_sequence(row)
                self.stop(self.active.by_slot[row].request_id, f"the executor failed: {error}")

    def _remove(self, request: Request) -> None:
        """Release all that an active request holds, and ignore its outputs in flight."""
        for iteration in self._in_flight:
            iteration.dropped.add(request.slot)
        if request in self._scheduler.complete:
            self._scheduler.complete.remove(request)
        if self.kv_cache.holds(request.slot):
            self._release_blocks(request)
        self.active.remove(request)
        self._admission.forget(request)
        request.complete()

    def _release_blocks(self, request: Request) -> None:
        """Release the blocks. With reuse, what they hold stays findable as far as it was computed and is known."""
        store = None
        if self.config.reuse.enabled:
            computed = request.position if request.in_context else request.original_prompt_len + request.num_outputs - 1
            store = min(computed, request.num_known_tokens)
        self.kv_cache.remove_sequence(request.slot, store, self._clock.now())
