"""The batch manager: the loop that admits, schedules, runs and responds, one iteration after the other."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ifbbench.batching.active import ActiveRequests
from ifbbench.batching.admission import LOOK_AHEAD, Admission, AdmissionLimits
from ifbbench.batching.batch import Batch, ContextChunk, Executor
from ifbbench.batching.capacity import POLICY_CLASSES, CapacityDecision, LeftOut, Limit
from ifbbench.batching.chunking import ChunkLimits
from ifbbench.batching.kv_cache.geometry import CacheGeometry
from ifbbench.batching.kv_cache.manager import KvCacheManager
from ifbbench.batching.micro_batch import MicroBatch, MicroBatchScheduler
from ifbbench.batching.records import CacheState, IterationRecord, Observer, Response
from ifbbench.batching.request import IntArray, Request, RequestTable
from ifbbench.clock import Clock
from ifbbench.errors import IfbbenchError


class SchedulerStalled(IfbbenchError):
    """Requests are active, but a policy lets none of them run."""


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """The engine's limits, all resolved: tokens, requests and blocks. `chunk_unit` None means no chunked context."""

    policy: str
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_input_len: int
    tokens_per_block: int
    num_blocks: int
    chunk_unit: int | None = None
    chunking_policy: str = "first_come_first_served"

    @property
    def num_slots(self) -> int:
        """Sequence slots that an executor needs: a full batch and what higher priority may add to it."""
        return self.max_batch_size + LOOK_AHEAD

    @property
    def geometry(self) -> CacheGeometry:
        return CacheGeometry(self.tokens_per_block, self.max_seq_len, self.max_seq_len)


