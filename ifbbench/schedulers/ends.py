"""When generation requests that run in every iteration end: known in advance, so that no iteration looks for it."""

from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias

from ifbbench.engine.request import Request, RequestTable

# The number of collected iterations with which a request ends, and what orders those of one number, different for
# any two of them.
End: TypeAlias = tuple[int, Any]

NEVER = 2**62


class Ends:
    """The ends of generation requests that all get a token in each of the iterations that are counted here: a request
    has its last token scheduled with one number of scheduled iterations, and completes with one of collected ones.

    scheduled: number of these iterations that are scheduled.
    collected: number of these iterations that are collected.
    ending: the ends of requests whose last token is scheduled, but not collected. Only asynchronous scheduling knows of
        these: without it a request is generating until it completes.
    """

    def __init__(self, table: RequestTable, is_async: bool) -> None:
        self._table, self._is_async = table, is_async
        self.scheduled = self.collected = 0
        self.ending: dict[Request, End] = {}
        self._ends: list[tuple[int, Any, Request]] = []
        # The number of scheduled iterations with which a request has its last token.
        self._last_steps: list[tuple[int, Any, Request, int]] = []

    def restart(self, requests: list[tuple[Any, Request]]) -> None:
        """Generation requests, each with what orders it, run from now on. None is ending, and each of them has a token
        to schedule before its end."""
        self.collected = self.scheduled
        self.replace([(self.scheduled + self._remaining(request), order, request) for order, request in requests], {})

    def replace(self, ends: list[tuple[int, Any, Request]], ending: dict[Request, End]) -> None:
        """These are the ends of all generation requests, and of those that are ending."""
        self._ends, self.ending = ends, ending
        heapify(self._ends)
        if self._is_async:
            self._last_steps = [(self._last_step_of(request), order, request, end) for end, order, request in ends]
            heapify(self._last_steps)

    def add(self, order: Any, request: Request, turns: int = 1) -> None:
        """A request is in generation. Its tokens so far are scheduled, and it gets the others in every `turns`-th
        iteration."""
        end = self.scheduled + self._remaining(request) * turns
        heappush(self._ends, (end, order, request))
        if self._is_async:
            heappush(self._last_steps, (self._last_step_of(request), order, request, end))

    def _remaining(self, request: Request) -> int:
        return int(self._table.stop_after[request.slot]) - request.num_generated

    def _last_step_of(self, request: Request) -> int:
        return self.scheduled + int(self._table.reserved[request.slot]) - request.num_generated

    def steps_to_first(self, max_in_flight: int, with_ending: bool = False) -> int:
        """After how many further iterations the first of the generation requests ends, or is ending. with_ending: or
        one that is ending ends."""
        while self._ends and not self._ends[0][2].in_generation:
            heappop(self._ends)
        end = self._ends[0][0] if self._ends else NEVER
        if with_ending:
            end = min([end, *[of_ending for of_ending, _ in self.ending.values()]])
        # The last iteration to be collected completes a request; others may be scheduled behind it.
        return min(end - self.scheduled + max_in_flight - 1, self._first_last_step() - self.scheduled)

    def _first_last_step(self) -> int:
        events = self._last_steps
        while events and not events[0][2].in_generation:
            heappop(events)
        return events[0][0] if events else NEVER

    def finish_scheduling(self) -> list[Request]:
        """The requests whose last token was scheduled, which are ending from now on."""
        finished = list[Request]()
        while self._first_last_step() <= self.scheduled:
            _, order, request, end = heappop(self._last_steps)
            self.ending[request] = end, order
            finished.append(request)
        return finished

    def collect(self, count: int) -> None:
        """So many iterations were collected."""
        self.collected += count
        for request in self.ending:
            self._table.confirmed[request.slot] += count

    def completed(self) -> list[Request]:
        """The requests that the collected iterations complete, and that have not left."""
        done = [(end, order, one) for one, (end, order) in self.ending.items() if end <= self.collected]
        while self._ends and self._ends[0][0] <= self.collected:
            event = heappop(self._ends)
            if event[2].in_generation:
                done.append(event)
        return [request for _, _, request in sorted(done)]

    def left(self, request: Request) -> None:
        """A request has left."""
        self.ending.pop(request, None)
