"""Requests from the state of each request in each iteration, as TensorRT-LLM lists it in its iteration statistics.

`requestStats` has of each request its stage, the position in its prompt and the number of its output tokens after the
iteration, and whether it ran in it. A request arrives with the first iteration that lists it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from ifbbench.errors import InputError
from ifbbench.rundir.line_types import RUNNING, Phase, RequestLine, SpanLine
from ifbbench.rundir.metrics import WAITING_FOR
from ifbbench.settings.fields import integer
from ifbbench.workload.trace import TraceRequest

NOT_LOGGED = "not_logged"  # what held a request that waits, where the log does not say
COMPLETE = "GENERATION_COMPLETE"


@dataclass(slots=True)
class _Known:
    """A request so far.

    position: position in its prompt.
    outputs: tokens.
    reused: tokens of its prompt that were in the cache.
    first_s, last_s: ends of the iterations of its first and its last token.
    spent: seconds of each part of its time.
    """

    index: int
    arrival_s: float
    position: int = 0
    outputs: int = 0
    reused: int = 0
    pauses: int = 0
    is_complete: bool = False
    scheduled_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0
    since_s: float = 0.0
    part: str = ""
    spent: dict[str, float] = field(default_factory=dict)
    span: SpanLine | None = None


class RequestStats:
    """Follows requests from iteration to iteration.

    block_size: tokens of a KV block.
    spans, lines, trace: what becomes of them; the latter two are there after `close`.
    """

    def __init__(self, block_size: int) -> None:
        self.spans: list[SpanLine] = []
        self.lines: list[RequestLine] = []
        self.trace: list[TraceRequest] = []
        self._block_size = block_size
        self._requests: dict[int, _Known] = {}

    def follow(
        self, iteration: int, start_s: float, end_s: float, listed: Mapping[int, Mapping[str, Any]]
    ) -> list[int]:
        """Take in what an iteration says of requests, by id; returns those that it paused."""
        paused = list[int]()
        for request_id, stats in listed.items():
            one = self._requests.get(request_id)
            if one is None:
                one = self._requests[request_id] = _Known(len(self._requests), start_s, since_s=start_s)
            if one.is_complete:
                continue
            if self._take(one, request_id, stats, iteration, start_s, end_s):
                paused.append(one.index)
        return paused

    def close(self) -> None:
        """End the requests: there is no further iteration."""
        for one in self._requests.values():
            if one.span is not None:
                self.spans.append(one.span)
            self.lines.append(_request_line(one))
            length = max(one.outputs, 1)
            prompt_len = max(one.position, 1)
            self.trace.append(TraceRequest(one.index, one.arrival_s, prompt_len, length, length))

    def _take(
        self, one: _Known, request_id: int, stats: Mapping[str, Any], iteration: int, start_s: float, end_s: float
    ) -> bool:
        """Take in the state of a request after an iteration; whether it was paused in it."""
        name = f"requestStats of request {request_id}: "
        position, outputs = (
            integer(stats.get(key), f"{name}{key}", 0) for key in ("contextPrefillPosition", "numGeneratedTokens")
        )
        was_paused = bool(stats.get("paused"))
        if stats.get("scheduled") and not was_paused:
            if one.scheduled_s is None:
                one.scheduled_s = start_s
                blocks = integer(stats.get("reusedBlocksPerRequest") or 0, f"{name}reusedBlocksPerRequest", 0)
                one.reused = min(blocks * self._block_size, max(position - one.position - 1, 0))
                one.position += one.reused
            self._run(one, position, outputs, iteration, start_s, end_s)
        else:
            self._wait(one, was_paused, iteration, start_s)
        # A pause takes the position back; the tokens that were generated stay.
        one.position, one.outputs = position, max(outputs, one.outputs)
        if stats.get("stage") == COMPLETE and one.part in RUNNING:
            one.is_complete = True
            self._end_part(one, end_s)
        return was_paused

    def _run(self, one: _Known, position: int, outputs: int, iteration: int, start_s: float, end_s: float) -> None:
        """The request ran: up to this position of its prompt, if it was not there yet, and to so many output tokens."""
        chunk, produced = max(position - one.position, 0), max(outputs - one.outputs, 0)
        phase = Phase.GENERATION if not chunk else Phase.RECOMPUTE if one.pauses else Phase.CONTEXT
        span = self._go_on(one, phase, iteration, start_s)
        span.tokens += chunk or 1
        span.produced = (span.produced or 0) + produced
        if chunk:
            span.chunks = [*(span.chunks or ()), chunk]
        elif span.first_output is UNSET:
            span.first_output = one.outputs
        if produced:
            one.first_s, one.last_s = one.first_s or end_s, end_s

    def _wait(self, one: _Known, was_paused: bool, iteration: int, start_s: float) -> None:
        """The request did not run: it was paused, in this iteration or before, was skipped, or has not begun."""
        one.pauses += was_paused
        if was_paused or one.part == Phase.PAUSED:
            self._go_on(one, Phase.PAUSED, iteration, start_s)
        elif one.scheduled_s is not None:
            self._go_on(one, Phase.SKIPPED, iteration, start_s)
        else:
            self._go_on(one, Phase.WAITING, iteration, start_s, cause=NOT_LOGGED)

    def _go_on(self, one: _Known, phase: str, iteration: int, start_s: float, cause: str | None = None) -> SpanLine:
        """A request does in an iteration what `phase` says: its span goes on, or another one begins. Returns it."""
        span = one.span
        if span is not None and span.phase == phase and span.last_iteration == iteration - 1:
            span.last_iteration = iteration
            return span
        if span is not None:
            self.spans.append(span)
        self._end_part(one, start_s)
        one.part = phase
        has_output = phase in RUNNING
        span = SpanLine(one.index, phase, iteration, iteration, 0, cause, UNSET, UNSET, 0 if has_output else UNSET)
        one.span = span
        return span

    def _end_part(self, one: _Known, until_s: float) -> None:
        if one.part:
            part = f"{WAITING_FOR}{NOT_LOGGED}" if one.part == Phase.WAITING else one.part
            one.spent[part] = one.spent.get(part, 0.0) + until_s - one.since_s
        one.since_s = until_s


def _request_line(one: _Known) -> RequestLine:
    is_known = one.is_complete and one.scheduled_s is not None and one.first_s is not None
    times: Sequence[float | None] = (None,) * 7
    if is_known:
        assert one.scheduled_s is not None
        assert one.first_s is not None
        tpot_s = (one.last_s - one.first_s) / (one.outputs - 1) if one.outputs > 1 else None
        latencies = (one.scheduled_s - one.arrival_s, one.first_s - one.arrival_s, tpot_s, one.last_s - one.arrival_s)
        times = (*latencies, one.scheduled_s, one.first_s, one.last_s)
    queue_time_s, ttft_s, tpot_s, e2e_s, scheduled_s, first_s, end_s = times
    return RequestLine(
        one.index,
        one.index,
        one.arrival_s,
        max(one.position, 1),
        one.outputs,
        queue_time_s,
        ttft_s,
        tpot_s,
        e2e_s,
        scheduled_s,
        first_s,
        end_s,
        max_new_tokens=max(one.outputs, 1),
        pauses=one.pauses,
        recomputed_tokens=0,
        reused_tokens=one.reused if is_known else 0,
        attribution_s=one.spent if is_known else {},
        outcome="completed" if is_known else "stopped",
        error=None,
    )


def by_id(row: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """`requestStats` of an iteration by the id of the request; empty if it has none. InputError for other values."""
    listed = row.get("requestStats") or []
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise InputError("requestStats is not a list of objects; expected one for each request.")
    return {integer(one.get("id"), "requestStats.id"): one for one in listed}
