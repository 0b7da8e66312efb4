"""What happened in a fleet whose replicas fail, drain and start, and what it cost its requests."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import pandas as pd

from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.rundir.reader import Floats, RunData

ROUTER = "attribution_s.router"
NAMED = 5


def at_router_s(requests: pd.DataFrame) -> Floats:
    """The time until each request was sent to the replica that ran it."""
    if ROUTER not in requests:
        return np.zeros(len(requests))
    waited_s: Floats = requests[ROUTER].fillna(0.0).to_numpy(dtype=float)
    return waited_s


class FleetChanges:
    """Findings of the changes of a fleet.

    events, replicas: as in `summary.json`.
    """

    def __init__(
        self, run: RunData, events: Sequence[Mapping[str, Any]], replicas: Sequence[Mapping[str, Any]]
    ) -> None:
        self.run, self.events, self.replicas = run, events, replicas

    @cached_property
    def failures(self) -> list[dict[str, Any]]:
        """The events of failures."""
        return [dict(one) for one in self.events if one["event"] == "fail"]

    @property
    def starts(self) -> int:
        return sum(one["event"] == "start" for one in self.events)

    @property
    def drains(self) -> int:
        return sum(one["event"] == "drain" for one in self.events)

    @cached_property
    def sizes(self) -> tuple[Floats, Floats]:
        """When the number of replicas that take requests changed, in seconds, and that number from then on."""
        changes: dict[float, int] = {}
        for number, one in enumerate(self.replicas):
            if one["ready_s"] is not None:
                changes[one["ready_s"]] = changes.get(one["ready_s"], 0) + 1
                if (stop_s := self._stops_s[number]) < inf:
                    changes[stop_s] = changes.get(stop_s, 0) - 1
        times = sorted(changes)
        return np.array(times), np.cumsum([changes[time_s] for time_s in times]).astype(float)

    def takes_requests(self, times_s: Floats) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each replica takes requests at each of these times, [times][replicas]."""
        ready_s = np.array([inf if one["ready_s"] is None else one["ready_s"] for one in self.replicas])
        stops_s = np.array(self._stops_s)
        found: np.ndarray[Any, np.dtype[np.bool_]] = (ready_s <= times_s[:, None]) & (times_s[:, None] < stops_s)
        return found

    @cached_property
    def waited_for_start_s(self) -> float:
        """Seconds that requests waited in queues, or for a replica, while one was starting."""
        done = self.run.completed
        begins_s = done["arrival_s"].to_numpy(dtype=float)
        ends_s = done["first_scheduled_s"].to_numpy(dtype=float)
        return sum(
            float(np.clip(np.minimum(ends_s, until_s) - np.maximum(begins_s, since_s), 0.0, None).sum())
            for since_s, until_s in self._starting()
        )

    def failure_sentences(self) -> list[str]:
        """What each failure cost, in words."""
        found = []
        for one in self.failures[:NAMED]:
            text = f"Replica {one['replica']} failed at {significant(one['at_s'])} s"
            parts = []
            if one["retried"]:
                parts.append(f"{_requests(one['retried'])} routed again")
            if one["lost"]:
                parts.append(f"{_requests(one['lost'])} lost")
            if parts:
                text += f": {' and '.join(parts)}, for which {count(one['lost_tokens'])} tokens had been computed"
            found.append(f"{text}.")
        if len(self.failures) > NAMED:
            found.append(f"{count(len(self.failures) - NAMED)} more replicas failed.")
        return found

    def sentences(self) -> list[str]:
        """The findings in words."""
        found = self.failure_sentences()
        done = self.run.completed
        if (lost_s := float(at_router_s(done).sum())) > 0:
            share = percent(lost_s / max(float(done["e2e_s"].sum()), 1e-12))
            found.append(
                f"Requests lost {significant(lost_s)} request-seconds ({share} of their latency) in attempts at "
                "replicas that failed, and waiting at the router for a replica."
            )
        if self.starts or self.drains:
            found.append(self._sizes_text())
        return found

    def as_dict(self) -> dict[str, Any]:
        """The findings for `why --json`."""
        done = self.run.completed
        return {
            "failures": self.failures,
            "starts": self.starts,
            "drains": self.drains,
            "lost_s": float(at_router_s(done).sum()),
            "waited_for_start_s": self.waited_for_start_s,
        }

    def _sizes_text(self) -> str:
        _, sizes = self.sizes
        mean = sum(one["up_s"] for one in self.replicas) / max(max(one["ended_s"] for one in self.replicas), 1e-12)
        text = (
            f"{count(float(sizes.min()))} to {count(float(sizes.max()))} replicas took requests, and "
            f"{significant(mean)} held GPUs on average: {count(self.starts)} started, {count(self.drains)} drained"
        )
        if self.waited_for_start_s:
            queue_s = float(self.run.completed["queue_time_s"].sum())
            text += (
                f"; {percent(self.waited_for_start_s / max(queue_s, 1e-12))} of the waiting was while one was starting"
            )
        return f"{text}."

    def _starting(self) -> list[tuple[float, float]]:
        """The times in which at least one replica was starting, without overlap."""
        times = sorted(
            (one["started_s"], one["ended_s"] if one["ready_s"] is None else one["ready_s"]) for one in self.replicas
        )
        found = list[tuple[float, float]]()
        for since_s, until_s in times:
            if found and since_s <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], until_s)
            else:
                found.append((since_s, until_s))
        return found

    @cached_property
    def _stops_s(self) -> list[float]:
        """When each replica took no more requests; infinite if it did to the end."""
        stops_s = [inf] * len(self.replicas)
        for one in self.events:
            if one["event"] in ("drain", "fail"):
                stops_s[one["replica"]] = min(stops_s[one["replica"]], one["at_s"])
        return stops_s


def _requests(number: int) -> str:
    return "1 request was" if number == 1 else f"{count(number)} requests were"
