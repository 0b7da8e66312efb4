"""A part of a trace: a window of time, every k-th request, or a number of requests at random."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.workload.distributions import Stream, generator
from ifbbench.workload.trace import RequestColumns, Trace, TraceRequest, columns_of

Indices: TypeAlias = NDArray[np.int64]
ARRIVAL_DECIMALS = 9


@dataclass(frozen=True)
class Selection:
    """Which requests of a trace are kept.

    from_s, to_s: takes the requests that arrive from one time until before the other.
    every: takes the first of these requests and each k-th after it.
    num_requests: takes so many of these at random, without repetition.
    stratified: takes one of each of `num_requests` equal groups by total length, so that a small sample has the lengths
        of the trace.
    preserve_rate: arrivals are moved together so that the rate (requests/s) stays that of the window.
    """

    from_s: float = 0.0
    to_s: float = float("inf")
    every: int = 1
    num_requests: int | None = None
    stratified: bool = False
    preserve_rate: bool = True

    def indices(self, columns: RequestColumns, seed: int) -> tuple[Indices, float]:
        """The positions of the requests kept, ascending, and the factor of their arrivals."""
        arrivals_s = np.asarray(columns.arrival_s)
        window = np.flatnonzero((arrivals_s >= self.from_s) & (arrivals_s < self.to_s))
        kept = window[:: self.every]
        if self.num_requests is not None and self.num_requests < len(kept):
            draws = generator(seed, Stream.SAMPLE)
            if self.stratified:
                lengths = np.asarray(columns.prompt_len, np.int64) + np.asarray(columns.output_len)
                groups = np.array_split(kept[np.argsort(lengths[kept], kind="stable")], self.num_requests)
                kept = np.array([group[draws.integers(len(group))] for group in groups])
            else:
                kept = draws.choice(kept, self.num_requests, replace=False, shuffle=False)
            kept = np.sort(kept)
        if not len(kept):
            raise InputError(
                f"no request arrives from {self.from_s:g} s to {self.to_s:g} s; the trace ends at "
                f"{arrivals_s[-1]:g} s. Give another window."
            )
        return kept, len(kept) / len(window) if self.preserve_rate else 1.0


class Sample:
    """The requests of `trace` that `selection` keeps, with their ids, from time 0; made one by one.

    A turn of a conversation is kept without the turn before it (`after`) if that is not in the sample.
    """

    def __init__(self, trace: Trace, selection: Selection, seed: int) -> None:
        self._columns = columns_of(trace.requests)
        self._kept, self._factor = selection.indices(self._columns, seed)

    @cached_property
    def _ids(self) -> set[int]:
        return set(np.asarray(self._columns.request_id)[self._kept].tolist())

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[TraceRequest]:
        columns = self._columns
        start_s = columns.arrival_s[self._kept[0]]
        for index in self._kept.tolist():
            request = columns[index]
            is_first = request.after is not None and request.after not in self._ids
            yield replace(
                request,
                arrival_s=round((request.arrival_s - start_s) * self._factor, ARRIVAL_DECIMALS),
                after=None if is_first else request.after,
                think_s=0.0 if is_first else request.think_s,
                also_after=() if is_first else tuple(other for other in request.also_after if other in self._ids),
            )
