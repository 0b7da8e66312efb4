"""A fleet that serves: a service for each replica behind a router, all in one process and on one clock.

Replicas on the CPU have a process each, which may be killed. A request of which the client has got no token then goes
to another replica, from the start.
"""

import asyncio
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from msgspec import to_builtins
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from ifbbench.clock import NANOSECONDS
from ifbbench.engine.request import EarlierAttempts
from ifbbench.errors import InputError
from ifbbench.fleet.events import FAIL
from ifbbench.fleet.front import Front, Sent, offers, read_at_ns
from ifbbench.fleet.prefix_index import Pieces, PrefixIndex, prompt_pieces
from ifbbench.fleet.router import IDLE, STATE, Replica, ReplicaState, RoutedRequest, Router, make_router
from ifbbench.replay.fleet import check_computing
from ifbbench.rundir.fleet import Offers
from ifbbench.serving.library.request import InferenceRequest
from ifbbench.serving.metrics import Metric, ServerMetrics
from ifbbench.serving.service import Generation, QueueFull, Service, ServiceEnded
from ifbbench.serving.sessions import Sessions
from ifbbench.serving.statistics import LiveStatistics
from ifbbench.settings.config import SIDE_SETTINGS, RunConfig
from ifbbench.settings.groups.fleet import ROUTERS
from ifbbench.workload.trace import ID, NO_SESSION, SECONDS, TraceRequest

# Settings of fleets that change or differ.
CHANGES = ("replica_config", "replica_events", "autoscale", "replica_start_up")


def served_router(config: RunConfig) -> Router:
    """The router of a fleet that serves. InputError for settings that it cannot have."""
    if config.replicas > 1 and config.device == "cuda":
        raise InputError(
            "--replicas: device cuda has one engine; serve several on the CPU or on a simulated device, or start a "
            "server for each GPU and route to them with --router_only."
        )
    usual = RunConfig()
    for name in (*CHANGES, *SIDE_SETTINGS):
        if getattr(config, name) != getattr(usual, name):
            raise InputError(f"--{name}: a fleet that serves does not have it; leave it out.")
    if config.replicas > 1 and not config.makes_no_tokens:
        check_computing(config)
    elif config.request_retries != usual.request_retries:
        raise InputError("--request_retries: no replica of this server can fail; leave it out.")
    router = make_router(config.router or ROUTERS[0], config.replicas, config.seed)
    if config.router_state_age and STATE not in router.looks_at:
        raise InputError(f"--router_state_age: --router {config.router} reads no state of replicas; leave it out.")
    return router


class _Answering:
    """A request that was sent to a replica, with all its choices."""

    def __init__(self, number: int, sent: Sent, generations: int) -> None:
        self.number, self._sent, self._open = number, sent, generations
        self._has_first = False

    def changed(self, is_done: bool) -> None:
        """One of its choices has new tokens, or has ended."""
        view = self._sent.replica
        if not self._has_first:
            self._has_first = True
            view.prefill_tokens -= self._sent.prefill_tokens
        self._open -= is_done
        if is_done and not self._open:
            view.requests -= 1
            view.tokens -= self._sent.prompt_len


