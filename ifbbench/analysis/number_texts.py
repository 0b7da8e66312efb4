"""How tables, charts and sentences write numbers."""

import math
from collections.abc import Iterable

NOTHING = "–"
MAX_DECIMALS = 6


def significant(value: float | None, scale: float = 1.0) -> str:
    """`value` times `scale` to three significant digits and at most MAX_DECIMALS decimals, without exponent: 1,234 ·
    12.3 · 0.0123; a dash for None or NaN. What rounds to nothing is 0, without a sign."""
    if value is None or math.isnan(value):
        return NOTHING
    value *= scale
    if abs(value) < 0.5 * 10**-MAX_DECIMALS:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(decimals, 0), MAX_DECIMALS)}f}"


def count(value: float | None) -> str:
    """A whole number with thousands separators; a dash for None or NaN."""
    if value is None or math.isnan(value):
        return NOTHING
    text = f"{value:,.0f}"
    return "0" if text == "-0" else text


def number_of(number: int, noun: str) -> str:
    """So many of something: 1 token, 1,234 tokens."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def percent(share: float | None, decimals: int = 0) -> str:
    """A share in percent; `<1 %` for a small one, so that it does not read as never, and `>99 %` for one that is not
    all."""
    if share is None or math.isnan(share):
        return NOTHING
    least = 10.0 ** -(decimals + 2)
    if 0 < share < least:
        return f"<{100 * least:.{decimals}f} %"
    if 1 - least < share < 1:
        return f">{100 * (1 - least):.{decimals}f} %"
    return f"{round(100 * share, decimals) + 0.0:,.{decimals}f} %"  # + 0.0: never -0


def time_unit(seconds: Iterable[float | None]) -> tuple[str, float]:
    """The unit (s, ms or µs) that suits the middle of these durations, and the number of them in a second."""
    known = sorted(value for value in seconds if value is not None and not math.isnan(value))
    middle = known[len(known) // 2] if known else 1.0
    if middle >= 1:
        return "s", 1.0
    return ("µs", 1e6) if 0 < middle < 1e-4 else ("ms", 1e3)
