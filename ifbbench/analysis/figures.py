"""The figures of two runs with the uncertainty of their difference, and conditions on them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ifbbench.analysis.confidence import Interval, Margin
from ifbbench.errors import InputError


@dataclass(frozen=True)
class Figure:
    """A figure of both runs.

    low, high: confidence interval of the difference; None where it is unknown.
    expected_error: relative limits of the error of a simulated figure against real servers.
    difference: b minus a.
    ratio: b over a; None if a is 0.
    is_noise: whether the interval holds 0, so that the runs do not differ in it.
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


def compared_figures(a: Mapping[str, Any], b: Mapping[str, Any], margins: Mapping[str, Margin]) -> dict[str, Figure]:
    """Each number that the summaries `a` and `b` both have, by its dotted name.

    margins: the confidence interval of the difference of each figure that has one."""
    flat = [dict(numbers_of(summary)) for summary in (a, b)]
    expected = [summary.get("expected_error") or {} for summary in (a, b)]
    found = {}
    for name, value in flat[0].items():
        if name in flat[1] and not name.startswith("expected_error."):
            low, high = None, None
            if (margin := margins.get(name)) is not None:
                low, high = (limit - value for limit in margin.around(flat[1][name]))
            found[name] = Figure(value, flat[1][name], low, high, _wider(expected, name.partition(".")[0]))
    return found


def _wider(expected: Sequence[Mapping[str, Any]], key: str) -> Interval | None:
    """The expected error of a figure that holds for both runs; None if it is not known of one."""
    bands = [band for one in expected if (band := one.get(key)) is not None]
    if len(bands) < len(expected):
        return None
    return min(low for low, _ in bands), max(high for _, high in bands)


def numbers_of(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Nested numbers by dotted names: `ttft_s.p99`."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


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
        value = 0.0 if figure.difference == 0 else (figure.ratio - 1) * 100 if figure.ratio is not None else math.inf
    else:
        value = figure.difference if sign else figure.b
    holds = value > bound if operator == ">" else value < bound
    unit = " %" if percent else ""
    kind = "changed by" if sign or percent else "is"
    return f"{name} {kind} {value:+.4g}{unit}: {text.strip()}" if holds else None


def neighbours(values: Sequence[float], of: float) -> list[int]:
    """The indices of the nearest smaller and the nearest larger one of `values`, as far as there are any."""
    ordered = sorted(range(len(values)), key=values.__getitem__)
    smaller = [index for index in ordered if values[index] < of]
    return smaller[-1:] + [index for index in ordered if values[index] > of][:1]
