"""A batch as flat arrays: what the model needs to run it in one pass."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.batch import Batch, ContextChunk
from ifbbench.engine.request_table import IntArray
from ifbbench.model.attention_plan import QuerySpans

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch's tokens in one row, contexts first. Rows count tokens; output rows are those that yield a token, one
    for each last chunk, then one for each generation request and beam.

    context_tokens: [context rows], ids (those of generation requests are on the device).
    positions: [rows]. owners: [rows], index of the span that each belongs to. output_rows: [output rows].
    output_slots: [outputs], the slot that gets each new token; first those of the `num_last_chunks` last chunks.
    output_positions: [outputs], where each new token stands in its sequence.
    ends: [spans], tokens that each sequence has after the batch; a padded span is longer.
    """

    context_tokens: Int64Array
    positions: Int64Array
    owners: NDArray[np.intp]
    output_rows: Int64Array
    output_slots: Int64Array
    output_positions: Int64Array
    num_last_chunks: int
    spans: QuerySpans
    ends: Int64Array
    is_padded: bool

    @property
    def real_spans(self) -> QuerySpans:
        """The spans without their padding."""
        if not self.is_padded:
            return self.spans
        return replace(self.spans, lengths=self.ends - self.spans.starts)


def pack(batch: Batch, max_beams: int) -> PackedBatch:
    """Lay out `batch`: its context chunks in order, then one token of each generation request and beam.

    max_beams: rows of a block table that each slot has. ValueError if chunks are to be padded that do not start at the
    beginning of their prompt.
    """
    spans, real_lengths = _spans(batch, max_beams)
    owners = np.repeat(np.arange(len(spans.lengths)), spans.lengths)
    positions = np.arange(len(owners)) - (spans.first_rows - spans.starts)[owners]
    is_last = np.array([chunk.is_last for chunk in batch.context], dtype=np.bool_)
    yields = np.ones(len(spans.lengths), dtype=np.bool_)
    yields[: len(is_last)] = is_last
    has_output = yields
    if batch.beam_width > 1:  # an output has several rows then; its first stands for it
        has_output = yields.copy()
        has_output[len(is_last) :] = np.arange(len(yields) - len(is_last)) % batch.beam_width == 0
    ends = spans.starts + real_lengths
    return PackedBatch(
        context_tokens=_context_tokens(batch.context, spans),
        positions=positions,
        owners=owners,
        output_rows=(spans.first_rows + real_lengths - 1)[yields],
        output_slots=spans.table_rows[has_output] // max_beams,
        output_positions=ends[has_output],
        num_last_chunks=int(is_last.sum()),
        spans=spans,
        ends=ends,
        is_padded=batch.padded,
    )


def table_rows(block_tables: IntArray) -> IntArray:
    """Block tables [slots, beams, blocks] as [slots · beams, blocks]: beam b of slot s has the row s · beams + b."""
    return block_tables.reshape(-1, block_tables.shape[2])


def _spans(batch: Batch, max_beams: int) -> tuple[QuerySpans, Int64Array]:
    """Each context chunk and each generation token as a span of queries, and the spans' lengths without padding."""
    context = np.array([(chunk.length, chunk.start, chunk.request.slot) for chunk in batch.context], dtype=np.int64)
    chunk_lengths, starts, slots = context.reshape(-1, 3).T
    ones = np.ones(len(batch.slots) * batch.beam_width, dtype=np.int64)
    real_lengths = lengths = np.concatenate([chunk_lengths, ones])
    if batch.padded and len(chunk_lengths):
        if starts.any():
            raise ValueError("a padded batch has whole prompts only, but a chunk starts behind its prompt's beginning")
        lengths = np.concatenate([np.full_like(chunk_lengths, chunk_lengths.max()), ones])
    generation = batch.slots.astype(np.int64)[:, None] * max_beams + np.arange(batch.beam_width)
    spans = QuerySpans(
        first_rows=np.cumsum(lengths) - lengths,
        lengths=lengths,
        starts=np.concatenate([starts, np.repeat(batch.positions.astype(np.int64), batch.beam_width)]),
        table_rows=np.concatenate([slots * max_beams, generation.ravel()]),
    )
    return spans, real_lengths


def _context_tokens(context: tuple[ContextChunk, ...], spans: QuerySpans) -> Int64Array:
    """Ids of the chunks, one after the other, with zeros where a span is longer than its chunk."""
    tokens = np.zeros(int(spans.lengths[: len(context)].sum()), dtype=np.int64)
    for chunk, first in zip(context, spans.first_rows.tolist(), strict=False):
        tokens[first : first + chunk.length] = chunk.tokens()
    return tokens
