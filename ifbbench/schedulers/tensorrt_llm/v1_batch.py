"""The batch of V1, which runs until its last member is complete (`TrtGptModelV1`)."""

import numpy as np

from ifbbench.engine.plan import LeftOut, Limit, Plan
from ifbbench.engine.request import Request
from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests


class V1Batch:
    """Members of the batch that are complete stay in it, parked and computed along as padding, until the last one is.

    complete: these members.
    """

    def __init__(self, active: ActiveRequests, kv_cache: KvCache) -> None:
        self.complete: list[Request] = []
        self._active, self._kv_cache = active, kv_cache

    @property
    def is_running(self) -> bool:
        """Whether the batch has members: until it ends, there is nothing to decide."""
        return len(self._active.generation) > 0 or len(self.complete) > 0

    def next_step(self) -> Plan:
        """The plan of the next step of a running batch."""
        idle = np.array([request.slot for request in self.complete], np.int64)
        blocked = tuple(LeftOut(request, Limit.STATIC_BATCH) for request in self._active.context[:1])
        return Plan([], self._active.batch_rows, idle, held=list(self.complete), blocked=blocked)

    def add_complete(self, done: list[Request]) -> list[Request]:
        """These members are complete. Returns the whole batch if they are its last ones, else an empty list."""
        for request in done:
            if request.in_generation:
                self._active.park(request.slot)
                self._kv_cache.end_generation(request.slot)
        self.complete += done
        if self._active.generation:
            return []
        finished, self.complete = self.complete, []
        return finished

    def forget(self, request: Request) -> None:
        """`request` ends, whether or not it is a member."""
        if request in self.complete:
            self.complete.remove(request)
