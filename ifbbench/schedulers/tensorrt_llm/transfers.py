"""Context-only and generation-only requests of TensorRT-LLM: their keys and values are sent, or come from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ifbbench.engine.plan import Plan
from ifbbench.engine.request import NO_MICRO_BATCH, Request
from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.remote_prompts import awaits_prompt, continue_generation
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.policies.policy import CapacityDecision


@dataclass
class Transfers:
    """Requests that hold blocks while keys and values are on their way.

    Those that receive are active, in no list but `ActiveRequests.receiving`. Those that send are complete, and not
    active.

    joined: `Plan.continued` of the next iteration that runs.
    """

    active: ActiveRequests
    kv_cache: KvCache
    joined: list[tuple[Request, int]] = field(default_factory=list)
    sending: dict[Request, None] = field(default_factory=dict)

    def keep(self, request: Request) -> None:
        """`request` is complete, and its blocks are held until it is removed."""
        active, table = self.active, self.active.table
        if request.in_generation:
            active.park(request.slot)
            self.kv_cache.end_generation(request.slot)
        active.num_changes += 1
        active.num_sending += 1
        table.micro_batch[request.slot] = NO_MICRO_BATCH
        table.num_transferring += 1
        self.sending[request] = None
        request.complete()

    def parted(self, fitting: CapacityDecision) -> list[Request]:
        """The requests of `fitting` that are to get blocks for what comes, which are no longer in it."""
        admitted = fitting.admitted
        fitting.admitted = [request for request in admitted if not awaits_prompt(request)]
        return [request for request in admitted if awaits_prompt(request)]

    def take_blocks(self, request: Request, now_s: float) -> None:
        """Take the blocks of a prompt that another engine computes (`_prepare_disagg_gen_init`)."""
        cache, active = self.kv_cache, self.active
        request.set_prepopulated(cache.add_request(request, now_s), cache.attention_window.tokens_per_block)
        active.num_changes += 1
        active.context.remove(request)
        active.receiving[request] = None
        active.table.num_transferring += 1

    def receive(self, requests: Sequence[Request]) -> None:
        """They generate from now on (`_prepare_disagg_gen_transmission_complete`)."""
        cache, active = self.kv_cache, self.active
        for request in requests:
            active.settle()
            continue_generation(request)
            del active.receiving[request]
            active.table.num_transferring -= 1
            active.add_to_generation(request)
            cache.begin_generation(request.slot)
            if cache.reuse.enabled:
                cache.store_generated(request.slot, request.prompt_len - 1)
            self.joined.append((request, 1))

    def enter(self, plan: Plan) -> None:
        """Requests that have their prompts enter with `plan`, unless nothing runs in it. None is held before."""
        if plan.does_nothing:
            joined = {request for request, _ in self.joined}
            plan.held = [request for request in plan.held if request not in joined]
            return
        paused = {pause.victim for pause in plan.paused}
        plan.entered = [request for request, _ in self.joined]
        plan.continued = [one for one in self.joined if one[0] not in paused]
        self.joined = []

    def forget(self, request: Request) -> None:
        """`request` ends, whether or not it is one of these."""
        if request in self.active.receiving:
            del self.active.receiving[request]
            request.complete()  # it is in no list
        elif request in self.sending:
            del self.sending[request]
            self.active.num_sending -= 1
        else:
            return
        self.active.table.num_transferring -= 1
