"""The next steps of generation requests that all make a token in each: what they will take, before they take it."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ifbbench.engine.kv_cache.manager import KvCacheManager

Integers = NDArray[np.int64]


class StepsAhead:
    """Steps that all of `rows` make together. One beam each; nothing else may happen to the cache in between.

    positions: [requests], where each one's next token goes. most: how many steps are known: until some sequence comes
    round, and with reuse until a block fills, for it is stored then, which may change what is free.
    """

    def __init__(self, cache: "KvCacheManager", rows: Integers) -> None:
        self._cache = cache
        self._rows = rows
        self._size = size = cache.attention_window.tokens_per_block
        self._registered = registered = cache.registered[rows]
        self._until_block = -registered % size
        self.positions = registered - cache.attention_window.bubble if cache.attention_window.bubble else registered
        self.most = cache.attention_window.capacity - int(np.maximum.reduce(registered))
        if cache.reuse.enabled:
            self.most = min(self.most, size - int(np.maximum.reduce(registered % size)))

    def blocks(self, steps: int) -> Integers:
        """[steps], blocks that all requests together take in each of their next steps."""
        of_remainder = np.bincount(self._until_block, minlength=self._size)
        return of_remainder[:steps] if steps <= self._size else of_remainder[np.arange(steps) % self._size]

    def take(self, steps: int) -> None:
        """Make so many steps, as `add_tokens` would one by one."""
        order = self._until_block.argsort(kind="stable")
        ordered_rows, until_block = self._rows[order], self._until_block[order]
        for step in range(0, steps, self._size):
            growing = int(until_block.searchsorted(steps - step))
            if growing:
                self._cache.grow(ordered_rows[:growing])
        self._cache.register(self._rows, self._registered + steps, steps * len(self._rows))
