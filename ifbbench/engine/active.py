"""The active requests, in the order in which the schedulers consider them."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter

import numpy as np

from ifbbench.engine.request import Request, RequestState
from ifbbench.engine.request_table import NO_ROWS, RequestTable, Rows

_ORDER = attrgetter("order")


class ActiveRequests:
    """Active requests by descending priority, first come first served among equals, one list for each phase.

    Both lists change only when a request enters, changes phase or leaves, so that an iteration in which all requests
    only generate costs nothing here. Requests whose last step is in flight are in neither list, but are active.

    generation_rows: table rows of `generation`, in the same order.
    num_changes: how often the lists have changed; while it is the same, so are the lists.
    """

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self.context: list[Request] = []
        self.generation: list[Request] = []
        self.by_slot: dict[int, Request] = {}
        self.generation_rows: Rows = NO_ROWS
        self.num_with_lora = 0
        self.num_changes = 0
        self._beam_widths: dict[int, int] = {}
        self._num_entered = 0

    def __len__(self) -> int:
        return len(self.by_slot)

    def __iter__(self) -> Iterator[Request]:
        """All active requests that can be scheduled, in order."""
        return merge(self.context, self.generation, key=_ORDER)

    @property
    def batch_rows(self) -> Rows:
        """`generation_rows` in the order of a batch: by LoRA id, none first, in list order within each."""
        if not self.num_with_lora:
            return self.generation_rows
        lora_ids = [-1 if request.lora_task_id is None else request.lora_task_id for request in self.generation]
        return self.generation_rows[np.argsort(lora_ids, kind="stable")]

    @property
    def mixed_beam_widths(self) -> bool:
        """Whether active requests differ in beam width, so that they do not all fit into one batch."""
        return len(self._beam_widths) > 1

    @property
    def generation_tokens(self) -> int:
        """Tokens in a batch of all generation requests."""
        if not self.table.any_wide_steps:
            return len(self.generation_rows)
        return int(self.table.step_tokens[self.generation_rows].sum())

    @property
    def last(self) -> Request | None:
        tails = [requests[-1] for requests in (self.context, self.generation) if requests]
        return max(tails, key=_ORDER, default=None)

    def add(self, request: Request) -> None:
        """Add a new request, behind all others of its priority."""
        self.num_changes += 1
        request.enter(self.table, self._num_entered)
        self._num_entered += 1
        self.num_with_lora += request.lora_task_id is not None
        self._beam_widths[request.beam_width] = self._beam_widths.get(request.beam_width, 0) + 1
        self.by_slot[request.slot] = request
        insort(self.context, request, key=_ORDER)

    def move_to_generation(self, request: Request) -> None:
        """The prompt of `request` is complete."""
        self.num_changes += 1
        del self.context[self._find(self.context, request)]
        index = bisect_left(self.generation, request.order, key=_ORDER)
        self.generation.insert(index, request)
        rows = self.generation_rows
        # As np.insert does, several times faster.
        longer = np.empty(len(rows) + 1, np.int64)
        longer[:index], longer[index], longer[index + 1 :] = rows[:index], request.slot, rows[index:]
        self.generation_rows = longer

    def move_to_context(self, request: Request) -> None:
        """`request` was paused. Does nothing if it was paused in its context phase."""
        self.num_changes += 1
        index = self._find(self.context, request)
        if self.context[index : index + 1] == [request]:
            return
        self._remove_from_generation(request)
        insort(self.context, request, key=_ORDER)

    def park(self, row: int) -> None:
        """The last step of the request in `row` is in flight: it is not scheduled again."""
        self.num_changes += 1
        request = self.by_slot[row]
        self._remove_from_generation(request)
        request.state = RequestState.GENERATION_TO_COMPLETE

    def remove(self, request: Request) -> None:
        """`request` is complete, was stopped, or failed; its row is free again."""
        self.num_changes += 1
        if request.in_context:
            del self.context[self._find(self.context, request)]
        elif request.state is not RequestState.GENERATION_TO_COMPLETE:
            self._remove_from_generation(request)
        self.num_with_lora -= request.lora_task_id is not None
        self._beam_widths[request.beam_width] -= 1
        if not self._beam_widths[request.beam_width]:
            del self._beam_widths[request.beam_width]
        del self.by_slot[request.slot]
        request.leave()

    def count_recomputed(self, rows: Rows, cached: Rows) -> int:
        """How many generation requests in `rows` compute a token that was computed before a pause, because the resumed
        prompt had no room for it. Each of them counts it. cached: [requests], tokens of each in the cache."""
        again = rows[cached <= self.table.cached_before_pause[rows]].tolist()
        for row in again:
            self.by_slot[row].recomputed_tokens += 1
        return len(again)

    def _remove_from_generation(self, request: Request) -> None:
        index, rows = self._find(self.generation, request), self.generation_rows
        del self.generation[index]
        shorter = np.empty(len(rows) - 1, np.int64)
        shorter[:index], shorter[index:] = rows[:index], rows[index + 1 :]
        self.generation_rows = shorter

    @staticmethod
    def _find(requests: list[Request], request: Request) -> int:
        return bisect_left(requests, request.order, key=_ORDER)
