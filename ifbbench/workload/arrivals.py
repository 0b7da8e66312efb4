"""Arrival processes: when the requests of a workload come, the first always at 0."""

from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ifbbench.workload.distributions import require

ArrivalTimes = NDArray[np.float64]


class ArrivalProcess(Protocol):
    """Draws `count` arrival times in seconds, ascending; shape [count]."""

    def draw(self, generator: np.random.Generator, count: int) -> ArrivalTimes: ...


@dataclass(frozen=True)
class AllAtOnce:
    """Every request at 0."""

    def draw(self, generator: np.random.Generator, count: int) -> ArrivalTimes:
        return np.zeros(count)


@dataclass(frozen=True)
class Constant:
    """Equal gaps; `rate` in requests/s."""

    rate: float

    def __post_init__(self) -> None:
        _require_rate(self.rate)

    def draw(self, generator: np.random.Generator, count: int) -> ArrivalTimes:
        return np.arange(count) / self.rate


@dataclass(frozen=True)
class Poisson:
    """Exponential gaps; `rate` in requests/s."""

    rate: float

    def __post_init__(self) -> None:
        _require_rate(self.rate)

    def draw(self, generator: np.random.Generator, count: int) -> ArrivalTimes:
        return _after(generator.exponential(1 / self.rate, max(count - 1, 0)))


@dataclass(frozen=True)
class Gamma:
    """Gamma-distributed gaps: `rate` in requests/s, `cv` their coefficient of variation (1: Poisson, above: bursts)."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _require_rate(self.rate)
        require(self.cv > 0 and isfinite(self.cv), f"cv {self.cv:g} is not a finite number above 0")

    def draw(self, generator: np.random.Generator, count: int) -> ArrivalTimes:
        variance = self.cv**2
        return _after(generator.gamma(1 / variance, variance / self.rate, max(count - 1, 0)))


KINDS: dict[str, type[ArrivalProcess]] = {
    "all_at_once": AllAtOnce,
    "constant": Constant,
    "poisson": Poisson,
    "gamma": Gamma,
}


def _after(gaps: NDArray[np.float64]) -> ArrivalTimes:
    return np.concatenate((np.zeros(1), np.cumsum(gaps)))


def _require_rate(rate: float) -> None:
    require(rate > 0 and isfinite(rate), f"rate {rate:g} is not a finite number above 0")
