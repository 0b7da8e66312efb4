"""The blocks of one attention window: reference counts, contents, memory indices, and which is taken next."""

from collections import deque
from dataclasses import dataclass

from ifbbench.engine.batch import BlockCopy, CopyKind
from ifbbench.engine.retention import DEFAULT_PRIORITY
from ifbbench.kv.eviction import PRIMARY, SECONDARY, EvictionPolicy
from ifbbench.kv.reuse_tree import ReuseTree


class OutOfBlocks(Exception):
    """More blocks were requested than are free. A correct capacity scheduler policy prevents it."""


@dataclass(slots=True)
class BlockCounters:
    """Counts of blocks since the start of a run.

    allocated_total: blocks taken, including those for copies and for onboarding.
    allocated_new: how many of the taken blocks never had known tokens.
    reused: matched blocks, partial matches included.
    missed: blocks of prompts that were not matched.
    """

    allocated_total: int = 0
    allocated_new: int = 0
    reused: int = 0
    missed: int = 0


class Blocks:
    """Blocks with reuse and host memory. Block ids 0 to `num_primary` - 1 start in device memory, the `num_secondary`
    behind them in host memory. A block that moves between the two keeps its id and its node in the reuse tree.

    references: [blocks], number of sequences (and beams) that hold each.
    memory: [blocks], index in the memory that it is in.
    copies: what the executor must copy, until `KvCacheManager.take_copies`.
    """

    def __init__(self, num_primary: int, num_secondary: int = 0, tokens_per_block: int = 1) -> None:
        self.num_primary = num_primary
        self.num_secondary = num_secondary
        self.tokens_per_block = tokens_per_block
        self.eviction = EvictionPolicy(num_primary, num_secondary)
        self.tree = ReuseTree(num_primary + num_secondary, tokens_per_block)
        self.references = [0] * (num_primary + num_secondary)
        self.memory = [*range(num_primary), *range(num_secondary)]
        self.counters = BlockCounters()
        self.copies: deque[BlockCopy] = deque()

    @property
    def num_free(self) -> int:
        """Device blocks without references."""
        return self.eviction.num_free[PRIMARY]

    def is_on_device(self, block: int) -> bool:
        return self.eviction.level(block) == PRIMARY

    def take(self, references: int = 1, priority: int = DEFAULT_PRIORITY, duration_s: float | None = None) -> int:
        """A free device block, now with `references`. What it held is no longer known, unless its priority is high
        enough for offloading and the host has room. Raises OutOfBlocks if none is free."""
        return self.take_many(1, references, priority, duration_s)[0]

    def take_many(
        self, count: int, references: int = 1, priority: int = DEFAULT_PRIORITY, duration_s: float | None = None
    ) -> list[int]:
        """`take`, `count` times; takes nothing if it raises."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} KV cache blocks are needed, {self.num_free} of {self.num_primary} are free")
        if self.num_secondary:
            return [self._take_or_offload(references, priority, duration_s) for _ in range(count)]
        taken, counts, keys = self.eviction.claim_front(count, priority, duration_s), self.references, self.tree.key
        self.counters.allocated_total += count
        for block in taken:
            counts[block] = references
        if not self.tree.num_changes:  # no block was ever given content
            self.counters.allocated_new += count
            return taken
        for block in taken:
            if keys[block] is None:
                self.counters.allocated_new += 1
        self.tree.unlink_evicted(taken)
        return taken

    def _take_or_offload(self, references: int, priority: int, duration_s: float | None) -> int:
        """`take` where there is a host memory."""
        block = self.eviction.front(PRIMARY)
        self.counters.allocated_total += 1
        if self.tree.key[block] is None:
            self.counters.allocated_new += 1
        elif self.eviction.num_free[SECONDARY] and self.eviction.is_worth_offloading(block):
            block = self._offload(block)
        else:
            self.tree.num_evicted += self.tree.is_linked(block)
            self.eviction.num_lost += self.eviction.priority(block) > DEFAULT_PRIORITY
        return self.take_over(block, references, priority, duration_s)

    def take_over(
        self, block: int, references: int = 1, priority: int | None = None, duration_s: float | None = None
    ) -> int:
        """Take a given free block; what it holds can no longer be found. A priority of None leaves it unchanged."""
        if self.tree.is_linked(block):
            self.tree.unlink_with_descendants(block)
        self.eviction.claim(block, priority, duration_s)
        self.references[block] = references
        return block

    def hold(
        self, block: int, references: int = 1, priority: int | None = None, duration_s: float | None = None
    ) -> None:
        """Add references to a block with reusable content, free or not. A priority of None leaves it unchanged."""
        if self.eviction.is_free(block) or priority is not None or duration_s is not None:
            self.eviction.claim(block, priority, duration_s)
        self.references[block] += references

    def hold_all(self, blocks: list[int], references: int = 1) -> None:
        """`hold` each of `blocks`, and leave its priority unchanged."""
        counts, free = self.references, list[int]()
        for block in blocks:
            if not counts[block]:
                free.append(block)
            counts[block] += references
        self.eviction.claim_all(free)

    def release(self, blocks: list[int], to_front: bool = False, now_s: float = 0.0) -> None:
        """Remove one reference from each block, in this order; blocks without references become free."""
        counts, free = self.references, list[int]()
        for block in blocks:
            left = counts[block] = counts[block] - 1
            if not left:
                free.append(block)
        self.eviction.release_all(free, to_front, now_s)

    # Copies between blocks and between memories.

    def copy_into_new(self, source: int, num_tokens: int, references: int = 1) -> int:
        """A new block with the first `num_tokens` tokens of `source`, and its priority."""
        if self.is_on_device(source) or not self.eviction.is_free(source):
            return self._copied(source, num_tokens, references)
        # The device block that is evicted for the copy must not be offloaded to the memory of the source.
        self.eviction.claim(source)
        block = self._copied(source, num_tokens, references)
        self.eviction.release(source)
        return block

    def _copied(self, source: int, num_tokens: int, references: int) -> int:
        kind = CopyKind.DEVICE if self.is_on_device(source) else CopyKind.ONBOARD
        index = self.memory[source]
        block = self.take(references, self.eviction.priority(source))
        # If the source itself was evicted, the new block has its memory and its content.
        if kind is CopyKind.ONBOARD or self.memory[block] != index:
            self.copies.append(BlockCopy(kind, index, self.memory[block], num_tokens))
        return block

    def onboard(self, block: int) -> None:
        """Move a held block from host into device memory, in exchange for a free device block."""
        other = self.take()
        self._move(CopyKind.ONBOARD, block, other)
        self.release([other])

    def _offload(self, block: int) -> int:
        """Move a free block's content to the host; returns the block that has its device memory now."""
        other = self.eviction.front(SECONDARY)
        self.tree.unlink_with_descendants(other)
        self.eviction.claim(block)
        self.eviction.claim(other)
        self._move(CopyKind.OFFLOAD, block, other)
        self.eviction.release(block)
        return other

    def _move(self, kind: CopyKind, block: int, other: int) -> None:
        """Copy `block` to the memory of `other`, and exchange their memory indices."""
        indices = self.memory[block], self.memory[other]
        self.copies.append(BlockCopy(kind, *indices, self.tokens_per_block))
        self.memory[other], self.memory[block] = indices
        self.eviction.swap_levels(block, other)

    def check_consistency(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless references, free queues, memory and tree agree. held: block → references."""
        self._check_references(held)
        free = self.eviction.free_blocks(PRIMARY) + self.eviction.free_blocks(SECONDARY)
        assert len(free) == len(set(free)), "a block is free twice"
        assert set(free).isdisjoint(held), "a block is both free and held"
        assert len(free) + len(held) == len(self.memory), "a block is neither free nor held"
        indices = {(self.eviction.level(block), index) for block, index in enumerate(self.memory)}
        assert len(indices) == len(self.memory), "two blocks have the same memory"
        assert all(self.is_on_device(block) for block in held), "a held block is in host memory"
        self.tree.check_consistency()

    def _check_references(self, held: dict[int, int]) -> None:
        references = {block: count for block, count in enumerate(self.references) if count}
        assert references == held, "reference counts disagree with the sequences"
