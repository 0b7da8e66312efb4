"""What active requests release: whether one can be paused now, and what of its blocks can be found by others."""

from collections.abc import Sequence

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.plan import Plan
from ifbbench.engine.records import InFlightIteration
from ifbbench.engine.request import Request, RequestTable
from ifbbench.kv.interface import KvCache


def store_generated(table: RequestTable, cache: KvCache, rows: Rows) -> None:
    """Make the blocks that the generation requests in `rows` had filled before this step findable.

    The block that iteration i fills is stored when iteration i + 1 is submitted: after its scheduling and after its
    new sequences have looked for blocks, and without the token of iteration i + 1. That step is counted in
    `generated` already."""
    computed = table.original_prompt_len[rows] + table.joined[rows] + table.generated[rows] - 2
    # With drafts a step may have filled a block and begun the next one; storing a block again changes nothing.
    filled = np.flatnonzero(computed % cache.attention_window.tokens_per_block <= table.max_draft_tokens)
    for row, num_tokens in zip(rows[filled].tolist(), computed[filled].tolist(), strict=True):
        cache.store_known(table.requests[row], num_tokens)


def findable_tokens(request: Request) -> int:
    """Tokens of an active request that stay findable when it releases its blocks: those computed and known."""
    computed = request.position if request.in_context else request.original_prompt_len + request.num_outputs - 1
    return min(computed, request.num_known_tokens)


def is_pause_in_flight(plan: Plan, in_flight: Sequence[InFlightIteration], table: RequestTable, is_async: bool) -> bool:
    """Whether a request that `plan` pauses is in one of the iterations in flight."""
    if is_async:
        return len(in_flight) > 0
    micro_batches = {iteration.record.micro_batch for iteration in in_flight}
    return any(int(table.micro_batch[pause.victim.slot]) in micro_batches for pause in plan.paused)
