"""vLLM's KV cache manager: the blocks of each request, taken as its tokens are scheduled, and found by prefix
(`KVCacheManager.allocate_slots` and `get_computed_blocks`)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ifbbench.engine.arrays import BoolArray, Rows
from ifbbench.engine.plan import Limit
from ifbbench.engine.records import CacheState
from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import ceil_div
from ifbbench.kv.block_names import BlockNames
from ifbbench.schedulers.vllm.blocks import BlockPool, Blocks
from ifbbench.schedulers.vllm.groups import LayerGroup, by_window, longest_hit
from ifbbench.schedulers.vllm.rules import VllmRules


class Hits(NamedTuple):
    """What a waiting request can reuse.

    num_blocks: number of blocks.
    blocks: their ids in each group, without those that a window has left behind.
    """

    num_blocks: int
    blocks: tuple[Blocks, ...]


NO_HITS = Hits(0, ())


def _nothing() -> None:
    """No entry of `VllmCache.held` lacks a block."""


class VllmCache:
    """The blocks of each running request, by table row. docs/engines.md, Blocks and Prefix cache.

    held: [rows], number of blocks of each request in every group of layers, those that a window has left behind
        included.
    hashed: [rows], number of the held blocks that were considered for a hash.
    is_plain: whether there is one group, without a window.

    settle(): gives `held` the blocks that it lacks while generation requests are counted together.

    Blocks have ids once a request can find one of them, and where an executor reads them, windows release them, or they
    are taken in the order in which they became free.
    """

    def __init__(
        self,
        rules: VllmRules,
        num_blocks: int,
        tokens_per_block: int,
        rows: int,
        max_seq_len: int,
        reuses: bool,
        max_in_flight: int,
        has_ids: bool = True,
    ) -> None:
        """max_in_flight: maximum number of tokens in flight.
        has_ids: whether blocks have ids from the start.
        """
        self.pool = BlockPool(num_blocks, rules.takes_new_first)
        self.tokens_per_block = tokens_per_block
        self.held, self.hashed = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        columns = ceil_div(max_seq_len, tokens_per_block)
        self.groups = tuple(
            LayerGroup(index, window, tokens_per_block, rows, columns) for index, window in enumerate(rules.windows)
        )
        self.is_plain = rules.windows == (None,)
        self.windowed = tuple(group for group in self.groups if group.window is not None)
        self.filled_tokens = 0
        self._kinds = by_window(self.groups, tokens_per_block)
        self._max_blocks = rules.max_blocks(tokens_per_block, max_in_flight, max_seq_len)
        self._rules, self._max_seq_len, self._reuses = rules, max_seq_len, reuses
        self._released_tokens = 0  # in blocks that windows have left behind, of running requests
        # Hashes of the first blocks of requests, each that of the block, its predecessors and their identity.
        self.names = BlockNames(tokens_per_block)
        # Blocks that some groups had at the latest lookup, where others had fewer.
        self._shared: dict[Request, int] = {}
        self.settle: Callable[[], None] = _nothing
        if has_ids or not self.is_plain or not rules.takes_new_first:
            self.pool.give_ids([], [])

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.pool.num_blocks - self.pool.num_free

    @property
    def filled_positions(self) -> int:
        """Positions of blocks that hold a token."""
        return self.filled_tokens * len(self.groups) - self._released_tokens

    def blocks_of(self, group: LayerGroup, row: int) -> Blocks:
        """The blocks of the request in `row`, without those that a window has left behind."""
        return group.block_tables[row, 0, group.released[row] : self.held[row]].astype(np.int64)

    def lookup(self, request: Request) -> Hits:
        """The blocks that hold the first tokens of a waiting request in all groups. At least one token is left to
        compute."""
        if not self.pool.has_ids:
            return NO_HITS
        count, longest, hashes = 0, 0, list[int]()
        if self._reuses and not request.options.return_context_logits:
            most = self._num_shared(request, (request.prompt_len - 1) // self.tokens_per_block)
            hashes = self.names.of(request, most)[:most]
            count, longest = longest_hit(self._kinds, self.pool, hashes)
        if not self.is_plain:
            self._shared[request] = longest if longest > count else 0
        blocks = list[Blocks]()
        for group in self.groups:
            first = group.num_left(count * self.tokens_per_block)
            found = [self.pool.find(group.key(block_hash)) for block_hash in hashes[first:count]]
            blocks.append(np.array(found, np.int64))
        return Hits(count, tuple(blocks))

    def _give_ids(self) -> None:
        """From now on requests look for blocks."""
        self.settle()
        rows = self.held.nonzero()[0]
        blocks_of = self.pool.give_ids(self.held[rows].tolist(), self.hashed[rows].tolist())
        for row, blocks in zip(rows.tolist(), blocks_of, strict=True):
            self.groups[0].block_tables[row, 0, : len(blocks)] = blocks

    def limit_of_start(
        self, request: Request, hits: Hits, tokens: int, is_alone: bool, reserved: int = 0
    ) -> tuple[Limit | None, int]:
        """What keeps a waiting request from starting with `hits` and `tokens` more tokens, or None; and how many blocks
        others may take before that becomes another limit.

        is_alone: whether no request runs, so that no watermark is kept.
        reserved: number of free blocks that it leaves to others.
        """
        size, count = self.tokens_per_block, hits.num_blocks
        num_free_hits = 0
        if count:
            num_free_hits = sum([int(np.count_nonzero(self.pool.are_free(blocks))) for blocks in hits.blocks])
        free = self.pool.num_free - num_free_hits
        needed = (ceil_div(min(count * size + tokens, self._max_seq_len), size) - count) * len(self.groups)
        limit, more = self._limit(request, count, needed, free, is_alone, reserved)
        return limit, 0 if num_free_hits or reserved else more  # a block that is taken may be one of the hits

    def limit_of_received(self, request: Request, tokens: int, is_alone: bool) -> tuple[Limit | None, int]:
        """`limit_of_start` of a request that holds blocks with the first `position` tokens of its prompt."""
        needed = self.missing(request.slot, request.position + tokens) * len(self.groups)
        return self._limit(request, int(self.held[request.slot]), needed, self.pool.num_free, is_alone, 0)

    def _limit(
        self, request: Request, count: int, needed: int, free: int, is_alone: bool, reserved: int
    ) -> tuple[Limit | None, int]:
        """What keeps a request with `count` blocks in each group from getting so many more of the `free` ones; and how
        many others may take before that becomes another limit."""
        watermark = 0 if is_alone else self._rules.watermark_blocks
        prompt = ceil_div(min(request.prompt_len, self._max_seq_len), self.tokens_per_block)
        whole = sum([max(0, min(prompt, most) - count) for most in self._max_blocks])
        if needed > free - reserved:
            return Limit.KV_BLOCKS, self.pool.num_free
        if needed + watermark > free - reserved:
            return Limit.WATERMARK, free - needed
        if self._rules.reserves_full_prompt and whole + watermark > free:
            return Limit.FULL_PROMPT, free - needed - watermark
        return None, 0

    def start(self, request: Request, hits: Hits, loaded: int = 0) -> None:
        """A waiting request enters with the blocks in `hits`. loaded: further ones that come from a store."""
        row, count = request.slot, hits.num_blocks
        for group, blocks in zip(self.groups, hits.blocks, strict=True) if count else ():
            left = count - len(blocks)
            self.pool.hold(blocks)
            group.block_tables[row, 0, :left] = 0
            group.block_tables[row, 0, left:count] = blocks
            group.released[row] = left
            self._released_tokens += left * self.tokens_per_block
        self.held[row] = self.hashed[row] = count
        self.pool.counters.reused += count + loaded
        self.pool.counters.missed += max(0, (request.prompt_len - 1) // self.tokens_per_block - count - loaded)
        self.filled_tokens += count * self.tokens_per_block

    def missing(self, row: int, tokens: int) -> int:
        """Blocks that the request in `row` lacks for its first `tokens` tokens, in each group."""
        return max(0, ceil_div(min(tokens, self._max_seq_len), self.tokens_per_block) - int(self.held[row]))

    def has_free(self, count: int) -> bool:
        """Whether so many blocks are free for each group."""
        return count * len(self.groups) <= self.pool.num_free

    def room(self, rows: Rows, tokens: Rows) -> Rows:
        """[rows], how many more tokens the blocks of each have room for, which hold so many."""
        room: Rows = self.held[rows] * self.tokens_per_block - tokens
        return room

    def grow(self, row: int, count: int) -> None:
        """Take `count` blocks in each group for the request in `row`. The caller has checked that they are free."""
        held = int(self.held[row])
        for group in self.groups:
            blocks, _ = self.pool.take(count)
            if len(blocks):
                group.block_tables[row, 0, held : held + count] = blocks
        self.held[row] = held + count

    def grow_each(self, rows: Rows, begun: Rows | int = 0) -> int:
        """Take a block for each of `rows`, in this order, of a plain cache; returns how many of them had no content,
        which are the first ones unless `is_mixed` of the pool. begun: blocks that a row takes before, where it is among
        `rows` several times; `held` is left to the caller."""
        blocks, num_new = self.pool.take(len(rows))
        if len(blocks):
            self.groups[0].block_tables[rows, 0, self.held[rows] + begun] = blocks
        return num_new

    def leaves(self, rows: Rows, tokens: Rows) -> BoolArray:
        """[rows], whether a window of each, of which so many tokens are computed, has left further blocks behind."""
        left = np.zeros(len(rows), np.bool_)
        for group in self.windowed:
            left |= group.leaves(rows, tokens)
        return left

    def follow_windows(self, rows: Rows, tokens: Rows, is_growing: BoolArray) -> None:
        """For each of `rows` in this order, of which so many tokens are computed: release the blocks that its windows
        have left behind, and take a block in each group if it grows."""
        for row, count, grows in zip(rows.tolist(), tokens.tolist(), is_growing.tolist(), strict=True):
            self.release_left(row, count)
            if grows:
                self.grow(row, 1)

    def release_left(self, row: int, tokens: int) -> None:
        """Release the blocks that the windows of the request in `row`, of which so many tokens are computed, have left
        behind; the last ones first."""
        for group in self.windowed:
            first, end = int(group.released[row]), min(group.num_left(tokens), int(self.held[row]))
            if end > first:
                self.pool.release(group.block_tables[row, 0, first:end].astype(np.int64)[::-1])
                group.released[row] = end
                self._released_tokens += (end - first) * self.tokens_per_block

    def set_hashes(self, request: Request, tokens: int) -> None:
        """The full blocks of the first `tokens` tokens of a running request get their hashes, computed or not."""
        row = request.slot
        first, full = int(self.hashed[row]), tokens // self.tokens_per_block
        if not self._reuses or full <= first:
            return
        shared = self._num_shared(request, full)
        hashed = self._index(request, first, shared) if shared > first else first
        if shared < full:
            if self.pool.has_ids:
                self.pool.set_unshared(self.groups[0].block_tables[row, 0, hashed:full].astype(np.int64))
            hashed = full
        self.hashed[row] = hashed

    def index_unshared(self, request: Request) -> None:
        """A running request will be pre-empted, and look for its own blocks."""
        hashed = int(self.hashed[request.slot])
        shared = self._num_shared(request, hashed)
        if shared < hashed:
            self._index(request, shared, hashed)

    def _num_shared(self, request: Request, count: int) -> int:
        """How many of the first `count` blocks of a request are looked for: those with tokens that no other request has
        only once it was pre-empted."""
        shared = request.reuse.num_shared
        if shared is None or request.pauses or not self.is_plain:
            return count
        return min(count, shared // self.tokens_per_block)

    def _index(self, request: Request, first: int, full: int) -> int:
        """Blocks `first` to `full` - 1 of a running request get their hashes, as far as their tokens are known; returns
        up to which block they are."""
        row = request.slot
        if not self.pool.has_ids:
            self._give_ids()
        hashes = self.names.of(request, full)[first:full]
        full = first + len(hashes)
        boundaries = () if self.is_plain else self._boundaries(request)
        for group in self.groups:
            begin = max(first, int(group.released[row]))
            blocks = group.block_tables[row, 0, begin:full].astype(np.int64)
            keys = [group.key(block_hash) for block_hash in hashes[begin - first :]] if group.salt else hashes
            if group.window is not None:
                kept = group.findable(begin, full, self._rules.retention_interval, boundaries)
                blocks, keys = blocks[kept], [keys[index] for index in np.flatnonzero(kept)]
            self.pool.set_hashes(blocks, keys)
        return full

    def release(self, row: int, tokens: int) -> None:
        """Release the blocks of the request in `row`, which has `tokens` tokens in them: group by group, the last ones
        first."""
        if not self.pool.has_ids:
            self.pool.release_counted(int(self.held[row]), int(self.hashed[row]))
        for group in self.groups if self.pool.has_ids else ():
            self.pool.release(self.blocks_of(group, row)[::-1])
            self._released_tokens -= int(group.released[row]) * self.tokens_per_block
            group.released[row] = 0
        self.held[row] = self.hashed[row] = 0
        self.filled_tokens -= tokens

    def forget_content(self, row: int) -> None:
        """What the blocks of the request in `row` hold was never computed."""
        if not self.pool.has_ids:
            self.hashed[row] = 0
            return
        for group in self.groups:
            self.pool.forget(self.blocks_of(group, row))

    def forget(self, request: Request) -> None:
        """`request` has left."""
        self.names.forget(request)
        self._shared.pop(request, None)

    def state(self) -> CacheState:
        pool, size = self.pool, self.tokens_per_block
        used, counters = self.num_used, pool.counters
        return CacheState(
            pool.num_blocks,
            used,
            size,
            counters.allocated_total,
            counters.allocated_new,
            counters.reused,
            pool.num_blocks * size,
            used * size,
            self.filled_positions,
            counters.missed,
        )

    def check_consistency(self) -> None:
        """Raise AssertionError unless every block is free or held, never both, and all counts agree."""
        self.settle()
        if not self.pool.has_ids:
            assert self.num_used == self.held.sum(), "the number of free blocks is wrong"
            return
        references = np.zeros(self.pool.num_blocks, np.int64)
        for row in np.flatnonzero(self.held).tolist():
            blocks = np.concatenate([self.blocks_of(group, row) for group in self.groups])
            assert len(np.unique(blocks)) == len(blocks), f"row {row} has a block twice"
            references[blocks] += 1
        self.pool.check_consistency(references)

    def _boundaries(self, request: Request) -> set[int]:
        """Tokens after which another request may go on: the same prompt, of which the last token is computed again, and
        what other groups had at the lookup."""
        return {request.original_prompt_len - 1, self._shared.get(request, 0) * self.tokens_per_block}
