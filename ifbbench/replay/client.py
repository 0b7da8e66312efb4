"""The client of a replay: hands out requests that have arrived, and takes their responses."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ifbbench.clock import NANOSECONDS, Clock
from ifbbench.config import RunConfig
from ifbbench.engine.active import IntArray
from ifbbench.engine.in_flight import Response
from ifbbench.engine.request import Request
from ifbbench.workload.trace import Trace, TraceRequest, columns_of

MILLISECONDS = 1000

MakeRequest = Callable[[int, TraceRequest], Request]
"""Makes the engine's request of the one at this index of the trace, when it is handed out."""


@dataclass(frozen=True, slots=True)
class StaticEmulation:
    """Static batching emulated by the client. A batch is handed out when no request is outstanding and `batch_size`
    requests have arrived, the oldest has waited for `timeout_s` seconds, or no more will arrive.

    gptManagerBenchmark waits for the timeout in the last case."""

    batch_size: int
    timeout_s: float


class ReplayClient:
    """The queue of requests that have arrived; hands them out by priority, then by arrival.

    concurrency: maximum number of requests that have arrived and are not answered. The others arrive one by one, each
        when a response makes room; with `keeps_arrivals` not before their time in the trace.
    emulation: requests are handed out in batches; not together with `concurrency`.
    keeps_outputs: the tokens of each request are kept in `outputs`, by its id.
    wait_sleep_s: `wait` looks for requests at such intervals instead of exactly when the next one arrives.
    """

    def __init__(
        self,
        trace: Trace,
        clock: Clock,
        make_request: MakeRequest,
        *,
        concurrency: int | None = None,
        keeps_arrivals: bool = True,
        emulation: StaticEmulation | None = None,
        wait_sleep_s: float | None = None,
        keeps_outputs: bool = True,
    ) -> None:
        self.outputs: dict[int, IntArray] = {}
        self.answered = 0
        self.handed_out = 0
        self._trace = trace
        self._clock = clock
        self._make_request = make_request
        columns = columns_of(trace.requests)
        keeps_arrivals = keeps_arrivals or concurrency is None
        size = columns.arrival_s.itemsize * len(trace)
        self._arrivals = array("d", columns.arrival_s if keeps_arrivals else bytes(size))
        # Only the first `_num_known` requests have a known arrival; `concurrency` keeps the others back.
        self._num_known = len(trace) if concurrency is None else min(concurrency, len(trace))
        self._num_arrived = 0
        self._queue = None if columns.priority is None else _PriorityQueue(columns.priority)
        self._emulation = emulation
        self._batch_end = 0
        self._wait_sleep_s = wait_sleep_s
        self._keeps_outputs = keeps_outputs
        self._streamed: dict[int, list[IntArray]] = {}

    @property
    def done(self) -> bool:
        """Whether every request has its final response."""
        return self.answered == len(self._arrivals)

    @property
    def next_event_s(self) -> float | None:
        """When `get_requests` may return more requests, on the run's clock, possibly in the past. None while that takes
        a response, and when all requests have been handed out."""
        if self.handed_out == self._num_known:
            return None
        if self._emulation is None or self.handed_out < self._batch_end:
            return on_tick(self._arrivals[self._oldest])
        if self._outstanding:
            return None
        return on_tick(self._batch_ready_s(self._emulation))

    def next_arrival_s(self, now_s: float) -> float | None:
        """When the first request arrives after `now_s`, on the run's clock; None if that takes a response, and when all
        have arrived. With emulated static batching, `now_s` while none is outstanding: one may be handed out at any
        time."""
        if self._emulation is not None and not self._outstanding:
            return now_s
        arrived = self._arrived(now_s)
        return self._arrivals[arrived] if arrived < self._num_known else None

    def wait(self) -> bool:
        """Wait until `get_requests` may return more requests; for when nothing is active. False, at once, if it may do
        so now or only after a response."""
        event_s, now = self.next_event_s, self._clock.now()
        if event_s is None or event_s <= now:
            return False
        self._clock.wait_until(event_s if self._wait_sleep_s is None else now + self._wait_sleep_s)
        return True

    def get_requests(self, max_requests: int) -> list[Request]:
        """Up to `max_requests` that are due; a negative number means no limit."""
        first = self.handed_out
        count = self._due() - first
        if max_requests >= 0:
            count = min(count, max_requests)
        self.handed_out += count
        indices: Iterable[int] = range(first, first + count)
        if self._queue is not None:
            indices = [self._queue.pop() for _ in indices]
        return [self._make_request(index, self._trace.requests[index]) for index in indices]

    def next_priority(self) -> float | None:
        """The highest priority among the requests that are due, None if there are none. None always where the trace has
        no priorities: then requests are handed out in the order in which the engine runs them."""
        if self._queue is None or self._due() == self.handed_out:
            return None
        return self._queue.highest_priority

    def queued(self) -> int:
        """Number of requests that have arrived and were not handed out."""
        return self._arrived(self._clock.now()) - self.handed_out

    def send_response(self, response: Response) -> None:
        """Take a response: new tokens of a streaming request, or the final response of any."""
        if response.is_final:
            self.answered += 1
            if self._num_known < len(self._arrivals):
                # Arrivals of the trace that do not count are 0.
                self._arrivals[self._num_known] = max(self._arrivals[self._num_known], self._answered_s())
                self._num_known += 1
        if self._keeps_outputs:
            self._keep_output(response)

    def arrival_s(self, request: Request) -> float:
        """When `request` arrived, in seconds on the run's clock."""
        return self._arrivals[request.index]

    def _answered_s(self) -> float:
        """When the response that is being sent reaches the client."""
        return self._clock.now()

    @property
    def _outstanding(self) -> int:
        return self.handed_out - self.answered

    @property
    def _oldest(self) -> int:
        """The index of the request that has waited longest, or arrives next."""
        return self.handed_out if self._queue is None else self._queue.oldest

    def _keep_output(self, response: Response) -> None:
        index, tokens = response.request.index, response.output_tokens
        if not response.is_final:
            if tokens is not None:
                self._streamed.setdefault(index, []).append(tokens)
            return
        streamed = self._streamed.pop(index, [])
        if response.error is None and tokens is not None:
            self.outputs[response.request.request_id] = np.concatenate([*streamed, tokens]) if streamed else tokens

    def _arrived(self, now: float) -> int:
        """How many requests have arrived; these are the first ones of the trace."""
        while self._num_arrived < self._num_known and self._arrivals[self._num_arrived] <= now:
            if self._queue is not None:
                self._queue.push(self._num_arrived)
            self._num_arrived += 1
        return self._num_arrived

    def _due(self) -> int:
        """How many requests are to be handed out by now, in all."""
        now = self._clock.now()
        arrived = self._arrived(now)
        if self._emulation is None or arrived == self.handed_out:
            return arrived
        is_next_batch = self.handed_out == self._batch_end and not self._outstanding
        if is_next_batch and now >= self._batch_ready_s(self._emulation):
            self._batch_end = min(arrived, self.handed_out + self._emulation.batch_size)
        return self._batch_end

    def _batch_ready_s(self, emulation: StaticEmulation) -> float:
        """When the next emulated batch is due, if nothing is outstanding."""
        last = min(self.handed_out + emulation.batch_size, len(self._arrivals)) - 1
        return min(self._arrivals[last], self._arrivals[self._oldest] + emulation.timeout_s)


