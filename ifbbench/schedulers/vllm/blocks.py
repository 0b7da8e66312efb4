"""vLLM's block pool: free blocks in the order in which they are taken, and blocks by the hash of what they hold
(`BlockPool` and `FreeKVCacheBlockQueue`)."""

from collections import OrderedDict
from collections.abc import Iterable

from ifbbench.kv.blocks import BlockCounters


class BlockPool:
    """Blocks by id. vLLM's null block is none of them.

    A block with a hash keeps it while it is free, until it is taken for something else. Several blocks may have one
    hash: the one that got it first is found.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.counters = BlockCounters()
        self.num_hashes = 0  # given so far
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hashes: dict[int, int] = {}
        self._by_hash: dict[int, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return not self._references[block]

    def find(self, block_hash: int) -> int | None:
        """The block with this content, or None."""
        blocks = self._by_hash.get(block_hash)
        return None if blocks is None else next(iter(blocks))

    def take(self, count: int) -> list[int]:
        """The first `count` free blocks, whose content is evicted. The caller has checked that there are so many."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            if block in self._hashes:
                self._forget(block)
            else:
                self.counters.allocated_new += 1
        self.counters.allocated_total += count
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks whose content is reused, wherever they stand in the free queue."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a reference from each block. Of those that become free, blocks without a hash are taken next, in this
        order, and blocks with one after all others."""
        without_hash = []
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._hashes:
                self._free[block] = None
            else:
                without_hash.append(block)
        for block in reversed(without_hash):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def set_hash(self, block: int, block_hash: int) -> None:
        """`block`, which had none, holds or is about to hold content with this hash."""
        self._hashes[block] = block_hash
        self._by_hash.setdefault(block_hash, {})[block] = None
        self.num_hashes += 1

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable: their content was never computed."""
        for block in blocks:
            if block in self._hashes:
                self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hashes.pop(block)
        blocks = self._by_hash[block_hash]
        del blocks[block]
        if not blocks:
            del self._by_hash[block_hash]
