"""Which attention calls an iteration makes, decided once and then used by every layer.

A mixed batch has sequences of very different lengths, and a call to scaled dot product attention wants one padded
rectangle. So sequences of like length share a call: few calls, however many requests, and little padding.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.model.to_device import to_device

Int64Array = NDArray[np.int64]

# A later chunk of a prompt needs a mask of chunk × cached tokens; it is cut into tiles of this many queries, so that
# the keys that a tile's own causality hides are few, and masks of a batch stay far below its KV cache.
QUERIES_PER_TILE = 256
# What a call costs beside its arithmetic, and what gathering a key and its value costs, in pairs of query and key
# (one pair: about 10 ns on two cores with eight heads of 32). Measured; groups are cut by weighing padding against it.
CALL_COST = 10_000
GATHER_COST = 5
# Padding may reach this share of a group's own work before the group is cut, so that the number of groups grows with
# the logarithm of the lengths' range, not with the number of sequences (until MAX_GATHERED_TOKENS cuts them).
PADDING_SHARE = 0.125
# Gathered keys and values are copies; this many tokens at most, unless one sequence alone is longer.
MAX_GATHERED_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class QuerySpans:
    """Consecutive queries of one sequence each, as they lie in the packed batch. All arrays are [spans].

    first_rows: packed row of the first query. lengths: number of queries. starts: position of the first query, which
    is also how many tokens of the sequence were cached before. table_rows: row of the block tables.
    """

    first_rows: Int64Array
    lengths: Int64Array
    starts: Int64Array
    table_rows: Int64Array

    def select(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> "QuerySpans":
        """The spans at these indices, or where this mask is true."""
        return QuerySpans(
            self.first_rows[chosen], self.lengths[chosen], self.starts[chosen], self.table_rows[chosen]
        )

    @property
    def ends(self) -> Int64Array:
        """Number of keys that each span's last query sees."""
        return self.starts + self.lengths


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """One attention call over `num_spans` spans, padded to the same number of queries and of keys.

    query_rows: [spans · queries], packed row of each query; padding repeats the span's last.
    output_rows: [spans · queries], where each result goes; padding goes to the row after the batch's last.
    block_ids: [spans, blocks], blocks that hold the keys, the first `num_block_keys` places of them; a slice of all
    blocks where each span has one and they follow each other. None where keys are named one by one: `cache_rows`
    [spans, keys], those in the cache, and behind them `own_rows` [spans · keys], packed rows of those in the batch
    itself; None where there are none.
    mask: [spans, 1, queries, keys], true where a query sees a key; None if causality is all there is to mask.
    """

    num_spans: int
    query_rows: Tensor
    output_rows: Tensor
    block_ids: Tensor | slice | None
    mask: Tensor | None
    num_block_keys: int = 0
    cache_rows: Tensor | None = None
    own_rows: Tensor | None = None

    @property
    def has_one_query(self) -> bool:
        """Whether each span has one query, as in the generation phase; then it is not causality that hides keys."""
        return self.mask is not None and len(self.query_rows) == self.num_spans


