"""The blocks of a cache in which nothing is ever found again."""

from collections import Counter, deque
from collections.abc import Iterable

from ifbbench.engine.kv_cache.blocks import Blocks, OutOfBlocks
from ifbbench.engine.kv_cache.eviction import DEFAULT_PRIORITY


class PlainBlocks(Blocks):
    """Blocks of device memory without reuse. What a free one holds is worth nothing, so they are taken first in, first
    out, whatever their priority, and many are taken at once."""

    def __init__(self, num_blocks: int, tokens_per_block: int = 1) -> None:
        super().__init__(num_blocks, 0, tokens_per_block)
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, references: int = 1, priority: int = DEFAULT_PRIORITY, duration_s: float | None = None) -> int:
        return self.take_many(1, references)[0]

    def take_many(
        self, count: int, references: int = 1, priority: int = DEFAULT_PRIORITY, duration_s: float | None = None
    ) -> list[int]:
        if count > len(self._free):
            raise OutOfBlocks(f"{count} KV cache blocks are needed, {len(self._free)} of {self.num_primary} are free")
        take, counts = self._free.popleft, self.references
        taken = [take() for _ in range(count)]
        for block in taken:
            counts[block] = references
        self.counters.allocated_total += count
        self.counters.allocated_new += count
        return taken

    def let_go(self, blocks: Iterable[int], to_front: bool = False, now_s: float = 0.0) -> None:
        counts = self.references
        put = self._free.appendleft if to_front else self._free.append
        for block in blocks:
            left = counts[block] = counts[block] - 1
            if not left:
                put(block)

    def check_consistency(self, held: dict[int, int]) -> None:
        references = {block: count for block, count in enumerate(self.references) if count}
        assert references == held, "reference counts disagree with the sequences"
        assert Counter(self._free) + Counter(held.keys()) == Counter(range(self.num_primary)), (
            "a block is not exactly once free or owned"
        )
