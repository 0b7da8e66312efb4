"""TensorRT-LLM's ranks of attention data parallelism: which one gets a request, and when prompts run.

Requests wait in one queue until a rank has room: `DefaultADPRouter` (tensorrt_llm/_torch/pyexecutor/scheduler/
adp_router.py of 2026), read, not compared.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from ifbbench.engine.arrays import IntArray, Rows
from ifbbench.engine.batch import StepOutputs
from ifbbench.engine.drafts import draw_accepted
from ifbbench.engine.interfaces import RequestSource
from ifbbench.engine.passes import confirm
from ifbbench.engine.plan import Plan
from ifbbench.engine.records import InFlightIteration
from ifbbench.engine.request import Request
from ifbbench.engine.stretch import Growth
from ifbbench.kv.attention_window import ceil_div
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.lockstep import LockstepScheduler
from ifbbench.schedulers.refusals import AdmissionLimits
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.admission import Admission
from ifbbench.schedulers.tensorrt_llm.balance import RanksBalance
from ifbbench.schedulers.tensorrt_llm.scheduler import TensorRtLlmScheduler


class RanksAdmission(Admission):
    """The queue of all ranks: those requests that enter the running set together are divided among the ranks.

    actives: active requests of each rank.
    max_active: maximum number of active requests of a rank.
    """

    def __init__(
        self, limits: AdmissionLimits, actives: list[ActiveRequests], max_active: int, max_queue_size: int | None
    ) -> None:
        super().__init__(limits, max_active * len(actives), max_queue_size)
        self._actives, self._max_of_rank = actives, max_active
        # Prompt tokens of the requests of each rank, and their ranks.
        self._tokens, self._ranks = [0] * len(actives), dict[Request, int]()

    def leave(self, request: Request) -> None:
        """`request` runs no more, though it may hold blocks until they are sent."""
        rank = self._ranks.pop(request, None)
        if rank is not None:
            self._tokens[rank] -= request.original_prompt_len

    def _num_active(self, active: ActiveRequests) -> int:
        return sum([len(one) for one in self._actives])

    def _activate(self, active: ActiveRequests, admitted: list[Request]) -> None:
        """See Admission. active: not used."""
        rooms = [
            max(0, min(self._max_of_rank - len(one), len(one.table.free_rows))) if self.waiting else 0
            for one in self._actives
        ]
        count = min(sum(rooms), len(self.waiting))
        if count:
            entering = self.waiting[:count]
            del self.waiting[:count]
            self._divide(entering, rooms, admitted)
        while self.waiting:  # beyond the limit, by priority
            request = self.waiting[0]
            open_to = [rank for rank, one in enumerate(self._actives) if self._may_enter_beyond(request, one)]
            if not open_to:
                return
            self._enter(self.waiting.pop(0), min(open_to, key=lambda rank: self._tokens[rank]), admitted)

    def _may_enter_beyond(self, request: Request, active: ActiveRequests) -> bool:
        return len(active) >= self._max_of_rank and self._goes_before_last(request, active)

    def _divide(self, entering: list[Request], rooms: list[int], admitted: list[Request]) -> None:
        """The longest prompt first, each to the rank with the fewest prompt tokens, among those with fewer requests
        than each has if all are divided evenly."""
        counts = [len(one) for one in self._actives]
        even = max(ceil_div(sum(counts) + len(entering), len(counts)), max(counts))
        heap = [(self._tokens[rank], count, rank) for rank, count in enumerate(counts) if count < even and rooms[rank]]
        heapify(heap)
        for request in sorted(entering, key=lambda one: -one.original_prompt_len):
            if not heap:  # rows of requests that are being sent are taken, so that some rank has more than that
                heap = [(self._tokens[rank], 0, rank) for rank, room in enumerate(rooms) if room]
                heapify(heap)
            tokens, count, rank = heappop(heap)
            rooms[rank] -= 1
            self._enter(request, rank, admitted)
            if count + 1 < even and rooms[rank]:
                heappush(heap, (tokens + request.original_prompt_len, count + 1, rank))

    def _enter(self, request: Request, rank: int, admitted: list[Request]) -> None:
        self._actives[rank].add(request)
        self._ranks[request] = rank
        self._tokens[rank] += request.original_prompt_len
        admitted.append(request)


class TensorRtLlmRanks(LockstepScheduler):
    """One `TensorRtLlmScheduler` for each rank, and one queue."""

    def __init__(self, limits: BatchingConfig, ranks: list[TensorRtLlmScheduler]) -> None:
        super().__init__(limits, ranks)
        of_rank, actives = ranks[0].config, [one.active for one in ranks]
        refusals = AdmissionLimits(of_rank, ranks[0].policy)
        self.config, self._schedulers = limits, ranks
        self._admission = RanksAdmission(refusals, actives, of_rank.max_active, limits.max_queue_size)
        self._balance = RanksBalance(of_rank) if limits.balances_ranks else None
        self._has_collected = False

    # The queue.

    @property
    def waiting(self) -> Sequence[Request]:
        return self._admission.waiting

    def admit(self, source: RequestSource) -> Sequence[Request]:
        entered = [one for one in self._admission.admit(self._schedulers[0].active, source) if not one.remote_len]
        self._count()
        return entered

    def find(self, request_id: int) -> Request | None:
        return self._admission.find(request_id)

    def remove(self, request: Request) -> None:
        if request.table is None:
            self._admission.withdraw(request)
            return
        self._admission.leave(request)
        super().remove(request)
        self._admission.forget(request)

    def keep(self, request: Request) -> None:
        self._admission.leave(request)
        super().keep(request)

    # The decision for one iteration.

    def _decide(
        self,
        iteration: int,
        now_s: float,
        in_flight: Sequence[Sequence[InFlightIteration]],
        collect: Callable[[], None],
    ) -> list[Plan]:
        self._has_collected = False

        def collected() -> None:
            self._has_collected = True
            collect()

        plans = [one.decide(iteration, now_s, in_flight[rank], collected) for rank, one in enumerate(self._schedulers)]
        if self._has_collected:  # what was decided before may have ended then
            for rank, plan in enumerate(plans):
                running = self.tables[rank].requests
                plan.rows = plan.rows[[row in running for row in plan.rows.tolist()]] if len(plan.rows) else plan.rows
        if self._balance is not None and not self._balance.lets_run(
            [len(plan.context) for plan in plans], [len(plan.rows) for plan in plans]
        ):
            for rank, plan in enumerate(plans):
                self._schedulers[rank].hold_prompts(plan)
        return [one.start(plans[rank], now_s) for rank, one in enumerate(self._schedulers)]

    # Draft tokens, which no rank repeats.

    def update(self, iteration: InFlightIteration, outputs: Sequence[StepOutputs]) -> list[Request]:
        """The outputs of all ranks at once, where that is the same."""
        if not self.limits.drafts.max_len or any(one.tokens is not None for one in outputs):
            return super().update(iteration, outputs)
        self._submitted.popleft()
        return confirm(iteration, outputs, self.table, self)

    def accepted(self, rows: Rows, counts: IntArray) -> IntArray:
        """See DraftVerifier."""
        return draw_accepted(self.limits.drafts, self.table, rows, counts)

    def settle(self, rows: Rows) -> None:
        """See DraftVerifier."""
        of_rows = rows % self.num_ranks
        for rank, scheduler in enumerate(self._schedulers):
            of_rank = rows[of_rows == rank]
            if len(of_rank):
                scheduler.drafts.settle(of_rank)

    # Many iterations.

    def horizon(self, plan: Plan) -> int:
        steps = super().horizon(plan)
        if self._has_collected:
            steps = min(steps, 1)
        if self._balance is not None and self._balance.holds:
            steps = min(steps, 1 if self._schedulers[0].may_pause else self._balance.certain)
        return steps

    def repeat(self, plan: Plan, count: int) -> Growth:
        if self._balance is not None:
            self._balance.skip(count - 1)
        return super().repeat(plan, count)
