"""The interface of a capacity scheduler policy, and a rule that policies share: the delay for reuse.

A policy decides which active requests may run in an iteration, given KV blocks, LoRA pages and the number of requests.
Its decision holds differences only: a generation request that it does not name runs.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mypy_extensions import mypyc_attr

from ifbbench.engine.plan import LeftOut, Limit, Pause
from ifbbench.engine.request import Request
from ifbbench.engine.tokens import BlockKey
from ifbbench.kv.adapters import NO_LORA, LoraLimits, LoraPages
from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.remote_prompts import awaits_prompt
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.settings.fields import shown, text


@dataclass(slots=True)
class CapacityDecision:
    """Which requests fit.

    admitted: context requests that may run, in the order in which the micro-batch scheduler considers them.
    held: generation requests that may not run; all others run unless paused.
    paused: requests to pause, in the order of the decision.
    left_out: the first request of the active list that does not fit and is not paused.
    generation_first: whether generation comes before context in the order; otherwise it is the order of the list.
    valid_until_next_allocation: whether the decision of a steady policy may differ once a generation request takes a
        block.
    """

    admitted: list[Request] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)
    paused: list[Pause] = field(default_factory=list)
    left_out: LeftOut | None = None
    generation_first: bool = True
    valid_until_next_allocation: bool = False

    def leave_out(self, request: Request, limit: Limit) -> None:
        """Record the first request left out. One that is paused is recorded by its pause."""
        if self.left_out is None and all(pause.victim is not request for pause in self.paused):
            self.left_out = LeftOut(request, limit)


class CapacityPolicy(Protocol):
    """A capacity scheduler policy: reads the active requests and the cache, and changes neither.

    A class may declare `may_pause = False`, if it never pauses, and `is_steady = True`, if its decision stays the same
    while nothing happens but that the generation requests, which all fit, generate tokens. It is not asked then.
    """

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        """Decide for one iteration. Called before blocks of the iteration are allocated or released."""
        ...


def check_decision(decision: Any, active: ActiveRequests, before: list[Request]) -> None:
    """Raise TypeError or ValueError if a user's policy decided what cannot be done, or has changed the active requests.

    before: the active requests before it was asked."""
    if list(map(id, active)) != list(map(id, before)):
        raise ValueError("schedule() changed the active requests; expected that it reads them only")
    _check_type("schedule() returned", decision, CapacityDecision)
    for name, item_type in (("admitted", Request), ("held", Request), ("paused", Pause)):
        _check_type(f"{name} is", found := getattr(decision, name), list)
        for item in found:
            _check_type(f"{name} has", item, item_type)
    left_out = decision.left_out
    if left_out is not None:
        _check_type("left_out is", left_out, LeftOut)
    named = {"admitted": decision.admitted, "held": decision.held, "paused": [one.victim for one in decision.paused]}
    can = {
        "admitted": active.context,
        "held": active.generation,
        "paused": [one for one in before if not one.in_context or one.has_started],
    }
    seen: set[int] = set()
    for name, requests in named.items():
        allowed = set(map(id, can[name]))
        for request in requests:
            if id(request) not in allowed:
                raise ValueError(f"{name} has {shown(request)}; expected {_CAN_BE[name]}")
            if id(request) in seen:
                raise ValueError(f"request {request.request_id} is named twice; expected in one list, once")
            seen.add(id(request))
    for reason in (*decision.paused, *([left_out] if left_out else [])):
        other = reason.beneficiary if isinstance(reason, Pause) else reason.request
        if not any(one is other for one in before):
            raise ValueError(f"{type(reason).__name__} has {shown(other)}; expected active requests")
        text(reason.limit, f"limit of {type(reason).__name__}")


_CAN_BE = {
    "admitted": "requests of active.context",
    "held": "requests of active.generation",
    "paused": "requests that have started",
}


def _check_type(what: str, value: Any, expected: type) -> None:
    if not isinstance(value, expected):
        raise TypeError(f"{what} {shown(value)}; expected {expected.__name__}")


class ReuseDelay:
    """The delay for reuse of one iteration: a request waits if another one is about to compute its first missing block.

    Expected are the first missing blocks of all requests that are past their first chunk, and of those admitted so far.
    (TensorRT-LLM's `beneficialToSkip`. It considers all full blocks of the prompt, while storing leaves the last token
    out, so that of three equal prompts that fill their blocks one starts in each iteration.)
    """

    def __init__(self, active: ActiveRequests, kv_cache: KvCache) -> None:
        self._kv_cache = kv_cache
        self._expected: set[tuple[Hashable, BlockKey]] = set()
        self._is_on = kv_cache.reuse.enabled
        if self._is_on:
            for request in active.table.started.values():
                if (missing := kv_cache.missing_block(request)) is not None:
                    self._expected.add(missing)

    def should_wait(self, request: Request) -> bool:
        """Whether `request` has not started and should wait. If not, its first missing block is expected next."""
        if not self._is_on or not request.in_context or not request.is_first_chunk:
            return False
        if request.remote_len and awaits_prompt(request):
            return False
        missing = self._kv_cache.missing_block(request)
        if missing is None:
            return False
        if missing in self._expected:
            return True
        self._expected.add(missing)
        return False


@mypyc_attr(allow_interpreted_subclasses=True)
class MaxRequests:
    """MAX_REQUESTS: runs the first `max_num_requests` of the list. For a cache without blocks to count."""

    may_pause = False

    def __init__(self, max_num_requests: int, lora: LoraLimits = NO_LORA) -> None:
        self.max_num_requests = max_num_requests
        self.lora = lora

    def schedule(self, active: ActiveRequests, kv_cache: KvCache | None = None) -> CapacityDecision:
        if active.num_with_lora and self.lora.may_bind:
            return self._within_pages(active)
        if len(active) <= self.max_num_requests:
            return CapacityDecision(admitted=list(active.context), generation_first=False)
        first, others = (requests := list(active))[: self.max_num_requests], requests[self.max_num_requests :]
        return CapacityDecision(
            admitted=[request for request in first if request.in_context],
            held=[request for request in others if not request.in_context],
            left_out=LeftOut(others[0], Limit.BATCH_SIZE),
            generation_first=False,
        )

    def _within_pages(self, active: ActiveRequests) -> CapacityDecision:
        """As `schedule`, passing over requests with adapters that do not fit beside those before them."""
        pages, decision, count = LoraPages(self.lora), CapacityDecision(generation_first=False), 0
        for request in active:
            if (is_full := count >= self.max_num_requests) or not pages.fits(request):
                decision.leave_out(request, Limit.BATCH_SIZE if is_full else Limit.LORA_PAGES)
                if not request.in_context:
                    decision.held.append(request)
                continue
            pages.claim(request)
            count += 1
            if request.in_context:
                decision.admitted.append(request)
        return decision
