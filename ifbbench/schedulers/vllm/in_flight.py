"""What vLLM's scheduler has scheduled and not collected yet."""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.request import Request
from ifbbench.schedulers.queueing import Submitted


class Scheduled(Submitted):
    """One iteration in flight, or several equal ones.

    rows: [scheduled], table rows of the requests, in the order of scheduling.
    tokens: [scheduled], tokens of each in an iteration; None for one of each, and where nothing asks for them.
    chunks: chunks of prompts, where a store gets what they compute.
    """

    def __init__(self, rows: Rows, outputs: Rows, tokens: Rows | None, is_joint: bool, times: int = 1) -> None:
        super().__init__(outputs, times, is_joint)
        self.rows, self.tokens = rows, tokens
        self.chunks: Sequence[ContextChunk] = ()


class InFlight:
    """The iterations in flight, the oldest first."""

    def __init__(self) -> None:
        self._scheduled: deque[Scheduled] = deque()

    def add(self, scheduled: Scheduled) -> None:
        self._scheduled.append(scheduled)

    @property
    def oldest(self) -> Scheduled:
        return self._scheduled[0]

    def collected(self, times: int) -> None:
        """So many of the oldest iterations, which are equal, were collected."""
        self._scheduled[0].times -= times
        if not self._scheduled[0].times:
            self._scheduled.popleft()

    def __iter__(self) -> Iterator[Scheduled]:
        return iter(self._scheduled)

    def drop(self, row: int) -> None:
        """The request in `row` has left."""
        for scheduled in self._scheduled:
            is_other = scheduled.rows != row
            if np.count_nonzero(is_other) == len(is_other):
                continue
            scheduled.rows = scheduled.rows[is_other]
            scheduled.outputs = scheduled.outputs[scheduled.outputs != row]
            if scheduled.tokens is not None:
                scheduled.tokens = scheduled.tokens[is_other]

    def tokens_of(self, rows: Rows) -> Rows:
        """[rows], tokens in flight."""
        tokens = np.zeros(int(rows.max(initial=-1)) + 1, np.int64)
        for scheduled in self._scheduled:
            known = scheduled.rows < len(tokens)
            of_each = 1 if scheduled.tokens is None else scheduled.tokens[known]
            tokens[scheduled.rows[known]] += of_each * scheduled.times
        return tokens[rows]

    def has(self, row: int) -> bool:
        """Whether the request in `row` is in flight."""
        return any(bool((scheduled.rows == row).any()) for scheduled in self._scheduled)


def in_order_of(rows: Rows, requests: list[Request]) -> list[Request]:
    """`requests` in the order of their rows in `rows`."""
    if len(requests) < 2:
        return requests
    order = {row: index for index, row in enumerate(rows.tolist())}
    return sorted(requests, key=lambda request: order[request.slot])
