"""What beam search needs of the model: keys and values that follow their beams, and the best continuations."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.batch import Batch, BeamInputs
from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.request_table import IntArray
from ifbbench.execution.packing import table_rows

Int64Array = NDArray[np.int64]

# How much less likely than its best continuations a prompt's stand-ins are, where it has too few.
STAND_IN_SCORE = -1e9


def beam_inputs(batch: Batch) -> BeamInputs:
    """What beam search decided for the generation requests of `batch`, empty where it has none.

    ValueError if it has some, but does not say what was decided.
    """
    if batch.beams is not None:
        return batch.beams
    if len(batch.slots):
        raise ValueError(f"{len(batch.slots)} generation requests of beam width {batch.beam_width} without beams")
    no_beams = np.empty((0, batch.beam_width), np.int32)
    return BeamInputs(no_beams, no_beams, no_beams.astype(np.float32), np.empty(0, np.int32))


def rows_to_copy(batch: Batch, block_tables: IntArray, window: AttentionWindow) -> tuple[Int64Array, Int64Array]:
    """Cache rows to read and cache rows to write, each [copied tokens], before the batch runs.

    They give every beam whose parent is another one the parent's keys and values at the positions that the two do not
    share, as far as the batch sees them. All must be read before any is written: parents repeat and permute.

    block_tables: [slots, beams, blocks per sequence], of the layers that are bounded by `window`. `private_from` may be
    too early for them: where parent and child have the same block, nothing is copied.
    """
    beams = beam_inputs(batch)
    requests, children = np.nonzero(beams.parents != np.arange(batch.beam_width))
    # With a bubble, the blocks that beams own begin up to so many positions earlier than without.
    firsts = np.maximum(beams.private_from.astype(np.int64)[requests] - window.bubble, 0)
    cached = batch.positions.astype(np.int64)[requests]
    counts = np.maximum(cached - firsts, 0)
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(owners)) - (np.cumsum(counts) - counts - firsts)[owners]
    seen = window.sees(positions, cached[owners])
    owners, positions = owners[seen], positions[seen]
    tables = table_rows(block_tables)
    first_rows = batch.slots.astype(np.int64)[requests] * block_tables.shape[1]

    def cache_rows(of_beams: NDArray[np.integer]) -> Int64Array:
        return window.cache_rows(tables, (first_rows + of_beams)[owners], positions)

    sources, destinations = cache_rows(beams.parents[requests, children]), cache_rows(children)
    own = sources != destinations
    return sources[own], destinations[own]


def best_candidates(
    logits: Tensor, scores: Tensor, num_last_chunks: int, num_candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, beams and scores of the best continuations, each [outputs, candidates], best first.

    logits: [last chunks + requests · beams, vocabulary]. scores: float32 [requests, beams], of the beams so far. There
    are `num_candidates` candidates, or beams · vocabulary if that is less. Equal ones come in the order of beam and
    token. A last chunk's all go on from beam 0; if the vocabulary has too few, its tokens come again with scores lower
    by 1e9, as those of beams that nobody is on.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    vocabulary = logits.shape[1]
    num_requests, num_beams = scores.shape
    count = min(num_candidates, num_beams * vocabulary)
    first_scores, first_tokens = _best(log_probs[:num_last_chunks], min(count, vocabulary))
    places = torch.arange(count, device=logits.device)
    first_scores = first_scores[:, places % vocabulary] + (places >= vocabulary) * STAND_IN_SCORE
    first_tokens = first_tokens[:, places % vocabulary]

    totals = log_probs[num_last_chunks:].view(num_requests, num_beams, vocabulary) + scores.unsqueeze(2)
    next_scores, places = _best(totals.flatten(1), count)
    return (
        torch.cat([first_tokens, places % vocabulary]),
        torch.cat([torch.zeros_like(first_tokens), places // vocabulary]),
        torch.cat([first_scores, next_scores]),
    )


def _best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their places, each [rows, count], largest first, equal ones by place."""
    largest = values.topk(count, dim=-1)
    # topk leaves open which of several equal values come in last, and in what order equal ones stand.
    least = largest.values[:, -1:]
    all_places = torch.arange(values.shape[1], device=values.device)
    ties = torch.where(values == least, all_places, len(all_places) - 1).topk(count, dim=-1, largest=False).values
    num_above = (largest.values > least).sum(dim=-1, keepdim=True)
    ranks = torch.arange(count, device=values.device)
    nth_tie = ties.gather(1, (ranks - num_above).clamp(min=0))
    places = torch.where(ranks < num_above, largest.indices, nth_tie).sort(dim=-1).values
    ordered, order = values.gather(1, places).sort(dim=-1, descending=True, stable=True)
    return ordered, places.gather(1, order)
