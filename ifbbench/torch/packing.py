"""A batch as flat arrays, from which the model runs it in one pass."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import Batch, BeamInputs
from ifbbench.torch.model.attention_plan import QuerySpans
from ifbbench.torch.model.llama import VirtualTokens
from ifbbench.torch.model.tensors import to_device

Int64Array = NDArray[np.int64]
# One pass of the model: from the newest token of each generation request and beam, int64 [rows], to logits [output rows
# + rows with context logits, vocabulary].
ModelPass = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The tokens of a batch in one row, context chunks first. A row is a token; output rows are those that yield one:
    the last row of each last chunk, then that of each generation request and beam; with draft tokens also their rows.

    context_tokens: [context rows], ids (those of generation requests are on the device).
    positions: [rows], position in the sequence.
    owners: [rows], index of the span that each belongs to.
    output_rows: [output rows].
    output_slots: [outputs], the slot of each output; last chunks come first.
    output_positions: [outputs], position of each (first) new token in its sequence.
    ends: [spans], tokens of each sequence after the batch; a padded span is longer.
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
        """The spans without padding."""
        if not self.is_padded:
            return self.spans
        return replace(self.spans, lengths=self.ends - self.spans.starts)


def pack(batch: Batch, max_beams: int) -> PackedBatch:
    """Lay out `batch`: its context chunks in order, then one token of each generation request and beam.

    max_beams: rows that each slot has in a block table. ValueError if a chunk to be padded is not the first of its
    prompt.
    """
    spans, real_lengths = _spans(batch, max_beams)
    owners = np.repeat(np.arange(len(spans.lengths)), spans.lengths)
    positions = np.arange(len(owners)) - (spans.first_rows - spans.starts)[owners]
    is_last = np.array([chunk.is_last for chunk in batch.context], dtype=np.bool_)
    yields = np.ones(len(spans.lengths), dtype=np.bool_)
    yields[: len(is_last)] = is_last
    has_output = yields
    if batch.beam_width > 1:  # the beams of a request are one output, represented by the first
        has_output = yields.copy()
        has_output[len(is_last) :] = np.arange(len(yields) - len(is_last)) % batch.beam_width == 0
    ends = spans.starts + real_lengths
    output_rows = (spans.first_rows + real_lengths - 1)[yields]
    output_positions = ends[has_output]
    if batch.drafts is not None:
        counts = batch.drafts.counts.astype(np.int64)
        output_positions = output_positions - counts
        output_rows = np.repeat(output_rows - counts - (counts + 1).cumsum() + counts + 1, counts + 1)
        output_rows += np.arange(len(output_rows))
    return PackedBatch(
        context_tokens=_context_tokens(batch, spans),
        positions=positions,
        owners=owners,
        output_rows=output_rows,
        output_slots=spans.table_rows[has_output] // max_beams,
        output_positions=output_positions,
        num_last_chunks=int(is_last.sum()),
        spans=spans,
        ends=ends,
        is_padded=batch.padded,
    )


def _spans(batch: Batch, max_beams: int) -> tuple[QuerySpans, Int64Array]:
    """Each context chunk and each generation token as a span of queries, and the lengths of the spans without
    padding."""
    context = np.array([(chunk.length, chunk.start, chunk.request.slot) for chunk in batch.context], dtype=np.int64)
    chunk_lengths, starts, slots = context.reshape(-1, 3).T
    ones = np.ones(len(batch.slots) * batch.beam_width, dtype=np.int64)
    real_lengths = lengths = np.concatenate([chunk_lengths, ones])
    if batch.drafts is not None:
        is_last = [chunk.is_last for chunk in batch.context]
        lengths[np.flatnonzero(np.concatenate([is_last, ones]))] += batch.drafts.counts
    if batch.padded and len(chunk_lengths):
        if starts.any():
            raise ValueError("a chunk of a padded batch starts at a position above 0; only whole prompts are padded")
        lengths = np.concatenate([np.full_like(chunk_lengths, chunk_lengths.max()), ones])
    generation = batch.slots.astype(np.int64)[:, None] * max_beams + np.arange(batch.beam_width)
    spans = QuerySpans(
        first_rows=np.cumsum(lengths) - lengths,
        lengths=lengths,
        starts=np.concatenate([starts, np.repeat(batch.positions.astype(np.int64), batch.beam_width)]),
        table_rows=np.concatenate([slots * max_beams, generation.ravel()]),
    )
    return spans, real_lengths


def _context_tokens(batch: Batch, spans: QuerySpans) -> Int64Array:
    """Ids of all chunks, each followed by its drafts, with zeros where a span is longer."""
    tokens = np.zeros(int(spans.lengths[: len(batch.context)].sum()), dtype=np.int64)
    num_last = num_drafts = 0
    for chunk, first in zip(batch.context, spans.first_rows.tolist(), strict=False):
        tokens[first : first + chunk.length] = chunk.tokens()
        if batch.drafts is not None and chunk.is_last:
            first, count = first + chunk.length, int(batch.drafts.counts[num_last])
            tokens[first : first + count] = batch.drafts.tokens[num_drafts : num_drafts + count]
            num_last, num_drafts = num_last + 1, num_drafts + count
    return tokens


def take_virtual_tokens(
    batch: Batch, packed: PackedBatch, vocab_size: int, device: torch.device
) -> VirtualTokens | None:
    """The virtual tokens among the context tokens of `packed`, in which they become 0; None if there are none."""
    rows, embeddings = [], []
    for chunk, first in zip(batch.context, packed.spans.first_rows.tolist(), strict=False):
        table = chunk.request.options.prompt_embedding_table
        if table is None:
            continue
        tokens = packed.context_tokens[first : first + chunk.length]
        indices = np.flatnonzero(tokens >= vocab_size)
        rows.append(first + indices)
        embeddings.append(table[tokens[indices] - vocab_size])
        tokens[indices] = 0
    if not rows:
        return None
    return VirtualTokens(to_device(np.concatenate(rows), device), to_device(np.concatenate(embeddings), device))


@dataclass(frozen=True, slots=True)
class ContextRows:
    """The packed rows, without padding, of chunks whose requests ask for context logits.

    rows: [rows], packed rows of all these chunks in order.
    chunks: index of each in its batch.
    lengths: rows of each.
    """

    rows: Int64Array
    chunks: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, packed: PackedBatch) -> "ContextRows | None":
        """The rows of `batch` with context logits; None if no request asks."""
        chunks = tuple([i for i, chunk in enumerate(batch.context) if chunk.request.options.return_context_logits])
        if not chunks:
            return None
        lengths = tuple(batch.context[index].length for index in chunks)
        rows = [packed.spans.first_rows[index] + np.arange(batch.context[index].length) for index in chunks]
        return cls(np.concatenate(rows), chunks, lengths)

    def split(self, logits: Tensor) -> dict[int, Tensor]:
        """Index of a chunk -> its part [length, vocabulary] of `logits` [rows, vocabulary]."""
        ends = np.cumsum(self.lengths).tolist()
        return {
            chunk: logits[end - length : end]
            for chunk, length, end in zip(self.chunks, self.lengths, ends, strict=True)
        }


def table_rows(block_tables: IntArray) -> IntArray:
    """Block tables [slots, beams, blocks] as [slots · beams, blocks]: beam b of slot s has the row s · beams + b."""
    return block_tables.reshape(-1, block_tables.shape[2])


def beam_inputs(batch: Batch) -> BeamInputs:
    """Beam search's decision for the generation requests of `batch`, empty if it has none. ValueError if a batch with
    such requests has no decision."""
    if batch.beams is not None:
        return batch.beams
    if len(batch.slots):
        raise ValueError(f"{len(batch.slots)} generation requests of beam width {batch.beam_width} without beams")
    no_beams = np.empty((0, batch.beam_width), np.int32)
    return BeamInputs(no_beams, no_beams, no_beams.astype(np.float32), np.empty(0, np.int32))
