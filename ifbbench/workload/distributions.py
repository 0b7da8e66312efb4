"""Random lengths and durations of a workload, and the streams that they and its arrivals are drawn from.

The first N values of a longer series are the values of a series of N, so a workload can be cut or extended.
"""

import dataclasses
from dataclasses import dataclass
from enum import IntEnum
from math import inf, log, sqrt
from typing import Annotated, Any, ClassVar, Protocol, TypeAlias, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.settings import fields
from ifbbench.workload.trace import MAX_LENGTH

Generator = np.random.Generator
Lengths: TypeAlias = NDArray[np.int64]
Times: TypeAlias = NDArray[np.float64]


class Stream(IntEnum):
    """What is drawn. The numbers are part of every recorded result: never change one."""

    INPUT_LENGTH = 0
    OUTPUT_LENGTH = 1
    ARRIVAL = 2
    TOKENS = 3
    PREFIX = 4
    POOL_LENGTH = 5
    POOL_SHARE = 6
    POOL_CHOICE = 7
    TURNS = 8
    THINK_TIME = 9
    REQUEST_CLASS = 10
    TASK_ID = 11
    SAMPLE = 12
    SUB_REQUEST_SHARE = 13
    SUB_REQUEST_COUNT = 14
    SUB_REQUEST_INPUT_LENGTH = 15
    SUB_REQUEST_OUTPUT_LENGTH = 16


def generator(seed: int, stream: Stream, *key: int) -> Generator:
    """The generator of one stream, or of its part `key` (such as a request id, or the position of a request class);
    equal arguments give equal values."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, *key))))


Length = Annotated[int, {"minimum": 1, "maximum": MAX_LENGTH}]
# Squares and sums of numbers up to there are finite.
_LARGEST = {"maximum": 1e12, "guards": True}
Positive = Annotated[float, {"above": 0, **_LARGEST}]
NotNegative = Annotated[float, {"minimum": 0, **_LARGEST}]


class Limited:
    """A dataclass that checks its numbers at construction: those of fields annotated with the limits that
    `fields.integer` or `fields.number` take. A default may be outside of them (`max` is infinite).

    ascending: two fields of which the second must be at least the first.
    """

    ascending: ClassVar[tuple[str, str] | None] = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if get_origin(field.type) is Annotated and value != field.default:
                kind, limits = get_args(field.type)
                check: Any = fields.integer if kind is int else fields.number
                check(value, field.name, **limits)
                if not value:  # NumPy refuses -0.0
                    object.__setattr__(self, field.name, abs(value))
        if self.ascending is not None:
            low, high = (getattr(self, name) for name in self.ascending)
            if high < low:
                lower, upper = self.ascending
                raise InputError(f"{upper} is {high:g}; expected at least {lower} ({low:g}).")


# Lengths in tokens (or turns), at least 1.


class LengthDistribution(Protocol):
    """Draws `count` integers of at least 1; shape [count]."""

    def draw(self, generator: Generator, count: int) -> Lengths: ...


def whole(lengths: NDArray[np.float64]) -> Lengths:
    """`lengths` rounded to integers from 1 to MAX_LENGTH."""
    return np.clip(np.rint(lengths), 1, MAX_LENGTH).astype(np.int64)


@dataclass(frozen=True)
class Fixed(Limited):
    """Always `value`."""

    value: Length

    def draw(self, generator: Generator, count: int) -> Lengths:
        return np.full(count, self.value, dtype=np.int64)


@dataclass(frozen=True)
class Normal(Limited):
    """Normal, rounded, at least 1: gptManagerBenchmark's token-norm-dist (prepare_dataset.py)."""

    mean: Positive
    stdev: NotNegative

    def draw(self, generator: Generator, count: int) -> Lengths:
        return whole(generator.normal(self.mean, self.stdev, count))


@dataclass(frozen=True)
class Uniform(Limited):
    """Integers from `min` to `max`, all equally likely: gptManagerBenchmark's token-unif-dist (prepare_dataset.py)."""

    ascending = ("min", "max")
    min: Length
    max: Length

    def draw(self, generator: Generator, count: int) -> Lengths:
        return generator.integers(self.min, self.max, size=count, endpoint=True, dtype=np.int64)


@dataclass(frozen=True)
class Geometric(Limited):
    """The length of something that ends after each step with the same probability, such as a conversation."""

    mean: Annotated[float, {"minimum": 1}]

    def draw(self, generator: Generator, count: int) -> Lengths:
        return np.minimum(generator.geometric(1 / self.mean, count), MAX_LENGTH)