class RoutedGeneration(Generation):
    """A generation whose tokens and end its router counts.

    answering: the generation at its replica.
    session: number of its session.
    streams: whether the client gets tokens as they come.
    first_arrival_s: arrival of its first attempt.
    retries: number of attempts after the first.
    """

    __slots__ = (
        "_fleet",
        "answering",
        "first_arrival_s",
        "is_cancelled",
        "lost_tokens",
        "retries",
        "session",
        "streams",
    )

    def __init__(
        self, fleet: "FleetService", answering: _Answering, session: int, streams: bool, *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self._fleet, self.answering, self.session, self.streams = fleet, answering, session, streams
        self.first_arrival_s, self.is_cancelled = self.arrival_s, False
        self.retries = self.lost_tokens = 0

    @property
    def number(self) -> int:
        """The number of its replica."""
        return self.answering.number

    def respond(self, tensors: Mapping[str, Any], is_final: bool, error: str) -> None:
        was_done = self.is_done
        if error and not was_done and self._fleet.send_again(self, error):
            return
        super().respond(dict(tensors), is_final, error)
        if not was_done:
            self.answering.changed(is_final)


class FleetService:
    """The services of all replicas as one. An HTTP request goes to one replica, with all its prompts and choices.

    router_state_age, request_retries: see RunConfig.
    members: ids of the requests of each replica, in order.
    sent_to: number of HTTP requests that each replica has got.
    failures: failures of replicas, in the form of `events` in `summary.json`.
    sent_again: by the id of an attempt that was lost, the id of the next one and the priority of the request.
    first_arrivals_s: by the id of such an attempt, when the request arrived.

    It has to be made in the event loop, in which everything is called.
    """

    def __init__(
        self, services: Sequence[Service], router: Router, router_state_age: float, request_retries: int
    ) -> None:
        self.services = services
        self.engine = services[0].engine
        self.max_requests = services[0].max_requests
        self.summary: dict[str, Any] | None = None
        self.front = Front(router)
        self.views = [
            Replica(number, PrefixIndex(one.engine.config.max_tokens_in_paged_kvcache or 2**62))
            for number, one in enumerate(services)
        ]
        self.members = [array("q") for _ in services]
        self.sent_to = [0 for _ in services]
        # The first id of each HTTP request, and what the router saw then: as many values as there are replicas.
        self._first_ids, self._session_of = array("q"), array("q")
        self._seen: dict[str, array[Any]] = {
            name: array(SECONDS if name == "kv_use" else ID) for name in self.front.names
        }
        self._age_ns, self._read_ns = round(router_state_age * NANOSECONDS), -1
        self._latest_arrival_s = 0.0
        self._sessions = Sessions()
        self._retries, self._is_ending = request_retries, False
        self.failures: list[dict[str, Any]] = []
        self.sent_again: dict[int, tuple[int, float]] = {}
        self.first_arrivals_s: dict[int, float] = {}
        self._beginnings: dict[object, int] = {}
        for one in services[1:]:
            one.align(services[0])

    @property
    def is_running(self) -> bool:
        """Whether a replica takes requests."""
        return len(self._open) > 0

    @property
    def _open(self) -> list[Replica]:
        """The replicas that take requests, as the router sees them."""
        pairs = zip(self.views, self.services, strict=True)
        return [view for view, service in pairs if service.is_running and not service.is_lost]

    @property
    def has_failed(self) -> bool:
        """Whether all replicas have ended early."""
        return all(one.has_failed for one in self.services)

    @property
    def num_live(self) -> int:
        return sum(one.num_live for one in self.services)

    @property
    def num_queued(self) -> int:
        return sum(one.num_queued for one in self.services)

    def statistics_of(self, generation: Generation) -> LiveStatistics:
        """See Service."""
        assert isinstance(generation, RoutedGeneration)
        return self.services[generation.number].statistics

    def latest_iterations(self) -> list[Any]:
        """The statistics of all replicas, each with its `replica`; see Service."""
        return [
            {"replica": number, **to_builtins(record)}
            for number, one in enumerate(self.services)
            for record in one.latest_iterations()
        ]

    def check_length(self, prompt_len: int) -> None:
        self.services[0].check_length(prompt_len)

    def check(self, request: InferenceRequest) -> None:
        self.services[0].check(request)

    def real_now(self) -> float:
        return self.services[0].real_now()

    def submit(
        self,
        requests: Sequence[InferenceRequest],
        received_s: float | None = None,
        session: bytes | None = None,
        *,
        streams: bool = True,
    ) -> list[Generation]:
        """Send the requests of one HTTP request to a replica. QueueFull if its queue is, ServiceEnded if no replica
        takes requests.

        received_s: see Service.
        session: see `session_key`.
        streams: whether the client gets tokens as they come.
        """
        if not self.is_running:
            raise ServiceEnded("the server is about to end, or its engines have failed")
        # Arrivals of all replicas are in the order of `submit`.
        received_s = max(self.real_now() if received_s is None else received_s, self._latest_arrival_s)
        self._read_states(received_s)
        sent = self._route(requests, received_s, session_number := self._sessions.number(session))
        answering = _Answering(sent.replica.number, sent, len(requests))
        make = partial(RoutedGeneration, self, answering, session_number, streams)
        found = self._hand_over(requests, answering, make, received_s)
        is_alone = session is None and len(found) == 1
        self._note(sent, found[0].request.request_id, NO_SESSION if is_alone else session_number)
        self._latest_arrival_s = found[-1].arrival_s
        return found

    def _route(self, requests: Sequence[InferenceRequest], received_s: float, session: int) -> Sent:
        """Choose the replica of the requests of one HTTP request."""
        routed = RoutedRequest(
            self.front.routed,
            self.front.routed,
            received_s,
            sum(len(one.input_ids) for one in requests),
            session,
            self._pieces(requests[0]),
        )
        return self.front.route(routed, self._open, len(self.services))

    def _hand_over(
        self,
        requests: Sequence[InferenceRequest],
        answering: _Answering,
        make: Callable[..., Generation],
        received_s: float,
    ) -> list[Generation]:
        """Hand requests to the replica that was chosen."""
        number = answering.number
        try:
            found = self.services[number].submit(requests, make, received_s)
        except Exception:
            for _ in requests:
                answering.changed(is_done=True)
            raise
        self.members[number].extend(one.request.request_id for one in found)
        self.sent_to[number] += 1
        return found

    def _note(self, sent: Sent, first_id: int, session: int) -> None:
        """Keep what the router saw."""
        self._first_ids.append(first_id)
        self._session_of.append(session)
        for name, values in sent.seen.items():
            self._seen[name].extend(values)

    def send_again(self, one: RoutedGeneration, error: str) -> bool:
        """A generation has failed: send it to another replica if its own has lost its process, the client has got no
        token of it, and retries are left. Returns whether it was sent."""
        service, request = self.services[one.number], one.request
        if self._is_ending or one.is_cancelled or not service.is_lost:
            return False
        lost_tokens = service.statistics.lost_tokens.pop(request.request_id, 0)
        failure = self._failure(one.number, error)
        failure["lost_tokens"] += lost_tokens
        has_come = one.streams and one.num_outputs > 0
        if has_come or one.retries >= self._retries or not self.is_running:
            failure["lost"] += 1
            return False
        received_s = max(self.real_now(), self._latest_arrival_s)
        self._read_states(received_s)
        sent = self._route([request], received_s, one.session)
        before, answering = one.answering, _Answering(sent.replica.number, sent, 1)
        one.lost_tokens += lost_tokens
        earlier = EarlierAttempts(one.retries + 1, one.first_arrival_s, one.lost_tokens)

        def begin_again(request: InferenceRequest, arrival_s: float, _changed: asyncio.Event) -> Generation:
            one.answering = answering
            one.restart(request, arrival_s)
            return one

        try:
            self._hand_over([replace(request, earlier=earlier)], answering, begin_again, received_s)
        except (QueueFull, ServiceEnded):
            failure["lost"] += 1
            return False
        before.changed(is_done=True)
        one.retries += 1
        failure["retried"] += 1
        self._note(sent, one.request.request_id, self.session_of(request.request_id))
        self._latest_arrival_s = one.arrival_s
        self.sent_again[request.request_id] = one.request.request_id, request.priority
        self.first_arrivals_s[one.request.request_id] = one.first_arrival_s
        return True

    def _failure(self, number: int, reason: str) -> dict[str, Any]:
        """The event of the failure of a replica, which has a new one if this is its first request that failed."""
        for known in self.failures:
            if known["replica"] == number:
                return known
        counts = dict.fromkeys(("retried", "lost", "lost_tokens"), 0)
        self.failures.append({"at_s": self.real_now(), "event": FAIL, "replica": number, "reason": reason, **counts})
        return self.failures[-1]

    def offers_of(self, request_id: int) -> Offers | None:
        """What the router saw when it sent a request; None if it looks at nothing."""
        count = len(self.services)
        first = (bisect_right(self._first_ids, request_id) - 1) * count
        seen = {name: values[first : first + count].tolist() for name, values in self._seen.items()}
        return offers(seen) if seen else None

    def session_of(self, request_id: int) -> int:
        """The number of the session of a request; NO_SESSION if no other one has it."""
        return self._session_of[bisect_right(self._first_ids, request_id) - 1]

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Stop those that have not ended."""
        for one in generations:
            assert isinstance(one, RoutedGeneration)
            one.is_cancelled = True
            self.services[one.number].cancel([one])

    def end_all(self, problem: str) -> None:
        """See Service."""
        self._is_ending = True
        for one in self.services:
            one.end_all(problem)

    def _pieces(self, request: InferenceRequest) -> Pieces:
        if not self.front.sees_prefixes:
            return ()
        tokens = tuple(np.asarray(request.input_ids).ravel().tolist())
        row = TraceRequest(self.front.routed, 0.0, len(tokens), 1, 1, prompt_tokens=tokens)
        return prompt_pieces(row, self._beginnings)

    def _read_states(self, time_s: float) -> None:
        if not self.front.sees_state or (read_ns := read_at_ns(time_s, self._age_ns)) == self._read_ns:
            return
        self._read_ns = read_ns
        for view, service in zip(self.views, self.services, strict=True):
            view.state = state_of(service)


AnyService: TypeAlias = Service | FleetService


def state_of(service: Service) -> ReplicaState:
    """What a replica reports, after its latest iteration."""
    live, latest = service.num_live, service.statistics.latest
    if not live:
        return IDLE
    queued, kv_use = min(service.num_queued, live), 0.0
    if latest:
        record, _ = latest[-1]
        kv_use = (record.cache.used_blocks or 0) / record.cache.max_blocks if record.cache.max_blocks else 0.0
    return ReplicaState(queued, live - queued, kv_use)


class FleetMetrics(Collector):
    """The metrics of all replicas, by the label `replica`, or with vLLM's names `engine`; and those of the router."""

    def __init__(self, service: FleetService, replicas: Sequence[ServerMetrics], label: str) -> None:
        self._service, self._replicas, self._label = service, replicas, label

    def text(self) -> bytes:
        """The answer to a scrape."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for number, one in enumerate(self._replicas):
            for family in one.collect():
                label = {self._label: str(number)}
                family.samples = [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
                if (known := families.get(family.name)) is None:
                    families[family.name] = family
                else:
                    known.samples += family.samples
        yield from families.values()
        sent = CounterMetricFamily("ifbbench_router_requests", "Requests sent to a replica.", labels=["replica"])
        again = CounterMetricFamily("ifbbench_router_retries", "Requests of replicas that were lost, sent again.")
        again.add_metric([], len(self._service.sent_again))
        live = GaugeMetricFamily("ifbbench_router_in_flight", "Requests that are not answered.", labels=["replica"])
        for view, number in zip(self._service.views, self._service.sent_to, strict=True):
            sent.add_metric([str(view.number)], number)
            live.add_metric([str(view.number)], view.requests)
        yield from (sent, live, again)
