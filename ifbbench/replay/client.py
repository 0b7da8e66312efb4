"""The client of a replay: hands out requests that have arrived, and takes their responses."""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.clock import NANOSECONDS, Clock
from ifbbench.engine.arrays import IntArray
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.replay.priority_queue import PriorityQueue
from ifbbench.rundir.metrics import distribution
from ifbbench.schedulers.vllm.rules import TOGETHER
from ifbbench.settings.config import RunConfig
from ifbbench.virtual_clock import VirtualClock, tick, to_seconds
from ifbbench.workload.arrivals import predecessors, session_starts, waited_for
from ifbbench.workload.trace import NO_ITERATION, NO_REQUEST, RequestColumns, Trace, TraceRequest, columns_of

MILLISECONDS = 1000
MANY_SLEEPS = 10_000
TICK_S = 1 / NANOSECONDS

MakeRequest = Callable[[int, TraceRequest], Request]
"""Makes the engine's request of the one at this index of the trace, when it is handed out."""


@dataclass(frozen=True, slots=True)
class StaticEmulation:
    """Static batching emulated by the client. A batch is handed out when no request is outstanding and `batch_size`
    requests have arrived, the oldest has waited for `timeout_s` seconds, or no more will arrive.

    gptManagerBenchmark waits for the timeout in the last case."""

    batch_size: int
    timeout_s: float


