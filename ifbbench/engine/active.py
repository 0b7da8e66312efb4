"""The active requests in the order of the schedulers, and the table of the counters that change in every iteration.

With flat arrays, one row for each active request, an iteration in which 500 requests each generate a token is a few
additions. The row of a request is also its sequence slot in the executor and in the KV cache.
"""

from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ifbbench.engine.request import Request

IntArray: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
Rows: TypeAlias = Int64Array  # indices into the table

NO_ROWS: Rows = np.zeros(0, np.int64)
_ORDER = attrgetter("order")
_NO_TOKEN = -1
NO_MICRO_BATCH = -1
_INITIAL_OUTPUT_COLUMNS = 64
_INITIAL_END_TOKEN_COLUMNS = 2


class RequestTable:
    """Counters and output tokens of all active requests. Arrays are [rows] unless stated otherwise.

    generated: output tokens scheduled since the prompt (or the resumed prompt) was complete.
    confirmed: how many of them the executor has returned. The two differ while an iteration is in flight.
    unsettled: steps of all generation requests that these two lack (see `ActiveRequests.settle`).
    reserved: maximum of `generated`.
    stop_after: value of `confirmed` at which the request has all its output tokens.
    draft_tokens: draft tokens of the next generation step.
    step_tokens: tokens that a generation step adds to the batch: beam width + draft tokens.
    any_wide_steps: whether `step_tokens` was ever not 1.
    max_draft_tokens: maximum of `draft_tokens` so far; 0 if no request ever had any.
    original_prompt_len: tokens of the prompt as it arrived.
    joined: output tokens that pauses have joined to the prompt.
    cached_before_pause: tokens of the sequence with keys and values computed before it was paused.
    any_paused: whether any request was ever paused.
    end_tokens: [rows, maximum of any request], token ids that end the request early, padded with -1.
    started: by row, the context requests past their first chunk.
    makes_tokens: whether the executor returns token ids; otherwise output tokens are symbolic.
    is_special: whether a new token needs more than to be stored (see `Request.is_special`).
    micro_batch: the micro batch that each request is in until the next turn of that one, -1 for none.
    any_in_flight: whether a request may be in another micro batch than the one that has its turn.
    lora_tasks: LoRA task id, -1 for none.
    """

    def __init__(self, rows: int) -> None:
        self.generated = np.zeros(rows, np.int64)
        self.confirmed = np.zeros(rows, np.int64)
        self.unsettled = 0
        self.reserved = np.zeros(rows, np.int64)
        self.stop_after = np.zeros(rows, np.int64)
        self.draft_tokens = np.zeros(rows, np.int64)
        self.step_tokens = np.ones(rows, np.int64)
        self.any_wide_steps = False
        self.max_draft_tokens = 0
        self.original_prompt_len = np.zeros(rows, np.int64)
        self.joined = np.zeros(rows, np.int64)
        self.cached_before_pause = np.zeros(rows, np.int64)
        self.any_paused = False
        # Ids that users give need not fit 32 bits.
        self.end_tokens = np.full((rows, _INITIAL_END_TOKEN_COLUMNS), _NO_TOKEN, np.int64)
        self.any_end_tokens = False
        self.is_special = np.zeros(rows, np.bool_)
        self.num_special = 0
        self.lora_tasks = np.full(rows, -1, np.int64)
        self.started: dict[int, Request] = {}
        self.makes_tokens = False
        self.micro_batch = np.full(rows, NO_MICRO_BATCH, np.int64)
        self.any_in_flight = False
        self._outputs = np.zeros((rows, _INITIAL_OUTPUT_COLUMNS), np.int32)
        self.free_rows = list(range(rows - 1, -1, -1))

    def take_row(self, is_special: bool = False) -> int:
        """A free row. IndexError if there is none, which admission prevents."""
        row = self.free_rows.pop()
        self.generated[row] = self.confirmed[row] = 0
        self.is_special[row] = is_special
        self.num_special += is_special
        return row

    def return_row(self, row: int) -> None:
        self.num_special -= int(self.is_special[row])
        self.micro_batch[row] = NO_MICRO_BATCH
        self.free_rows.append(row)

    def begin_turn(self, micro_batch: int) -> None:
        """The requests of this micro batch can be scheduled again; those of the others are in flight."""
        self.micro_batch[self.micro_batch == micro_batch] = NO_MICRO_BATCH
        self.any_in_flight = self._count_in_flight() > 0

    @property
    def num_in_flight(self) -> int:
        """Requests in flight in another micro batch than the one that has its turn."""
        return self._count_in_flight() if self.any_in_flight else 0

    def _count_in_flight(self) -> int:
        return int(np.count_nonzero(self.micro_batch != NO_MICRO_BATCH))

    def in_other_micro_batch(self, row: int) -> bool:
        """Whether the request in `row` is in flight in a micro batch that has not its turn."""
        return self.any_in_flight and int(self.micro_batch[row]) != NO_MICRO_BATCH

    def write_outputs(self, rows: Rows, columns: Int64Array, tokens: IntArray) -> None:
        """Store one output token for each of `rows`, at the output position in `columns`."""
        width = self._outputs.shape[1]
        if len(columns) and (last := int(columns.max())) >= width:
            self._outputs = np.pad(self._outputs, ((0, 0), (0, max(last + 1 - width, width))))
        self._outputs[rows, columns] = tokens

    def outputs(self, row: int, start: int, stop: int) -> IntArray:
        """Output tokens `start` to `stop - 1` of the request in `row`, a copy."""
        return self._outputs[row, start:stop].copy()

    def set_draft_tokens(self, rows: Rows, counts: Int64Array) -> None:
        """Set the draft tokens of the next step of `rows`, requests with one beam."""
        self.draft_tokens[rows] = counts
        self.step_tokens[rows] = counts + 1
        if len(counts) and (largest := int(counts.max())) > 0:
            self.any_wide_steps, self.max_draft_tokens = True, max(self.max_draft_tokens, largest)

    def set_end_tokens(self, row: int, end_tokens: tuple[int, ...]) -> None:
        if not (end_tokens or self.any_end_tokens):
            return
        if (more := len(end_tokens) - self.end_tokens.shape[1]) > 0:
            self.end_tokens = np.pad(self.end_tokens, ((0, 0), (0, more)), constant_values=_NO_TOKEN)
        self.end_tokens[row] = _NO_TOKEN
        self.end_tokens[row, : len(end_tokens)] = end_tokens
        self.any_end_tokens |= bool(end_tokens)


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
        self.num_with_lora = self.num_reading_tokens = 0
        self.num_changes = 0
        self._beam_widths: dict[int, int] = {}
        self._num_entered = 0

    def __len__(self) -> int:
        return len(self.by_slot)

    def __iter__(self) -> Iterator["Request"]:
        """All active requests that can be scheduled, in order."""
        return merge(self.context, self.generation, key=_ORDER)

    @property
    def batch_rows(self) -> Rows:
        """`generation_rows` in the order of a batch: by LoRA id, none first, in list order within each."""
        if not self.num_with_lora:
            return self.generation_rows
        return self.generation_rows[np.argsort(self.table.lora_tasks[self.generation_rows], kind="stable")]

    def ready(self, rows: Rows) -> Rows:
        """Those of `rows` that are not in flight in another micro batch."""
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

    @property
    def last(self) -> "Request | None":
        if not self.context or not self.generation:
            requests = self.context or self.generation
            return requests[-1] if requests else None
        context, generation = self.context[-1], self.generation[-1]
        return generation if context.goes_before(generation) else context

    def add(self, request: "Request") -> None:
        """Add a new request, behind all others of its priority."""
        self.num_changes += 1
        request.enter(self.table, self._num_entered)
        self._num_entered += 1
        self.num_with_lora += request.lora_task_id is not None
        self.num_reading_tokens += request.reads_tokens
        self._beam_widths[request.beam_width] = self._beam_widths.get(request.beam_width, 0) + 1
        self.by_slot[request.slot] = request
        self.context.insert(self._find(self.context, request), request)

    def move_to_generation(self, request: "Request") -> None:
        """The prompt of `request` is complete."""
        self.num_changes += 1
        del self.context[self._find(self.context, request)]
        index = self._find(self.generation, request)
        self.generation.insert(index, request)
        rows = self.generation_rows
        # As np.insert does, several times faster.
        longer = np.empty(len(rows) + 1, np.int64)
        longer[:index], longer[index], longer[index + 1 :] = rows[:index], request.slot, rows[index:]
        self.generation_rows = longer

    def move_to_context(self, request: "Request") -> None:
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

    def remove(self, request: "Request") -> None:
        """`request` is complete, was stopped, or failed; its row is free again."""
        self.num_changes += 1
        if request.in_context:
            del self.context[self._find(self.context, request)]
        elif request.in_generation:
            self._remove_from_generation(request)
        self.num_with_lora -= request.lora_task_id is not None
        self.num_reading_tokens -= request.reads_tokens
        self._beam_widths[request.beam_width] -= 1
        if not self._beam_widths[request.beam_width]:
            del self._beam_widths[request.beam_width]
        del self.by_slot[request.slot]
        request.leave()

    def settle(self) -> None:
        """Write `unsettled` to the table: before it is changed but by `FastForward`, or read but by `Request`."""
        table, rows = self.table, self.generation_rows
        if table.unsettled:
            table.generated[rows] += table.unsettled
            table.confirmed[rows] += table.unsettled
            table.unsettled = 0

    def count_recomputed(self, rows: Rows, cached: Rows) -> int:
        """How many generation requests in `rows` compute a token that was computed before a pause, because the resumed
        prompt had no room for it. Each of them counts it. cached: [requests], tokens of each in the cache."""
        again = rows[cached <= self.table.cached_before_pause[rows]].tolist()
        for row in again:
            self.by_slot[row].recomputed_tokens += 1
        return len(again)

    def _remove_from_generation(self, request: "Request") -> None:
        index, rows = self._find(self.generation, request), self.generation_rows
        del self.generation[index]
        shorter = np.empty(len(rows) - 1, np.int64)
        shorter[:index], shorter[index:] = rows[:index], rows[index + 1 :]
        self.generation_rows = shorter

    @staticmethod
    def _find(requests: list["Request"], request: "Request") -> int:
        """The place of `request` in `requests`, or where to insert it."""
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
