"""Arrival processes: when requests arrive, by a rate, a ramp, a file of rates or all at once.

A process with a rate that changes draws arrivals at a rate of 1 and moves each to where the integral of its rate over
time reaches that value (time rescaling); so its mean is right whatever the gaps are.
"""

import csv
from dataclasses import dataclass
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ifbbench.compressed import read_text
from ifbbench.errors import InputError
from ifbbench.settings import fields
from ifbbench.settings.config import RunConfig
from ifbbench.settings.fields import located
from ifbbench.settings.groups.replay import BY_ITERATION
from ifbbench.workload.distributions import Generator, Limited, NotNegative, Positive, Times

RAMPS = ("linear", "exponential")
SMALLEST_VARIANCE = 1e-12  # of gaps: its inverse and the sums of gaps are finite, and the gaps as good as equal
SCHEDULE_COLUMNS = ["start_s", "rate"]


class ArrivalProcess(Protocol):
    """Draws `count` arrival times in seconds, ascending; shape [count]. The first is 0, unless the rate is 0 then."""

    def draw(self, generator: Generator, count: int) -> Times: ...


@dataclass(frozen=True)
class AllAtOnce:
    """Every request at 0."""

    def draw(self, generator: Generator, count: int) -> Times:
        return np.zeros(count)


@dataclass(frozen=True)
class Constant(Limited):
    """Equal gaps; `rate` in requests/s."""

    rate: Positive

    def draw(self, generator: Generator, count: int) -> Times:
        return np.arange(count) / self.rate


@dataclass(frozen=True)
class Poisson(Limited):
    """Exponential gaps; `rate` in requests/s."""

    rate: Positive

    def draw(self, generator: Generator, count: int) -> Times:
        return _after(generator.exponential(1 / self.rate, max(count - 1, 0)))


@dataclass(frozen=True)
class Gamma(Limited):
    """Gamma-distributed gaps; `rate` in requests/s, `cv` the gaps' coefficient of variation (1: Poisson, above:
    bursts). The burstiness of `vllm bench serve` is the shape of the distribution, 1 / cv²."""

    rate: Positive
    cv: Positive

    def draw(self, generator: Generator, count: int) -> Times:
        variance = max(self.cv**2, SMALLEST_VARIANCE)
        return _after(generator.gamma(1 / variance, variance / self.rate, max(count - 1, 0)))


@dataclass(frozen=True)
class Ramp(Limited):
    """A rate (requests/s) that goes from `start` to `end` in `duration` seconds and stays there; gamma gaps.

    strategy: `linear` adds, and `exponential` multiplies, the same in each second."""

    start: NotNegative
    end: Positive
    duration: Positive
    strategy: str = RAMPS[0]
    burstiness: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if fields.choice(self.strategy, "strategy", RAMPS) == "exponential" and not self.start:
            raise InputError("start is 0; expected a rate above 0 for an exponential ramp.")

    def draw(self, generator: Generator, count: int) -> Times:
        work = _at_rate_1(generator, count, self.burstiness)
        start, end, duration = self.start, self.end, self.duration
        if self.strategy == "exponential" and start != end:
            growth = log(end / start) / duration
            of_ramp = (end - start) / growth
            times = np.log1p(np.minimum(work, of_ramp) * growth / start) / growth
        else:
            of_ramp = (start + end) / 2 * duration
            slope = (end - start) / duration
            root = np.sqrt(start**2 + 2 * slope * np.minimum(work, of_ramp))
            # The form of the solution that does not divide 0 by 0 at the start of a ramp from 0.
            times = 2 * np.minimum(work, of_ramp) / np.where(start + root, start + root, 1)
        return times + np.maximum(work - of_ramp, 0) / end


@dataclass(frozen=True)
class OnOff(Limited):
    """`rate` requests/s for `on` seconds, then none for `off` seconds, and again; gamma gaps."""

    rate: Positive
    on: Positive
    off: NotNegative
    burstiness: Positive = 1.0

    def draw(self, generator: Generator, count: int) -> Times:
        on_s = _at_rate_1(generator, count, self.burstiness) / self.rate
        return on_s + np.floor(on_s / self.on) * self.off


@dataclass(frozen=True)
class Schedule(Limited):
    """A rate that changes in steps: `rates` are (start in seconds, requests/s), the last holds on; gamma gaps."""

    rates: tuple[tuple[float, float], ...]
    burstiness: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rates, list | tuple) or not self.rates:
            raise fields.unexpected("rates", self.rates, "a list of [start_s, rate]")
        rates = tuple(_step(step, f"rates[{index}]") for index, step in enumerate(self.rates))
        if rates[0][0] != 0:
            raise InputError(f"the first rate starts at {rates[0][0]:g} s; expected 0.")
        for (before, _), (start, _) in pairwise(rates):
            if start <= before:
                raise InputError(f"a rate starts at {start:g} s after one at {before:g} s; expected ascending starts.")
        if not rates[-1][1]:
            raise InputError(
                "the last rate is 0, so that not all requests arrive; expected a rate above 0. End the "
                f"arrivals with --duration {rates[-1][0]:g} instead."
            )
        object.__setattr__(self, "rates", rates)

    def draw(self, generator: Generator, count: int) -> Times:
        starts, rates = np.array(self.rates).T
        work = _at_rate_1(generator, count, self.burstiness)
        work_before = np.concatenate(([0.0], np.cumsum(np.diff(starts) * rates[:-1])))
        step = work_before.searchsorted(work, side="right") - 1  # never one with a rate of 0
        times: Times = starts[step] + (work - work_before[step]) / rates[step]
        return times


