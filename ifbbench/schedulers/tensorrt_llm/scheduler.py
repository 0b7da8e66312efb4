"""TensorRT-LLM's scheduler: its queue, its active requests, their KV blocks, and what runs in each iteration.

In each iteration the capacity policy decides which active requests fit, and the micro-batch scheduler which of these
run now. (`TrtGptModelInflightBatching`.)
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ifbbench.clock import Clock
from ifbbench.engine.arrays import Rows
from ifbbench.engine.batch import AdapterUse, BatchLayout, BlockCopy, StepInputs, StepOutputs
from ifbbench.engine.drafts import DraftInputs
from ifbbench.engine.interfaces import RequestSource, SchedulerStalled
from ifbbench.engine.passes import confirm
from ifbbench.engine.plan import ContextChunk, LeftOut, Limit, Plan
from ifbbench.engine.records import CacheState, InFlightIteration
from ifbbench.engine.request import NO_MICRO_BATCH, Request
from ifbbench.engine.retention import NO_RETENTION
from ifbbench.kv.adapters import AdapterCache, OutOfAdapterPages, distinct_tasks
from ifbbench.kv.blocks import OutOfBlocks
from ifbbench.kv.tiers import KvTiers
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.refusals import AdmissionLimits
from ifbbench.schedulers.single_iterations import SingleIterations
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.admission import Admission
from ifbbench.schedulers.tensorrt_llm.chunks import ChunkLimits
from ifbbench.schedulers.tensorrt_llm.decision_log import log, log_decisions
from ifbbench.schedulers.tensorrt_llm.drafts import Drafts
from ifbbench.schedulers.tensorrt_llm.dynamic_limits import DynamicLimits
from ifbbench.schedulers.tensorrt_llm.loads import Loads
from ifbbench.schedulers.tensorrt_llm.micro_batch import MicroBatchScheduler
from ifbbench.schedulers.tensorrt_llm.policies.policy import CapacityPolicy
from ifbbench.schedulers.tensorrt_llm.releases import findable_tokens, is_pause_in_flight, store_generated
from ifbbench.schedulers.tensorrt_llm.transfers import Transfers
from ifbbench.schedulers.tensorrt_llm.v1_batch import V1Batch
from ifbbench.settings.modes import BatchingType


class TensorRtLlmScheduler(SingleIterations):
    """A `Scheduler` (see `ifbbench.engine.interfaces`) with the rules of TensorRT-LLM's batch manager.

    One whose plans repeat is a `RepeatingScheduler`.

    adapters: pages of LoRA adapters, None without a cache of them.
    active: the running set.
    kv_cache: blocks of the requests.
    """

    def __init__(
        self, config: BatchingConfig, clock: Clock, policy: CapacityPolicy, adapters: AdapterCache | None, has_ids: bool
    ) -> None:
        """clock: gives the times by which blocks of equal priority are evicted in order.
        has_ids: whether blocks have ids even if no requests share them.
        """
        self.config = config
        self.name = f"policy {config.policy}"
        self.max_in_flight, self.num_micro_batches = config.max_in_flight, config.num_micro_batches
        self.table = config.make_table()
        self.active = ActiveRequests(self.table)
        self.adapters, self._clock = adapters, clock
        self.kv_cache = cache = config.make_cache(has_ids=has_ids)
        self.layout = BatchLayout(
            (cache.block_tables, *cache.window_tables),
            cache.attention_window.tokens_per_block,
            config.max_in_flight,
            has_separate_passes=config.batching_type is BatchingType.INFLIGHT,
            is_padded=config.batching_type is BatchingType.V1,
        )
        limits = AdmissionLimits(config, policy, self.adapters)
        self._admission = Admission(limits, config.max_active, config.max_queue_size)
        self.policy = policy
        self.may_pause = getattr(policy, "may_pause", True)
        is_chunked = config.chunk_unit is not None
        self._micro_batch = MicroBatchScheduler(
            config.micro_batch_size,
            config.token_budget,
            config.chunking_policy if is_chunked else None,
            ChunkLimits(config.chunk_unit or 1, config.token_budget),
            config.num_micro_batches,
        )
        self._dynamic_limits = DynamicLimits(config, self._micro_batch) if config.has_dynamic_limits else None
        self.drafts = Drafts(config.drafts, self.active, cache)
        self._reuses_blocks = config.reuse.enabled
        self._is_async = config.is_async
        self._v1_batch = V1Batch(self.active, cache) if config.batching_type is BatchingType.V1 else None
        # Whether the latest plan may be returned again.
        self._may_repeat = getattr(policy, "is_steady", False) and not (
            config.num_micro_batches > 1 or config.drafts.max_len or self._v1_batch is not None
        )
        # The latest plan, with `num_changes` of the active requests and `num_reuse_changes` when it was made.
        self._latest: tuple[Plan, int, int] | None = None
        self._iteration, self._now_s, self._admits = 0, 0.0, False
        # Whether a request had retention priorities of its own, which may expire.
        self._any_retention = False
        self._transfers = Transfers(self.active, cache)
        self._loads: Loads | None = None
        self._is_logged = log.isEnabledFor(logging.DEBUG)

    # The queue.

    @property
    def waiting(self) -> Sequence[Request]:
        return self._admission.waiting

    def admit(self, source: RequestSource) -> Sequence[Request]:
        return [one for one in self._admission.admit(self.active, source) if not one.remote_len]

    def find(self, request_id: int) -> Request | None:
        return self._admission.find(request_id)

    def remove(self, request: Request) -> None:
        if request.table is None:
            self._admission.withdraw(request)
            return
        if self._v1_batch is not None:
            self._v1_batch.forget(request)
        if self._loads is not None:
            self._loads.end(request)
        if self.kv_cache.holds(request.slot):
            self._release_blocks(request)
        if self.table.num_transferring:
            self._transfers.forget(request)
        self.active.remove(request)
        self._admission.forget(request)
        request.complete()

    # Keys and values that are sent to other engines, or come from them.

    def keep(self, request: Request) -> None:
        self._transfers.keep(request)

    def receive(self, requests: Sequence[Request]) -> None:
        (self._loads or self._transfers).receive(requests)

    def use_tiers(self, tiers: KvTiers) -> None:
        """Load blocks from stores, and write them there. Called once, before the first request."""
        self._loads = Loads(tiers, self.active, self.kv_cache)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        return self.kv_cache.take_copies() if self._reuses_blocks else ()

    # The decision for one iteration.

    def schedule(
        self, iteration: int, now_s: float, in_flight: Sequence[InFlightIteration], collect: Callable[[], None]
    ) -> Plan:
        """Raises PolicyFailed if a user's policy raises."""
        return self.start(self.decide(iteration, now_s, in_flight, collect), now_s)

    def decide(
        self, iteration: int, now_s: float, in_flight: Sequence[InFlightIteration], collect: Callable[[], None]
    ) -> Plan:
        """The first part of `schedule`, which takes no blocks."""
        self._iteration, self._now_s = iteration, now_s
        if self._dynamic_limits is not None and self._dynamic_limits.update(self.active):
            self._latest = None
        if self.num_micro_batches > 1:
            self.table.begin_turn(iteration % self.num_micro_batches)
        if self.config.drafts.max_len:
            self.drafts.propose()
        plan = self._decide()
        while plan.paused and is_pause_in_flight(plan, in_flight, self.table, self._is_async):
            # The token in flight of a request to pause will join its prompt: collect it, then decide again.
            while is_pause_in_flight(plan, in_flight, self.table, self._is_async):
                collect()
            plan = self._decide()
        return plan

    def hold_prompts(self, plan: Plan) -> None:
        """The prompts of `plan`, which was just decided, do not run: those of all ranks are held back."""
        if plan.context:
            plan.blocked = (LeftOut(plan.context[0], Limit.ATTENTION_DP), *plan.blocked)
            plan.context, self._latest = [], None

    def start(self, plan: Plan, now_s: float) -> Plan:
        """The second part of `schedule`: pauses what `plan` pauses, and takes the blocks of the prompts that start."""
        for pause in plan.paused:
            self._pause(pause.victim)
        self._start_prompts(plan, now_s)
        if self._loads is not None:
            plan = self._loads.decided_again(plan, self._decide, lambda again: self._start_prompts(again, now_s))
        if self._transfers.joined:
            self._transfers.enter(plan)
        if self._any_retention:
            plan.valid_until_s = self.kv_cache.next_expiry_s
        if self.num_micro_batches > 1:
            plan.in_flight = self.table.num_in_flight
        return plan

    def _decide(self) -> Plan:
        if self._v1_batch is not None and self._v1_batch.is_running:
            return self._v1_batch.next_step()
        if (plan := self._repeated_plan()) is not None:
            return plan
        fitting = self.policy.schedule(self.active, self.kv_cache)
        receiving = self._transfers.parted(fitting) if self.active.has_remote else []
        selected = self._micro_batch.schedule(self.active, fitting)
        self._admits = len(fitting.admitted) > 0
        held, paused = fitting.held + selected.held, [pause.victim for pause in fitting.paused]
        blocked = [LeftOut(pause.victim, pause.limit) for pause in fitting.paused]
        context, generation = selected.context, self._rows_without(held + paused)
        if fitting.left_out is not None:
            blocked.append(fitting.left_out)
        if selected.left_out is not None:
            blocked.append(selected.left_out)
        if self.table.any_in_flight:
            # Requests in flight in another micro batch do run.
            in_flight = self.table.in_other_micro_batch
            held = [request for request in held if not in_flight(request.slot)]
            blocked = [one for one in blocked if one.request in paused or not in_flight(one.request.slot)]
        plan = Plan(
            context,
            generation,
            held=held,
            paused=fitting.paused,
            blocked=tuple(blocked),
            valid_until_next_allocation=fitting.valid_until_next_allocation,
            receiving=receiving,
        )
        self._latest = (plan, self.active.num_changes, self.kv_cache.num_reuse_changes if self._reuses_blocks else 0)
        if self._is_logged:
            log_decisions(plan, self.active, self.kv_cache, self.config.effective_policy, self.may_pause)
        return plan

    def _repeated_plan(self) -> Plan | None:
        """The latest plan, if the next decision is certain to be the same: only generation ran, no request has entered,
        changed phase or left, and what a waiting one can reuse has not changed. A policy that may pause decides again
        if any request waits, or unless each has a block."""
        active, cache = self.active, self.kv_cache
        if not self._may_repeat or self._latest is None or self._latest[1] != active.num_changes:
            return None
        plan = self._latest[0]
        if plan.context or plan.held or plan.paused or plan.receiving or plan.continued or self.table.any_wide_steps:
            return None
        if active.context and (self.may_pause or self._latest[2] != cache.num_reuse_changes):
            return None
        if self.may_pause and not cache.has_blocks_for(len(plan.rows)):
            return None
        return plan

    def _rows_without(self, held: list[Request]) -> Rows:
        """Rows of the generation requests but `held`, in batch order."""
        rows = self.active.ready(self.active.batch_rows)
        if held:
            rows = rows[~np.isin(rows, [request.slot for request in held])]
        return rows

    def _pause(self, request: Request) -> None:
        """Release the blocks of `request`. It starts again from its prompt, which its generated tokens have joined."""
        self.active.settle()
        self._release_blocks(request)
        request.pause(self.config.max_input_len)
        self.table.micro_batch[request.slot] = NO_MICRO_BATCH
        self.active.move_to_context(request)

    def _start_prompts(self, plan: Plan, now_s: float) -> None:
        """Take the blocks of the prompts that `plan` starts. Context begins after what they hold already."""
        cache, new = self.kv_cache, [request for request in plan.context if request.is_first_chunk]
        try:
            for request in plan.receiving:
                self._transfers.take_blocks(request, now_s)
            for request in new:
                self._any_retention |= request.retention is not NO_RETENTION
                reused = cache.add_request(request, now_s)
                request.set_prepopulated(reused, cache.attention_window.tokens_per_block)
                if request.num_draft_tokens:
                    cache.add_draft_tokens(np.array([request.slot]), np.array([request.num_draft_tokens]))
        except OutOfBlocks as error:
            raise self._does_not_fit(error) from error
        if self._loads is not None:
            self._loads.begin(plan, new)
        plan.chunks = tuple([ContextChunk(request, request.position, request.chunk) for request in plan.context])

    # One iteration with a batch.

    def allocate(self, plan: Plan) -> StepInputs:
        cache, rows, idle = self.kv_cache, plan.rows, plan.idle
        if self.num_micro_batches > 1:
            cache.join(rows, self._iteration % self.num_micro_batches)
        drafts: DraftInputs | None = None
        try:
            positions = cache.add_tokens(rows)
            if self.table.max_draft_tokens:
                drafts = self.drafts.take([chunk.request for chunk in plan.chunks if chunk.is_last], rows)
            if not plan.chunks and not len(rows):
                return StepInputs(rows)
            if len(idle):
                positions = np.concatenate([positions, cache.registered[idle] - 1])
            if bubble := cache.attention_window.bubble:
                positions -= bubble
            if self._any_retention:
                cache.refresh(self._now_s)
            copies = self.take_copies()
            adapters: AdapterUse | None = None
            if self.adapters is not None and self.active.num_with_lora:
                adapters = self._use_adapters(self.adapters, plan)
        except (OutOfBlocks, OutOfAdapterPages) as error:
            raise self._does_not_fit(error) from error
        return StepInputs(positions, copies, adapters, drafts)

    def advance(self, plan: Plan, iteration: int) -> int:
        table, rows = self.table, plan.rows
        reuses_blocks = self._reuses_blocks and self.kv_cache.num_reuse_changes > 0
        completing = [chunk.request for chunk in plan.chunks if chunk.is_last]
        recomputed = sum([request.advance_context() for request in plan.context])
        if table.any_paused and len(rows):
            recomputed += self.active.count_recomputed(rows, self.kv_cache.cached_tokens(rows))
        table.generated[rows] += 1
        for request in completing:
            request.start_generation()
            self.active.move_to_generation(request)
            if not self.config.drafts.max_len:  # with drafts, requests differ in the tokens of a step
                self.kv_cache.begin_generation(request.slot, iteration % self.num_micro_batches)
            if reuses_blocks:
                self.kv_cache.store_generated(request.slot, request.prompt_len - 1)
        if reuses_blocks:
            store_generated(table, self.kv_cache, rows)
        if self._loads is not None:
            self._loads.submitted(plan.chunks)
        if self._is_async:
            rows = self.active.generation_rows
            for row in rows[table.generated[rows] == table.reserved[rows]].tolist():
                self._park(row)
        if self.num_micro_batches > 1:
            table.micro_batch[plan.rows] = turn = iteration % self.num_micro_batches
            table.micro_batch[[request.slot for request in plan.context]] = turn
        return recomputed

    def _park(self, row: int) -> None:
        """The last step of the request in `row` is in flight."""
        self.active.park(row)
        self.kv_cache.end_generation(row)

    def update(self, iteration: InFlightIteration, outputs: Sequence[StepOutputs]) -> list[Request]:
        done = confirm(iteration, outputs, self.table, self.drafts)
        if self._loads is not None:
            self._loads.collected()
        return done if self._v1_batch is None else self._v1_batch.add_complete(done)

    def lose(self, iteration: InFlightIteration) -> list[Request]:
        if self.adapters is not None:
            self.adapters.forget_device()
        rows = [chunk.request.slot for batch in iteration.batches for chunk in batch.context]
        rows += [slot for batch in iteration.batches for slot in batch.slots.tolist()]
        # A row is -1 if its request has left.
        lost = [self.table.requests[row] for row in rows if row in self.table.requests and row not in iteration.dropped]
        for request in lost:
            self.kv_cache.forget_sequence(request.slot)
        return lost

    def _use_adapters(self, cache: AdapterCache, plan: Plan, iterations: int = 1) -> AdapterUse:
        """The adapters of the next iterations, which are now on the device."""
        tasks = self.table.lora_tasks[plan.generation_rows]
        of_context = [request.lora_task_id for request in plan.context if request.lora_task_id is not None]
        return AdapterUse(tasks, cache.use(distinct_tasks(tasks, of_context), iterations))

    def _release_blocks(self, request: Request) -> None:
        """Release the blocks. With reuse, what they hold stays findable as far as it was computed and is known."""
        store = findable_tokens(request) if self._reuses_blocks else None
        self.kv_cache.remove_sequence(request.slot, store, self._clock.now())

    def _does_not_fit(self, error: Exception) -> SchedulerStalled:
        return SchedulerStalled(f"{self.name} let requests run that do not fit: {error}")

    # For records, the summary, and conversations.

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {} if self.adapters is None else {"lora": self.adapters.figures()}
        if self._loads is not None:
            found["kv_tiers"] = self._loads.tiers.figures()
        return found | {"kv_retention": self.kv_cache.retention_figures()} if self._any_retention else found

    def truncate(self, conversation: Request, num_tokens: int) -> None:
        if (known := conversation.known_tokens()) is not None:
            self.kv_cache.truncate(known, conversation.prompt_len, num_tokens)

    def cache_state(self) -> CacheState:
        return self.kv_cache.state()
