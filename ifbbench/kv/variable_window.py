"""A KV cache for layers that differ in attention window: a paged cache for each window, operated together."""

from dataclasses import dataclass, replace

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.batch import BlockCopy
from ifbbench.engine.records import CacheState, WindowBlocks
from ifbbench.engine.request import Request
from ifbbench.kv.blocks import BlockCounters, OutOfBlocks
from ifbbench.kv.interface import KvCache
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.paged import PagedCache
from ifbbench.kv.sequence import ReleaseCount, ReleasePlan
from ifbbench.kv.sizing import WindowLayout


class BlockCounts:
    """Numbers of blocks in a cache with several attention windows, one for each. A number is more than another if it is
    in any window: then it does not fit.

    Works where an integer does, so that a policy is the same for one window and for several.
    """

    __slots__ = ("counts",)

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def __add__(self, other: "BlockCounts | int") -> "BlockCounts":
        return BlockCounts(tuple(mine + its for mine, its in zip(self.counts, self._of(other), strict=True)))

    def __radd__(self, other: "BlockCounts | int") -> "BlockCounts":
        return self + other

    def __sub__(self, other: "BlockCounts | int") -> "BlockCounts":
        return BlockCounts(tuple(mine - its for mine, its in zip(self.counts, self._of(other), strict=True)))

    def __gt__(self, other: "BlockCounts | int") -> bool:
        return any(mine > its for mine, its in zip(self.counts, self._of(other), strict=True))

    def __le__(self, other: "BlockCounts | int") -> bool:
        return not self > other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockCounts | int) and self.counts == self._of(other)

    def __hash__(self) -> int:
        return hash(self.counts)

    def __repr__(self) -> str:
        return f"BlockCounts{self.counts}"

    def _of(self, other: "BlockCounts | int") -> tuple[int, ...]:
        """An integer is the same number in every window."""
        return other.counts if isinstance(other, BlockCounts) else (other,) * len(self.counts)


@dataclass(slots=True)
class ReleasePlans:
    """A release plan for each window."""

    plans: tuple[ReleasePlan | ReleaseCount, ...]

    @property
    def free_blocks(self) -> BlockCounts:
        return BlockCounts(tuple(plan.free_blocks for plan in self.plans))

    def release(self, slot: int) -> None:
        for plan in self.plans:
            plan.release(slot)


class VariableWindowCache(KvCache):
    """Does for several windows what a `PagedCache` does for one. Numbers of blocks are `BlockCounts`.

    A sequence has blocks in every window, for as many tokens as the window keeps. Nothing is reused, because what one
    window still holds may be overwritten in another. (TensorRT-LLM's `BlockManager` with a `WindowBlockManager` for
    each window size.)
    """

    def __init__(
        self, windows: tuple[WindowLayout, ...], slots: int, num_groups: int = 1, has_ids: bool = True
    ) -> None:
        """num_groups: number of micro batches.
        has_ids: whether blocks have ids; otherwise they are only counted.
        """
        self.windows: tuple[PagedCache, ...] = tuple(
            KvCacheManager(
                window.attention_window, window.num_blocks, slots, window.num_host_blocks, num_groups=num_groups
            )
            if has_ids
            else PagedCache(window.attention_window, window.num_blocks, slots, num_groups)
            for window in windows
        )
        first = self.windows[0]
        self.attention_window, self.registered = first.attention_window, first.registered
        self.block_tables = first.block_tables
        self.window_tables = tuple(window.block_tables for window in self.windows[1:])
        self.num_blocks = sum(window.num_blocks for window in self.windows)
        self.num_positions = sum(window.num_positions for window in self.windows)

    @property
    def free_blocks(self) -> BlockCounts:
        return BlockCounts(tuple(window.free_blocks for window in self.windows))

    @property
    def num_used(self) -> int:
        return sum(window.num_used for window in self.windows)

    @property
    def counters(self) -> BlockCounters:
        """Sums over the windows."""
        of_each = [window.counters for window in self.windows]
        return BlockCounters(
            sum(item.allocated_total for item in of_each),
            sum(item.allocated_new for item in of_each),
            sum(item.reused for item in of_each),
            sum(item.missed for item in of_each),
        )

    def first_chunk_need(self, request: Request) -> BlockCounts:
        return BlockCounts(tuple(window.first_chunk_need(request) for window in self.windows))

    def look_ahead(self) -> None:
        for window in self.windows:
            window.look_ahead()

    def step_needs(self, rows: Rows, draft_tokens: Rows | int = 0) -> Rows:
        """[requests, windows]."""
        return np.stack([window.step_needs(rows, draft_tokens) for window in self.windows], axis=-1)

    def counted(self, blocks: Rows) -> BlockCounts:
        return BlockCounts(tuple(int(number) for number in np.atleast_1d(blocks)))

    def blocks_to_completion(self, request: Request) -> BlockCounts:
        return BlockCounts(tuple(window.blocks_to_completion(request) for window in self.windows))

    def reserved_blocks(self, rows: Rows) -> BlockCounts:
        return BlockCounts(tuple(window.reserved_blocks(rows) for window in self.windows))

    def plan_release(self) -> ReleasePlans:
        return ReleasePlans(tuple(window.plan_release() for window in self.windows))

    def of_windows(self) -> tuple[PagedCache, ...]:
        return self.windows

    def holds(self, slot: int) -> bool:
        return self.windows[0].holds(slot)

    def join(self, rows: Rows, micro_batch: int) -> None:
        for window in self.windows:
            window.join(rows, micro_batch)

    def cached_tokens(self, rows: Rows) -> Rows:
        return self.windows[0].cached_tokens(rows)

    def begin_generation(self, slot: int, micro_batch: int = 0) -> None:
        for window in self.windows:
            window.begin_generation(slot, micro_batch)

    def end_generation(self, slot: int) -> None:
        for window in self.windows:
            window.end_generation(slot)

    def add_request(self, request: Request, now_s: float = 0.0) -> int:
        """Take the request's blocks in every window, or in none."""
        if any(window.first_chunk_need(request) > window.free_blocks for window in self.windows):
            raise OutOfBlocks(f"request {request.request_id} does not fit into every attention window")
        for window in self.windows:
            window.add_request(request, now_s)
        return 0

    def add_tokens(self, rows: Rows) -> Rows:
        registered = self.windows[0].add_tokens(rows)
        for window in self.windows[1:]:
            window.add_tokens(rows)
        return registered

    def rewind(self, rows: Rows, registered: Rows) -> None:
        for window in self.windows:
            window.rewind(rows, registered)

    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None:
        for window in self.windows:
            window.remove_sequence(slot, now_s=now_s)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        return tuple(
            replace(copy, window=index) for index, window in enumerate(self.windows) for copy in window.take_copies()
        )

    def state(self) -> CacheState:
        counters, used, size = self.counters, self.num_used, self.attention_window.tokens_per_block
        return CacheState(
            self.num_blocks,
            used,
            size,
            counters.allocated_total,
            counters.allocated_new,
            counters.reused,
            self.num_positions,
            used * size,
            sum(window.filled_positions for window in self.windows),
            counters.missed,
            [WindowBlocks(one.attention_window.size, one.num_blocks, one.num_used) for one in self.windows],
        )

    def check_consistency(self) -> None:
        for window in self.windows:
            window.check_consistency()
