"""The requests of a recorded engine, followed event by event: from what its scheduler sent to records of iterations."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ifbbench.clock import NANOSECONDS
from ifbbench.engine.plan import ContextChunk, LeftOut, Limit, Pause
from ifbbench.engine.records import CacheState, IterationRecord
from ifbbench.engine.request import Request, RequestState
from ifbbench.kv.attention_window import ceil_div
from ifbbench.live.events import Added, Ended, Head, Preempted, Step
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY

# The engine's priorities are integers, the smallest first; those of a trace are between 0 and 1, the largest first.
PRIORITY_STEP, MAX_STEPS = 0.001, 400


@dataclass(frozen=True)
class EngineLimits:
    """What decides how many tokens and blocks a request needs to start, and which one is first.

    token_budget: maximum number of tokens of an iteration.
    watermark_blocks: number of blocks that stay free when a request starts beside others.
    reserves_full_prompt: whether a prompt starts only if all its blocks are free.
    cuts_prompts: whether prompts are cut into chunks.
    is_priority: whether requests run by priority, then by arrival; otherwise in the order of the queue.
    runs_prompts_apart: whether an iteration runs either prompts or generation steps (SGLang): running requests are held
        by prompts, pre-empted ones go to the end of the queue, and those that just ran a prompt to the end of the
        running ones.
    """

    tokens_per_block: int
    num_blocks: int
    max_seq_len: int
    token_budget: int
    watermark_blocks: int = 0
    reserves_full_prompt: bool = False
    cuts_prompts: bool = True
    is_priority: bool = False
    runs_prompts_apart: bool = False


def trace_priority(priority: int) -> float:
    """The priority in a trace of one of the engine: 0.499 for 1, 0.501 for -1, and closer together beyond 400."""
    steps = float(min(abs(priority), MAX_STEPS))
    if abs(priority) > MAX_STEPS:
        steps += (DEFAULT_PRIORITY / PRIORITY_STEP - MAX_STEPS) * (1 - MAX_STEPS / abs(priority))
    return round(DEFAULT_PRIORITY - math.copysign(steps * PRIORITY_STEP, priority), 9)


class RecordedRequest(Request):
    """A request of the recorded engine.

    arrival_s: arrival on the run's clock.
    added_in, added_with, stopped_in: as in a TraceRequest.
    engine_priority: priority as the engine has it.
    computed: number of tokens in the cache.
    made: number of output tokens so far.
    is_started: whether it has run at least once.
    """

    def __init__(self, added: Added, number: int, arrival_s: float, added_in: int) -> None:
        priority = trace_priority(added.priority)
        super().__init__(number, added.prompt_len, max(added.max_new_tokens, 1), index=number, priority=priority)
        self.name, self.arrival_s, self.added_in, self.added_with = added.name, arrival_s, added_in, added.in_flight
        self.engine_priority = added.priority
        self.stopped_in: int | None = None
        self.computed = self.made = 0
        self.is_started = False

    @property
    def num_outputs(self) -> int:
        return self.made

    def start(self, computed: int, known: int) -> None:
        """It runs, or runs again after a pre-emption, with `known` tokens to compute, `computed` of them in the
        cache."""
        if not self.is_started:
            self.reused_tokens = computed
        self.max_new_tokens -= known - self.prompt_len
        self.prompt_len = known
        self.computed = self.position = self.prepopulated = computed
        self.state, self.is_started = RequestState.CONTEXT_INIT, True

    def run_chunk(self, tokens: int) -> tuple[ContextChunk, int]:
        """The next tokens of its prompt; and how many of them had been computed before a pre-emption."""
        self.set_chunk(tokens)
        chunk = ContextChunk(self, self.position, self.chunk)
        recomputed = self.advance_context()
        self.computed = self.position
        if chunk.is_last:
            self.state = RequestState.GENERATION_IN_PROGRESS
        return chunk, recomputed

    def preempt(self) -> None:
        self.cached_before_pause = max(self.cached_before_pause, self.computed)
        self.state, self.position, self.computed = RequestState.CONTEXT_INIT, 0, 0
        self.pauses += 1


class Mirror:
    """The engine's requests by name, and the records of its iterations.

    requests: requests in the order in which they entered the queue.
    running: requests that run, in the order of starting.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.requests: dict[str, RecordedRequest] = {}
        self.running: dict[str, RecordedRequest] = {}
        self._limits = limits
        self.num_added = self._num_queued = self._num_started = 0
        self._carried_over: list[RecordedRequest] = []
        # Requests that the latest iteration ended may be pre-empted in one that was decided before.
        self._ended: dict[str, RecordedRequest] = {}
        # When each request ended that iterations in flight were decided with.
        self._ends_s: list[float] = []
        self._allocated = self._reused = self._missed = 0

    def add(self, added: Added, arrival_s: float, iteration: int) -> RecordedRequest:
        """A request entered the queue before `iteration`."""
        request = self.requests[added.name] = RecordedRequest(added, self.num_added, arrival_s, iteration)
        self._enqueue(request, arrival_s)
        self.num_added += 1
        return request

    def _enqueue(self, request: RecordedRequest, arrival_s: float) -> None:
        """A request enters the queue: which one is first is decided by its order."""
        priority = float(request.engine_priority) if self._limits.is_priority else 0.0
        by_arrival = self._limits.is_priority and not self._limits.runs_prompts_apart
        request.order = priority, round(arrival_s * NANOSECONDS) if by_arrival else self._num_queued
        self._num_queued += 1

    def remove(self, ended: Ended) -> RecordedRequest | None:
        """A request has left; None if it is not known. The caller completes it."""
        request = self.requests.pop(ended.name, None)
        if request is not None:
            self._ended[ended.name] = request
        self.running.pop(ended.name, None)
        if request is not None:
            request.made = ended.num_outputs
            self._num_started -= request.is_started
        return request

    def continue_with(self, described: Iterable[Added]) -> None:
        """Begin with requests that are in the engine already. Those that run go on as if what they have computed were
        reused, and the rest of what they know their prompt."""
        for added in described:
            request = self.add(added, 0.0, 0)
            if added.computed or added.is_running:
                request.start(min(added.computed, added.prompt_len - 1), added.prompt_len)
                self._num_started += 1
                self._carried_over.append(request)
            if added.is_running:
                self.running[added.name] = request

    def described(self) -> list[Added]:
        """All requests with what they still have to do, for `continue_with`."""
        return [
            Added(
                name,
                0.0,
                request.original_prompt_len + request.made,
                request.max_new_tokens + request.prompt_len - request.original_prompt_len - request.made,
                request.engine_priority,
                0,
                request.computed,
                name in self.running,
            )
            for name, request in self.requests.items()
        ]

    def record(self, step: Step, iteration: int, to_run_s: float, epoch_s: float) -> IterationRecord:
        """The record of an iteration, before the requests that it completes are removed.

        to_run_s: what is added to times of the engine's clock for those of the run.
        epoch_s: what is added to times of the run for seconds since the Unix epoch.
        """
        paused = [pause for one in step.preempted if (pause := self._preempt(one)) is not None]
        first_held = None
        if step.held is not None:  # it may have ended since
            first_held = self.requests.get(step.held) or self._ended.get(step.held)
        self._ended.clear()
        activated = self._start(step)
        chunks, recomputed, num_generation, num_tokens, num_over = list[ContextChunk](), 0, 0, 0, 0
        for name, tokens in step.tokens.items():
            request = self.requests.get(name)
            outputs = step.num_outputs.get(name, 1)
            if request is not None and request.in_context:
                self._allocate(request, tokens)
                chunk, again = request.run_chunk(tokens)
                chunks.append(chunk)
                recomputed += again
                num_tokens += tokens - chunk.length  # drafts that pad its step
                request.made += outputs if chunk.is_last else 0
                continue
            num_generation, num_tokens = num_generation + 1, num_tokens + tokens
            if request is None:  # it ended while this iteration was in flight
                num_over += 1
            else:
                self._allocate(request, outputs)
                request.computed += outputs
                request.made += outputs
        held = list[Request]()
        held += [one for name, one in self.running.items() if name not in step.tokens and one.in_generation]
        if self._limits.runs_prompts_apart:
            held = held if chunks else []
            if chunks or paused:
                self._move_last(step)
        blocked = [LeftOut(pause.victim, pause.limit) for pause in paused]
        if first_held is not None:
            blocked.append(LeftOut(first_held, Limit.PREFILL))
        of_queue = self._left_out(step, chunks, () if self._limits.runs_prompts_apart else held)
        blocked += of_queue
        start_s = step.begun_s + to_run_s
        self._ends_s = [end_s for end_s in self._ends_s if end_s > step.begun_s]
        num_over = max(num_over, len(self._ends_s))  # active when this iteration was decided
        self._ends_s += [step.ended_s for one in step.ended if one.name in self.requests]
        return IterationRecord(
            iteration,
            micro_batch=0,
            start_s=start_s,
            timestamp=start_s + epoch_s,
            active=self._num_started + num_over,
            queued=len(self.requests) - self._num_started,
            activated=activated,
            context=tuple(chunks),
            num_context_tokens=sum([chunk.length for chunk in chunks]),
            recomputed=recomputed,
            num_generation=num_generation,
            num_generation_tokens=num_tokens,
            held=held,
            paused=paused,
            left_out=min(blocked, key=lambda one: (one.request.order, one.request.request_id)) if blocked else None,
            blocked=tuple(blocked),
            cache=self._cache_state(step.free_blocks),
            submit_s=step.submitted_s + to_run_s,
            end_s=step.ended_s + to_run_s,
            queue_head=_queue_head(of_queue) if self._limits.runs_prompts_apart else None,
        )

    def _move_last(self, step: Step) -> None:
        """The requests of an iteration become the last of the running ones."""
        for name in step.tokens:
            if (request := self.running.pop(name, None)) is not None:
                self.running[name] = request

    def _preempt(self, one: Preempted) -> Pause | None:
        request = self.requests.get(one.victim)
        if request is not None:
            request.preempt()
            self.running.pop(one.victim, None)
            if self._limits.runs_prompts_apart:
                self._enqueue(request, request.arrival_s)
        elif (request := self._ended.get(one.victim)) is None:
            return None
        return Pause(request, self.requests.get(one.beneficiary, request), Limit(one.limit))

    def _start(self, step: Step) -> list[Request]:
        """Let requests of the queue run; returns those that run for the first time."""
        activated, size = list[Request](self._carried_over), self._limits.tokens_per_block
        num_carried_over = len(activated)
        self._carried_over.clear()
        in_order = {name: number for number, name in enumerate(step.tokens)}
        for started in sorted(step.started, key=lambda one: in_order[one.name]):
            if (request := self.requests.get(started.name)) is None:
                continue
            if not request.is_started:
                activated.append(request)
            request.start(started.computed, started.known)
            self.running[started.name] = request
            hits = started.computed // size
            self._reused += hits
            self._missed += max(0, (started.known - 1) // size - hits)
        self._num_started += len(activated) - num_carried_over
        return activated

    def _allocate(self, request: RecordedRequest, tokens: int) -> None:
        size = self._limits.tokens_per_block
        self._allocated += ceil_div(request.computed + tokens, size) - ceil_div(request.computed, size)

    def _left_out(self, step: Step, chunks: Sequence[ContextChunk], held: Sequence[Request]) -> list[LeftOut]:
        """The first running request that got fewer tokens than it needs, and the head of the queue."""
        left_out = list[LeftOut]()
        cut = {id(chunk.request) for chunk in chunks if not chunk.is_last} | {id(request) for request in held}
        cut |= {id(one) for name, one in self.running.items() if one.in_context and name not in step.tokens}
        if cut and (first := next((one for one in self.running.values() if id(one) in cut), None)) is not None:
            left_out.append(LeftOut(first, Limit.NUM_TOKENS))
        if step.head is not None and (head := self.requests.get(step.head.name)) is not None:
            limit = self._limit_of(step.head, step.free_blocks, sum(step.tokens.values()))
            left_out.append(LeftOut(head, limit))
        return left_out

    def _limit_of(self, head: Head, free_blocks: int, scheduled: int) -> Limit:
        """What keeps the head of the queue from starting in an iteration of `scheduled` tokens (vLLM's rules:
        docs/engines.md, Blocks)."""
        limits = self._limits
        if head.limit is not None:
            return Limit(head.limit)
        size, budget = limits.tokens_per_block, limits.token_budget - scheduled
        tokens = min(head.known - head.hits, head.cap or head.known)
        if tokens > budget and not limits.cuts_prompts:
            return Limit.NUM_TOKENS
        free, held = free_blocks - head.free_hits, head.hits // size
        needed = ceil_div(min(head.hits + min(tokens, budget), limits.max_seq_len), size) - held
        watermark = 0 if head.is_alone else limits.watermark_blocks
        if needed > free or not head.known:
            return Limit.KV_BLOCKS
        if needed + watermark > free:
            return Limit.WATERMARK
        return Limit.FULL_PROMPT if limits.reserves_full_prompt else Limit.KV_BLOCKS

    def _cache_state(self, free_blocks: int) -> CacheState:
        size, num_blocks = self._limits.tokens_per_block, self._limits.num_blocks
        used = num_blocks - free_blocks
        filled = sum([request.computed for request in self.running.values()])
        return CacheState(
            num_blocks,
            used,
            size,
            self._allocated,
            self._allocated,
            self._reused,
            num_blocks * size,
            used * size,
            min(filled, used * size),  # requests share blocks
            self._missed,
        )


def _queue_head(left_out: Sequence[LeftOut]) -> LeftOut | None:
    """What holds the queue (SGLang): the prompt that was cut, which has the tokens that the queue lacks, or the head of
    the queue. left_out: those of them that there are."""
    if len(left_out) == 2 and left_out[1].limit is not Limit.NUM_TOKENS:
        return left_out[1]
    return left_out[0] if left_out else None
