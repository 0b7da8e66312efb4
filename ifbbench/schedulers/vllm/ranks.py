"""vLLM's ranks of attention data parallelism: which one gets a request.

`DPLBAsyncMPClient.get_core_engine_for_request` (vllm/v1/engine/core_client.py of vLLM 0.32), read, not compared. Its
counts are up to 100 ms old, to which it adds what it has sent since then; here they are those of the moment.
"""

from ifbbench.engine.request import Request
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.lockstep import LockstepScheduler
from ifbbench.schedulers.vllm.scheduler import VllmScheduler

# A queue counts more, the more of the KV cache is used beyond this share.
PENALTY, USED_FROM = 6.0, 0.5


class VllmRanks(LockstepScheduler):
    """One `VllmScheduler` for each rank. They agree on nothing before an iteration (`prefill_schedule_interval` 1)."""

    def __init__(self, limits: BatchingConfig, ranks: list[VllmScheduler]) -> None:
        super().__init__(limits, ranks)
        self._schedulers, self._first = ranks, 0

    def _choose(self, request: Request) -> int:
        """The rank with the fewest requests. Of equal ones the first counts, from the rank after the latest first."""
        first, count = self._first, self.num_ranks
        self._first = (first + 1) % count
        return min([(first + after) % count for after in range(count)], key=self._load)

    def _load(self, rank: int) -> float:
        state = self._schedulers[rank].state
        waiting = len(state.queue) + sum([request.in_context for request in state.transferring])
        load = float(waiting + len(state.running))
        if waiting:
            cache = state.kv_cache.state()
            used = (cache.used_blocks or 0) / max(cache.max_blocks or 0, 1)
            load += waiting * PENALTY * max(0.0, used - USED_FROM)
        return load
