"""Makes blocks that generation has filled findable."""

from collections.abc import Container

import numpy as np

from ifbbench.engine.active import ActiveRequests, Rows
from ifbbench.engine.kv_cache.interface import KvCache


def store_generated(active: ActiveRequests, kv_cache: KvCache, rows: Rows, dropped: Container[int] = ()) -> None:
    """Store the blocks that the newest tokens of the requests in `rows`, but for those in `dropped`, have filled."""
    table = active.table
    computed = table.original_prompt_len[rows] + table.joined[rows] + table.confirmed[rows] - 1
    filled = np.flatnonzero(computed % kv_cache.geometry.tokens_per_block == 0)
    for row, tokens in zip(rows[filled].tolist(), computed[filled].tolist(), strict=True):
        if row not in dropped and (request := active.by_slot[row]).beam_width == 1:
            kv_cache.store_generated(row, min(tokens, request.reuse.num_known))