@dataclass(frozen=True)
class Quantiles:
    """Linear interpolation between known quantiles; `points` are (percentile, length), from p0 to p100."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if [percentile for percentile, _ in self.points[:1] + self.points[-1:]] != [0, 100]:
            raise InputError("quantiles do not go from p0 to p100; give both.")
        lengths = [length for _, length in self.points]
        if lengths != sorted(lengths):
            raise InputError("a higher quantile is below a lower one; expected lengths in ascending order.")

    def draw(self, generator: Generator, count: int) -> Lengths:
        percentiles, lengths = zip(*self.points, strict=True)
        return whole(np.interp(generator.uniform(0, 100, count), percentiles, lengths))


@dataclass(frozen=True)
class Histogram:
    """Counts of lengths: bin i holds those of at least `edges[i]` and below `edges[i + 1]` tokens, all equally likely.

    The counts may also be frequencies of any scale.
    """

    edges: tuple[int, ...]
    counts: tuple[float, ...]

    def __post_init__(self) -> None:
        edges = fields.integers(self.edges, "edges", "length", 1, MAX_LENGTH + 1)
        if list(edges) != sorted(set(edges)) or len(edges) < 2:
            raise InputError("edges are not ascending; expected at least two lengths, each above the one before.")
        if not isinstance(self.counts, list | tuple) or len(self.counts) != len(edges) - 1:
            raise InputError(f"counts do not fit edges; expected {len(edges) - 1} of them, one for each bin.")
        counts = [fields.number(count, f"counts[{index}]", 0) for index, count in enumerate(self.counts)]
        if not sum(counts):
            raise InputError("counts are all 0; expected at least one above 0.")

    def draw(self, generator: Generator, count: int) -> Lengths:
        chosen, within = generator.random((count, 2)).T
        shares, edges = np.cumsum(self.counts), np.asarray(self.edges, dtype=np.int64)
        bins = np.searchsorted(shares[:-1], chosen * shares[-1], side="right")
        lengths: Lengths = edges[bins] + (within * np.diff(edges)[bins]).astype(np.int64)
        return lengths


# Durations in seconds, at least 0.


class DurationDistribution(Protocol):
    """Draws `count` times in seconds; shape [count]."""

    def draw(self, generator: Generator, count: int) -> Times: ...


@dataclass(frozen=True)
class FixedTime(Limited):
    """Always `value` seconds."""

    value: NotNegative

    def draw(self, generator: Generator, count: int) -> Times:
        return np.full(count, self.value, dtype=np.float64)


@dataclass(frozen=True)
class UniformTime(Limited):
    """Uniform from `min` to `max`."""

    ascending = ("min", "max")
    min: NotNegative
    max: NotNegative

    def draw(self, generator: Generator, count: int) -> Times:
        return generator.uniform(self.min, self.max, count)


@dataclass(frozen=True)
class ExponentialTime(Limited):
    """Exponential with the given mean."""

    mean: NotNegative

    def draw(self, generator: Generator, count: int) -> Times:
        return generator.exponential(self.mean, count)


@dataclass(frozen=True)
class LogNormalTime(Limited):
    """Log-normal of the given median and mean, before it is cut off at `max`."""

    ascending = ("median", "mean")
    median: Positive
    mean: Positive
    max: Positive = inf

    def draw(self, generator: Generator, count: int) -> Times:
        spread = sqrt(2 * log(self.mean / self.median))
        return np.minimum(generator.lognormal(log(self.median), spread, count), self.max)


@dataclass(frozen=True)
class LogNormal(LogNormalTime):
    """Log-normal lengths: those of LogNormalTime, rounded, at least 1."""

    def draw(self, generator: Generator, count: int) -> Lengths:  # type: ignore[override]
        return whole(super().draw(generator, count))


# By their names in specifications.

LENGTHS: dict[str, type[LengthDistribution]] = {
    "fixed": Fixed,
    "normal": Normal,
    "uniform": Uniform,
    "lognormal": LogNormal,
    "geometric": Geometric,
    "quantiles": Quantiles,
    "histogram": Histogram,
}
DURATIONS: dict[str, type[DurationDistribution]] = {
    "fixed": FixedTime,
    "uniform": UniformTime,
    "exponential": ExponentialTime,
    "lognormal": LogNormalTime,
}
