"""The pool of KV cache blocks: which are free, and how many sequences hold each of the others."""

from collections import deque
from collections.abc import Iterable

import numpy as np


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. Schedulers prevent it; a policy that does not hears of it here."""


class BlockPool:
    """Block ids 0 … `num_blocks` - 1, handed out in order of their release (first in, first out)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = np.zeros(num_blocks, np.int32)
        self.allocated_total = 0
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self, references: int = 1) -> int:
        """A free block, now held `references` times."""
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} KV cache blocks are in use")
        block = self._free.popleft()
        self.references[block] = references
        self.allocated_total += 1
        return block

    def release(self, blocks: Iterable[int], to_front: bool = False) -> None:
        """Let go of each block once, in this order; blocks that nobody holds any more become free."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                if to_front:
                    self._free.appendleft(block)
                else:
                    self._free.append(block)

    def free_blocks(self) -> list[int]:
        """Free block ids in the order in which they will be handed out."""
        return list(self._free)
