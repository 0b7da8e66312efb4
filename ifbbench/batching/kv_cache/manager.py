"""The paged KV cache manager: which blocks each sequence owns."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ifbbench.batching.kv_cache.geometry import CacheGeometry
from ifbbench.batching.kv_cache.pool import BlockPool, OutOfBlocks
from ifbbench.batching.request import Request
from ifbbench.batching.request_table import IntArray


@dataclass(slots=True)
class Sequence:
    """The blocks of one sequence, in order, a list a beam. Beams share all context blocks but a last partial one."""

    beams: list[list[int]]

    def references(self) -> Counter[int]:
        """How often the sequence holds each of its blocks."""
        return Counter(block for beam in self.beams for block in beam)


@dataclass(slots=True)
class ReleasePlan:
    """What would be free if some sequences were removed, without removing them.

    Holds only differences to the pool's reference counts, so it costs what the planned sequences hold.
    """

    manager: "KvCacheManager"
    free_blocks: int
    _given_back: Counter[int] = field(default_factory=Counter)

    def release(self, slot: int) -> None:
        """Plan the removal of the sequence in `slot`."""
        references = self.manager.pool.references
        for block, count in self.manager.sequences[slot].references().items():
            self._given_back[block] += count
            if references[block] == self._given_back[block]:
                self.free_blocks += 1


class KvCacheManager:
    """Paged KV cache for up to `slots` sequences.

    A whole prompt's blocks are taken on its first chunk; generation takes a block whenever a token starts one.

    registered: [slots], tokens in each sequence, the sink bubble included.
    blocks_held: [slots], blocks of one beam.
    block_tables: [slots, beams, blocks per sequence], block ids; entries beyond `blocks_held` are meaningless.
    """

    def __init__(self, geometry: CacheGeometry, num_blocks: int, slots: int) -> None:
        self.geometry = geometry
        self.pool = BlockPool(num_blocks)
        self.sequences: dict[int, Sequence] = {}
        self.registered = np.zeros(slots, np.int64)
        self.blocks_held = np.zeros(slots, np.int64)
        shape = (slots, geometry.max_beam_width, geometry.max_blocks_per_sequence)
        self.block_tables: IntArray = np.zeros(shape, np.int32)
        # Of each slot's request: the most tokens it may register, and its blocks when complete (shared, per beam).
        self._limit = np.zeros(slots, np.int64)
        self._context_blocks = np.zeros(slots, np.int64)
        self._total_blocks = np.zeros(slots, np.int64)
        self._beam_width = np.ones(slots, np.int64)

    @property
    def free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    # What schedulers ask.

    def first_chunk_need(self, request: Request) -> int:
        """Blocks that `request` takes in its next context chunk: all of its prompt's, or none past the first chunk."""
        if not request.is_first_chunk:
            return 0
        return self.geometry.first_chunk_need(
            request.prompt_len, request.max_new_tokens, request.num_draft_tokens, request.beam_width
        )

    def step_needs(self, rows: NDArray[np.int64], draft_tokens: NDArray[np.int64] | int = 0) -> NDArray[np.int64]:
        """Blocks that each of the generation requests in `rows` takes in its next step."""
        return self.geometry.step_needs(self.registered[rows], self._limit[rows], draft_tokens, self._beam_width[rows])

    def blocks_to_completion(self, request: Request) -> int:
        """Blocks that a context request may still take until all its reserved tokens are made."""
        held = int(self.blocks_held[request.slot]) if request.slot in self.sequences else 0
        return self.geometry.blocks_to_completion(request.prompt_len, request.max_new_tokens, held, request.beam_width)

    def reserved_blocks(self, rows: NDArray[np.int64]) -> int:
        """Blocks that the generation requests in `rows` together may still take."""
        held, context, total = self.blocks_held[rows], self._context_blocks[rows], self._total_blocks[rows]
        beams = self._beam_width[rows]
        shared = np.maximum(context - held, 0)
        return int((shared + (total - np.maximum(held, context)) * beams).sum())

    def plan_release(self) -> ReleasePlan:
        return ReleasePlan(self, self.pool.num_free)

    # What the loop does.

    def add_request(self, request: Request) -> None:
        """Take the blocks of the request's whole prompt."""
        self.add_sequence(request.slot, request.prompt_len, request.beam_width)
        context, total = self.geometry.total_blocks(request.prompt_len, request.max_new_tokens)
        self._context_blocks[request.slot] = context
        self._total_blocks[request.slot] = total
        self._limit[request.slot] = request.prompt_len + request.max_new_tokens + self.geometry.bubble

    def add_sequence(self, slot: int, prompt_len: int, beam_width: int = 1) -> None:
        """Take the blocks of a prompt; the last one for each beam, if it is partial and so will be written to.

        Raises OutOfBlocks, having taken nothing, when too few are free; ValueError when `slot` is taken."""
        geometry = self.geometry
        count = geometry.prompt_blocks(prompt_len)
        registered = prompt_len + geometry.bubble
        private_last = beam_width > 1 and registered % geometry.tokens_per_block != 0 and registered < geometry.capacity
        self.add_blocks(slot, count, beam_width, share_last=not private_last)
        self.registered[slot] = registered
        self._limit[slot] = np.iinfo(np.int64).max

    def add_blocks(self, slot: int, count: int, beam_width: int, share_last: bool) -> None:
        """Give `slot` a sequence of `count` blocks, shared by its beams except the last one unless `share_last`."""
        if slot in self.sequences:
            raise ValueError(f"slot {slot} holds a sequence already")
        private = 0 if share_last else min(count, 1)
        needed = count - private + private * beam_width
        if needed > self.pool.num_free:
            raise OutOfBlocks(f"a sequence needs {needed} KV cache blocks, {self.pool.num_free} are free")
        shared = [self.pool.take(references=beam_width) for _ in range(count - private)]
        beams = [shared + [self.pool.take() for _ in range(private)] for _ in range(beam_width)]
        self.sequences[slot] = Sequence(beams)
        self.block_tables[slot, :beam_width, :count] = beams
        self.blocks_held[slot] = count
        self._beam_width[slot] = beam_width

    def add_tokens(self, rows: NDArray[np.int64]) -> None:
        """Register one more token in each of `rows`, taking a block for each beam where the token starts one.

        Beyond the window's capacity blocks are used cyclically and none is taken."""
        registered = self.registered[rows]
        starts_block = (registered % self.geometry.tokens_per_block == 0) & (registered < self.geometry.capacity)
        for slot in rows[starts_block].tolist():
            self._grow(slot)
        self.registered[rows] = registered + 1

    def _grow(self, slot: int) -> None:
        held = int(self.blocks_held[slot])
        for number, beam in enumerate(self.sequences[slot].beams):
            beam.append(self.pool.take())
            self.block_tables[slot, number, held] = beam[-1]
        self.blocks_held[slot] = held + 1

    def remove_token(self, slot: int) -> None:
        """Take back the newest token (a rejected draft); its block, if now empty, is the next to be handed out."""
        self.registered[slot] -= 1
        if self.registered[slot] % self.geometry.tokens_per_block == 0:
            for beam in self.sequences[slot].beams:
                self.pool.release([beam.pop()], to_front=True)
            self.blocks_held[slot] -= 1

    def remove_sequence(self, slot: int) -> None:
        """Release all blocks of the sequence, the last ones first, so that tails are reused before heads."""
        sequence = self.sequences.pop(slot)
        for index in range(int(self.blocks_held[slot]) - 1, -1, -1):
            self.pool.release(beam[index] for beam in sequence.beams)
        self.blocks_held[slot] = self.registered[slot] = 0

    # What is recorded and checked.

    def fragmentation(self) -> float:
        """Share of the token places in used blocks that hold no token (beams and windows count by block)."""
        places = self.pool.num_used * self.geometry.tokens_per_block
        if places == 0:
            return 0.0
        return max(0.0, 1.0 - float(self.registered.sum()) / places)

    def check_consistency(self) -> None:
        """Raise AssertionError unless every block is free or owned, never both, and reference counts agree."""
        held: Counter[int] = Counter()
        for sequence in self.sequences.values():
            held.update(sequence.references())
        free = self.pool.free_blocks()
        assert len(free) == len(set(free)), "a block is free twice"
        assert not held.keys() & set(free), "a block is both free and owned"
        assert len(free) + len(held) == self.pool.num_blocks, "a block is neither free nor owned"
        references = {block: int(count) for block, count in enumerate(self.pool.references) if count}
        assert references == dict(held), "reference counts disagree with the sequences"


__all__ = ["KvCacheManager", "OutOfBlocks", "ReleasePlan", "Sequence"]