@mypyc_attr(allow_interpreted_subclasses=True)
class ReplayClient:
    """Submits requests when they have arrived; hands them out by priority, then by arrival.

    concurrency: maximum number of requests that are submitted and not answered. Another one is submitted when a
        response makes room; with `keeps_arrivals` it has arrived at its time in the trace and waits, else it arrives
        then, unless a later turn of a session waits.
    duration_s: no request arrives later than this.
    emulation: requests are handed out in batches; not together with `concurrency`.
    keeps_outputs: the tokens of each request are kept in `outputs`, by its id.
    wait_sleep_s: `wait` looks for requests at such intervals instead of exactly when the next one arrives.

    The turn of a session arrives `think_s` after the final responses to the turn before, and to others that it waits
    for, whatever they are.
    Requests are numbered in the order of submission; without sessions, that is their order in the trace.

    is_open_loop: no response lets a request arrive.
    """

    def __init__(
        self,
        trace: Trace,
        clock: Clock,
        make_request: MakeRequest,
        *,
        concurrency: int | None = None,
        keeps_arrivals: bool = True,
        duration_s: float | None = None,
        emulation: StaticEmulation | None = None,
        wait_sleep_s: float | None = None,
        keeps_outputs: bool = True,
    ) -> None:
        self.outputs: dict[int, IntArray] = {}
        self.submitted = 0
        self.answered = 0
        self.handed_out = 0
        self._trace = trace
        self._clock = clock
        self._is_real_time = not isinstance(clock, VirtualClock)
        self._make_request = make_request
        columns = columns_of(trace.requests)
        self.is_open_loop = concurrency is None and columns.after is None and emulation is None
        self._places = len(trace) if concurrency is None else concurrency
        self._keeps_arrivals = keeps_arrivals or concurrency is None
        self._duration_s = inf if duration_s is None else duration_s
        size = columns.arrival_s.itemsize * len(trace)
        self._arrivals = array("d", columns.arrival_s if self._keeps_arrivals else bytes(size))
        self._turns: dict[int, list[int]] = {}
        self._num_unanswered: dict[int, int] = {}
        self._think_s = columns.think_s
        self._order: array[int] | None = None if columns.after is None else array("q")
        # Requests that come after no other, in order of arrival; the later turns with a known arrival, as a heap.
        self._first: Sequence[int] = range(len(trace)) if columns.after is None else self._find_sessions(columns)
        self._later: list[tuple[float, int]] = []
        self._next_first = 0
        self._num_first = bisect_right(self._first, self._duration_s, key=self._arrivals.__getitem__)
        self._room_s = 0.0
        self._lateness_s = array("d")
        self._held_until_s: dict[int, float] = {}
        self._queue = None if columns.priority is None else PriorityQueue(columns.priority)
        self._emulation = emulation
        self._batch_end = 0
        self._wait_sleep_s = wait_sleep_s
        self._keeps_outputs = keeps_outputs
        self._streamed: dict[int, list[IntArray]] = {}
        self._find_due()

    @property
    def done(self) -> bool:
        """Whether every request has its final response, but for those that do not arrive within the duration."""
        is_idle = self.answered == self.submitted and not self._later
        return is_idle and self._next_first == self._num_first

    @property
    def next_event_s(self) -> float | None:
        """When `get_requests` may return more requests, on the run's clock, possibly in the past. None while that takes
        a response, and when all requests have been handed out."""
        oldest_s = self._oldest_s
        if oldest_s == inf:
            return None
        if self._emulation is None or self.handed_out < self._batch_end:
            return on_tick(oldest_s)
        if self._outstanding:
            return None
        return on_tick(self._batch_ready_s(self._emulation))

    def next_arrival_s(self, now_s: float) -> float | None:
        """When the first request is submitted after `now_s`, on the run's clock; None if that takes a response, and
        when all are. With emulated static batching, `now_s` while none is outstanding: one may be handed out at any
        time."""
        if self._emulation is not None and not self._outstanding:
            return now_s
        self._submit_until(now_s)
        return None if self._due_s == inf else self._due_s

    def wait(self) -> bool:
        """Wait until `get_requests` may return more requests; for when nothing is active. False, at once, if it may do
        so now or only after a response."""
        event_s, now = self.next_event_s, self._clock.now()
        if event_s is None or event_s <= now:
            return False
        if self._wait_sleep_s is not None:
            sleeps = (event_s - now) // self._wait_sleep_s
            # Simulated time passes all but the last of very many sleeps at once.
            event_s = now + self._wait_sleep_s * (1 if self._is_real_time or sleeps < MANY_SLEEPS else sleeps)
        self._clock.wait_until(event_s)
        return True

    def get_requests(self, max_requests: int) -> list[Request]:
        """Up to `max_requests` that are due; a negative number means no limit."""
        first = self.handed_out
        count = self._due() - first
        if max_requests >= 0:
            count = min(count, max_requests)
        self.handed_out += count
        queue = self._queue
        numbers = list(range(first, first + count)) if queue is None else [queue.pop() for _ in range(count)]
        indices = numbers if self._order is None else [self._order[number] for number in numbers]
        return [self._make_request(index, self._trace.requests[index]) for index in indices]

    def next_priority(self) -> float | None:
        """The highest priority among the requests that are due, None if there are none. None always where the trace has
        no priorities: then requests are handed out in the order in which the engine runs them."""
        if self._queue is None or self._due() == self.handed_out:
            return None
        return self._queue.highest_priority

    def queued(self) -> int:
        """Number of requests that were submitted and not handed out."""
        self._submit_until(self._clock.now())
        return self.submitted - self.handed_out

    def send_response(self, response: Response) -> None:
        """Take a response: new tokens of a streaming request, or the final response of any."""
        if response.is_final:
            now = self._answered_s()
            self._submit_until(now)
            self.answered += 1
            self._room_s = now
            for index in self._turns.pop(response.request.index, ()):
                self._num_unanswered[index] -= 1
                if not self._num_unanswered[index]:
                    del self._num_unanswered[index]
                    self._begin_thinking(index, now)
            if not self._keeps_arrivals and now > self._duration_s:
                self._num_first = self._next_first
            self._find_due()
            self._submit_until(now)
        if self._keeps_outputs:
            self._keep_output(response)

    def arrival_s(self, request: Request) -> float:
        """When `request` arrived, in seconds on the run's clock."""
        return self._arrivals[request.index]

    def held_until_s(self, request: Request) -> float:
        """When there was room for `request` and it had arrived."""
        return self._held_until_s.get(request.index, self._arrivals[request.index])

    def arrivals(self) -> dict[str, Any]:
        """The figures `arrivals` of `summary.json`: the rate at which requests were to arrive (None where that depends
        on responses, and of all at once), the rate at which they were submitted, and how late that was."""
        lateness_s, gaps = self._lateness_s, self.submitted - 1
        asked_s = self._arrival_of(gaps) - self._arrival_of(0) if gaps > 0 else 0.0
        submitted_s = asked_s + lateness_s[-1] - lateness_s[0] if gaps > 0 else 0.0
        is_asked = self._keeps_arrivals and self._order is None and asked_s >= TICK_S
        return {
            "requested_rate_per_s": gaps / asked_s if is_asked else None,
            "achieved_rate_per_s": gaps / submitted_s if submitted_s >= TICK_S else None,
            "lateness_s": distribution(lateness_s),
        }

    def _answered_s(self) -> float:
        """When the response that is being sent reaches the client."""
        return self._clock.now()

    @property
    def _outstanding(self) -> int:
        return self.handed_out - self.answered

    @property
    def _oldest_s(self) -> float:
        """The arrival of the request that has waited longest, or else when the next one is submitted."""
        number = self.handed_out if self._queue is None else self._queue.oldest
        return self._arrival_of(number) if number < self.submitted else self._due_s

    def _arrival_of(self, number: int) -> float:
        return self._arrivals[number if self._order is None else self._order[number]]

    def _keep_output(self, response: Response) -> None:
        index, tokens = response.request.index, response.output_tokens
        if not response.is_final:
            if tokens is not None and response.request.beam_width == 1:  # beams are final at the end only
                self._streamed.setdefault(index, []).append(tokens)
            return
        streamed = self._streamed.pop(index, [])
        if response.error is None and tokens is not None:
            self.outputs[response.request.request_id] = np.concatenate([*streamed, tokens]) if streamed else tokens

    def _find_sessions(self, columns: RequestColumns) -> "array[int]":
        """Note the turns that follow each request; returns the requests that follow no other."""
        before = predecessors(columns)
        session_starts(before)
        for index, others in waited_for(columns, before).items():
            self._num_unanswered[index] = len(others)
            for other in others:
                self._turns.setdefault(other, []).append(index)
        return array("q", np.flatnonzero(before == NO_REQUEST).tobytes())

    def _begin_thinking(self, index: int, now: float) -> None:
        """All that this turn waits for has ended: its arrival is known."""
        assert self._think_s is not None
        arrival_s = self._arrivals[index] = now + self._think_s[index]
        if arrival_s <= self._duration_s:
            heappush(self._later, (arrival_s, index))

    def _find_due(self) -> None:
        """Set `_due_s`, when the next request is submitted; infinite if that takes a response."""
        self._due_s = inf
        if self.submitted - self.answered < self._places:
            if self._next_first < self._num_first:
                self._due_s = self._arrivals[self._first[self._next_first]]
            if self._later:
                self._due_s = min(self._due_s, self._later[0][0])

    def _submit_until(self, now: float) -> None:
        """Submit the requests that have arrived, in order of arrival, as long as there are places."""
        while self._due_s <= now:
            later_s = self._later[0][0] if self._later else inf
            submitted_s = now if self._is_real_time else max(self._due_s, self._room_s)
            # A turn that is due goes before the start of a session that has no time of its own.
            if later_s == self._due_s or (later_s <= now and not self._keeps_arrivals):
                _, index = heappop(self._later)
            else:
                index = self._first[self._next_first]
                self._next_first += 1
                if not self._keeps_arrivals:
                    submitted_s = self._arrivals[index] = self._room_s
            self._enter(self.submitted, index)
            if self._order is not None:
                self._order.append(index)
            self.submitted += 1
            self._lateness_s.append(submitted_s - self._arrivals[index])
            if self._room_s > self._arrivals[index]:
                self._held_until_s[index] = self._room_s
            self._find_due()

    def _enter(self, number: int, index: int) -> None:
        """The request at `index` is the `number`-th that was submitted: it may be handed out."""
        if self._queue is not None:
            self._queue.push(number, index)

    def _due(self) -> int:
        """How many requests are to be handed out by now, in all."""
        now = self._clock.now()
        self._submit_until(now)
        if self._emulation is None or self.submitted == self.handed_out:
            return self.submitted
        is_next_batch = self.handed_out == self._batch_end and not self._outstanding
        if is_next_batch and now >= self._batch_ready_s(self._emulation):
            self._batch_end = min(self.submitted, self.handed_out + self._emulation.batch_size)
        return self._batch_end

    def _batch_ready_s(self, emulation: StaticEmulation) -> float:
        """When the next emulated batch is due, if nothing is outstanding."""
        end = self.handed_out + emulation.batch_size
        if end <= self.submitted:
            full_s = self._arrival_of(end - 1)
        else:
            missing = end - self.submitted
            first = self._first[self._next_first : min(self._next_first + missing, self._num_first)]
            coming = sorted([*map(self._arrivals.__getitem__, first), *(arrival_s for arrival_s, _ in self._later)])
            full_s = coming[:missing][-1] if coming else self._arrival_of(self.submitted - 1)
        return min(full_s, self._oldest_s + emulation.timeout_s)


