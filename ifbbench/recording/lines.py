"""The files of JSON lines in a run directory: what each line holds, how it is encoded and written.

msgspec encodes a line in half the time that filling in a template takes. Optional fields are left out where they are
UNSET. `trace.jsonl` is in `ifbbench.workload`, which also reads it.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import cast

from msgspec import UNSET, Raw, Struct, UnsetType, field
from msgspec.json import Encoder

from ifbbench.compressed import open_to_write
from ifbbench.engine.records import INFLIGHT_FIELDS, IterationRecord, IterationStatistics, Stretch
from ifbbench.engine.request import Request
from ifbbench.execution.step_profile import StepProfile
from ifbbench.recording.iteration_lines import (
    InflightLine,
    IterationDetails,
    LeftOutRequest,
    PausedRequest,
    SpecDecodingStats,
    StaticLine,
    executor_line,
)

FRAGMENTATION_DIGITS = 6
LINES_AT_ONCE = 64

encode = Encoder().encode


def number(value: float) -> float:
    """`value`, to be encoded as `repr` writes it. msgspec does so too, but for floats below 1e-4 and from 1e16 on
    (0.00001, 1e16): these become their text, which only `encode` may use."""
    return value if 1e-4 <= value < 1e16 or not value else cast(float, Raw(repr(value).encode()))


class SpanLine(Struct):
    """A line of `spans.jsonl`: consecutive iterations of a micro batch in which one request does one thing.

    cause: why it waits, or the id of the request that it was paused for. first_output: of generation, the position of
    the output token of the first iteration. chunks: of context and recompute, tokens of each iteration. produced:
    output tokens that were not there before. every: with several micro batches, of a span in which the request runs,
    their number: it runs in each so many iterations, from the first to the last. steps: of generation, tokens of each
    iteration, where draft tokens make it more than one in some.
    """

    request_id: int
    phase: str
    first_iteration: int
    last_iteration: int
    tokens: int
    cause: str | int | None
    first_output: int | UnsetType
    chunks: list[int] | UnsetType
    produced: int | UnsetType
    every: int | UnsetType = UNSET
    steps: list[int] | UnsetType = UNSET


class RequestLine(Struct):
    """A line of `requests.jsonl`. Times are None, and attribution_s is empty, unless the request completed.

    attribution_s: seconds by what the request did or waited for, which add up to e2e_s. max_new_tokens: as requested.
    class, priority: where the trace gives them, the default priority left out. slo_met: whether the request
    met every objective of each request, where there are any. draft_tokens, accepted_draft_tokens: those verified, and
    those that became output, of requests with any.
    """

    request_id: int
    index: int
    arrival_s: float
    prompt_len: int
    output_len: int
    queue_time_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    first_scheduled_s: float | None
    first_token_s: float | None
    end_s: float | None
    max_new_tokens: int
    pauses: int
    recomputed_tokens: int
    reused_tokens: int
    attribution_s: dict[str, float]
    outcome: str
    error: str | None
    request_class: str | UnsetType = field(default=UNSET, name="class")
    priority: float | UnsetType = UNSET
    slo_met: bool | UnsetType = UNSET
    draft_tokens: int | UnsetType = UNSET
    accepted_draft_tokens: int | UnsetType = UNSET


def request_line(
    request: Request, arrival_s: float, output_len: int, outcome: str, error: str | None = None,
    times_s: Sequence[float | None] = (None,) * 7, attribution_s: Mapping[str, float] = MappingProxyType({}),
) -> RequestLine:  # fmt: skip
    """The line of a request. times_s: `queue_time_s` to `end_s` of RequestLine."""
    # A pause appends output tokens to the prompt and lowers max_new_tokens by them.
    requested = request.max_new_tokens + request.prompt_len - request.original_prompt_len
    queue, ttft, tpot, e2e, scheduled, first, end = (None if time is None else number(time) for time in times_s)
    return RequestLine(
        request.request_id, request.index, number(arrival_s), request.original_prompt_len, output_len,
        queue, ttft, tpot, e2e, scheduled, first, end, requested, request.pauses, request.recomputed_tokens,
        request.reused_tokens if outcome == "completed" else 0,
        {part: number(seconds) for part, seconds in attribution_s.items()}, outcome, error,
    )  # fmt: skip


class JsonLinesWriter:
    """A file of JSON lines, compressed if the path ends in .gz. At most `LINES_AT_ONCE` lines and the buffer of the
    file are in memory; after `flush` or `close` all lines can be read."""

    def __init__(self, path: Path) -> None:
        self._writer = open_to_write(path)
        self._lines: list[bytes] = []
        self._is_whole = True  # whether no write has failed; after one that has, a line could follow half of another

    def write(self, lines: Iterable[bytes]) -> None:
        """Append lines, each without its line end."""
        self._lines.extend(lines)
        if len(self._lines) >= LINES_AT_ONCE:
            self._write_gathered()

    def flush(self) -> None:
        """Make every line readable."""
        self._write_gathered()
        self._writer.flush()

    def close(self) -> None:
        """End the file; every line is readable."""
        with closing(self._writer):
            self._write_gathered()

    def _write_gathered(self) -> None:
        if self._lines and self._is_whole:
            self._lines.append(b"")  # so that the last line ends too
            self._is_whole = False
            self._writer.write(b"\n".join(self._lines))
            self._is_whole = True
            self._lines.clear()


class IterationEncoder:
    """Encodes the lines of `iterations.jsonl`.

    statistics: makes the batch manager's fields. every: thinned, to the lines of every so many iterations, and of those
    that pause a request, are bound by another limit than the one before, or are the last. profile: adds where the time
    of each iteration went. as_executor: in the form of ExecutorLine.
    """

    def __init__(
        self, statistics: IterationStatistics, every: int = 1, profile: StepProfile | None = None,
        as_executor: bool = False,
    ) -> None:  # fmt: skip
        self._statistics = statistics
        self._line_type = InflightLine if statistics.names[-1] == INFLIGHT_FIELDS[-1] else StaticLine
        self._profile = profile
        self._as_executor = as_executor
        self._every = every
        self._bound_by = ""
        # The latest iterations, if the last of them was left out.
        self._latest: IterationRecord | Stretch | None = None

    def whole(self, record: IterationRecord, bound_by: str) -> bytes:
        """The line of a static batch."""
        self._bound_by = bound_by
        return self._encoded(record)

    def record(self, record: IterationRecord, bound_by: str) -> Sequence[bytes]:
        """The line of one iteration; none if it is left out. bound_by: its limit."""
        before, self._bound_by = self._bound_by, bound_by
        if record.iteration % self._every and not record.paused and bound_by == before:
            self._latest = record
            return ()
        self._latest = None
        return (self._encoded(record),)

    def stretch(self, stretch: Stretch, bound_by: str) -> list[bytes]:
        """The lines of all iterations of a stretch, equal to those of `record`: one line, of which only the fields that
        differ are set again. Numbers of Python, because stretches are often so short that arrays are slower."""
        first, cache, every, as_executor = stretch.first, stretch.first.cache, self._every, self._as_executor
        timestamp_of = self._statistics.format_timestamp
        changed, self._bound_by = bound_by != self._bound_by, bound_by
        size, held, filled = cache.tokens_per_block or 0, cache.held_tokens, cache.filled_tokens
        used, total, new = cache.used_blocks or 0, cache.allocated_total or 0, cache.allocated_new or 0
        free = (cache.max_blocks or 0) - used
        line = self._line(first)
        details = line.ifbbench
        columns = (stretch.start_s, stretch.submit_s, stretch.end_s, stretch.more_blocks)
        each = zip(*(column.tolist() for column in columns), strict=True)
        lines = []
        for iteration, (start_s, submit_s, end_s, more) in enumerate(each, start=first.iteration):
            if not iteration % every or (changed and iteration == first.iteration):
                line.timestamp = timestamp_of(stretch.epoch_s + start_s)
                line.iteration_counter = iteration
                line.free_kv_cache_blocks = free - more
                line.used_kv_cache_blocks = used + more
                line.allocated_total_kv_cache_blocks = total + more
                line.allocated_new_kv_cache_blocks = new + more
                details.start_s = number(start_s)
                details.latency_ms = number((end_s - start_s) * 1000)
                details.host_ms = number((submit_s - start_s) * 1000)
                details.device_ms = number((end_s - submit_s) * 1000)
                fragmentation = max(0.0, 1.0 - filled / (held + more * size))
                details.kv_fragmentation = number(round(fragmentation, FRAGMENTATION_DIGITS))
                if not as_executor:
                    lines.append(encode(line))
                else:
                    completed = len(stretch.finished) if iteration == stretch.last_iteration else 0
                    lines.append(encode(executor_line(line, completed)))
            filled += first.num_generation
        left_out = stretch.last_iteration % every and (stretch.length > 1 or not changed)
        self._latest = stretch if left_out else None
        return lines

    def last(self) -> Sequence[bytes]:
        """The line of the last iteration so far, if it was left out."""
        if self._latest is None:
            return ()
        record = deque(self._latest.records(), 1)[0] if isinstance(self._latest, Stretch) else self._latest
        return (self._encoded(record),)

    def _encoded(self, record: IterationRecord) -> bytes:
        line = self._line(record)
        return encode(executor_line(line, len(record.finished)) if self._as_executor else line)

    def _line(self, record: IterationRecord) -> InflightLine | StaticLine:
        return self._line_type(*self._statistics.values(record), self._details(record))  # type: ignore[call-arg,arg-type]

    def _details(self, record: IterationRecord) -> IterationDetails:
        start_s, submit_s, end_s, left_out = record.start_s, record.submit_s, record.end_s, record.left_out
        scheduled = len(record.context)
        if record.steps is None:
            scheduled += record.num_generation + record.idle
        details = IterationDetails(
            number(start_s), number((end_s - start_s) * 1000), number((submit_s - start_s) * 1000),
            number((end_s - submit_s) * 1000), UNSET, UNSET, UNSET, UNSET, UNSET, UNSET, UNSET, UNSET, UNSET,
            record.queued, record.queued + record.active - record.in_flight - scheduled, self._bound_by,
            None if left_out is None else LeftOutRequest(left_out.request.request_id, left_out.limit),
            [PausedRequest(pause.victim.request_id, pause.beneficiary.request_id) for pause in record.paused],
            record.recomputed, record.budget_used, record.padding or UNSET,
            record.cache.missed, number(round(record.cache.fragmentation, FRAGMENTATION_DIGITS)),
        )  # fmt: skip
        if record.steps is not None:
            details.first_step, details.last_step = record.steps
            return details
        if record.loads:
            details.lora_loads = [load.task_id for load in record.loads]
        if (drafts := record.drafts) is not None:
            details.spec_decoding = SpecDecodingStats(
                drafts.drafted, drafts.accepted, drafts.requests, number(drafts.acceptance_length),
                number(drafts.draft_s * 1000), number(drafts.draft_s / (end_s - start_s) if end_s > start_s else 0.0),
            )  # fmt: skip
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
