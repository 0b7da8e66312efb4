"""The free pages of one memory."""

import numpy as np

from ifbbench.engine.arrays import IntArray


class FreePages:
    """A stack of the pages that hold nothing: those given up last are taken first.

    count: number of free pages.
    num_reserved: number of pages that are in use, and have no ids yet.
    """

    def __init__(self, num_pages: int) -> None:
        # Its first entries are free or reserved.
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.count, self.num_reserved = num_pages, 0

    def take(self, count: int) -> IntArray:
        """So many free pages, a view that the next `give_up` overwrites. The caller has made room."""
        self.count -= count
        return self._top(count)

    def reserve(self, count: int) -> None:
        """Take so many free pages, without their ids."""
        self.count -= count
        self.num_reserved += count

    def take_reserved(self, count: int) -> IntArray:
        """The ids of so many reserved pages, as `take` has them."""
        self.num_reserved -= count
        return self._top(count)

    def give_up(self, pages: IntArray) -> None:
        """These pages hold nothing any more."""
        if count := len(pages):
            first = self.count + self.num_reserved
            self._stack[first : first + count] = pages
            self.count += count

    def give_up_reserved(self, count: int) -> None:
        """So many reserved pages hold nothing any more."""
        self.num_reserved -= count
        self.count += count

    def ids(self) -> list[int]:
        """The ids of all free and reserved pages."""
        free: list[int] = self._stack[: self.count + self.num_reserved].tolist()
        return free

    def _top(self, count: int) -> IntArray:
        first = self.count + self.num_reserved
        return self._stack[first : first + count]