@dataclass(frozen=True, slots=True)
class SpansInPlace:
    """Spans whose keys, in the cache already, are read where they lie (see `operations.Operations.attend`). All int64.

    rows, counts, lengths: [spans], packed row of the first query, number of queries, and how many keys the last of them
    sees. block_ids: [spans, blocks]; those behind a span's keys are not looked at.
    """

    rows: Tensor
    counts: Tensor
    lengths: Tensor
    block_ids: Tensor

    @classmethod
    def of(cls, spans: QuerySpans, block_tables: NDArray[np.int32], tokens_per_block: int) -> "SpansInPlace":
        """block_tables: [sequences, blocks], read before this returns."""
        width = -(-int(spans.ends.max(initial=0)) // tokens_per_block)
        block_ids = block_tables[:, :width][spans.table_rows].astype(np.int64)
        arrays = spans.first_rows, spans.lengths, spans.ends, block_ids
        return cls(*(on_device(array, torch.device("cpu")) for array in arrays))


def plan_attention(
    spans: QuerySpans, block_tables: NDArray[np.int32], tokens_per_block: int, device: torch.device,
    *, is_contiguous: bool = False, num_rows: int | None = None,
) -> tuple[AttentionGroup, ...]:
    """Groups that together cover every span once. block_tables: [sequences, blocks], block ids;
    read before this returns, so they may change afterwards.

    Whole prompts, later chunks and generation tokens each have groups of their own: the first need neither cache nor
    mask, and the last have one query. is_contiguous: each sequence has one block; no more of it is asked for than the
    longest sequence of a group has, and blocks that follow each other are asked for as a slice. num_rows: rows of the
    packed batch, if these spans are not all there is.
    """
    whole = (spans.starts == 0) & (spans.lengths > 1)
    single = spans.lengths == 1
    if num_rows is None:
        num_rows = int(spans.lengths.sum())
    groups = [_prompt_group(part, num_rows, device) for part in _like_lengths(spans.select(whole))]
    for part in (tiles(spans.select(~whole & ~single)), spans.select(single)):
        groups += [_cached_group(group, num_rows, block_tables, tokens_per_block, device, is_contiguous)
                   for group in _like_lengths(part)]
    return tuple(groups)


def tiles(spans: QuerySpans) -> QuerySpans:
    """The spans cut into pieces of at most QUERIES_PER_TILE queries."""
    counts = _tile_counts(spans)
    owner = tile_owners(spans)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    done = number * QUERIES_PER_TILE
    return QuerySpans(
        first_rows=spans.first_rows[owner] + done,
        lengths=np.minimum(spans.lengths[owner] - done, QUERIES_PER_TILE),
        starts=spans.starts[owner] + done,
        table_rows=spans.table_rows[owner],
    )


def tile_owners(spans: QuerySpans) -> NDArray[np.intp]:
    """Index of the span that each of `tiles(spans)` is cut from."""
    return np.repeat(np.arange(len(spans.lengths)), _tile_counts(spans))


def _tile_counts(spans: QuerySpans) -> Int64Array:
    return -(-spans.lengths // QUERIES_PER_TILE)


def _like_lengths(spans: QuerySpans) -> list[QuerySpans]:
    if len(spans.lengths) == 0:
        return []
    return [spans.select(members) for members in like_lengths(spans.lengths, spans.ends)]


def like_lengths(num_queries: Int64Array, num_keys: Int64Array) -> list[NDArray[np.intp]]:
    """Indices of spans in groups of like length, longest first, cut where padding would cost more than another call.

    num_queries, num_keys: [spans], the sides of each span's rectangle.
    """
    order = np.argsort(-num_keys, kind="stable")
    lengths, ends = num_queries[order].tolist(), num_keys[order].tolist()
    cuts = [0]
    most_queries, exact_work = 0, 0
    for index, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        members = index + 1 - cuts[-1]
        most_queries = max(most_queries, length)
        exact_work += (length + GATHER_COST) * end
        most_keys = ends[cuts[-1]]
        padding = members * (most_queries + GATHER_COST) * most_keys - exact_work
        too_padded = padding > max(CALL_COST, PADDING_SHARE * exact_work)
        if members > 1 and (too_padded or members * most_keys > MAX_GATHERED_TOKENS):
            cuts.append(index)
            most_queries, exact_work = length, (length + GATHER_COST) * end
    cuts.append(len(lengths))
    return [order[first:last] for first, last in pairwise(cuts) if last > first]


def _prompt_group(spans: QuerySpans, num_rows: int, device: torch.device) -> AttentionGroup:
    query_rows, output_rows, _ = padded_queries(spans, num_rows)
    rows = on_device(query_rows.ravel(), device)
    return AttentionGroup(len(spans.lengths), rows, on_device(output_rows.ravel(), device), block_ids=None, mask=None,
                          own_rows=rows)


def _cached_group(
    spans: QuerySpans, num_rows: int, block_tables: NDArray[np.int32], tokens_per_block: int, device: torch.device,
    is_contiguous: bool,
) -> AttentionGroup:
    if is_contiguous:
        spans = spans.select(np.argsort(spans.table_rows, kind="stable"))
    query_rows, output_rows, positions = padded_queries(spans, num_rows)
    num_blocks = -(-spans.ends // tokens_per_block)
    width = int(num_blocks.max())
    block_ids = block_tables[:, :width][spans.table_rows].astype(np.int64)
    # Table entries beyond a sequence's end mean nothing. Its own first block stands in for them: always a valid id,
    # and no other sequence's numbers, whatever they are, come near this one's.
    block_ids = np.where(np.arange(width) < num_blocks[:, None], block_ids, block_ids[:, :1])
    num_keys = int(spans.ends.max()) if is_contiguous else width * tokens_per_block
    keys = torch.arange(num_keys, device=device)
    mask = keys <= on_device(positions, device)[:, None, :, None]
    blocks = _as_slice(block_ids) if is_contiguous else None
    return AttentionGroup(
        len(spans.lengths), on_device(query_rows.ravel(), device), on_device(output_rows.ravel(), device),
        blocks or on_device(block_ids, device), mask, num_keys,
    )  # fmt: skip


def _as_slice(block_ids: Int64Array) -> slice | None:
    """The blocks [spans, 1] as a slice, if they follow each other."""
    first = int(block_ids[0, 0])
    last = first + len(block_ids)
    return slice(first, last) if np.array_equal(block_ids[:, 0], np.arange(first, last)) else None


def padded_queries(spans: QuerySpans, num_rows: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Packed rows, output rows and positions, each [spans, most queries]."""
    steps = np.arange(int(spans.lengths.max()))
    real = steps < spans.lengths[:, None]
    offsets = np.minimum(steps, spans.lengths[:, None] - 1)
    query_rows = spans.first_rows[:, None] + offsets
    return query_rows, np.where(real, query_rows, num_rows), spans.starts[:, None] + offsets


def on_device(array: Int64Array, device: torch.device) -> Tensor:
    """A contiguous copy of `array` in the memory of `device`, or a view where that is the host's."""
    return to_device(np.ascontiguousarray(array), device)
