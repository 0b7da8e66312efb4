"""The queue of requests that the client has submitted, by priority."""

from array import array
from heapq import heappop, heappush

import numpy as np


class PriorityQueue:
    """Numbers of requests that were submitted, by descending priority, then by number.

    The heap holds plain integers: the rank of the priority, from 0, times the number of requests, plus the number."""

    def __init__(self, priority: "array[float]") -> None:
        priorities, rank_of = np.unique(-np.asarray(priority), return_inverse=True)
        self._priorities = (-priorities).tolist()
        self._rank_of = array("q", rank_of.astype(np.int64).tobytes())
        self._size = len(priority)
        self._keys: list[int] = []
        self._popped = bytearray(len(priority) + 1)
        self._oldest = 0

    def push(self, number: int, index: int) -> None:
        """Add the request that is at `index` of the trace."""
        heappush(self._keys, self._rank_of[index] * self._size + number)

    def pop(self) -> int:
        number = heappop(self._keys) % self._size
        self._popped[number] = True
        return number

    @property
    def highest_priority(self) -> float:
        """The priority of the request that `pop` would return."""
        return float(self._priorities[self._keys[0] // self._size])

    @property
    def oldest(self) -> int:
        """The smallest number that `pop` has not returned."""
        while self._popped[self._oldest]:
            self._oldest += 1
        return self._oldest
