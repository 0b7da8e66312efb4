"""Requests as columns of numbers: a million of them in 36 MB, each made when it is asked for."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ifbbench.config import DEFAULT_PRIORITY
from ifbbench.workload.prefix import shortened
from ifbbench.workload.trace import TraceRequest

Integers: TypeAlias = "array[int]"
Floats: TypeAlias = "array[float]"
Recall: TypeAlias = Callable[[int], TraceRequest]

Number = TypeVar("Number", int, float)

NO_TOKEN = NOTHING_MORE = -1
ID, LENGTH, SECONDS = "q", "i", "d"


def nothing_to_recall(origin: int) -> TraceRequest:
    """Of columns that say all."""
    raise LookupError(f"no request was recorded at {origin}")


def integers(values: ArrayLike) -> Integers:
    """A column of lengths in tokens."""
    return array(LENGTH, np.asarray(values, np.int32).tobytes())


def seconds(values: ArrayLike) -> Floats:
    """A column of times."""
    return array(SECONDS, np.asarray(values, np.float64).tobytes())


def _taken(column: "array[Number]", order: NDArray[np.int64]) -> "array[Number]":
    return array(column.typecode, np.asarray(column)[order].tobytes())


@dataclass(frozen=True, eq=False)
class RequestColumns(Sequence[TraceRequest]):
    """Requests of a trace. The columns have one element a request; their names are those of `TraceRequest`.

    origin: what `recall` finds the rest of a request by (its tokens, prefix, priority, …), NOTHING_MORE where the
    columns say all. What `recall` returns counts only for the rest: of a prompt that `prompt_len` has shortened, the
    first tokens. most_beams: no request asks for more. largest_token: no recorded prompt token is larger.
    priority: None where every request has the default.
    """

    request_id: Integers = field(default_factory=lambda: array(ID))
    arrival_s: Floats = field(default_factory=lambda: array(SECONDS))
    prompt_len: Integers = field(default_factory=lambda: array(LENGTH))
    max_new_tokens: Integers = field(default_factory=lambda: array(LENGTH))
    output_len: Integers = field(default_factory=lambda: array(LENGTH))
    origin: Integers = field(default_factory=lambda: array(ID))
    recall: Recall = nothing_to_recall
    most_beams: int = 1
    largest_token: int = NO_TOKEN
    priority: "Floats | None" = None

    def __len__(self) -> int:
        return len(self.request_id)

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[TraceRequest]: ...
    def __getitem__(self, index: int | slice) -> TraceRequest | list[TraceRequest]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        origin = self.origin[index]
        if origin == NOTHING_MORE:
            return TraceRequest(self.request_id[index], self.arrival_s[index], self.prompt_len[index],
                                self.max_new_tokens[index], self.output_len[index])  # fmt: skip
        return replace(
            shortened(self.recall(origin), self.prompt_len[index]),
            request_id=self.request_id[index],
            arrival_s=self.arrival_s[index],
            max_new_tokens=self.max_new_tokens[index],
            output_len=self.output_len[index],
        )

    def in_order(self, order: NDArray[np.int64]) -> "RequestColumns":
        """With request `order[i]` as the i-th."""
        return replace(
            self,
            request_id=_taken(self.request_id, order),
            arrival_s=_taken(self.arrival_s, order),
            prompt_len=_taken(self.prompt_len, order),
            max_new_tokens=_taken(self.max_new_tokens, order),
            output_len=_taken(self.output_len, order),
            origin=_taken(self.origin, order),
            priority=None if self.priority is None else _taken(self.priority, order),
        )

    def by_arrival(self) -> "RequestColumns":
        """In order of arrival, equal ones as they were; moved to start at 0 if they start before."""
        arrivals_s = np.asarray(self.arrival_s)
        is_ordered = not len(self) or bool((arrivals_s[1:] >= arrivals_s[:-1]).all())
        ordered = self if is_ordered else self.in_order(np.argsort(arrivals_s, kind="stable"))
        if not len(self) or ordered.arrival_s[0] >= 0:
            return ordered
        return replace(ordered, arrival_s=seconds(np.asarray(ordered.arrival_s) - ordered.arrival_s[0]))


class ColumnsBuilder:
    """Gathers requests into columns, one after another."""

    def __init__(self) -> None:
        self._columns = RequestColumns()
        self._most_beams = 1
        self._largest_token = NO_TOKEN
        self._priority: Floats | None = None

    def __len__(self) -> int:
        return len(self._columns)

    def append(self, request: TraceRequest, origin: int) -> None:
        """Add `request`, which `recall` is to find by `origin` if it is more than numbers."""
        columns = self._columns
        columns.request_id.append(request.request_id)
        columns.arrival_s.append(request.arrival_s)
        columns.prompt_len.append(request.prompt_len)
        columns.max_new_tokens.append(request.max_new_tokens)
        columns.output_len.append(request.output_len)
        if self._priority is None and request.priority != DEFAULT_PRIORITY:
            self._priority = array(SECONDS, [DEFAULT_PRIORITY]) * (len(columns) - 1)
        if self._priority is not None:
            self._priority.append(request.priority)
        if not has_more(request):
            columns.origin.append(NOTHING_MORE)
            return
        columns.origin.append(origin)
        self._most_beams = max(self._most_beams, request.beam_width)
        if request.prompt_tokens is not None:
            self._largest_token = max(self._largest_token, max(request.prompt_tokens))

    def columns(self, recall: Recall) -> RequestColumns:
        """What was gathered."""
        return replace(
            self._columns, recall=recall, most_beams=self._most_beams, largest_token=self._largest_token,
            priority=self._priority,
        )  # fmt: skip


def has_more(request: TraceRequest) -> bool:
    """Whether `request` is more than its id, arrival and lengths."""
    return (
        request.prompt_tokens is not None
        or request.prefix_ids is not None
        or request.beam_width != 1
        or request.priority != DEFAULT_PRIORITY
        or request.lora_task_id is not None
        or bool(request.stop_ids)
    )


def columns_of(requests: Iterable[TraceRequest]) -> RequestColumns:
    """`requests` as columns: themselves if they are, or else those of a list that is kept for its tokens."""
    if isinstance(requests, RequestColumns):
        return requests
    listed, builder = list(requests), ColumnsBuilder()
    for index, request in enumerate(listed):
        builder.append(request, index)
    return builder.columns(listed.__getitem__)
