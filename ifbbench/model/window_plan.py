"""Which attention calls the layers of an attention window make (see `attention_window` for what a query sees)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ifbbench.engine.kv_cache.attention_window import UNLIMITED, AttentionWindow
from ifbbench.model.attention_plan import (
    AttentionGroup,
    Int64Array,
    QuerySpans,
    SpansInPlace,
    like_lengths,
    on_device,
    padded_queries,
    plan_attention,
    tile_owners,
    tiles,
)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """before: groups that read the cache as it was before the batch. after: those that come once its keys are in it,
    beside what is read in place."""

    before: tuple[AttentionGroup, ...]
    after: tuple[AttentionGroup, ...]
    in_place: SpansInPlace | None = None


@dataclass(frozen=True, slots=True)
class _VisibleKeys:
    """What the queries of each span see together: the sink positions, and a stretch that ends with the last query.

    All are [spans]. counts: how many keys. shifts: the j-th one is position j if that is a sink position, else
    j + shift. num_cached: how many of them, the first ones, come from the cache; the others lie in the batch itself.
    """

    counts: Int64Array
    shifts: Int64Array
    num_cached: Int64Array

    @classmethod
    def of(cls, spans: QuerySpans, cached_before: Int64Array, window: AttentionWindow) -> "_VisibleKeys":
        """cached_before: [spans], the cache is asked for positions below."""
        counts = np.minimum(spans.ends, window.size + spans.lengths - 1)
        shifts = spans.ends - counts
        return cls(counts, shifts, np.maximum(np.minimum(window.sink, cached_before), cached_before - shifts))

    def select(self, chosen: NDArray[np.intp]) -> "_VisibleKeys":
        """Those of the spans at these indices."""
        return _VisibleKeys(self.counts[chosen], self.shifts[chosen], self.num_cached[chosen])

    def positions(self, window: AttentionWindow, first: Int64Array, last: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Positions of the keys from number `first` to `last` − 1 of each span, [spans, keys]; twice.

        Padding repeats the last one, and in the second array is a position that nobody sees.
        """
        width = int((last - first).max())
        numbers = first[:, None] + np.arange(width)
        is_real = numbers < last[:, None]
        numbers = np.minimum(numbers, last[:, None] - 1)
        positions = numbers + np.where(numbers < window.sink, 0, self.shifts[:, None])
        return positions, np.where(is_real, positions, UNLIMITED)


def plan_window(
    spans: QuerySpans, block_tables: NDArray[np.int32], window: AttentionWindow, device: torch.device,
    *, num_rows: int, is_contiguous: bool = False, in_place: bool = False,
) -> WindowPlan:
    """What together covers every span once. block_tables: [sequences, blocks], read before this returns. num_rows: of
    the packed batch. in_place: whether sequences that are seen whole are read in place.

    Sequences that are seen whole are planned as without a window. Of others, only the visible keys are gathered: a
    generation token's when it is in the cache; a chunk's own from the batch and the earlier ones from the cache before
    the batch is written, for it may be written over what its first queries still see.
    """
    size, straight = window.tokens_per_block, window.is_straight(spans.ends)
    seen_whole = spans if straight.all() else spans.select(straight)
    paged, after = None, tuple[AttentionGroup, ...]()
    if in_place:
        paged = SpansInPlace.of(seen_whole, block_tables, size)
    else:
        after = plan_attention(seen_whole, block_tables, size, device, is_contiguous=is_contiguous, num_rows=num_rows)
    if straight.all():
        return WindowPlan((), after, paged)
    rest = spans.select(~straight)
    steps, chunks = rest.select(rest.lengths == 1), rest.select(rest.lengths > 1)
    cached_before = chunks.starts[tile_owners(chunks)]
    build = _RowGroups(block_tables, window, num_rows, device)
    return WindowPlan(build.groups(tiles(chunks), cached_before), (*after, *build.groups(steps, steps.ends)), paged)


@dataclass(frozen=True, slots=True)
class _RowGroups:
    """Makes groups whose keys are named one by one."""

    block_tables: NDArray[np.int32]
    window: AttentionWindow
    num_rows: int
    device: torch.device

    def groups(self, spans: QuerySpans, cached_before: Int64Array) -> tuple[AttentionGroup, ...]:
        """Groups of spans of like length; those that need nothing of the cache have theirs, for they have no key that
        could stand in where others have one."""
        visible = _VisibleKeys.of(spans, cached_before, self.window)
        parts = [np.flatnonzero(visible.num_cached > 0), np.flatnonzero(visible.num_cached == 0)]
        return tuple(
            self._group(spans.select(part[members]), visible.select(part[members]))
            for part in parts
            for members in like_lengths(spans.lengths[part], visible.counts[part])
        )

    def _group(self, spans: QuerySpans, visible: _VisibleKeys) -> AttentionGroup:
        window, device = self.window, self.device
        query_rows, output_rows, query_positions = padded_queries(spans, self.num_rows)
        cache_rows = own_rows = None
        key_positions = []
        if visible.num_cached.any():
            positions, seen_as = visible.positions(window, np.zeros_like(visible.counts), visible.num_cached)
            rows = window.cache_rows(self.block_tables, spans.table_rows[:, None], positions)
            cache_rows = on_device(rows, device)
            key_positions.append(seen_as)
        if (visible.num_cached < visible.counts).any():
            positions, seen_as = visible.positions(window, visible.num_cached, visible.counts)
            own_rows = on_device((positions + (spans.first_rows - spans.starts)[:, None]).ravel(), device)
            key_positions.append(seen_as)
        keys = on_device(np.concatenate(key_positions, axis=1), device)[:, None, None, :]
        queries = on_device(query_positions, device)[:, None, :, None]
        recent = keys > queries - (window.size - window.sink)
        mask = (keys <= queries) & (recent | (keys < window.sink) if window.sink else recent)
        return AttentionGroup(
            len(spans.lengths), on_device(query_rows.ravel(), device), on_device(output_rows.ravel(), device),
            block_ids=None, mask=mask, cache_rows=cache_rows, own_rows=own_rows,
        )  # fmt: skip
