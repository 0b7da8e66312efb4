"""A part of a recorded trace in which the problem of the run shows, for trials that all of it takes too long for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.rundir.rows import Id

# This share of a window comes before the requests that it was chosen for, so that the server is busy when they arrive.
LEAD_IN = 0.25
MIN_REQUESTS = 400
LATENCIES = ("ttft_s", "tpot_s", "queue_time_s")


@dataclass(frozen=True)
class Window:
    """`requests` of the `of` requests of a trace, from number `first` on, which arrived from `start_s` to `end_s`.

    reason: why these.
    waiting: requests that waited in the run when the window began.
    """

    first: int
    requests: int
    of: int
    start_s: float
    end_s: float
    reason: str
    waiting: int

    @property
    def text(self) -> str:
        """What the window is and what it leaves out."""
        begins = f"{count(self.waiting)} waited then in the run" if self.waiting else "as in the run"
        return (
            f"Tried on the requests that arrived from {self.start_s:,.0f} to {self.end_s:,.0f} s, "
            f"{count(self.requests)} of {count(self.of)}, {self.reason}; a replay of all takes too long for the time. "
            f"The window begins with no request in the queue ({begins}) and none running. The figures below are of its "
            "requests alone."
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return vars(self) | {"text": self.text}


def window_of(run: RecordedRun, request_ids: Sequence[Id], path: str, size: int) -> Window:
    """At most `size` consecutive requests that show the figure at `path`, after a lead-in that begins where fewest
    requests waited. A percentile shows where most of what is above the median is, other figures where their mean is
    that of all requests. request_ids: of the trace, in order of arrival."""
    rows = [run.row_of.get(request_id, {}) for request_id in request_ids]
    size = min(max(size, MIN_REQUESTS), len(rows))
    lead_in = round(size * LEAD_IN)
    core = size - lead_in
    name, values = _values(rows, path)
    if ".p" in path:
        above = _sums(np.maximum(values - np.median(values), 0.0), core)
        start = int(np.argmax(above))
        share = float(above[start] / (np.maximum(values - np.median(values), 0.0).sum() or 1.0))
        reason = f"which have {percent(share)} of what {name} is above its median"
    else:
        means = _sums(values, core) / core
        start = int(np.argmin(np.abs(means - values.mean())))
        reason = f"whose mean {name} was {significant(means[start])}, that of all {significant(values.mean())}"
    arrivals_s = np.array([run.arrival_s(request_id) for request_id in request_ids])
    begun_s = arrivals_s + np.array([row.get("queue_time_s") or 0.0 for row in rows])
    waiting = np.arange(len(rows)) - np.sort(begun_s).searchsorted(arrivals_s)
    earliest = max(start - lead_in, 0)
    first = earliest + int(np.argmin(waiting[earliest : start + 1]))
    end = start + core
    return Window(
        first,
        end - first,
        len(rows),
        float(arrivals_s[first]),
        float(arrivals_s[end - 1]),
        reason,
        max(int(waiting[first]), 0),
    )


def _values(rows: Sequence[dict[str, Any]], path: str) -> tuple[str, NDArray[np.float64]]:
    """What of each request makes the figure, with its name: a latency in seconds, or 1 of one that misses an
    objective."""
    if path.startswith("goodput"):
        return "share of missed objectives", np.array([row.get("slo_met") is False for row in rows], np.float64)
    latency = path.partition(".")[0]
    figure = latency if latency in LATENCIES else "e2e_s"
    name = figure.removesuffix("_s").replace("_", " ").upper()
    return f"{name} (s)", np.array([row.get(figure) or 0.0 for row in rows])


def _sums(values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """The sum of `size` consecutive values, from each position on."""
    summed = np.concatenate(([0.0], values.cumsum()))
    return np.asarray(summed[size:] - summed[:-size])
