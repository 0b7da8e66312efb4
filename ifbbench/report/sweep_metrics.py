"""What the charts of a sweep share: metrics of its points, their limits, and how values of settings are written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from ifbbench.analysis.number_texts import time_unit
from ifbbench.report.colours import PERCENTILES, SERIES, limit_colours
from ifbbench.report.sweep_table import SweepRow, number_in, shares
from ifbbench.rundir.reader import Floats
from ifbbench.settings.fields import as_text

THROUGHPUT, BOUND_BY = "output_throughput_tokens_per_s", "bound_by_time"
# The number from which values of settings are abbreviated.
LONG_FROM = 1e5
LETTERS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
# The ratio of the largest to the smallest value from which an axis is logarithmic.
LOG_FROM_RATIO = 8
# How points that miss an objective are drawn, and what a chart says of them.
MISSED_COLOUR, MISSED_MARKS = "white", "empty marks miss an objective"
MIN_KNEE_POINTS, MIN_KNEE_HEIGHT = 4, 0.15


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of the points.

    keys: column of the table to its name in a legend, empty for the only one.
    unit: unit of its axis, None for seconds.
    colours: colour of each key.
    """

    label: str
    keys: dict[str, str]
    unit: str | None = ""
    scale: float = 1.0
    colours: tuple[str, ...] = (SERIES[0],)
    is_better_low: bool = False

    def values(self, rows: Sequence[SweepRow]) -> list[list[float]]:
        """The values of each key at the points; NaN, which is not drawn, where a point has none."""
        known = [[number_in(row, key) for row in rows] for key in self.keys]
        return [[float("nan") if value is None else value for value in of_key] for of_key in known]

    def is_in(self, rows: Sequence[SweepRow]) -> bool:
        """Whether any point has a value but 0."""
        return any(value > 0 for values in self.values(rows) for value in values)

    def unit_of(self, rows: Sequence[SweepRow]) -> tuple[str, float]:
        """The unit of the axis, and the factor that values take."""
        if self.unit is not None:
            return self.unit, self.scale
        return time_unit(value for values in self.values(rows) for value in values)


METRICS = (
    Metric("output tokens/s", {THROUGHPUT: ""}),
    Metric("TTFT", {"ttft_s.p50": "p50", "ttft_s.p99": "p99"}, None, colours=PERCENTILES, is_better_low=True),
    Metric("TPOT", {"tpot_s.p50": "p50", "tpot_s.p99": "p99"}, None, colours=PERCENTILES, is_better_low=True),
    Metric("goodput", {"goodput_share": ""}, "%", 100),
    Metric("energy of an output token", {"energy.joules_per_output_token": ""}, "J", is_better_low=True),
    Metric("prefix hit rate", {"prefix_hit_rate": ""}, "%", 100),
)


def is_complete(row: SweepRow) -> bool:
    """Whether no request of the point failed."""
    return number_in(row, THROUGHPUT) is not None and not number_in(row, "requests.failed")


def shares_by_limit(rows: Sequence[SweepRow]) -> dict[str, Floats]:
    """The share of time that each limit bound at each point, `none` last."""
    names = dict.fromkeys(name for row in rows for name in shares(row, BOUND_BY) if name != "none")
    of_all = {name: np.array([shares(row, BOUND_BY).get(name, 0.0) for row in rows]) for name in (*names, "none")}
    return {name: values for name, values in of_all.items() if values.any()}


def main_limit(row: SweepRow) -> str:
    """The limit that bound most of the time, `none` included; empty where the point has no figures."""
    amounts = shares(row, BOUND_BY)
    return max(amounts, key=amounts.__getitem__) if any(amounts.values()) else ""


def colour_of(limit: str) -> str:
    return limit_colours([limit])[limit]


def varied_in(rows: Sequence[SweepRow], over: Sequence[str]) -> list[str]:
    """The settings that differ among the points; the first one where none does."""
    return [name for name in over if len({str(row[name]) for row in rows}) > 1] or list(over[:1])


def subject_of(rows: Sequence[SweepRow]) -> str:
    """The trace, model and device of the points, as far as they are the same: `chat, llama-3.1-8b on sim:h100-sxm`."""
    values = {name: {str(row.get(name) or "") for row in rows} for name in ("trace", "model", "device")}
    trace, model, device = (text_of(found.pop()) if len(found) == 1 else "" for found in values.values())
    return ", ".join(filter(None, (PurePath(trace).stem, " on ".join(filter(None, (model, device))))))


def knee_of(rows: Sequence[SweepRow], over: str) -> float | None:
    """The value of a setting from which throughput gains little: where the curve is highest above the straight line
    from its first point to its last, both axes from 0 to 1 (Kneedle, Satopaa et al. 2011).

    None for a text, for fewer than MIN_KNEE_POINTS values, and for a curve without a knee."""
    known = sorted(
        (x, y)
        for row in rows
        if (x := number_in(row, over)) is not None and (y := number_in(row, THROUGHPUT)) is not None
    )
    if len(known) < max(len(rows), MIN_KNEE_POINTS):
        return None
    xs, ys = np.array(known).T
    if xs[-1] <= xs[0] or ys.max() <= ys[0]:
        return None
    above = (ys - ys[0]) / (ys.max() - ys[0]) - (xs - xs[0]) / (xs[-1] - xs[0])
    index = int(above.argmax())
    return float(known[index][0]) if above[index] >= MIN_KNEE_HEIGHT else None


def ticks_of(rows: Sequence[SweepRow], name: str) -> list[Any]:
    ticks = list(dict.fromkeys(row[name] for row in rows))
    if all(number_in(row, name) is not None for row in rows):
        ticks.sort(key=float)
    return ticks


def text_of(value: Any) -> str:
    """A value of a setting: 250000 as 250k, 64000000 as 64M; five digits and fewer as they are, the end of a path."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return as_text(value).rpartition("/")[2]
    if abs(value) < LONG_FROM:
        return f"{value:g}"
    size, letter = next(pair for pair in LETTERS if float(f"{abs(value):.3g}") >= pair[0])
    return f"{float(f'{value:.3g}') / size:g}{letter}"
