"""The mean of each figure over runs with different seeds, and its confidence interval."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import cos, pi, sin, sqrt
from statistics import fmean, stdev
from typing import Any

CONFIDENCE = 0.95


def summary_of(summaries: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """The summary of `count` repeats, of which `summaries` ended: the mean of each figure under its name, and under
    `confidence_interval_95` its limits [low, high], None with fewer than two values. Figures that are not numbers are
    kept where all repeats agree."""
    return {
        "repeats": {"total": count, "completed": len(summaries)},
        **_combined(summaries, fmean),
        "confidence_interval_95": _combined(summaries, _interval),
    }


def _combined(tables: Sequence[Mapping[str, Any]], combine: Callable[[Sequence[float]], Any]) -> dict[str, Any]:
    combined: dict[str, Any] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [value for table in tables if (value := table.get(name)) is not None]
        if values and all(isinstance(value, Mapping) for value in values):
            combined[name] = _combined(values, combine)
        elif values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            combined[name] = combine(values)
        elif combine is fmean:
            combined[name] = values[0] if values and all(value == values[0] for value in values) else None
    return combined


def _interval(values: Sequence[float]) -> list[float] | None:
    """The limits of the confidence interval of the mean of `values`, by Student's t distribution."""
    if len(values) < 2:
        return None
    half_width = student_t(CONFIDENCE, len(values) - 1) * stdev(values) / sqrt(len(values))
    return [fmean(values) - half_width, fmean(values) + half_width]


@cache
def student_t(confidence: float, degrees: int) -> float:
    """The t that a value of Student's t distribution stays within, on both sides, with probability `confidence`."""
    low, high = 0.0, pi / 2  # of the angle atan(t / sqrt(degrees))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return sqrt(degrees) * sin(low) / cos(low)


def _within(angle: float, degrees: int) -> float:
    """The probability that Student's t stays within sqrt(degrees) * tan(angle): Abramowitz and Stegun, 26.7.3 and
    26.7.4."""
    squared = cos(angle) ** 2
    term, total = (cos(angle), 0.0) if degrees % 2 else (1.0, 0.0)
    for step in range(2 + degrees % 2, degrees + 1, 2):
        total += term
        term *= squared * (step - 1) / step
    return 2 / pi * (angle + sin(angle) * total) if degrees % 2 else sin(angle) * total
