"""Changes of a fleet over time: replicas that start, drain and fail, by a file or by an autoscaler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple, Protocol

from ifbbench.analysis.number_texts import significant
from ifbbench.fleet.autoscaler import Autoscaler
from ifbbench.fleet.events import DRAIN, FAIL, REPLICAS, START, ReplicaEvent
from ifbbench.fleet.router import Replica
from ifbbench.settings.autoscale import KV_USE, QUEUE, TTFT, AutoscaleRule

READY, LOOK = "ready", "look"


class Fleet(Protocol):
    """What changes do to a fleet; see SteppedFleet."""

    replicas: list[Any]
    views: list[Replica]
    waiting: list[int]

    def fail(self, one: Any, time_s: float) -> dict[str, int]: ...

    def route_waiting(self, time_s: float) -> None: ...


class Change(NamedTuple):
    """What happens to a fleet at a time.

    order: position among changes at the same time.
    value, like: see ReplicaEvent.
    """

    at_s: float
    order: int
    kind: str
    value: int = 0
    like: int = 0


@dataclass(slots=True)
class Service:
    """When a replica served.

    started_s: when its GPUs were taken.
    ready_s: when it began to take requests; None before.
    ended_by: FAIL, DRAIN, or nothing while it takes requests.
    stopped_s: when it stopped taking requests, unless it was there to the end.
    """

    started_s: float
    ready_s: float | None = None
    ended_by: str = ""
    stopped_s: float = inf
    config: int = 0

    @property
    def is_there(self) -> bool:
        """Whether it takes requests, or will once it has started."""
        return not self.ended_by


@dataclass
class Changes:
    """What happens to the replicas of a fleet.

    events: events of a file.
    rule: rule of the autoscaler.
    start_up_s: time from the start of a replica until it takes requests.
    make_replica(number, like): the replica of this number, with the settings of another one.
    services: when each replica served.
    log: what happened, for `summary.json`.
    """

    events: Sequence[ReplicaEvent]
    rule: AutoscaleRule | None
    start_up_s: float
    make_replica: Callable[[int, int], Any]
    services: list[Service] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, fleet: Fleet) -> None:
        """`fleet` begins with its replicas, which take requests at once."""
        self._fleet = fleet
        self.services += [Service(0.0, 0.0, config=number) for number in range(len(fleet.replicas))]
        self._due = list[Change]()
        self._added = 0
        for event in self.events:
            self._add(event.at_s, event.kind, event.value, event.like)
        self._autoscaler = None if self.rule is None else Autoscaler(self.rule)
        if self.rule is not None:
            self._add(self.rule.every_s, LOOK)
            self._start_missing(0.0)

    @property
    def next_s(self) -> float:
        """When the next change comes; infinite if none will."""
        return self._due[0].at_s if self._due else inf

    @property
    def may_start(self) -> bool:
        """Whether replicas may yet take requests that none takes now."""
        return any(change.kind in (READY, LOOK, START, REPLICAS) for change in self._due)

    def apply(self, time_s: float) -> None:
        """Make the changes up to `time_s`. All replicas have run until then."""
        while self._due and self._due[0].at_s <= time_s:
            change = heappop(self._due)
            if change.kind == FAIL:
                self.fail(change.value, time_s)
            elif change.kind == DRAIN:
                self._drain(change.value, time_s)
            elif change.kind == START:
                self._start(change.value, time_s, change.like)
            elif change.kind == REPLICAS:
                self._scale(change.value, time_s, change.like)
            elif change.kind == READY:
                self._let_in(change.value, time_s)
            else:
                self._look(time_s)

    def figures(self) -> dict[str, Any]:
        """What `summary.json` has of the changes; nothing of a fleet that stayed as it was."""
        return {"events": self.log} if self.log else {}

    def service_times(self, end_s: float) -> list[tuple[float, float, dict[str, Any]]]:
        """From when to when the GPUs of each replica were taken, and in a fleet that changed, when it took requests
        and why it ended. end_s: of the run."""
        found = list[tuple[float, float, dict[str, Any]]]()
        for one, service in zip(self._fleet.replicas, self.services, strict=True):
            ended_s = end_s
            if service.ended_by == FAIL:
                ended_s = one.failed_s
            elif service.ended_by:
                ended_s = max(service.stopped_s, one.latest_answer_s)
            facts = service_facts(service.started_s, service.ready_s, ended_s, service.ended_by) if self.log else {}
            found.append((service.started_s, ended_s, facts))
        return found

    def _add(self, at_s: float, kind: str, value: int = 0, like: int = 0) -> None:
        heappush(self._due, Change(at_s, self._added, kind, value, like))
        self._added += 1

    def _note(self, time_s: float, event: str, replica: int, facts: Mapping[str, Any] | None = None) -> None:
        self.log.append({"at_s": time_s, "event": event, "replica": replica, **(facts or {})})

    def fail(self, number: int, time_s: float, reason: str | None = None) -> None:
        """The replica is lost with all that it holds; its requests are sent again, or lost. reason: why, if that was
        not asked for."""
        if not self._is_up(number):
            return
        service = self.services[number]
        if service.is_there:
            service.stopped_s = time_s
        service.ended_by = FAIL
        one = self._fleet.replicas[number]
        self._fleet.views = [view for view in self._fleet.views if view.number != number]
        position = len(self.log)
        self._note(time_s, FAIL, number, None if reason is None else {"reason": reason})
        self.log[position] |= self._fleet.fail(one, time_s)

    def _drain(self, number: int, time_s: float, facts: Mapping[str, Any] | None = None) -> None:
        """The replica takes no further requests, and ends with the last one that it has."""
        if number >= len(self.services) or not self.services[number].is_there:
            return
        service = self.services[number]
        service.ended_by, service.stopped_s = DRAIN, time_s
        self._fleet.views = [view for view in self._fleet.views if view.number != number]
        self._note(time_s, DRAIN, number, facts)

    def _start(self, count: int, time_s: float, like: int, facts: Mapping[str, Any] | None = None) -> None:
        """So many replicas start."""
        for _ in range(count):
            number = len(self._fleet.replicas)
            self._fleet.replicas.append(self.make_replica(number, self.services[like].config))
            self.services.append(Service(time_s, config=self.services[like].config))
            self._note(time_s, START, number, facts)
            if self.start_up_s:
                self._add(time_s + self.start_up_s, READY, number)
            else:
                self._let_in(number, time_s)

    def _let_in(self, number: int, time_s: float) -> None:
        """The replica takes requests, first those that none has taken."""
        service = self.services[number]
        if not service.is_there:
            return
        service.ready_s = time_s
        if self.start_up_s:
            self._note(time_s, READY, number)
        self._fleet.views = sorted([*self._fleet.views, self._fleet.replicas[number].view], key=lambda one: one.number)
        self._fleet.route_waiting(time_s)

    def _scale(self, count: int, time_s: float, like: int = 0, facts: Mapping[str, Any] | None = None) -> None:
        """The fleet has `count` replicas, those included that are starting: others start, or the latest ones drain."""
        there = [number for number, service in enumerate(self.services) if service.is_there]
        self._start(max(count - len(there), 0), time_s, like, facts)
        for number in reversed(there[count:]):
            self._drain(number, time_s, facts)

    def _start_missing(self, time_s: float) -> None:
        """An autoscaled fleet has its minimum from the beginning."""
        assert self.rule is not None
        for number in range(len(self.services), self.rule.minimum):
            self._fleet.replicas.append(self.make_replica(number, 0))
            self._fleet.views.append(self._fleet.replicas[number].view)
            self.services.append(Service(time_s, time_s))

    def _look(self, time_s: float) -> None:
        """The autoscaler decides."""
        assert self.rule is not None
        assert self._autoscaler is not None
        self._add(time_s + self.rule.every_s, LOOK)
        current = sum(service.is_there for service in self.services)
        measured = self._measured(time_s)
        wanted = self._autoscaler.replicas(time_s, current, measured)
        if wanted != current:
            seen = significant(measured) if measured is not None else "nothing"
            self._scale(wanted, time_s, facts={"wanted": wanted, "measured": f"{self.rule.measure} {seen}"})

    def _measured(self, time_s: float) -> float | None:
        """What the rule looks at; see `Autoscaler.replicas`."""
        assert self.rule is not None
        fleet, measure = self._fleet, self.rule.measure
        serving = [fleet.replicas[view.number] for view in fleet.views]
        if measure == TTFT:
            seen = [ttft for one in fleet.replicas for ttft in one.ttfts(time_s)]
            if seen:
                return float(sum(seen) / len(seen))
            return None if any(one.is_busy for one in fleet.replicas) or fleet.waiting else 0.0
        if measure == KV_USE:
            return float(sum(one.state_at(time_s).kv_use for one in serving))
        if measure == QUEUE:
            return float(sum(one.state_at(time_s).queued for one in serving) + len(fleet.waiting))
        return float(sum(one.view.requests for one in serving) + len(fleet.waiting))

    def _is_up(self, number: int) -> bool:
        """Whether the replica has started and holds GPUs."""
        if number >= len(self.services):
            return False
        service, one = self.services[number], self._fleet.replicas[number]
        return service.is_there or (service.ended_by == DRAIN and one.is_busy)


def service_facts(started_s: float, ready_s: float | None, ended_s: float, ended_by: str) -> dict[str, Any]:
    """When a replica of a fleet that changed took requests, as `summary.json` has it. ended_by: "" if it was there to
    the end."""
    return {"started_s": started_s, "ready_s": ready_s, "ended_s": ended_s, "ended_by": ended_by or None}
