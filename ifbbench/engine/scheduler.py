"""One iteration's scheduling: the capacity policy, then the micro-batch scheduler, and what both together mean."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.batching_config import BatchingConfig
from ifbbench.engine.chunking import ChunkLimits
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.lockstep import Lockstep
from ifbbench.engine.micro_batch import MicroBatch, MicroBatchScheduler
from ifbbench.engine.policies import CapacityDecision, CapacityPolicy, LeftOut, Limit, Pause, PolicyFailed
from ifbbench.engine.request import Request

_NO_ROWS: NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass(slots=True)
class Plan:
    """What an iteration shall do.

    context: requests with a chunk to run. rows: table rows of the generation requests to run. idle: rows of complete
    members of a static batch. held: generation requests that do not run. paused: in the order of the decision.
    blocked: the first requests that each scheduler left out, and those paused. num_chunk_tokens: of the chunk, where
    there is one only. stands_until_block: see CapacityDecision.
    """

    context: list[Request]
    rows: NDArray[np.int64]
    idle: NDArray[np.int64] = field(default_factory=lambda: _NO_ROWS)
    held: list[Request] = field(default_factory=list)
    paused: list[Pause] = field(default_factory=list)
    blocked: tuple[LeftOut, ...] = ()
    num_chunk_tokens: int = 0
    stands_until_block: bool = False

    @property
    def does_nothing(self) -> bool:
        return not (self.context or len(self.rows) or len(self.idle) or self.paused)

    @property
    def is_steady(self) -> bool:
        """Whether all generation requests run, and nothing else does."""
        return not (self.context or self.held or self.paused or len(self.idle))

    def output_rows(self, completing: list[Request]) -> NDArray[np.int64]:
        """[outputs], the table row of each, in the order of the batches. completing: whose prompt is complete then."""
        if not completing and not len(self.idle):
            return self.rows
        return np.concatenate([np.array([request.slot for request in completing], np.int64), self.rows, self.idle])

    @property
    def reasons(self) -> str:
        """Whom each scheduler left out first, and why."""
        return ", ".join(f"request {item.request.request_id} by {item.limit}" for item in self.blocked)

    def first_left_out(self, waiting: list[Request]) -> LeftOut | None:
        """The first request that does not run, or whose chunk was cut. `waiting`: those that are not active yet."""
        if self.blocked:
            return min(self.blocked, key=lambda left_out: left_out.request.order)
        return LeftOut(waiting[0], Limit.BATCH_SIZE) if waiting else None


class Scheduler:
    """Both schedulers over the same requests and cache. Decides, and changes nothing but the sizes of chunks."""

    def __init__(
        self,
        config: BatchingConfig,
        policy: CapacityPolicy,
        active: ActiveRequests,
        kv_cache: KvCache,
        lockstep: Lockstep | None,
    ) -> None:
        self._policy = policy
        self._policy_name = config.effective_policy
        self._micro_batch = _micro_batch_scheduler(config)
        self._active = active
        self._kv_cache = kv_cache
        self._lockstep = lockstep
        self._chunk_unit = config.chunk_unit or 0
        is_steady = getattr(policy, "is_steady", False) and not getattr(policy, "may_pause", True)
        self._may_repeat = is_steady and not config.reuse.enabled and lockstep is None
        # The latest decision, and how often requests had come or gone then.
        self._latest: tuple[Plan, int] | None = None

    def plan(self) -> Plan:
        """Schedule one iteration."""
        if self._lockstep is not None and self._active.generation:
            return self._next_static_step(self._lockstep)
        if (plan := self._same_again()) is not None:
            return plan
        try:
            fitting = self._policy.schedule(self._active, self._kv_cache)
        except Exception as error:  # a user's policy may fail in any way
            raise PolicyFailed(self._policy_name, error) from error
        selected = self._micro_batch.schedule(self._active, fitting)
        held = fitting.held + selected.held
        rows = self._rows_without([*held, *(pause.victim for pause in fitting.paused)])
        plan = Plan(
            selected.context, rows, held=held, paused=fitting.paused, blocked=_blocked(fitting, selected),
            stands_until_block=fitting.stands_until_block,
        )  # fmt: skip
        if len(plan.context) == 1:
            plan.num_chunk_tokens = plan.context[0].chunk
        self._latest = (plan, self._active.num_changes) if self._may_repeat else None
        return plan

    def _same_again(self) -> Plan | None:
        """The latest decision, if it is sure to be the next one too: the same requests are there, and the one prompt
        that had a chunk of the budget to itself is long enough for another."""
        if self._latest is None or self._latest[1] != self._active.num_changes:
            return None
        plan = self._latest[0]
        if len(plan.context) != 1 or plan.held or plan.num_chunk_tokens == 0:
            return None
        request = plan.context[0]
        if request.remaining_context < plan.num_chunk_tokens + self._chunk_unit or request.num_draft_tokens:
            return None
        request.set_chunk(plan.num_chunk_tokens)
        return plan

    def _next_static_step(self, lockstep: Lockstep) -> Plan:
        """A static batch that has started runs to its end; there is nothing to decide until then."""
        waiting = self._active.context[:1]
        return Plan(
            context=[],
            rows=self._rows_without(lockstep.complete),
            idle=lockstep.idle_rows,
            held=lockstep.complete,
            blocked=tuple(LeftOut(request, Limit.STATIC_BATCH) for request in waiting),
        )

    def _rows_without(self, held: list[Request]) -> NDArray[np.int64]:
        """Rows of the generation requests but for `held`, in the order of the batch."""
        rows = self._active.rows_by_lora
        if held:
            rows = rows[~np.isin(rows, [request.slot for request in held])]
        return rows


def _micro_batch_scheduler(config: BatchingConfig) -> MicroBatchScheduler:
    if config.chunk_unit is None:
        return MicroBatchScheduler(config.max_batch_size, config.max_num_tokens)
    limits = ChunkLimits(config.chunk_unit, config.max_num_tokens)
    return MicroBatchScheduler(config.max_batch_size, config.max_num_tokens, config.chunking_policy, limits)


def _blocked(fitting: CapacityDecision, selected: MicroBatch) -> tuple[LeftOut, ...]:
    found = [LeftOut(pause.victim, pause.limit) for pause in fitting.paused]
    if fitting.left_out is not None:
        found.append(fitting.left_out)
    if selected.left_out is not None:
        found.append(selected.left_out)
    return tuple(found)
