"""Policies that misbehave on one rank after a while, for tests of ranks that fail."""

import os
import time

from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.policies import CapacityDecision
from ifbbench.schedulers.tensorrt_llm.policies.guaranteed_no_evict import GuaranteedNoEvict

A_WHILE = 40  # decisions
RANK = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


class _Odd(GuaranteedNoEvict):
    """Misbehaves on `odd_rank` when A_WHILE decisions were made."""

    odd_rank = 1
    _count = 0

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        self._count += 1
        decision = super().schedule(active, kv_cache)
        if self._count > A_WHILE and self.odd_rank == RANK:
            self.misbehave(decision)
        return decision

    def misbehave(self, decision: CapacityDecision) -> None:
        raise NotImplementedError


class OutOfMemory(_Odd):
    def misbehave(self, decision: CapacityDecision) -> None:
        raise MemoryError("no memory for a list of requests")


class FailsInRank0(OutOfMemory):
    odd_rank = 0


class Differs(_Odd):
    """Leaves out a request that fits."""

    def misbehave(self, decision: CapacityDecision) -> None:
        del decision.admitted[-1:]


class Hangs(_Odd):
    odd_rank = 0

    def misbehave(self, decision: CapacityDecision) -> None:
        time.sleep(3600)
