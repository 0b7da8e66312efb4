"""The log of decisions: what becomes of each active request, with the blocks that the policy takes it to need."""

import logging

import numpy as np

from ifbbench.engine.plan import Plan
from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests

log = logging.getLogger("ifbbench.scheduler")


def log_decisions(plan: Plan, active: ActiveRequests, cache: KvCache, policy: str, may_pause: bool) -> None:
    """Log what becomes of each active request.

    policy: its name.
    may_pause: whether it pauses requests.
    """
    table = active.table
    pauses = {pause.victim.slot: pause for pause in plan.paused}
    limits = {one.request.slot: one.limit for one in plan.blocked}
    runs = {request.slot for request in plan.context} | set(plan.rows.tolist())
    for request in active:
        if request.in_generation:
            needed = cache.counted(cache.step_needs(np.array([request.slot]), request.num_draft_tokens)[0])
        elif may_pause:
            needed = cache.first_chunk_need(request)
        else:
            needed = cache.blocks_to_completion(request)
        if request.slot in pauses:
            pause = pauses[request.slot]
            decision = f"pause: request {pause.beneficiary.request_id} does not fit for {pause.limit}"
        elif request.slot in runs:
            chunk = f", context tokens {request.position} to {request.position + request.chunk - 1}"
            decision = "continue" if request.has_started else "start"
            decision += chunk if request.in_context else ", generation"
        elif table.in_other_micro_batch(request.slot):
            decision = f"in flight in micro batch {table.micro_batch[request.slot]}"
        else:
            decision = f"left out: {limits.get(request.slot, 'behind another request')}"
        log.debug(
            "request %d: policy %s, needs %s blocks, %s free: %s",
            request.request_id,
            policy,
            needed,
            cache.free_blocks,
            decision,
        )
