"""A batch as flat arrays: what the model needs to run it in one pass."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ifbbench.batching.batch import Batch, ContextChunk
from ifbbench.model.attention_plan import QuerySpans

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch's tokens in one row, contexts first. Rows count tokens; outputs are the rows that yield a token.

    context_tokens: [context tokens], ids (those of generation requests are on the device).
    positions, cache_rows: [tokens]. output_rows: [outputs]. output_slots: [outputs], the slot that gets each new token.
    output_positions: [outputs], where each new token stands in its sequence.
    """

    context_tokens: Int64Array
    positions: Int64Array
    cache_rows: Int64Array
    output_rows: Int64Array
    output_slots: Int64Array
    output_positions: Int64Array
    spans: QuerySpans


def pack(batch: Batch, tokens_per_block: int) -> PackedBatch:
    """Lay out `batch`: its context chunks in order, then one token of each generation request."""
    spans = _spans(batch)
    owners = np.repeat(np.arange(len(spans.lengths)), spans.lengths)
    positions = np.arange(len(owners)) - spans.first_rows[owners] + spans.starts[owners]
    blocks = batch.block_tables[spans.slots[owners], positions // tokens_per_block].astype(np.int64)
    yields = np.ones(len(spans.lengths), dtype=np.bool_)
    yields[: len(batch.context)] = [chunk.is_last for chunk in batch.context]
    outputs = spans.select(yields)
    return PackedBatch(
        context_tokens=_context_tokens(batch.context),
        positions=positions,
        cache_rows=blocks * tokens_per_block + positions % tokens_per_block,
        output_rows=outputs.first_rows + outputs.lengths - 1,
        output_slots=outputs.slots,
        output_positions=outputs.ends,
        spans=spans,
    )


def _spans(batch: Batch) -> QuerySpans:
    """Each context chunk and each generation token as a span of queries."""
    context = np.array([(chunk.length, chunk.start, chunk.request.slot) for chunk in batch.context], dtype=np.int64)
    lengths, starts, slots = context.reshape(-1, 3).T
    lengths = np.concatenate([lengths, np.ones(len(batch.slots), dtype=np.int64)])
    return QuerySpans(
        first_rows=np.cumsum(lengths) - lengths,
        lengths=lengths,
        starts=np.concatenate([starts, batch.positions.astype(np.int64)]),
        slots=np.concatenate([slots, batch.slots.astype(np.int64)]),
    )


def _context_tokens(context: tuple[ContextChunk, ...]) -> Int64Array:
    if not context:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([chunk.tokens() for chunk in context]).astype(np.int64)
