"""The scheduling of one iteration: the capacity policy, then the micro-batch scheduler; and static batches."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ifbbench.engine.active import NO_ROWS, ActiveRequests, Rows
from ifbbench.engine.config import CONTIGUOUS_POLICY, BatchingConfig, BatchingType
from ifbbench.engine.interfaces import CapacityPolicy
from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import UNLIMITED
from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.tensorrt_llm.dynamic_limits import DynamicLimits
from ifbbench.schedulers.tensorrt_llm.micro_batch import ChunkLimits, MicroBatchScheduler
from ifbbench.schedulers.tensorrt_llm.policies import POLICY_CLASSES, CheckedPolicy, is_steady
from ifbbench.schedulers.tensorrt_llm.policies.policy import LeftOut, Limit, Pause

_log = logging.getLogger("ifbbench.scheduler")


@dataclass(slots=True)
class Plan:
    """The decision for one iteration.

    context: requests with a chunk to run. rows: table rows of the generation requests to run, in batch order.
    idle: rows of complete members of a static batch. held: generation requests that do not run. paused: requests to
    pause, in this order. blocked: the first request that each scheduler left out, and those paused.
    stands_until_block: see CapacityDecision.
    """

    context: list[Request]
    rows: Rows
    idle: Rows = field(default_factory=lambda: NO_ROWS)
    held: list[Request] = field(default_factory=list)
    paused: list[Pause] = field(default_factory=list)
    blocked: tuple[LeftOut, ...] = ()
    stands_until_block: bool = False

    @property
    def does_nothing(self) -> bool:
        return not (self.context or len(self.rows) or len(self.idle) or self.paused)

    def output_rows(self, completing: list[Request]) -> Rows:
        """[outputs], the table row of each, in batch order. completing: requests on their last chunk."""
        if not completing and not len(self.idle):
            return self.rows
        return np.concatenate([np.array([request.slot for request in completing], np.int64), self.rows, self.idle])

    def first_left_out(self, waiting: list[Request]) -> LeftOut | None:
        """The first request that does not run or has its chunk cut. waiting: requests that are not active yet."""
        if self.blocked:
            return min(self.blocked, key=lambda left_out: left_out.request.order)
        return LeftOut(waiting[0], Limit.BATCH_SIZE) if waiting else None


class Scheduler:
    """Both schedulers over the same requests and cache. Decides, and changes only the sizes of chunks.

    Static batches (V1): complete members stay in the batch, computed along as padding, until the last one is complete;
    no request is admitted meanwhile. (TensorRT-LLM's `TrtGptModelV1` runs the whole generation of a batch in one call;
    here each step is an iteration, so that the time of every token is known.) complete: these members.
    """

    def __init__(
        self, config: BatchingConfig, policy: CapacityPolicy, active: ActiveRequests, kv_cache: KvCache
    ) -> None:
        self.is_static = config.batching_type is BatchingType.V1
        self.complete: list[Request] = []
        self._name_of_policy = name = config.effective_policy
        is_built_in = name in POLICY_CLASSES or name == CONTIGUOUS_POLICY
        self._policy: CapacityPolicy = policy if is_built_in else CheckedPolicy(name, policy)
        is_chunked = config.chunk_unit is not None
        self._micro_batch = MicroBatchScheduler(
            config.micro_batch_size,
            config.max_num_tokens,
            config.chunking_policy if is_chunked else None,
            ChunkLimits(config.chunk_unit or 1, config.max_num_tokens if is_chunked else None),
            config.num_micro_batches,
        )
        self._active = active
        self._kv_cache = kv_cache
        self._chunk_unit = config.chunk_unit or 0
        self._may_pause = getattr(policy, "may_pause", True)
        # Before each iteration, where limits are tuned; then no decision is certain to stand.
        self.tune_limits: Callable[[ActiveRequests], None] | None = None
        if config.has_dynamic_limits:
            self.tune_limits = DynamicLimits(config, self._micro_batch).update
        self._may_repeat = is_steady(policy) and config.num_micro_batches == 1 and not config.drafts.max_len
        self._may_repeat = self._may_repeat and not (self.is_static or self.tune_limits)
        self._is_logged = _log.isEnabledFor(logging.DEBUG)
        # The latest plan, and `num_changes` of the active requests and `num_reuse_changes` when it was made.
        self._latest: tuple[Plan, int, int] | None = None

    def plan(self) -> Plan:
        """Schedule one iteration. Raises PolicyFailed if a user's policy raises."""
        if self.is_static and self._active.generation:
            return self._next_static_step()
        if (plan := self._repeated_plan()) is not None:
            return plan
        fitting = self._policy.schedule(self._active, self._kv_cache)
        selected = self._micro_batch.schedule(self._active, fitting)
        held, paused = fitting.held + selected.held, [pause.victim for pause in fitting.paused]
        blocked = [LeftOut(pause.victim, pause.limit) for pause in fitting.paused]
        if fitting.left_out is not None:
            blocked.append(fitting.left_out)
        if selected.left_out is not None:
            blocked.append(selected.left_out)
        if self._active.table.any_in_flight:
            # What is in flight in another micro batch runs.
            in_flight = self._active.table.in_other_micro_batch
            held = [request for request in held if not in_flight(request.slot)]
            blocked = [one for one in blocked if one.request in paused or not in_flight(one.request.slot)]
        plan = Plan(
            selected.context,
            self._rows_without(held + paused),
            held=held,
            paused=fitting.paused,
            blocked=tuple(blocked),
            stands_until_block=fitting.stands_until_block,
        )
        self._latest = (plan, self._active.num_changes, self._kv_cache.num_reuse_changes)
        if self._is_logged:
            self._log_decisions(plan)
        return plan

    def times_certain(self, plan: Plan) -> int:
        """In how many iterations `plan`, which was just made, is certain to run, this one included, while nothing but
        generation changes what requests can reuse: the one prompt that it has may have tokens for more chunks of the
        same size."""
        if len(plan.context) > 1 or not self._may_repeat or plan.held or plan.paused:
            return 1
        if not plan.context:
            return UNLIMITED
        request, size = plan.context[0], plan.context[0].chunk
        # The first chunk may begin after tokens to reuse.
        may_differ = self._kv_cache.reuse.enabled and request.is_first_chunk
        if self._may_pause or may_differ or request.num_draft_tokens:
            return 1
        return 1 + max(0, (request.remaining_context - size - self._chunk_unit) // size)

    def end_together(self, done: list[Request]) -> list[Request]:
        """Members of a static batch are done. Returns the whole batch if that completes it, else an empty list."""
        self.complete += done
        if len(self.complete) < len(self._active.generation):
            return []
        finished, self.complete = self.complete, []
        return finished

    def _repeated_plan(self) -> Plan | None:
        """The latest plan, if the next decision is certain to be the same: only generation ran, no request has entered,
        changed phase or left, and what a waiting one can reuse has not changed. A policy that may pause decides again
        if any request waits, or unless each has a block."""
        active, cache = self._active, self._kv_cache
        if not self._may_repeat or self._latest is None or self._latest[1] != active.num_changes:
            return None
        plan = self._latest[0]
        if plan.context or plan.held or plan.paused or active.table.any_wide_steps:
            return None
        if active.context and (self._may_pause or self._latest[2] != cache.num_reuse_changes):
            return None
        return None if self._may_pause and not cache.has_blocks_for(len(plan.rows)) else plan

    def _next_static_step(self) -> Plan:
        """A static batch that has started runs to its end; until then there is nothing to decide."""
        idle = np.array([request.slot for request in self.complete], np.int64)
        blocked = tuple(LeftOut(request, Limit.STATIC_BATCH) for request in self._active.context[:1])
        return Plan([], self._rows_without(self.complete), idle, held=list(self.complete), blocked=blocked)

    def _log_decisions(self, plan: Plan) -> None:
        """Log what becomes of each active request, with the blocks that the policy takes it to need."""
        cache, table = self._kv_cache, self._active.table
        pauses = {pause.victim.slot: pause for pause in plan.paused}
        limits = {one.request.slot: one.limit for one in plan.blocked}
        runs = {request.slot for request in plan.context} | set(plan.rows.tolist())
        for request in self._active:
            if request.in_generation:
                needed = cache.counted(cache.step_needs(np.array([request.slot]), request.num_draft_tokens)[0])
            elif self._may_pause:
                needed = cache.first_chunk_need(request)
            else:
                needed = cache.blocks_to_completion(request)
            if request.slot in pauses:
                pause = pauses[request.slot]
                decision = f"pause: request {pause.beneficiary.request_id} does not fit for {pause.limit}"
            elif request.slot in runs:
                chunk = f", context tokens {request.position} to {request.position + request.chunk - 1}"
                decision = "continue" if request.has_started else "start"
                decision += chunk if request.in_context else ", generation"
            elif table.in_other_micro_batch(request.slot):
                decision = f"in flight in micro batch {table.micro_batch[request.slot]}"
            else:
                decision = f"left out: {limits.get(request.slot, 'behind another request')}"
            _log.debug(
                "request %d: policy %s, needs %s blocks, %s free: %s",
                request.request_id,
                self._name_of_policy,
                needed,
                cache.free_blocks,
                decision,
            )

    def _rows_without(self, held: list[Request]) -> Rows:
        """Rows of the generation requests but `held`, in batch order."""
        rows = self._active.ready(self._active.batch_rows)
        if held:
            rows = rows[~np.isin(rows, [request.slot for request in held])]
        return rows
