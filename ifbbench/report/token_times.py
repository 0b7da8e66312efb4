"""When each output token came, worked out from spans and iterations (the recorder does not write it a second time)."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ifbbench.report.load import RunData

Seconds = NDArray[np.float64]
Iterations = NDArray[np.int64]


@dataclass(frozen=True)
class IterationClock:
    """Iteration number to seconds from run start. Iterations left out of thinned statistics are interpolated."""

    numbers: Seconds
    start_s: Seconds
    end_s: Seconds

    @classmethod
    def of(cls, run: RunData) -> "IterationClock":
        """The clock of `run`."""
        start = run.iterations["start_s"].to_numpy(dtype=float)
        end = start + run.iterations["latency_ms"].to_numpy(dtype=float) / 1000
        return cls(run.iterations["iteration_counter"].to_numpy(dtype=float), start, end)

    def starts(self, iterations: ArrayLike) -> Seconds:
        """When these iterations started, in seconds."""
        return self._at(iterations, self.start_s)

    def ends(self, iterations: ArrayLike) -> Seconds:
        """When these iterations ended, in seconds."""
        return self._at(iterations, self.end_s)

    def _at(self, iterations: ArrayLike, times: Seconds) -> Seconds:
        return np.asarray(np.interp(np.asarray(iterations, dtype=float), self.numbers, times), dtype=float)


class Span(NamedTuple):
    """A row of spans.jsonl, as far as token times go."""

    phase: str
    first_iteration: int
    last_iteration: int
    tokens: int


class _Stretch(NamedTuple):
    """Context or recompute of one request, up to what it led to: a generation phase, a pause or the end."""

    last_iteration: int
    tokens: int
    led_to: str = "end"


def token_iterations(run: RunData) -> dict[str, Iterations]:
    """Request id to the iterations that produced its output tokens, in order. Failed requests are left out.

    Each generation iteration makes one token, and so does the iteration that ends the context phase or a recompute.
    """
    produced = {}
    for request, spans, output_len in _answered(run):
        generated = _generation_iterations(spans)
        finished = list(_finished_contexts(spans, output_len))
        produced[request] = np.sort(np.array([*generated, *finished], dtype=np.int64))
    return produced


def inter_token_gaps(run: RunData) -> Seconds:
    """Every gap between consecutive output tokens of a request, of all requests pooled, in seconds."""
    clock = IterationClock.of(run)
    gaps = [np.diff(clock.ends(produced)) for produced in token_iterations(run).values()]
    return np.concatenate(gaps) if gaps else np.empty(0)


def output_tokens(run: RunData) -> Seconds:
    """Output tokens made in each row of `run.iterations`; those of requests still running are among them."""
    finished = [end for _, spans, output_len in _answered(run) for end in _finished_contexts(spans, output_len)]
    counts = pd.Series(finished, dtype=np.int64).value_counts()
    from_contexts = run.iterations["iteration_counter"].map(counts).fillna(0)
    return (run.iterations["generation_requests"].fillna(0) + from_contexts).to_numpy(dtype=float)


def _answered(run: RunData) -> Iterator[tuple[str, list[Span], int | None]]:
    """Request id, spans in order of time, and output length (None while it runs) of requests that did not fail."""
    lengths = {request: int(length) for request, length in run.completed[["request_id", "output_len"]].to_numpy()}
    failed = set(run.requests["request_id"]) - lengths.keys()
    columns = (run.spans[name].tolist() for name in ("request_id", *Span._fields))
    for request, rows in groupby(zip(*columns, strict=True), key=itemgetter(0)):
        if request not in failed:
            yield request, [Span(*row[1:]) for row in rows], lengths.get(request)


def _generation_iterations(spans: list[Span]) -> Iterator[int]:
    for span in spans:
        if span.phase == "generation":
            yield from range(span.first_iteration, span.last_iteration + 1)


def _finished_contexts(spans: list[Span], output_len: int | None) -> Iterator[int]:
    """Last iterations of the context and recompute stretches that were run to their end, and so made a token.

    One that a pause followed may have been cut short. How many of these were not follows from the output length, and
    they are the longest, because a recompute runs at least as many tokens as the context that it repeats.
    """
    stretches = list(_stretches(spans))
    certain = [item for item in stretches if item.led_to == "generation" or (item.led_to == "end" and output_len)]
    yield from (stretch.last_iteration for stretch in certain)
    if output_len is not None:
        missing = max(0, output_len - len(certain) - sum(1 for _ in _generation_iterations(spans)))
        doubtful = [stretch for stretch in stretches if stretch.led_to == "paused"]
        yield from (stretch.last_iteration for stretch in nlargest(missing, doubtful, key=attrgetter("tokens")))


def _stretches(spans: list[Span]) -> Iterator[_Stretch]:
    """The context and recompute stretches of one request's spans, which are in order of time."""
    current: _Stretch | None = None
    for span in spans:
        if span.phase in ("context", "recompute"):
            tokens = span.tokens + (current.tokens if current else 0)
            current = _Stretch(span.last_iteration, tokens)
        elif span.phase in ("generation", "paused") and current is not None:
            yield current._replace(led_to=span.phase)
            current = None
    if current is not None:
        yield current
