"""The batch manager: the loop that admits, schedules, runs and responds, one iteration after the other."""

from collections import deque
from collections.abc import Callable, Collection

from ifbbench.clock import Clock, VirtualClock
from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.admission import Admission, AdmissionLimits, NextChange
from ifbbench.engine.batch import Executor, PredictableExecutor
from ifbbench.engine.batch_builder import BatchBuilder
from ifbbench.engine.batching_config import BatchingConfig
from ifbbench.engine.batching_type import BatchingType
from ifbbench.engine.confirm import confirm
from ifbbench.engine.fast_forward import FastForward
from ifbbench.engine.flight import Flight
from ifbbench.engine.kv_cache.blocks import OutOfBlocks
from ifbbench.engine.lockstep import Lockstep
from ifbbench.engine.policies import find_policy
from ifbbench.engine.record_maker import RecordMaker
from ifbbench.engine.records import Observer, Unobserved
from ifbbench.engine.request import Request
from ifbbench.engine.request_table import RequestTable
from ifbbench.engine.response import Response, response_of
from ifbbench.engine.scheduler import Plan, Scheduler
from ifbbench.engine.store_generated import filled_blocks, store_blocks
from ifbbench.errors import IfbbenchError


class SchedulerStalled(IfbbenchError):
    """Requests are active, but a policy lets none of them run."""


class ExecutorFailed(IfbbenchError):
    """The executor raised; the requests of its batch had an error response, and the loop can go on with the others."""