class IterationClient(ReplayClient):
    """A ReplayClient that hands out requests in the iterations in which a recorded engine got them, in their order
    there, and stops those that were stopped there. A request arrives when it is handed out."""

    def follow(self, iteration: Callable[[], int], in_flight: Callable[[], int], numbers_by_arrival: bool) -> None:
        """Requests come in the iterations of an engine. Called once, before anything else.

        iteration(): returns the number of iterations so far.
        in_flight(): returns the number of iterations in flight.
        numbers_by_arrival: requests of equal priority run in the order of their recorded arrivals.
        """
        columns = columns_of(self._trace.requests)
        assert columns.added_in is not None
        assert columns.added_with is not None
        assert columns.stopped_in is not None
        self._iteration, self._in_flight, self._numbers_by_arrival = iteration, in_flight, numbers_by_arrival
        self.is_open_loop = False
        self._added_in, self._added_with, self._ids = columns.added_in, columns.added_with, columns.request_id
        self._in_order = np.lexsort((columns.request_id, columns.added_in)).tolist()
        self._order = array("q", self._in_order)
        self._queue = None
        arrivals_s = np.asarray(columns.arrival_s)
        self._arrival_ranks = np.unique(arrivals_s, return_inverse=True)[1].tolist()
        stopped_in = columns.stopped_in
        self._stops = sorted(
            (stopped_in[index], index) for index in self._in_order if stopped_in[index] != NO_ITERATION
        )
        self._num_reached = 0  # iterations that count as over, because the engine is idle

    @property
    def done(self) -> bool:
        return self.answered == len(self._trace)

    @property
    def next_event_s(self) -> float | None:
        return None if self.submitted == len(self._trace) else self._clock.now()

    def next_arrival_s(self, now_s: float) -> float | None:
        """See ReplayClient. It depends on the iteration, so that each is looked at."""
        return now_s if self.submitted < len(self._trace) or self._stops else None

    def get_requests(self, max_requests: int) -> list[Request]:
        requests = super().get_requests(max_requests)
        for request in requests if self._numbers_by_arrival else ():
            number = (self._arrival_ranks[request.index] + 1) * TOGETHER + request.index % TOGETHER
            request.order = (request.order[0], number)
        return requests

    def wait(self) -> bool:
        """The engine is idle: it gets the next request, in whichever iteration that was."""
        if self.submitted == len(self._trace) or self._due() > self.handed_out:
            return False
        self._num_reached = self._added_in[self._in_order[self.submitted]]
        return True

    def stops(self) -> list[int]:
        """The ids of the requests to stop before the next iteration."""
        count = sum(stopped_in <= self._iteration() for stopped_in, _ in self._stops)
        stopped, self._stops = self._stops[:count], self._stops[count:]
        return [self._ids[index] for _, index in stopped]

    def _find_due(self) -> None:
        self._due_s = inf

    def _submit_until(self, now: float) -> None:
        iteration = max(self._iteration(), self._num_reached)
        order = self._in_order
        while self.submitted < len(order) and self._added_in[index := order[self.submitted]] <= iteration:
            if self._in_flight() > self._added_with[index]:
                return
            self._arrivals[index] = now
            self._enter(self.submitted, index)
            self.submitted += 1
            self._lateness_s.append(0.0)


def make_client(
    config: RunConfig,
    trace: Trace,
    clock: Clock,
    make_request: MakeRequest,
    make: Callable[..., ReplayClient] = ReplayClient,
) -> ReplayClient:
    """The client with the settings of `config`, made by `make`."""
    emulation = None
    if config.static_emulated_batch_size is not None:
        timeout_s = config.static_emulated_timeout / MILLISECONDS
        emulation = StaticEmulation(config.static_emulated_batch_size, timeout_s)
    return make(
        trace,
        clock,
        make_request,
        concurrency=config.concurrency,
        keeps_arrivals=config.keeps_arrivals,
        duration_s=config.duration,
        emulation=emulation,
        wait_sleep_s=None if config.wait_sleep is None else config.wait_sleep / MILLISECONDS,
        keeps_outputs=config.responses_json is not None,
    )


def on_tick(seconds: float) -> float:
    """The first whole nanosecond at or after `seconds`: a virtual clock has no other times to wait for."""
    return to_seconds(tick(seconds))
