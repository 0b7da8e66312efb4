"""The client of a replay: hands out requests that have arrived, and takes their responses."""

from array import array
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

import numpy as np

from ifbbench.clock import NANOSECONDS, Clock
from ifbbench.config import RunConfig
from ifbbench.engine.active import IntArray
from ifbbench.engine.in_flight import Response
from ifbbench.engine.request import Request
from ifbbench.errors import InputError
from ifbbench.replay.static_emulation import StaticEmulation
from ifbbench.workload.trace import Trace, TraceRequest, columns_of

MILLISECONDS = 1000

MakeRequest = Callable[[int, TraceRequest], Request]
"""The engine's request for the one at this index of the trace, made when it is handed out."""


class ReplayClient:
    """Owns the queue: requests of `trace` that have arrived are handed out by priority, then by arrival.

    concurrency: at most so many requests are outstanding, which is arrived and not answered; others arrive one by one
        as places become free, with `keeps_arrivals` not before their time in the trace.
    emulation: requests are handed out in batches; not together with `concurrency` (InputError).
    keeps_outputs: the tokens of each request are kept, in `outputs` by its id.
    wait_sleep_s: `wait` looks for requests at such intervals, not exactly when the next one comes.
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
        if concurrency is not None and emulation is not None:
            raise InputError(
                "--concurrency and --static_emulated_batch_size both say how many requests are outstanding; leave out "
                "one of them."
            )
        self.outputs: dict[int, IntArray] = {}
        self.answered = 0
        self._trace = trace
        self._clock = clock
        self._make_request = make_request
        self._keeps_arrivals = keeps_arrivals or concurrency is None
        columns = columns_of(trace.requests)
        recorded_s = columns.arrival_s
        self._arrivals = array("d", recorded_s if self._keeps_arrivals else bytes(recorded_s.itemsize * len(trace)))
        # Requests before `_num_placed` have a place, and so a known time of arrival.
        self._num_placed = len(trace) if concurrency is None else min(concurrency, len(trace))
        self._num_arrived = 0
        self._emulation = emulation
        self._batch_end = 0
        self._wait_sleep_s = wait_sleep_s
        self._keeps_outputs = keeps_outputs
        self._handed_out = 0
        self._queue = None if columns.priority is None else _PriorityQueue(columns.priority)
        self._streamed: dict[int, list[IntArray]] = {}

    @property
    def done(self) -> bool:
        """Whether every request had its final response."""
        return self.answered == len(self._arrivals)

    @property
    def next_event_s(self) -> float | None:
        """When it is worth asking for requests again, on the run's clock; it may have passed already. None while that
        takes a response, and when all requests have been handed out."""
        if self._handed_out == self._num_placed:
            return None
        if self._emulation is None or self._handed_out < self._batch_end:
            return _on_tick(self._arrivals[self._oldest])
        if self._outstanding:
            return None
        return _on_tick(self._emulation.ready_s(self._arrivals, self._oldest, self._handed_out))

    def next_arrival_s(self, now_s: float) -> float | None:
        """When the first request arrives after `now_s`, on the run's clock; None where only a response lets one come,
        and when all have arrived. Where static batching is emulated, one may be handed out at any time while none is
        outstanding."""
        if self._emulation is not None and not self._outstanding:
            return now_s
        arrived = self._arrived(now_s)
        return self._arrivals[arrived] if arrived < self._num_placed else None

    @property
    def handed_out(self) -> int:
        """How many requests `get_requests` has returned so far."""
        return self._handed_out

    def wait(self) -> bool:
        """Let time pass until `get_requests` may return more requests; for when nothing is active. False, at once, if
        it may do so now or only after a response."""
        event_s, now = self.next_event_s, self._clock.now()
        if event_s is None or event_s <= now:
            return False
        self._clock.wait_until(event_s if self._wait_sleep_s is None else now + self._wait_sleep_s)
        return True

    def get_requests(self, max_requests: int) -> list[Request]:
        """Up to `max_requests` that are to be handed out by now; a negative number means no limit."""
        first = self._handed_out
        count = self._due() - first
        if max_requests >= 0:
            count = min(count, max_requests)
        self._handed_out += count
        indices: Iterable[int] = range(first, first + count)
        if self._queue is not None:
            indices = [self._queue.pop() for _ in indices]
        return [self._make_request(index, self._trace.requests[index]) for index in indices]

    def next_priority(self) -> float | None:
        """The highest priority among the requests to be handed out by now, None if there are none. Without priorities
        in the trace None always: the order of arrival is the order in which requests are served."""
        if self._queue is None or self._due() == self._handed_out:
            return None
        return self._queue.highest_priority

    def queued(self) -> int:
        """How many have arrived and were not handed out."""
        return self._arrived(self._clock.now()) - self._handed_out

    def send_response(self, response: Response) -> None:
        """Take a response: new tokens of a streaming request, or the final response of any."""
        if response.is_final:
            self.answered += 1
            self._free_place()
        if self._keeps_outputs:
            self._keep_output(response)

    def arrival_s(self, request: Request) -> float:
        """When `request` came, in seconds on the run's clock: as the trace says, or when there was a place for it."""
        return self._arrivals[request.index]

    @property
    def _outstanding(self) -> int:
        return self._handed_out - self.answered

    @property
    def _oldest(self) -> int:
        """The index of the request that has waited longest, or arrives next."""
        return self._handed_out if self._queue is None else self._queue.oldest

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
        while self._num_arrived < self._num_placed and self._arrivals[self._num_arrived] <= now:
            if self._queue is not None:
                self._queue.push(self._num_arrived)
            self._num_arrived += 1
        return self._num_arrived

    def _due(self) -> int:
        """How many requests are to be handed out by now, those handed out already included."""
        now = self._clock.now()
        arrived = self._arrived(now)
        if self._emulation is None or arrived == self._handed_out:
            return arrived
        is_next_batch = self._handed_out == self._batch_end and not self._outstanding
        if is_next_batch and now >= self._emulation.ready_s(self._arrivals, self._oldest, self._handed_out):
            self._batch_end = min(arrived, self._handed_out + self._emulation.batch_size)
        return self._batch_end

    def _free_place(self) -> None:
        """The next request without a place gets that of one answered now."""
        if self._num_placed < len(self._arrivals):
            # Times of the trace that do not count are 0, and never the later ones.
            self._arrivals[self._num_placed] = max(self._arrivals[self._num_placed], self._clock.now())
            self._num_placed += 1


