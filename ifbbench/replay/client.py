"""The client of a replay: hands out requests that have arrived, and takes their responses."""

from bisect import bisect_right
from collections.abc import Callable

from ifbbench.batching.records import Response
from ifbbench.batching.request import IntArray, Request
from ifbbench.clock import Clock
from ifbbench.workload.trace import Trace, TraceRequest


class ReplayClient:
    """Owns the queue: requests of `trace`, in order of arrival.

    make_request(index, request): the engine's request for the one at `index` of the trace, made when it is handed out.
    """

    def __init__(self, trace: Trace, clock: Clock, make_request: Callable[[int, TraceRequest], Request]) -> None:
        self.outputs: dict[int, IntArray] = {}
        self.answered = 0
        self._trace = trace
        self._clock = clock
        self._make_request = make_request
        self._arrivals = [request.arrival_s for request in trace]
        self._next = 0

    @property
    def done(self) -> bool:
        """Whether every request had its final response."""
        return self.answered == len(self._arrivals)

    @property
    def next_arrival_s(self) -> float | None:
        """When the next request that has not been handed out arrives; None when all have been."""
        return self._arrivals[self._next] if self._next < len(self._arrivals) else None

    def get_requests(self, max_requests: int) -> list[Request]:
        """Up to `max_requests` that have arrived by now; a negative number means no limit."""
        arrived = bisect_right(self._arrivals, self._clock.now(), lo=self._next)
        stop = arrived if max_requests < 0 else min(arrived, self._next + max_requests)
        handed_out = range(self._next, stop)
        self._next = stop
        return [self._make_request(index, self._trace.requests[index]) for index in handed_out]

    def queued(self) -> int:
        """How many have arrived and were not handed out."""
        return bisect_right(self._arrivals, self._clock.now(), lo=self._next) - self._next

    def send_response(self, response: Response) -> None:
        """Take the final response of a request."""
        if not response.is_final:
            return
        self.answered += 1
        if response.output_tokens is not None:
            self.outputs[response.request.request_id] = response.output_tokens

    def arrival_s(self, request: Request) -> float:
        """When the trace says that `request` comes."""
        return self._arrivals[request.index]
