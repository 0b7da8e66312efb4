"""The paged KV cache manager of one attention window: a cache that gives its blocks ids."""

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


class KvCacheManager(PagedCache):
    """A paged cache that gives out blocks by id, for executors that store keys and values in them, and for sequences
    that share blocks.

    Entries of `block_tables` beyond the blocks of a sequence are meaningless.
    """

    def __init__(
        self,
        attention_window: AttentionWindow,
        num_blocks: int,
        slots: int,
        num_host_blocks: int = 0,
        reuse: ReuseRules = NO_REUSE,
        num_groups: int = 1,
    ) -> None:
        super().__init__(attention_window, num_blocks, slots, num_groups, reuse)
        window = attention_window
        self.blocks = Blocks(num_blocks, num_host_blocks, window.tokens_per_block)
        self._sequences = Sequences(window, self.blocks, reuse)
        self.sequences = self._sequences.by_slot
        self.block_tables = np.zeros((slots, window.max_beam_width, window.max_blocks_per_sequence), np.int32)
        # By slot, of requests that have no sequence yet: how far the search for their first missing block has come.
        self._searches: dict[int, MissingBlockSearch] = {}

    # For schedulers.

    @property
    def free_blocks(self) -> int:
        return self.blocks.num_free

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

    def add_sequence(
        self,
        slot: int,
        prompt_len: int,
        beam_width: int = 1,
        known: KnownTokens | None = None,
        retention: Retention = NO_RETENTION,
        may_look_up: bool = True,
    ) -> int:
        """Take the blocks of a prompt, without a request; returns how many of its tokens they hold already.

        Raises OutOfBlocks, having taken nothing, when too few are free; ValueError when `slot` is taken."""
        reused = self._sequences.add(slot, prompt_len, beam_width, known, retention, may_look_up)
        self._set_tables(slot)
        self._begin(slot, prompt_len, beam_width, None)
        return reused

    def add_blocks(self, slot: int, count: int, beam_width: int, share_last: bool) -> None:
        """Give `slot` a sequence of `count` blocks, shared by its beams except the last one unless `share_last`."""
        private = range(count, count) if share_last else range(count - 1, count)
        self._sequences.add_blocks(slot, count, beam_width, private)
        self._set_tables(slot)
        self._slots.add(slot)

    def add_tokens(self, rows: Rows) -> Rows:
        """Beyond the window's capacity tokens overwrite the oldest ones."""
        self._settle()
        window, registered = self.attention_window, self.registered[rows]
        starts_block = self._positions_in_block(registered) == 0
        if window.wraps:
            starts_block &= registered < window.capacity
        growing = rows[starts_block]
        if len(growing):
            self.grow(growing, registered[starts_block])
        if window.wraps:
            self._wrap(rows, registered)
        return super().add_tokens(rows)

    def grow(self, rows: Rows, registered: Rows) -> None:
        """Give each beam of each of `rows`, in this order, the block of its next token, which starts one. registered:
        [rows], tokens of each."""
        slots, indices = rows.tolist(), registered // self.attention_window.tokens_per_block
        taken = self._sequences.grow(slots)
        if self.attention_window.max_beam_width == 1:
            self.block_tables[rows, 0, indices] = self._memory_indices(taken)
            return
        for slot, index in zip(slots, indices.tolist(), strict=True):
            self._set_table_entry(slot, index)

    def store_context(self, slot: int) -> None:
        self._sequences.store(slot, int(self.registered[slot]) - self.attention_window.bubble - 1)

    def store_generated(self, slot: int, num_tokens: int) -> None:
        self._sequences.store(slot, num_tokens)

    def forget_sequence(self, slot: int) -> None:
        self._sequences.forget(slot)

    def truncate(self, known: KnownTokens, length: int, keep: int) -> None:
        for block in self.blocks.tree.truncate(known, length, keep):
            self.blocks.eviction.set_priority(block, 0)

    def refresh(self, now_s: float) -> None:
        self.blocks.eviction.refresh(now_s)

    @property
    def next_expiry_s(self) -> float:
        return self.blocks.eviction.next_expiry_s

    def retention_figures(self) -> dict[str, int]:
        eviction = self.blocks.eviction
        return {
            "retained_blocks": eviction.num_retained,
            "expired_blocks": eviction.num_expired,
            "lost_blocks": eviction.num_lost,
            "evicted_blocks": self.blocks.tree.num_evicted,
        }

    def take_copies(self) -> tuple[BlockCopy, ...]:
        copies = tuple(self.blocks.copies)
        self.blocks.copies.clear()
        return copies

    @property
    def counters(self) -> BlockCounters:
        return self.blocks.counters

    # What a cache that counts does without ids.

    def _take_prompt(self, request: Request, held: int, now_s: float) -> int:
        self._searches.pop(request.slot, None)
        reused = self._sequences.add(
            request.slot,
            request.prompt_len,
            request.beam_width,
            self._known(request),
            request.retention,
            # Logits of reused tokens are not computed.
            may_look_up=not request.options.return_context_logits,
        )
        self._set_tables(request.slot)
        return reused

    def _take(self, count: int) -> None:
        """Does nothing: `grow` has taken the blocks, which needs the sequences that they are for."""

    def _return(self, rows: Rows, counts: Rows) -> None:
        for index in np.flatnonzero(counts).tolist():
            for _ in range(int(counts[index])):
                self._sequences.shrink(int(rows[index]))

    def _release(self, slot: int, store: int | None, now_s: float) -> None:
        self._searches.pop(slot, None)  # a resumed request has another prompt
        window = self.attention_window
        has_wrapped = int(self.registered[slot]) >= window.kept_tokens + window.bubble
        if store is not None and len(self.sequences[slot].beams) == 1 and not has_wrapped:
            self._sequences.store(slot, store, with_partial=True)
        self._sequences.remove(slot, now_s)

    def _overwrite_need(self, slot: int) -> int:
        """If the beams of the sequence share the block that it overwrites, all of them but one take another."""
        window = self.attention_window
        index, offset = divmod(int(window.wrapped(self.registered[slot])), window.tokens_per_block)
        is_shared = self.blocks.references[self.sequences[slot].beams[0][index]] > 1
        return int(self._beam_width[slot]) - 1 if offset == 0 and is_shared else 0

    def _check_blocks(self) -> None:
        """Every block is free or held, never both, and the tables are up to date."""
        held: Counter[int] = Counter()
        for sequence in self.sequences.values():
            held.update(sequence.references())
        self.blocks.check_consistency(dict(held))
        for slot, sequence in self.sequences.items():
            for beam, table in zip(sequence.beams, self.block_tables[slot], strict=False):
                indices = [self.blocks.memory[block] for block in beam]
                assert table[: len(beam)].tolist() == indices, f"the block table of slot {slot} is out of date"

    # Tables and tokens.

    def _set_tables(self, slot: int) -> None:
        for number, beam in enumerate(self.sequences[slot].beams):
            self.block_tables[slot, number, : len(beam)] = self._memory_indices(beam)

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
                self._reserved -= taken if slot in self._group_of else 0
                self._set_table_entry(slot, index)

    def _known(self, request: Request) -> KnownTokens | None:
        """The request's tokens, if its blocks may be shared. A sequence that will wrap overwrites its beginning, so it
        shares nothing."""
        window = self.attention_window
        will_wrap = request.prompt_len + request.max_new_tokens > window.kept_tokens
        return None if not self.reuse.enabled or window.bubble or will_wrap else request.known_tokens()
