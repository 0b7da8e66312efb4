"""The recorder: hears of every iteration and writes the run directory."""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ifbbench.clock import Clock, WallClock
from ifbbench.config import RECORDING_FORMATS
from ifbbench.engine.records import IterationRecord, IterationStatistics, Stretch
from ifbbench.engine.request import Request
from ifbbench.execution.step_profile import StepProfile
from ifbbench.recording.digest import ScheduleDigest
from ifbbench.recording.iteration_lines import IterationLines
from ifbbench.recording.jsonl_writer import JsonLinesWriter, replace_lines
from ifbbench.recording.metrics import RunMetrics
from ifbbench.recording.run_directory import OPEN_SPANS, write_json
from ifbbench.recording.spans import SpanTracker

FLUSH_INTERVAL_S = 1.0


class Recorder:
    """An Observer that writes `iterations.jsonl`, `spans.jsonl` and `requests.jsonl` as the run goes, `summary.json` at
    its end, and `run.json` at both.

    directory: an empty run directory. description: what `run.json` says of the run. statistics: makes the batch
    manager's fields of an iteration. arrival_s(request): when the trace says that it comes, in seconds on the run's
    clock. recording_format: suffix of the files of lines; it says whether they are compressed.
    iteration_stats_every, profile: see IterationLines. clock: by which lines are brought to the disk each second; real
    time if None, whatever the run's own clock is, so that a run that is killed loses no more than that.
    """

    def __init__(
        self,
        directory: Path,
        description: dict[str, Any],
        total_requests: int,
        statistics: IterationStatistics,
        arrival_s: Callable[[Request], float],
        recording_format: str = RECORDING_FORMATS[0],
        iteration_stats_every: int = 1,
        clock: Clock | None = None,
        profile: StepProfile | None = None,
    ) -> None:
        self.directory = directory
        self.metrics = RunMetrics(total_requests)
        self._description = description
        self._lines = IterationLines(statistics, iteration_stats_every, profile)
        self._arrival_s = arrival_s
        write_json(directory / "run.json", {**description, "schedule_digest": None, "partial": True})
        self._iterations = JsonLinesWriter(directory / f"iterations.{recording_format}")
        self._spans = JsonLinesWriter(directory / f"spans.{recording_format}")
        self._requests = JsonLinesWriter(directory / f"requests.{recording_format}")
        self._tracker = SpanTracker(self._spans.write_line, arrival_s)
        self._digest = ScheduleDigest()
        self._starts = array("d")
        self._ends = array("d")
        self._clock = clock or WallClock()
        self._flushed_s = 0.0

    def iteration(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        self._starts.append(record.start_s)
        self._ends.append(record.end_s)
        self.metrics.add_iteration(record)
        self._digest.add(record)
        self._iterations.write_lines(self._lines.of_record(record))
        self._tracker.add(record, self._starts)
        self._end(record.finished, record.iteration)

    def stretch(self, stretch: Stretch) -> None:
        """Take in several iterations. The first one may change what a request does; the others go on alike."""
        self._starts.frombytes(stretch.start_s.tobytes())
        self._ends.frombytes(stretch.end_s.tobytes())
        self.metrics.add_stretch(stretch)
        self._digest.add_stretch(stretch)
        self._iterations.write_lines(self._lines.of_stretch(stretch))
        self._tracker.add(stretch.first, self._starts)
        self._end(stretch.finished, stretch.last_iteration)

    def _end(self, finished: list[Request], iteration: int) -> None:
        """These requests are complete with `iteration`."""
        for request in finished:
            life = self._tracker.end(request, iteration)
            self._requests.write_line(self.metrics.add_request(life, self._starts, self._ends))
        if self._clock.now() - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()

    def left(self, request: Request, error: str | None) -> None:
        """Take in a request that was refused, failed or was stopped."""
        self._tracker.drop(request, self.metrics.iterations)
        self._requests.write_line(self.metrics.add_failure(request, self._arrival_s(request), error))

    def flush(self) -> None:
        """Bring everything to the disk, so that a run killed now can be read up to here, open spans included."""
        for writer in self._writers:
            writer.flush()
        replace_lines(self.directory / OPEN_SPANS, self._tracker.open_lines(self.metrics.iterations - 1))
        self._flushed_s = self._clock.now()

    def close(self, partial: bool) -> dict[str, Any]:
        """End the recording; returns the summary. `partial`: the run did not get to its end."""
        wall_s = self._clock.now()
        self._tracker.close(self.metrics.iterations - 1)
        self._iterations.write_lines(self._lines.of_last())
        for writer in self._writers:
            writer.close()
        (self.directory / OPEN_SPANS).unlink(missing_ok=True)
        digest = self._digest.hexdigest()
        summary = self.metrics.summary(digest, partial, self._ends)
        write_json(self.directory / "summary.json", summary)
        description = {**self._description, "schedule_digest": digest, "partial": partial, "wall_s": wall_s}
        write_json(self.directory / "run.json", description)
        return summary

    @property
    def _writers(self) -> tuple[JsonLinesWriter, ...]:
        return self._iterations, self._spans, self._requests
