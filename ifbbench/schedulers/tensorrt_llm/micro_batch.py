"""The micro-batch scheduler: which of the fitting requests run now, within the batch size and the token budget."""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter

from ifbbench.engine.plan import LeftOut, Limit
from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import UNLIMITED, ceil_div
from ifbbench.schedulers.parts import sums_of_parts
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.chunks import ChunkLimits, fit_chunks
from ifbbench.schedulers.tensorrt_llm.policies.policy import CapacityDecision


class MicroBatchScheduler:
    """Selects in order until the batch is full (TensorRT-LLM's `MicroBatchScheduler`).

    With chunked context, generation takes its tokens first and the rest of the budget is divided into chunks. Without
    it, the order alone decides, and the first request that does not fit ends the batch.

    token_budget: maximum number of tokens of an iteration.
    chunking_policy: how the budget is divided among chunks; None for no chunked context.
    num_micro_batches: with several, each has at most its share of the active requests, so that all are equally full.
    num_parts: parts of the devices, each of which has its share of the token budget; without chunked context.
    """

    def __init__(
        self,
        max_batch_size: int,
        token_budget: int = UNLIMITED,
        chunking_policy: str | None = None,
        chunk_limits: ChunkLimits | None = None,
        num_micro_batches: int = 1,
        num_parts: int = 1,
    ) -> None:
        self.num_parts = num_parts
        self.max_batch_size = max_batch_size
        self.num_micro_batches = num_micro_batches
        self.token_budget = token_budget
        self.chunking_policy = chunking_policy
        self.chunk_limits = chunk_limits or ChunkLimits(unit=1)
        self._nothing = MicroBatch(self, max_batch_size)

    def schedule(self, active: ActiveRequests, fitting: CapacityDecision) -> "MicroBatch":
        """Decide for one iteration. Requests in flight in another micro batch are skipped."""
        admitted, generation = fitting.admitted, active.generation_rows
        if active.table.any_in_flight:
            generation = active.ready(generation)
            admitted = [request for request in admitted if not active.table.in_other_micro_batch(request.slot)]
        tokens, max_requests, of_generation = active.step_tokens(generation), self.max_batch_size, list[int]()
        if self.num_micro_batches > 1:
            max_requests = min(max_requests, ceil_div(len(active), self.num_micro_batches))
        takes_all = not (fitting.held or fitting.paused or active.mixed_beam_widths)
        if takes_all:
            # Whether all generation requests run wherever they are in the order, so that only contexts are selected.
            count, needed = len(generation), tokens
            if admitted and not fitting.generation_first:
                count += len(admitted)
                if not self.chunking_policy:
                    needed += sum(request.prompt_len + request.num_draft_tokens for request in admitted)
            takes_all = count <= max_requests and needed <= self.token_budget
            if takes_all and self.num_parts > 1:
                of_generation = sums_of_parts(generation, self.num_parts, active.table.step_tokens)
                of_parts = of_generation.copy()
                for request in admitted:
                    of_parts[request.slot % self.num_parts] += request.prompt_len + request.num_draft_tokens
                takes_all = max(of_parts) <= self.share
        if takes_all and not admitted:
            return self._nothing
        selection = MicroBatch(self, max_requests)
        if takes_all:
            selection.count, selection.tokens = len(generation), tokens
            if self.num_parts > 1:
                selection.tokens_of_parts = of_generation
            selection.add_contexts(admitted)
        else:
            removed = {request.slot for request in fitting.held}
            removed.update(pause.victim.slot for pause in fitting.paused)
            rows = [row for row in generation.tolist() if row not in removed]
            requests = chain([active.by_slot[row] for row in rows], admitted)
            selection.add(requests if fitting.generation_first else sorted(requests, key=attrgetter("order")))
        return selection.finish()

    @property
    def share(self) -> int:
        """The token budget of each part."""
        return self.token_budget // self.num_parts