class BatchManager:
    """The token generation loop over one executor. `step()` is one iteration; whoever calls it owns the thread.

    get_requests(n): returns at most n requests that have arrived; called at the start of each iteration.
    send_response(response): called at the end of the iteration that has something to send.
    queued(): how many requests have arrived that `get_requests` has not handed out yet.
    poll_stop_signals(): ids of requests to stop; called at the end of each iteration. Unknown ones are ignored.
    next_change(now_s): when requests will arrive next, None for not at all. Given that, iterations between two events
        are advanced together, without a call to any of these, if the executor can tell beforehand how long they take.
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
        self.config = config
        self.table = RequestTable(config.num_slots)
        self.active = ActiveRequests(self.table)
        self.kv_cache = config.make_cache()
        self.iteration = 0
        self._executor = executor
        self._clock = clock
        self._send_response = send_response
        self._observer = observer or Unobserved()
        self._poll_stop_signals = poll_stop_signals
        policy = find_policy(config.effective_policy)(config.max_batch_size)
        limits = AdmissionLimits.of(config, policy_may_pause=getattr(policy, "may_pause", True))
        self._admission = Admission(
            limits, config.max_batch_size, get_requests, self._refuse, next_change, next_priority
        )  # fmt: skip
        self._lockstep = Lockstep(self.active) if config.batching_type is BatchingType.V1 else None
        self._scheduler = Scheduler(config, policy, self.active, self.kv_cache, self._lockstep)
        self._records = RecordMaker(config, clock, self.active, self._admission, self.kv_cache, queued)
        self._builder = BatchBuilder(config.batching_type, self.active, self.kv_cache)
        self._fast_forward: FastForward | None = None
        is_steady = getattr(policy, "is_steady", False) and self._lockstep is None and not config.enable_overlap
        if is_steady and next_change and isinstance(executor, PredictableExecutor) and isinstance(clock, VirtualClock):
            self._fast_forward = FastForward(config, executor, clock, self.active, self.kv_cache, next_change)
        self._num_micro_batches = config.num_micro_batches
        self._in_flight: deque[Flight] = deque()
        self._activated: list[Request] = []
        self._failure: ExecutorFailed | None = None

    def step(self) -> bool:
        """Run one iteration; False when no request is active, in which case nothing was done.

        With overlap, the iteration that this submits is collected by the next call. Raises ExecutorFailed after the
        affected requests had their error responses, and SchedulerStalled if the policy lets nobody run."""
        start_s = self._clock.now()
        self._activated += self._admission.admit(self.active, start_s)
        if not len(self.active) and not self._in_flight:
            return False
        if self._fast_forward is not None and self._advance_together(self._fast_forward, start_s):
            return True
        plan = self._plan()
        if not plan.does_nothing:
            self._submit(plan, start_s)
            could_not_submit = self._in_flight[-1].error is not None
            # Nothing is built upon a batch that does not run.
            while self._in_flight and (could_not_submit or len(self._in_flight) >= self._num_micro_batches):
                self._land()
        elif self._in_flight:
            self._land()
        elif len(self.active) and self._failure is None:
            raise SchedulerStalled(f"policy {self.config.policy} runs none of {len(self.active)} active requests "
                                   f"(blocked: {plan.reasons})")
        self._stop_on_signals()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return True

    @property
    def num_waiting(self) -> int:
        """Fetched requests that are not active yet."""
        return len(self._admission.waiting)

    def stop(self, request_id: int, error: str | None = None) -> None:
        """End a waiting or active request now: its blocks return, and a final response goes out, with the tokens made
        so far or with `error`. An unknown id is ignored."""
        request = self._admission.find(request_id)
        if request is None:
            return
        self._observer.left(request, error)
        if request.table is None:
            response = Response(request, is_final=True, error=error)
            self._admission.withdraw(request)
        else:
            response = Response(request, is_final=True, error=error) if error else self._response(request, True)
            self._leave(request)
        self._send_response(response)

    def abort(self, error: str) -> None:
        """End all at once: what is under way is thrown away, and every request that was fetched gets an error."""
        while self._in_flight:
            self._in_flight.popleft().collect(self._executor, self._clock.now)
        for request in [*self.active.by_slot.values(), *self._admission.waiting]:
            self.stop(request.request_id, error)

    # One iteration, step by step.

    def _advance_together(self, fast_forward: FastForward, start_s: float) -> bool:
        """Advance iterations that do the same; False, with nothing done, where that is not known of any."""
        plan = fast_forward.next_plan(start_s)
        if plan is None:
            return False
        record = self._records.make(self.iteration, plan, (), start_s, [])
        filled = filled_blocks(self.table, self.kv_cache, plan.rows) if self.config.reuse.enabled else None
        advance = fast_forward.advance()
        if advance is None:
            return False
        rows = plan.rows
        if filled is not None:
            store_blocks(self.active, self.kv_cache, *filled)
        done = rows[self.table.confirmed[rows] == self.table.stop_after[rows]]
        finished = [self.active.by_slot[row] for row in done.tolist()]
        self.iteration += len(advance.start_ns)
        self._observer.stretch(advance.stretch(record, finished, self.kv_cache, fast_forward.epoch_s))
        self._finish(finished)
        return True

    def _plan(self) -> Plan:
        plan = self._scheduler.plan()
        if plan.paused and self._in_flight:
            # Who is to be paused has a token under way, which will join its prompt: its pause waits for that, and the
            # decision is made again with what is known then.
            while self._in_flight:
                self._land()
            plan = self._scheduler.plan()
        return plan

    def _submit(self, plan: Plan, start_s: float) -> None:
        for pause in plan.paused:
            self._pause(pause.victim)
        try:
            batches = self._builder.build(self.iteration, plan.context, plan.rows, plan.idle, start_s)
        except OutOfBlocks as error:
            raise SchedulerStalled(f"policy {self.config.policy} let requests run that do not fit: {error}") from error
        completing = [request for request in plan.context if request.is_last_chunk]
        record = self._records.make(self.iteration, plan, batches, start_s, self._activated)
        flight = Flight(record, batches, plan.output_rows(completing), set(plan.idle.tolist()))
        flight.submit(self._executor)
        record.submit_s = self._clock.now()
        record.recomputed = self._advance(plan, completing)
        self._in_flight.append(flight)
        if self._fast_forward is not None:
            self._fast_forward.remember_decision(plan)
        self._activated = []
        self.iteration += 1

    def _pause(self, request: Request) -> None:
        """Take the request's blocks away; it starts again from its prompt with the generated tokens joined to it."""
        self._release_blocks(request)
        was_in_context = request.in_context
        request.pause(self.config.max_input_len)
        if not was_in_context:
            self.active.move_to_context(request)

    def _advance(self, plan: Plan, completing: list[Request]) -> int:
        """Move all that was submitted on, as far as is known without its tokens. Returns how many tokens were computed
        before a pause already."""
        table, rows = self.table, plan.rows
        recomputed = 0
        for request in plan.context:
            recomputed += request.advance_context()
        if table.any_paused:
            cached = self.kv_cache.registered[rows] - self.kv_cache.attention_window.bubble
            recomputed += self.active.count_made_again(rows, cached)
        filled = filled_blocks(table, self.kv_cache, rows) if self.config.reuse.enabled else None
        table.generated[rows] += 1
        for request in completing:
            request.start_generation()
            self.active.move_to_generation(request)
            if self.config.reuse.enabled:
                self.kv_cache.store_context(request.slot)
        if filled is not None:
            store_blocks(self.active, self.kv_cache, *filled)
        if self.config.enable_overlap:
            rows = self.active.generation_rows
            for row in rows[table.generated[rows] == table.reserved[rows]].tolist():
                self.active.park(row)
        return recomputed

    def _land(self) -> None:
        """Collect the oldest iteration under way, and answer those who have something coming."""
        flight = self._in_flight.popleft()
        outputs = flight.collect(self._executor, self._clock.now)
        flight.record.end_s = self._clock.now()
        if flight.error is not None:
            self._fail(flight, flight.error)
            return
        if flight.batches:
            self.table.makes_tokens = outputs.tokens is not None or outputs.candidates is not None
        done = confirm(flight, outputs, self.active)
        flight.record.finished = self._lockstep.hold_back(done) if self._lockstep else done
        self._observer.iteration(flight.record)
        if self.table.num_special and self._lockstep is None:
            self._stream(flight)
        self._finish(flight.record.finished)

    def _finish(self, requests: list[Request]) -> None:
        """Send the final responses of those that have all their tokens."""
        for request in requests:
            response = self._response(request, is_final=True)
            self._leave(request)
            self._send_response(response)

    def _stream(self, flight: Flight) -> None:
        """Send the new tokens of streaming requests that go on."""
        last = {request.slot for request in flight.record.finished} | flight.dropped
        rows = flight.output_rows
        for row in rows[self.table.is_special[rows]].tolist():
            if row in last or not (request := self.active.by_slot[row]).options.streaming:
                continue
            if request.num_outputs > request.num_sent:
                response = self._response(request, is_final=False)
                request.num_sent = request.num_outputs
                self._send_response(response)

    def _fail(self, flight: Flight, error: Exception) -> None:
        """The executor failed: all requests of the batch end, for nobody knows what is in their KV blocks."""
        self._failure = ExecutorFailed(f"the executor failed in iteration {flight.record.iteration}: {error}")
        self._failure.__cause__ = error
        self._observer.iteration(flight.record)
        for row in flight.rows():
            if row in self.active.by_slot:
                self.kv_cache.forget_sequence(row)
                self.stop(self.active.by_slot[row].request_id, f"the executor failed: {error}")

    def _release_blocks(self, request: Request) -> None:
        """Give the blocks back. What they hold stays findable, as far as it was computed and its tokens are known."""
        store = None
        if self.config.reuse.enabled:
            computed = request.position if request.in_context else request.original_prompt_len + request.num_outputs - 1
            store = min(computed, request.reuse.num_known)
        self.kv_cache.remove_sequence(request.slot, store, self._clock.now())

    def _leave(self, request: Request) -> None:
        """Free all that the request holds. What is under way for it means nothing any more."""
        for flight in self._in_flight:
            flight.dropped.add(request.slot)
        if self._lockstep:
            self._lockstep.forget(request)
        if self.kv_cache.holds(request.slot):
            self._release_blocks(request)
        self.active.remove(request)
        self._admission.forget(request)
        request.complete()

    def _stop_on_signals(self) -> None:
        for request_id in self._poll_stop_signals():
            self.stop(request_id)

    # Responses.

    def _response(self, request: Request, is_final: bool) -> Response:
        return response_of(request, is_final) if self.table.makes_tokens else Response(request, is_final)

    def _refuse(self, request: Request, error: str) -> None:
        self._observer.left(request, error)
        self._send_response(Response(request, is_final=True, error=error))
