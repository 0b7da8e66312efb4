"""Makes blocks that generation has filled findable, one iteration later.

The block that iteration i fills is stored when iteration i + 1 is submitted: after its scheduling and after its new
sequences have looked for blocks, and without the token of iteration i + 1.
"""

import numpy as np

from ifbbench.engine.active import ActiveRequests, Rows
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.request_table import RequestTable


def filled_blocks(table: RequestTable, kv_cache: KvCache, rows: Rows) -> tuple[list[int], list[int]]:
    """Those of the generation requests in `rows` that filled a block with their latest step, and the number of tokens
    computed of each. To be called before the next step is counted in `generated`."""
    computed = table.original_prompt_len[rows] + table.joined[rows] + table.generated[rows] - 1
    filled = np.flatnonzero(computed % kv_cache.attention_window.tokens_per_block == 0)
    return rows[filled].tolist(), computed[filled].tolist()


def store_blocks(active: ActiveRequests, kv_cache: KvCache, rows: list[int], computed: list[int]) -> None:
    """Store the blocks that `filled_blocks` named, as far as their tokens are known."""
    for row, num_tokens in zip(rows, computed, strict=True):
        request = active.by_slot[row]
        if request.beam_width == 1:
            kv_cache.store_generated(row, min(num_tokens, request.reuse.num_known))
