"""The files of JSON lines in a run directory: what each line holds, how it is encoded and written.

msgspec encodes a line in half the time that filling in a template takes, into a buffer in a third of it.
Optional fields are left out where they are UNSET. `trace.jsonl` is in `ifbbench.workload`, which also reads it.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from time import gmtime, strftime
from typing import Any, Final, TypeAlias

from msgspec import UNSET, Raw
from msgspec.json import Encoder

from ifbbench.compressed import open_to_write
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.step_profile import StepProfile
from ifbbench.files import restored
from ifbbench.rundir.line_types import (
    TIMESTAMP_FORMAT,
    ExecutorLine,
    InflightLine,
    IterationDetails,
    LeftOutRequest,
    PausedRequest,
    SpecDecodingStats,
    StaticLine,
    executor_line,
    queue_head_of,
    stats_of_windows,
)
from ifbbench.settings.modes import BatchingType

SHARE_DIGITS: Final = 6
SHARE_UNITS: Final = 1_000_000
BYTES_AT_ONCE = 1 << 16

_ENCODER: Final = Encoder()
encode = _ENCODER.encode


def number(value: float) -> Any:
    """`value`, to be encoded as `repr` writes it. msgspec does so too, but for floats below 1e-4 and from 1e16 on
    (0.00001, 1e16): these become their text, which only `encode` may use."""
    return value if 1e-4 <= value < 1e16 or not value else Raw(repr(value).encode())


def value_of(encoded: Any) -> float:
    """The value that was given to `number`."""
    return float(bytes(encoded)) if isinstance(encoded, Raw) else float(encoded)


def share_of(value: float) -> Any:
    """`value`, from 0 to 1, rounded to `SHARE_DIGITS` as `round` does it, but quickly; to be encoded (see `number`)."""
    scaled = value * SHARE_UNITS + 0.5
    units = int(scaled)
    # The product is exact to 1e-9, which decides unless it is as near as that to a half.
    if 1e-6 < scaled - units < 1 - 1e-6:
        return number(units / SHARE_UNITS)
    return number(round(value, SHARE_DIGITS))


class JsonLinesWriter:
    """A file of JSON lines, compressed if the path ends in .gz. About `BYTES_AT_ONCE` of the latest lines and the
    buffer of the file are in memory; after `flush` or `close` all lines can be read.

    was_removed: whether the file had been removed when it was closed, which then has written it again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = open_to_write(path)
        self.was_removed = False
        self._lines = bytearray()
        self._is_whole = True  # whether no write has failed; after one that has, a line could follow half of another

    def add(self, line: Any) -> None:
        """Append a line, which is encoded; nothing for None."""
        if line is not None:
            _ENCODER.encode_into(line, self._lines, -1)
            self._end_line()

    def add_each(self, lines: Sequence[Any]) -> None:
        """Append several lines, those that are None left out."""
        self._lines += _ENCODER.encode_lines([line for line in lines if line is not None])
        if len(self._lines) >= BYTES_AT_ONCE:
            self._write_gathered()

    def write(self, lines: Iterable[bytes]) -> None:
        """Append encoded lines, each without its line end."""
        for line in lines:
            self._lines += line
            self._end_line()

    def flush(self) -> None:
        """Make every line readable."""
        self._write_gathered()
        self._writer.flush()

    def close(self) -> None:
        """End the file; every line is readable."""
        with closing(self._writer):
            self.flush()
            self.was_removed = restored(self._path, self._writer.fileno())

    def _end_line(self) -> None:
        self._lines += b"\n"
        if len(self._lines) >= BYTES_AT_ONCE:
            self._write_gathered()

    def _write_gathered(self) -> None:
        if self._lines and self._is_whole:
            self._is_whole = False
            self._writer.write(self._lines)
            self._is_whole = True
            self._lines.clear()


Line: TypeAlias = InflightLine | StaticLine | ExecutorLine


def is_thinned_out(iteration: int, every: int, bound_by: str, before: str) -> bool:
    """Whether thinned statistics leave out an iteration that pauses no request and is not the last. before: what bound
    the iteration before it."""
    return iteration % every > 0 and bound_by == before