class _PriorityQueue:
    """Indices of requests that have arrived, by descending priority, then arrival.

    All requests are ranked once, so that the heap holds plain integers."""

    def __init__(self, priority: "array[float]") -> None:
        order = np.argsort(-np.asarray(priority), kind="stable")
        self._priority = priority
        self._index_of = array("q", order.tobytes())
        self._rank_of = array("q", np.argsort(order).tobytes())
        self._ranks: list[int] = []
        self._popped = bytearray(len(priority) + 1)
        self._oldest = 0

    def push(self, index: int) -> None:
        heappush(self._ranks, self._rank_of[index])

    def pop(self) -> int:
        index = self._index_of[heappop(self._ranks)]
        self._popped[index] = True
        return index

    @property
    def highest_priority(self) -> float:
        """The priority of the request that `pop` would return."""
        return self._priority[self._index_of[self._ranks[0]]]

    @property
    def oldest(self) -> int:
        """The smallest index that `pop` has not returned."""
        while self._popped[self._oldest]:
            self._oldest += 1
        return self._oldest


def make_client(
    config: RunConfig, trace: Trace, clock: Clock, make_request: MakeRequest,
    make: Callable[..., ReplayClient] = ReplayClient,
) -> ReplayClient:  # fmt: skip
    """The client with the settings of `config`, made by `make`."""
    emulation = None
    if config.static_emulated_batch_size is not None:
        timeout_s = config.static_emulated_timeout / MILLISECONDS
        emulation = StaticEmulation(config.static_emulated_batch_size, timeout_s)
    return make(
        trace, clock, make_request, concurrency=config.concurrency, keeps_arrivals=config.request_rate is not None,
        emulation=emulation, wait_sleep_s=None if config.wait_sleep is None else config.wait_sleep / MILLISECONDS,
        keeps_outputs=config.responses_json is not None,
    )  # fmt: skip


def on_tick(seconds: float) -> float:
    """The first whole nanosecond at or after `seconds`: a virtual clock has no other times to wait for."""
    ticks = round(seconds * NANOSECONDS)
    if ticks / NANOSECONDS < seconds:
        ticks += 1
    return ticks / NANOSECONDS
