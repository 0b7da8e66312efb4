"""What an iteration of vLLM runs: running requests first, then the queue (`Scheduler.schedule` of vLLM 0.32).

There are no phases: each iteration gives every request tokens, so that those computed catch up with those known. The
rules have the names of their sections in docs/engines.md.
"""

import numpy as np

from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.plan import LeftOut, Limit, Pause
from ifbbench.engine.request import Request
from ifbbench.kv.tiers import KvTiers
from ifbbench.schedulers.vllm.cache import Hits
from ifbbench.schedulers.vllm.drafts import Drafts
from ifbbench.schedulers.vllm.rules import TOGETHER
from ifbbench.schedulers.vllm.state import VllmState
from ifbbench.schedulers.vllm.step import Step


class Planner:
    """Decides what each iteration runs, and takes its blocks.

    drafts: None without draft tokens.
    """

    def __init__(self, state: VllmState, drafts: Drafts | None) -> None:
        self._state, self._drafts = state, drafts
        self._limits, self._rules = state.limits, state.rules
        self._table, self._kv_cache = state.table, state.kv_cache
        self._queue, self._running = state.queue, state.running
        self._is_async = state.limits.is_async

    def decide(self) -> Step:
        step = self._new_step()
        self._run_running(step)
        step.has_running, step.has_running_chunks = step.num_tokens > 0, len(step.chunks) > 0
        if not step.paused:
            self._start_waiting(step)
        elif len(self._queue):
            step.blocked.append(LeftOut(self._queue.head, Limit.KV_BLOCKS))
        return step

    def _new_step(self) -> Step:
        """Budgets and cap (Budgets)."""
        inputs, rules = self._limits.token_budget, self._rules
        cap, requests = rules.long_prefill_threshold, len(self._running) + len(self._queue)
        if requests <= 1 and rules.spares_single:
            cap = 0
        elif cap and rules.is_threshold_adaptive:
            cap = max(cap, inputs // max(requests, 1))
        return Step(min(inputs, rules.max_scheduled_tokens or inputs), inputs, cap)

    # Running requests.

    def _run_running(self, step: Step) -> None:
        """Give the running requests their tokens, in order (Running requests)."""
        running, index = self._running.requests, 0
        stretches = {} if self._drafts is not None else self._running.stretches()
        while index < len(running) and step.available > 0:
            count, rows = stretches.get(index, (0, NO_ROWS))
            within = rows[: step.available]
            if count and self._run_stretch(step, within):
                if len(within) < len(rows):
                    break
                index += count
                continue
            request = running[index]
            tokens = self._tokens_of(request, step)
            if not tokens:
                index += 1
                continue
            if self._kv_cache.windowed:
                in_flight = self._state.in_flight.tokens_of(np.array([request.slot], np.int64))
                self._kv_cache.release_left(request.slot, self._state.computed_by(request) - int(in_flight[0]))
            needed = self._kv_cache.missing(request.slot, self._state.computed_by(request) + tokens)
            while not self._kv_cache.has_free(needed):
                stretches = {}
                victim = self._victim()
                if running.index(victim) < index:
                    index -= 1
                self._preempt(victim, request, step)
                if victim is request:
                    step.has_ended = True
                    return
            self._take(request, tokens, needed)
            if request.in_context:
                step.add_chunk(request, tokens)
            else:
                self._table.set_draft_tokens(row := np.array([request.slot], np.int64), np.array([tokens - 1]))
                step.add_rows(row, tokens)
            index += 1
        step.has_ended = index < len(running)
        generation = self._state.generation
        if generation.count and not generation.num_ahead:  # the budgets ended before them
            self._state.part()

    def _run_stretch(self, step: Step, rows: Rows) -> bool:
        """Give each of these generation requests its token; False, with nothing done, if blocks are short."""
        cache, generation = self._kv_cache, self._state.generation
        if generation.is_active:
            if len(rows) == generation.count and cache.has_free(generation.num_growing):
                if cache.pool.has_ids:
                    generation.settle()
                    self._grow(rows)
                elif generation.num_growing:
                    cache.pool.take(generation.num_growing)
                generation.take()
                step.add_rows(rows, len(rows))
                return True
            self._state.part()
        if not self._grow(rows):
            return False
        step.add_rows(rows, len(rows))
        return True

    def _grow(self, rows: Rows) -> bool:
        """Take the blocks of the next tokens of these generation requests, and release those that windows leave behind;
        False, with nothing done, if blocks are short."""
        cache, computed = self._kv_cache, self._state.computed[rows]
        is_growing = cache.room(rows, computed) == 0
        growing = rows[is_growing]
        if not cache.has_free(len(growing)):
            return False
        if not cache.is_plain:
            processed = computed - self._state.in_flight.tokens_of(rows)
            due = is_growing | cache.leaves(rows, processed)
            cache.follow_windows(rows[due], processed[due], is_growing[due])
        elif len(growing):
            cache.grow_each(growing)
            cache.held[growing] += 1
        if self._table.makes_tokens or self._table.shares_outputs or not cache.is_plain:
            self._set_hashes(rows, computed + 1)
        return True

    def _tokens_of(self, request: Request, step: Step) -> int:
        """Tokens of a running request in this iteration, drafts included; none if its last output is in flight."""
        if not (request.in_context or request.in_generation):
            return 0
        tokens = request.remaining_context if request.in_context else request.step_tokens
        if step.cap:
            tokens = min(tokens, step.cap)
        return min(tokens, step.available, self._limits.max_seq_len - 1 - self._state.computed_by(request))

    def _take(self, request: Request, tokens: int, blocks: int) -> None:
        """Blocks for the next `tokens` tokens of a running request, and their hashes (Blocks)."""
        if blocks:
            self._kv_cache.grow(request.slot, blocks)
        known = self._state.known_of(request)
        self._kv_cache.set_hashes(request, min(self._state.computed_by(request) + tokens, known))

    def _set_hashes(self, rows: Rows, tokens: Rows) -> None:
        """The blocks that the first `tokens` tokens of each of `rows` fill get their hashes (Prefix cache). Without
        token ids no other prompt can go on with an output, so that its blocks get theirs when they are released; with
        windows that is at any time."""
        if self._is_async:  # a token that is in flight is not known yet
            tokens = np.minimum(tokens, self._state.known(rows))
        self._state.set_hashes(rows, tokens)

    # Pre-emption.

    def _victim(self) -> Request:
        """The request that is pre-empted next (Pre-emption). Of those that arrived together, the first."""
        if not self._rules.is_priority:
            return self._running.requests[-1]
        return max(self._running, key=lambda request: (request.order[0], request.order[1] // TOGETHER))

    def _preempt(self, victim: Request, beneficiary: Request, step: Step) -> None:
        """Release what a running request holds; it will compute its tokens again. Outputs in flight are still delivered
        (Pre-emption, Asynchronous scheduling)."""
        row, table = victim.slot, self._table
        self._state.part()
        in_flight = 0 if victim.in_context else int(table.generated[row] - table.confirmed[row])
        self._state.release(victim, is_scheduled=step.drop(victim), is_preempted=True)
        self._running.remove(victim)
        victim.pause(self._limits.max_seq_len)
        table.confirmed[row] = -in_flight
        self._queue.put_back(victim)
        self._state.num_with_rows += 1
        step.paused.append(Pause(victim, beneficiary, Limit.KV_BLOCKS))

    # Waiting requests.

    def _start_waiting(self, step: Step) -> None:
        """Take requests from the queue, while the head fits (Waiting requests)."""
        skipped, limit = list[Request](), None
        while len(self._queue):
            if len(self._running) >= self._state.max_running:
                limit = Limit.BATCH_SIZE
                break
            if step.available <= 0:
                limit = Limit.NUM_TOKENS
                break
            request = self._queue.head
            if request.table is not None and self._state.in_flight.has(request.slot):
                step.repeats = False
                skipped.append(self._queue.pop())  # outputs from before its pre-emption are still in flight
                continue
            if self._state.tiers is not None and self._waits_for_prefetch(self._state.tiers, request):
                step.repeats, step.awaits_stores = False, True
                skipped.append(self._queue.pop())
                continue
            if (limit := self._start(request, step)) is not None:
                break
        if limit is not None:
            step.blocked.append(LeftOut(self._queue.head, limit))
        for request in reversed(skipped):
            self._queue.put_back(request)

    def _start(self, request: Request, step: Step) -> Limit | None:
        """Start the head of the queue; or the limit that keeps it there, with nothing done."""
        if request.table is not None and self._kv_cache.held[request.slot]:
            return self._start_received(request, step)
        hits = self._kv_cache.lookup(request)
        if request.table is None and request.remote_len:
            return self._await(request, hits, request.prompt_len, step)
        if self._state.tiers is not None and (found := self._find_in_stores(self._state.tiers, request, hits)):
            return self._load(self._state.tiers, request, hits, found, step)
        reused = hits.num_blocks * self._limits.tokens_per_block
        tokens, available = request.prompt_len - reused, step.available
        num_drafts = self._padding(request, reused, step) if tokens == 1 else 0
        if num_drafts and tokens + num_drafts > available:
            return Limit.NUM_TOKENS
        if step.cap:
            tokens = min(tokens, step.cap)
        if tokens > available and not self._rules.cuts_prompts:
            return Limit.NUM_TOKENS
        tokens = min(tokens, available)
        is_alone = not len(self._running)
        limit, slack = self._kv_cache.limit_of_start(request, hits, tokens + num_drafts, is_alone)
        if limit is not None:
            step.slack = slack
            return limit
        if request.table is None:
            if not self._table.free_rows:
                return Limit.BATCH_SIZE
            self._enter(request, reused)
            step.entered.append(request)
        else:
            self._state.num_with_rows -= 1
        self._queue.pop()
        self._running.add(request)
        request.position = request.prepopulated = reused
        self._kv_cache.start(request, hits)
        if num_drafts:
            request.set_draft_tokens(num_drafts)
        self._take(request, tokens, self._kv_cache.missing(request.slot, reused + tokens + num_drafts))
        step.add_chunk(request, tokens, num_drafts)
        return None

    def _enter(self, request: Request, reused: int) -> None:
        """A request of the queue takes a row."""
        order = request.order
        request.enter(self._table, 0)
        request.order = order
        request.reused_tokens = reused

    def _find_in_stores(self, tiers: KvTiers, request: Request, hits: Hits) -> list[int]:
        """The stores of the blocks behind the hits of the head of the queue, as far as there are any. At least one
        token is left to compute."""
        if request.options.return_context_logits:
            return []
        most = (request.prompt_len - 1) // self._limits.tokens_per_block
        return tiers.find(self._kv_cache.names.shared(request, hits.num_blocks, most))

    def _waits_for_prefetch(self, tiers: KvTiers, request: Request) -> bool:
        """Whether the head of the queue is to be asked for later, because blocks of it are on their way to a quicker
        store (`get_num_new_matched_tokens` of a connector returns None)."""
        if not tiers.prefetches or request.table is not None or request.options.return_context_logits:
            return False
        first = self._kv_cache.lookup(request).num_blocks
        most = (request.prompt_len - 1) // self._limits.tokens_per_block
        return tiers.waits_for_prefetch(request, self._kv_cache.names.shared(request, first, most))

    def _load(self, tiers: KvTiers, request: Request, hits: Hits, found: list[int], step: Step) -> Limit | None:
        """Take blocks for what stores have of the head of the queue, and begin to load it (Connectors); or the limit
        that keeps it there, with nothing done."""
        last = hits.num_blocks + len(found)
        end = last * self._limits.tokens_per_block
        is_new = request.table is None
        limit = self._await(request, hits, end, step, len(found), self._reserved())
        if limit is None:
            request.remote_len = end
            if is_new:
                request.reused_tokens = end
            tiers.load(request, self._kv_cache.names.shared(request, hits.num_blocks, last), found)
        return limit

    def _reserved(self) -> int:
        """Blocks that prompts lack which are computed or loaded: a load leaves them free, because what it takes is held
        while nothing runs."""
        cache = self._kv_cache
        begun = [*[one for one in self._running if one.in_context], *self._state.transferring]
        if self._state.num_with_rows:
            begun += [one for one in self._queue.requests if one.table is not None and cache.held[one.slot]]
        return sum([cache.missing(one.slot, one.prompt_len) for one in begun])

    def _await(
        self, request: Request, hits: Hits, end: int, step: Step, loaded: int = 0, reserved: int = 0
    ) -> Limit | None:
        """Take blocks for the first `end` tokens of the head of the queue, of which keys and values come from another
        engine or a store (Connectors); or the limit that keeps it there, with nothing done. It runs no token until
        they have come.

        loaded: number of blocks that come from a store.
        reserved: number of free blocks that are left to others.
        """
        reused = hits.num_blocks * self._limits.tokens_per_block
        is_alone = not len(self._running)
        limit, slack = self._kv_cache.limit_of_start(request, hits, end - reused, is_alone, reserved)
        if limit is not None:
            step.slack = slack
            return limit
        if request.table is None:
            if not self._table.free_rows:
                return Limit.BATCH_SIZE
            self._enter(request, reused)
        else:
            self._state.num_with_rows -= 1
        self._queue.pop()
        request.position = request.prepopulated = reused
        self._kv_cache.start(request, hits, loaded)
        self._kv_cache.grow(request.slot, self._kv_cache.missing(request.slot, end))
        self._state.begin_transfer(request)
        step.receiving.append(request)
        step.repeats = False
        return None

    def _start_received(self, request: Request, step: Step) -> Limit | None:
        """Start the head of the queue, which holds what has come from another engine or a store; or the limit that
        keeps it there, with nothing done."""
        tokens = request.remaining_context
        if step.cap:
            tokens = min(tokens, step.cap)
        if tokens > step.available and not self._rules.cuts_prompts:
            return Limit.NUM_TOKENS
        tokens = min(tokens, step.available)
        limit, slack = self._kv_cache.limit_of_received(request, tokens, not len(self._running))
        if limit is not None:
            step.slack = slack
            return limit
        self._state.num_with_rows -= 1
        self._queue.pop()
        self._running.add(request)
        self._take(request, tokens, self._kv_cache.missing(request.slot, request.position + tokens))
        step.add_chunk(request, tokens)
        if not request.pauses:
            step.entered.append(request)
        return None

    def _padding(self, request: Request, reused: int, step: Step) -> int:
        """Drafts that only pad the step of a request that starts with a single token, so that it has the shape of the
        others' steps (Draft tokens)."""
        if self._drafts is None or step.has_running_chunks or not (reused or step.has_running):
            return 0
        count = self._drafts.settings.max_len
        return count if reused + count + 2 <= self._limits.max_seq_len else 0
