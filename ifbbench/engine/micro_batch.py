"""The micro-batch scheduler: which of the fitting requests run now, within the batch size and the token budget."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.chunking import ChunkLimits, size_chunks
from ifbbench.engine.policies.policy import CapacityDecision, LeftOut, Limit
from ifbbench.engine.request import Request


@dataclass(slots=True)
class MicroBatch:
    """context: requests with a chunk to run, each with its `chunk` set, in the order of the packed input.
    held: generation requests that were fitting but do not run; the other fitting ones do.
    left_out: the first request that does not run, or whose chunk was cut, and why.
    """

    context: list[Request] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)
    left_out: LeftOut | None = None


class MicroBatchScheduler:
    """Pick in order until the batch is full (TensorRT-LLM's `MicroBatchScheduler`).

    With chunked context, generation takes its tokens first and the rest of the budget is split into chunks. Without it,
    the order alone decides, and the first request that does not fit ends the batch. `max_num_tokens` None: no limit.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_num_tokens: int | None = None,
        chunking_policy: str | None = None,
        chunk_limits: ChunkLimits | None = None,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.chunking_policy = chunking_policy
        self.chunk_limits = chunk_limits or ChunkLimits(unit=1)

    def schedule(
        self, active: ActiveRequests, fitting: CapacityDecision, in_flight: Container[int] = frozenset()
    ) -> MicroBatch:
        """Decide for one iteration. `in_flight` are ids of requests in an uncollected batch, which are passed over."""
        tokens = active.generation_tokens
        all_go_on = not (fitting.held or fitting.paused or in_flight)
        takes_all = all_go_on and self._takes_all_generation(active, fitting, tokens)
        if takes_all and not fitting.admitted:
            return MicroBatch()
        walk = _Walk(self, in_flight)
        if takes_all:
            walk.count, walk.tokens = len(active.generation), tokens
            walk.run_context(fitting.admitted)
        else:
            removed = {id(request) for request in fitting.held}
            removed.update(id(pause.victim) for pause in fitting.paused)
            generation = [request for request in active.generation if id(request) not in removed]
            walk.run(self._in_order(generation, fitting))
        return walk.finish()

    def _takes_all_generation(self, active: ActiveRequests, fitting: CapacityDecision, tokens: int) -> bool:
        """Whether all generation requests run wherever they stand in the order, so that only contexts need a walk."""
        if active.mixed_beam_widths:
            return False
        count = len(active.generation)
        if fitting.admitted and not fitting.generation_first:
            count += len(fitting.admitted)
            if not self.chunking_policy:
                tokens += sum(request.prompt_len + request.num_draft_tokens for request in fitting.admitted)
        return count <= self.max_batch_size and (self.max_num_tokens is None or tokens <= self.max_num_tokens)

    @staticmethod
    def _in_order(generation: list[Request], fitting: CapacityDecision) -> Iterable[Request]:
        if fitting.generation_first:
            return chain(generation, fitting.admitted)
        return sorted(chain(generation, fitting.admitted), key=attrgetter("order"))


class _Walk:
    """One iteration's picking, in order."""

    def __init__(self, scheduler: MicroBatchScheduler, in_flight: Container[int]) -> None:
        self.scheduler = scheduler
        self.in_flight = in_flight
        self.result = MicroBatch()
        self.count = self.tokens = self.chunk_candidate_tokens = 0
        self.beam_width: int | None = None
        self.all_fit = True

    def run(self, requests: Iterable[Request]) -> None:
        """Pick from `requests` until the batch is full; generation requests behind that are held."""
        rest = iter(requests)
        for request in rest:
            limit = self._pick(request)
            if limit is None:
                continue
            self._leave_out(request, limit)
            if limit in (Limit.BATCH_SIZE, Limit.NUM_TOKENS):
                break
        self.result.held.extend(request for request in rest if not request.in_context)

    def run_context(self, requests: list[Request]) -> None:
        """`run` for context requests that no batch has under way."""
        if not self.scheduler.chunking_policy:
            self.run(requests)
            return
        room, longest = self.scheduler.max_batch_size - self.count, self.scheduler.chunk_limits.max_context_length
        self.result.context = requests[:room]
        for request in self.result.context:
            request.chunk = request.prompt_len - request.position
            cost = request.chunk + request.num_draft_tokens
            if longest is not None and cost > longest:
                cost, self.all_fit = longest, False
            self.chunk_candidate_tokens += cost
        self.count += len(self.result.context)
        if len(requests) > room:
            self._leave_out(requests[room], Limit.BATCH_SIZE)

    def _pick(self, request: Request) -> Limit | None:
        """Take `request` into the batch, or say what keeps it out."""
        if request.request_id in self.in_flight:
            return Limit.IN_FLIGHT
        if self.count >= self.scheduler.max_batch_size:
            return Limit.BATCH_SIZE
        if not request.in_context:
            return self._pick_generation(request)
        if self.scheduler.chunking_policy:
            return self._pick_chunk_candidate(request)
        return self._pick_whole_prompt(request)

    def _pick_generation(self, request: Request) -> Limit | None:
        cost = request.beam_width + request.num_draft_tokens
        if self._over_budget(cost):
            return Limit.NUM_TOKENS
        if self.beam_width not in (None, request.beam_width):
            return Limit.BEAM_WIDTH
        self.beam_width = request.beam_width
        self.tokens += cost
        self.count += 1
        return None

    def _pick_whole_prompt(self, request: Request) -> Limit | None:
        request.set_chunk(request.remaining_context)
        cost = request.prompt_len + request.num_draft_tokens
        if self._over_budget(cost):
            return Limit.NUM_TOKENS
        self.tokens += cost
        self.count += 1
        self.result.context.append(request)
        return None

    def _pick_chunk_candidate(self, request: Request) -> Limit | None:
        """Chunk candidates count towards the batch size, even if they later get no chunk."""
        request.set_chunk(request.remaining_context)
        cost = request.chunk + request.num_draft_tokens
        longest = self.scheduler.chunk_limits.max_context_length
        if longest is not None and cost > longest:
            cost, self.all_fit = longest, False
        self.chunk_candidate_tokens += cost
        self.count += 1
        self.result.context.append(request)
        return None

    def _over_budget(self, cost: int) -> bool:
        budget = self.scheduler.max_num_tokens
        return budget is not None and self.tokens + cost > budget

    def _leave_out(self, request: Request, limit: Limit) -> None:
        if not request.in_context:
            self.result.held.append(request)
        if self.result.left_out is None:
            self.result.left_out = LeftOut(request, limit)

    def finish(self) -> MicroBatch:
        """Size the chunks and put the packed input in order."""
        scheduler, result = self.scheduler, self.result
        if scheduler.chunking_policy and result.context:
            budget = scheduler.max_num_tokens
            capacity = None if budget is None else budget - self.tokens
            if capacity is not None and self.chunk_candidate_tokens > capacity:
                self.all_fit = False
            if not self.all_fit:
                size_chunks(result.context, scheduler.chunking_policy, capacity, scheduler.chunk_limits)
                self._note_cut_chunk()
                result.context = [request for request in result.context if request.chunk > 0]
        if len(result.context) > 1:
            # Unfinished contexts before those on their last chunk, each by LoRA id (none first).
            result.context.sort(
                key=lambda request: (
                    request.is_last_chunk and not self.all_fit,
                    -1 if request.lora_task_id is None else request.lora_task_id,
                )
            )
        return result

    def _note_cut_chunk(self) -> None:
        for request in self.result.context:
            if not request.is_last_chunk:
                found = self.result.left_out
                if found is None or request.order < found.request.order:
                    self.result.left_out = LeftOut(request, Limit.NUM_TOKENS)
                return
