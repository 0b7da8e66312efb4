"""When each output token came, worked out from spans and iterations (the recorder does not write it a second time)."""

from dataclasses import dataclass

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


def token_iterations(run: RunData) -> dict[str, Iterations]:
    """Request id to the iterations that produced its output tokens, in order. Failed requests are left out.

    A span's tokens come in its last iterations: one in each of generation, one at the end of context or recompute.
    """
    spans = _producing(run)
    stretches: dict[str, list[Iterations]] = {}
    columns = (spans[name].tolist() for name in ("request_id", "last_iteration", "produced"))
    for request, last, produced in zip(*columns, strict=True):
        stretches.setdefault(request, []).append(np.arange(last - int(produced) + 1, last + 1))
    return {request: np.concatenate(parts) for request, parts in stretches.items()}


def inter_token_gaps(run: RunData) -> Seconds:
    """Every gap between consecutive output tokens of a request, of all requests pooled, in seconds."""
    clock = IterationClock.of(run)
    gaps = [np.diff(clock.ends(produced)) for produced in token_iterations(run).values()]
    return np.concatenate(gaps) if gaps else np.empty(0)


def output_tokens(run: RunData) -> Seconds:
    """Output tokens made in each row of `run.iterations`; those of requests still running are among them."""
    numbers = run.iterations["iteration_counter"].to_numpy(dtype=np.int64)
    spans = _producing(run)
    last = spans["last_iteration"].to_numpy(dtype=np.int64)
    # Each span adds 1 to every iteration that it made a token in: a step up where these begin, one down behind.
    steps = np.zeros(max(numbers.max(initial=0), last.max(initial=0)) + 2)
    np.add.at(steps, last - spans["produced"].to_numpy(dtype=np.int64) + 1, 1)
    np.add.at(steps, last + 1, -1)
    return np.asarray(steps.cumsum()[numbers], dtype=float)


def _producing(run: RunData) -> pd.DataFrame:
    """The spans that made output tokens, by request and in order of time."""
    return run.spans[run.spans["produced"].fillna(0) > 0]