def _step(value: Any, name: str) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise fields.unexpected(name, value, "[start_s, rate]")
    start_s, rate = (
        fields.number(one, f"{name} {column}", 0.0, from_text=True)
        for one, column in zip(value, SCHEDULE_COLUMNS, strict=True)
    )
    return start_s, rate


def read_schedule(path: Path, burstiness: float) -> Schedule:
    """The rates in a CSV file with the columns start_s and rate; InputError names the file."""
    with located(str(path), "See the arrivals in docs/traces.md."):
        try:
            header, *rows = [row for row in csv.reader(read_text(path).splitlines()) if row] or [[]]
        except (OSError, ValueError, csv.Error) as error:
            raise InputError(f"the rates cannot be read: {getattr(error, 'strerror', None) or error}.") from error
        if [name.strip() for name in header] != SCHEDULE_COLUMNS:
            raise fields.unexpected("the first line", ",".join(header), ",".join(SCHEDULE_COLUMNS))
        rates = tuple(_step([cell.strip() for cell in row], f"row {number}") for number, row in enumerate(rows, 1))
        return Schedule(rates, burstiness)


def _after(gaps: Times) -> Times:
    return np.concatenate((np.zeros(1), np.cumsum(gaps)))


def _at_rate_1(generator: Generator, count: int, burstiness: float) -> Times:
    """Arrival times at a mean rate of 1 request/s; shape [count]."""
    return Gamma(1.0, burstiness**-0.5).draw(generator, count)[:count]


# By their names in specifications.

ARRIVALS: dict[str, type[ArrivalProcess]] = {
    "all_at_once": AllAtOnce,
    "constant": Constant,
    "poisson": Poisson,
    "gamma": Gamma,
    "ramp": Ramp,
    "on_off": OnOff,
    "schedule": Schedule,
}

# From settings.

KINDS = {
    "recorded": (0, 0),
    BY_ITERATION: (0, 0),
    "all_at_once": (0, 0),
    "constant": (0, 0),
    "poisson": (0, 0),
    "gamma": (1, 1),
    "ramp": (3, 4),
    "on_off": (3, 3),
}
"""The kinds of `--arrival`, with the smallest and the largest number of values after their name."""
KINDS_IN_WORDS = (
    "recorded, iteration, all_at_once, constant, poisson, gamma:BURSTINESS, ramp:FROM:TO:SECONDS[:exponential] or "
    "on_off:RATE:ON_SECONDS:OFF_SECONDS"
)
RECORDED = ("--arrival recorded", f"--arrival {BY_ITERATION}")
NEED_RATE = ("constant", "poisson", "gamma")


def chosen_process(config: RunConfig) -> ArrivalProcess | None:
    """The process that replaces the recorded arrivals, None for these. InputError if settings contradict each other."""
    kind, values = _parse(config.arrival or "recorded")
    rates = {
        "--request_rate": config.request_rate is not None,
        "--rate_schedule": config.rate_schedule is not None,
        f"--arrival {kind}": config.arrival is not None and kind not in NEED_RATE,
    }
    gaps = {
        "--enable_exp_delays": config.enable_exp_delays,
        "--burstiness": config.burstiness is not None,
        f"--arrival {kind}": kind in NEED_RATE,
    }
    rate = _only_one(rates, "say at which rate requests arrive")
    gap = _only_one(gaps, "say how the gaps between arrivals vary")
    if rate in (None, *RECORDED, "--arrival all_at_once") and gap is not None:
        raise InputError(f"{gap} needs a rate; give --request_rate too, or leave it out.")
    if gap == f"--arrival {kind}" and config.request_rate is None:
        raise InputError(f"{gap} needs --request_rate; expected both, or --burstiness with {rate}.")
    if rate in (None, *RECORDED):
        return None
    if config.time_scale != 1:
        raise InputError(
            f"--time_scale scales recorded arrivals, which {rate} replaces; expected one of the two. Leave out the "
            "other."
        )
    burstiness = config.burstiness or 1.0
    with located(f"--arrival {config.arrival}" if config.arrival else str(rate)):
        if kind == "all_at_once":
            return AllAtOnce()
        if kind == "ramp":
            start, end, duration, *strategy = values
            return Ramp(start, end, duration, strategy[0] if strategy else RAMPS[0], burstiness)
        if kind == "on_off":
            rate_on, on, off = values
            return OnOff(rate_on, on, off, burstiness)
        if config.rate_schedule is not None:
            return read_schedule(Path(config.rate_schedule), burstiness)
        assert config.request_rate is not None
        if kind == "poisson" or config.enable_exp_delays:
            return Poisson(config.request_rate)
        if kind == "gamma" or config.burstiness is not None:
            shape = fields.number(values[0] if values else burstiness, "burstiness", above=0.0)
            return Gamma(config.request_rate, shape**-0.5)
        return Constant(config.request_rate)


def _parse(text: str) -> tuple[str, list[Any]]:
    """The kind in `KIND:VALUE:…`, and its values: numbers, and the strategy of a ramp."""
    name, *texts = text.split(":")
    kind, strategies = name.strip().lower().replace("-", "_"), texts[3:]
    low, high = KINDS.get(kind, (1, 0))
    if not low <= len(texts) <= high:
        raise fields.unexpected("--arrival", text, KINDS_IN_WORDS)
    with located(f"--arrival {text}"):
        return kind, [fields.number(one, "a value", from_text=True) for one in texts[:3]] + strategies


def _only_one(given: dict[str, bool], what: str) -> str | None:
    """The name of the setting that is given, None if none is; InputError for several, which all do `what`."""
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise InputError(f"{' and '.join(names)} both {what}; expected one of them. Leave out the others.")
    return names[0] if names else None
