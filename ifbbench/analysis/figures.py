"""The figures of two runs with the uncertainty of their difference, and conditions on them.

The uncertainty of a figure over requests is that of a bootstrap: requests are drawn again with replacement, the same
ones in both runs where the traces are equal (paired), and the figure is computed anew each time.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.analysis.recorded import Floats, RecordedRun
from ifbbench.errors import InputError

DRAWS = 200
CONFIDENCE = 95.0
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9}
PER_REQUEST = ("queue_time_s", "ttft_s", "tpot_s", "e2e_s")
MIN_SAMPLES = 20
Interval = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """A figure of both runs.

    difference: b minus a. ratio: b over a; None if a is 0. low, high: confidence interval of the difference; None where
    the figure is not one of the latencies of requests. is_noise: whether the interval holds 0, so that the runs do not
    differ in it. expected_error: of a simulated figure, the relative limits of its error against real servers.
    is_undecided: whether the difference is within these, so that on real servers it may be the other way round.
    """

    a: float
    b: float
    low: float | None = None
    high: float | None = None
    expected_error: Interval | None = None

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a else None

    @property
    def is_noise(self) -> bool:
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high

    @property
    def is_undecided(self) -> bool:
        if self.expected_error is None or self.ratio is None:
            return False
        return self.expected_error[0] <= self.ratio - 1 <= self.expected_error[1]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; without what is not known."""
        interval = {} if self.low is None else {"interval_95": [self.low, self.high], "is_noise": self.is_noise}
        expected = {} if self.expected_error is None else {"is_undecided": self.is_undecided}
        return {"a": self.a, "b": self.b, "difference": self.difference, "ratio": self.ratio} | interval | expected


def compared_figures(a: RecordedRun, b: RecordedRun, paired: bool) -> dict[str, Figure]:
    """Each number of `summary.json` that both runs have, by its dotted name. paired: the traces are equal."""
    flat = [dict(numbers_of(run.data.summary or {})) for run in (a, b)]
    intervals = _intervals(a, b, paired)
    expected = [(run.data.summary or {}).get("expected_error") or {} for run in (a, b)]
    found = {}
    for name, value in flat[0].items():
        if name in flat[1] and not name.startswith("expected_error."):
            low, high = intervals.get(name, (None, None))
            found[name] = Figure(value, flat[1][name], low, high, _wider(expected, name.partition(".")[0]))
    return found


def _wider(expected: Sequence[Mapping[str, Any]], key: str) -> Interval | None:
    """The expected error of a figure that holds for both runs; None if it is not known of one."""
    bands = [one[key] for one in expected if key in one]
    if len(bands) < len(expected):
        return None
    return min(low for low, _ in bands), max(high for _, high in bands)


def _intervals(a: RecordedRun, b: RecordedRun, paired: bool) -> dict[str, Interval]:
    generator = np.random.default_rng(0)
    found: dict[str, Interval] = {}
    draws: dict[tuple[bool, int], NDArray[np.int32]] = {}
    for name in PER_REQUEST:
        values = [
            {one: row[name] for one, row in run.row_of.items() if row.get(name) is not None}
            for run in (a, b)
        ]
        if paired:
            common = [one for one in values[0] if one in values[1]]
            values = [{one: side[one] for one in common} for side in values]
        left, right = (np.array(list(side.values()), np.float64) for side in values)
        if min(len(left), len(right)) < MIN_SAMPLES:
            continue
        sides = (False, len(left)), (not paired, len(right))
        for side in sides:
            if side not in draws:
                draws[side] = _draws(side[1], generator)
        for statistic, interval in _bootstrap(left, right, (draws[sides[0]], draws[sides[1]])).items():
            found[f"{name}.{statistic}"] = interval
    return found


def numbers_of(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Nested numbers by dotted names: `ttft_s.p99`."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


def _draws(size: int, generator: np.random.Generator) -> NDArray[np.int32]:
    """[size, DRAWS]: how many times each of `size` requests occurs in each draw with replacement."""
    drawn = (np.bincount(generator.integers(0, size, size), minlength=size) for _ in range(DRAWS))
    return np.array([*drawn], np.int32).T.copy()


def _bootstrap(a: Floats, b: Floats, draws: tuple[NDArray[np.int32], NDArray[np.int32]]) -> dict[str, Interval]:
    """Confidence intervals of the differences of mean and percentiles.

    In sorted order, the percentile of a draw is the value at which the number of drawn requests passes the rank.
    """
    samples: list[dict[str, Floats]] = []
    for values, counts in zip((a, b), draws, strict=True):
        order = np.argsort(values, kind="stable")
        ranked, sums = values[order], np.cumsum(counts[order], axis=0, dtype=np.int32)
        of_draws = {"mean": values @ counts / len(values)}
        for name, percentile in PERCENTILES.items():
            places = _search(sums, percentile / 100 * (len(values) - 1))
            of_draws[name] = ranked[np.minimum(places, len(values) - 1)]
        samples.append(of_draws)
    tail = (100 - CONFIDENCE) / 2
    found: dict[str, Interval] = {}
    for name in samples[0]:
        low, high = np.percentile(samples[1][name] - samples[0][name], (tail, 100 - tail))
        found[name] = (float(low), float(high))
    return found


def _search(sums: NDArray[np.int32], rank: float) -> NDArray[np.int64]:
    """The first row of each column of ascending `sums` that is above `rank`, by bisection in all columns at once."""
    columns = np.arange(sums.shape[1])
    low, high = np.zeros(len(columns), np.int64), np.full(len(columns), len(sums), np.int64)
    while (low < high).any():
        middle = np.minimum((low + high) // 2, len(sums) - 1)
        above = sums[middle, columns] > rank
        high = np.where(above & (low < high), middle, high)
        low = np.where(~above & (low < high), middle + 1, low)
    return low


# Conditions of a regression gate.

_CONDITION = re.compile(r"\s*([\w.]+)\s*([<>])\s*([+-]?)(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(%?)\s*")


def failed_condition(text: str, figures: Mapping[str, Figure]) -> str | None:
    """Why a condition such as `ttft_s.p99>+5%` (grew by more than 5 %), `pauses>+10` (by more than 10) or
    `ttft_s.p99>1.5` (is above 1.5 in run b) holds; None if it does not. InputError if it is not such a text, or names
    no figure of both runs."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise InputError(
            f"--fail-if {text!r} is not valid; expected NAME>+5% or NAME<-5% (relative change), NAME>+10 (change) or "
            "NAME>1.5 (value of the second run), where NAME is a figure such as ttft_s.p99."
        )
    name, operator, sign, amount, percent = match.groups()
    figure = figures.get(name)
    if figure is None:
        near = [one for one in figures if one.split(".")[0] == name.split(".")[0]] or list(figures)
        known = ", ".join(near[:8])
        raise InputError(f"--fail-if {text!r}: {name} is no figure of both runs; expected one such as {known}.")
    bound = float(sign + amount) if sign else float(amount)
    if percent:
        value = 0.0 if figure.difference == 0 else (figure.ratio - 1) * 100 if figure.ratio is not None else np.inf
    else:
        value = figure.difference if sign else figure.b
    holds = value > bound if operator == ">" else value < bound
    unit = " %" if percent else ""
    kind = "changed by" if sign or percent else "is"
    return f"{name} {kind} {value:+.4g}{unit}: {text.strip()}" if holds else None
