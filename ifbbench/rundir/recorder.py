"""The recorder: an observer of the token generation loop that sums up the run and writes the run directory."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.clock import Clock, WallClock
from ifbbench.engine.interfaces import Delivery
from ifbbench.engine.records import CacheState, IterationRecord, IterationStatistics, ScheduleDigest, Stretch
from ifbbench.engine.request import Request
from ifbbench.engine.step_profile import StepProfile
from ifbbench.files import removed, replace_file, writing
from ifbbench.rundir import metrics
from ifbbench.rundir.drafts import DraftTotals
from ifbbench.rundir.line_types import RequestLine
from ifbbench.rundir.lines import IterationLines, JsonLinesWriter, number, request_line
from ifbbench.rundir.metrics import BOUND_BY, Population, bound_by, by_group, limit_waited_for, slow_ttft_s
from ifbbench.rundir.run_directory import OPEN_SPANS, RUN, STEPS, write_begun, write_json
from ifbbench.rundir.spans import RequestTimeline, SecondsOf, SpanTracker
from ifbbench.rundir.traffic import MIN_REQUESTS, NO_TRAFFIC, TRAFFIC_COLUMNS, traffic
from ifbbench.settings.config import DEFAULT_PRIORITY, ITERATION_STATS_FORMATS, RECORDING_FORMATS, RECORDINGS
from ifbbench.settings.objectives import meets_all, parse_objectives

FLUSH_INTERVAL_S = 1.0
ClassOf = Callable[[int], str | None]
Complete = Callable[[dict[str, Any]], dict[str, Any]]


class RunMetrics:
    """Sums and samples of a run, taken in as iterations run and requests end.

    class_of(index): the class of the request at this index of the trace. config: the settings `slo` and `concurrency`.
    """

    def __init__(self, total_requests: int, class_of: ClassOf, config: Mapping[str, Any]) -> None:
        self.total = total_requests
        self.slots = self.padded_slots = self.empty_generation_slots = 0
        self.pauses = self.recomputed_tokens = self.computed_tokens = 0
        self.iterations = self.peak_scheduled = self.peak_active = 0
        # None where the cache has no blocks.
        self.peak_used_blocks: int | None = None
        self.max_blocks: int | None = None
        # With several attention windows: the size of the pool and its peak use, by the tokens of each window.
        self._windows: dict[str, dict[str, int]] = {}
        self.tokens_per_block: int | None = None
        self.max_tokens = self.peak_held_tokens = self.peak_filled_tokens = 0
        self.first_arrival_s = float("inf")
        self.last_end_s = 0.0
        self._completed, self._class_of = 0, class_of
        self._objectives = parse_objectives(config["slo"]) if config.get("slo") else ()
        self._has_goodput = any(one.statistic is None for one in self._objectives)
        # With a closed loop or all requests at once, a queue is no sign of overload.
        self._is_closed_loop = config.get("concurrency") is not None
        # By class and priority.
        self._populations: defaultdict[tuple[str | None, float], Population] = defaultdict(Population)
        # The number of each limit, and of each iteration the number of the limit that bound it.
        self._limits: defaultdict[str, int] = defaultdict(None, {name: number for number, name in enumerate(BOUND_BY)})
        self._limits.default_factory = self._limits.__len__
        self._limit_of = array("i")
        self._waited_s = dict.fromkeys(BOUND_BY, 0.0)
        self._drafts: DraftTotals | None = None  # of a run with draft tokens

    def add_iterations(self, record: IterationRecord, limit: str, count: int, cache: CacheState) -> None:
        """Take in one iteration, or a stretch that begins with it. limit: what bound them. cache: in the last one, when
        requests hold most."""
        computed, padded = record.budget_used, record.padding + record.idle * count
        scheduled = len(record.context) + record.num_generation
        self.iterations += count
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
        self._add_cache(cache)
        number = self._limits[limit]
        if count == 1:
            self._limit_of.append(number)
        else:
            self._limit_of.extend([number] * count)
        if record.drafts is not None:
            self._drafts = self._drafts or DraftTotals()
            self._drafts.add(record.drafts)

    def _add_cache(self, cache: CacheState) -> None:
        self.max_blocks, self.tokens_per_block = cache.max_blocks, cache.tokens_per_block
        if cache.used_blocks is not None and cache.used_blocks > (self.peak_used_blocks or -1):
            self.peak_used_blocks = cache.used_blocks
        for window in cache.windows:
            known = self._windows.setdefault(str(window.size), {"max": window.max_blocks, "peak_used": 0})
            known["peak_used"] = max(known["peak_used"], window.used_blocks)
        self.max_tokens = cache.max_tokens
        if cache.held_tokens > self.peak_held_tokens:
            self.peak_held_tokens = cache.held_tokens
        if cache.filled_tokens > self.peak_filled_tokens:
            self.peak_filled_tokens = cache.filled_tokens

    def add_request(self, timeline: RequestTimeline, starts: Sequence[float], ends: Sequence[float]) -> RequestLine:
        """Take in a completed request; returns its line of `requests.jsonl`. starts, ends: [iterations], seconds."""
        request, arrival_s, stretches = timeline.request, timeline.arrival_s, timeline.token_iterations
        output_len, first_scheduled_s = timeline.produced, starts[timeline.first_run]
        first_token_s, last_token_s = ends[stretches[0][0]], ends[stretches[-1][1]]
        # Later than the last token where a static batch held the request back.
        end_s = ends[timeline.last_iteration]
        queue_time_s, ttft_s, e2e_s = first_scheduled_s - arrival_s, first_token_s - arrival_s, end_s - arrival_s
        tpot_s = (last_token_s - first_token_s) / (output_len - 1) if output_len > 1 else None
        name = self._class_of(request.index)
        population = self._populations[name, request.priority]
        prompt_len, index = request.original_prompt_len, self._completed
        population.add(arrival_s, queue_time_s, ttft_s, tpot_s, e2e_s, prompt_len, output_len, index)
        self._completed += 1
        population.gaps.add(stretches, timeline.every)
        population.reused_tokens += request.reused_tokens
        if arrival_s < self.first_arrival_s:
            self.first_arrival_s = arrival_s
        if end_s > self.last_end_s:
            self.last_end_s = end_s
        attribution_s = dict[str, Any]()
        for part, seconds in timeline.attribution(starts, end_s).items():
            attribution_s[part] = number(seconds)
            if seconds and (limit := limit_waited_for(part)) is not None:
                self._waited_s[limit] = self._waited_s.get(limit, 0.0) + seconds
        times_s = [
            number(queue_time_s),
            number(ttft_s),
            None if tpot_s is None else number(tpot_s),
            number(e2e_s),
            number(first_scheduled_s),
            number(first_token_s),
            number(end_s),
        ]
        line = request_line(request, arrival_s, output_len, "completed", None, times_s, attribution_s)
        if self._has_goodput:
            latencies = {"queue_time_s": queue_time_s, "ttft_s": ttft_s, "tpot_s": tpot_s, "e2e_s": e2e_s}
            line.slo_met = meets_all(self._objectives, latencies)
        if request.num_drafted:
            line.draft_tokens, line.accepted_draft_tokens = request.num_drafted, request.accepted_drafts
        return self._with_group(line, name, request.priority)

    def add_failure(self, request: Request, arrival_s: float, error: str | None) -> RequestLine:
        """Take in a request that was refused, failed, or was stopped by its client (`error` None); returns its line of
        `requests.jsonl`."""
        name = self._class_of(request.index)
        self._populations[name, request.priority].failed += error is not None
        self.first_arrival_s = min(self.first_arrival_s, arrival_s)
        # An error that quotes a file name may have characters that UTF-8 has not.
        text = None if error is None else error.encode(errors="backslashreplace").decode()
        outcome = "stopped" if error is None else "failed"
        line = request_line(request, arrival_s, request.num_outputs, outcome, text)
        if self._has_goodput and error is not None:
            line.slo_met = False
        return self._with_group(line, name, request.priority)

    def _with_group(self, line: RequestLine, name: str | None, priority: float) -> RequestLine:
        """The line, with the request's class and priority where it has them."""
        if name is not None:
            line.request_class = name
        if priority != DEFAULT_PRIORITY:
            line.priority = number(priority)
        return line

    def add_server(self, other: "RunMetrics") -> None:
        """Take in the run of another server that shared the requests, as if its iterations followed those so far.

        Of the cache and of peaks, the largest values of one server count."""
        for key, population in other._populations.items():
            self._populations[key].add_all(population, self._completed, self.iterations)
        self.total += other.total
        self.slots, self.padded_slots = self.slots + other.slots, self.padded_slots + other.padded_slots
        self.empty_generation_slots += other.empty_generation_slots
        self.pauses += other.pauses
        self.recomputed_tokens += other.recomputed_tokens
        self.computed_tokens += other.computed_tokens
        self.iterations += other.iterations
        self._completed += other._completed
        self.peak_scheduled = max(self.peak_scheduled, other.peak_scheduled)
        self.peak_active = max(self.peak_active, other.peak_active)
        if other.peak_used_blocks is not None:
            self.peak_used_blocks = max(self.peak_used_blocks or 0, other.peak_used_blocks)
        for size, known in other._windows.items():
            mine = self._windows.setdefault(size, dict(known))
            mine["peak_used"] = max(mine["peak_used"], known["peak_used"])
        self.peak_held_tokens = max(self.peak_held_tokens, other.peak_held_tokens)
        self.peak_filled_tokens = max(self.peak_filled_tokens, other.peak_filled_tokens)
        self.first_arrival_s = min(self.first_arrival_s, other.first_arrival_s)
        self.last_end_s = max(self.last_end_s, other.last_end_s)
        numbers = [self._limits[name] for name in other._limits]
        self._limit_of.extend([numbers[number] for number in other._limit_of])
        for name, seconds in other._waited_s.items():
            self._waited_s[name] = self._waited_s.get(name, 0.0) + seconds
        if other._drafts is not None:
            self._drafts = self._drafts or DraftTotals()
            self._drafts.add_totals(other._drafts)

    def summary(self, digest: str, partial: bool, starts: Sequence[float], ends: Sequence[float]) -> dict[str, Any]:
        """The content of `summary.json`. starts, ends: of each iteration, in seconds."""
        whole = Population.merged(list(self._populations.values()))
        span = self.last_end_s - self.first_arrival_s if self._completed else 0.0
        figures = whole.figures(span, ends, self._objectives)
        figures["requests"] |= {"total": self.total}
        blocks = self.max_blocks, self.peak_used_blocks, self.tokens_per_block
        of_windows = {"per_window_size": self._windows} if self._windows else {}
        tokens = self.max_tokens, self.peak_held_tokens, self.peak_filled_tokens
        found = {
            "requests": figures.pop("requests"),
            "duration_s": span,
            **figures,
            "iterations": self.iterations,
            "pauses": self.pauses,
            "recomputed_tokens": self.recomputed_tokens,
            "recomputed_share": self.recomputed_tokens / self.computed_tokens if self.computed_tokens else 0.0,
            "empty_generation_slots": self.empty_generation_slots,
            "padding_waste": self.padded_slots / self.slots if self.slots else 0.0,
            "kv_blocks": dict(zip(("max", "peak_used", "tokens_per_block"), blocks, strict=True)) | of_windows,
            "kv_tokens": dict(zip(("max", "peak_held", "peak_filled"), tokens, strict=True)),
            "peak_scheduled_requests": self.peak_scheduled,
            **metrics.shares_of_limits(list(self._limits), self._limit_of, np.asarray(ends) - np.asarray(starts)),
            "waiting_by_limit": self._waited_s,
            **NO_TRAFFIC,
        }
        if self._completed >= MIN_REQUESTS and not self._is_closed_loop:
            arrival_s, queue_time_s, ttft_s = (np.asarray(whole.columns[name]) for name in TRAFFIC_COLUMNS)
            found |= traffic(arrival_s, queue_time_s, ttft_s, slow_ttft_s(self._objectives))
        found |= by_group(self._populations, span, ends, self._objectives)
        if self._drafts is not None:
            found["speculative_decoding"] = self._drafts.figures()
        return found | {"schedule_digest": digest, "partial": partial}


