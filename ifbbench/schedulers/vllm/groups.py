"""Groups of layers that take their blocks from one pool, each with an attention window or without
(`SlidingWindowManager` and `HybridKVCacheCoordinator`). docs/engines.md, Attention windows."""

from collections.abc import Collection, Sequence

import numpy as np

from ifbbench.engine.arrays import BoolArray, Rows
from ifbbench.kv.attention_window import ceil_div
from ifbbench.schedulers.vllm.blocks import BlockPool


class LayerGroup:
    """The blocks of each running request in the layers of one group, by table row.

    window: number of tokens that a query sees, None for all.
    salt: makes hashes of this group differ from those of other groups, which have blocks of their own.
    released: [rows], number of first blocks that the window has left behind.
    block_tables: [rows, 1, blocks per sequence], the ids; those of released blocks, and entries beyond the sequence,
        are meaningless.
    """

    def __init__(self, index: int, window: int | None, size: int, rows: int, columns: int) -> None:
        self.window = window
        self.salt = hash((index,)) if index else 0
        self.released = np.zeros(rows, np.int64)
        self.block_tables = np.zeros((rows, 1, columns), np.int32)
        self._size = size

    def key(self, block_hash: int) -> int:
        """The hash of a block of this group."""
        return block_hash ^ self.salt

    def num_left(self, tokens: int) -> int:
        """How many blocks the window of the token after the first `tokens` has left behind."""
        return 0 if self.window is None else max(0, tokens - self.window + 1) // self._size

    def leaves(self, rows: Rows, tokens: Rows) -> BoolArray:
        """[rows], whether the window of each, with so many tokens, has left further blocks behind."""
        left: BoolArray = np.maximum(0, tokens - (self.window or 0) + 1) // self._size > self.released[rows]
        return left

    def findable(self, first: int, end: int, retention: int | None, boundaries: Collection[int]) -> BoolArray:
        """[blocks], which of the blocks from `first` to `end`, now full, get a hash in a group with a window: those
        that a hit needs which ends at one of the `boundaries` (tokens), or at a multiple of `retention` tokens; 0 is no
        multiple, None every block."""
        assert self.window is not None
        needed, interval = ceil_div(self.window - 1, self._size), 1 if retention is None else retention // self._size
        blocks = np.arange(first, end)
        kept: BoolArray = blocks % interval >= interval - needed if interval else np.zeros(len(blocks), np.bool_)
        for tokens in boundaries:
            before = tokens // self._size
            kept |= (before - needed <= blocks) & (blocks < before)
        return kept


class GroupsOfWindow:
    """The groups with one attention window, which are looked up together."""

    def __init__(self, groups: Sequence[LayerGroup], size: int) -> None:
        self.window = groups[0].window
        self._groups = groups
        self._needed = None if self.window is None else max(1, ceil_div(self.window - 1, size))

    def num_hits(self, pool: BlockPool, hashes: Sequence[int], count: int) -> int:
        """The largest number of the first `count` blocks after which a request can go on: all are there; with a window
        those that the next token sees, or all from the first on."""
        if self._needed is None:
            for index in range(count):
                if not self._has(pool, hashes[index]):
                    return index
            return count
        run = 0
        for index in range(count - 1, -1, -1):
            run = run + 1 if self._has(pool, hashes[index]) else 0
            if run == self._needed:
                return index + run
        return run

    def _has(self, pool: BlockPool, block_hash: int) -> bool:
        return all(pool.find(group.key(block_hash)) is not None for group in self._groups)


def by_window(groups: Sequence[LayerGroup], size: int) -> list[GroupsOfWindow]:
    """The groups of each window, those without one first: their hits limit the search of the others."""
    windows = sorted(dict.fromkeys(group.window for group in groups), key=lambda window: window is not None)
    return [GroupsOfWindow([group for group in groups if group.window == window], size) for window in windows]


def longest_hit(kinds: Sequence[GroupsOfWindow], pool: BlockPool, hashes: Sequence[int]) -> tuple[int, int]:
    """How many first blocks all groups have for a request to go on, and how many of them one window has at most."""
    count, longest, remaining = len(hashes), 0, kinds
    while True:
        before = count
        for kind in remaining:
            count = kind.num_hits(pool, hashes, count)
            longest = max(longest, count)
        # Without a window, a part of what is there is there too.
        remaining = [kind for kind in kinds if kind.window is not None]
        if count == before or len(remaining) < 2:
            return count, longest
