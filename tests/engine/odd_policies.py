"""Policies that a user might bring, odd but allowed."""

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.policies import CapacityDecision, GuaranteedNoEvict, Limit, Pause


class PausesAllOnce(GuaranteedNoEvict):
    """In its third iteration it pauses whoever generates, and runs nobody."""

    may_pause = True

    def __init__(self, max_num_requests: int) -> None:
        super().__init__(max_num_requests)
        self._calls = 0

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        self._calls += 1
        if self._calls != 3:
            return super().schedule(active, kv_cache)
        return CapacityDecision(paused=[Pause(request, request, Limit.KV_BLOCKS) for request in active.generation])
