"""The blocks of one attention window: who holds each, what it holds, where it lies, and which is taken next."""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ifbbench.engine.kv_cache.copies import BlockCopy, CopyKind
from ifbbench.engine.kv_cache.eviction import DEFAULT_PRIORITY, PRIMARY, SECONDARY, EvictionPolicy
from ifbbench.engine.kv_cache.reuse_tree import ReuseTree


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. Schedulers prevent it; a policy that does not hears of it here."""


@dataclass(slots=True)
class BlockCounters:
    """allocated_total: blocks taken, those for copies and for blocks coming back from the host included. allocated_new:
    those of them that no known tokens were ever written down for. reused: matched blocks, partial matches included.
    missed: blocks of prompts that were not matched."""

    allocated_total: int = 0
    allocated_new: int = 0
    reused: int = 0
    missed: int = 0


class Blocks:
    """Block ids 0 … `num_primary` - 1 start in device memory, the `num_secondary` behind them in host memory.

    A block keeps its id, and its place in the reuse tree, when it moves between the two; `memory` says where it lies.

    references: [blocks], by how many sequences (and beams) each is held. memory: [blocks], place in its level's memory.
    copies: what the executor is to move, filled by `take` and the like and emptied by whoever builds the batch.
    """

    def __init__(self, num_primary: int, num_secondary: int = 0, tokens_per_block: int = 1) -> None:
        self.num_primary = num_primary
        self.num_secondary = num_secondary
        self.tokens_per_block = tokens_per_block
        self.eviction = EvictionPolicy(num_primary, num_secondary)
        self.tree = ReuseTree(num_primary + num_secondary)
        self.references = array("i", [0]) * (num_primary + num_secondary)
        self.memory = array("i", [*range(num_primary), *range(num_secondary)])
        self.counters = BlockCounters()
        self.copies: deque[BlockCopy] = deque()

    @property
    def num_free(self) -> int:
        """Blocks of the device that nobody holds."""
        return self.eviction.num_free[PRIMARY]

    @property
    def num_used(self) -> int:
        return self.num_primary - self.num_free

    def is_on_device(self, block: int) -> bool:
        return self.eviction.level(block) == PRIMARY

    def take(self, references: int = 1, priority: int = DEFAULT_PRIORITY, duration_s: float | None = None) -> int:
        """A block of device memory that nobody needs, now held `references` times. What it held is known no longer,
        unless it is worth keeping and the host has room. Raises OutOfBlocks if none is free."""
        if not self.num_free:
            raise OutOfBlocks(f"all {self.num_primary} KV cache blocks are in use")
        block = self.eviction.front(PRIMARY)
        self.counters.allocated_total += 1
        if self.tree.key[block] is None:
            # It has never been in the tree.
            self.counters.allocated_new += 1
            self.references[block] = references
            return self.eviction.take_front(PRIMARY, priority, duration_s)
        if self.eviction.num_free[SECONDARY] and self.eviction.is_worth_offloading(block):
            block = self._offload(block)
        self.tree.unlink_with_descendants(block)
        self.eviction.claim(block, priority, duration_s)
        self.references[block] = references
        return block

    def take_many(
        self, count: int, references: int = 1, priority: int = DEFAULT_PRIORITY, duration_s: float | None = None
    ) -> list[int]:
        """`take` so many times."""
        return [self.take(references, priority, duration_s) for _ in range(count)]

    def hold(
        self, block: int, references: int = 1, priority: int | None = None, duration_s: float | None = None
    ) -> None:
        """Hold a block that is known to be useful, free or not. A priority of None leaves it its own."""
        if self.eviction.is_free(block) or priority is not None or duration_s is not None:
            self.eviction.claim(block, priority, duration_s)
        self.references[block] += references

    def bring_back(self, block: int) -> None:
        """Move a held block from the host into device memory, at the cost of a free block there."""
        other = self.take()
        self._copy(CopyKind.ONBOARD, block, other)
        self._exchange(block, other)
        self.let_go([other])

    def copy_into_new(self, source: int, num_tokens: int, references: int = 1) -> int:
        """A block of its own with the first `num_tokens` of `source`, and its priority."""
        if self.is_on_device(source) or not self.eviction.is_free(source):
            return self._copied(source, num_tokens, references)
        # Else the block that makes room on the device may take the source's place on the host.
        self.eviction.claim(source)
        block = self._copied(source, num_tokens, references)
        self.eviction.release(source)
        return block

    def take_over(
        self, block: int, references: int = 1, priority: int | None = None, duration_s: float | None = None
    ) -> int:
        """Make a free block that holds known tokens one's own: it can be found no longer."""
        self.tree.unlink_with_descendants(block)
        self.eviction.claim(block, priority, duration_s)
        self.references[block] = references
        return block

    def _copied(self, source: int, num_tokens: int, references: int) -> int:
        kind = CopyKind.DEVICE if self.is_on_device(source) else CopyKind.ONBOARD
        place = self.memory[source]
        block = self.take(references, self.eviction.priority(source))
        # The source may have been next in line itself: then the new block has its memory, and what is in it.
        if kind is CopyKind.ONBOARD or self.memory[block] != place:
            self.copies.append(BlockCopy(kind, place, self.memory[block], num_tokens))
        return block

    def let_go(self, blocks: Iterable[int], to_front: bool = False, now_s: float = 0.0) -> None:
        """Let go of each block once, in this order; those that nobody holds any more become free."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.eviction.release(block, to_front, now_s)

    def check_consistency(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless references, free queues, memory and tree agree. held: block → references."""
        references = {block: count for block, count in enumerate(self.references) if count}
        assert references == held, "reference counts disagree with the sequences"
        free = self.eviction.free_blocks(PRIMARY) + self.eviction.free_blocks(SECONDARY)
        assert len(free) == len(set(free)), "a block is free twice"
        assert set(free).isdisjoint(held), "a block is both free and owned"
        assert len(free) + len(held) == len(self.memory), "a block is neither free nor owned"
        places = {(self.eviction.level(block), place) for block, place in enumerate(self.memory)}
        assert len(places) == len(self.memory), "two blocks lie in one place"
        assert all(self.is_on_device(block) for block in held), "a held block lies on the host"
        self.tree.check_consistency()

    def _offload(self, block: int) -> int:
        """Move a free block's content to the host; returns the block that has its device memory now."""
        other = self.eviction.front(SECONDARY)
        self.tree.unlink_with_descendants(other)
        self.eviction.claim(block)
        self.eviction.claim(other)
        self._copy(CopyKind.OFFLOAD, block, other)
        self._exchange(block, other)
        self.eviction.release(block)
        return other

    def _copy(self, kind: CopyKind, source: int, destination: int) -> None:
        places = self.memory[source], self.memory[destination]
        self.copies.append(BlockCopy(kind, *places, self.tokens_per_block))

    def _exchange(self, block: int, other: int) -> None:
        self.memory[block], self.memory[other] = self.memory[other], self.memory[block]
        self.eviction.swap_levels(block, other)
