"""The loop of the capacity goldens: a capacity policy decides, and the scheduled requests advance one step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ifbbench.engine.request import Request, RequestTable
from ifbbench.kv.manager import KvCacheManager
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.policies import CapacityPolicy


@dataclass(frozen=True, slots=True)
class Decided:
    """What one iteration schedules and pauses, each in the order of the active list (paused: of the decision)."""

    iteration: int
    active: list[Request]
    context: list[Request]
    generation: list[Request]
    paused: list[Request]

    @property
    def scheduled(self) -> list[Request]:
        return self.context + self.generation


class CapacityLoop:
    """Iterate to see each decision before it is applied. Ends when no request is active."""

    def __init__(
        self,
        policy: CapacityPolicy,
        cache: KvCacheManager,
        arrivals: Mapping[int, Sequence[Request]],
        max_input_len: int,
    ) -> None:
        self.cache = cache
        self.active = ActiveRequests(RequestTable(sum(map(len, arrivals.values()))))
        self.iteration = 0
        self._policy = policy
        self._arrivals = arrivals
        self._max_input_len = max_input_len

    def __iter__(self) -> Iterator[Decided]:
        self._add_arrivals()
        while len(self.active):
            decided = self._decide()
            if not decided.scheduled and not decided.paused:
                raise RuntimeError(f"iteration {self.iteration} runs none of the active requests")
            yield decided
            self._apply(decided)
            self.iteration += 1
            self._add_arrivals()

    def _add_arrivals(self) -> None:
        for request in self._arrivals.get(self.iteration, ()):
            self.active.add(request)

    def _decide(self) -> Decided:
        decision = self._policy.schedule(self.active, self.cache)
        paused = [pause.victim for pause in decision.paused]
        generation = [request for request in self.active.generation if request not in decision.held + paused]
        return Decided(self.iteration, list(self.active), decision.admitted, generation, paused)

    def _apply(self, decided: Decided) -> None:
        for request in decided.paused:
            self.cache.remove_sequence(request.slot)
            request.pause(self._max_input_len)
            self.active.move_to_context(request)
        for request in sorted(decided.scheduled, key=lambda request: request.request_id):
            if request.in_context:
                self._advance_context(request)
            else:
                self._advance_generation(request)
            if not request.in_context and request.num_generated == request.max_new_tokens:
                computed = request.prompt_len + request.num_generated - 1
                self.cache.remove_sequence(request.slot, min(computed, request.num_known_tokens))
                self.active.remove(request)
                request.complete()

    def _advance_context(self, request: Request) -> None:
        size = request.chunk
        if request.is_first_chunk:
            reused = self.cache.add_request(request)
            request.set_prepopulated(reused, self.cache.attention_window.tokens_per_block)
        request.advance_context()
        request.set_chunk(size)
        if request.remaining_context == 0:
            self.cache.store_context(request.slot)
            request.start_generation()
            self.active.move_to_generation(request)
            self._append_token(request)

    def _advance_generation(self, request: Request) -> None:
        self.cache.add_tokens(np.array([request.slot]))
        self.active.table.generated[request.slot] += 1
        self._append_token(request)

    def _append_token(self, request: Request) -> None:
        """The token that an iteration makes is its number."""
        table, slot = self.active.table, np.array([request.slot])
        table.makes_tokens = True
        table.confirmed[request.slot] = table.generated[request.slot]
        table.write_outputs(slot, np.array([request.num_outputs - 1]), np.array([self.iteration], np.int32))