class IterationLines:
    """Makes the lines of `iterations.jsonl`.

    max_requests: maximum number of active requests of the engine.
    every: thinned, to the lines of every so many iterations, and of those that pause a request, are bound by another
        limit than the one before, or are the last.
    profile: adds where the time of each iteration went.
    as_executor: whether lines have the form of ExecutorLine.
    delivered_s: when the tokens of each iteration so far reach the clients; None where they do so at its end.
    """

    def __init__(
        self,
        batching_type: BatchingType,
        max_requests: int,
        every: int = 1,
        profile: StepProfile | None = None,
        as_executor: bool = False,
        delivered_s: Sequence[float] | None = None,
    ) -> None:
        self._is_static, self._max_requests = batching_type is BatchingType.V1, max_requests
        self._profile = profile
        self._as_executor = as_executor
        self._delivered_s = delivered_s
        self._every = every
        self._bound_by = ""
        self._second, self._timestamp = -1, ""
        # The latest iteration, if it was left out.
        self._latest: IterationRecord | None = None

    def record(self, record: IterationRecord, bound_by: str) -> Line | None:
        """The line of one iteration; None if it is left out. bound_by: its limit."""
        before, self._bound_by = self._bound_by, bound_by
        if not record.paused and is_thinned_out(record.iteration, self._every, bound_by, before):
            self._latest = record
            return None
        self._latest = None
        return self._complete(record)

    def last(self) -> Line | None:
        """The line of the last iteration so far, if it was left out."""
        return None if self._latest is None else self._complete(self._latest)

    def _complete(self, record: IterationRecord) -> Line:
        line = self.documented(record)
        return executor_line(line, len(record.finished)) if self._as_executor else line

    def documented(self, record: IterationRecord) -> InflightLine | StaticLine:
        """The line of one iteration in the batch manager's form."""
        chunks, cache, used = len(record.context), record.cache, record.cache.used_blocks
        # In each step of a static batch, a member generates a token or leaves its slot empty.
        scheduled = chunks + record.num_generation + record.idle if record.steps is None else chunks
        common = (
            "",  # see `_set_times`
            record.iteration,
            record.active,
            self._max_requests,
            cache.max_blocks,
            None if cache.max_blocks is None or used is None else cache.max_blocks - used,
            used,
            cache.tokens_per_block,
            cache.allocated_total,
            cache.allocated_new,
            cache.reused,
            scheduled,
            chunks,
        )
        details = self._details(record, scheduled)
        generation, tokens = record.num_generation, record.num_context_tokens
        line: InflightLine | StaticLine
        if self._is_static:
            line = StaticLine(*common, chunks + generation, tokens, record.idle, details)
        else:
            line = InflightLine(*common, generation, tokens, record.micro_batch, len(record.paused), details)
        self._set_times(line, record.timestamp, record.start_s, record.submit_s, record.end_s)
        return line

    def _set_times(
        self, line: InflightLine | StaticLine, timestamp: float, start_s: float, submit_s: float, end_s: float
    ) -> None:
        """Set all fields of times but those of passes and of a profile."""
        details, delivered_s = line.ifbbench, self._delivered_s
        line.timestamp = self._format_timestamp(timestamp)
        details.start_s, details.latency_ms = number(start_s), number((end_s - start_s) * 1000)
        details.host_ms, details.device_ms = number((submit_s - start_s) * 1000), number((end_s - submit_s) * 1000)
        if delivered_s is not None and details.first_step is UNSET:
            details.delivery_ms = number((delivered_s[line.iteration_counter] - end_s) * 1000)

    def _format_timestamp(self, timestamp: float) -> str:
        """Month-day-year hour:minute:second of seconds since the Unix epoch, in UTC. Formatted once a second."""
        if not self._second <= timestamp < self._second + 1:
            self._second = int(timestamp)
            self._timestamp = strftime(TIMESTAMP_FORMAT, gmtime(self._second))
        return self._timestamp

    def _details(self, record: IterationRecord, scheduled: int) -> IterationDetails:
        start_s, submit_s, end_s, left_out = record.start_s, record.submit_s, record.end_s, record.left_out
        cache = record.cache
        details = IterationDetails(
            start_s=0.0,  # the times: see `_set_times`
            latency_ms=0.0,
            host_ms=0.0,
            device_ms=0.0,
            queued=record.queued,
            waiting=record.queued + record.active - record.in_flight - scheduled,
            bound_by=self._bound_by,
            first_left_out=None if left_out is None else LeftOutRequest(left_out.request.request_id, left_out.limit),
            paused=[PausedRequest(pause.victim.request_id, pause.beneficiary.request_id) for pause in record.paused],
            tokens_recomputed=record.recomputed,
            budget_used=record.budget_used,
            padding_tokens=record.padding or UNSET,
            missed_blocks=cache.missed,
            kv_fragmentation=share_of(cache.fragmentation),
        )
        if record.queue_head is not left_out:
            details.queue_head = queue_head_of(record)
        if cache.windows:
            details.kv_cache_iteration_stats = stats_of_windows(cache)
        if record.steps is not None:
            details.first_step, details.last_step = record.steps
            return details
        if record.loads:
            details.lora_loads = [load.task_id for load in record.loads]
        if (drafts := record.drafts) is not None:
            details.spec_decoding = SpecDecodingStats(
                drafts.drafted,
                drafts.accepted,
                drafts.requests,
                number(drafts.acceptance_length),
                number(drafts.draft_s * 1000),
                number(drafts.draft_s / (end_s - start_s) if end_s > start_s else 0.0),
            )
        if record.context_end_s is not None:
            details.context_pass_ms = number((record.context_end_s - submit_s) * 1000)
            details.generation_pass_ms = number((end_s - record.context_end_s) * 1000)
        if self._profile is not None:
            step = self._profile.take(record.iteration)
            details.schedule_ms = number((submit_s - start_s - step.prepare_s - step.launch_s) * 1000)
            details.prepare_ms, details.launch_ms = number(step.prepare_s * 1000), number(step.launch_s * 1000)
            details.collect_ms, details.device_busy_ms = number(step.collect_s * 1000), number(step.device_s * 1000)
            details.flops, details.bytes = number(step.flops), number(step.bytes)
        return details
