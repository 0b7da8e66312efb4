"""vLLM's block pool: free blocks in the order in which they are taken, and blocks by the hash of what they hold
(`BlockPool` and `FreeKVCacheBlockQueue`)."""

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ifbbench.engine.arrays import NO_ROWS, BoolArray, Int64Array
from ifbbench.kv.blocks import BlockCounters

Blocks: TypeAlias = Int64Array  # ids of blocks, in order

NO_HASH = -1  # no hash of Python is -1
NOT_SHARED = -2  # in place of the hash of content that no request looks for
NOT_FREE = -1


class FreeQueue:
    """The free blocks in the order in which they are taken, as runs of blocks that became free together.

    A block that leaves the queue from its middle keeps its entry there, which is passed over: each run has a number,
    and `_run_of` is the number of the run in which a block is free.
    """

    def __init__(self, num_blocks: int) -> None:
        self._runs: deque[tuple[int, Blocks]] = deque([(0, np.arange(num_blocks))])
        self._run_of = np.zeros(num_blocks, np.int64)
        self._num_runs = 1
        self._num_passed_over = 0

    def are_free(self, blocks: Blocks) -> BoolArray:
        """[blocks], whether each is free."""
        free: BoolArray = self._run_of[blocks] != NOT_FREE
        return free

    def take(self, count: int) -> Blocks:
        """Take the first `count` blocks, one or more. The caller has checked that there are so many."""
        parts, missing = list[Blocks](), count
        while missing:
            number, run = self._runs.popleft()
            if len(run) > missing:
                self._runs.appendleft((number, run[missing:]))
                run = run[:missing]
            part = run[self._run_of[run] == number] if self._num_passed_over else run
            self._num_passed_over -= len(run) - len(part)
            missing -= len(part)
            parts.append(part)
        taken = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._run_of[taken] = NOT_FREE
        return taken

    def remove(self, blocks: Blocks) -> None:
        """These free blocks leave the queue, wherever they stand."""
        self._run_of[blocks] = NOT_FREE
        self._num_passed_over += len(blocks)
        if self._num_passed_over > len(self._run_of):  # more than there are blocks
            self._runs = deque((number, run[self._run_of[run] == number]) for number, run in self._runs)
            self._num_passed_over = 0

    def put_first(self, blocks: Blocks) -> None:
        """`blocks` become free, and are taken before all others."""
        if len(blocks):
            self._runs.appendleft((self._number(blocks), blocks))

    def put_last(self, blocks: Blocks) -> None:
        """`blocks` become free, and are taken after all others."""
        if len(blocks):
            self._runs.append((self._number(blocks), blocks))

    def _number(self, blocks: Blocks) -> int:
        """The number of a new run of these blocks."""
        number = self._num_runs
        self._num_runs += 1
        self._run_of[blocks] = number
        return number


