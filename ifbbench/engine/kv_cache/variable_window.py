"""A KV cache whose layers differ in attention window: a paged cache for each window, asked and changed together."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.kv_cache.block_counts import BlockCounts
from ifbbench.engine.kv_cache.blocks import BlockCounters, OutOfBlocks
from ifbbench.engine.kv_cache.copies import BlockCopy
from ifbbench.engine.kv_cache.layout import WindowLayout
from ifbbench.engine.kv_cache.manager import NO_REUSE, KvCacheManager
from ifbbench.engine.kv_cache.release_plan import ReleasePlan
from ifbbench.engine.kv_cache.sequence import KnownTokens, Sequence
from ifbbench.engine.request import Request
from ifbbench.engine.request_table import IntArray

Rows = NDArray[np.int64]


@dataclass(slots=True)
class ReleasePlans:
    """A release plan for each window."""

    plans: tuple[ReleasePlan, ...]

    @property
    def free_blocks(self) -> BlockCounts:
        return BlockCounts(tuple(plan.free_blocks for plan in self.plans))

    def release(self, slot: int) -> None:
        """Plan the removal of the sequence in `slot`."""
        for plan in self.plans:
            plan.release(slot)


class VariableWindowCache:
    """Does for several windows what `KvCacheManager` does for one; numbers of blocks are `BlockCounts`.

    A sequence has blocks in every window, all its tokens in each, as far as the window keeps them. Nothing is reused:
    what one window still holds another may have written over. (TensorRT-LLM's `BlockManager` with a
    `WindowBlockManager` for each window size.)
    """

    def __init__(self, windows: tuple[WindowLayout, ...], slots: int) -> None:
        self.windows = tuple(
            KvCacheManager(window.attention_window, window.num_blocks, slots, window.num_host_blocks)
            for window in windows
        )
        self.reuse = NO_REUSE
        self._first = self.windows[0]

    @property
    def attention_window(self) -> AttentionWindow:
        """Of the first window; block size and sink tokens are those of all."""
        return self._first.attention_window

    @property
    def registered(self) -> Rows:
        return self._first.registered

    @property
    def sequences(self) -> dict[int, Sequence]:
        return self._first.sequences

    @property
    def block_tables(self) -> IntArray:
        return self._first.block_tables

    @property
    def window_tables(self) -> tuple[IntArray, ...]:
        """Block tables of the windows after the first."""
        return tuple(window.block_tables for window in self.windows[1:])

    @property
    def free_blocks(self) -> BlockCounts:
        return BlockCounts(tuple(window.free_blocks for window in self.windows))

    @property
    def num_blocks(self) -> int:
        return sum(window.num_blocks for window in self.windows)

    @property
    def num_used(self) -> int:
        return sum(window.num_used for window in self.windows)

    @property
    def counters(self) -> BlockCounters:
        """Sums over the windows."""
        of_each = [window.counters for window in self.windows]
        return BlockCounters(
            sum(item.allocated_total for item in of_each), sum(item.allocated_new for item in of_each),
            sum(item.reused for item in of_each), sum(item.missed for item in of_each),
        )  # fmt: skip

    def first_chunk_need(self, request: Request) -> BlockCounts:
        return BlockCounts(tuple(window.first_chunk_need(request) for window in self.windows))

    def step_needs(self, rows: Rows, draft_tokens: Rows | int = 0) -> Rows:
        """[requests, windows]."""
        return np.stack([window.step_needs(rows, draft_tokens) for window in self.windows], axis=-1)

    def counted(self, blocks: Rows) -> BlockCounts:
        """A row, or a sum of rows, of `step_needs`."""
        return BlockCounts(tuple(int(number) for number in np.atleast_1d(blocks)))

    def blocks_to_completion(self, request: Request) -> BlockCounts:
        return BlockCounts(tuple(window.blocks_to_completion(request) for window in self.windows))

    def reserved_blocks(self, rows: Rows) -> BlockCounts:
        return BlockCounts(tuple(window.reserved_blocks(rows) for window in self.windows))

    def plan_release(self) -> ReleasePlans:
        return ReleasePlans(tuple(window.plan_release() for window in self.windows))

    def missing_block(self, request: Request) -> None:
        """Nothing is reused."""

    def holds(self, slot: int) -> bool:
        """Whether `slot` has a sequence."""
        return slot in self.sequences

    def add_request(self, request: Request, now_s: float = 0.0) -> int:
        """Take the request's blocks in every window, or in none."""
        if any(window.first_chunk_need(request) > window.free_blocks for window in self.windows):
            raise OutOfBlocks(f"request {request.request_id} does not fit into every attention window")
        for window in self.windows:
            window.add_request(request, now_s)
        return 0

    def add_tokens(self, rows: Rows) -> None:
        for window in self.windows:
            window.add_tokens(rows)

    def steps_ahead(self, rows: Rows) -> None:
        """Not known: windows come round at different times."""

    def store_context(self, slot: int) -> None:
        """Nothing is reused."""

    def store_generated(self, slot: int, num_tokens: int) -> None:
        """Nothing is reused."""

    def forget_sequence(self, slot: int) -> None:
        """Nothing is reused."""

    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None:
        for window in self.windows:
            window.remove_sequence(slot, now_s=now_s)

    def truncate(self, known: KnownTokens, length: int, keep: int) -> None:
        """Nothing is reused."""

    def take_copies(self) -> tuple[BlockCopy, ...]:
        return tuple(
            replace(copy, window=index) for index, window in enumerate(self.windows) for copy in window.take_copies()
        )

    @property
    def places(self) -> int:
        """Of all windows: a token has a place in each."""
        return sum(window.places for window in self.windows)

    @property
    def held_places(self) -> int:
        return sum(window.held_places for window in self.windows)

    @property
    def filled_places(self) -> int:
        return sum(window.filled_places for window in self.windows)

    def check_consistency(self) -> None:
        for window in self.windows:
            window.check_consistency()
