"""Requests whose prompts another engine computes, and those that were retracted to host memory
(`DecodePreallocQueue` and `DecodeTransferQueue` of SGLang, as of October 2026; read, not compared)."""

import numpy as np

from ifbbench.engine.plan import Limit
from ifbbench.engine.request import Request
from ifbbench.schedulers.remote_prompts import continue_generation
from ifbbench.schedulers.sglang.admission import MAX_EXPECTED
from ifbbench.schedulers.sglang.order import max_outputs
from ifbbench.schedulers.sglang.state import Decision, SglangState

# Up to so many running requests, SGLang has rows for twice as many others that wait for keys and values.
FEW_REQUESTS = 32


class RemoteRequests:
    """The queues of a decode engine: requests wait for pages, for their keys and values, and for a place in the batch.

    waiting: requests that wait for pages, in order.
    transferring: requests that have pages, in the order in which they got them, and what has come for them.
    arrived: requests that may join the batch.
    in_host: retracted requests, which are resumed before any other gets pages.
    """

    def __init__(self, state: SglangState) -> None:
        self.waiting: list[Request] = []
        self.transferring: dict[Request, bool] = {}
        self.arrived: list[Request] = []
        self.in_host = state.in_host
        self.limit: Limit | None = None  # why the first of `waiting` waits
        self._state = state

    @property
    def is_used(self) -> bool:
        return bool(self.transferring or self.waiting or self.arrived or self.in_host)

    @property
    def is_settled(self) -> bool:
        """Whether nothing changes after `decide` while the same requests decode: what waits has no row, and what has
        come no place in the batch."""
        if self.in_host or (self.waiting and self.limit != Limit.BATCH_SIZE):
            return False
        return not self.arrived or len(self._state.running) >= self._state.limits.max_batch_size

    def remove(self, request: Request) -> None:
        """`request` ends."""
        for requests in (self.waiting, self.arrived, self.in_host):
            if request in requests:
                requests.remove(request)
        if request in self.transferring and not self.transferring.pop(request):
            self._state.table.num_transferring -= 1

    def receive(self, request: Request) -> None:
        """What another engine sends has come."""
        self.transferring[request] = True
        self._state.table.num_transferring -= 1
        self._state.kv_cache.filled_tokens += request.prompt_len - request.position
        request.position = request.prompt_len

    def decide(self, decision: Decision) -> None:
        """Resume retracted requests; or else let requests get pages, and those join whose keys and values have come
        (`process_decode_queue`, `get_new_prebuilt_batch`)."""
        if self.in_host:
            self._resume()
        if self.in_host:
            if not len(self._state.running):  # SGLang would wait for ever for the pages of those that have come
                self._take_arrived()
        else:
            self._reserve(decision)
            self._take_arrived()
        self._join(decision)

    def _take_arrived(self) -> None:
        for request in [one for one, has_come in self.transferring.items() if has_come]:
            del self.transferring[request]
            self.arrived.append(request)
        self._sort(self.arrived)

    def _sort(self, requests: list[Request]) -> None:
        if self._state.rules.is_priority:
            requests.sort(key=lambda request: -request.priority)

    def _join(self, decision: Decision) -> None:
        """The first of those that have come decode from now on, as many as the batch has room for."""
        state = self._state
        room = max(0, state.limits.max_batch_size - len(state.running))
        joining, self.arrived = self.arrived[:room], self.arrived[room:]
        for request in joining:
            if request.in_context:
                continue_generation(request)
                state.kv_cache.publish(request, request.prompt_len)
                decision.entered.append(request)
        state.running.join(joining)
        decision.continued += joining

    # Pages.

    def _reserve(self, decision: Decision) -> None:
        """Requests get pages for their prompts, in order, while the budget has room for each, and for what it and the
        running requests may generate (`pop_preallocated`)."""
        state, cache, self.limit = self._state, self._state.kv_cache, None
        self._sort(self.waiting)
        while self.waiting:
            request = self.waiting[0]
            if not self._has_row():
                self.limit = Limit.BATCH_SIZE
                return
            match = cache.match(request, request.prompt_len - 1)
            if match is not None:
                match = match.on_device()
            cache.lock(match)
            missing = request.prompt_len - (0 if match is None else match.length)
            retractable, longest = self._of_running()
            expected = missing + min(max_outputs(request), MAX_EXPECTED) - retractable
            if max(missing + state.rules.reserved_tokens, expected) > self._budget(longest - retractable):
                cache.unlock(match)
                self.limit = Limit.KV_BLOCKS
                return
            del self.waiting[0]
            order = request.order
            request.enter(state.table, 0)
            request.order = order
            request.position = request.prepopulated = request.reused_tokens = request.prompt_len - missing
            cache.start(request, match)
            self._take_pages(request, request.prompt_len)
            self.transferring[request] = False
            state.table.num_transferring += 1
            decision.receiving.append(request)

    def _resume(self) -> None:
        """Retracted requests get their pages again, in order, while each has room for what is reserved for it, too
        (`resume_retracted_reqs`); the first one has if no other request holds pages."""
        state, cache = self._state, self._state.kv_cache
        while self.in_host:
            request = self.in_host[0]
            tokens, reserved = state.computed_by(request), state.rules.reserved_tokens
            is_alone = not (len(state.running) or self.transferring or self.arrived or state.last or state.chunked)
            if tokens + (cache.page_size if is_alone else reserved) > self._budget(0, retracted=False):
                return
            del self.in_host[0]
            cache.restart(request.slot)
            self._take_pages(request, tokens)
            cache.filled_tokens += tokens
            self.arrived.append(request)

    def _take_pages(self, request: Request, tokens: int) -> None:
        cache = self._state.kv_cache
        count = cache.missing(request.slot, tokens)
        cache.make_room(count * cache.page_size)
        cache.grow(request.slot, count)

    def _has_row(self) -> bool:
        """Whether a further request may hold pages. Rows remain for those whose prompts are computed here."""
        state = self._state
        limit, running = state.limits.max_batch_size, len(state.running)
        rows = 3 * limit if limit <= FEW_REQUESTS else limit
        is_left = running + len(self.transferring) + len(self.arrived) < rows
        return is_left and len(state.table.free_rows) > max(0, limit - running)

    def _of_running(self) -> tuple[int, int]:
        """The tokens of the running requests, which can be retracted, and those that the longest of them may have."""
        table, rows = self._state.table, self._state.running.rows
        if not len(rows):
            return 0, 0
        before = table.original_prompt_len[rows]
        # Nothing is deferred in the table: the requests of a side do not run jointly.
        tokens = before + table.joined[rows] + np.maximum(table.confirmed[rows], 0)
        longest = before + np.minimum(table.reserved[rows] + table.joined[rows], MAX_EXPECTED)
        return int(tokens.sum()), int(longest.max())

    def _budget(self, needed: int, retracted: bool = True) -> int:
        """Tokens of the cache that are not reserved (`_allocatable_token_budgets`).

        needed: what the longest running request may need beside what can be retracted.
        retracted: requests that have their part reserved.
        """
        state, reserved = self._state, self._state.rules.reserved_tokens
        num_active = len(state.running) + len(self.transferring) + len(self.arrived)
        budget = state.kv_cache.available - max(reserved * num_active, needed)
        if retracted:
            budget -= sum([state.computed_by(request) + reserved for request in self.in_host])
        return budget
