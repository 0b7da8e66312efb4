"""What would be free if some sequences were removed, without removing them."""

from collections import Counter
from collections.abc import Mapping

from ifbbench.engine.kv_cache.blocks import Blocks
from ifbbench.engine.kv_cache.sequence import Sequence


class ReleasePlan:
    """Free blocks after removals that are only planned.

    Holds only differences to the blocks' reference counts, so it costs what the planned sequences hold.
    """

    def __init__(self, blocks: Blocks, sequences: Mapping[int, Sequence]) -> None:
        self.free_blocks = blocks.num_free
        self._blocks = blocks
        self._sequences = sequences
        self._given_back: Counter[int] = Counter()

    def release(self, slot: int) -> None:
        """Plan the removal of the sequence in `slot`."""
        references = self._blocks.references
        for block, count in self._sequences[slot].references().items():
            self._given_back[block] += count
            if references[block] == self._given_back[block]:
                self.free_blocks += 1
