"""The statistics of iterations as TensorRT-LLM's batch manager reports them, static batches as a whole."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import astuple

from ifbbench.engine.records import CacheState, IterationRecord
from ifbbench.engine.request import Request
from ifbbench.engine.stretch import Stretch, copied
from ifbbench.rundir.line_types import COMMON_FIELDS, INFLIGHT_FIELDS, STATIC_FIELDS
from ifbbench.rundir.lines import IterationLines, JsonLinesWriter
from ifbbench.settings.modes import BatchingType


class IterationStatistics:
    """The statistics of each iteration under the names of TensorRT-LLM's batch manager.

    max_requests: maximum number of active requests of the engine.
    is_static: whether batches are static (V1). They are reported as a whole (see `reported`), as TensorRT-LLM does,
        which runs one in one call.
    names: the fields of the batching type, in order.
    """

    def __init__(self, batching_type: BatchingType, max_requests: int) -> None:
        self.batching_type, self.max_requests = batching_type, max_requests
        self.is_static = batching_type is BatchingType.V1
        self.names = (*COMMON_FIELDS, *(STATIC_FIELDS if self.is_static else INFLIGHT_FIELDS))
        self._lines = IterationLines(batching_type, max_requests)
        self._num_static_batches = 0
        # The static batch that is not reported yet, and the host's time in each of its steps.
        self._batch: IterationRecord | None = None
        self._host_s: list[float] = []

    def reported(self, record: IterationRecord) -> Sequence[IterationRecord]:
        """The records to report after `record`: itself, or the static batch of which it is the last step. One whose
        members all failed or were stopped is reported with the next."""
        if not self.is_static:
            return (record,)
        host_s = [record.submit_s - record.start_s]
        return self._add_steps(record, host_s, record.end_s, record.cache, record.finished)

    def reported_of(self, stretch: Stretch) -> Sequence[IterationRecord]:
        """As `reported`, after all steps of a stretch of static batches."""
        host_s = [submit_s - start_s for start_s, submit_s in zip(stretch.start_s, stretch.submit_s, strict=True)]
        return self._add_steps(stretch.first, host_s, stretch.end_s[-1], stretch.last_cache, stretch.finished)

    def _add_steps(
        self, first: IterationRecord, host_s: list[float], end_s: float, cache: CacheState, finished: list[Request]
    ) -> list[IterationRecord]:
        """Take in steps like `first`. host_s: [steps]. The others are of the last one."""
        reported, count = self.unreported() if first.context else [], len(host_s)
        batch = self._batch
        if batch is None:
            batch = self._batch = copied(first)
            batch.num_generation = batch.num_generation_tokens = batch.idle = 0
        batch.num_generation += first.num_generation * count
        batch.num_generation_tokens += first.num_generation_tokens * count
        batch.idle += first.idle * count
        batch.steps = batch.iteration, first.iteration + count - 1
        batch.end_s, batch.cache, batch.finished = end_s, cache, finished
        self._host_s += host_s
        return reported + (self.unreported() if finished else [])

    def unreported(self) -> list[IterationRecord]:
        """The static batch of the steps that were not reported yet, if there are any."""
        batch, self._batch = self._batch, None
        if batch is None:
            return []
        batch.iteration, batch.submit_s = self._num_static_batches, batch.start_s + sum(self._host_s, 0.0)
        self._host_s = []
        self._num_static_batches += 1
        return [batch]

    def fields(self, record: IterationRecord) -> dict[str, Any]:
        """Documented name to value. Blocks and tokens are counts; the time stamp is in UTC."""
        return dict(zip(self.names, astuple(self._lines.documented(record)), strict=False))


class StaticBatchLines:
    """Writes a line for each static batch, of which `steps.jsonl` has the iterations."""

    def __init__(self, writer: JsonLinesWriter, statistics: IterationStatistics, as_executor: bool) -> None:
        """statistics: the iterations, with the batches so far.
        as_executor: see IterationLines.
        """
        self._writer, self._statistics = writer, statistics
        self._lines = IterationLines(statistics.batching_type, statistics.max_requests, as_executor=as_executor)

    def add(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        self._write(self._statistics.reported(record))

    def add_stretch(self, stretch: Stretch) -> None:
        """Take in several iterations."""
        self._write(self._statistics.reported_of(stretch))

    def end(self) -> None:
        """Write the batch that is not complete, if there is one."""
        self._write(self._statistics.unreported())

    def _write(self, records: Iterable[IterationRecord]) -> None:
        for record in records:
            self._writer.add(self._lines.record(record, record.bound_by))
