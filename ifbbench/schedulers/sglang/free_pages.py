"""The free pages of one memory."""

import numpy as np

from ifbbench.engine.arrays import IntArray


class FreePages:
    """A stack of the pages that hold nothing: those given up last are taken first. count: of them."""

    def __init__(self, num_pages: int) -> None:
        # Its first `count` entries are free.
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.count = num_pages

    def take(self, count: int) -> IntArray:
        """So many free pages, a view that the next `give_up` overwrites. The caller has made room."""
        self.count -= count
        return self._stack[self.count : self.count + count]

    def give_up(self, pages: IntArray) -> None:
        """These pages hold nothing any more."""
        self._stack[self.count : self.count + len(pages)] = pages
        self.count += len(pages)

    def ids(self) -> list[int]:
        """All of them."""
        free: list[int] = self._stack[: self.count].tolist()
        return free
