"""A fleet that serves: a service for each replica behind a router, all in one process and on one clock."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import file_digest
from heapq import merge
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from msgspec import to_builtins
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from ifbbench.build.engine import Engine
from ifbbench.clock import NANOSECONDS
from ifbbench.compressed import open_to_read
from ifbbench.errors import InputError
from ifbbench.fleet.front import Front, Sent, offers, read_at_ns
from ifbbench.fleet.prefix_index import Pieces, PrefixIndex, prompt_pieces
from ifbbench.fleet.router import IDLE, STATE, Replica, ReplicaState, RoutedRequest, Router, make_router
from ifbbench.replay.fleet import Ended, FleetRun, check_computing, describe_fleet, fleet_summary
from ifbbench.rundir import run_directory
from ifbbench.rundir.fleet import Offers, replica_directory, write_requests
from ifbbench.serving.library.request import InferenceRequest
from ifbbench.serving.metrics import Metric, ServerMetrics
from ifbbench.serving.recording import SOURCE
from ifbbench.serving.service import Generation, Service, ServiceEnded
from ifbbench.serving.sessions import Sessions
from ifbbench.serving.statistics import LiveStatistics
from ifbbench.settings.config import ROUTERS, SIDE_SETTINGS, RunConfig
from ifbbench.workload.formats import write_lines
from ifbbench.workload.trace import ID, NO_SESSION, SECONDS, Trace, TraceRequest

# Settings of fleets that change or differ.
CHANGES = ("replica_config", "replica_events", "request_retries", "autoscale", "replica_start_up")


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


class _RoutedGeneration(Generation):
    """A generation whose tokens and end its router counts. number: of its replica."""

    __slots__ = ("_answering", "number")

    def __init__(self, answering: _Answering, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._answering, self.number = answering, answering.number

    def respond(self, tensors: Mapping[str, Any], is_final: bool, error: str) -> None:
        was_done = self.is_done
        super().respond(dict(tensors), is_final, error)
        if not was_done:
            self._answering.changed(is_final)


class FleetService:
    """The services of all replicas as one. An HTTP request goes to one replica, with all its prompts and choices.

    router_state_age: see RunConfig. members: of each replica, the ids of its requests, in order. sent_to: the number of
    HTTP requests that each has got. To be made in the event loop, in which all is called."""

    def __init__(self, services: Sequence[Service], router: Router, router_state_age: float) -> None:
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
        self._beginnings: dict[object, int] = {}
        for one in services[1:]:
            one.align(services[0])

    @property
    def is_running(self) -> bool:
        """Whether a replica takes requests."""
        return any(one.is_running for one in self.services)

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
        assert isinstance(generation, _RoutedGeneration)
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
    ) -> list[Generation]:
        """Send the requests of one HTTP request to a replica. QueueFull if its queue is, ServiceEnded if no replica
        takes requests. received_s: see Service. session: see `session_key`."""
        views = [one for one, service in zip(self.views, self.services, strict=True) if service.is_running]
        if not views:
            raise ServiceEnded("the server is about to end, or its engines have failed")
        # Arrivals of all replicas are in the order of `submit`.
        received_s = max(self.real_now() if received_s is None else received_s, self._latest_arrival_s)
        self._read_states(received_s)
        prompt_len = sum(len(one.input_ids) for one in requests)
        session_number = self._sessions.number(session)
        routed = RoutedRequest(
            self.front.routed,
            self.front.routed,
            received_s,
            prompt_len,
            session_number,
            self._pieces(requests[0]),
        )
        sent = self.front.route(routed, views, len(self.services))
        number = sent.replica.number
        answering = _Answering(number, sent, len(requests))
        try:
            found = self.services[number].submit(requests, partial(_RoutedGeneration, answering), received_s)
        except Exception:
            for _ in requests:
                answering.changed(is_done=True)
            raise
        ids = [one.request.request_id for one in found]
        self.members[number].extend(ids)
        self.sent_to[number] += 1
        self._first_ids.append(ids[0])
        self._session_of.append(NO_SESSION if session is None and len(ids) == 1 else session_number)
        for name, values in sent.seen.items():
            self._seen[name].extend(values)
        self._latest_arrival_s = found[-1].arrival_s
        return found

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
            assert isinstance(one, _RoutedGeneration)
            self.services[one.number].cancel([one])

    def end_all(self, problem: str) -> None:
        """See Service."""
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
        live = GaugeMetricFamily("ifbbench_router_in_flight", "Requests that are not answered.", labels=["replica"])
        for view, number in zip(self._service.views, self._service.sent_to, strict=True):
            sent.add_metric([str(view.number)], number)
            live.add_metric([str(view.number)], view.requests)
        yield from (sent, live)


class FleetRecording:
    """What is written to the run directory of a fleet that serves, beside those of its replicas."""

    def __init__(self, directory: Path, engines: Sequence[Engine], config: RunConfig) -> None:
        self.directory, self._engines, self._config = directory, engines, config
        engine = engines[0]
        own = [config.of_one_replica()] * len(engines)
        self._description = describe_fleet(Trace(directory.name, [], "", SOURCE), engine, config, own)
        self._description["name"] = directory.name
        self._trace = f"trace.{engine.config.recording_format}"

    def write_begin(self, directory: Path, name: str) -> None:
        """Write what the directory has at first."""
        (directory / self._trace).touch()
        run_directory.write_begun(directory, self._description)

    def close(self, ended: Sequence[Ended], service: FleetService) -> dict[str, Any]:
        """Write the files of the fleet, once those of its replicas are complete; returns the summary."""
        config, directory = self._config, self.directory
        position = {request_id: index for index, request_id in enumerate(sorted(merge(*service.members)))}
        members = [array("q", [position[one] for one in sorted(ids)]) for ids in service.members]
        request_ids = list(position)
        paths = [replica_directory(directory, number) / self._trace for number in range(len(ended))]
        write_lines(_in_order(paths, service), directory / self._trace, overwrite=True)
        configs = [config.of_one_replica()] * len(ended)
        run = FleetRun(ended, members, configs)
        summary, _ = fleet_summary(Trace(directory.name, [], "", SOURCE), config, self._engines[0], run)
        if len(ended) > 1:
            summary |= _lateness([one for one, _ in ended])
        write_requests(
            directory,
            self._engines[0].config.recording_format,
            members,
            lambda index: service.offers_of(request_ids[index]),
        )
        with (directory / self._trace).open("rb") as file:
            sha256 = file_digest(file, "sha256").hexdigest()
        self._description["trace"] |= {"requests": len(position), "sha256": sha256}
        run_directory.write_json(directory / "summary.json", summary)
        digest = {"schedule_digest": summary["schedule_digest"], "partial": summary["partial"]}
        run_directory.write_json(directory / run_directory.RUN, {**self._description, **digest})
        return summary


def _lateness(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`delivery_lag_s` and `replay_differs` of all replicas."""
    lags = [one["delivery_lag_s"] for one in summaries]
    found: dict[str, Any] = {
        "delivery_lag_s": {"mean": sum(lag["mean"] for lag in lags) / len(lags), "max": max(lag["max"] for lag in lags)}
    }
    if all("replay_differs" in one for one in summaries):
        names = summaries[0]["replay_differs"]
        found["replay_differs"] = {name: sum(one["replay_differs"][name] for one in summaries) for name in names}
    return found


def _in_order(paths: Sequence[Path], service: FleetService) -> Iterator[str]:
    """The lines of the traces of all replicas, each in order of its ids, in that order, with their sessions."""
    for request_id, line in merge(*map(_numbered, paths), key=lambda one: one[0]):
        session = service.session_of(request_id)
        yield line if session == NO_SESSION else f'{line.rstrip()[:-1]},"session_id":{session}}}\n'


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    with open_to_read(path) as file:
        for line in file:
            yield int(line.partition(b":")[2].partition(b",")[0]), line.decode()
