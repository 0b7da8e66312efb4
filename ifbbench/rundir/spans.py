"""The spans of waiting and running of each active request, made from iterations; only a change of them costs time."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import UNSET

from ifbbench.engine.plan import ContextChunk, Limit
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.rundir.drafts import steps_of, stretches_of
from ifbbench.rundir.line_types import IN_BATCH, RUNNING, Phase, SpanLine
from ifbbench.rundir.lines import JsonLinesWriter, encode
from ifbbench.rundir.metrics import TRANSFER, WAITING_BEHIND, WAITING_FOR, WAITING_ITERATION, HeadOfLine

SecondsOf = Callable[[Request], float]
HEAD_OF_LINE, CONCURRENCY = "head_of_line", "concurrency"
_BATCH_SIZE: Final = Limit.BATCH_SIZE.value
_IN_QUEUE: Final = f"{WAITING_FOR}{_BATCH_SIZE}"
# In a queue of which the scheduler names the head: all in it wait for the limit that holds the head.
_BEHIND_NAMED_HEAD: Final = "queued"
_NO_LIMIT: Final = "none"
_UNSET: Final = UNSET  # compiled code reads a constant of its own module faster
# Requests that generate stood aside for prompts: if nothing else is said, the queue is not held.
_HOLDS_NO_QUEUE: Final = Limit.PREFILL.value
_IN_LINE: Final = frozenset((_IN_QUEUE, _BEHIND_NAMED_HEAD, f"{WAITING_FOR}{HEAD_OF_LINE}"))


class Span:
    """Consecutive iterations of a micro batch, from `first` on, in which one request does one thing. Requests that
    stand aside together, or go on together, have one span in common.

    cause: as in SpanLine.
    chunks: tokens of each iteration of context and recompute.
    produced: 1 (with draft tokens, or more) once context or recompute have yielded output tokens that were not there
        before.
    is_queued: whether the request waited in a queue of which the scheduler names the head.
    last: its last iteration for the request that left it latest, -1 before.
    stretch: (first, last), one tuple for all requests that leave it then, None before.
    """

    def __init__(self, phase: str, first: int, cause: str | int | None = None, chunks: list[int] | None = None) -> None:
        self.phase, self.first, self.cause, self.chunks = phase, first, cause, chunks
        self.produced, self.is_queued, self.last = 0, False, -1
        self.stretch: Any = None

    @property
    def name(self) -> str:
        """What its time is called in attributions."""
        if self.phase != Phase.WAITING:
            return self.phase
        return _BEHIND_NAMED_HEAD if self.is_queued else f"{WAITING_FOR}{self.cause}"


class RequestTimeline:
    """One request from its arrival to its end, in iterations.

    head: head of the line, for the attribution.
    every: the number of micro batches. While the request runs, it runs in each so many iterations.
    is_written: whether lines are returned.
    closed: closed spans: a request that often stands aside has hundreds.
    first_run: the first iteration in which it ran, -1 before.
    last_iteration: last iteration of the latest closed span.
    first_output: position of the first output token of the generation that is open, or that goes on next.
    extra: iterations of the open generation that yielded several tokens, with draft tokens, and how many more than one.
    token_iterations: iterations that produced output tokens for the first time, as [first, last] stretches.
    produced: the number of these tokens, and of the first one where another engine computed it (`has_first_token`).
    """

    __slots__ = (
        "arrival_s",
        "closed",
        "every",
        "extra",
        "first_output",
        "first_run",
        "has_first_token",
        "head",
        "is_written",
        "last_iteration",
        "open",
        "produced",
        "queue_head",
        "request",
        "token_iterations",
    )

    def __init__(
        self,
        request: Request,
        arrival_s: float,
        head: HeadOfLine,
        queue_head: HeadOfLine,
        every: int = 1,
        is_written: bool = True,
    ) -> None:
        self.every, self.is_written = every, is_written
        self.request = request
        self.head, self.queue_head = head, queue_head
        self.arrival_s = arrival_s
        self.open: Span | None = None
        self.closed: list[Span] = []
        self.first_run = self.last_iteration = -1
        self.first_output = 0
        self.extra: list[tuple[int, int]] | None = None
        self.token_iterations: list[Any] = []  # of (first, last); typed as tuples, compiled code would copy each
        self.produced, self.has_first_token = 0, False

    def begin(self, span: Span) -> SpanLine | None:
        """Close the open span and open `span`; returns the line of the closed one, None if it lasted no iteration."""
        line = self.end(span.first - 1)
        self.open = span
        return line

    def end(self, last: int, max_produced: int | None = None) -> SpanLine | None:
        """Close the open span after iteration `last`; returns its line, None if it lasted no iteration.

        max_produced: the maximum number of output tokens that it can have produced, where known."""
        span, self.open = self.open, None
        if span is None or last < span.first:
            return None
        phase = span.phase
        if self.every > 1:
            last = self._last_step(span, last)
        tokens = self._tokens_of(span, last)
        produced = self._produced_in(span, tokens)
        if max_produced is not None:
            produced = max(0, min(produced, max_produced))
        line = self._line(span, last, tokens, produced) if self.is_written else None
        if phase == Phase.GENERATION:
            if produced:
                if self.extra is None and produced == tokens:
                    if span.last != last:
                        span.last, span.stretch = last, (span.first, last)
                    self.token_iterations.append(span.stretch)
                elif self.extra is None:
                    self.token_iterations.append((last - (produced - 1) * self.every, last))
                else:
                    self.token_iterations += stretches_of(span.first, steps_of(span.first, last, self.extra), produced)
                self.produced += produced
            self.first_output += tokens
            self.extra = None
        self.closed.append(span)
        self.last_iteration = last
        return line

    def open_line(self, last: int) -> SpanLine | None:
        """The line of the open span as if iteration `last` were its last; None if it is empty."""
        span = self.open
        if span is None or last < span.first:
            return None
        last = self._last_step(span, last)
        tokens = self._tokens_of(span, last)
        return self._line(span, last, tokens, self._produced_in(span, tokens))

    def prompt_complete(self, iteration: int, num_outputs: int) -> None:
        """The last context chunk yielded a token in `iteration`, or with draft tokens several."""
        assert self.open is not None
        new = num_outputs - self.produced
        if new > 0:
            self.open.produced = new
            self.token_iterations += [(iteration, iteration)] * new
            self.produced += new

    def add_extra(self, iteration: int, count: int) -> None:
        """Generation yielded `count` tokens beyond one in `iteration`: draft tokens that were accepted."""
        if self.open is not None and self.open.phase is Phase.GENERATION:
            self.extra = self.extra or []
            self.extra.append((iteration, count))

    def attribution(self, starts: Sequence[float], ends: Sequence[float]) -> dict[str, float]:
        """Seconds by what the request did or waited for; they add up to its end-to-end latency.

        starts, ends: begin and end of each iteration, in seconds.

        A span lasts until the next one begins. An iteration that begins while the one before still runs counts from the
        end of that, so that a prompt lasts until its first token and not only until the next iteration is decided.

        Before the first span, the request waits for an iteration to begin. In the queue and behind the head of the
        line, it waits for the limit that holds the head; if none does, it came while an iteration was decided, and
        waits for the next one. While keys and values are on their way to it, it waits for these, whatever else the span
        is."""
        seconds: dict[str, float] = {}
        name, begin_s = WAITING_ITERATION, self.arrival_s
        loads, was_in_batch, every = self.request.loads, False, self.every
        for span in self.closed:
            until_s = starts[span.first]
            is_in_batch = span.phase in IN_BATCH
            if was_in_batch and is_in_batch and span.first >= every and ends[span.first - every] > until_s:
                until_s = ends[span.first - every]
            was_in_batch = is_in_batch
            if until_s < begin_s:
                until_s = begin_s
            for load in loads:
                if load.begin_s < until_s and begin_s < load.end_s:
                    if begin_s < load.begin_s:
                        self._attribute(seconds, name, begin_s, load.begin_s)
                        begin_s = load.begin_s
                    arrived_s = load.end_s if load.end_s < until_s else until_s
                    seconds[TRANSFER] = seconds.get(TRANSFER, 0.0) + arrived_s - begin_s
                    begin_s = arrived_s
            self._attribute(seconds, name, begin_s, until_s)
            name, begin_s = span.name, until_s
        # The last span is one in which the request ran.
        seconds[name] = seconds.get(name, 0.0) + ends[self.last_iteration] - begin_s
        return seconds

    def _attribute(self, seconds: dict[str, float], name: str, begin_s: float, until_s: float) -> None:
        """Add the time of a span to `seconds`."""
        if name not in _IN_LINE:
            seconds[name] = seconds.get(name, 0.0) + until_s - begin_s
        elif until_s > begin_s:
            is_named, is_queued = name == _BEHIND_NAMED_HEAD, name in (_BEHIND_NAMED_HEAD, _IN_QUEUE)
            for limit, part_s in (self.queue_head if is_queued else self.head).split(begin_s, until_s).items():
                is_own = is_named or (is_queued and limit == _BATCH_SIZE)
                part = f"{WAITING_FOR if is_own else WAITING_BEHIND}{limit}"
                if is_queued and limit == _NO_LIMIT:
                    part = WAITING_ITERATION
                seconds[part] = seconds.get(part, 0.0) + part_s

    def _last_step(self, span: Span, last: int) -> int:
        """The last iteration up to `last` in which the request did what `span` says."""
        if span.phase not in RUNNING:
            return last
        return last - (last - span.first) % self.every

    def _tokens_of(self, span: Span, last: int) -> int:
        """Output tokens of a span of generation up to iteration `last`; 0 of others."""
        if span.phase != Phase.GENERATION:
            return 0
        tokens = (last - span.first) // self.every + 1
        return tokens if self.extra is None else tokens + sum([more for _, more in self.extra])

    def _produced_in(self, span: Span, tokens: int) -> int:
        """How many of the output tokens of the open span were produced for the first time: what a pause dropped does
        not count again."""
        if span.phase != Phase.GENERATION:
            return span.produced
        again = self.produced - self.first_output
        return tokens if again <= 0 else max(0, tokens - again)

    def _line(self, span: Span, last: int, tokens: int, produced: int) -> SpanLine:
        request_id, phase, first, cause = self.request.request_id, span.phase, span.first, span.cause
        if phase == Phase.GENERATION:
            line = SpanLine(request_id, phase, first, last, tokens, cause, self.first_output, _UNSET, produced)
            if self.extra is not None:
                line.steps = steps_of(first, last, self.extra)
        elif span.chunks:
            line = SpanLine(request_id, phase, first, last, sum(span.chunks), cause, _UNSET, span.chunks, produced)
        else:
            line = SpanLine(request_id, phase, first, last, 0, cause, _UNSET, _UNSET, _UNSET)
        if self.every > 1 and phase in RUNNING:
            line.every = self.every
        return line


class SpanTracker:
    """Keeps the timeline of each active request and writes spans as they close.

    arrival_s(request): returns the arrival by the trace, in seconds.
    held_until_s(request): returns until when the client held it back, to limit the concurrency.
    writer: writer of `spans.jsonl`; without it, no lines are made.
    head: head of the line, kept for attributions.
    follows_requests: whether what a request did in the latest iteration may end without a word in the next record. If
        not, an iteration that only generates under the same limit changes no span.
    """

    def __init__(self, arrival_s: SecondsOf, held_until_s: SecondsOf | None = None) -> None:
        self.writer: JsonLinesWriter | None = None
        self.head = HeadOfLine()
        self._arrival_s = arrival_s
        self._held_until_s = held_until_s or arrival_s
        self.follows_requests = False
        self._num_micro_batches = 1
        # By request id: all active requests; those with a partly computed prompt, of each micro batch; generation
        # requests that could run in the latest iteration and did not; those that were left out first.
        self._timelines: dict[int, RequestTimeline] = {}
        self._partial: defaultdict[int, dict[int, RequestTimeline]] = defaultdict(dict)
        self._held: dict[int, RequestTimeline] = {}
        self._blocked: dict[int, RequestTimeline] = {}
        # What holds the queue. Whether the scheduler names its head: if not, requests wait there for batch slots.
        self.queue_head, self._names_queue_head = HeadOfLine(), False

    def add(self, record: IterationRecord, starts: Sequence[float]) -> None:
        """Take in one iteration, except for the requests that it completed. starts: of the iterations so far, in s."""
        self._num_micro_batches = record.num_micro_batches
        limit = record.bound_by
        if limit != self.head.limit:
            self.head.change(limit, record.start_s)
        for request in record.activated:
            if not request.has_left:
                self._activate(request, record.iteration, starts)
        if record.paused:
            self._pause(record)
        if record.continued:
            self._continue(record)
        if record.held or self._held:
            self._hold(record)
        if record.drafts is not None:
            for request, extra in record.drafts.extra:
                self._timelines[request.request_id].add_extra(record.iteration, extra)
        if record.context or self._partial.get(record.iteration % record.num_micro_batches):
            self._run_context(record)
        if record.blocked or self._blocked:
            self._block(record)
        if record.queue_head is not None:
            limit = record.queue_head.limit
        elif limit == _HOLDS_NO_QUEUE:
            limit = _NO_LIMIT
        if limit != self.queue_head.limit:
            self.queue_head.change(limit, record.start_s)
        self.follows_requests = bool(self._held or self._blocked or any(self._partial.values()))

    def add_chunks(self, chunk: ContextChunk, count: int) -> None:
        """`chunk` was the first of a stretch, in which its request ran `count` further ones of the same length."""
        span = self._timelines[chunk.request.request_id].open
        if span is not None and span.chunks is not None:
            span.chunks += [chunk.length] * count

    def end(self, request: Request, iteration: int) -> RequestTimeline:
        """`request` is complete with `iteration`; returns its timeline."""
        timeline = self._forget(request)
        self._close(timeline.end(iteration))
        return timeline

    def drop(self, request: Request, iteration: int) -> None:
        """`request` left before its end, the next iteration being `iteration`."""
        timeline = self._timelines.get(request.request_id)
        if timeline is not None and timeline.request is request:
            self._forget(request)
            # An iteration that failed produced no token, though it ran.
            self._close(timeline.end(iteration - 1, max_produced=request.num_outputs - timeline.produced))

    def open_lines(self, last_iteration: int) -> list[bytes]:
        """The lines of all open spans, as if they ended with `last_iteration`."""
        lines = [timeline.open_line(last_iteration) for timeline in self._timelines.values()]
        return [encode(line) for line in lines if line is not None]

    def close(self, last_iteration: int) -> None:
        """Write all open spans: the run ends with `last_iteration`."""
        for timeline in self._timelines.values():
            self._close(timeline.end(last_iteration))

    def _forget(self, request: Request) -> RequestTimeline:
        self._stop_watching(request.request_id)
        return self._timelines.pop(request.request_id)

    def _stop_watching(self, request_id: int) -> None:
        for group in (*self._partial.values(), self._held, self._blocked):
            group.pop(request_id, None)

    def _activate(self, request: Request, iteration: int, starts: Sequence[float]) -> None:
        timeline = self._timelines[request.request_id] = RequestTimeline(
            request,
            self._arrival_s(request),
            self.head,
            self.queue_head,
            self._num_micro_batches,
            self.writer is not None,
        )
        held_until_s = self._held_until_s(request)
        if iteration and starts[iteration - 1] >= timeline.arrival_s:
            queued_from, held_from = bisect_left(starts, held_until_s), bisect_left(starts, timeline.arrival_s)
            if held_until_s > timeline.arrival_s and held_from < queued_from:
                timeline.begin(Span(Phase.WAITING, held_from, CONCURRENCY))
            if queued_from < iteration:
                limit = self.queue_head.limit if self._names_queue_head else None
                span = Span(Phase.WAITING, queued_from, _BATCH_SIZE if limit in (None, _NO_LIMIT) else limit)
                span.is_queued = self._names_queue_head
                self._begin(timeline, span)
        self._begin(timeline, Span(Phase.WAITING, iteration, HEAD_OF_LINE))

    def _pause(self, record: IterationRecord) -> None:
        for pause in record.paused:
            victim = pause.victim
            if victim.has_left:
                continue
            span = Span(Phase.PAUSED, record.iteration, pause.beneficiary.request_id)
            self._begin(self._timelines[victim.request_id], span)
            self._stop_watching(victim.request_id)

    def _continue(self, record: IterationRecord) -> None:
        """These requests generate without a chunk. The first time, their first token has come with their prompt."""
        for request, num_outputs in record.continued:
            if request.has_left:
                continue
            timeline = self._timelines[request.request_id]
            if timeline.first_run < 0:
                timeline.first_run, timeline.produced, timeline.has_first_token = record.iteration, 1, True
            self._begin(timeline, Span(Phase.GENERATION, record.iteration))
            timeline.first_output = num_outputs

    def _hold(self, record: IterationRecord) -> None:
        """Generation requests that do not run are skipped until they run again."""
        held, before, timelines = dict[int, RequestTimeline](), self._held, self._timelines
        for request in record.held:
            if not request.has_left:
                held[request.request_id] = timelines[request.request_id]
        again, aside = Span(Phase.GENERATION, record.iteration), Span(Phase.SKIPPED, record.iteration)
        going_on, going = list(before.values()), list(held.values())
        if before and held:
            going_on = [timeline for request_id, timeline in before.items() if request_id not in held]
            going = [timeline for request_id, timeline in held.items() if request_id not in before]
        lines = [timeline.begin(again) for timeline in going_on]
        lines += [timeline.begin(aside) for timeline in going]
        self._held = held
        if self.writer is not None:
            self.writer.add_each(lines)

    def _run_context(self, record: IterationRecord) -> None:
        turn = record.iteration % record.num_micro_batches
        partial_before, partial = self._partial[turn], dict[int, RequestTimeline]()
        self._partial[turn] = partial
        for chunk in record.context:
            request = chunk.request
            if request.has_left:
                continue
            timeline = self._timelines[request.request_id]
            partial_before.pop(request.request_id, None)
            phase = Phase.RECOMPUTE if chunk.is_again else Phase.CONTEXT
            span = timeline.open
            if span is None or span.phase != phase:
                self._begin(timeline, span := Span(phase, record.iteration, chunks=[]))
                if timeline.first_run < 0:
                    timeline.first_run = record.iteration
            assert span.chunks is not None
            span.chunks.append(chunk.length)
            if not chunk.is_last:
                partial[request.request_id] = timeline
                continue
            timeline.prompt_complete(record.iteration, num_outputs := request.num_outputs)
            if request not in record.finished:
                next_step = record.iteration + record.num_micro_batches
                self._begin(timeline, Span(Phase.GENERATION, next_step))
                timeline.first_output = num_outputs
        for timeline in partial_before.values():
            self._begin(timeline, Span(Phase.WAITING, record.iteration, HEAD_OF_LINE))

    def _block(self, record: IterationRecord) -> None:
        """Set the cause of the requests that were left out first; all others wait for those before them."""
        blocked = {}
        for left_out in record.blocked:
            if left_out.request.has_left:
                continue
            timeline = self._timelines.get(left_out.request.request_id)
            if timeline is None:  # it was in the queue, or waits for blocks for what another engine sends
                self._names_queue_head |= left_out.request.table is None or not left_out.request.remote_len
            elif self._set_cause(timeline, left_out.limit, record.iteration):
                blocked[left_out.request.request_id] = timeline
        for request_id, timeline in self._blocked.items():
            if request_id not in blocked:
                self._set_cause(timeline, HEAD_OF_LINE, record.iteration)
        self._blocked = blocked

    def _set_cause(self, timeline: RequestTimeline, cause: str, iteration: int) -> bool:
        """Set why a request waits; whether it does."""
        if timeline.open is None or timeline.open.phase != Phase.WAITING:
            return False
        if timeline.open.cause != cause:
            self._begin(timeline, Span(Phase.WAITING, iteration, str(cause)))
        return True

    def _begin(self, timeline: RequestTimeline, span: Span) -> None:
        self._close(timeline.begin(span))

    def _close(self, line: SpanLine | None) -> None:
        if self.writer is not None:
            self.writer.add(line)
