"""The life of one request: its stretches of waiting and running, and the iterations that made its tokens."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.batching.request import Request

FloatArray = NDArray[np.float64]


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
        return f"waiting_{self.cause}" if self.phase is Phase.WAITING else self.phase.value


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

    def begin(self, span: Span) -> dict[str, Any] | None:
        """Start another stretch; returns the record of the one that this ends, if it lasted at all."""
        record = self.end(span.first - 1)
        self.open = span
        return record

    def end(self, last: int, most_produced: int | None = None) -> dict[str, Any] | None:
        """Close the open stretch after iteration `last`; returns its record, or None if it never came to be.

        most_produced: how many output tokens it can have made at most, where that is known otherwise."""
        record, span, self.open = self.record(last), self.open, None
        if record is None or span is None:
            return None
        if most_produced is not None and "produced" in record:
            record["produced"] = max(0, min(record["produced"], most_produced))
        if span.phase is Phase.GENERATION and record["produced"]:
            self.token_iterations.append((last - record["produced"] + 1, last))
            self.produced += record["produced"]
        self.closed.append((span.attribution(), span.first))
        self.last_iteration = last
        return record

    def record(self, last: int) -> dict[str, Any] | None:
        """The line of `spans.jsonl` of the open stretch if iteration `last` is its last; None if it is empty."""
        span = self.open
        if span is None or last < span.first:
            return None
        steps = last - span.first + 1
        generates = span.phase is Phase.GENERATION
        record: dict[str, Any] = {
            "request_id": self.request.request_id,
            "phase": span.phase.value,
            "first_iteration": span.first,
            "last_iteration": last,
            "tokens": steps if generates else sum(span.chunks),
            "cause": span.cause,
        }
        if generates:
            # Tokens that a pause had dropped and that are made for the second time do not count.
            again = max(0, self.produced - span.first_output)
            record |= {"first_output": span.first_output, "produced": max(0, steps - again)}
        elif span.chunks:
            record |= {"chunks": span.chunks, "produced": span.produced}
        return record

    def prompt_complete(self, iteration: int) -> None:
        """The last context chunk has yielded a token."""
        assert self.open is not None
        if self.request.num_outputs > self.produced:
            self.open.produced = 1
            self.token_iterations.append((iteration, iteration))
            self.produced += 1

    def token_times(self, ends: FloatArray) -> FloatArray:
        """When each output token was first there: [output tokens], seconds."""
        return np.concatenate([ends[first : last + 1] for first, last in self.token_iterations])

    def attribution(self, starts: FloatArray, end_s: float) -> dict[str, float]:
        """Seconds by what the request was doing or waiting for; they add up to its end-to-end latency.

        A stretch lasts until the next one begins. What comes before the first is the wait for an iteration to begin."""
        seconds: dict[str, float] = {}
        name, begin = "waiting_iteration", self.arrival_s
        for next_name, first in self.closed:
            seconds[name] = seconds.get(name, 0.0) + float(starts[first]) - begin
            name, begin = next_name, float(starts[first])
        seconds[name] = seconds.get(name, 0.0) + end_s - begin
        return seconds
