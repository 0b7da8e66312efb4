"""Distributions of lengths: each draws integers of at least 1.

The first N draws of a longer series are the draws of a series of N, so that a workload can be cut or extended.
"""

from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.workload.fields import MAX_LENGTH

Lengths = NDArray[np.int64]


class LengthDistribution(Protocol):
    """Draws `count` lengths in tokens; shape [count]."""

    def draw(self, generator: np.random.Generator, count: int) -> Lengths: ...


@dataclass(frozen=True)
class Fixed:
    """Always `value`."""

    value: int

    def __post_init__(self) -> None:
        require(self.value >= 1, f"value {self.value} is below 1")

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        return np.full(count, self.value, dtype=np.int64)


@dataclass(frozen=True)
class Normal:
    """Normal, rounded, and at least 1: gptManagerBenchmark's token-norm-dist (prepare_dataset.py)."""

    mean: float
    stdev: float

    def __post_init__(self) -> None:
        require(self.mean > 0, f"mean {self.mean:g} is not above 0")
        require(self.stdev >= 0, f"stdev {self.stdev:g} is negative")

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        return whole(generator.normal(self.mean, self.stdev, count))


@dataclass(frozen=True)
class Uniform:
    """Every integer from `min` to `max` alike: gptManagerBenchmark's token-unif-dist (prepare_dataset.py)."""

    min: int
    max: int

    def __post_init__(self) -> None:
        require(self.min >= 1, f"min {self.min} is below 1")
        require(self.max >= self.min, f"max {self.max} is below min {self.min}")

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        return generator.integers(self.min, self.max, size=count, endpoint=True, dtype=np.int64)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal of the given median and mean (before rounding), cut off at `max`."""

    median: float
    mean: float
    max: float = inf

    def __post_init__(self) -> None:
        require_lognormal(self.median, self.mean)
        require(self.max >= 1, f"max {self.max:g} is below 1")

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        return whole(np.minimum(lognormal(generator, self.median, self.mean, count), self.max))


@dataclass(frozen=True)
class Geometric:
    """How many of something that ends each time with the same probability, such as the turns of a conversation."""

    mean: float

    def __post_init__(self) -> None:
        require(self.mean >= 1, f"mean {self.mean:g} is below 1")

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        return np.minimum(generator.geometric(1 / self.mean, count), MAX_LENGTH)


@dataclass(frozen=True)
class Quantiles:
    """Straight lines between known quantiles: `points` are (percentile, length), from p0 to p100."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        percentiles = [percentile for percentile, _ in self.points]
        lengths = [length for _, length in self.points]
        require(percentiles[:1] == [0] and percentiles[-1:] == [100], "quantiles do not go from p0 to p100")
        require(lengths == sorted(lengths), "a higher quantile is below a lower one")
        require(lengths[0] >= 1, f"p0 {lengths[0]:g} is below 1")

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        percentiles, lengths = zip(*self.points, strict=True)
        return whole(np.interp(generator.uniform(0, 100, count), percentiles, lengths))


def require_lognormal(median: float, mean: float) -> None:
    """InputError unless there is a log-normal distribution of this median and mean."""
    require(median > 0, f"median {median:g} is not above 0")
    require(mean >= median, f"mean {mean:g} is below median {median:g}")


def lognormal(generator: np.random.Generator, median: float, mean: float, count: int) -> NDArray[np.float64]:
    """`count` values, log-normal of the given median and mean."""
    return generator.lognormal(log(median), sqrt(2 * log(mean / median)), count)


KINDS: dict[str, type[LengthDistribution]] = {
    "fixed": Fixed,
    "normal": Normal,
    "uniform": Uniform,
    "lognormal": LogNormal,
    "geometric": Geometric,
    "quantiles": Quantiles,
}


def whole(lengths: NDArray[np.float64]) -> Lengths:
    """Rounded to whole tokens, at least 1."""
    return np.clip(np.rint(lengths), 1, MAX_LENGTH).astype(np.int64)


def require(holds: bool, problem: str) -> None:
    """InputError with `problem` unless it holds; whoever reads the specification adds where it stands."""
    if not holds:
        raise InputError(problem)
