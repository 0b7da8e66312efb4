"""The gaps between consecutive output tokens of all requests, counted rather than kept.

A request that makes a token in every iteration of a stretch adds one gap for each: the time from the end of one
iteration to the end of the next. So it is enough to count, for each iteration, how many requests made a token both in
it and in the one before. Only gaps over several iterations, where a request was skipped or paused, are kept as such.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class TokenGaps:
    """The gaps of the requests taken in so far: 8 bytes an iteration, and 8 for each gap over several."""

    def __init__(self) -> None:
        # The number of requests with a gap that ends with an iteration, as its differences from one to the next.
        self._steps = array("q", [0])
        self._long_s = array("d")

    def add(self, stretches: Iterable[tuple[int, int]], ends: Sequence[float]) -> None:
        """Take in a request that made a token in each iteration of `stretches`, [first, last] in order of time.

        ends: when each iteration ended, in seconds.
        """
        before: int | None = None
        for first, last in stretches:
            if before is None:
                self._count(first + 1, last)
            elif first == before + 1:
                self._count(first, last)
            else:
                self._long_s.append(ends[first] - ends[before])
                self._count(first + 1, last)
            before = last

    def _count(self, first: int, last: int) -> None:
        """One gap more that ends with each of these iterations."""
        if first > last:
            return
        missing = last + 2 - len(self._steps)
        if missing > 0:
            self._steps.frombytes(bytes(missing * self._steps.itemsize))
        self._steps[first] += 1
        self._steps[last + 1] -= 1

    def counted(self, ends: Sequence[float]) -> tuple[FloatArray, IntArray]:
        """Gaps in seconds, and how often each came; both of shape [kinds of gaps], in no particular order."""
        counts = np.asarray(self._steps).cumsum()
        (iterations,) = counts.nonzero()
        seconds = np.asarray(ends, np.float64)
        gaps = seconds[iterations] - seconds[iterations - 1]
        ones = np.ones(len(self._long_s), np.int64)
        return np.concatenate([gaps, self._long_s]), np.concatenate([counts[iterations], ones])