class BatchManager:
    """In-flight batching over one executor.

    get_requests(n): returns at most n requests that have arrived; called at the start of each iteration.
    send_response(response): called at the end of the iteration that has something to send.
    queued(): how many requests have arrived that `get_requests` has not handed out yet.
    """

    def __init__(
        self,
        config: BatchingConfig,
        executor: Executor,
        clock: Clock,
        get_requests: Callable[[int], list[Request]],
        send_response: Callable[[Response], None],
        observer: Observer,
        queued: Callable[[], int] = lambda: 0,
    ) -> None:
        self.config = config
        self.table = RequestTable(config.num_slots)
        self.active = ActiveRequests(self.table)
        self.kv_cache = KvCacheManager(config.geometry, config.num_blocks, config.num_slots)
        self.iteration = 0
        self._executor = executor
        self._clock = clock
        self._send_response = send_response
        self._observer = observer
        self._queued = queued
        limits = AdmissionLimits(config.max_seq_len, config.max_input_len, config.num_blocks, config.geometry)
        self._admission = Admission(limits, config.max_batch_size, get_requests, self._refuse)
        self._capacity_policy = POLICY_CLASSES[config.policy](config.max_batch_size)
        self._micro_batch_scheduler = _micro_batch_scheduler(config)

    def step(self) -> bool:
        """Run one iteration; False when no request is active, in which case nothing was done."""
        start = self._clock.now()
        activated = self._admission.admit(self.active)
        if not len(self.active):
            return False
        num_active = len(self.active)
        fitting = self._capacity_policy.schedule(self.active, self.kv_cache)
        selected = self._micro_batch_scheduler.schedule(self.active, fitting)
        blocked = _blocked(fitting, selected)
        for pause in fitting.paused:
            self._pause(pause.victim)
        held = fitting.held + selected.held
        rows = self._rows_to_run(held)
        if not selected.context and not len(rows) and not fitting.paused:
            raise SchedulerStalled(self._why_stalled(blocked))
        batch = self._allocate(selected.context, rows)
        cache = self._cache_state()
        submit = self._clock.now()
        tokens = self._run(batch)
        end = self._clock.now()
        finished, recomputed = self._apply(batch, tokens)
        queued = len(self._admission.waiting) + self._queued()
        record = IterationRecord(
            self.iteration, start, submit, end, self._clock.timestamp(), num_active, queued, activated, batch.context,
            recomputed, len(rows), held, fitting.paused, finished, self._first_left_out(blocked), blocked, cache,
        )  # fmt: skip
        self._observer.iteration(record)
        for request in finished:
            self._finish(request, has_tokens=tokens is not None)
        self.iteration += 1
        return True

    def _pause(self, request: Request) -> None:
        """Take the request's blocks away; it starts again from its prompt with the generated tokens joined to it."""
        self.kv_cache.remove_sequence(request.slot)
        was_in_context = request.in_context
        request.pause(self.config.max_input_len)
        if not was_in_context:
            self.active.move_to_context(request)

    def _rows_to_run(self, held: list[Request]) -> NDArray[np.int64]:
        rows = self.active.generation_rows
        if held:
            rows = rows[~np.isin(rows, [request.slot for request in held])]
        return rows

    def _allocate(self, context: list[Request], rows: NDArray[np.int64]) -> Batch:
        """Take the KV blocks that the iteration writes to, and pack its batch."""
        chunks = []
        for request in context:
            if request.is_first_chunk:
                self.kv_cache.add_request(request)
            chunks.append(ContextChunk(request, request.position, request.chunk))
        positions = self.kv_cache.registered[rows] - self.kv_cache.geometry.bubble
        self.kv_cache.add_tokens(rows)
        tables = self.kv_cache.block_tables
        return Batch(self.iteration, tuple(chunks), rows.astype(np.int32), positions.astype(np.int32), tables)

    def _run(self, batch: Batch) -> IntArray | None:
        if batch.num_tokens == 0:  # Only pauses happened.
            return None
        self._executor.submit(batch)
        return self._executor.collect()

    def _apply(self, batch: Batch, tokens: IntArray | None) -> tuple[list[Request], int]:
        """Advance all that ran. Returns the requests that are complete, and how many tokens were computed again."""
        completing = [chunk.request for chunk in batch.context if chunk.is_last]
        rows = batch.slots
        self.table.generated[rows] += 1
        done = self.table.generated[rows] == self.table.stop_after[rows]
        if tokens is not None:
            new = tokens[len(completing) :]
            self.table.write_outputs(rows, self.table.joined[rows] + self.table.generated[rows] - 1, new)
            if self.table.any_end_tokens:
                done |= (new[:, None] == self.table.end_tokens[rows]).any(axis=1)
        # Tokens that a pause dropped, the resumed prompt being full, are generated again.
        again = batch.positions < self.table.cached_before_pause[rows]
        finished = [self.active.by_slot[slot] for slot in rows[done].tolist()]
        for slot in rows[again].tolist():
            self.active.by_slot[slot].recomputed_tokens += 1
        recomputed = int(again.sum()) + sum(chunk.request.advance_context() for chunk in batch.context)
        for place, request in enumerate(completing):
            token = None if tokens is None else int(tokens[place])
            if self._start_generation(request, token):
                finished.append(request)
        return finished, recomputed

    def _start_generation(self, request: Request, token: int | None) -> bool:
        """The prompt is complete and has yielded `token`. Returns whether that was the request's last one."""
        request.start_generation()
        self.active.move_to_generation(request)
        slot = np.array([request.slot])
        if token is not None:
            self.table.write_outputs(slot, np.array([request.num_outputs - 1]), np.array([token]))
        return bool(self.table.stop_after[request.slot] == 1) or token in request.end_tokens

    def _finish(self, request: Request, has_tokens: bool) -> None:
        """Free all that the request holds, then send its final response."""
        outputs = self.table.outputs(request.slot, 0, request.num_outputs) if has_tokens else None
        self.kv_cache.remove_sequence(request.slot)
        self.active.remove(request)
        request.complete()
        self._admission.forget(request)
        self._send_response(Response(request, outputs, is_final=True))

    def _refuse(self, request: Request, error: str) -> None:
        self._observer.refused(request, error)
        self._send_response(Response(request, None, is_final=True, error=error))

    def _first_left_out(self, blocked: tuple[LeftOut, ...]) -> LeftOut | None:
        if blocked:
            return min(blocked, key=lambda left_out: left_out.request.order)
        if self._admission.waiting:
            return LeftOut(self._admission.waiting[0], Limit.BATCH_SIZE)
        return None

    def _cache_state(self) -> CacheState:
        cache = self.kv_cache
        return CacheState(
            cache.num_blocks, cache.pool.num_used, cache.geometry.tokens_per_block, cache.pool.allocated_total,
            cache.fragmentation(),
        )  # fmt: skip

    def _why_stalled(self, blocked: tuple[LeftOut, ...]) -> str:
        reasons = ", ".join(f"request {item.request.request_id} by {item.limit}" for item in blocked)
        return f"policy {self.config.policy} runs none of {len(self.active)} active requests (blocked: {reasons})"


def _blocked(fitting: CapacityDecision, selected: MicroBatch) -> tuple[LeftOut, ...]:
    """The first requests that each scheduler left out, and those paused."""
    paused = [LeftOut(pause.victim, pause.limit) for pause in fitting.paused]
    found = [item for item in (fitting.left_out, selected.left_out) if item is not None]
    return tuple(paused + found)


def _micro_batch_scheduler(config: BatchingConfig) -> MicroBatchScheduler:
    if config.chunk_unit is None:
        return MicroBatchScheduler(config.max_batch_size, config.max_num_tokens)
    limits = ChunkLimits(config.chunk_unit, config.max_num_tokens)
    return MicroBatchScheduler(config.max_batch_size, config.max_num_tokens, config.chunking_policy, limits)
