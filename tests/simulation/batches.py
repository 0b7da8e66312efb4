"""Batches by their lengths alone."""

import numpy as np

from ifbbench.engine.batch import Batch, ContextChunk
from ifbbench.engine.request import Request


def batch_of(chunks, kv_lengths, beam_width=1, padded=False) -> Batch:
    """Context chunks by start, length and whether they are their prompt's last; generation requests by KV length."""
    context = tuple(
        ContextChunk(Request(index, start + length + (not is_last), 8, index=index), start, length)
        for index, (start, length, is_last) in enumerate(chunks)
    )
    slots = np.arange(len(kv_lengths), dtype=np.int32)
    positions = np.array(kv_lengths, dtype=np.int32) - 1
    tables = np.zeros((len(kv_lengths), beam_width, 1), np.int32)
    return Batch(0, context, slots, positions, tables, beam_width=beam_width, padded=padded)
