"""Distributions of times: each draws seconds of at least 0.

The first N draws of a longer series are the draws of a series of N, so that a workload can be cut or extended.
"""

from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ifbbench.workload.distributions import lognormal, require, require_lognormal

Durations = NDArray[np.float64]


class DurationDistribution(Protocol):
    """Draws `count` times in seconds; shape [count]."""

    def draw(self, generator: np.random.Generator, count: int) -> Durations: ...


@dataclass(frozen=True)
class FixedTime:
    """Always `value` seconds."""

    value: float

    def __post_init__(self) -> None:
        require(self.value >= 0, f"value {self.value:g} is negative")

    def draw(self, generator: np.random.Generator, count: int) -> Durations:
        return np.full(count, self.value, dtype=np.float64)


@dataclass(frozen=True)
class UniformTime:
    """Every time from `min` to `max` alike."""

    min: float
    max: float

    def __post_init__(self) -> None:
        require(self.min >= 0, f"min {self.min:g} is negative")
        require(self.max >= self.min, f"max {self.max:g} is below min {self.min:g}")

    def draw(self, generator: np.random.Generator, count: int) -> Durations:
        return generator.uniform(self.min, self.max, count)


@dataclass(frozen=True)
class ExponentialTime:
    """Exponential with the given mean."""

    mean: float

    def __post_init__(self) -> None:
        require(self.mean >= 0, f"mean {self.mean:g} is negative")

    def draw(self, generator: np.random.Generator, count: int) -> Durations:
        return generator.exponential(self.mean, count)


@dataclass(frozen=True)
class LogNormalTime:
    """Log-normal of the given median and mean, cut off at `max`."""

    median: float
    mean: float
    max: float = inf

    def __post_init__(self) -> None:
        require_lognormal(self.median, self.mean)
        require(self.max > 0, f"max {self.max:g} is not above 0")

    def draw(self, generator: np.random.Generator, count: int) -> Durations:
        return np.minimum(lognormal(generator, self.median, self.mean, count), self.max)


KINDS: dict[str, type[DurationDistribution]] = {
    "fixed": FixedTime,
    "uniform": UniformTime,
    "exponential": ExponentialTime,
    "lognormal": LogNormalTime,
}
