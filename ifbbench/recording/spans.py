"""From iterations to spans: follows every active request, touching only those that change what they do."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from ifbbench.engine.policies.policy import Limit
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.recording.life import Life, Phase, Span

HEAD_OF_LINE = "head_of_line"


class SpanTracker:
    """Keeps the open span of each active request and writes spans as they close.

    write(line): takes a line of `spans.jsonl`. arrival_s(request): when the trace says that it comes.
    """

    def __init__(self, write: Callable[[str], None], arrival_s: Callable[[Request], float]) -> None:
        self._write = write
        self._arrival_s = arrival_s
        self._lives: dict[int, Life] = {}
        self._partial: dict[int, Life] = {}
        self._held: dict[int, Life] = {}
        self._blocked: dict[int, Life] = {}

    def add(self, record: IterationRecord, starts: Sequence[float]) -> None:
        """Take in one iteration, but for who is complete with it. `starts`: when each iteration so far began."""
        for request in record.activated:
            if request.has_left:
                continue
            self._activate(request, record.iteration, starts)
        if record.paused:
            self._pause(record)
        if record.held or self._held:
            self._hold(record)
        if record.context or self._partial:
            self._run_context(record)
        if record.blocked or self._blocked:
            self._block(record)

    def end(self, request: Request, iteration: int) -> Life:
        """`request` is complete with `iteration`; returns its life."""
        life = self._forget(request)
        assert life is not None
        self._put(life.end(iteration))
        return life

    def drop(self, request: Request, iteration: int) -> None:
        """`request` left before its end, the next iteration being `iteration`."""
        if request.request_id in self._lives and self._lives[request.request_id].request is request:
            life = self._forget(request)
            assert life is not None
            # An iteration that failed made no token, though it ran.
            self._put(life.end(iteration - 1, most_produced=request.num_outputs - life.produced))

    def _forget(self, request: Request) -> Life | None:
        for group in (self._partial, self._held, self._blocked):
            group.pop(request.request_id, None)
        return self._lives.pop(request.request_id, None)

    def _still_here(self, requests: Iterable[Request]) -> dict[int, Life]:
        """Those of `requests` that have not left since the iteration was scheduled, by id."""
        ids = [request.request_id for request in requests if not request.has_left]
        return {request_id: self._lives[request_id] for request_id in ids}

    def open_lines(self, last_iteration: int) -> Iterator[str]:
        """What is still open, as if it ended with `last_iteration`."""
        for life in self._lives.values():
            line = life.open_line(last_iteration)
            if line is not None:
                yield line

    def close(self, last_iteration: int) -> None:
        """The run stops here: write what is still open."""
        for life in self._lives.values():
            self._put(life.end(last_iteration))

    def _activate(self, request: Request, iteration: int, starts: Sequence[float]) -> None:
        life = self._lives[request.request_id] = Life(request, self._arrival_s(request))
        # While it was in the queue, all places of the batch were taken.
        queued_from = bisect_left(starts, life.arrival_s)
        if queued_from < iteration:
            life.begin(Span(Phase.WAITING, queued_from, Limit.BATCH_SIZE.value))
        self._begin(life, Span(Phase.WAITING, iteration, HEAD_OF_LINE))

    def _pause(self, record: IterationRecord) -> None:
        for pause in record.paused:
            if pause.victim.has_left:
                continue
            victim = pause.victim.request_id
            self._begin(self._lives[victim], Span(Phase.PAUSED, record.iteration, pause.beneficiary.request_id))
            for group in (self._partial, self._held, self._blocked):
                group.pop(victim, None)

    def _hold(self, record: IterationRecord) -> None:
        """Generation requests that do not run are skipped until they run again."""
        held = self._still_here(record.held)
        for request_id, life in self._held.items():
            if request_id not in held:
                self._begin(life, self._generation_span(life, record.iteration, just_ran=True))
        for request_id, life in held.items():
            if request_id not in self._held:
                self._begin(life, Span(Phase.SKIPPED, record.iteration))
        self._held = held

    def _run_context(self, record: IterationRecord) -> None:
        partial_before, self._partial = self._partial, {}
        for chunk in record.context:
            if chunk.request.has_left:
                continue
            life = self._lives[chunk.request.request_id]
            if partial_before:
                partial_before.pop(chunk.request.request_id, None)
            phase = Phase.RECOMPUTE if chunk.request.pauses else Phase.CONTEXT
            span = life.open
            if span is None or span.phase is not phase:
                span = Span(phase, record.iteration)
                self._begin(life, span)
            span.chunks.append(chunk.length)
            if chunk.is_last:
                life.prompt_complete(record.iteration)
                if chunk.request not in record.finished:
                    self._begin(life, self._generation_span(life, record.iteration + 1, just_ran=False))
            else:
                self._partial[chunk.request.request_id] = life
        for life in partial_before.values():
            self._begin(life, Span(Phase.WAITING, record.iteration, HEAD_OF_LINE))

    @staticmethod
    def _generation_span(life: Life, first: int, just_ran: bool) -> Span:
        """`just_ran`: the span's first step is part of the iteration at hand, so its token is counted already."""
        return Span(Phase.GENERATION, first, first_output=life.request.num_outputs - just_ran)

    def _block(self, record: IterationRecord) -> None:
        """Say of the first one left out what it waits for; all others wait for those before them."""
        blocked = {}
        for left_out in record.blocked:
            if left_out.request.has_left:
                continue
            life = self._lives[left_out.request.request_id]
            if life.open is not None and life.open.phase is Phase.WAITING:
                blocked[left_out.request.request_id] = life
                self._set_cause(life, str(left_out.limit), record.iteration)
        for request_id, life in self._blocked.items():
            if request_id not in blocked and life.open is not None and life.open.phase is Phase.WAITING:
                self._set_cause(life, HEAD_OF_LINE, record.iteration)
        self._blocked = blocked

    def _set_cause(self, life: Life, cause: str, iteration: int) -> None:
        assert life.open is not None
        if life.open.cause != cause:
            self._begin(life, Span(Phase.WAITING, iteration, cause))

    def _begin(self, life: Life, span: Span) -> None:
        self._put(life.begin(span))

    def _put(self, line: str | None) -> None:
        if line is not None:
            self._write(line)
