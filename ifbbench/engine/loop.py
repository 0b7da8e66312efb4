"""The token generation loop: takes in, schedules, runs and answers requests, one iteration after the other."""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

from mypy_extensions import mypyc_attr

from ifbbench.clock import Clock
from ifbbench.engine.batch import NO_OUTPUTS, StepOutputs, check_outputs
from ifbbench.engine.interfaces import (
    Executor,
    Observer,
    PredictableExecutor,
    RequestSource,
    Scheduler,
    SchedulerStalled,
    Unobserved,
)
from ifbbench.engine.passes import BatchBuilder
from ifbbench.engine.plan import Plan
from ifbbench.engine.records import CacheState, InFlightIteration, IterationRecord, forget_empty_turns
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response, response_of, streamed
from ifbbench.errors import IfbbenchError

NextChange = Callable[[float], float | None]
"""Takes the time and returns when more requests will have arrived, in seconds on the run's clock; None if only a
response lets one arrive, or none will."""


class ExecutorFailed(IfbbenchError):
    """The executor raised. The requests of its batch have ended with an error; the loop can continue with others."""


def nothing_queued() -> int:
    """The client hands out all requests at once."""
    return 0


def no_stop_signals() -> Collection[int]:
    """No request is stopped."""
    return ()


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenGenerationLoop:
    """The loop over one scheduler and one executor. `step()` runs one iteration in the caller's thread.

    Loops of a simulated device derive from it: see `PredictedLoop`, and `SteppedLoop` of a fleet.

    get_requests(n): returns at most n requests that have arrived. It is called at the start of an iteration.
    send_response(response): is called at the end of the iteration that yields the response.
    queued(): returns how many requests have arrived that `get_requests` has not returned.
    poll_stop_signals(): returns the ids of requests to stop; unknown ids are ignored. It is called at the end of an
        iteration.
    next_change(now_s): see NextChange. If it is given, `get_requests` is called only when requests may have arrived or
        one has left.
    next_priority(): see `RequestSource`.
    is_open_loop: whether no response lets a request arrive.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        get_requests: Callable[[int], list[Request]],
        send_response: Callable[[Response], None],
        observer: Observer | None = None,
        queued: Callable[[], int] = nothing_queued,
        poll_stop_signals: Callable[[], Collection[int]] = no_stop_signals,
        *,
        next_change: NextChange | None = None,
        next_priority: Callable[[], float | None] | None = None,
        is_open_loop: bool = False,
    ) -> None:
        self.scheduler, self.iteration = scheduler, 0
        self._executor, self._clock = executor, clock
        self._queued, self._poll_stop_signals, self._next_change = queued, poll_stop_signals, next_change
        self._send_response, self._observer = send_response, (observed := observer or Unobserved())

        refused = self._refused = [0]  # how many requests

        def refuse(request: Request, error: str) -> None:  # no method: a cycle would keep all blocks after the last use
            refused[0] += 1
            observed.left(request, error)
            send_response(Response(request, is_final=True, error=error))

        self._source = RequestSource(get_requests, refuse, next_priority)
        self._builder = BatchBuilder(scheduler.table, scheduler.layout)
        # Read in each iteration: attributes of a protocol take longer.
        self._table, self._layout = scheduler.table, scheduler.layout
        self._max_in_flight, self._num_micro_batches = scheduler.max_in_flight, scheduler.num_micro_batches
        self._device = executor if isinstance(executor, PredictableExecutor) else None
        self._in_flight: deque[InFlightIteration] = deque()
        self._is_open_loop = is_open_loop
        self._activated: list[Request] = []
        self._failure: ExecutorFailed | None = None
        # No request arrives before this time, unless a request that leaves lets one in.
        self._quiet_until_s, self._known_queued = -math.inf, 0

    def step(self) -> bool:
        """Run one iteration; False, with nothing done, if no request is active.

        False, too, while all active requests wait for keys and values of other engines, or of stores. With overlap or
        pipeline stages, the iteration that this call submits is collected by a later one. Raises ExecutorFailed after
        the requests of the failed batch were answered, SchedulerStalled, and PolicyFailed."""
        in_flight, table = self._in_flight, self._table
        start_s = self._clock.now()
        if start_s >= self._quiet_until_s:
            self._activated += self._admit(start_s)
            start_s = self._clock.now()  # in real time, requests may have arrived since the step began
            if self._admits_again():
                return True
        if not self._has_work:
            # Turns of micro batches without requests since the last one ended did not happen.
            self.iteration -= forget_empty_turns(in_flight)
            if not in_flight:
                return False

        plan = self._schedule(start_s)
        if self._run_together(plan, start_s):
            return True
        stay_in_flight = 0
        if not plan.does_nothing or self._is_empty_turn(plan):
            submitted = self._submit(plan, start_s)
            # All but the oldest of a full set of iterations stay in flight. After an error none is built upon another.
            if submitted.error is None:
                stay_in_flight = self._max_in_flight - 1
        elif not in_flight and (table.requests or plan.awaits_stores) and self._failure is None:
            if table.num_transferring or plan.awaits_stores:
                return False
            blocked = ", ".join(f"request {item.request.request_id} by {item.limit}" for item in plan.blocked)
            raise SchedulerStalled(
                f"{self.scheduler.name} runs none of {len(table.requests)} active requests (blocked: {blocked})"
            )
        self._complete_all_but(stay_in_flight)
        return True

    def stop(self, request_id: int, error: str | None = None) -> None:
        """End a waiting or active request now: its blocks are released, and its final response has the tokens generated
        so far, or `error`. An unknown id is ignored."""
        request = self.scheduler.find(request_id)
        if request is None:
            return
        self._observer.left(request, error)
        has_tokens = request.table is not None and error is None
        response = response_of(request, is_final=True) if has_tokens else Response(request, is_final=True, error=error)
        self._remove(request)
        self._send_response(response)

    def abort(self, error: str) -> None:
        """End everything: iterations in flight are discarded, and every fetched request fails with `error`."""
        while self._in_flight:
            self._collect(self._in_flight.popleft())
        for request in [*self._table.requests.values(), *self.scheduler.waiting]:
            self.stop(request.request_id, error)

    def truncate_blocks(self, conversation: Request, num_tokens: int) -> None:
        """Release the reusable blocks of a conversation after its first `num_tokens` tokens."""
        self.scheduler.truncate(conversation, num_tokens)

    @property
    def num_in_flight(self) -> int:
        """Iterations that were submitted and not collected."""
        return len(self._in_flight)

    # The stages of an iteration, in order.

    @property
    def _has_work(self) -> bool:
        """Whether a request waits or runs."""
        return len(self._table.requests) > self._table.num_transferring or len(self.scheduler.waiting) > 0

    def _admit(self, now_s: float) -> Sequence[Request]:
        activated = self.scheduler.admit(self._source)
        if self._next_change is not None:
            change_s = self._next_change(now_s)
            self._quiet_until_s = math.inf if change_s is None else change_s
            self._known_queued = self._queued()
        return activated

    def _admits_again(self) -> bool:
        """Whether no iteration begins before more requests are admitted: see `SteppedLoop`."""
        return False

    @property
    def _num_queued(self) -> int:
        """Requests that have arrived and were not returned by `get_requests`; the same as before in a quiet period."""
        if self._clock.now() >= self._quiet_until_s:
            self._known_queued = self._queued()
        return self._known_queued

    def _schedule(self, start_s: float) -> Plan:
        plan = self.scheduler.schedule(self.iteration, start_s, self._in_flight, self._complete_oldest)
        self._activated += plan.entered
        return plan

    def _run_together(self, plan: Plan, start_s: float) -> bool:
        """Run iterations of `plan` at once; returns False, with nothing done, if it cannot: see `PredictedLoop`."""
        return False

    def _is_empty_turn(self, plan: Plan) -> bool:
        """Whether an iteration without requests is run: the turn of a micro batch while others are in flight, or wait
        for their turn because their iterations were collected before a pause, or after an error."""
        if self._num_micro_batches == 1 or not self._table.requests:
            return False
        return plan.in_flight > 0 or any(not iteration.is_empty for iteration in self._in_flight)

    def _submit(self, plan: Plan, start_s: float) -> InFlightIteration:
        """Build and submit the iteration, and advance its requests. An exception of the executor is kept in `error`."""
        scheduler = self.scheduler
        batches = self._builder.build(self.iteration, plan, scheduler.allocate(plan))
        record = self._record(plan, scheduler.cache_state(), start_s)
        if batches and batches[0].adapters is not None:
            record.loads = batches[0].adapters.loads
        iteration = InFlightIteration(record, batches, plan.output_rows(), set(plan.idle.tolist()))
        try:
            for batch in batches:
                self._executor.submit(batch)
                iteration.num_submitted += 1
        except Exception as error:
            iteration.error = error
        record.submit_s = self._clock.now()
        record.recomputed = scheduler.advance(plan, self.iteration)
        self._in_flight.append(iteration)
        self._activated = []
        self.iteration += 1
        return iteration

    def _record(self, plan: Plan, cache: CacheState, start_s: float) -> IterationRecord:
        """The record of an iteration of `plan` that began at `start_s`."""
        scheduler, table, chunks = self.scheduler, self._table, plan.chunks
        num_context_tokens = padding = 0
        for chunk in chunks:
            num_context_tokens += chunk.length
        if self._layout.is_padded and chunks:
            padding = max([chunk.length for chunk in chunks]) * len(chunks) - num_context_tokens
        tokens = num_generation = len(plan.rows)
        if table.any_wide_steps:
            tokens = int(table.step_tokens[plan.rows].sum())
            tokens += sum([chunk.request.num_draft_tokens for chunk in chunks if chunk.is_last])
        waiting = scheduler.waiting
        return IterationRecord(
            self.iteration,
            micro_batch=self.iteration % self._max_in_flight,
            start_s=start_s,
            timestamp=self._clock.timestamp(),
            active=len(table.requests) - table.num_transferring,
            queued=len(waiting) + self._num_queued,
            activated=self._activated,
            context=chunks,
            num_context_tokens=num_context_tokens,
            recomputed=0,
            num_generation=num_generation,
            num_generation_tokens=tokens,
            held=plan.held,
            paused=plan.paused,
            left_out=plan.first_left_out(waiting),
            blocked=plan.blocked,
            cache=cache,
            idle=len(plan.idle) if chunks or num_generation else 0,
            padding=padding,
            num_micro_batches=self._num_micro_batches,
            in_flight=plan.in_flight,
            continued=plan.continued,
            queue_head=plan.queue_head,
        )

    def _complete_all_but(self, count: int) -> None:
        """Complete the oldest iterations in flight, until so many are left, and end the step."""
        while len(self._in_flight) > count:
            self._complete_oldest()
        self._end_step()

    def _complete_oldest(self) -> None:
        iteration = self._in_flight.popleft()
        outputs = self._collect(iteration)
        self._complete(iteration, outputs, self._clock.now())

    def _complete(self, iteration: InFlightIteration, outputs: list[StepOutputs], end_s: float) -> None:
        """Take in the outputs of an iteration that was collected at `end_s`, record it and send the responses."""
        record, table = iteration.record, self._table
        record.end_s = record.submit_s if iteration.is_empty else end_s
        if iteration.error is not None:
            self._fail(iteration, iteration.error)
            return
        record.finished = self.scheduler.update(iteration, outputs)
        self._observer.iteration(record)
        if table.num_special and not self._layout.is_padded:
            for response in streamed(iteration, table):
                self._send_response(response)
        self._finish(record.finished)

    def _end_step(self) -> None:
        for request_id in self._poll_stop_signals():
            self.stop(request_id)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _collect(self, iteration: InFlightIteration) -> list[StepOutputs]:
        """The outputs of each pass. An exception, also of outputs that do not fit the pass, is kept in `error`."""
        outputs = list[StepOutputs]()
        if iteration.is_repeated:
            self._executor.collect()
        for batch in iteration.batches[: iteration.num_submitted]:
            iteration.num_submitted -= 1
            try:
                of_pass = self._executor.collect()
                if of_pass is not NO_OUTPUTS:
                    check_outputs(of_pass, batch)
                outputs.append(of_pass)
            except Exception as error:
                iteration.error = iteration.error or error
            if len(iteration.batches) > 1 and iteration.record.context_end_s is None:
                iteration.record.context_end_s = self._clock.now()
        return outputs

    def _finish(self, requests: list[Request]) -> None:
        for request in requests:
            response = response_of(request, is_final=True)
            self._remove_complete(request)
            self._send_response(response)

    def _remove_complete(self, request: Request) -> None:
        """Release all that a complete request holds."""
        self._remove(request)

    def _fail(self, iteration: InFlightIteration, error: Exception) -> None:
        """The executor failed: all requests of the batch end, because the contents of their KV blocks are unknown."""
        self._failure = ExecutorFailed(f"the executor failed in iteration {iteration.record.iteration}: {error}")
        self._failure.__cause__ = error
        self._observer.iteration(iteration.record)
        for later in self._in_flight if iteration.record.loads else ():  # may need what was not copied
            later.error = error
        for request in self.scheduler.lose(iteration):
            self.stop(request.request_id, f"the executor failed: {error}")

    def _remove(self, request: Request) -> None:
        """Release all that a request holds, and ignore its outputs in flight."""
        self._leave_in_flight(request)
        self.scheduler.remove(request)

    def _leave_in_flight(self, request: Request) -> None:
        """Ignore the outputs in flight of a request that ends."""
        if request.table is not None:
            for iteration in self._in_flight:
                iteration.dropped.add(request.slot)
        self._quiet_until_s = -math.inf
