"""Policies that a user might bring, odd but allowed."""

from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.policies import CapacityDecision, GuaranteedNoEvict, LeftOut, Limit, Pause


class PausesAllOnce(GuaranteedNoEvict):
    """In its third iteration it pauses all generation requests, and runs none."""

    may_pause = True

    def __init__(self, max_num_requests: int) -> None:
        super().__init__(max_num_requests)
        self._calls = 0

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        self._calls += 1
        if self._calls != 3:
            return super().schedule(active, kv_cache)
        return CapacityDecision(paused=[Pause(request, request, Limit.KV_BLOCKS) for request in active.generation])


class LeavesOutForFairness(GuaranteedNoEvict):
    """Lets one request run at a time and gives a reason of its own for the others."""

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        waiting = active.context[1:] if not active.generation else active.context
        decision = CapacityDecision(admitted=active.context[:1] if not active.generation else [])
        if waiting:
            decision.left_out = LeftOut(waiting[0], "fairness")
        return decision


class PausesForFairness(LeavesOutForFairness):
    """Pauses a generation request once, for a reason of its own."""

    may_pause = True
    _has_paused = False

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        if active.generation and active.context and not self._has_paused:
            self._has_paused = True
            return CapacityDecision(paused=[Pause(active.generation[0], active.context[0], "fairness")])
        return super().schedule(active, kv_cache)


class StandsStill(GuaranteedNoEvict):
    """Lets no request run, for a reason of its own."""

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        return CapacityDecision(left_out=LeftOut(active.context[0], "fairness"))
