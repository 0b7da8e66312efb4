"""What a capacity scheduler policy is given and must answer.

A policy decides which active requests may run in this iteration, with regard to KV blocks, LoRA pages and the number of
requests. Its answer is what changes: that generation goes on is implied.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.request import Request


class Limit(StrEnum):
    """What can keep a request out of an iteration. The first three are limits of the settings (`bound_by`)."""

    BATCH_SIZE = "batch_size"
    NUM_TOKENS = "num_tokens"
    KV_BLOCKS = "kv_blocks"
    LORA_PAGES = "lora_pages"
    STATIC_BATCH = "static_batch"
    BEAM_WIDTH = "beam_width"
    IN_FLIGHT = "in_flight"
    REUSE_DELAY = "reuse_delay"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A request that does not run in this iteration, and why: a `Limit`, or a policy's own word for its reason."""

    request: Request
    limit: Limit | str


@dataclass(frozen=True, slots=True)
class Pause:
    """`victim` loses its KV blocks because `beneficiary` did not fit for `limit`. The beneficiary is ahead of it in the
    order, or is the victim itself: the last one started, which would need blocks that there are not."""

    victim: Request
    beneficiary: Request
    limit: Limit | str


@dataclass(slots=True)
class CapacityDecision:
    """Which requests fit.

    admitted: context requests that may run, in the order in which the micro-batch scheduler shall consider them.
    held: generation requests that may not run; all others go on, unless paused.
    paused: in the order of the decision.
    left_out: the first request of the active list that does not fit and is not paused.
    generation_first: whether generation comes before context in the order; otherwise it is the order of the list.
    stands_until_block: of a steady policy: the decision may be another one as soon as generation takes a block.
    """

    admitted: list[Request] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)
    paused: list[Pause] = field(default_factory=list)
    left_out: LeftOut | None = None
    generation_first: bool = True
    stands_until_block: bool = False


class CapacityPolicy(Protocol):
    """A capacity scheduler policy: reads the active requests and the cache, changes neither.

    A class may say of itself `may_pause = False`, if it never does, and `is_steady = True`, if it decides the same
    again while all that happens is that the generation requests, which all fit, make tokens. It is not asked then.
    """

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        """Decide for one iteration. Called before anything of the iteration is allocated or released."""
        ...


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Adapter pages on the device; 0 pages a task means that adapters take none."""

    pages_per_task: int = 0
    max_device_pages: int = 0


class LoraPages:
    """Adapter pages claimed in one iteration: each distinct task id counts once."""

    def __init__(self, limits: LoraLimits) -> None:
        self._limits = limits
        self._claimed: set[int] = set()

    def fits(self, request: Request) -> bool:
        """Whether the adapter of `request` is already claimed or still fits."""
        if request.lora_task_id is None or request.lora_task_id in self._claimed:
            return True
        return (len(self._claimed) + 1) * self._limits.pages_per_task <= self._limits.max_device_pages

    def claim(self, request: Request) -> None:
        """Count the adapter of `request`."""
        if request.lora_task_id is not None:
            self._claimed.add(request.lora_task_id)
