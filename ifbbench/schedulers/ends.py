"""When generation requests that run in every iteration end: known in advance, so that no iteration looks for it."""

from heapq import heapify, heappop, heappush
from typing import TypeAlias

from ifbbench.engine.request import Request, RequestTable

# A number of iterations; the order of admission, so that no two events are equal; the request.
_Event: TypeAlias = tuple[int, int, Request]

NEVER = 2**62


class Ends:
    """The ends of generation requests that all get a token in each of the iterations that are counted here: a request
    has its last token scheduled with one number of scheduled iterations, and completes with one of collected ones.

    scheduled, collected: so many of these iterations. ending: requests whose last token is scheduled, but not
    collected. Only asynchronous scheduling knows of these: without it a request is generating until it completes.
    """

    def __init__(self, table: RequestTable, is_async: bool) -> None:
        self._table, self._is_async = table, is_async
        self.scheduled = self.collected = 0
        self.ending: list[Request] = []
        self._ends: list[_Event] = []
        self._last_steps: list[_Event] = []

    def restart(self, requests: list[tuple[int, Request]]) -> None:
        """Generation requests, each with its order of admission, run from now on. None is ending, and each of them has
        a token to schedule before its end."""
        self.ending, self.collected = [], self.scheduled
        self._ends = [(self._end_of(request), order, request) for order, request in requests]
        heapify(self._ends)
        if self._is_async:
            self._last_steps = [(self._last_step_of(request), order, request) for order, request in requests]
            heapify(self._last_steps)

    def add(self, order: int, request: Request) -> None:
        """A request is in generation. Its tokens so far are scheduled."""
        heappush(self._ends, (self._end_of(request), order, request))
        if self._is_async:
            heappush(self._last_steps, (self._last_step_of(request), order, request))

    def _end_of(self, request: Request) -> int:
        return self.scheduled + int(self._table.stop_after[request.slot]) - request.num_generated

    def _last_step_of(self, request: Request) -> int:
        return self.scheduled + int(self._table.reserved[request.slot]) - request.num_generated

    def steps_to_first(self, max_in_flight: int) -> int:
        """After how many further iterations the first of these requests ends, or is ending; one at least."""
        # The last iteration to be collected completes a request; others may be scheduled behind it.
        steps = self._first(self._ends) - self.scheduled + max_in_flight - 1
        return max(min(steps, self._first(self._last_steps) - self.scheduled), 1)

    @staticmethod
    def _first(events: list[_Event]) -> int:
        while events and not events[0][2].in_generation:
            heappop(events)
        return events[0][0] if events else NEVER

    def finish_scheduling(self) -> list[Request]:
        """The requests whose last token was scheduled, which are ending from now on."""
        finished = list[Request]()
        while self._first(self._last_steps) <= self.scheduled:
            finished.append(heappop(self._last_steps)[2])
        self.ending += finished
        return finished

    def collect(self, count: int) -> list[Request]:
        """So many iterations were collected. Returns the requests that they complete."""
        self.collected += count
        done, table = list[Request](), self._table
        for request in self.ending:
            row = request.slot
            table.confirmed[row] += count
            if table.confirmed[row] >= table.stop_after[row]:
                done.append(request)
        while self._first(self._ends) <= self.collected:
            done.append(heappop(self._ends)[2])
        return done

    def left(self, request: Request) -> None:
        """A request has left."""
        if request in self.ending:
            self.ending.remove(request)
