"""Prompts of which stores have blocks: TensorRT-LLM's KV cache connector (`KvCacheConnectorManager`), one that loads
asynchronously and saves blocks once they are filled."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from ifbbench.engine.plan import ContextChunk, Plan
from ifbbench.engine.request import Request
from ifbbench.kv.block_names import BlockNames
from ifbbench.kv.interface import KvCache
from ifbbench.kv.tiers import KvTiers
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests


class Loads:
    """What an engine reads from stores, and writes there.

    A prompt is looked for when it takes its blocks, once it was scheduled (`get_num_new_matched_tokens`). If stores
    have some of it, the request leaves the batch, of which nothing takes its part
    (`take_scheduled_requests_pending_load`), and waits with all its blocks, in no list but `ActiveRequests.receiving`;
    then it is scheduled again."""

    def __init__(self, tiers: KvTiers, active: ActiveRequests, kv_cache: KvCache) -> None:
        self.tiers, self._active, self._cache = tiers, active, kv_cache
        self._size = kv_cache.attention_window.tokens_per_block
        self._names = BlockNames(self._size)
        self._in_flight: deque[tuple[Sequence[ContextChunk], int]] = deque()  # chunks of so many iterations

    def begin(self, plan: Plan, new: Sequence[Request]) -> None:
        """The requests `new` of `plan` have just taken the blocks of their prompts: those of which stores have further
        blocks leave it, and wait for them. At least one token is left to compute."""
        if not new:
            return
        loading = [request for request in new if self._begins(request)]
        if loading:
            plan.context = [request for request in plan.context if request not in loading]
            plan.receiving = loading

    def _begins(self, request: Request) -> bool:
        if request.options.return_context_logits:
            return False
        first = request.position // self._size
        keys = self._names.shared(request, first, (request.prompt_len - 1) // self._size)
        found = self.tiers.find(keys)
        if not found:
            return False
        active, counters = self._active, self._cache.counters
        end, reused = (first + len(found)) * self._size, -(-request.position // self._size)
        counters.reused += first + len(found) - reused
        counters.missed -= first + len(found) - reused
        request.remote_len, request.chunk = end, 0
        if not request.pauses:
            request.reused_tokens = end
        active.num_changes += 1
        active.context.remove(request)
        active.receiving[request] = None
        active.table.num_transferring += 1
        self.tiers.load(request, keys[: len(found)], found)
        return True

    def receive(self, requests: Sequence[Request]) -> None:
        """What they waited for is in their blocks: they go on behind it, as a prompt does behind its first chunk."""
        active = self._active
        for request in requests:
            del active.receiving[request]
            active.table.num_transferring -= 1
            request.position, request.remote_len = request.remote_len, 0
            active.table.started[request.slot] = request
            active.num_changes += 1
            insort(active.context, request, key=attrgetter("order"))

    def decided_again(self, plan: Plan, decide: Callable[[], Plan], start: Callable[[Plan], None]) -> Plan:
        """The plan of this iteration: where all that would run waits for stores now, the next one begins at once."""
        num_receiving = 0
        while plan.does_nothing and len(receiving := plan.receiving) > num_receiving:
            num_receiving, plan = len(receiving), decide()
            start(plan)
            plan.receiving = [*receiving, *plan.receiving]
        return plan

    def submitted(self, chunks: Sequence[ContextChunk], count: int = 1) -> None:
        """`count` iterations are in flight, the first with these chunks."""
        self._in_flight.append((chunks, count))

    def collected(self, count: int = 1) -> None:
        """The oldest `count` iterations in flight were collected: write the blocks that their prompts fill."""
        while count:
            chunks, of_these = self._in_flight.popleft()
            for chunk in chunks:
                if not chunk.request.has_left:
                    self.tiers.write_filled(self._names, chunk.request, chunk.start, chunk.start + chunk.length)
            taken = min(count, of_these)
            if taken < of_these:
                self._in_flight.appendleft(((), of_these - taken))
            count -= taken

    def end(self, request: Request) -> None:
        """A request ends: write the blocks that its outputs fill. Its last token was not computed."""
        if not request.in_context:
            computed = request.original_prompt_len + request.num_outputs - 1
            self.tiers.write_filled(self._names, request, request.prompt_len, computed)
        self._names.forget(request)
        self.tiers.forget(request)