@mypyc_attr(allow_interpreted_subclasses=True)
class SummaryRecorder:
    """An Observer that sums up a run in memory, for runs of which only the summary is kept: it writes no file, which
    saves a third of the time of a simulated run.

    config: the resolved settings. arrival_s(request): its arrival by the trace, in seconds on the run's clock.
    held_until_s: see SpanTracker. class_of: see RunMetrics. delivery: of the tokens; at the end of their iteration if
    None.
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
        self.metrics = RunMetrics(total_requests, class_of, config)
        self._arrival_s = arrival_s
        self._tracker = SpanTracker(arrival_s, held_until_s)
        self._digest = ScheduleDigest()
        self._starts, self._ends = array("d"), array("d")
        self._delivery = delivery

    def iteration(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        limit = bound_by(record)
        self._starts.append(record.start_s)
        self._ends.append(record.end_s if self._delivery is None else self._delivery.of_iteration(record))
        self.metrics.add_iterations(record, limit, 1, record.cache)
        self._digest.add(record)
        self._write_iteration(record, limit)
        self._tracker.add(record, self._starts)
        self._end(record.finished, record.iteration)

    def stretch(self, stretch: Stretch) -> None:
        """Take in several iterations. Only the first one of each micro batch may change what a request does."""
        first, turns = stretch.first, stretch.turns
        if stretch.length == 1:
            first.finished = stretch.finished
            self.iteration(first)
            return
        limit = bound_by(first)
        self._starts.extend(stretch.start_s)
        self._ends.extend(stretch.end_s if self._delivery is None else self._delivery.of_stretch(stretch))
        for turn, record in enumerate(turns):
            count = (stretch.length - turn + len(turns) - 1) // len(turns)
            self.metrics.add_iterations(record, limit, count, stretch.last_cache)
        self._digest.add_stretch(stretch)
        self._write_stretch(stretch, limit)
        for record in turns:
            self._tracker.add(record, self._starts)
        for chunk in first.context:
            self._tracker.add_chunks(chunk, stretch.length - 1)
        self._end(stretch.finished, stretch.last_iteration)

    def left(self, request: Request, error: str | None) -> None:
        """Take in a request that was refused, failed or was stopped."""
        self._digest.leave(request)
        self._tracker.drop(request, self.metrics.iterations)
        self._write_request(self.metrics.add_failure(request, self._arrival_s(request), error))

    def flush(self) -> None:
        """Make everything up to here readable, in case the run is killed."""

    def close(self, partial: bool, complete: Complete | None = None) -> dict[str, Any]:
        """End the recording; returns the summary. partial: the run did not reach its end. complete(summary): more."""
        summary = self.metrics.summary(self._digest.hexdigest(), partial, self._starts, self._ends)
        return summary if complete is None else summary | complete(summary)

    @property
    def times(self) -> tuple["array[float]", "array[float]"]:
        """Start and end of each iteration, in seconds."""
        return self._starts, self._ends

    def add_server(self, other: "SummaryRecorder") -> None:
        """Take in the run of another server that shared the requests; see RunMetrics."""
        self.metrics.add_server(other.metrics)
        self._starts.extend(other._starts)
        self._ends.extend(other._ends)

    def _end(self, finished: list[Request], iteration: int) -> None:
        """These requests are complete with `iteration`."""
        for request in finished:
            timeline = self._tracker.end(request, iteration)
            self._write_request(self.metrics.add_request(timeline, self._starts, self._ends))

    # What a recorder of files does with lines.

    def _write_iteration(self, record: IterationRecord, limit: str) -> None: ...

    def _write_stretch(self, stretch: Stretch, limit: str) -> None: ...

    def _write_request(self, line: RequestLine) -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder(SummaryRecorder):
    """A SummaryRecorder that also writes `iterations.jsonl`, `spans.jsonl`, `requests.jsonl` and, of static batches,
    `steps.jsonl` during the run, `summary.json` at its end, and `run.json` at both.

    directory: an empty run directory. description: the content of `run.json`. recording_format: suffix of the files of
    lines. statistics, iteration_stats_every, iteration_stats_format, profile: see IterationLines. recording: with
    "summary", iterations, steps and spans are not written. clock: files are flushed each second by it; real time if
    None, so that a killed run loses little. The others: see SummaryRecorder.
    """

    def __init__(
        self,
        directory: Path,
        description: dict[str, Any],
        total_requests: int,
        statistics: IterationStatistics,
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
        as_executor, self._statistics = iteration_stats_format == "trtllm", statistics
        # Static batches have a line each, and their steps, which are iterations of the loop, a file of their own.
        names = ("requests", "iterations", "spans", STEPS)[: 1 if recording == "summary" else 3 + statistics.is_static]
        self._writers = {name: JsonLinesWriter(directory / f"{name}.{recording_format}") for name in names}
        self._requests, self._batches = self._writers["requests"], self._writers.get("iterations")
        self._iterations = self._writers.get(STEPS, self._batches)
        if "spans" in self._writers:
            self._tracker.writer = self._writers["spans"]
        delivered_s = None if delivery is None else self._ends
        self._lines = IterationLines(statistics, iteration_stats_every, profile, as_executor, delivered_s)
        self._batch_lines = IterationLines(statistics, as_executor=as_executor)
        self._clock, self._flushed_s = clock or WallClock(), 0.0

    def flush(self) -> None:
        """Make everything up to here readable, open spans included, in case the run is killed."""
        for writer in self._writers.values():
            writer.flush()
        if self._tracker.writer is not None:
            open_spans = self._tracker.open_lines(self.metrics.iterations - 1)
            replace_file(self.directory / OPEN_SPANS, b"".join(line + b"\n" for line in open_spans))
        self._flushed_s = self._clock.now()

    def close(self, partial: bool, complete: Complete | None = None) -> dict[str, Any]:
        """As SummaryRecorder.close, when all files are complete. OutputError, then too, if files had been removed."""
        wall_s = self._clock.now()
        with writing(self.directory), ExitStack() as files:  # each is closed, even if another one cannot be written
            for writer in self._writers.values():
                files.callback(writer.close)
            self._tracker.close(self.metrics.iterations - 1)
            if self._iterations is not None:
                self._iterations.add(self._lines.last())
                self._write_batches(self._statistics.unreported())
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
        if self._statistics.is_static:
            self._write_batches(self._statistics.reported(record))

    def _write_batches(self, records: Iterable[IterationRecord]) -> None:
        assert self._batches is not None
        for record in records:
            self._batches.add(self._batch_lines.whole(record, bound_by(record)))

    def _write_stretch(self, stretch: Stretch, limit: str) -> None:
        if self._iterations is None:
            return
        self._lines.write_stretch(stretch, limit, self._iterations)
        if self._statistics.is_static:
            self._write_batches(self._statistics.reported_of(stretch))

    def _write_request(self, line: RequestLine) -> None:
        self._requests.add(line)
