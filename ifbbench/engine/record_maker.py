"""Writes an iteration's record as far as it is known when it starts."""

from collections.abc import Callable

from ifbbench.clock import Clock
from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.admission import Admission
from ifbbench.engine.batch import Batch
from ifbbench.engine.batching_config import BatchingConfig
from ifbbench.engine.batching_type import BatchingType
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.records import CacheState, IterationRecord
from ifbbench.engine.request import Request
from ifbbench.engine.scheduler import Plan


class RecordMaker:
    """Makes records of one loop. queued(): how many requests have arrived that admission has not fetched."""

    def __init__(
        self, config: BatchingConfig, clock: Clock, active: ActiveRequests, admission: Admission, kv_cache: KvCache,
        queued: Callable[[], int],
    ) -> None:
        self._pads = config.batching_type is BatchingType.V1
        self._has_beams = config.max_beam_width > 1
        self._num_micro_batches = config.num_micro_batches
        self._clock = clock
        self._active = active
        self._admission = admission
        self._kv_cache = kv_cache
        self._queued = queued

    def make(
        self, iteration: int, plan: Plan, batches: tuple[Batch, ...], start_s: float, activated: list[Request]
    ) -> IterationRecord:
        """The record of an iteration that began at `start_s` and runs `batches`, for which the cache has given blocks.
        activated: requests that became active in it."""
        context = batches[0].context if batches else ()
        padding = 0
        if self._pads and context:
            longest = max(chunk.length for chunk in context)
            padding = sum(longest - chunk.length for chunk in context)
        num_generation = len(plan.rows)
        tokens = int(self._active.table.step_tokens[plan.rows].sum()) if self._has_beams else num_generation
        waiting = self._admission.waiting
        return IterationRecord(
            iteration=iteration,
            micro_batch=iteration % self._num_micro_batches,
            start_s=start_s,
            timestamp=self._clock.timestamp(),
            active=len(self._active),
            queued=len(waiting) + self._queued(),
            activated=activated,
            context=context,
            num_context_tokens=sum([chunk.length for chunk in context]),
            recomputed=0,
            num_generation=num_generation,
            num_generation_tokens=tokens,
            held=plan.held,
            paused=plan.paused,
            left_out=plan.first_left_out(waiting),
            blocked=plan.blocked,
            cache=CacheState.of(self._kv_cache),
            idle=len(plan.idle) if batches else 0,
            padding=padding,
        )