class MicroBatch:
    """The selection of one iteration.

    context: requests with a chunk to run, each with its `chunk` set, in batch order.
    held: fitting generation requests that do not run; all other fitting ones do.
    left_out: the first request that does not run or has its chunk cut, and why. One that is left for the next micro
        batch, so that both have their share, is not left out.
    """

    def __init__(self, scheduler: MicroBatchScheduler, max_requests: int) -> None:
        self.scheduler = scheduler
        self.max_requests = max_requests
        self.context: list[Request] = []
        self.held: list[Request] = []
        self.left_out: LeftOut | None = None
        self.count = self.tokens = 0
        self.tokens_of_parts = [0] * scheduler.num_parts
        self.beam_width: int | None = None

    def add(self, requests: Iterable[Request]) -> None:
        """Select from `requests` until the batch is full; generation requests after that are held."""
        rest = iter(requests)
        for request in rest:
            limit = self._select(request)
            if limit is None:
                continue
            self._leave_out(request, limit)
            if limit is Limit.NUM_TOKENS and self.scheduler.num_parts > 1:
                # This part is full, so that requests behind this one in it are left out, too.
                self.tokens_of_parts[request.slot % self.scheduler.num_parts] = self.scheduler.share
            elif limit in (Limit.BATCH_SIZE, Limit.NUM_TOKENS):
                break
        self.held.extend(request for request in rest if not request.in_context)

    def add_contexts(self, requests: list[Request]) -> None:
        """Do what `add` does, for context requests."""
        if not self.scheduler.chunking_policy:
            self.add(requests)
            return
        room = self.max_requests - self.count
        self._select_for_chunks(requests[:room])
        if len(requests) > room:
            self._leave_out(requests[room], Limit.BATCH_SIZE)

    def _select(self, request: Request) -> Limit | None:
        """Add `request` to the batch, or return what keeps it out."""
        if self.count >= self.max_requests:
            return Limit.BATCH_SIZE
        if request.in_context and self.scheduler.chunking_policy:
            self._select_for_chunks([request])
            return None
        cost = request.prompt_len + request.num_draft_tokens if request.in_context else request.step_tokens
        if self.tokens + cost > self.scheduler.token_budget:
            return Limit.NUM_TOKENS
        part, parts = request.slot % self.scheduler.num_parts, self.tokens_of_parts
        if self.scheduler.num_parts > 1 and parts[part] + cost > self.scheduler.share:
            return Limit.NUM_TOKENS
        if request.in_context:
            request.set_chunk(request.remaining_context)
            self.context.append(request)
        elif self.beam_width in (None, request.beam_width):
            self.beam_width = request.beam_width
        else:
            return Limit.BEAM_WIDTH
        self.tokens += cost
        parts[part] += cost
        self.count += 1
        return None

    def _select_for_chunks(self, requests: list[Request]) -> None:
        """Add `requests`; their chunks are sized later. They count towards the batch size even if they get no chunk."""
        self.count += len(requests)
        self.context += requests

    def _leave_out(self, request: Request, limit: Limit) -> None:
        if not request.in_context:
            self.held.append(request)
        shares = limit is Limit.BATCH_SIZE and self.max_requests < self.scheduler.max_batch_size
        if self.left_out is None and not shares:
            self.left_out = LeftOut(request, limit)

    def finish(self) -> "MicroBatch":
        """Size the chunks and put the contexts in batch order."""
        scheduler = self.scheduler
        if scheduler.chunking_policy and self.context:
            capacity = scheduler.token_budget - self.tokens
            self.context, cut = fit_chunks(self.context, scheduler.chunking_policy, capacity, scheduler.chunk_limits)
            if cut and (self.left_out is None or cut.order < self.left_out.request.order):
                self.left_out = LeftOut(cut, Limit.NUM_TOKENS)
        if len(self.context) > 1:
            self.context.sort(key=_batch_order)
        return self


def _batch_order(request: Request) -> tuple[bool, int]:
    """Prompts that stay incomplete go before those on their last chunk, each by LoRA id (none first)."""
    return request.is_last_chunk, -1 if request.lora_task_id is None else request.lora_task_id
