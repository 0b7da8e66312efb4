"""The client of a replica whose requests are chosen by a router, one after another, while the run goes on."""

from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeAlias

from msgspec import structs

from ifbbench.engine.request import EarlierAttempts, Request
from ifbbench.engine.responses import Response
from ifbbench.replay.client import ReplayClient
from ifbbench.replay.priority_queue import PriorityQueue
from ifbbench.replay.served import ServedClient
from ifbbench.workload.trace import RequestColumns, TraceRequest

UNLIMITED = 2**62


def share_of(columns: RequestColumns) -> RequestColumns:
    """Columns for a share of the requests of `columns`, none so far. Those of sessions arrive at times of their own."""
    recall = columns.recall

    def without_session(origin: int) -> TraceRequest:
        return structs.replace(recall(origin), after=None, think_s=0.0, also_after=())

    empty: dict[str, Any] = {
        name: array(value.typecode) for name, value in vars(columns).items() if isinstance(value, array)
    }
    return replace(columns, **empty | {"after": None, "think_s": None, "also_after": {}}, recall=without_session)


def append(share: RequestColumns, columns: RequestColumns, index: int, arrival_s: float) -> None:
    """Add the request at `index` of `columns` to a share of them."""
    for name in ("request_id", "prompt_len", "max_new_tokens", "output_len", "origin", "priority", "class_of"):
        if (column := getattr(share, name)) is not None:
            column.append(getattr(columns, name)[index])
    share.arrival_s.append(arrival_s)


class _Routed:
    """What the two clients have in common.

    horizon_s: time from which a request may arrive that is not routed yet.

    answers_let_in: whether a request may arrive after each answer.
    answers: when each answer reached the router, and the index of its request, in order of time.
    open: requests that are not answered, in order.
    earlier: see Request.
    """

    horizon_s: float
    answers_let_in: bool
    answers: deque[tuple[float, int]]
    open: dict[int, None]
    earlier: dict[int, EarlierAttempts]

    def prepare(self, share: RequestColumns) -> None:
        """Take requests as they come. Called once, on a client made with an empty share."""
        client: Any = self
        self.horizon_s, self.answers, self.answers_let_in = inf, deque(), False
        self.open, self.earlier = {}, {}
        client._places, client._first = UNLIMITED, list[int]()
        if share.priority is not None:
            client._queue = _GrowingQueue(share.priority)

    def keep_outputs(self: Any) -> None:
        """Keep the tokens of each request, in `outputs`."""
        self._keeps_outputs = True

    def offer(self: Any, arrival_s: float, earlier: EarlierAttempts | None = None) -> None:
        """The share has one more request, which arrives then, not before the others."""
        self.open[len(self._arrivals)] = None
        if earlier is not None:
            self.earlier[len(self._arrivals)] = earlier
        self._first.append(len(self._arrivals))
        self._arrivals.append(arrival_s)
        self._num_first += 1
        self._find_due()

    def get_requests(self: Any, max_requests: int) -> list[Request]:
        """Up to `max_requests` that are due; a negative number means no limit."""
        requests: list[Request] = super().get_requests(max_requests)  # type: ignore[misc]
        if self.earlier:
            for request in requests:
                request.earlier = self.earlier.get(request.index)
        return requests

    def not_fetched(self: Any, index: int) -> Request:
        """The request at `index`, which the engine did not fetch."""
        request: Request = self._make_request(index, self._trace.requests[index])
        request.earlier = self.earlier.get(index)
        return request

    def next_arrival_s(self: Any, now_s: float) -> float | None:
        """When a request may arrive; None if none will."""
        next_s = super().next_arrival_s(now_s)  # type: ignore[misc]
        change_s: float = self.horizon_s if next_s is None else min(next_s, self.horizon_s)
        return None if change_s == inf else change_s

    def send_response(self: Any, response: Response) -> None:
        """Take a response, and keep when the router has it."""
        super().send_response(response)  # type: ignore[misc]
        # No place is needed, and a request may yet come that arrives before an answer which is delivered late.
        self._room_s = 0.0
        if response.is_final:
            del self.open[response.request.index]
            answered_s = self._answered_s()
            self.answers.append((answered_s, response.request.index))
            if self.answers_let_in:  # also that to a request which is refused before the first iteration of a step
                self.horizon_s = min(self.horizon_s, answered_s)


class RoutedClient(_Routed, ReplayClient):
    """A ReplayClient of requests that a router chooses."""


class RoutedServedClient(_Routed, ServedClient):
    """A ServedClient of requests that a router chooses."""


Routed: TypeAlias = RoutedClient | RoutedServedClient


class _GrowingQueue(PriorityQueue):
    """A PriorityQueue of requests whose priorities are known as they come.

    priority: a column that grows.
    """

    def __init__(self, priority: "array[float]") -> None:
        self._of_index = priority
        self._heap: list[tuple[float, int]] = []
        self._numbers: list[int] = []  # those in the heap, in order

    def push(self, number: int, index: int) -> None:
        heappush(self._heap, (-self._of_index[index], number))
        self._numbers.append(number)

    def pop(self) -> int:
        number = heappop(self._heap)[1]
        del self._numbers[bisect_left(self._numbers, number)]
        return number

    @property
    def highest_priority(self) -> float:
        return -self._heap[0][0]

    @property
    def oldest(self) -> int:
        return self._numbers[0] if self._numbers else UNLIMITED
