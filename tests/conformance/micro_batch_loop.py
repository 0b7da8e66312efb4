"""The loop of the micro-batch goldens: no capacity limit, no KV cache; what is scheduled advances one step."""

from collections.abc import Sequence
from dataclasses import dataclass

from ifbbench.engine.request import Request, RequestTable
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.micro_batch import MicroBatchScheduler
from ifbbench.schedulers.tensorrt_llm.policies import MaxRequests


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One iteration's micro batch: context chunks as (request, tokens), and generation requests."""

    context: list[tuple[Request, int]]
    generation: list[Request]

    @property
    def ids(self) -> list[int]:
        return [request.request_id for request, _ in self.context] + [item.request_id for item in self.generation]


class MicroBatchLoop:
    """All requests are active from the start. With several micro batches they take turns, and a request stays in flight
    until its own micro batch has its next turn."""

    def __init__(self, scheduler: MicroBatchScheduler, requests: Sequence[Request], num_micro_batches: int = 1) -> None:
        self.active = ActiveRequests(RequestTable(len(requests)))
        for request in requests:
            self.active.add(request)
        self.iteration = 0
        self._scheduler = scheduler
        self._capacity_policy = MaxRequests(len(requests))
        self._num_micro_batches = num_micro_batches

    def step(self) -> Scheduled:
        """Run one iteration."""
        table, turn = self.active.table, self.iteration % self._num_micro_batches
        table.begin_turn(turn)
        fitting = self._capacity_policy.schedule(self.active)
        selected = self._scheduler.schedule(self.active, fitting)
        scheduled = Scheduled(
            [(request, request.chunk) for request in selected.context],
            [
                request
                for request in self.active.generation
                if request not in selected.held and not table.in_other_micro_batch(request.slot)
            ],
        )
        for request in [request for request, _ in scheduled.context] + scheduled.generation:
            table.micro_batch[request.slot] = turn
        self._advance(scheduled)
        self.iteration += 1
        return scheduled

    def _advance(self, scheduled: Scheduled) -> None:
        for request in scheduled.generation:
            self.active.table.generated[request.slot] += 1
        finishing = list(scheduled.generation)
        for request, _ in scheduled.context:
            request.advance_context()
            if request.remaining_context == 0:
                request.start_generation()
                self.active.move_to_generation(request)
                finishing.append(request)
        for request in finishing:
            if request.num_generated == request.max_new_tokens:
                self.active.remove(request)
                request.complete()
