"""The recorder: an observer of the token generation loop that writes the run directory."""

import hashlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ifbbench.clock import Clock, WallClock
from ifbbench.config import RECORDING_FORMATS
from ifbbench.engine.records import IterationRecord, IterationStatistics, Stretch
from ifbbench.engine.request import Request
from ifbbench.execution.step_profile import StepProfile
from ifbbench.recording.lines import IterationEncoder, JsonLinesWriter
from ifbbench.recording.metrics import RunMetrics, bound_by
from ifbbench.recording.run_directory import OPEN_SPANS, replace_file, write_json
from ifbbench.recording.spans import SpanTracker

FLUSH_INTERVAL_S = 1.0
_NO_REQUESTS: set[int] = set()
Judge = Callable[[dict[str, Any]], dict[str, Any]]


class Delivery(Protocol):
    """When the tokens of an iteration reach their clients, where that is later than the end of the iteration."""

    def of_iteration(self, record: IterationRecord) -> float: ...

    def of_stretch(self, stretch: Stretch) -> NDArray[np.float64]: ...


class Recorder:
    """An Observer that writes `iterations.jsonl`, `spans.jsonl` and `requests.jsonl` during the run, `summary.json` at
    its end, and `run.json` at both.

    directory: an empty run directory. description: the content of `run.json`. arrival_s(request): its arrival by the
    trace, in seconds on the run's clock. recording_format: suffix of the files of lines. statistics,
    iteration_stats_every, profile: see IterationEncoder. clock: files are flushed each second by it; real time if None,
    even if the run has a virtual clock, so that a killed run loses at most this much. delivery: of the tokens; at the
    end of their iteration if None. judge: the expected error of a summary, of simulated runs.
    """

    def __init__(
        self, directory: Path, description: dict[str, Any], total_requests: int, statistics: IterationStatistics,
        arrival_s: Callable[[Request], float], recording_format: str = RECORDING_FORMATS[0],
        iteration_stats_every: int = 1, clock: Clock | None = None, profile: StepProfile | None = None,
        delivery: Delivery | None = None, judge: Judge | None = None,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.metrics = RunMetrics(total_requests)
        self._description = description
        self._arrival_s = arrival_s
        write_json(directory / "run.json", {**description, "schedule_digest": None, "partial": True})
        self._iterations, self._spans, self._requests = self._writers = [
            JsonLinesWriter(directory / f"{name}.{recording_format}") for name in ("iterations", "spans", "requests")
        ]
        self._encoder = IterationEncoder(statistics, iteration_stats_every, profile)
        self._tracker = SpanTracker(self._spans.write, arrival_s)
        self._digest = ScheduleDigest()
        self._starts = array("d")
        self._ends = array("d")
        self._clock = clock or WallClock()
        self._delivery = delivery
        self._judge = judge
        self._flushed_s = 0.0

    def iteration(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        limit = bound_by(record)
        self._starts.append(record.start_s)
        self._ends.append(record.end_s if self._delivery is None else self._delivery.of_iteration(record))
        self.metrics.add_iteration(record, limit)
        self._digest.add(record)
        self._iterations.write(self._encoder.record(record, limit))
        self._tracker.add(record, self._starts)
        self._end(record.finished, record.iteration)

    def stretch(self, stretch: Stretch) -> None:
        """Take in several iterations. Only the first one may change what a request does."""
        limit = bound_by(stretch.first)
        self._starts.frombytes(stretch.start_s.tobytes())
        end_s = stretch.end_s if self._delivery is None else self._delivery.of_stretch(stretch)
        self._ends.frombytes(end_s.tobytes())
        self.metrics.add_stretch(stretch, limit)
        self._digest.add_stretch(stretch)
        self._iterations.write(self._encoder.stretch(stretch, limit))
        self._tracker.add(stretch.first, self._starts)
        self._end(stretch.finished, stretch.last_iteration)

    def _end(self, finished: list[Request], iteration: int) -> None:
        """These requests are complete with `iteration`."""
        for request in finished:
            timeline = self._tracker.end(request, iteration)
            self._requests.write([self.metrics.add_request(timeline, self._starts, self._ends)])
        if self._clock.now() - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()

    def left(self, request: Request, error: str | None) -> None:
        """Take in a request that was refused, failed or was stopped."""
        self._tracker.drop(request, self.metrics.iterations)
        self._requests.write([self.metrics.add_failure(request, self._arrival_s(request), error)])

    def flush(self) -> None:
        """Make everything up to here readable, open spans included, in case the run is killed."""
        for writer in self._writers:
            writer.flush()
        open_spans = self._tracker.open_lines(self.metrics.iterations - 1)
        replace_file(self.directory / OPEN_SPANS, b"".join(line + b"\n" for line in open_spans))
        self._flushed_s = self._clock.now()

    def close(self, partial: bool) -> dict[str, Any]:
        """End the recording; returns the summary. partial: the run did not reach its end."""
        wall_s = self._clock.now()
        self._tracker.close(self.metrics.iterations - 1)
        self._iterations.write(self._encoder.last())
        for writer in self._writers:
            writer.close()
        (self.directory / OPEN_SPANS).unlink(missing_ok=True)
        digest = self._digest.hexdigest()
        summary = self.metrics.summary(digest, partial, self._ends)
        if self._judge is not None:
            summary["expected_error"] = self._judge(summary)
        write_json(self.directory / "summary.json", summary)
        description = {**self._description, "schedule_digest": digest, "partial": partial, "wall_s": wall_s}
        write_json(self.directory / "run.json", description)
        return summary


def _digest_line(context: list[list[int]], joined: list[int], left: list[int], paused: list[int]) -> bytes:
    """One line of canonical JSON: without spaces, lists of numbers are written alike in Python and JSON."""
    lists = f'{{"context":{context},"joined":{joined},"left":{left},"paused":{paused}}}\n'
    return lists.replace(" ", "").encode()


# The same generation requests ran as in the iteration before, and nothing else.
_SAME_AGAIN = _digest_line([], [], [], [])


class ScheduleDigest:
    """sha256 of all decisions of a run, without times: one line of JSON for each iteration that scheduled or paused
    something.

    A line has the context chunks as [index, tokens], the requests that joined and left generation since the line
    before, and those paused. Requests are given by their index in the trace, and sorted by it.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._generating: set[int] = set()
        self._entering: set[int] = set()
        self._leaving: set[int] = set()
        self._held: set[int] = set()

    def add(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        joined, left, paused, held = self._changes(record)
        if joined or left:
            self._generating -= left
            self._generating |= joined
        if record.context or record.num_generation or paused:
            context = sorted([[chunk.request.index, chunk.length] for chunk in record.context])
            changed = context or joined or left or paused
            line = _digest_line(context, sorted(joined), sorted(left), sorted(paused)) if changed else _SAME_AGAIN
            self._hash.update(line)
        self._entering = {chunk.request.index for chunk in record.context if chunk.is_last}
        self._leaving = {request.index for request in record.finished}
        self._held = held

    def _changes(self, record: IterationRecord) -> tuple[set[int], set[int], set[int], set[int]]:
        """The requests that joined and left generation since the iteration before, those paused and those held."""
        if not (self._leaving or self._held or record.paused or record.held):
            return self._entering, _NO_REQUESTS, _NO_REQUESTS, _NO_REQUESTS
        paused = {pause.victim.index for pause in record.paused}
        held = {request.index for request in record.held}
        left = (self._leaving | paused | held) & self._generating
        joined = (self._entering | (self._held - held)) - self._leaving - paused - held
        return joined, left, paused, held

    def add_stretch(self, stretch: Stretch) -> None:
        """Take in all iterations of a stretch. From its second on, no request joins or leaves generation."""
        self.add(stretch.first)
        self._hash.update(_SAME_AGAIN * (stretch.length - 1))
        self._leaving = {request.index for request in stretch.finished}

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