class BlockPool:
    """Blocks, which are counted, and have ids from `give_ids` on. vLLM's null block is none of them.

    A block with a hash keeps it while it is free, until it is taken for something else. Free blocks without a hash are
    taken first, so that two counts say what is taken; or, without `takes_new_first`, in the order in which all became
    free, which needs ids. Several blocks may have one hash: the one that got it first is
    found.

    evicted: hashes of the content that was evicted, in order, where it is written to a store.
    """

    def __init__(self, num_blocks: int, takes_new_first: bool = True) -> None:
        self.evicted: list[int] | None = None
        self.num_blocks = self.num_free = num_blocks
        self.counters = BlockCounters()
        self.has_ids, self.takes_new_first = False, takes_new_first
        self._num_free_new = num_blocks  # without a hash
        self._free = FreeQueue(0)
        self._references = self._hashes = np.zeros(0, np.int64)
        # By hash, the block that got it first; and further ones, in this order.
        self._first: dict[int, int] = {}
        self._others: dict[int, dict[int, None]] = {}

    def give_ids(self, held: Sequence[int], hashed: Sequence[int]) -> list[Blocks]:
        """Blocks have ids from now on. Which ones does not matter: a block that was only counted holds nothing that is
        looked for. held, hashed: of each request, how many blocks it has, and how many first ones of these have a
        hash. Returns the blocks of each."""
        assert not self.has_ids, "the blocks have ids"
        num_free, num_new = self.num_free, self._num_free_new
        self.has_ids, self._free = True, FreeQueue(self.num_blocks)
        self._references = np.zeros(self.num_blocks, np.int64)
        self._hashes = np.full(self.num_blocks, NO_HASH, np.int64)
        blocks_of = [self._free.take(count) if count else NO_ROWS for count in held]
        for blocks, count in zip(blocks_of, hashed, strict=True):
            self._references[blocks] = 1
            self._hashes[blocks[:count]] = NOT_SHARED
        if num_new < num_free:
            self._free.take(num_free)
            free = np.arange(self.num_blocks - num_free, self.num_blocks)
            self._hashes[free[num_new:]] = NOT_SHARED
            self._free.put_last(free)
        return blocks_of

    @property
    def is_mixed(self) -> bool:
        """Whether free blocks with and without content are taken in turn."""
        return not self.takes_new_first and 0 < self._num_free_new < self.num_free

    @property
    def num_evicting(self) -> int:
        """Free blocks that evict content when they are taken."""
        return self.num_free - self._num_free_new

    def are_free(self, blocks: Blocks) -> BoolArray:
        """[blocks], whether each is free."""
        return self._free.are_free(blocks)

    def find(self, block_hash: int) -> int | None:
        """The block with this content, or None."""
        return self._first.get(block_hash)

    def take(self, count: int) -> tuple[Blocks, int]:
        """The first `count` free blocks, one or more, whose content is evicted, none of blocks without ids; and how
        many of them had none, the first ones with `takes_new_first`. The caller has checked that there are so many."""
        taken = self._free.take(count) if self.has_ids else NO_ROWS
        num_new = min(count, self._num_free_new)
        if not self.takes_new_first:
            evicting = self._hashes[taken] != NO_HASH
            num_new = count - int(np.count_nonzero(evicting))
        self.num_free -= count
        self._num_free_new -= num_new
        self.counters.allocated_total += count
        self.counters.allocated_new += num_new
        if not self.has_ids:
            return taken, num_new
        self._references[taken] = 1
        if num_new < count:
            evicted = taken[num_new:] if self.takes_new_first else taken[evicting]
            if self.evicted is not None:
                self.evicted += self._hashes[evicted].tolist()
            self.forget(evicted)
        return taken, num_new

    def hold(self, blocks: Blocks) -> None:
        """Add a reference to blocks whose content is reused, wherever they stand in the free queue."""
        free = blocks[self._references[blocks] == 0]
        self._free.remove(free)
        self.num_free -= len(free)
        self._references[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        """Remove a reference from each block. Those that become free are taken after all others in this order; but with
        `takes_new_first` those without a hash are taken next."""
        references = self._references[blocks] - 1
        self._references[blocks] = references
        free = blocks[references == 0]
        has_hash = self._hashes[free] != NO_HASH
        if self.takes_new_first:
            self._free.put_first(free[~has_hash])
            self._free.put_last(free[has_hash])
        else:
            self._free.put_last(free)
        self.release_counted(len(free), int(np.count_nonzero(has_hash)))

    def release_counted(self, count: int, num_hashed: int) -> None:
        """So many blocks become free, of which `num_hashed` have a hash."""
        self.num_free += count
        self._num_free_new += count - num_hashed

    def set_hashes(self, blocks: Blocks, hashes: list[int]) -> None:
        """`blocks`, which had no hash, hold or are about to hold content with these hashes, all different."""
        self._hashes[blocks] = hashes
        if self._first.keys().isdisjoint(hashes):
            self._first.update(zip(hashes, blocks.tolist(), strict=True))
            return
        for block, block_hash in zip(blocks.tolist(), hashes, strict=True):
            if self._first.setdefault(block_hash, block) != block:
                self._others.setdefault(block_hash, {})[block] = None

    def set_unshared(self, blocks: Blocks) -> None:
        """`blocks`, which had no hash, hold content that no request looks for; else they are as blocks with a hash."""
        self._hashes[blocks] = NOT_SHARED

    def forget(self, blocks: Blocks) -> None:
        """Make blocks unfindable."""
        hashes: Int64Array = self._hashes[blocks]
        self._hashes[blocks] = NO_HASH
        first, others = self._first, self._others
        if not first:
            return
        for index, block_hash in enumerate(hashes.tolist()):
            if block_hash in (NO_HASH, NOT_SHARED):
                continue
            if not others or block_hash not in others:
                del first[block_hash]
                continue
            block, equal = int(blocks[index]), others[block_hash]
            if first[block_hash] == block:
                first[block_hash] = block = next(iter(equal))
            del equal[block]
            if not equal:
                del others[block_hash]

    def check_consistency(self, references: Int64Array) -> None:
        """Raise AssertionError unless blocks have these references, [blocks], and those without one are free."""
        assert (self._references == references).all(), "references disagree with the requests"
        free = self.are_free(np.arange(self.num_blocks))
        assert (free == (references == 0)).all(), "a block is both free and held, or neither"
        assert self.num_free == np.count_nonzero(free), "the number of free blocks is wrong"
        new = np.count_nonzero(free & (self._hashes == NO_HASH))
        assert self._num_free_new == new, "the number of free blocks without content is wrong"
