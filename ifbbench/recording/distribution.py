"""What many values come to: mean, percentiles and extremes."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9}
NAMES = ("mean", "min", *PERCENTILES, "max")


def distribution(values: "Sequence[float] | NDArray[np.float64] | array[float]") -> dict[str, float | None]:
    """mean, min, percentiles (linear interpolation) and max of `values`, in their unit; all None if there are none."""
    data = np.asarray(values, np.float64)
    if data.size == 0:
        return dict.fromkeys(NAMES)
    ranks = np.percentile(data, list(PERCENTILES.values()))
    return dict(zip(NAMES, map(float, (data.mean(), data.min(), *ranks, data.max())), strict=True))


def counted_distribution(values: NDArray[np.float64], counts: NDArray[np.int64]) -> dict[str, float | None]:
    """`distribution` of `values`, the i-th of them `counts[i]` times (at least once), without writing them all out."""
    if values.size == 0:
        return dict.fromkeys(NAMES)
    order = values.argsort(kind="stable")
    values, counts = values[order], counts[order]
    # ends[i]: how many values there are up to and with the i-th.
    ends = counts.cumsum()
    total = int(ends[-1])
    # As numpy's percentile does it, to the last bit: between the values before and behind the place.
    places = (total - 1) * (np.array(list(PERCENTILES.values())) / 100)
    before = np.floor(places).astype(np.int64)
    behind = np.minimum(before + 1, total - 1)
    lower, upper = (values[ends.searchsorted(ranks, side="right")] for ranks in (before, behind))
    share, step = places - before, upper - lower
    percentiles = np.where(share < 0.5, lower + step * share, upper - step * (1 - share))
    mean = (values * counts).sum() / total
    return dict(zip(NAMES, map(float, (mean, values[0], *percentiles, values[-1])), strict=True))
