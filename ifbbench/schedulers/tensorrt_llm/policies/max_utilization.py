"""MAX_UTILIZATION: all that fits now runs; if blocks are missing, the last started request is paused."""

from collections.abc import Iterable
from heapq import merge
from operator import attrgetter

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.engine.plan import Limit, Pause
from ifbbench.engine.request import Request
from ifbbench.kv.adapters import NO_LORA, LoraLimits, LoraPages
from ifbbench.kv.interface import BlockCount, KvCache
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.policies.policy import CapacityDecision, ReuseDelay

_ORDER = attrgetter("order")


@mypyc_attr(allow_interpreted_subclasses=True)
class MaxUtilization:
    """Walks the list in order and gives each request the blocks of its next step. For one that does not fit, the last
    started request at or behind it is paused and the request tried again; if there is none, the walk stops.

    A generation request that needs no block always fits, so that the walk skips it unless the number of requests or
    LoRA pages could bind. (TensorRT-LLM's `MaxUtilizationScheduler`, with the same outcome.)
    """

    may_pause = True
    # A waiting request that did not fit beside the claims of others does not fit after those took their blocks either.
    is_steady = True

    def __init__(self, max_num_requests: int, lora: LoraLimits = NO_LORA) -> None:
        self.max_num_requests = max_num_requests
        self.lora = lora

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        rows, has_wide_steps = active.generation_rows, active.table.any_wide_steps
        walks_all = len(active) > self.max_num_requests or (active.num_with_lora and self.lora.may_bind)
        if not (walks_all or active.context or has_wide_steps) and kv_cache.has_blocks_for(len(rows)):
            return CapacityDecision(generation_first=False)
        needs = kv_cache.step_needs(rows, active.table.draft_tokens[rows] if has_wide_steps else 0)
        indices: Iterable[int] = range(len(active.generation))
        if not walks_all:
            indices = np.flatnonzero(needs if needs.ndim == 1 else needs.any(axis=1)).tolist()
        generation = [(active.generation[index], kv_cache.counted(needs[index])) for index in indices]
        return _Walk(self, active, kv_cache).run(generation)


class _Walk:
    """The walk of one iteration."""

    def __init__(self, policy: MaxUtilization, active: ActiveRequests, kv_cache: KvCache) -> None:
        self.max_num_requests = policy.max_num_requests
        self.active = active
        self.kv_cache = kv_cache
        self.pages = LoraPages(policy.lora)
        self.plan = kv_cache.plan_release()
        self.decision = CapacityDecision(generation_first=False)
        self.started_generation = len(active.generation)
        self.started_context = sorted(active.table.started.values(), key=_ORDER)
        self.claimed: BlockCount = 0
        self.scheduled = 0

    def run(self, generation: list[tuple[Request, BlockCount]]) -> CapacityDecision:
        """Walk the context requests and `generation` (each with the blocks it needs) in order."""
        pending = ((request, self.kv_cache.first_chunk_need(request)) for request in self.active.context)
        end: tuple[float, int] | None = None
        delay = ReuseDelay(self.active, self.kv_cache)
        for request, need in merge(pending, generation, key=lambda entry: entry[0].order):
            if (end is None or request.order < end) and delay.should_wait(request):
                self.decision.leave_out(request, Limit.REUSE_DELAY)
                continue
            while True:
                if end is not None and request.order >= end:
                    self.decision.leave_out(request, Limit.KV_BLOCKS)
                    return self.decision
                limit = self._missing(request, need)
                if limit is None:
                    break
                victim = self._last_started()
                if victim is None or victim.order < request.order:
                    self.decision.leave_out(request, limit)
                    return self.decision
                self._pause(Pause(victim, request, limit))
                end = victim.order
            self.scheduled += 1
            self.claimed += need
            self.pages.claim(request)
            if request.in_context:
                self.decision.admitted.append(request)
                # It may get no tokens and still claim blocks, which a generation request may need next.
                self.decision.valid_until_next_allocation = True
        return self.decision

    def _missing(self, request: Request, need: BlockCount) -> Limit | None:
        if self.scheduled >= self.max_num_requests:
            return Limit.BATCH_SIZE
        if self.claimed + need > self.plan.free_blocks:
            return Limit.KV_BLOCKS
        if not self.pages.fits(request):
            return Limit.LORA_PAGES
        return None

    def _last_started(self) -> Request | None:
        last_generation = self.active.generation[max(self.started_generation - 1, 0) : self.started_generation]
        return max(self.started_context[-1:] + last_generation, key=_ORDER, default=None)

    def _pause(self, pause: Pause) -> None:
        if pause.victim.in_context:
            self.started_context.pop()
        else:
            self.started_generation -= 1
        self.plan.release(pause.victim.slot)
        self.decision.paused.append(pause)
