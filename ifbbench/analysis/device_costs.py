"""What iterations cost on the device of a recorded run: as it was simulated, or by a fit of its measured times."""

from functools import cache, lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from ifbbench.clock import NANOSECONDS
from ifbbench.rundir.timeline import Floats
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.least_time import LeastTime
from ifbbench.simulated.step_work import StepWork, StepWorks


class Device(Protocol):
    """What iterations cost on the device of a run."""

    def times_s(self, works: StepWorks) -> Floats:
        """Seconds of each iteration of this work; 0 of those without work."""
        ...

    def least_s(self, work: StepWork, min_iterations: int) -> float:
        """A lower bound of the time of `work` in at least so many iterations with outputs."""
        ...


class SimulatedDevice(NamedTuple):
    """The cost model that a run was simulated with."""

    cost_model: CostModel

    def times_s(self, works: StepWorks) -> Floats:
        return self.cost_model.times_ns(works) / NANOSECONDS

    def least_s(self, work: StepWork, min_iterations: int) -> float:
        if not work.num_tokens:
            return 0.0
        return _least_ns(self.cost_model, work, max(min_iterations, 1)) / NANOSECONDS


class MeasuredDevice(NamedTuple):
    """A linear fit of measured iterations.

    seconds: for each unit of the columns of `_columns`.
    """

    seconds: Floats

    @classmethod
    def fitted(cls, works: StepWorks, measured_s: Floats) -> "MeasuredDevice":
        """The least squares fit without negative coefficients."""
        from scipy.optimize import nnls  # takes longer to import than most answers take

        columns = np.stack(_columns(works), axis=1)
        scale = np.maximum(columns.max(axis=0), 1e-300)
        return cls(nnls(columns / scale, measured_s)[0] / scale)

    def times_s(self, works: StepWorks) -> Floats:
        columns: Floats = np.stack(_columns(works), axis=1)
        times: Floats = (columns * self.seconds).sum(axis=1)
        return times

    def least_s(self, work: StepWork, min_iterations: int) -> float:
        counts = (
            max(min_iterations, 1),
            work.context_tokens,
            work.attention_pairs,
            work.generation_tokens,
            work.generation_kv_tokens,
        )
        return float(np.dot(counts, self.seconds)) if work.num_tokens else 0.0


@cache
def _least_time(cost_model: CostModel) -> LeastTime:
    return LeastTime(cost_model)


@lru_cache(maxsize=1 << 16)
def _least_ns(cost_model: CostModel, work: StepWork, min_iterations: int) -> float:
    """See LeastTime. Prompts of the same length, of which a trace has many, are the same work."""
    return _least_time(cost_model).least_ns(work, min_iterations)


def _columns(works: StepWorks) -> list[Floats]:
    """What a fit of measured times depends on: 1 of an iteration with work, and the sums of its work."""
    runs = works.context_tokens + works.generation_tokens > 0
    return [
        column.astype(np.float64)
        for column in (
            runs,
            works.context_tokens,
            works.attention_pairs,
            works.generation_tokens,
            works.generation_kv_tokens,
        )
    ]
