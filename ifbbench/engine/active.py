"""The active requests, in the order in which schedulers consider them."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.request import Request, RequestState
from ifbbench.engine.request_table import RequestTable

Rows = NDArray[np.int64]
_ORDER = attrgetter("order")


class ActiveRequests:
    """Requests by descending priority, first come first among equals, kept apart by phase.

    Requests whose last step is under way are in neither list, but active until it has been collected.

    Both lists are changed only when a request enters, changes phase or leaves, so an iteration in which all requests
    just go on costs nothing here. num_changes: how often that was.
    """

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self.context: list[Request] = []
        self.generation: list[Request] = []
        self.by_slot: dict[int, Request] = {}
        self.generation_rows: Rows = np.zeros(0, np.int64)
        self.num_with_lora = 0
        self.num_changes = 0
        self._beam_widths: dict[int, int] = {}
        self._entered = 0

    def __len__(self) -> int:
        return len(self.by_slot)

    def __iter__(self) -> Iterator[Request]:
        """All active requests that can be scheduled, in order."""
        return merge(self.context, self.generation, key=_ORDER)

    @property
    def rows_by_lora(self) -> Rows:
        """`generation_rows` in the order of a batch: by LoRA id, none first, in list order within each."""
        if not self.num_with_lora:
            return self.generation_rows
        lora_ids = [-1 if request.lora_task_id is None else request.lora_task_id for request in self.generation]
        return self.generation_rows[np.argsort(lora_ids, kind="stable")]

    @property
    def mixed_beam_widths(self) -> bool:
        """Whether active requests differ in beam width, so that not all can be in one batch."""
        return len(self._beam_widths) > 1

    @property
    def generation_tokens(self) -> int:
        """Tokens that one step of all generation requests puts into a batch."""
        rows = self.generation_rows
        return int(self.table.step_tokens[rows].sum()) if self.table.any_wide_steps else len(rows)

    @property
    def last(self) -> Request | None:
        """The request that schedulers consider last."""
        if not self.context or not self.generation:
            of_one_phase = self.context or self.generation
            return of_one_phase[-1] if of_one_phase else None
        return max(self.context[-1], self.generation[-1], key=_ORDER)

    def add(self, request: Request) -> None:
        """Let a new request in, behind all of its priority."""
        self.num_changes += 1
        request.enter(self.table, self._entered)
        self._entered += 1
        self.num_with_lora += request.lora_task_id is not None
        self._beam_widths[request.beam_width] = self._beam_widths.get(request.beam_width, 0) + 1
        self.by_slot[request.slot] = request
        insort(self.context, request, key=_ORDER)

    def move_to_generation(self, request: Request) -> None:
        """Its prompt is complete."""
        self.num_changes += 1
        del self.context[self._find(self.context, request)]
        place = bisect_left(self.generation, request.order, key=_ORDER)
        self.generation.insert(place, request)
        self.generation_rows = _with(self.generation_rows, place, request.slot)

    def move_to_context(self, request: Request) -> None:
        """It was paused. A no-op for a request paused in its context phase."""
        self.num_changes += 1
        place = self._find(self.context, request)
        if self.context[place : place + 1] == [request]:
            return
        self._drop_generation(request)
        insort(self.context, request, key=_ORDER)

    def count_made_again(self, rows: Rows, cached: Rows) -> int:
        """How many of the requests in `rows` make a token for the second time, which each of them counts: a pause
        dropped it, the resumed prompt being full. cached: [requests], tokens of each that have been computed."""
        again = rows[cached <= self.table.cached_before_pause[rows]].tolist()
        for row in again:
            self.by_slot[row].recomputed_tokens += 1
        return len(again)

    def park(self, row: int) -> None:
        """The last step of the request in `row` is under way: there is nothing left to schedule."""
        request = self.by_slot[row]
        self.num_changes += 1
        self._drop_generation(request)
        request.park()

    def remove(self, request: Request) -> None:
        """It is complete, or failed; its row is free again."""
        self.num_changes += 1
        if request.in_context:
            del self.context[self._find(self.context, request)]
        elif request.state is not RequestState.GENERATION_TO_COMPLETE:
            self._drop_generation(request)
        self.num_with_lora -= request.lora_task_id is not None
        self._beam_widths[request.beam_width] -= 1
        if not self._beam_widths[request.beam_width]:
            del self._beam_widths[request.beam_width]
        del self.by_slot[request.slot]
        request.leave()

    def _drop_generation(self, request: Request) -> None:
        place = self._find(self.generation, request)
        del self.generation[place]
        self.generation_rows = _without(self.generation_rows, place)

    @staticmethod
    def _find(requests: list[Request], request: Request) -> int:
        return bisect_left(requests, request.order, key=_ORDER)


def _with(rows: Rows, place: int, row: int) -> Rows:
    """A copy with `row` at `place`; what np.insert does in several times the time."""
    longer = np.empty(len(rows) + 1, np.int64)
    longer[:place], longer[place], longer[place + 1 :] = rows[:place], row, rows[place:]
    return longer


def _without(rows: Rows, place: int) -> Rows:
    """A copy without what is at `place`."""
    shorter = np.empty(len(rows) - 1, np.int64)
    shorter[:place], shorter[place:] = rows[:place], rows[place + 1 :]
    return shorter
