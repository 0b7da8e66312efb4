"""The recorder: an observer of the token generation loop that sums up the run and writes the run directory."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mypy_extensions import mypyc_attr

from ifbbench.clock import Clock, WallClock
from ifbbench.engine.interfaces import Delivery
from ifbbench.engine.records import CacheState, IterationRecord, ScheduleDigest
from ifbbench.engine.request import Request
from ifbbench.engine.step_profile import StepProfile
from ifbbench.engine.stretch import Stretch
from ifbbench.files import removed, replace_file, writing
from ifbbench.rundir.drafts import DraftTotals
from ifbbench.rundir.line_types import RequestLine
from ifbbench.rundir.lines import JsonLinesWriter
from ifbbench.rundir.metrics import BOUND_BY, own_seconds, shares_of_limits
from ifbbench.rundir.request_metrics import ClassOf, RequestMetrics
from ifbbench.rundir.run_directory import OPEN_SPANS, RUN, STEPS, write_begun, write_json
from ifbbench.rundir.spans import SecondsOf, SpanTracker
from ifbbench.rundir.statistics import IterationStatistics, StaticBatchLines
from ifbbench.rundir.stretch_lines import StretchLines
from ifbbench.settings.groups.recording import ITERATION_STATS_FORMATS, RECORDING_FORMATS, RECORDINGS
from ifbbench.settings.modes import BatchingType

FLUSH_INTERVAL_S = 1.0
Complete = Callable[[dict[str, Any]], dict[str, Any]]


class IterationTotals:
    """Sums and peaks of the iterations of a run."""

    def __init__(self) -> None:
        self.slots = self.padded_slots = self.empty_generation_slots = 0
        self.pauses = self.recomputed_tokens = self.computed_tokens = 0
        self.iterations = self.peak_scheduled = self.peak_active = 0
        self.num_micro_batches = 1
        # Both are None where the cache has no blocks.
        self.peak_used_blocks: int | None = None
        self.max_blocks: int | None = None
        # With several attention windows: the size of the pool and its peak use, by the tokens of each window.
        self.windows: dict[str, dict[str, int]] = {}
        self.tokens_per_block: int | None = None
        self.max_tokens = self.peak_held_tokens = self.peak_filled_tokens = 0
        # The number of each limit, and of each iteration the number of the limit that bound it.
        self.limits: defaultdict[str, int] = defaultdict(None, {name: number for number, name in enumerate(BOUND_BY)})
        self.limits.default_factory = self.limits.__len__
        self.limit_of = array("i")
        self.drafts: DraftTotals | None = None  # of a run with draft tokens

    def add(self, record: IterationRecord, limit: str, count: int, caches: Sequence[CacheState]) -> None:
        """Take in one iteration, or a stretch that begins with it.

        limit: what bound them.
        caches: when requests held most.
        """
        computed, padded = record.budget_used, record.padding + record.idle * count
        scheduled = len(record.context) + record.num_generation
        self.iterations += count
        self.num_micro_batches = record.num_micro_batches
        if scheduled > self.peak_scheduled:
            self.peak_scheduled = scheduled
        if record.active > self.peak_active:
            self.peak_active = record.active
        self.pauses += len(record.paused)
        self.recomputed_tokens += record.recomputed
        self.computed_tokens += computed * count
        self.empty_generation_slots += record.idle * count
        self.padded_slots += padded
        self.slots += computed * count + padded
        for cache in caches:
            self._add_cache(cache)
        number = self.limits[limit]
        if count == 1:
            self.limit_of.append(number)
        else:
            self.limit_of.extend([number] * count)
        if record.drafts is not None:
            self.drafts = self.drafts or DraftTotals()
            self.drafts.add(record.drafts)

    def _add_cache(self, cache: CacheState) -> None:
        self.max_blocks, self.tokens_per_block = cache.max_blocks, cache.tokens_per_block
        if cache.used_blocks is not None and cache.used_blocks > (self.peak_used_blocks or -1):
            self.peak_used_blocks = cache.used_blocks
        for window in cache.windows:
            known = self.windows.setdefault(str(window.size), {"max": window.max_blocks, "peak_used": 0})
            known["peak_used"] = max(known["peak_used"], window.used_blocks)
        self.max_tokens = cache.max_tokens
        if cache.held_tokens > self.peak_held_tokens:
            self.peak_held_tokens = cache.held_tokens
        if cache.filled_tokens > self.peak_filled_tokens:
            self.peak_filled_tokens = cache.filled_tokens

    def figures(self, starts: Sequence[float], ends: Sequence[float]) -> dict[str, Any]:
        """The entries of `summary.json` about iterations. starts, ends: of each one, in seconds."""
        blocks = self.max_blocks, self.peak_used_blocks, self.tokens_per_block
        of_windows = {"per_window_size": self.windows} if self.windows else {}
        tokens = self.max_tokens, self.peak_held_tokens, self.peak_filled_tokens
        return {
            "iterations": self.iterations,
            "pauses": self.pauses,
            "recomputed_tokens": self.recomputed_tokens,
            "recomputed_share": self.recomputed_tokens / self.computed_tokens if self.computed_tokens else 0.0,
            "empty_generation_slots": self.empty_generation_slots,
            "padding_waste": self.padded_slots / self.slots if self.slots else 0.0,
            "kv_blocks": dict(zip(("max", "peak_used", "tokens_per_block"), blocks, strict=True)) | of_windows,
            "kv_tokens": dict(zip(("max", "peak_held", "peak_filled"), tokens, strict=True)),
            "peak_scheduled_requests": self.peak_scheduled,
            **shares_of_limits(list(self.limits), self.limit_of, own_seconds(starts, ends, self.num_micro_batches)),
        }

    def draft_figures(self) -> dict[str, Any]:
        """The entry of `summary.json` about draft tokens, if the run had any."""
        return {} if self.drafts is None else {"speculative_decoding": self.drafts.figures()}


@mypyc_attr(allow_interpreted_subclasses=True)
class SummaryRecorder:
    """An Observer that sums up a run in memory, for runs of which only the summary is kept: it writes no file, which
    saves a third of the time of a simulated run.

    config: the resolved settings.
    arrival_s(request): returns the arrival by the trace, in seconds on the run's clock.
    held_until_s: see SpanTracker.
    class_of: see RequestMetrics.
    delivery: when tokens reach the clients; at the end of their iteration if None.
    starts_s, ends_s: begin and end of each iteration.
    on_request: is called with the line of each request that has ended.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        total_requests: int,
        arrival_s: SecondsOf,
        held_until_s: SecondsOf | None = None,
        class_of: ClassOf = lambda index: None,
        delivery: Delivery | None = None,
    ) -> None:
        self.totals = IterationTotals()
        self.metrics = RequestMetrics(total_requests, class_of, config, BOUND_BY)
        self._arrival_s = arrival_s
        self._tracker = SpanTracker(arrival_s, held_until_s)
        self._digest = ScheduleDigest()
        self.starts_s, self.ends_s = array("d"), array("d")
        self._delivery = delivery
        self.on_request: Callable[[RequestLine], None] | None = None

    def iteration(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        limit = record.bound_by
        self.starts_s.append(record.start_s)
        self.ends_s.append(record.end_s if self._delivery is None else self._delivery.of_iteration(record))
        self.totals.add(record, limit, 1, (record.cache,))
        self._digest.add(record)
        self._write_iteration(record, limit)
        self._follow(record, limit)
        self._end(record.finished, record.iteration)

    def stretch(self, stretch: Stretch) -> None:
        """Take in several iterations. Only the first one of each micro batch may change what a request does."""
        first, turns = stretch.first, stretch.turns
        if stretch.length == 1:
            first.finished = stretch.finished
            self.iteration(first)
            return
        limit = first.bound_by
        self.starts_s.extend(stretch.start_s)
        self.ends_s.extend(stretch.end_s if self._delivery is None else self._delivery.of_stretch(stretch))
        for turn, record in enumerate(turns):
            count = (stretch.length - turn + len(turns) - 1) // len(turns)
            self.totals.add(record, limit, count, stretch.fullest_caches)
        self._digest.add_stretch(turns, stretch.length, stretch.finished)
        self._write_stretch(stretch, limit)
        for record in turns:
            self._follow(record, limit)
        for chunk in first.context:
            self._tracker.add_chunks(chunk, stretch.length - 1)
        self._end(stretch.finished, stretch.last_iteration)

    def left(self, request: Request, error: str | None) -> None:
        """Take in a request that was refused, failed or was stopped."""
        self._digest.leave(request)
        self._tracker.drop(request, self.totals.iterations)
        self._take_request(self.metrics.add_failure(request, self._arrival_s(request), error))

    def flush(self) -> None:
        """Make everything up to here readable, in case the run is killed."""

    def close(self, partial: bool, complete: Complete | None = None) -> dict[str, Any]:
        """End the recording; returns the summary.

        partial: the run did not reach its end.
        complete(summary): more.
        """
        summary = self.summary(partial, self._digest.hexdigest())
        return summary if complete is None else summary | complete(summary)

    def summary(self, partial: bool, digest: str) -> dict[str, Any]:
        """The content of `summary.json` so far."""
        summary = self.metrics.summary(self.totals.figures(self.starts_s, self.ends_s), self.ends_s)
        return summary | self.totals.draft_figures() | {"schedule_digest": digest, "partial": partial}

    def end_s_of(self, position: int) -> float:
        """When the tokens of an iteration reached their clients: of the latest one (1), or of one before it."""
        return self.ends_s[-position]

    def _follow(self, record: IterationRecord, limit: str) -> None:
        """Take in what requests did, unless they did the same as in the iteration before."""
        tracker = self._tracker
        if tracker.follows_requests or not record.only_generates or limit != tracker.head.limit:
            tracker.add(record, self.starts_s)

    def _end(self, finished: list[Request], iteration: int) -> None:
        """These requests are complete with `iteration`."""
        for request in finished:
            timeline = self._tracker.end(request, iteration)
            self._take_request(self.metrics.add_request(timeline, self.starts_s, self.ends_s))

    def _take_request(self, line: RequestLine) -> None:
        self._write_request(line)
        if self.on_request is not None:
            self.on_request(line)

    # What a recorder of files does with lines.

    def _write_iteration(self, record: IterationRecord, limit: str) -> None: ...

    def _write_stretch(self, stretch: Stretch, limit: str) -> None: ...

    def _write_request(self, line: RequestLine) -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder(SummaryRecorder):
    """A SummaryRecorder that also writes `iterations.jsonl`, `spans.jsonl`, `requests.jsonl` and, of static batches,
    `steps.jsonl` during the run, `summary.json` at its end, and `run.json` at both.

    directory: an empty run directory.
    description: the content of `run.json`.
    max_requests, iteration_stats_every, iteration_stats_format, profile: see IterationLines.
    recording_format: suffix of the files of lines.
    clock: clock by which files are flushed each second; real time if None, so that a killed run loses little.
    recording: "summary" leaves out iterations, steps and spans.

    The other parameters are those of SummaryRecorder.
    """

    def __init__(
        self,
        directory: Path,
        description: dict[str, Any],
        total_requests: int,
        batching_type: BatchingType,
        max_requests: int,
        arrival_s: SecondsOf,
        recording_format: str = RECORDING_FORMATS[0],
        iteration_stats_every: int = 1,
        clock: Clock | None = None,
        profile: StepProfile | None = None,
        iteration_stats_format: str = ITERATION_STATS_FORMATS[0],
        held_until_s: SecondsOf | None = None,
        class_of: ClassOf = lambda index: None,
        delivery: Delivery | None = None,
        recording: str = RECORDINGS[0],
    ) -> None:
        super().__init__(description.get("config") or {}, total_requests, arrival_s, held_until_s, class_of, delivery)
        self.directory = directory
        self._description = description
        write_begun(directory, description)
        self.batching_type, self.max_requests = batching_type, max_requests
        as_executor, is_static = iteration_stats_format == "trtllm", batching_type is BatchingType.V1
        # Static batches have a line each, and their steps, which are iterations of the loop, a file of their own.
        names = ("requests", "iterations", "spans", STEPS)[: 1 if recording == "summary" else 3 + is_static]
        self._writers = {name: JsonLinesWriter(directory / f"{name}.{recording_format}") for name in names}
        self._requests = self._writers["requests"]
        self._iterations = self._writers.get(STEPS, self._writers.get("iterations"))
        if "spans" in self._writers:
            self._tracker.writer = self._writers["spans"]
        delivered_s = None if delivery is None else self.ends_s
        self._lines = StretchLines(
            batching_type, max_requests, iteration_stats_every, profile, as_executor, delivered_s
        )
        self._batches: StaticBatchLines | None = None
        if STEPS in self._writers:
            statistics = IterationStatistics(batching_type, max_requests)
            self._batches = StaticBatchLines(self._writers["iterations"], statistics, as_executor)
        self._clock, self._flushed_s = clock or WallClock(), 0.0

    def flush(self) -> None:
        """Make everything up to here readable, open spans included, in case the run is killed."""
        for writer in self._writers.values():
            writer.flush()
        if self._tracker.writer is not None:
            open_spans = self._tracker.open_lines(self.totals.iterations - 1)
            replace_file(self.directory / OPEN_SPANS, b"".join(line + b"\n" for line in open_spans))
        self._flushed_s = self._clock.now()

    def close(self, partial: bool, complete: Complete | None = None) -> dict[str, Any]:
        """As SummaryRecorder.close, when all files are complete. OutputError, then too, if files had been removed."""
        wall_s = self._clock.now()
        with writing(self.directory), ExitStack() as files:  # each is closed, even if another one cannot be written
            for writer in self._writers.values():
                files.callback(writer.close)
            self._tracker.close(self.totals.iterations - 1)
            if self._iterations is not None:
                self._iterations.add(self._lines.last())
            if self._batches is not None:
                self._batches.end()
        (self.directory / OPEN_SPANS).unlink(missing_ok=True)
        summary = super().close(partial, complete)
        write_json(self.directory / "summary.json", summary)
        ended = {"schedule_digest": self._digest.hexdigest(), "partial": partial, "wall_s": wall_s}
        write_json(self.directory / RUN, {**self._description, **ended})
        if any(writer.was_removed for writer in self._writers.values()):
            raise removed(self.directory)
        return summary

    def _end(self, finished: list[Request], iteration: int) -> None:
        super()._end(finished, iteration)
        if finished and self._clock.now() - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()

    def _write_iteration(self, record: IterationRecord, limit: str) -> None:
        if self._iterations is None:
            return
        self._iterations.add(self._lines.record(record, limit))
        if self._batches is not None:
            self._batches.add(record)

    def _write_stretch(self, stretch: Stretch, limit: str) -> None:
        if self._iterations is None:
            return
        self._lines.write_stretch(stretch, limit, self._iterations)
        if self._batches is not None:
            self._batches.add_stretch(stretch)

    def _write_request(self, line: RequestLine) -> None:
        self._requests.add(line)
