"""The active requests in the order of TensorRT-LLM's schedulers, one list for each phase."""

from collections.abc import Iterator
from heapq import merge
from operator import attrgetter

import numpy as np

from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.request import NO_MICRO_BATCH, Request, RequestTable

_ORDER = attrgetter("order")


class ActiveRequests:
    """Active requests by descending priority, first come first served among equals, one list for each phase.

    Both lists change only when a request enters, changes phase or leaves, so that an iteration in which all requests
    only generate costs nothing here. Active ones in neither list: the last step is in flight, or keys and values are to
    come (`receiving`).

    num_sending: complete ones in the table, whose own are sent, and which are not active.

    generation_rows: table rows of `generation`, in the same order.
    num_changes: how often the lists have changed; while it is the same, so are the lists.
    """

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self.context: list[Request] = []
        self.generation: list[Request] = []
        self.by_slot = table.requests
        self.generation_rows: Rows = NO_ROWS
        self.num_with_lora = self.num_reading_tokens = 0
        self.num_changes = self.num_sending = 0
        self.receiving: dict[Request, None] = {}
        self.has_remote = False  # whether another engine computes a prompt of any request
        self._beam_widths: dict[int, int] = {}
        self._num_entered = 0

    def __len__(self) -> int:
        return len(self.by_slot) - self.num_sending

    def __iter__(self) -> Iterator[Request]:
        """All active requests that can be scheduled, in order."""
        return merge(self.context, self.generation, key=_ORDER)

    @property
    def batch_rows(self) -> Rows:
        """`generation_rows` in the order of a batch: by LoRA id, none first, in list order within each."""
        if not self.num_with_lora:
            return self.generation_rows
        return self.generation_rows[np.argsort(self.table.lora_tasks[self.generation_rows], kind="stable")]

    def ready(self, rows: Rows) -> Rows:
        """The `rows` that are not in flight in another micro batch."""
        if not self.table.any_in_flight:
            return rows
        ready: Rows = rows[self.table.micro_batch[rows] == NO_MICRO_BATCH]
        return ready

    @property
    def mixed_beam_widths(self) -> bool:
        """Whether active requests differ in beam width, so that they do not all fit into one batch."""
        return len(self._beam_widths) > 1

    def step_tokens(self, rows: Rows) -> int:
        """Tokens in a batch of the generation requests in `rows`."""
        if not self.table.any_wide_steps:
            return len(rows)
        return int(self.table.step_tokens[rows].sum())

    def add(self, request: Request) -> None:
        """Add a new request, behind all others of its priority."""
        self.num_changes += 1
        request.enter(self.table, self._num_entered)
        self._num_entered += 1
        self.num_with_lora += request.lora_task_id is not None
        self.num_reading_tokens += request.reads_tokens and request.beam_width == 1
        self.has_remote |= request.remote_len > 0
        self._beam_widths[request.beam_width] = self._beam_widths.get(request.beam_width, 0) + 1
        self.context.insert(self._find(self.context, request), request)

    def move_to_generation(self, request: Request) -> None:
        """The prompt of `request` is complete."""
        del self.context[self._find(self.context, request)]
        self.add_to_generation(request)

    def add_to_generation(self, request: Request) -> None:
        self.num_changes += 1
        index = self._find(self.generation, request)
        self.generation.insert(index, request)
        rows = self.generation_rows
        # This does what np.insert does, several times faster.
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
        self.context.insert(index, request)

    def park(self, row: int) -> None:
        """The last step of the request in `row` is in flight: it is not scheduled again."""
        self.num_changes += 1
        request = self.by_slot[row]
        self._remove_from_generation(request)
        request.finish_scheduling()

    def remove(self, request: Request) -> None:
        """`request` is complete, was stopped, or failed; its row is free again."""
        self.num_changes += 1
        if request.in_context:
            del self.context[self._find(self.context, request)]
        elif request.in_generation:
            self._remove_from_generation(request)
        self.num_with_lora -= request.lora_task_id is not None
        self.num_reading_tokens -= request.reads_tokens and request.beam_width == 1
        self._beam_widths[request.beam_width] -= 1
        if not self._beam_widths[request.beam_width]:
            del self._beam_widths[request.beam_width]
        request.leave()

    def settle(self) -> None:
        """Write the deferred steps to the table. Called before anything but `Repetition` and `Request` reads or changes
        its counters."""
        table, rows = self.table, self.generation_rows
        if table.deferred_steps or table.deferred_confirmed:
            table.generated[rows] += table.deferred_steps
            table.confirmed[rows] += table.deferred_confirmed
            table.deferred_steps = table.deferred_confirmed = 0

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
        """The index of `request` in `requests`, or where to insert it."""
        low, high = 0, len(requests)
        if high and requests[-1].goes_before(request):
            return high
        while low < high:
            middle = (low + high) // 2
            if requests[middle].goes_before(request):
                low = middle + 1
            else:
                high = middle
        return low
