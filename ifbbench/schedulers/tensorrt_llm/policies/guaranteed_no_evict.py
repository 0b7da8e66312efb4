"""GUARANTEED_NO_EVICT: a request starts only if the blocks to complete it are certain. No request is ever paused.

STATIC_BATCH: the same while no request is in generation; then the batch runs until all its requests are complete.
"""

from mypy_extensions import mypyc_attr

from ifbbench.engine.plan import LeftOut, Limit
from ifbbench.kv.adapters import NO_LORA, LoraLimits, LoraPages
from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.remote_prompts import awaits_prompt
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.policies.policy import CapacityDecision, ReuseDelay


@mypyc_attr(allow_interpreted_subclasses=True)
class GuaranteedNoEvict:
    """Admits context requests in order while all their blocks to completion are free and not reserved by others.

    The first request without enough blocks ends the walk (head-of-line blocking); one without enough LoRA pages is
    skipped. Context requests past their first chunk have no reserve: they ask for their remaining blocks again.

    Prompts that another engine computes go first, and their blocks to completion stay reserved until they generate.

    If nothing would run, because a request of higher priority waits for blocks that such started requests hold, the
    started requests run before it. (TensorRT-LLM's scheduler would never continue.)
    """

    may_pause = False
    is_steady = True
    _is_static = False

    def __init__(self, max_num_requests: int, lora: LoraLimits = NO_LORA) -> None:
        self.max_num_requests = max_num_requests
        self.lora = lora

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        decision = CapacityDecision(held=active.generation[self.max_num_requests :])
        if active.context and self._is_static and active.generation:
            decision.left_out = LeftOut(active.context[0], Limit.STATIC_BATCH)
        elif active.context:
            self._admit(decision, active, kv_cache)
        if decision.held and (decision.left_out is None or decision.held[0].order < decision.left_out.request.order):
            decision.left_out = LeftOut(decision.held[0], Limit.BATCH_SIZE)
        return decision

    def _admit(self, decision: CapacityDecision, active: ActiveRequests, kv_cache: KvCache) -> None:
        running = active.generation_rows[: self.max_num_requests]
        available = kv_cache.free_blocks - kv_cache.reserved_blocks(running)
        for request in active.receiving:
            available -= kv_cache.blocks_to_completion(request)
        pages = LoraPages(self.lora) if active.num_with_lora else None
        if pages is not None:
            for request in active.generation[: self.max_num_requests]:
                pages.claim(request)
        only_started = False
        # All members of a static batch start together, so that none can wait for blocks of another.
        delay = ReuseDelay(active, kv_cache) if kv_cache.reuse.enabled and not self._is_static else None
        admitted, room = decision.admitted, self.max_num_requests - len(running)
        contexts = active.context
        if active.has_remote:
            contexts = sorted(contexts, key=lambda request: not awaits_prompt(request))
        for request in contexts:
            if only_started and not request.has_started:
                continue
            if delay is not None and delay.should_wait(request):
                decision.leave_out(request, Limit.REUSE_DELAY)
                continue
            if len(admitted) >= room:
                decision.leave_out(request, Limit.BATCH_SIZE)
                return
            needed = kv_cache.blocks_to_completion(request)
            if needed > available:
                decision.leave_out(request, Limit.KV_BLOCKS)
                if len(running) or admitted or active.receiving:
                    return
                only_started = True
                continue
            if pages is not None:
                if not pages.fits(request):
                    decision.leave_out(request, Limit.LORA_PAGES)
                    continue
                pages.claim(request)
            available -= needed
            admitted.append(request)


class StaticBatch(GuaranteedNoEvict):
    """GUARANTEED_NO_EVICT that considers context requests only when no request is in generation."""

    _is_static = True
