"""MAX_REQUESTS: the first requests run, up to a maximum number. For a cache without blocks to count."""

from itertools import islice

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.policies.policy import CapacityDecision, LeftOut, Limit


class MaxRequests:
    """Runs the first `max_num_requests` of the list and never pauses."""

    NAME = "max_requests"
    may_pause = False

    def __init__(self, max_num_requests: int) -> None:
        self.max_num_requests = max_num_requests

    def schedule(self, active: ActiveRequests, kv_cache: KvCache | None = None) -> CapacityDecision:
        if len(active) <= self.max_num_requests:
            return CapacityDecision(admitted=list(active.context), generation_first=False)
        first, others = list(islice(active, self.max_num_requests)), list(islice(active, self.max_num_requests, None))
        return CapacityDecision(
            admitted=[request for request in first if request.in_context],
            held=[request for request in others if not request.in_context],
            left_out=LeftOut(others[0], Limit.BATCH_SIZE),
            generation_first=False,
        )
