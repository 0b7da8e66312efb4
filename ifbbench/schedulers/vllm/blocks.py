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
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hashes: list[int | None] = [None] * num_blocks
        # By hash, the block that got it first; and further ones, in this order.
        self._first: dict[int, int] = {}
        self._others: dict[int, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return not self._references[block]

    def find(self, block_hash: int) -> int | None:
        """The block with this content, or None."""
        return self._first.get(block_hash)

    def take(self, count: int) -> list[int]:
        """The first `count` free blocks, whose content is evicted. The caller has checked that there are so many."""
        free, references, hashes, taken = self._free, self._references, self._hashes, list[int]()
        for _ in range(count):
            block, _content = free.popitem(last=False)
            taken.append(block)
            references[block] = 1
            if hashes[block] is None:
                self.counters.allocated_new += 1
            else:
                self._forget(block)
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
        free, references, hashes, without_hash = self._free, self._references, self._hashes, list[int]()
        for block in blocks:
            references[block] -= 1
            if references[block]:
                continue
            if hashes[block] is None:
                without_hash.append(block)
            else:
                free[block] = None
        for block in reversed(without_hash):
            free[block] = None
            free.move_to_end(block, last=False)

    def set_hash(self, block: int, block_hash: int) -> None:
        """`block`, which had none, holds or is about to hold content with this hash."""
        self._hashes[block] = block_hash
        if self._first.setdefault(block_hash, block) != block:
            self._others.setdefault(block_hash, {})[block] = None

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable: their content was never computed."""
        for block in blocks:
            if self._hashes[block] is not None:
                self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None
        self._hashes[block] = None
        others = self._others.get(block_hash) if self._others else None
        if others is None:
            del self._first[block_hash]
            return
        if self._first[block_hash] == block:
            self._first[block_hash] = block = next(iter(others))
        del others[block]
        if not others:
            del self._others[block_hash]
