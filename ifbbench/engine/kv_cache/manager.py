"""The paged KV cache manager: which blocks each sequence owns, and which of them hold what somebody computed before."""

from collections import Counter
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.kv_cache.attention_window import AttentionWindow, ceil_div
from ifbbench.engine.kv_cache.blocks import BlockCounters, Blocks, OutOfBlocks
from ifbbench.engine.kv_cache.copies import BlockCopy
from ifbbench.engine.kv_cache.known_prefixes import MissingBlock
from ifbbench.engine.kv_cache.plain_blocks import PlainBlocks
from ifbbench.engine.kv_cache.release_plan import ReleasePlan
from ifbbench.engine.kv_cache.retention import NO_RETENTION, Retention
from ifbbench.engine.kv_cache.sequence import KnownTokens, ReuseRules, Sequence
from ifbbench.engine.kv_cache.steps_ahead import StepsAhead
from ifbbench.engine.kv_cache.token_keys import BlockKey
from ifbbench.engine.kv_cache.window import WindowCache
from ifbbench.engine.request import Request
from ifbbench.engine.request_table import IntArray

Rows = NDArray[np.int64]
NO_REUSE = ReuseRules()
NO_LIMIT = np.iinfo(np.int64).max


class KvCacheManager:
    """Paged KV cache for up to `slots` sequences.

    A whole prompt's blocks are taken on its first chunk; generation takes a block whenever a token starts one.

    registered: [slots], tokens in each sequence, the sink bubble included.
    blocks_held: [slots], blocks of one beam.
    block_tables: [slots, beams, blocks per sequence], places in device memory; entries beyond `blocks_held` are
        meaningless.
    """

    def __init__(
        self, attention_window: AttentionWindow, num_blocks: int, slots: int, num_host_blocks: int = 0,
        reuse: ReuseRules = NO_REUSE,
    ) -> None:
        self.attention_window = attention_window
        remembers = reuse.enabled or num_host_blocks
        self.blocks = (
            Blocks(num_blocks, num_host_blocks, attention_window.tokens_per_block)
            if remembers
            else PlainBlocks(num_blocks, attention_window.tokens_per_block)
        )
        self.reuse = reuse
        self.registered = np.zeros(slots, np.int64)
        self.blocks_held = np.zeros(slots, np.int64)
        shape = (slots, attention_window.max_beam_width, attention_window.max_blocks_per_sequence)
        self.block_tables: IntArray = np.zeros(shape, np.int32)
        self._window = WindowCache(attention_window, self.blocks, reuse)
        self._searches: dict[int, MissingBlock] = {}
        # Of each slot's request: the most tokens it may register, and the blocks that it may still take.
        self._limit = np.zeros(slots, np.int64)
        self._blocks_to_come = np.zeros(slots, np.int64)
        self._beam_width = np.ones(slots, np.int64)
        self._filled = 0
        # The arithmetic of most sequences, which have one beam and a place for each token.
        self._size, self._bubble = attention_window.tokens_per_block, attention_window.bubble
        self._longest_simple = attention_window.kept_tokens + attention_window.temporary

    @property
    def free_blocks(self) -> int:
        return self.blocks.num_free

    @property
    def num_blocks(self) -> int:
        return self.blocks.num_primary

    @property
    def num_used(self) -> int:
        return self.blocks.num_used

    @property
    def counters(self) -> BlockCounters:
        """Sums since the start, up to now."""
        return self.blocks.counters

    @property
    def window_tables(self) -> tuple[IntArray, ...]:
        """Block tables of further attention windows: there are none."""
        return ()

    @property
    def sequences(self) -> dict[int, Sequence]:
        return self._window.sequences

    # What schedulers ask.

    def first_chunk_need(self, request: Request) -> int:
        """Blocks that `request` takes in its next context chunk: all of its prompt's, or none past the first chunk."""
        if not request.is_first_chunk:
            return 0
        need = self.attention_window.first_chunk_need(
            request.prompt_len, request.max_new_tokens, request.num_draft_tokens, request.beam_width
        )
        return need + self._more_for_beams(request)

    def step_needs(self, rows: Rows, draft_tokens: Rows | int = 0) -> Rows:
        """Blocks that each of the generation requests in `rows` takes in its next step."""
        if self.attention_window.max_beam_width == 1 and isinstance(draft_tokens, int) and draft_tokens == 0:
            registered = self.registered[rows]
            starts_block = registered % self.attention_window.tokens_per_block == 0
            may_grow = registered < np.minimum(self._limit[rows], self.attention_window.capacity)
            needs: Rows = (starts_block & may_grow).astype(np.int64)
            return needs
        registered, limit = self.registered[rows], self._limit[rows]
        needs = self.attention_window.step_needs(registered, limit, draft_tokens, self._beam_width[rows])
        for number in np.flatnonzero((registered >= self.attention_window.capacity) & (registered < limit)).tolist():
            needs[number] = self._overwrite_need(int(rows[number]))
        return needs

    def counted(self, blocks: Rows) -> int:
        """A number, or a sum of numbers, of `step_needs`."""
        return int(blocks)

    def blocks_to_completion(self, request: Request) -> int:
        """Blocks that a context request may still take until all its reserved tokens are made."""
        length, reserved, beams = request.prompt_len, request.max_new_tokens, request.beam_width
        if beams == 1 and request.slot not in self._window.sequences and length + reserved <= self._longest_simple:
            return ceil_div(length + reserved + self._bubble, self._size)
        if request.slot in self.sequences:
            held = int(self.blocks_held[request.slot])
            return self.attention_window.blocks_to_completion(length, reserved, held, beams)
        return self.attention_window.blocks_to_completion(length, reserved, 0, beams) + self._more_for_beams(request)

    def reserved_blocks(self, rows: Rows) -> int:
        """Blocks that the generation requests in `rows` together may still take."""
        return int(np.add.reduce(self._blocks_to_come[rows]))

    def plan_release(self) -> ReleasePlan:
        return ReleasePlan(self.blocks, self.sequences)

    def missing_block(self, request: Request) -> tuple[Hashable, BlockKey] | None:
        """The first full block of the prompt that no one has computed yet, equal for two requests if and only if they
        lack the same one; None where there is none, or nothing is reused."""
        known = self._known(request)
        if known is None:
            return None
        search = self._searches.get(request.slot)
        if search is None or search.request is not request:
            search = self._searches[request.slot] = MissingBlock(request)
        return self._window.prefixes.find_missing(search, known, request.prompt_len)

    # What the loop does.

    def holds(self, slot: int) -> bool:
        """Whether `slot` has a sequence."""
        return slot in self.sequences

    def add_request(self, request: Request, now_s: float = 0.0) -> int:
        """Take the blocks of the request's whole prompt; returns how many of its tokens they hold already."""
        self.blocks.eviction.refresh(now_s)
        self._searches.pop(request.slot, None)
        reused = self.add_sequence(
            request.slot, request.prompt_len, request.beam_width, self._known(request), request.retention,
            # Logits of reused tokens would be missing.
            may_look_up=not request.options.return_context_logits,
        )  # fmt: skip
        self._blocks_to_come[request.slot] = self.blocks_to_completion(request)
        self._limit[request.slot] = request.prompt_len + request.max_new_tokens + self.attention_window.bubble
        return reused

    def add_sequence(
        self, slot: int, prompt_len: int, beam_width: int = 1, known: KnownTokens | None = None,
        retention: Retention = NO_RETENTION, may_look_up: bool = True,
    ) -> int:
        """Take the blocks of a prompt, the last one for each beam if it will be written to; returns how many of its
        tokens they hold already.

        Raises OutOfBlocks, having taken nothing, when too few are free; ValueError when `slot` is taken."""
        reused = self._window.add(slot, prompt_len, beam_width, known, retention, may_look_up)
        self._enter(slot, beam_width)
        self.registered[slot] = prompt_len + self.attention_window.bubble
        self._filled += min(prompt_len + self.attention_window.bubble, self.attention_window.capacity)
        self._limit[slot] = NO_LIMIT
        return reused

    def add_blocks(self, slot: int, count: int, beam_width: int, share_last: bool) -> None:
        """Give `slot` a sequence of `count` blocks, shared by its beams except the last one unless `share_last`."""
        private = range(count, count) if share_last else range(count - 1, count)
        self._window.add_blocks(slot, count, beam_width, private)
        self._enter(slot, beam_width)

    def add_tokens(self, rows: Rows) -> None:
        """Register one more token in each of `rows`, taking a block for each beam where the token starts one.

        Beyond the window's capacity blocks are used cyclically."""
        attention_window = self.attention_window
        registered = self.registered[rows]
        starts_block = registered % attention_window.tokens_per_block == 0
        if attention_window.kept_tokens >= attention_window.max_seq_len:
            growing, within = rows[starts_block], len(rows)
        else:
            is_within = registered < attention_window.capacity
            growing, within = rows[starts_block & is_within], int(is_within.sum())
        if len(growing):
            self.grow(growing)
        if within < len(rows):
            self._come_round(rows, registered)
        self.register(rows, registered + 1, within)

    def steps_ahead(self, rows: Rows) -> StepsAhead | None:
        """The next steps of the generation requests in `rows`; None where they are not known beforehand."""
        return StepsAhead(self, rows) if self.attention_window.max_beam_width == 1 else None

    def register(self, rows: Rows, registered: Rows, new: int) -> None:
        """The sequences in `rows` have `registered` tokens now, `new` more in all than before, each in a place of its
        own."""
        self._filled += new
        self.registered[rows] = registered

    def remove_token(self, slot: int) -> None:
        """Take back the newest token (a rejected draft); its block, if now empty, is the next to be handed out."""
        self._filled -= int(self.registered[slot] <= self.attention_window.capacity)
        self.registered[slot] -= 1
        if self.registered[slot] % self.attention_window.tokens_per_block == 0:
            self._window.shrink(slot)
            self.blocks_held[slot] -= 1
            self._blocks_to_come[slot] += self._beam_width[slot]

    def store_context(self, slot: int) -> None:
        """The prompt is computed: others may use its full blocks. Its last token's is left out, for who repeats the
        prompt must compute at least one."""
        self._store(slot, int(self.registered[slot]) - self.attention_window.bubble - 1)

    def store_generated(self, slot: int, num_tokens: int) -> None:
        """The sequence's first `num_tokens` tokens, output included, are known and computed."""
        self._store(slot, num_tokens)

    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None:
        """Release all blocks of the sequence, the last ones first, so that tails are reused before heads.

        store: of how many of its first tokens the blocks stay findable, a part of the last one included."""
        sequence = self.sequences[slot]
        # A resumed request has another prompt, and the next request in this slot has another search altogether.
        self._searches.pop(slot, None)
        if store is not None and len(sequence.beams) == 1 and not self._has_come_round(slot):
            self._store(slot, store, with_partial=True)
        self._window.remove(slot, now_s)
        self._filled -= min(int(self.registered[slot]), self.attention_window.capacity)
        self.blocks_held[slot] = self.registered[slot] = 0

    def forget_sequence(self, slot: int) -> None:
        """What the sequence's blocks hold was never computed: nobody shall find it."""
        self._window.forget(slot)

    def truncate(self, known: KnownTokens, length: int, keep: int) -> None:
        """Forget what is known of a conversation of `length` tokens beyond its first `keep`."""
        self._window.prefixes.truncate(known, length, keep)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """What the executor is to move before its next batch; each copy is told once."""
        copies = tuple(self.blocks.copies)
        self.blocks.copies.clear()
        return copies

    # What is recorded and checked.

    @property
    def places(self) -> int:
        """Tokens that all blocks have room for."""
        return self.num_blocks * self.attention_window.tokens_per_block

    @property
    def held_places(self) -> int:
        """Those in used blocks."""
        return self.num_used * self.attention_window.tokens_per_block

    @property
    def filled_places(self) -> int:
        """Those with a token in them; a token that several sequences share counts for each."""
        return self._filled

    def check_consistency(self) -> None:
        """Raise AssertionError unless every block is free or owned, never both, and reference counts agree."""
        held: Counter[int] = Counter()
        for sequence in self.sequences.values():
            held.update(sequence.references())
        self.blocks.check_consistency(dict(held))
        filled = np.minimum(self.registered[list(self.sequences)], self.attention_window.capacity).sum()
        assert self._filled == filled, "the number of filled places disagrees with the sequences"
        for slot, sequence in self.sequences.items():
            for beam, table in zip(sequence.beams, self.block_tables[slot], strict=False):
                places = [self.blocks.memory[block] for block in beam]
                assert table[: len(beam)].tolist() == places, f"the block table of slot {slot} is out of date"

    def _more_for_beams(self, request: Request) -> int:
        return self.attention_window.more_for_beams(request.prompt_len, request.beam_width) if self.reuse.enabled else 0

    def _enter(self, slot: int, beam_width: int) -> None:
        beams = self.sequences[slot].beams
        memory = self.blocks.memory
        for number, beam in enumerate(beams):
            self.block_tables[slot, number, : len(beam)] = [memory[block] for block in beam]
        self.blocks_held[slot] = len(beams[0])
        self._beam_width[slot] = beam_width

    def grow(self, rows: Rows) -> None:
        """One more block for each beam of each of `rows`, in this order."""
        slots, places = rows.tolist(), self.blocks_held[rows]
        self._window.grow(slots)
        if self.attention_window.max_beam_width == 1:
            memory, sequences = self.blocks.memory, self.sequences
            self.block_tables[rows, 0, places] = [memory[sequences[slot].beams[0][-1]] for slot in slots]
        else:
            for slot, place in zip(slots, places.tolist(), strict=True):
                self._write_table(slot, place)
        self.blocks_held[rows] = places + 1
        self._blocks_to_come[rows] -= self._beam_width[rows]

    def _write_table(self, slot: int, index: int) -> None:
        for number, beam in enumerate(self.sequences[slot].beams):
            self.block_tables[slot, number, index] = self.blocks.memory[beam[index]]

    def _come_round(self, rows: Rows, registered: Rows) -> None:
        """Tokens beyond the capacity go where the oldest ones lie."""
        places, size = self.attention_window.wrapped(registered), self.attention_window.tokens_per_block
        over = (registered >= self.attention_window.capacity) & (places % size == 0)
        for slot, index in zip(rows[over].tolist(), (places[over] // size).tolist(), strict=True):
            if taken := self._window.write_over(slot, index):
                self._blocks_to_come[slot] -= taken
                self._write_table(slot, index)

    def _overwrite_need(self, slot: int) -> int:
        """Blocks that a sequence beyond its capacity takes for its next token: if its beams share the block that it
        overwrites, all of them but one take another."""
        place = int(self.attention_window.wrapped(self.registered[slot]))
        if place % self.attention_window.tokens_per_block:
            return 0
        block = self.sequences[slot].beams[0][place // self.attention_window.tokens_per_block]
        return int(self._beam_width[slot]) - 1 if self.blocks.references[block] > 1 else 0

    def _store(self, slot: int, num_tokens: int, with_partial: bool = False) -> None:
        if self.reuse.enabled and not self.sequences[slot].is_cyclic:
            self._window.prefixes.store(self.sequences[slot], num_tokens, with_partial)

    def _has_come_round(self, slot: int) -> bool:
        return bool(self.registered[slot] >= self.attention_window.kept_tokens + self.attention_window.bubble)

    def _known(self, request: Request) -> KnownTokens | None:
        """The request's tokens. A sequence that will come round keeps to itself: it writes over its beginning."""
        attention_window = self.attention_window
        comes_round = request.prompt_len + request.max_new_tokens > attention_window.kept_tokens
        return None if not self.reuse.enabled or attention_window.bubble or comes_round else request.reuse.known()


__all__ = ["KvCacheManager", "OutOfBlocks", "ReleasePlan", "Sequence"]
