"""The recorder of runs of which only the summary is kept: it writes no file."""

from array import array
from collections.abc import Mapping
from typing import Any

from ifbbench.engine.records import IterationRecord, Stretch
from ifbbench.engine.request import Request
from ifbbench.recording.metrics import bound_by
from ifbbench.recording.recorder import ClassOf, RunMetrics, ScheduleDigest
from ifbbench.recording.spans import SecondsOf, SpanTracker


class SummaryRecorder:
    """An Observer that sums up a run in memory. Its summary is that of `Recorder`, which also encodes and writes a line
    for each iteration, in a third of the time of a simulated run.

    Arguments: see `Recorder`. config: the resolved settings."""

    def __init__(
        self, config: Mapping[str, Any], total_requests: int, arrival_s: SecondsOf, held_until_s: SecondsOf,
        class_of: ClassOf,
    ) -> None:  # fmt: skip
        self.metrics = RunMetrics(total_requests, class_of, config)
        self._arrival_s = arrival_s
        self._tracker = SpanTracker(lambda lines: None, arrival_s, held_until_s)
        self._digest = ScheduleDigest()
        self._starts = array("d")
        self._ends = array("d")

    def iteration(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        self._starts.append(record.start_s)
        self._ends.append(record.end_s)
        self.metrics.add_iteration(record, bound_by(record))
        self._digest.add(record)
        self._tracker.add(record, self._starts)
        self._end(record.finished, record.iteration)

    def stretch(self, stretch: Stretch) -> None:
        """Take in several iterations. Only the first one may change what a request does."""
        self._starts.frombytes(stretch.start_s.tobytes())
        self._ends.frombytes(stretch.end_s.tobytes())
        self.metrics.add_stretch(stretch, bound_by(stretch.first))
        self._digest.add_stretch(stretch)
        self._tracker.add(stretch.first, self._starts)
        self._end(stretch.finished, stretch.last_iteration)

    def _end(self, finished: list[Request], iteration: int) -> None:
        for request in finished:
            timeline = self._tracker.end(request, iteration)
            self.metrics.add_request(timeline, self._starts, self._ends, self._tracker.head)

    def left(self, request: Request, error: str | None) -> None:
        """Take in a request that was refused, failed or was stopped."""
        self._tracker.drop(request, self.metrics.iterations)
        self.metrics.add_failure(request, self._arrival_s(request), error)

    def flush(self) -> None:
        """Nothing is written."""

    def close(self, partial: bool, **more: Any) -> dict[str, Any]:
        """End the recording; returns the summary. partial: the run did not reach its end. more: further figures."""
        return self.metrics.summary(self._digest.hexdigest(), partial, self._starts, self._ends) | more
