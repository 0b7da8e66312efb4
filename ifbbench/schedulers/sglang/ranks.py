"""SGLang's ranks of attention data parallelism: which one gets a request, and what they agree on.

`round_robin_scheduler` of `DataParallelController` and `maybe_prepare_mlp_sync_batch` (SGLang 0.5.23), read, not
compared. Ranks do not wait for each other's prompts: while some run a prefill batch, others decode, or run an idle
batch. With draft tokens no rank decodes while another one runs a prefill batch.
"""

from collections.abc import Callable, Sequence

from ifbbench.engine.plan import Plan
from ifbbench.engine.records import InFlightIteration
from ifbbench.engine.request import Request
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.lockstep import LockstepScheduler
from ifbbench.schedulers.sglang.scheduler import SglangScheduler


class SglangRanks(LockstepScheduler):
    """One `SglangScheduler` for each rank."""

    def __init__(self, limits: BatchingConfig, ranks: list[SglangScheduler]) -> None:
        super().__init__(limits, ranks)
        self._schedulers, self._next = ranks, 0

    def _choose(self, request: Request) -> int:
        """The ranks in turn."""
        chosen = self._next
        self._next = (chosen + 1) % self.num_ranks
        return chosen

    def _begin(self) -> None:
        for scheduler in self._schedulers:
            scheduler.begin()

    def _decide(
        self,
        iteration: int,
        now_s: float,
        in_flight: Sequence[Sequence[InFlightIteration]],
        collect: Callable[[], None],
    ) -> list[Plan]:
        decisions = [one.decide_prompts(in_flight[rank]) for rank, one in enumerate(self._schedulers)]
        decodes = not (self.limits.drafts.max_len and any(len(one.chosen) > 0 for one in decisions))
        return [one.decide_others(decisions[rank], decodes) for rank, one in enumerate(self._schedulers)]
