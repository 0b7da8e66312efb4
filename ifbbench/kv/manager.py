"""The paged KV cache manager of one attention window: the number of tokens and blocks of each sequence slot."""

from collections import Counter
from collections.abc import Hashable

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.batch import BlockCopy
from ifbbench.engine.request import Request
from ifbbench.engine.retention import NO_RETENTION, Retention
from ifbbench.engine.tokens import BlockKey, KnownTokens
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.blocks import BlockCounters, Blocks
from ifbbench.kv.interface import NO_REUSE
from ifbbench.kv.paged import PagedCache
from ifbbench.kv.reuse_tree import MissingBlockSearch
from ifbbench.kv.sequence import ReleasePlan, ReuseRules, Sequences

NO_LIMIT = np.iinfo(np.int64).max


class KvCacheManager(PagedCache):
    """A paged cache that gives out blocks by id, for executors that store keys and values in them.

    blocks_held: [slots], blocks of one beam. Entries of `block_tables` beyond it are meaningless.
    """

    def __init__(
        self,
        attention_window: AttentionWindow,
        num_blocks: int,
        slots: int,
        num_host_blocks: int = 0,
        reuse: ReuseRules = NO_REUSE,
    ) -> None:
        super().__init__(attention_window, num_blocks, slots, reuse)
        window = attention_window
        self.blocks = Blocks(num_blocks, num_host_blocks, window.tokens_per_block)
        self._sequences = Sequences(window, self.blocks, reuse)
        self.sequences = self._sequences.by_slot
        self.blocks_held = np.zeros(slots, np.int64)
        # By slot, the blocks that the beams of its request hold, a shared one once for each, and those still to come.
        self._all_blocks = np.zeros(slots, np.int64)
        self.block_tables = np.zeros((slots, window.max_beam_width, window.max_blocks_per_sequence), np.int32)
        # By slot, of requests that have no sequence yet: how far the search for their first missing block has come.
        self._searches: dict[int, MissingBlockSearch] = {}

    @property
    def free_blocks(self) -> int:
        return self.blocks.num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.blocks.num_free

    @property
    def counters(self) -> BlockCounters:
        return self.blocks.counters

    # For schedulers.

    def reserved_blocks(self, rows: Rows) -> int:
        return int(np.add.reduce(self._all_blocks[rows] - self.blocks_held[rows] * self._beam_width[rows]))

    def plan_release(self) -> ReleasePlan:
        return ReleasePlan(self.blocks, self._sequences)

    @property
    def num_reuse_changes(self) -> int:
        return self.blocks.tree.num_changes

    def missing_block(self, request: Request) -> tuple[Hashable, BlockKey] | None:
        search = self._searches.get(request.slot)
        if search is None or search.request is not request:
            search = self._searches[request.slot] = MissingBlockSearch(request, self._known(request))
        return self.blocks.tree.find_missing(search, request.prompt_len)

    # For the loop.

    def holds(self, slot: int) -> bool:
        return slot in self.sequences

    def add_request(self, request: Request, now_s: float = 0.0) -> int:
        self.blocks.eviction.refresh(now_s)
        self._forget_waiting(request.slot)
        reused = self.add_sequence(
            request.slot,
            request.prompt_len,
            request.beam_width,
            self._known(request),
            request.retention,
            # Logits of reused tokens are not computed.
            may_look_up=not request.options.return_context_logits,
        )
        held, beams = int(self.blocks_held[request.slot]), request.beam_width
        to_come = self.attention_window.blocks_to_completion(request.prompt_len, request.max_new_tokens, held, beams)
        self._all_blocks[request.slot] = held * beams + to_come
        self._limit[request.slot] = request.prompt_len + request.max_new_tokens + self.attention_window.bubble
        return reused

    def add_sequence(
        self,
        slot: int,
        prompt_len: int,
        beam_width: int = 1,
        known: KnownTokens | None = None,
        retention: Retention = NO_RETENTION,
        may_look_up: bool = True,
    ) -> int:
        """Take the blocks of a prompt; returns how many of its tokens they hold already.

        Raises OutOfBlocks, having taken nothing, when too few are free; ValueError when `slot` is taken."""
        reused = self._sequences.add(slot, prompt_len, beam_width, known, retention, may_look_up)
        self._set_tables(slot, beam_width)
        self.registered[slot] = prompt_len + self.attention_window.bubble
        self._filled += min(prompt_len + self.attention_window.bubble, self.attention_window.capacity)
        self._limit[slot] = NO_LIMIT
        return reused

    def add_blocks(self, slot: int, count: int, beam_width: int, share_last: bool) -> None:
        """Give `slot` a sequence of `count` blocks, shared by its beams except the last one unless `share_last`."""
        private = range(count, count) if share_last else range(count - 1, count)
        self._sequences.add_blocks(slot, count, beam_width, private)
        self._set_tables(slot, beam_width)

    def add_tokens(self, rows: Rows) -> Rows:
        """Beyond the window's capacity tokens overwrite the oldest ones."""
        window, registered = self.attention_window, self.registered[rows]
        starts_block, within = self._positions_in_block(registered) == 0, len(rows)
        if window.wraps:
            is_within = registered < window.capacity
            starts_block, within = starts_block & is_within, int(is_within.sum())
        growing = rows[starts_block]
        if len(growing):
            self.grow(growing)
        if within < len(rows):
            self._wrap(rows, registered)
        self.register(rows, registered + 1, within)
        return registered

    def grow(self, rows: Rows) -> None:
        """Add a block to each beam of each of `rows`, in this order."""
        slots, indices = rows.tolist(), self.blocks_held[rows]
        taken = self._sequences.grow(slots)
        self.blocks_held[rows] = indices + 1
        if self.attention_window.max_beam_width == 1:
            self.block_tables[rows, 0, indices] = self._memory_indices(taken)
            return
        for slot, index in zip(slots, indices.tolist(), strict=True):
            self._set_table_entry(slot, index)

    def register(self, rows: Rows, registered: Rows, new: int) -> None:
        """Set the numbers of tokens of `rows`. `new` tokens in all did not overwrite another one."""
        self._filled += new
        self.registered[rows] = registered

    def rewind(self, rows: Rows, registered: Rows) -> None:
        before, size = self.registered[rows], self.attention_window.tokens_per_block
        self._filled -= int((before - registered).sum())
        self.registered[rows] = registered
        emptied = -(-before // size) - -(-registered // size)
        for index in np.flatnonzero(emptied).tolist():
            for _ in range(int(emptied[index])):
                self._shrink(int(rows[index]))

    def _shrink(self, slot: int) -> None:
        """Release the last block of each beam."""
        self._sequences.shrink(slot)
        self.blocks_held[slot] -= 1

    def store_context(self, slot: int) -> None:
        self._sequences.store(slot, int(self.registered[slot]) - self.attention_window.bubble - 1)

    def store_generated(self, slot: int, num_tokens: int) -> None:
        self._sequences.store(slot, num_tokens)

    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None:
        self._forget_waiting(slot)  # a resumed request has another prompt
        window, registered = self.attention_window, int(self.registered[slot])
        has_wrapped = registered >= window.kept_tokens + window.bubble
        if store is not None and len(self.sequences[slot].beams) == 1 and not has_wrapped:
            self._sequences.store(slot, store, with_partial=True)
        self._sequences.remove(slot, now_s)
        self._filled -= min(registered, window.capacity)
        self.blocks_held[slot] = self.registered[slot] = 0

    def forget_sequence(self, slot: int) -> None:
        self._sequences.forget(slot)

    def truncate(self, known: KnownTokens, length: int, keep: int) -> None:
        for block in self.blocks.tree.truncate(known, length, keep):
            self.blocks.eviction.set_priority(block, 0)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        copies = tuple(self.blocks.copies)
        self.blocks.copies.clear()
        return copies

    # For records and tests.

    @property
    def held_positions(self) -> int:
        return self.num_used * self.attention_window.tokens_per_block

    @property
    def filled_positions(self) -> int:
        return self._filled

    def check_consistency(self) -> None:
        """Raise AssertionError unless every block is free or held, never both, and all counts agree."""
        held: Counter[int] = Counter()
        for sequence in self.sequences.values():
            held.update(sequence.references())
        self.blocks.check_consistency(dict(held))
        filled = np.minimum(self.registered[list(self.sequences)], self.attention_window.capacity).sum()
        assert self._filled == filled, "the number of filled cache positions disagrees with the sequences"
        for slot, sequence in self.sequences.items():
            for beam, table in zip(sequence.beams, self.block_tables[slot], strict=False):
                indices = [self.blocks.memory[block] for block in beam]
                assert table[: len(beam)].tolist() == indices, f"the block table of slot {slot} is out of date"

    def _forget_waiting(self, slot: int) -> None:
        self._searches.pop(slot, None)
        self._of_waiting.pop(slot, None)

    def _set_tables(self, slot: int, beam_width: int) -> None:
        beams = self.sequences[slot].beams
        for number, beam in enumerate(beams):
            self.block_tables[slot, number, : len(beam)] = self._memory_indices(beam)
        self.blocks_held[slot] = len(beams[0])
        self._beam_width[slot] = beam_width

    def _memory_indices(self, blocks: list[int]) -> list[int]:
        """The indices of device blocks in memory: their ids, unless they may have moved to host memory and back."""
        if not self.blocks.num_secondary:
            return blocks
        return [self.blocks.memory[block] for block in blocks]

    def _set_table_entry(self, slot: int, index: int) -> None:
        for number, beam in enumerate(self.sequences[slot].beams):
            self.block_tables[slot, number, index] = self.blocks.memory[beam[index]]

    def _wrap(self, rows: Rows, registered: Rows) -> None:
        """Prepare blocks that the next tokens of sequences beyond the capacity overwrite."""
        window = self.attention_window
        positions, size = window.wrapped(registered), window.tokens_per_block
        starts_block = (registered >= window.capacity) & (positions % size == 0)
        for slot, index in zip(rows[starts_block].tolist(), (positions[starts_block] // size).tolist(), strict=True):
            if taken := self._sequences.overwrite(slot, index):
                self._all_blocks[slot] -= taken
                self._set_table_entry(slot, index)

    def _overwrite_need(self, slot: int) -> int:
        """Blocks that a sequence beyond its capacity takes for its next token: if its beams share the block that it
        overwrites, all of them but one take another."""
        window = self.attention_window
        index, offset = divmod(int(window.wrapped(self.registered[slot])), window.tokens_per_block)
        is_shared = self.blocks.references[self.sequences[slot].beams[0][index]] > 1
        return int(self._beam_width[slot]) - 1 if offset == 0 and is_shared else 0

    def _blocks_to_come(self, slot: int) -> int:
        return int(self._all_blocks[slot] - self.blocks_held[slot] * self._beam_width[slot])

    def _known(self, request: Request) -> KnownTokens | None:
        """The request's tokens, if its blocks may be shared. A sequence that will wrap overwrites its beginning, so it
        shares nothing."""
        window = self.attention_window
        will_wrap = request.prompt_len + request.max_new_tokens > window.kept_tokens
        return None if not self.reuse.enabled or window.bubble or will_wrap else request.known_tokens()
