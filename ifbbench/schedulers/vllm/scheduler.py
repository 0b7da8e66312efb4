"""vLLM's scheduler (`Scheduler` and `AsyncScheduler` of vLLM 0.32): running requests first, then the queue.

There are no phases: each iteration gives every request tokens, so that those computed catch up with those known. The
rules have the names of their sections in docs/engines.md.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ifbbench.clock import Clock
from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.batch import AdapterUse, BatchLayout, Positions, StepInputs, StepOutputs
from ifbbench.engine.confirm import confirm
from ifbbench.engine.interfaces import NO_LIMIT, RequestSource
from ifbbench.engine.plan import ContextChunk, LeftOut, Limit, Pause, Plan
from ifbbench.engine.records import CacheState, Growth, InFlightIteration
from ifbbench.engine.request import Request, RequestTable
from ifbbench.schedulers.tensorrt_llm.admission import AdmissionLimits
from ifbbench.schedulers.tensorrt_llm.config import BatchingConfig
from ifbbench.schedulers.vllm.cache import VllmCache
from ifbbench.schedulers.vllm.drafts import Drafts
from ifbbench.schedulers.vllm.queue import WaitingQueue
from ifbbench.schedulers.vllm.repetition import certain_steps, repeat

NO_MAXIMUM = 2**62
# Requests whose numbers differ in the remainder of this only arrived together.
TOGETHER = 2**20


class _Step:
    """The decision for one iteration while it is made.

    tokens: what is left of the token budget. inputs: what is left of the input budget. cap: maximum number of tokens of
    a request, 0 for none. chunks: prompt tokens of each request, in order. rows: generation requests, in order, in
    arrays. order: rows of both in the order of scheduling, in arrays. has_ended: the walk over the running requests
    ended before the last of them. repeats: nothing but the tokens of generation requests
    and blocks can make the next decision another one. slack: blocks that these may take before it is another one.
    has_running, has_running_chunks: requests that ran before are scheduled,
    and some of them with a chunk of their prompts.
    """

    def __init__(self, tokens: int, inputs: int, cap: int) -> None:
        self.tokens, self.inputs, self.cap = tokens, inputs, cap
        self.chunks: dict[Request, int] = {}
        self.rows: list[Rows] = []
        self.order: list[Rows] = []
        self.entered: list[Request] = []
        self.paused: list[Pause] = []
        self.blocked: list[LeftOut] = []
        self.dropped: list[int] = []
        self.has_ended = False
        self.has_running = self.has_running_chunks = False
        self.repeats, self.slack = True, NO_MAXIMUM

    @property
    def is_open(self) -> bool:
        """Whether tokens are left."""
        return self.tokens > 0 and self.inputs > 0

    def add_rows(self, rows: Rows, tokens: int) -> None:
        """So many tokens for these generation requests."""
        self.tokens, self.inputs = self.tokens - tokens, self.inputs - tokens
        self.rows.append(rows)
        self.order.append(rows)

    def add_chunk(self, request: Request, tokens: int, num_drafts: int = 0) -> None:
        """A chunk of a prompt, and drafts behind it."""
        self.tokens, self.inputs = self.tokens - tokens - num_drafts, self.inputs - tokens - num_drafts
        self.chunks[request] = tokens
        self.order.append(np.array([request.slot], np.int64))

    def drop(self, request: Request) -> None:
        """A request that was scheduled in this iteration is pre-empted: its tokens return to the budgets."""
        row = request.slot
        if request in self.chunks:
            tokens = self.chunks.pop(request)
        elif any((rows == row).any() for rows in self.rows) and row not in self.dropped:
            tokens = request.step_tokens
        else:
            return
        self.dropped.append(row)
        self.tokens, self.inputs = self.tokens + tokens, self.inputs + tokens

    def kept(self, parts: list[Rows]) -> Rows:
        """[rows], those of `parts` without the dropped ones."""
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NO_ROWS
        return rows[~np.isin(rows, self.dropped)] if self.dropped else rows


class _Scheduled:
    """What is in flight of one iteration, or of several equal ones.

    rows: [scheduled], in the order of scheduling. outputs: the rows that get a token, in the order of the batch.
    times: iterations.
    """

    def __init__(self, rows: Rows, outputs: Rows, times: int = 1) -> None:
        self.rows, self.outputs, self.times = rows, outputs, times

    def drop(self, row: int) -> None:
        """The request in `row` has left."""
        self.rows, self.outputs = self.rows[self.rows != row], self.outputs[self.outputs != row]


class VllmScheduler:
    """A `Scheduler` with the rules of vLLM. running: the running requests in the order of admission.
    scheduled_rows, scheduled_tokens: what the latest decision runs, in the order in which it was scheduled."""

    def __init__(self, limits: BatchingConfig, clock: Clock, is_predicted: bool = False) -> None:
        """ValueError without the rules of vLLM."""
        if limits.vllm is None:
            raise ValueError("the limits have no rules of vLLM; resolve a configuration with the engine vllm")
        self.limits, self.rules = limits, limits.vllm
        self.name = "vLLM's scheduler"
        self.max_in_flight, self.num_micro_batches = limits.max_in_flight, 1
        self.table = RequestTable(limits.num_slots)
        self.kv_cache = VllmCache(
            self.rules,
            limits.num_blocks,
            limits.tokens_per_block,
            limits.num_slots,
            limits.max_seq_len,
            limits.reuse.enabled,
        )
        self.layout = BatchLayout((self.kv_cache.block_tables,), limits.tokens_per_block, limits.max_in_flight)
        self.running: list[Request] = []
        self.queue = WaitingQueue(self.rules.is_priority)
        self.drafts = Drafts(limits.drafts, self.table) if limits.drafts.max_len else None
        self._refusals = AdmissionLimits(limits)
        self._by_id: dict[int, Request] = {}
        self._num_arrived = self._num_preempted = 0  # the latter of the requests in the queue
        self._is_async = limits.is_async
        self.scheduled_rows: Rows = NO_ROWS
        self.scheduled_tokens: Rows = NO_ROWS
        self._is_predicted = is_predicted and self.drafts is None
        self._step = _Step(0, 0, 0)
        self._hits_of_head: list[int] = []
        self._computed_of_plan: Rows | None = None
        self._num_reading = 0  # requests of which what a token is decides something
        self._scheduled: deque[_Scheduled] = deque()  # the iterations in flight
        # By index in `running`: the rows of the generation requests from there on, up to the next prompt, and how many
        # requests these are. None if `running` has changed.
        self._segments: dict[int, tuple[Rows, int]] | None = None

    # The queue.

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that have not run yet."""
        if not self._num_preempted:
            return self.queue.requests
        return [request for request in self.queue.requests if request.table is None]

    def admit(self, source: RequestSource) -> Sequence[Request]:
        num_refused = 1
        while num_refused:  # others may have arrived then
            num_refused = 0
            for request in source.get(NO_LIMIT):
                if (error := self._refusal(request)) is not None:
                    source.refuse(request, error)
                    num_refused += 1
                else:
                    self._add(request)
        return ()

    def _refusal(self, request: Request) -> str | None:
        if request.request_id in self._by_id:
            return f"request id {request.request_id} is in use"
        if (error := self._refusals.refusal(request)) is not None:
            return error
        if len(self.queue) >= self._max_waiting:
            return f"the queue is full (max_queue_size {self.limits.max_queue_size}); send the request again later"
        return None

    def _add(self, request: Request) -> None:
        self._num_arrived += 1
        number = request.order[1] or self._num_arrived * TOGETHER  # a caller may have numbered it
        request.order = (-request.priority if self.rules.is_priority else 0.0, number)
        self._by_id[request.request_id] = request
        self._num_reading += request.reads_tokens
        self.queue.add(request)

    @property
    def _max_waiting(self) -> int:
        limit = self.limits.max_queue_size
        return NO_MAXIMUM if limit is None else limit + self._max_running - len(self.running)

    def find(self, request_id: int) -> Request | None:
        return self._by_id.get(request_id)

    def remove(self, request: Request) -> None:
        del self._by_id[request.request_id]
        self._num_reading -= request.reads_tokens
        self.kv_cache.forget(request)
        if request in self.running:
            self.running.remove(request)
            self._segments = None
        else:
            self.queue.remove(request)
            self._num_preempted -= request.table is not None
        if request.table is not None:
            row = request.slot
            if self.kv_cache.holds(row):
                self.kv_cache.release(row, self.computed_by(request))
            for scheduled in self._scheduled:
                scheduled.drop(row)
            request.leave()
        request.complete()

    # The decision for one iteration.

    def schedule(
        self, iteration: int, now_s: float, in_flight: Sequence[InFlightIteration], collect: Callable[[], None]
    ) -> Plan:
        step = self._step = self._new_step()
        self._computed_of_plan = None
        self._run_running(step)
        step.has_running, step.has_running_chunks = len(step.order) > 0, len(step.chunks) > 0
        if not step.paused:
            self._start_waiting(step)
        elif len(self.queue):
            step.blocked.append(LeftOut(self.queue.head, Limit.KV_BLOCKS))
        return self._plan(step)

    def _new_step(self) -> _Step:
        """Budgets and cap (Budgets)."""
        inputs, rules = self.limits.token_budget, self.rules
        cap, requests = rules.long_prefill_threshold, len(self.running) + len(self.queue)
        if requests <= 1:
            cap = 0
        elif cap and rules.is_threshold_adaptive:
            cap = max(cap, inputs // requests)
        return _Step(min(inputs, rules.max_scheduled_tokens or inputs), inputs, cap)

    def _run_running(self, step: _Step) -> None:
        """Give the running requests their tokens, in order (Running requests)."""
        index, segments = 0, {} if self.drafts is not None else self._find_segments()
        while index < len(self.running) and step.is_open:
            rows, count = segments.get(index, (NO_ROWS, 0))
            if count and self._run_segment(step, rows[: min(step.tokens, step.inputs)]):
                index += count
                continue
            request = self.running[index]
            tokens = self._tokens_of(request, step)
            if not tokens:
                index += 1
                continue
            needed = self.kv_cache.missing(request.slot, self.computed_by(request) + tokens)
            while needed > self.kv_cache.pool.num_free:
                segments = {}
                victim = self._victim()
                if self.running.index(victim) < index:
                    index -= 1
                step.drop(victim)
                self._preempt(victim, request, step)
                if victim is request:
                    step.has_ended = True
                    return
            self._take(request, tokens, needed)
            if request.in_context:
                step.add_chunk(request, tokens)
            else:
                self.table.set_draft_tokens(row := np.array([request.slot], np.int64), np.array([tokens - 1]))
                step.add_rows(row, tokens)
            index += 1
        step.has_ended = index < len(self.running)

    def _find_segments(self) -> dict[int, tuple[Rows, int]]:
        """Consecutive generation requests, which need a token each, by the index of the first."""
        if self._segments is None:
            self._segments, first, rows = {}, 0, list[int]()
            for index, request in enumerate([*self.running, None]):
                if request is not None and not request.in_context:
                    rows += [request.slot] if request.in_generation else []
                    continue
                if index > first:
                    self._segments[first] = np.array(rows, np.int64), index - first
                first, rows = index + 1, []
        return self._segments

    def _run_segment(self, step: _Step, rows: Rows) -> bool:
        """Give each of these generation requests its token; False, with nothing done, if blocks are short."""
        computed = self._computed(rows)
        growing = rows[computed == self.kv_cache.held[rows] * self.limits.tokens_per_block]
        if len(growing) > self.kv_cache.pool.num_free:
            return False
        if len(growing):
            self.kv_cache.grow_each(growing)
        # A token that is in flight is not known yet.
        self._set_hashes(rows, np.minimum(computed + 1, self._known(rows)) if self._is_async else computed + 1)
        self._computed_of_plan = computed if not step.rows else None
        step.add_rows(rows, len(rows))
        return True

    def _tokens_of(self, request: Request, step: _Step) -> int:
        """Tokens of a running request in this iteration, drafts included; none if its last output is in flight."""
        if not (request.in_context or request.in_generation):
            return 0
        tokens = request.remaining_context if request.in_context else request.step_tokens
        if step.cap:
            tokens = min(tokens, step.cap)
        return min(tokens, step.tokens, step.inputs, self.limits.max_seq_len - 1 - self.computed_by(request))

    def _take(self, request: Request, tokens: int, blocks: int) -> None:
        """Blocks for the next `tokens` tokens of a running request, and their hashes (Blocks)."""
        if blocks:
            self.kv_cache.grow(request.slot, blocks)
        known = request.prompt_len if request.in_context else int(self._known(request.slot))
        self.kv_cache.set_hashes(request, min(self.computed_by(request) + tokens, known))

    def _victim(self) -> Request:
        """The request that is pre-empted next (Pre-emption). Of those that arrived together, the first."""
        if not self.rules.is_priority:
            return self.running[-1]
        return max(self.running, key=lambda request: (request.order[0], request.order[1] // TOGETHER))

    def _preempt(self, victim: Request, beneficiary: Request, step: _Step) -> None:
        """Release what a running request holds; it will compute its tokens again. Outputs in flight are still delivered
        (Pre-emption, Asynchronous scheduling)."""
        row, table = victim.slot, self.table
        in_flight = 0 if victim.in_context else int(table.generated[row] - table.confirmed[row])
        self._hash_delivered(victim)
        self.running.remove(victim)
        self._segments = None
        self.kv_cache.release(row, self.computed_by(victim))
        victim.pause(self.limits.max_seq_len)
        table.confirmed[row] = -in_flight
        self.queue.put_back(victim)
        self._num_preempted += 1
        step.paused.append(Pause(victim, beneficiary, Limit.KV_BLOCKS))

    def _start_waiting(self, step: _Step) -> None:
        """Take requests from the queue, while the head fits (Waiting requests)."""
        skipped, limit = list[Request](), None
        while len(self.queue):
            if len(self.running) >= self._max_running:
                limit = Limit.BATCH_SIZE
                break
            if not step.is_open:
                limit = Limit.NUM_TOKENS
                break
            request = self.queue.head
            if request.table is not None and self._is_in_flight(request):
                step.repeats = False
                skipped.append(self.queue.pop())  # outputs from before its pre-emption are still in flight
                continue
            if (limit := self._start(request, step)) is not None:
                break
        if limit is not None:
            step.blocked.append(LeftOut(self.queue.head, limit))
        for request in reversed(skipped):
            self.queue.put_back(request)

    @property
    def _max_running(self) -> int:
        return min(self.limits.max_batch_size, self.rules.max_active or self.limits.max_batch_size)

    def _start(self, request: Request, step: _Step) -> Limit | None:
        """Start the head of the queue; or the limit that keeps it there, with nothing done."""
        hits = self.kv_cache.lookup(request)
        reused = len(hits) * self.limits.tokens_per_block
        tokens, available = request.prompt_len - reused, min(step.tokens, step.inputs)
        num_drafts = self._padding(request, reused, step) if tokens == 1 else 0
        if num_drafts and tokens + num_drafts > available:
            return Limit.NUM_TOKENS
        if step.cap:
            tokens = min(tokens, step.cap)
        if tokens > available and not self.rules.cuts_prompts:
            return Limit.NUM_TOKENS
        tokens = min(tokens, available)
        limit, slack = self.kv_cache.limit_of_start(request, hits, tokens + num_drafts, not self.running)
        if limit is not None:
            step.slack = slack
            self._hits_of_head = hits
            return limit
        if request.table is None:
            if not self.table.free_rows:
                return Limit.BATCH_SIZE
            order = request.order
            request.enter(self.table, 0)
            request.order = order
            step.entered.append(request)
            request.reused_tokens = reused
        else:
            self._num_preempted -= 1
        self.queue.pop()
        self.running.append(request)
        self._segments = None
        request.position = request.prepopulated = reused
        self.kv_cache.start(request, hits)
        if num_drafts:
            request.set_draft_tokens(num_drafts)
        self._take(request, tokens, self.kv_cache.missing(request.slot, reused + tokens + num_drafts))
        step.add_chunk(request, tokens, num_drafts)
        return None

    def _padding(self, request: Request, reused: int, step: _Step) -> int:
        """Drafts that only pad the step of a request that starts with a single token, so that it has the shape of the
        others' steps (Draft tokens)."""
        if self.drafts is None or step.has_running_chunks or not (reused or step.has_running):
            return 0
        count = self.drafts.settings.max_len
        return count if reused + count + 2 <= self.limits.max_seq_len else 0

    def _plan(self, step: _Step) -> Plan:
        rows = step.kept(step.rows)
        if len(step.rows) != 1 or step.dropped or self.drafts is not None:
            self._computed_of_plan = None
        for request, tokens in step.chunks.items():
            request.set_chunk(tokens)
        chunks = tuple([ContextChunk(request, request.position, request.chunk) for request in step.chunks])
        held = list[Request]()
        if step.has_ended:
            runs = set(rows.tolist())
            held = [one for one in self.running if one.in_generation and one.slot not in runs]
        if (first := self._first_cut(step, held)) is not None:
            step.blocked.insert(0, LeftOut(first, Limit.NUM_TOKENS))
        blocked = [LeftOut(pause.victim, pause.limit) for pause in step.paused] + step.blocked
        self.scheduled_rows = order = step.kept(step.order)
        self.scheduled_tokens = self.table.step_tokens[order]
        for request, count in step.chunks.items():
            self.scheduled_tokens[order == request.slot] = count + request.num_draft_tokens
        return Plan(
            list(step.chunks),
            rows,
            held=held,
            paused=step.paused,
            blocked=tuple(blocked),
            chunks=chunks,
            entered=step.entered,
        )

    def _first_cut(self, step: _Step, held: Sequence[Request]) -> Request | None:
        """The first running request that got fewer tokens than it needs, or none, because of a budget or the cap."""
        cut = [one for one, tokens in step.chunks.items() if tokens < one.remaining_context]
        cut += held
        if step.has_ended:
            cut += [one for one in self.running if one.in_context and one not in step.chunks]
        return min(cut, key=self.running.index, default=None)

    # One iteration.

    def allocate(self, plan: Plan) -> StepInputs:
        """The blocks were taken with the decision."""
        self.kv_cache.filled_tokens += int(self.scheduled_tokens.sum())
        drafts = None
        if self.drafts is not None:
            drafts = self.drafts.inputs([chunk.request for chunk in plan.chunks if chunk.is_last], plan.rows)
        return StepInputs(self._positions(plan), drafts=drafts)

    def advance(self, plan: Plan, iteration: int) -> int:
        recomputed, outputs = 0, plan.output_rows()
        for chunk in plan.chunks:
            recomputed += chunk.request.advance_context()
            if chunk.is_last:
                chunk.request.start_generation()
                self._segments = None
        self.table.generated[plan.rows] += 1
        self._submitted(_Scheduled(self.scheduled_rows, outputs))
        return recomputed

    def _submitted(self, scheduled: _Scheduled) -> None:
        """These iterations are in flight. With asynchronous scheduling, requests whose last token is among them are not
        scheduled again."""
        self._scheduled.append(scheduled)
        if not self._is_async:
            return
        table, outputs = self.table, scheduled.outputs
        for row in outputs[table.generated[outputs] >= table.reserved[outputs]].tolist():
            table.requests[row].finish_scheduling()
            self._segments = None

    def update(self, iteration: InFlightIteration, outputs: Sequence[StepOutputs]) -> list[Request]:
        if iteration.is_repeated:
            return self.confirm(1)
        table, rows = self.table, iteration.output_rows
        generated = None if self.drafts is None else table.generated[rows]
        done = confirm(iteration, outputs, table, self.drafts)
        if self.drafts is not None and generated is not None:
            for batch in iteration.batches:
                if batch.drafts is not None:  # what was rejected is not in the cache
                    self.kv_cache.filled_tokens -= int((generated - table.generated[rows] + batch.drafts.counts).sum())
            ended = iteration.dropped.union(request.slot for request in done)
            self.drafts.propose(np.array([row for row in rows.tolist() if row not in ended], np.int64))
        return self._collected(1, done)

    def _collected(self, times: int, done: list[Request]) -> list[Request]:
        """So many of the oldest equal iterations in flight were collected. Returns `done`, the requests that they
        complete, in the order of scheduling, in which their blocks are released."""
        scheduled = self._scheduled[0]
        scheduled.times -= times
        if not scheduled.times:
            self._scheduled.popleft()
        for request in done if self._is_async else ():
            self._hash_delivered(request)
        if len(done) > 1:
            order = {row: index for index, row in enumerate(scheduled.rows.tolist())}
            done.sort(key=lambda request: order[request.slot])
        return done

    def lose(self, iteration: InFlightIteration) -> list[Request]:
        rows = self._scheduled[0].rows
        self._collected(1, [])
        lost = [self.table.requests[row] for row in rows.tolist()]
        for request in lost:
            if self.kv_cache.holds(request.slot):
                self.kv_cache.forget_content(request.slot)
        return lost

    # Iterations of which the times are known.

    def horizon(self, plan: Plan) -> int:
        if not self._is_predicted or self._num_reading or plan.does_nothing:
            return 0
        step, rows = self._step, plan.rows
        is_certain = step.repeats and not (plan.chunks or plan.held or plan.paused) and len(rows) > 0
        if not is_certain or len(rows) < len(self.running):
            return 1
        steps = certain_steps(self.limits, self.table, self.kv_cache, rows, self._positions(plan), step.slack)
        if step.slack == NO_MAXIMUM or not self.limits.reuse.enabled:
            return steps
        # The head of the queue waits for blocks, and needs fewer if one that it can reuse is filled.
        if self.kv_cache.may_be_hit_next(self.queue.head, self._hits_of_head, self.running):
            return 1
        return min(steps, self.limits.tokens_per_block)

    def cycle(self, plan: Plan) -> Sequence[Plan]:
        return [plan]

    def positions(self, plan: Plan) -> tuple[Positions, AdapterUse | None]:
        computed = self._positions(plan)
        return Positions(len(computed), int(computed.sum()), lambda: computed), None

    def repeat(self, plan: Plan, count: int) -> Growth:
        rows = plan.rows
        self.kv_cache.filled_tokens += int(self.scheduled_tokens.sum())
        if count == 1:
            recomputed = self.advance(plan, 0)
            growth = Growth(self.kv_cache.state(), [0], [0], [0])
            growth.recomputed = recomputed
            return growth
        computed = self._positions(plan)
        growth = repeat(self.limits, self.table, self.kv_cache, rows, computed, count)
        self.table.generated[rows] += count
        self._submitted(_Scheduled(self.scheduled_rows, rows, count))
        return growth

    def confirm(self, count: int) -> list[Request]:
        done = list[Request]()
        while count:
            scheduled, table = self._scheduled[0], self.table
            times, rows = min(count, scheduled.times), scheduled.outputs
            table.confirmed[rows] += times
            ended = rows[table.confirmed[rows] == table.stop_after[rows]]
            done += self._collected(times, [table.requests[row] for row in ended.tolist()])
            count -= times
        return done

    def cache_state(self) -> CacheState:
        return self.kv_cache.state()

    def figures(self) -> dict[str, Any]:
        return {}

    def truncate(self, conversation: Request, num_tokens: int) -> None:
        """vLLM forgets no blocks of a conversation."""
        return None

    # Tokens of requests.

    def _known(self, rows: Any) -> Any:
        """[rows], tokens of prompt and output that are known."""
        table = self.table
        return table.original_prompt_len[rows] + table.joined[rows] + table.confirmed[rows]

    def _positions(self, plan: Plan) -> Rows:
        """[rows of the latest plan], positions of their next tokens."""
        if self._computed_of_plan is None:
            self._computed_of_plan = self._computed(plan.rows)
        return self._computed_of_plan

    def _computed(self, rows: Rows) -> Rows:
        """[rows], tokens of generation requests that were computed or scheduled."""
        table = self.table
        computed: Rows = table.original_prompt_len[rows] + table.joined[rows] + table.generated[rows] - 1
        return computed

    def computed_by(self, request: Request) -> int:
        """Tokens of a running request that were computed or scheduled."""
        return request.position if request.in_context else request.prompt_len + request.num_generated - 1

    def _is_in_flight(self, request: Request) -> bool:
        return any((scheduled.rows == request.slot).any() for scheduled in self._scheduled)

    def _hash_delivered(self, request: Request) -> None:
        """With asynchronous scheduling, blocks that delivered tokens fill have hashes before their requests release
        them. (vLLM gives them at each output; no lookup comes before.)"""
        if self._is_async and self.kv_cache.holds(request.slot) and not request.in_context:
            self.kv_cache.set_hashes(request, int(self._known(request.slot)) - 1)

    def _set_hashes(self, rows: Rows, tokens: Rows) -> None:
        """The blocks that the first `tokens` tokens of each of `rows` fill get their hashes."""
        if not self.limits.reuse.enabled:
            return
        due = tokens // self.limits.tokens_per_block > self.kv_cache.hashed[rows]
        for row, count in zip(rows[due].tolist(), tokens[due].tolist(), strict=True):
            self.kv_cache.set_hashes(self.table.requests[row], count)