class _PriorityQueue:
    """Indices of requests that have arrived, by descending priority, then arrival.

    The order of all requests is found once, so that the heap holds plain integers: places in that order.
    """

    def __init__(self, priority: "array[float]") -> None:
        self._priority = priority
        order = np.argsort(-np.asarray(priority), kind="stable")
        self._index_at = array("q", order.tobytes())
        self._place_of = array("q", np.argsort(order).tobytes())
        self._heap: list[int] = []
        self._popped = bytearray(len(priority) + 1)
        self._oldest = 0

    def push(self, index: int) -> None:
        heappush(self._heap, self._place_of[index])

    def pop(self) -> int:
        index = self._index_at[heappop(self._heap)]
        self._popped[index] = True
        return index

    @property
    def highest_priority(self) -> float:
        """Of the request that `pop` would return."""
        return self._priority[self._index_at[self._heap[0]]]

    @property
    def oldest(self) -> int:
        """The smallest index that `pop` has not returned."""
        while self._popped[self._oldest]:
            self._oldest += 1
        return self._oldest


def make_client(config: RunConfig, trace: Trace, clock: Clock, make_request: MakeRequest) -> ReplayClient:
    """The client that `config` asks for. InputError if its settings contradict each other."""
    emulation = None
    if config.static_emulated_batch_size is not None:
        timeout_s = config.static_emulated_timeout / MILLISECONDS
        emulation = StaticEmulation(config.static_emulated_batch_size, timeout_s)
    return ReplayClient(
        trace, clock, make_request, concurrency=config.concurrency, keeps_arrivals=config.request_rate is not None,
        emulation=emulation, wait_sleep_s=None if config.wait_sleep is None else config.wait_sleep / MILLISECONDS,
        keeps_outputs=config.responses_json is not None,
    )  # fmt: skip


def _on_tick(seconds: float) -> float:
    """The first whole nanosecond at or after `seconds`: a virtual clock, which has no others, can wait for it and is
    then not a fraction too early."""
    ticks = round(seconds * NANOSECONDS)
    if ticks / NANOSECONDS < seconds:
        ticks += 1
    return ticks / NANOSECONDS
