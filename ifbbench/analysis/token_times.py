"""When each output token of a run came. That is not recorded: it follows from spans and iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ifbbench.rundir.reader import Floats, RunData, covering, delivered_s, once_a_run, producing_spans

if TYPE_CHECKING:  # it takes a third of a second to import, and a run that prints its report reads no table
    import pandas as pd

Integers = NDArray[np.int64]
SECONDS_OF_A_CLIENT = 10_001


@dataclass(frozen=True)
class IterationClock:
    """Iteration number to seconds from run start. Iterations that were not recorded are interpolated.

    delivered_s: when the tokens of an iteration reached their clients, which a serving process delays.
    """

    numbers: Floats
    start_s: Floats
    end_s: Floats
    delivered_s: Floats

    @classmethod
    @once_a_run
    def of(cls, run: RunData) -> IterationClock:
        """The clock of `run`. Against an endpoint, spans have seconds in the place of iterations."""
        if run.endpoint:
            seconds = np.linspace(0.0, max(float(run.spans["last_iteration"].max()), 1e-3), SECONDS_OF_A_CLIENT)
            return cls(seconds, seconds, seconds, seconds)
        start = run.iterations["start_s"].to_numpy(dtype=float)
        end = start + run.iterations["latency_ms"].to_numpy(dtype=float) / 1000
        numbers = run.iterations["iteration_counter"].to_numpy(dtype=float)
        return cls(numbers, start, end, delivered_s(run.iterations))

    def starts(self, iterations: ArrayLike) -> Floats:
        """When these iterations started, in seconds."""
        return np.asarray(np.interp(np.asarray(iterations, dtype=float), self.numbers, self.start_s))

    def ends(self, iterations: ArrayLike) -> Floats:
        """When these iterations ended, in seconds."""
        return np.asarray(np.interp(np.asarray(iterations, dtype=float), self.numbers, self.end_s))

    def tokens(self, iterations: ArrayLike) -> Floats:
        """When the output tokens of these iterations reached their clients, in seconds."""
        if not len(self.numbers):  # a replica without a request
            return np.empty(0)
        return np.asarray(np.interp(np.asarray(iterations, dtype=float), self.numbers, self.delivered_s))


@once_a_run
def span_ends(run: RunData) -> pd.Series[float]:
    """When each of `run.spans` ends: when the next one of its request begins, if that is in the next iteration; else
    with its last iteration. An engine without requests may wait long between the two."""
    spans, clock = run.spans, IterationClock.of(run)
    following = spans.groupby("request_id", sort=False)["first_iteration"].shift(-1) == spans["last_iteration"] + 1
    starts, ends = clock.starts(spans["last_iteration"] + 1), clock.ends(spans["last_iteration"])
    import pandas as pd

    return pd.Series(np.where(following, np.maximum(starts, ends), ends), spans.index)


def token_iterations(run: RunData) -> dict[str, Integers]:
    """Request id to the iterations that produced its output tokens, in order. Failed requests are left out.

    A span's tokens come in its last iterations: one in each of generation, one at the end of context or recompute.
    """
    spans = producing_spans(run)
    every, stretches = run.num_micro_batches, dict[str, list[Integers]]()
    columns = (spans[name].tolist() for name in ("request_id", "last_iteration", "produced"))
    for request, last, produced in zip(*columns, strict=True):
        stretches.setdefault(request, []).append(np.arange(last - (int(produced) - 1) * every, last + 1, every))
    return {request: np.concatenate(parts) for request, parts in stretches.items()}


@dataclass(frozen=True)
class TokenGaps:
    """The gaps between consecutive output tokens of a request, of all requests pooled.

    end_s: when the later token came.
    over_pause: whether the request was paused in it.
    count: requests that have it; those that generate in the same two iterations have the same gap.
    """

    seconds: Floats
    end_s: Floats
    over_pause: NDArray[np.bool_]
    count: Integers

    @classmethod
    @once_a_run
    def of(cls, run: RunData) -> TokenGaps:
        """The gaps of `run`."""
        if run.endpoint:
            times = list(token_times(run).values())
            gaps, ends_s = (
                np.concatenate([np.empty(0), *parts])
                for parts in ([np.diff(one) for one in times], [one[1:] for one in times])
            )
            return cls(gaps, ends_s, np.zeros(len(gaps), bool), np.ones(len(gaps), np.int64))
        spans, clock, every = producing_spans(run), IterationClock.of(run), run.num_micro_batches
        last, produced = spans["last_iteration"], spans["produced"].astype(np.int64)
        first = last - (produced - 1) * every
        # Within spans, by the iteration of the later token; then between two spans of a request.
        inner = produced > 1
        counts = covering(first[inner] + every, last[inner], int(last.max()) if len(last) else 0, every)
        later = np.flatnonzero(counts)
        begins = (spans["request_id"] == spans["request_id"].shift()).to_numpy(dtype=bool)
        before = np.concatenate([later - every, last.shift(fill_value=0)[begins]])
        after = np.concatenate([later, first[begins]])
        end_s = clock.tokens(after)
        over_pause = np.concatenate([np.zeros(len(later), bool), spans["phase"][begins] == "recompute"])
        count = np.concatenate([counts[later], np.ones(len(after) - len(later))]).astype(np.int64)
        return cls(end_s - clock.tokens(before), end_s, over_pause, count)


def token_times(run: RunData) -> dict[str, Floats]:
    """Request id to the times of its output tokens (s), of a run against an endpoint. Failed requests are left out."""
    spans = run.spans[(run.spans["phase"] == "generation") & run.spans["request_id"].isin(run.completed["request_id"])]
    if spans.empty:  # no request has a token, so that no line has the columns of chunks
        return {}
    columns = (spans[name].tolist() for name in ("request_id", "chunk_s", "chunks"))
    return {request: np.repeat(times_s, tokens) for request, times_s, tokens in zip(*columns, strict=True)}


def inter_token_gaps(run: RunData) -> Floats:
    """Every gap between consecutive output tokens of a request, of all requests pooled, in seconds, in order."""
    gaps = TokenGaps.of(run)
    order = np.argsort(gaps.seconds)
    return np.repeat(gaps.seconds[order], gaps.count[order])


def output_tokens(run: RunData) -> Floats:
    """Output tokens produced in each row of `run.iterations`, those of requests that were still running included."""
    numbers = run.iterations["iteration_counter"].to_numpy(dtype=np.int64)
    spans = producing_spans(run)
    last = spans["last_iteration"]
    end = int(max(numbers.max(initial=0), last.max() if len(last) else 0))
    every = run.num_micro_batches
    of_all: Floats = covering(last - (spans["produced"] - 1) * every, last, end, every)
    return np.asarray(of_all[numbers])
