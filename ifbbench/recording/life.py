"""The life of one request: its stretches of waiting and running, and the iterations that made its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ifbbench.engine.request import Request
from ifbbench.recording.jsonl_writer import encode


class Phase(StrEnum):
    """What a request does in an iteration."""

    WAITING = "waiting"
    CONTEXT = "context"
    RECOMPUTE = "recompute"
    GENERATION = "generation"
    SKIPPED = "skipped"
    PAUSED = "paused"


@dataclass(slots=True)
class Span:
    """Consecutive iterations, from `first` on, in which one request does one thing.

    first_output: of generation, the position of the output token that its first step makes. produced: of context and
    recompute, 1 once it has yielded an output token that was not there before.
    """

    phase: Phase
    first: int
    cause: str | int | None = None
    chunks: list[int] = field(default_factory=list)
    first_output: int = 0
    produced: int = 0

    def attribution(self) -> str:
        """Under which name its time is accounted for."""
        return f"waiting_{self.cause}" if self.phase is Phase.WAITING else str(self.phase)


class Life:
    """One request from its arrival to its end, in iterations; turned into seconds when it ends."""

    __slots__ = ("arrival_s", "closed", "last_iteration", "open", "produced", "request", "token_iterations")

    def __init__(self, request: Request, arrival_s: float) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self.open: Span | None = None
        # (name in the attribution, first iteration) of each closed span.
        self.closed: list[tuple[str, int]] = []
        self.last_iteration = -1
        # Iterations that produced output tokens for the first time, as [first, last] stretches.
        self.token_iterations: list[tuple[int, int]] = []
        self.produced = 0

    def begin(self, span: Span) -> str | None:
        """Start another stretch; returns the line of the one that this ends, if it lasted at all."""
        line = self.end(span.first - 1)
        self.open = span
        return line

    def end(self, last: int, most_produced: int | None = None) -> str | None:
        """Close the open stretch after iteration `last`; returns its line, or None if it never came to be.

        most_produced: how many output tokens it can have made at most, where that is known otherwise."""
        span, self.open = self.open, None
        if span is None or last < span.first:
            return None
        produced = self._produced_in(span, last)
        if most_produced is not None:
            produced = max(0, min(produced, most_produced))
        if span.phase is Phase.GENERATION and produced:
            self.token_iterations.append((last - produced + 1, last))
            self.produced += produced
        self.closed.append((span.attribution(), span.first))
        self.last_iteration = last
        return self._line(span, last, produced)

    def open_line(self, last: int) -> str | None:
        """The line of the open stretch as if iteration `last` were its last; None if it is empty."""
        span = self.open
        if span is None or last < span.first:
            return None
        return self._line(span, last, self._produced_in(span, last))

    def _produced_in(self, span: Span, last: int) -> int:
        """Output tokens that the stretch made for the first time: those that a pause had dropped do not count again."""
        if span.phase is not Phase.GENERATION:
            return span.produced
        again = max(0, self.produced - span.first_output)
        return max(0, last - span.first + 1 - again)

    def _line(self, span: Span, last: int, produced: int) -> str:
        """The line of `spans.jsonl`: a template, for there are several to each request."""
        tokens, more = 0, ""
        if span.phase is Phase.GENERATION:
            tokens, more = last - span.first + 1, f',"first_output":{span.first_output},"produced":{produced}'
        elif span.chunks:
            chunks = ",".join(map(str, span.chunks))
            tokens, more = sum(span.chunks), f',"chunks":[{chunks}],"produced":{produced}'
        cause = span.cause
        cause = "null" if cause is None else encode(cause) if isinstance(cause, str) else cause
        return (
            f'{{"request_id":{self.request.request_id},"phase":"{span.phase}","first_iteration":{span.first},'
            f'"last_iteration":{last},"tokens":{tokens},"cause":{cause}{more}}}'
        )

    def prompt_complete(self, iteration: int) -> None:
        """The last context chunk has yielded a token."""
        assert self.open is not None
        if self.request.num_outputs > self.produced:
            self.open.produced = 1
            self.token_iterations.append((iteration, iteration))
            self.produced += 1

    def attribution(self, starts: Sequence[float], end_s: float) -> dict[str, float]:
        """Seconds by what the request was doing or waiting for; they add up to its end-to-end latency.

        A stretch lasts until the next one begins. What comes before the first is the wait for an iteration to begin."""
        seconds: dict[str, float] = {}
        name, begin = "waiting_iteration", self.arrival_s
        for next_name, first in self.closed:
            seconds[name] = seconds.get(name, 0.0) + starts[first] - begin
            name, begin = next_name, starts[first]
        seconds[name] = seconds.get(name, 0.0) + end_s - begin
        return seconds
