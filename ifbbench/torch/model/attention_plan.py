"""The attention calls of an iteration with PyTorch or the C kernels, planned once per attention window.

Sequences in a mixed batch have very different lengths, and a call to scaled dot product attention takes one padded
rectangle of queries and keys. Sequences of similar length share a call, which needs few calls and little padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.kv.attention_window import UNLIMITED, AttentionWindow
from ifbbench.torch.model.operations import SpansInPlace
from ifbbench.torch.model.tensors import to_device

Int64Array = NDArray[np.int64]

# Later chunks of a prompt need a mask of chunk × cached tokens. They are cut into tiles of this many queries, so that
# few keys are hidden by a tile's causality and a batch's masks stay much smaller than its KV cache.
QUERIES_PER_TILE = 256
# Cost of a call beside its arithmetic, and of gathering a key and its value, in pairs of query and key (one pair takes
# about 10 ns on two cores with eight heads of 32; measured).
CALL_COST = 10_000
GATHER_COST = 5
# Share of a group's own work that padding may add before the group is cut. The number of groups then grows with the
# logarithm of the range of lengths, not with the number of sequences.
PADDING_SHARE = 0.125
# Gathered keys and values are copies: limit on their tokens, unless a single sequence is longer.
MAX_GATHERED_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class QuerySpans:
    """Spans of consecutive queries of one sequence each, in the order of the packed batch. All arrays are [spans].

    first_rows: packed row of the first query.
    lengths: number of queries.
    starts: position of the first query, which is also the number of tokens cached before.
    table_rows: row of the block tables.
    """

    first_rows: Int64Array
    lengths: Int64Array
    starts: Int64Array
    table_rows: Int64Array

    def select(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> "QuerySpans":
        """The spans at these indices, or where this mask is true."""
        return QuerySpans(self.first_rows[chosen], self.lengths[chosen], self.starts[chosen], self.table_rows[chosen])

    @property
    def ends(self) -> Int64Array:
        """Number of keys that each span's last query sees without a window."""
        return self.starts + self.lengths


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """One attention call over `num_spans` spans, padded to the same numbers of queries and keys.

    query_rows: [spans · queries], packed row of each query; padding repeats the span's last.
    output_rows: [spans · queries], row of each result; padding goes to the row behind the batch's last.
    block_ids: [spans, blocks], blocks with the keys in their first `num_block_keys` rows; a slice if each span has one
    block and they are consecutive. None if keys are given one by one: those in the cache by `cache_rows` [spans, keys],
    followed by those of the batch itself by their packed rows `own_rows` [spans · keys]; None where there are none.
    mask: [spans, 1, queries, keys], true where a query sees a key; None if causality alone hides keys.
    """

    num_spans: int
    query_rows: Tensor
    output_rows: Tensor
    block_ids: Tensor | slice | None
    mask: Tensor | None
    num_block_keys: int = 0
    cache_rows: Tensor | None = None
    own_rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The calls of a window.

    before: calls that read the cache before the batch is stored.
    after, in_place: the other calls.
    """

    before: tuple[AttentionGroup, ...]
    after: tuple[AttentionGroup, ...]
    in_place: SpansInPlace | None = None


def plan_window(
    spans: QuerySpans,
    block_tables: NDArray[np.int32],
    window: AttentionWindow,
    device: torch.device,
    *,
    num_rows: int,
    is_contiguous: bool = False,
    in_place: bool = False,
) -> WindowPlan:
    """Calls that together cover every span once.

    block_tables: [sequences, blocks], read before this returns.
    num_rows: number of rows of the packed batch.
    in_place: whether keys and values of sequences seen whole are read without a copy.

    Sequences that are seen whole are planned as without a window. For others only the visible keys are gathered: those
    of a generation token after it is stored; those of a chunk from the batch, and from the cache: where the window
    wraps, before the batch is stored, because it may overwrite keys that the chunk's first queries see; else after
    that, because another request of the batch may compute them.
    """
    size, straight = window.tokens_per_block, window.is_straight(spans.ends)
    seen_whole = spans if straight.all() else spans.select(straight)
    read_in_place, after = None, tuple[AttentionGroup, ...]()
    if in_place:
        read_in_place = spans_in_place(seen_whole, block_tables, size)
    else:
        after = plan_attention(seen_whole, block_tables, size, device, num_rows=num_rows, is_contiguous=is_contiguous)
    if straight.all():
        return WindowPlan((), after, read_in_place)
    rest = spans.select(~straight)
    steps, chunks = rest.select(rest.lengths == 1), rest.select(rest.lengths > 1)
    pieces, owners = tiles(chunks, QUERIES_PER_TILE)
    plan = _VisiblePlan(block_tables, window, num_rows, device)
    of_chunks = tuple(plan.groups(pieces, cached_before=chunks.starts[owners]))
    before, later = (of_chunks, ()) if window.wraps else ((), of_chunks)
    return WindowPlan(before, (*after, *later, *plan.groups(steps, cached_before=steps.ends)), read_in_place)


def spans_in_place(spans: QuerySpans, block_tables: NDArray[np.int32], tokens_per_block: int) -> SpansInPlace:
    """The spans for `Operations.attend`. block_tables: [sequences, blocks], read before this returns."""
    width = -(-int(spans.ends.max(initial=0)) // tokens_per_block)
    block_ids = block_tables[:, :width][spans.table_rows].astype(np.int64)
    arrays = spans.first_rows, spans.lengths, spans.ends, block_ids
    return SpansInPlace(*(_on_device(array, torch.device("cpu")) for array in arrays))


def plan_attention(
    spans: QuerySpans,
    block_tables: NDArray[np.int32],
    tokens_per_block: int,
    device: torch.device,
    *,
    num_rows: int,
    is_contiguous: bool = False,
) -> tuple[AttentionGroup, ...]:
    """Calls without a window that together cover every span once.

    Whole prompts, later chunks and generation tokens have separate calls: the first read no cache and need no mask, the
    last have one query each.

    block_tables: [sequences, blocks], read before this returns.
    num_rows: number of rows of the packed batch.
    is_contiguous: whether each sequence has one block, of which only the positions of a call's longest sequence are
        read; consecutive blocks are read as a slice.
    """
    whole = (spans.starts == 0) & (spans.lengths > 1)
    single = spans.lengths == 1
    groups = [_prompt_group(part, num_rows, device) for part in _of_similar_length(spans.select(whole))]
    for part in (tiles(spans.select(~whole & ~single), QUERIES_PER_TILE)[0], spans.select(single)):
        groups += [
            _cached_group(group, num_rows, block_tables, tokens_per_block, device, is_contiguous)
            for group in _of_similar_length(part)
        ]
    return tuple(groups)


def tiles(spans: QuerySpans, max_queries: int) -> tuple[QuerySpans, NDArray[np.intp]]:
    """The spans cut into pieces of at most `max_queries` queries, and the index of each piece's span."""
    counts = -(-spans.lengths // max_queries)
    owners = np.repeat(np.arange(len(counts)), counts)
    done = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_queries
    lengths = np.minimum(spans.lengths[owners] - done, max_queries)
    return QuerySpans(
        spans.first_rows[owners] + done, lengths, spans.starts[owners] + done, spans.table_rows[owners]
    ), owners


def _of_similar_length(spans: QuerySpans) -> list[QuerySpans]:
    return [spans.select(members) for members in similar_lengths(spans.lengths, spans.ends)]


def similar_lengths(num_queries: Int64Array, num_keys: Int64Array) -> list[NDArray[np.intp]]:
    """Indices of spans in groups of similar length, longest first, cut where padding would cost more than a call.

    num_queries, num_keys: [spans], the sides of each span's rectangle.
    """
    order = np.argsort(-num_keys, kind="stable")
    lengths, ends = num_queries[order].tolist(), num_keys[order].tolist()
    cuts = [0]
    max_queries, exact_work = 0, 0
    for index, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        members = index + 1 - cuts[-1]
        max_queries = max(max_queries, length)
        exact_work += (length + GATHER_COST) * end
        max_keys = ends[cuts[-1]]
        padding = members * (max_queries + GATHER_COST) * max_keys - exact_work
        too_padded = padding > max(CALL_COST, PADDING_SHARE * exact_work)
        if members > 1 and (too_padded or members * max_keys > MAX_GATHERED_TOKENS):
            cuts.append(index)
            max_queries, exact_work = length, (length + GATHER_COST) * end
    cuts.append(len(lengths))
    return [order[first:last] for first, last in pairwise(cuts) if last > first]


def _prompt_group(spans: QuerySpans, num_rows: int, device: torch.device) -> AttentionGroup:
    rows, output_rows, _ = _padded_queries(spans, num_rows, device)
    return AttentionGroup(len(spans.lengths), rows, output_rows, block_ids=None, mask=None, own_rows=rows)


def _cached_group(
    spans: QuerySpans,
    num_rows: int,
    block_tables: NDArray[np.int32],
    tokens_per_block: int,
    device: torch.device,
    is_contiguous: bool,
) -> AttentionGroup:
    if is_contiguous:
        spans = spans.select(np.argsort(spans.table_rows, kind="stable"))
    query_rows, output_rows, positions = _padded_queries(spans, num_rows, device)
    num_blocks = -(-spans.ends // tokens_per_block)
    width = int(num_blocks.max())
    block_ids = block_tables[:, :width][spans.table_rows].astype(np.int64)
    # Table entries beyond a sequence's end are undefined. The sequence's first block replaces them: it is a valid id,
    # and no value of another sequence, not even a NaN, gets near this one's.
    block_ids = np.where(np.arange(width) < num_blocks[:, None], block_ids, block_ids[:, :1])
    num_keys = int(spans.ends.max()) if is_contiguous else width * tokens_per_block
    mask = torch.arange(num_keys, device=device) <= _on_device(positions, device)[:, None, :, None]
    first = int(block_ids[0, 0])
    last = first + len(block_ids)
    # Consecutive blocks as a slice, which the cache reads as a view.
    is_slice = is_contiguous and np.array_equal(block_ids[:, 0], np.arange(first, last))
    blocks = slice(first, last) if is_slice else _on_device(block_ids, device)
    return AttentionGroup(len(spans.lengths), query_rows, output_rows, blocks, mask, num_keys)


@dataclass(frozen=True, slots=True)
class _VisiblePlan:
    """Makes groups that gather only the keys that a window shows, one by one."""

    block_tables: NDArray[np.int32]
    window: AttentionWindow
    num_rows: int
    device: torch.device

    def groups(self, spans: QuerySpans, cached_before: Int64Array) -> Iterator[AttentionGroup]:
        """Groups of spans of similar length. cached_before: [spans], positions below it are read from the cache.

        Spans that read nothing from the cache have separate groups: they have no cached key to pad with.
        """
        # The queries of a span together see the sink and a range that ends with the last query: key number j is
        # position j if that is in the sink, else j + shift. The first `num_cached` are read from the cache.
        counts = np.minimum(spans.ends, self.window.size + spans.lengths - 1)
        shifts = spans.ends - counts
        num_cached = np.maximum(np.minimum(self.window.sink, cached_before), cached_before - shifts)
        for part in (np.flatnonzero(num_cached > 0), np.flatnonzero(num_cached == 0)):
            for members in similar_lengths(spans.lengths[part], counts[part]):
                chosen = part[members]
                yield self._group(spans.select(chosen), counts[chosen], shifts[chosen], num_cached[chosen])

    def _group(
        self, spans: QuerySpans, counts: Int64Array, shifts: Int64Array, num_cached: Int64Array
    ) -> AttentionGroup:
        window, device = self.window, self.device
        query_rows, output_rows, query_positions = _padded_queries(spans, self.num_rows, device)
        cache_rows = own_rows = None
        key_positions = []
        if num_cached.any():
            positions, masked = self._key_positions(np.zeros_like(counts), num_cached, shifts)
            rows = window.cache_rows(self.block_tables, spans.table_rows[:, None], positions)
            cache_rows = _on_device(rows, device)
            key_positions.append(masked)
        if (num_cached < counts).any():
            positions, masked = self._key_positions(num_cached, counts, shifts)
            own_rows = _on_device((positions + (spans.first_rows - spans.starts)[:, None]).ravel(), device)
            key_positions.append(masked)
        keys = _on_device(np.concatenate(key_positions, axis=1), device)[:, None, None, :]
        queries = _on_device(query_positions, device)[:, None, :, None]
        recent = keys > queries - (window.size - window.sink)
        mask = (keys <= queries) & (recent | (keys < window.sink) if window.sink else recent)
        return AttentionGroup(
            len(spans.lengths),
            query_rows,
            output_rows,
            block_ids=None,
            mask=mask,
            cache_rows=cache_rows,
            own_rows=own_rows,
        )

    def _key_positions(self, first: Int64Array, last: Int64Array, shifts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Positions of the keys number `first` to `last` − 1 of each span, [spans, keys], twice: padded with the last
        one, and with a position that no query sees."""
        numbers = first[:, None] + np.arange(int((last - first).max()))
        is_real = numbers < last[:, None]
        numbers = np.minimum(numbers, last[:, None] - 1)
        positions = numbers + np.where(numbers < self.window.sink, 0, shifts[:, None])
        return positions, np.where(is_real, positions, UNLIMITED)


def _padded_queries(spans: QuerySpans, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Int64Array]:
    """`query_rows` and `output_rows` of an `AttentionGroup`, and the positions [spans, queries of the longest]."""
    steps = np.arange(int(spans.lengths.max()))
    offsets = np.minimum(steps, spans.lengths[:, None] - 1)
    rows = spans.first_rows[:, None] + offsets
    output_rows = np.where(steps < spans.lengths[:, None], rows, num_rows)
    return _on_device(rows.ravel(), device), _on_device(output_rows.ravel(), device), spans.starts[:, None] + offsets


def _on_device(array: Int64Array, device: torch.device) -> Tensor:
    """`array`, made contiguous, on `device`; a view where possible."""
    return to_device(np.ascontiguousarray(array), device)
