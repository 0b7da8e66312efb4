"""The token generation loop: takes in, schedules, runs and answers requests, one iteration after the other."""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

from mypy_extensions import mypyc_attr

from ifbbench.clock import Clock, VirtualClock, tick, to_seconds
from ifbbench.engine.arrays import NO_ROWS
from ifbbench.engine.batch import NO_OUTPUTS, BatchBuilder, StepOutputs, check_outputs
from ifbbench.engine.interfaces import (
    Executor,
    HeldStretch,
    IterationWork,
    KvScheduler,
    KvTransfers,
    Observer,
    PredictableExecutor,
    RequestSource,
    Scheduler,
    SchedulerStalled,
    Unobserved,
)
from ifbbench.engine.plan import Plan
from ifbbench.engine.records import NO_CACHE_STATE, CacheState, InFlightIteration, IterationRecord, forget_empty_turns
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response, response_of, streamed
from ifbbench.engine.stretch import Growth, Stretch, later_record
from ifbbench.errors import IfbbenchError

# More iterations at once are no faster, and no progress is shown while they are computed.
MAX_ITERATIONS_AT_ONCE = 1024

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


def is_predicted(executor: Executor, clock: Clock, next_change: NextChange | None) -> bool:
    """Whether a loop knows in advance how long iterations take and when requests arrive."""
    return isinstance(executor, PredictableExecutor) and isinstance(clock, VirtualClock) and next_change is not None


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenGenerationLoop:
    """The loop over one scheduler and one executor. `step()` runs one iteration in the caller's thread.

    get_requests(n): returns at most n requests that have arrived; called at the start of an iteration.
    send_response(response): called at the end of the iteration that yields it.
    queued(): how many requests have arrived that `get_requests` has not returned.
    poll_stop_signals(): ids of requests to stop, called at the end of an iteration. Unknown ids are ignored.
    next_change(now_s): see NextChange. If it is given, `get_requests` is called only when requests may have arrived or
        one has left. If the executor can predict its times too, iterations between two events are advanced together,
        without a call to any of these functions.
    next_priority(): see `RequestSource`.
    is_open_loop: no response lets a request arrive.
    holds_ends: on a virtual clock, `step` does not take in the outputs of its iterations, and leaves the clock at their
        end; `take_in` does, before the next step. Who steps several loops learns so what arrives until then. For the
        same reason, a step that refuses requests runs no iteration.
    transfers: of keys and values to and from other engines. Then `step` also returns False while requests wait for
        these only.
    sees_first_tokens: with `holds_ends`, what is taken in at a time are not several iterations after a prompt.
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
        holds_ends: bool = False,
        transfers: KvTransfers | None = None,
        sees_first_tokens: bool = False,
    ) -> None:
        self.scheduler, self.iteration = scheduler, 0
        self._executor, self._clock = executor, clock
        self._queued, self._poll_stop_signals, self._next_change = queued, poll_stop_signals, next_change
        self._send_response, self._observer = send_response, (observed := observer or Unobserved())

        # Requests that were refused, and of these, those that the latest step knew of.
        refused = self._refused = [0]
        self._known_refused = 0

        def refuse(request: Request, error: str) -> None:  # no method: a cycle would keep all blocks after the last use
            refused[0] += 1
            observed.left(request, error)
            send_response(Response(request, is_final=True, error=error))

        self._source = RequestSource(get_requests, refuse, next_priority)
        self._builder = BatchBuilder(scheduler.table, scheduler.layout)
        # Read in each iteration: attributes of a protocol take longer.
        self._table, self._layout = scheduler.table, scheduler.layout
        self._max_in_flight, self._num_micro_batches = scheduler.max_in_flight, scheduler.num_micro_batches
        # Where times are known in advance.
        self._device = executor if isinstance(executor, PredictableExecutor) else None
        self._virtual_clock = clock if isinstance(clock, VirtualClock) else None
        self._in_flight: deque[InFlightIteration] = deque()
        self._is_open_loop = is_open_loop
        self._activated: list[Request] = []
        self._failure: ExecutorFailed | None = None
        # How many iterations the step leaves in flight, and what is left of it to do.
        self._stay_in_flight = 0
        self._holds_ends, self._sees_first_tokens = holds_ends, sees_first_tokens
        self._held: Callable[[], None] | None = None
        self._transfers, self._only_transfers = transfers, False
        self._held_stretch: HeldStretch | None = None
        self._kv_scheduler = scheduler if transfers is not None and isinstance(scheduler, KvScheduler) else None
        # Until then no request arrives; a request that leaves may let one in.
        self._quiet_until_s, self._known_queued = -math.inf, 0

    def step(self) -> bool:
        """Run one iteration; False, with nothing done, if no request is active.

        With overlap or pipeline stages, the iteration that this call submits is collected by a later one. Raises
        ExecutorFailed after the requests of the failed batch were answered, SchedulerStalled, and PolicyFailed."""
        scheduler, in_flight, self._only_transfers = self.scheduler, self._in_flight, False
        start_s = self._clock.now()
        if start_s >= self._quiet_until_s:
            self._activated += self._admit(start_s)
            start_s = self._clock.now()  # in real time, requests may have arrived since the step began
            if self._holds_ends and self._refused[0] > self._known_refused:
                # What these answers let arrive at this very time is admitted, too.
                self._known_refused, self._quiet_until_s = self._refused[0], -math.inf
                return True
        if not self._has_work:
            # Turns of micro batches without requests since the last one ended did not happen.
            self.iteration -= forget_empty_turns(in_flight)
            if not in_flight:
                return False

        plan = scheduler.schedule(self.iteration, start_s, in_flight, self._complete_oldest)
        self._activated += plan.entered
        if self._transfers is not None and plan.receiving:
            self._transfers.reserved(plan.receiving, start_s)
        if self._device is not None and (count := scheduler.horizon(plan)):
            self._run_together(self._device, plan, count, start_s)
            return True

        self._stay_in_flight = 0
        if not plan.does_nothing or self._is_empty_turn(plan):
            submitted = self._submit(plan, start_s)
            # All but the oldest of a full set of iterations stay in flight. After an error none is built upon another.
            if submitted.error is None:
                self._stay_in_flight = self._max_in_flight - 1
        elif not in_flight and self._table.num_transferring and self._failure is None:
            self._only_transfers = True
            return False
        elif not in_flight and self._table.requests and self._failure is None:
            blocked = ", ".join(f"request {item.request.request_id} by {item.limit}" for item in plan.blocked)
            raise SchedulerStalled(
                f"{scheduler.name} runs none of {len(self._table.requests)} active requests (blocked: {blocked})"
            )
        if self._holds_ends:
            self._hold_oldest()
            return True
        while len(in_flight) > self._stay_in_flight:
            self._complete_oldest()
        self._end_step()
        return True

    @property
    def is_idle(self) -> bool:
        """Whether it does nothing until more requests arrive."""
        if self._in_flight or self._held is not None:
            return False
        return self._only_transfers or not self._has_work

    @property
    def waits_for_transfers(self) -> bool:
        """Whether its latest step did nothing because all that it has taken waits for keys and values. Requests that
        have arrived may wait until those leave."""
        return self._only_transfers

    @property
    def _has_work(self) -> bool:
        """Whether a request waits or runs."""
        return len(self._table.requests) > self._table.num_transferring or len(self.scheduler.waiting) > 0

    @property
    def is_held(self) -> bool:
        """Whether outputs of the latest step are to be taken in."""
        return self._held is not None

    def take_in(self) -> None:
        """Take in outputs of the latest step; if it has more, they are held, and the clock is at their end."""
        held, self._held = self._held, None
        if held is not None:
            held()

    def wake(self) -> None:
        """Something has come that it was not asked for: a request, or keys and values."""
        self._only_transfers, self._quiet_until_s = False, -math.inf

    def lose_engine(self, time_s: float) -> None:
        """The engine is lost at `time_s`: iterations that have not ended by then never do. Only with `holds_ends`; the
        loop is of no use afterwards, and its requests have not ended."""
        stretch, self._held, self._held_stretch = self._held_stretch, None, None
        if stretch is not None:
            self._complete_before(stretch, tick(time_s))
        self._in_flight.clear()

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

    def _admit(self, now_s: float) -> Sequence[Request]:
        if self._transfers is not None and self._kv_scheduler is not None:
            for request in self._transfers.take_sent():
                self.scheduler.remove(request)
            if received := self._transfers.take_received():
                self._kv_scheduler.receive(received)
        activated = self.scheduler.admit(self._source)
        if self._next_change is not None:
            change_s = self._next_change(now_s)
            self._quiet_until_s = math.inf if change_s is None else change_s
            self._known_queued = self._queued()
        return activated

    @property
    def _num_queued(self) -> int:
        """Requests that have arrived and were not returned by `get_requests`; the same as before in a quiet period."""
        if self._clock.now() >= self._quiet_until_s:
            self._known_queued = self._queued()
        return self._known_queued

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
        )

    def _complete_oldest(self) -> None:
        """Collect the oldest iteration in flight, and complete it."""
        iteration = self._in_flight.popleft()
        outputs = self._collect(iteration)
        self._complete(iteration, outputs, iteration.record.submit_s if iteration.is_empty else self._clock.now())

    def _complete(self, iteration: InFlightIteration, outputs: list[StepOutputs], end_s: float) -> None:
        """Take in the outputs of an iteration that was collected at `end_s`, record it and send the responses."""
        record, table = iteration.record, self._table
        record.end_s = end_s
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

    def _hold_oldest(self) -> None:
        """Collect the oldest iteration that does not stay in flight, and hold it; end the step if there is none."""
        if len(self._in_flight) <= self._stay_in_flight:
            self._end_step()
            return
        iteration = self._in_flight.popleft()
        outputs = self._collect(iteration)
        end_s = iteration.record.submit_s if iteration.is_empty else self._clock.now()

        def complete() -> None:
            self._complete(iteration, outputs, end_s)
            self._hold_oldest()

        self._held = complete

    def _collect(self, iteration: InFlightIteration) -> list[StepOutputs]:
        """The outputs of each pass. An exception, also of outputs that do not fit the pass, is kept in `error`."""
        outputs = list[StepOutputs]()
        if iteration.is_repeated:
            self._executor.collect()
        for batch in iteration.batches[: iteration.num_submitted]:
            iteration.num_submitted -= 1
            try:
                of_pass = self._executor.collect()
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
            keeper = self._kv_scheduler
            if request.is_sent_on and keeper is not None and self._transfers is not None:
                self._leave_in_flight(request)
                keeper.keep(request)
                self._transfers.kept(request, self._clock.now())
            else:
                self._remove(request)
            self._send_response(response)

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

    # Iterations of which the times are known run without batches, and many together between two events.

    def _run_together(self, device: PredictableExecutor, plan: Plan, count: int, start_s: float) -> None:
        """Run iterations of `plan`, at most `count`, up to the one that starts after requests have arrived. With
        overlap the latest ones stay in flight, and those that were in flight before are completed first."""
        scheduler, in_flight, number = self.scheduler, self._in_flight, self.iteration
        if (plan.num_ending and not self._is_open_loop) or plan.receiving or plan.continued:
            count = 1
        if self._sees_first_tokens and any(iteration.record.context for iteration in in_flight):
            count = 1  # so that they are taken in when they are there
        change_s = self._next_change(start_s) if count > 1 and self._next_change is not None else None
        plans = scheduler.cycle(plan)[:count]
        turns = [self._record(one, NO_CACHE_STATE, start_s) for one in plans]
        works = [IterationWork(one.chunks, *scheduler.positions(one), one.loaded_tokens) for one in plans]
        if (adapters := works[0].adapters) is not None:
            turns[0].loads = adapters.loads
        times = device.run(
            works,
            min(count, MAX_ITERATIONS_AT_ONCE),
            number,
            len(in_flight),
            self._max_in_flight,
            None if change_s is None else tick(change_s),
        )
        self.iteration += len(times.start_ns)
        stretch = HeldStretch(plan, turns, times, number, start_s)
        if self._holds_ends:
            self._held, self._held_stretch = lambda: self._complete_together(stretch), stretch
        else:
            self._complete_together(stretch)

    def _complete_before(self, stretch: HeldStretch, time_ns: int) -> None:
        """Take in those iterations of `stretch`, and in flight before it, that are collected before `time_ns`."""
        times, in_flight = stretch.times, self._in_flight
        collected = times.collected_before(time_ns)
        of_stretch = collected - len(in_flight)
        if of_stretch > 0:
            del times.start_ns[of_stretch:], times.submit_ns[of_stretch:], times.collect_ns[collected:]
            self._complete_together(stretch)
            return
        for end_ns in times.collect_ns[:collected]:
            iteration = in_flight.popleft()
            end_s = iteration.record.submit_s if iteration.is_empty else to_seconds(end_ns)
            self._complete(iteration, [NO_OUTPUTS] * iteration.num_submitted, end_s)

    def _complete_together(self, stretch: HeldStretch) -> None:
        """Take in the iterations of a stretch."""
        plan, turns, times, number, start_s = stretch
        self._held_stretch = None
        scheduler, in_flight = self.scheduler, self._in_flight
        starts = [to_seconds(time_ns) for time_ns in times.start_ns]
        starts[0] = start_s  # before what the decision had to wait for
        submitted = [to_seconds(time_ns) for time_ns in times.submit_ns]
        ends = [to_seconds(time_ns) for time_ns in times.collect_ns]
        before_leaving = 1 if plan.num_ending or plan.awaits_in_flight else len(starts)
        growth = scheduler.repeat(plan, before_leaving)
        turns[0].recomputed = growth.recomputed
        self._activated = []
        if in_flight:
            before, ends = ends[: len(in_flight)], ends[len(in_flight) :]
            for end_s in before:
                iteration = in_flight.popleft()
                outputs = [NO_OUTPUTS] * iteration.num_submitted
                self._complete(iteration, outputs, iteration.record.submit_s if iteration.is_empty else end_s)
        if before_leaving < len(starts):
            growth = scheduler.repeat(plan, len(starts) - 1).after(growth.last, plan.num_ending)
        epoch_s = self._virtual_clock.epoch_s if self._virtual_clock is not None else 0
        self._complete_records(turns, starts, submitted, growth, epoch_s)
        collected = len(ends)
        for index in range(collected, len(starts)):
            turn = turns[index % len(turns)]
            record = later_record(turn, number + index, index, starts[index], epoch_s, growth, self._max_in_flight)
            record.submit_s = submitted[index]
            is_empty = turn.budget_used == 0 and turn.idle == 0
            in_flight.append(InFlightIteration(record, (), NO_ROWS, is_repeated=not is_empty))
        if collected:
            finished = scheduler.confirm(collected)
            turns[0].end_s = ends[0]
            del starts[collected:], submitted[collected:]
            del turns[collected:]
            self._observer.stretch(
                Stretch(turns, finished, starts, submitted, ends, growth, epoch_s, self._max_in_flight)
            )
            self._finish(finished)

    def _complete_records(
        self,
        turns: list[IterationRecord],
        starts: list[float],
        submitted: list[float],
        growth: Growth,
        epoch_s: int,
    ) -> None:
        """Complete the records of the first iterations of a stretch, which were made before any of them began."""
        first = turns[0]
        first.cache, first.submit_s = growth.cache(0), submitted[0]
        del turns[len(starts) :]
        for index, record in enumerate(turns[1:], start=1):
            record.iteration = first.iteration + index
            record.micro_batch = record.iteration % self._max_in_flight
            record.start_s, record.timestamp = starts[index], epoch_s + starts[index]
            record.submit_s, record.cache, record.activated = submitted[index], growth.cache(index), []
            record.in_flight = first.in_flight + first.num_scheduled - record.num_scheduled
