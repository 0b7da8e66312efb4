"""What the arrivals made of a run: overload, bursts, its steady state, and fairness. Functions of latencies alone.

Arguments named arrival_s, queue_time_s, ttft_s and e2e_s are arrays over the completed requests, in seconds.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

# Fewer requests say nothing about the traffic.
MIN_REQUESTS = 20
# Overload: parts of the arrival period, Kendall's tau of the queue over them, and growth in standard deviations of the
# number of Poisson arrivals: a queue that is only critically loaded wanders so far.
PARTS, MIN_TAU, MIN_DEVIATIONS = 20, 0.6, 2.0
# Bursts: a request with a TTFT over this is slow, unless there is an objective for it; slow arrivals at most so many
# mean gaps apart belong together; a burst has at least so many of them, and at least so many times the mean rate.
SLOW_TTFT_S = 1.0
MAX_GAPS_APART, MIN_SLOW, MIN_RATE_RATIO, MAX_BURSTS = 10, 5, 1.2, 5
TRAFFIC_COLUMNS = ("arrival_s", "queue_time_s", "ttft_s")
# The figures of `traffic` where it does not apply.
NO_TRAFFIC: dict[str, Any] = {"overloaded": False, "queue_growth_requests_per_s": 0.0, "bursts": []}
# Steady state: requests that end in it, and the difference of its halves.
MIN_ENDED, MAX_DRIFT = 10, 0.25


class Window(NamedTuple):
    """A part of a run, in seconds from its start, both ends included."""

    start_s: float
    end_s: float

    def holds(self, seconds: Floats) -> NDArray[np.bool_]:
        """Which of these times are in it."""
        return (self.start_s <= seconds) & (seconds <= self.end_s)


def traffic(arrival_s: Floats, queue_time_s: Floats, ttft_s: Floats, slow_s: float = SLOW_TTFT_S) -> dict[str, Any]:
    """Overload and bursts, as in `summary.json`. For requests that arrive whether others have been answered or not."""
    is_overloaded, growth = queue_growth(arrival_s, queue_time_s)
    found = {"overloaded": is_overloaded, "queue_growth_requests_per_s": growth}
    return found | bursts(arrival_s, ttft_s, slow_s)


def queue_growth(arrival_s: Floats, queue_time_s: Floats) -> tuple[bool, float]:
    """Whether the queue grew without bound while requests arrived, and by how many requests a second (0 if not).

    The arrival period has PARTS equal parts. A burst fills the queue for some of them and leaves it empty again, so the
    minimum of each part counts. The run is overloaded if these minima rise throughout (Kendall's tau) and by more than
    random arrivals make them wander; the growth is their Theil-Sen slope, the median over all pairs of parts.
    """
    if len(arrival_s) < MIN_REQUESTS or arrival_s.max() <= arrival_s.min():
        return False, 0.0
    arrivals, starts = np.sort(arrival_s), np.sort(arrival_s + queue_time_s)
    edges = np.linspace(arrivals[0], arrivals[-1], PARTS + 1)
    # The queue is shortest just after a request starts, or where a part begins.
    times = np.sort(np.concatenate([starts[starts < edges[-1]], edges[:-1]]))
    waiting = arrivals.searchsorted(times, side="right") - starts.searchsorted(times, side="right")
    shortest = np.minimum.reduceat(waiting, times.searchsorted(edges[:-1]))
    first, second = np.triu_indices(PARTS, k=1)
    steps = (shortest[second] - shortest[first]).astype(float)
    slopes = np.sort(steps / (second - first))
    # np.median would import numpy.ma, which takes longer than a short run.
    slope = float(slopes[(len(slopes) - 1) // 2] + slopes[len(slopes) // 2]) / 2
    is_rising = np.sign(steps).mean() >= MIN_TAU and slope * PARTS >= MIN_DEVIATIONS * np.sqrt(len(arrivals))
    return bool(is_rising), slope * PARTS / float(arrivals[-1] - arrivals[0]) if is_rising else 0.0


def bursts(arrival_s: Floats, ttft_s: Floats, slow_s: float = SLOW_TTFT_S) -> dict[str, Any]:
    """The requests with a TTFT over `slow_s`, and the bursts of arrivals that they came in, the worst first.

    Slow requests that arrive close together are one group, from its first arrival to its last. It is a burst if
    requests, slow or not, arrived in it at MIN_RATE_RATIO times the mean rate or more.
    """
    slow = np.sort(arrival_s[ttft_s > slow_s])
    found: dict[str, Any] = {"slow_ttft_s": slow_s, "slow_requests": len(slow), "bursts": []}
    if len(arrival_s) < MIN_REQUESTS or len(slow) < MIN_SLOW or arrival_s.max() <= arrival_s.min():
        return found
    arrivals = np.sort(arrival_s)
    mean_rate = len(arrivals) / (arrivals[-1] - arrivals[0])
    for group in np.split(slow, np.flatnonzero(np.diff(slow) > MAX_GAPS_APART / mean_rate) + 1):
        first, last = arrivals.searchsorted(group[0]), arrivals.searchsorted(group[-1], side="right")
        duration_s = max(float(group[-1] - group[0]), 1 / mean_rate)
        rate = float(last - first) / duration_s
        if len(group) >= MIN_SLOW and rate >= MIN_RATE_RATIO * mean_rate:
            found["bursts"].append(
                {
                    "start_s": float(group[0]),
                    "duration_s": duration_s,
                    "requests": int(last - first),
                    "slow_requests": len(group),
                    "rate_per_s": rate,
                    "rate_over_mean": float(rate / mean_rate),
                }
            )
    found["bursts"] = sorted(found["bursts"], key=lambda burst: -burst["slow_requests"])[:MAX_BURSTS]
    return found


def steady_state(arrival_s: Floats, queue_time_s: Floats, e2e_s: Floats) -> Window | None:
    """The window between ramp-up and drain; None if there is none.

    The plateau is the median, over time, of the number of requests that run (first scheduled and not ended). Ramp-up
    ends when that number first reaches the plateau, and the drain starts when it is there for the last time. There is
    no steady state if the means of the two halves of this window differ by more than MAX_DRIFT of the plateau (the load
    kept changing), or fewer than MIN_ENDED requests ended in it.
    """
    if len(arrival_s) < MIN_ENDED:
        return None
    ends = arrival_s + e2e_s
    times = np.concatenate([arrival_s + queue_time_s, ends])
    order = times.argsort(kind="stable")
    times, steps = times[order], np.where(order < len(ends), 1, -1)
    running, lasts = steps.cumsum()[:-1], np.diff(times)  # the level after each event, and until the next one
    by_level = running.argsort(kind="stable")
    plateau = running[by_level][lasts[by_level].cumsum().searchsorted(lasts.sum() / 2)]
    (at_plateau,) = ((running >= plateau) & (lasts > 0)).nonzero()
    if not len(at_plateau):
        return None
    first, last = at_plateau[0], at_plateau[-1] + 1
    window = Window(float(times[first]), float(times[last]))
    area = (running[first:last] * lasts[first:last]).cumsum()
    middle_s = (window.start_s + window.end_s) / 2
    half = np.interp(middle_s, times[first : last + 1], [0, *area])
    drift = abs(area[-1] - 2 * half) / ((window.end_s - window.start_s) / 2)
    if drift > MAX_DRIFT * plateau or window.holds(ends).sum() < MIN_ENDED:
        return None
    return window


def jain_index(shares: Iterable[float]) -> float | None:
    """Jain's fairness index of what each class gets: (Σx)² / (n·Σx²), from 1/n (one gets all) to 1 (equal)."""
    values: Sequence[float] = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None
