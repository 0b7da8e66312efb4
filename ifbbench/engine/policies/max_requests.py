"""MAX_REQUESTS: the first so many requests run. For a cache without blocks to count."""

from itertools import islice

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.policies.policy import CapacityDecision, LeftOut, Limit


class MaxRequests:
    """Let the first `max_num_requests` of the list run; never pause."""

    may_pause = False

    def __init__(self, max_num_requests: int) -> None:
        self.max_num_requests = max_num_requests

    def schedule(self, active: ActiveRequests, kv_cache: KvCache | None = None) -> CapacityDecision:
        decision = CapacityDecision(admitted=list(active.context), generation_first=False)
        if len(active) <= self.max_num_requests:
            return decision
        decision.admitted = []
        for request in islice(active, self.max_num_requests):
            if request.in_context:
                decision.admitted.append(request)
        others = list(islice(active, self.max_num_requests, None))
        decision.held = [request for request in others if not request.in_context]
        decision.left_out = LeftOut(others[0], Limit.BATCH_SIZE)
        return decision
