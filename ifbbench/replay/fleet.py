"""A fleet: replicas of an engine behind a router, each a run of its own, and the figures of all requests together.

A router that looks at nothing decides alike however quick replicas are: each replica is then an independent run of its
share, in a process of its own. Otherwise, and where replicas start or end (`fleet_changes`), they are stepped together
(`stepped_fleet`).
"""

import gc
import hashlib
import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.build.engine import Engine
from ifbbench.build.kv_tiers import make_tiers, remote_store
from ifbbench.engine.arrays import IntArray
from ifbbench.errors import IfbbenchError, InputError, RunFailed
from ifbbench.fleet.events import FAIL, ReplicaEvent, read_events
from ifbbench.fleet.prefix_index import PrefixIndex
from ifbbench.fleet.router import PREFILLS, STATE, Replica, RoutedRequest, Router, make_router
from ifbbench.fleet.sides import check_no_sides
from ifbbench.kv.store import KvStore
from ifbbench.processes import run_in_processes, usable_cores
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.replay.client import ReplayClient
from ifbbench.replay.fleet_changes import Changes, service_facts
from ifbbench.replay.replica_configs import own_settings, replica_configs
from ifbbench.replay.replica_processes import ReplicaEngines
from ifbbench.replay.requests import request_maker, with_drawn_loras
from ifbbench.replay.single import (
    REPLAYING,
    RunResult,
    describe,
    engine_for,
    fleet_recording,
    more_figures,
    places,
    recorder_of,
    run_loaded,
    summarise_loaded,
    summary_recorder_of,
    unlogged,
    write_fleet_end,
    write_responses,
)
from ifbbench.replay.stepped_fleet import SteppedFleet, SteppedReplica
from ifbbench.rundir import run_directory
from ifbbench.rundir.fleet import (
    Member,
    fleet_figures,
    replica_directory,
    retention_figures,
    tier_figures,
    write_requests,
)
from ifbbench.rundir.line_types import RequestLine
from ifbbench.rundir.lines import encode
from ifbbench.rundir.recorder import SummaryRecorder
from ifbbench.rundir.servers import add_server, parts_of
from ifbbench.settings.autoscale import KV_USE, QUEUE, TTFT, AutoscaleRule, parse_autoscale
from ifbbench.settings.config import FLEET_SETTINGS, RunConfig
from ifbbench.settings.engines import LOGGED_ENGINES
from ifbbench.settings.groups.fleet import ROUTERS
from ifbbench.settings.groups.recording import SIDE_OUTPUTS
from ifbbench.settings.groups.replay import BY_ITERATION
from ifbbench.simulated.energy import energy_of_replicas
from ifbbench.simulated.hardware import load_hardware
from ifbbench.virtual_clock import VirtualClock
from ifbbench.workload.formats import write_trace
from ifbbench.workload.load import Source, chosen_requests, in_memory, load_trace, session_numbers
from ifbbench.workload.trace import Trace, columns_of

# What replicas whose blocks are in one store have in common.
SAME_IN_A_STORE = ("engine", "model", "tokens_per_block", "dtype", "kv_cache_dtype")
# Settings that a fleet does not have, and why.
REFUSED = {
    "replica": "a fleet replays all requests; leave one of the two out",
    "enable_steady_state": "the steady state of several replicas is not built; report one replica with it",
    "static_emulated_batch_size": "a batch of several replicas is not built",
    "wait_sleep": "the client of a fleet waits for each arrival exactly",
    "iteration_log": "a fleet has no iterations; its replicas have: report one of them with it",
    "report_json": "its figures of a GPU are those of one engine; report one replica with it",
    "result_json": "it lists the gaps between tokens, which replicas have; report one replica with it",
    "result_format": "it lists the gaps between tokens, which replicas have; report one replica with it",
    "log_iteration_data": "a fleet has no iterations; its replicas have",
}
# Settings that a fleet does not have whose replicas compute.
NOT_COMPUTED = ("profile",)
NO_SIDE_OUTPUTS = dict.fromkeys((*SIDE_OUTPUTS, "result_format"))
# Settings of the fleet that its replicas do not have.
OF_FLEET: dict[str, Any] = {"concurrency": None, "duration": None, "output": None, **NO_SIDE_OUTPUTS}
OnEnd = Callable[[SummaryRecorder], None]
Ended = tuple[dict[str, Any], tuple[Any, ...]]
"""The summary of a replica, and the parts of its recorder."""


@dataclass(frozen=True)
class Plan:
    """What the settings of a fleet ask for.

    configs: settings of the replicas that it begins with.
    events, rule: what changes their number.
    """

    configs: Sequence[RunConfig]
    router: Router
    events: Sequence[ReplicaEvent]
    rule: AutoscaleRule | None

    @property
    def changes(self) -> bool:
        """Whether replicas may start or end during the run."""
        return bool(self.events) or self.rule is not None


@dataclass(frozen=True)
class FleetRun:
    """A fleet that has run.

    ended: each replica.
    members: for each replica, the indices of its requests in the whole trace.
    configs: the settings of each.
    stepped: the fleet whose replicas were stepped together, if they were.
    outputs: the tokens of each request, by id, if they are asked for.
    failures: what the replicas of a fleet that serves have lost, as `events`.
    sent_again: priorities of the requests that were lost and sent to other replicas.
    """

    ended: Sequence[Ended]
    members: Sequence[Sequence[int]]
    configs: Sequence[RunConfig]
    stepped: SteppedFleet | None = None
    outputs: Mapping[int, IntArray] = field(default_factory=dict)
    failures: Sequence[dict[str, Any]] = ()
    sent_again: Sequence[float] = ()


def run_fleet(
    source: Source,
    config: RunConfig,
    progress: Progress = NO_PROGRESS,
    *,
    on_recording: Callable[[Path], None] | None = None,
    on_recorded: Callable[[Path], None] | None = None,
) -> RunResult:
    """`run_trace` of a fleet: a run directory, with those of the replicas in it."""
    trace = load_trace(source, config, progress)
    plan = _plan(config)
    run_directory.check_some(places(config, trace), config.overwrite)
    with _first_engine(trace, plan, progress) as (engine, others):
        description = describe_fleet(trace, engine, config, plan.configs)
        with fleet_recording(trace, config, description, progress, on_recording, on_recorded) as directory:

            def write(run: FleetRun) -> RunResult:
                summary, whole = fleet_summary(trace, config, engine, run)
                _write_requests(directory, config, run, whole.lost)
                return write_fleet_end(directory, description, summary)

            run = _run(trace, config, plan, directory, progress, others, write)
            if config.responses_json:
                write_responses(Path(config.responses_json), trace, run.outputs)
            progress.stage("writing requests")
            return write(run)


def summarise_fleet(
    source: Source, config: RunConfig, progress: Progress = NO_PROGRESS, on_end: OnEnd = lambda recorder: None
) -> dict[str, Any]:
    """`summarise_run` of a fleet. on_end: takes a recorder of all replicas together."""
    trace = load_trace(source, config, progress)
    plan = _plan(config)
    with _first_engine(trace, plan, progress) as (engine, others):
        run = _run(trace, config, plan, None, progress, others)
        summary, recorder = fleet_summary(trace, config, engine, run)
    on_end(recorder)
    return summary


@contextmanager
def _first_engine(trace: Trace, plan: Plan, progress: Progress) -> Iterator[tuple[Engine, ReplicaEngines | None]]:
    """The engine of the first replica, to describe the fleet by; and those of all replicas, where these compute."""
    first = plan.configs[0]
    if first.makes_no_tokens:
        with engine_for(trace, first, progress) as engine:
            yield engine, None
        return
    progress.stage("loading model")
    with ExitStack() as stack:
        engines = ReplicaEngines(stack, trace, [one.with_values(**OF_FLEET) for one in plan.configs])
        own = {name: getattr(first, name) for name in OF_FLEET}
        yield replace(engines.first, config=engines.first.config.with_values(**own)), engines


def describe_fleet(trace: Trace, engine: Engine, config: RunConfig, own: Sequence[RunConfig]) -> dict[str, Any]:
    """The content of run.json.

    engine: engine of the first replica.
    own: the settings of each replica.
    """
    description = describe(trace, engine, own[0])
    fleet = config.of_one_replica()
    differing = {name for one in own for name, value in one.as_dict().items() if value != getattr(fleet, name)}
    description["config"] |= {name: getattr(fleet, name) for name in differing}
    description["config"] |= {name: getattr(config, name) for name in FLEET_SETTINGS}
    description["config"] |= {"replicas": len(own), "router": config.router or ROUTERS[0]}
    description["derived"] += ["router"] if config.router is None else []
    if differing:
        description["replica_settings"] = own_settings(own)
    return description


def _plan(config: RunConfig) -> Plan:
    """The plan of a fleet. InputError for settings that a fleet cannot have, and for files that do not fit."""
    configs = replica_configs(config)
    router = _checked_router(config, configs)
    rule = None if config.autoscale is None else parse_autoscale(config.autoscale)
    events = list[ReplicaEvent]()
    if config.replica_events is not None:
        events = read_events(Path(config.replica_events), len(configs), can_grow=rule is not None)
    if rule is not None and len(configs) > rule.maximum:
        raise InputError(f"--autoscale: max is {rule.maximum}, and the fleet begins with {len(configs)}; raise max.")
    if not events and rule is None and config.replica_start_up:
        raise InputError("--replica_start_up: no replica starts; add --replica_events or --autoscale, or leave it out.")
    return Plan(configs, router, events, rule)


def _checked_router(config: RunConfig, own: Sequence[RunConfig]) -> Router:
    """The router. own: the settings of each replica. InputError for settings that a fleet cannot have."""
    for one in own:
        check_settings(config.with_values(device=one.device))
    if len({one.makes_no_tokens for one in own}) > 1:
        raise InputError("--replica_config: some replicas compute, and others do not; give all of them one --device.")
    check_no_sides(config)
    if config.kv_remote_bytes:
        for name in SAME_IN_A_STORE:
            if len({getattr(one, name) for one in own}) > 1:
                raise InputError(f"--kv_remote_bytes: replicas that share a store have the same {name}; give it once.")
    router = make_router(config.router or ROUTERS[0], len(own), config.seed)
    if config.router_state_age and STATE not in router.looks_at:
        raise InputError(f"--router_state_age: --router {config.router} reads no state of replicas; leave it out.")
    return router


def check_settings(config: RunConfig) -> None:
    """InputError for settings that no fleet can have."""
    usual = RunConfig()
    for name, why in REFUSED.items():
        if getattr(config, name) != getattr(usual, name):
            raise InputError(f"--{name}: {why}.")
    if config.iteration_stats_format in LOGGED_ENGINES:
        raise InputError(f"--iteration_stats_format {config.iteration_stats_format}: is not built for a fleet.")
    if config.arrival == BY_ITERATION:
        raise InputError(f"--arrival {BY_ITERATION}: iterations are those of one engine, and a fleet has several.")
    if not config.makes_no_tokens:
        check_computing(config)


def check_computing(config: RunConfig) -> None:
    """InputError for settings that no fleet can have whose replicas compute."""
    if config.device == "cuda":
        raise InputError(
            "--replicas, --router: device cuda has one engine; choose --device cpu, on which each replica has a "
            "process, or a simulated device (--device sim:PROFILE)."
        )
    if config.num_ranks > 1:
        raise InputError("--tp_size, --pp_size: replicas that compute are one process each; leave them out.")
    usual = RunConfig()
    for name in NOT_COMPUTED:
        if getattr(config, name) != getattr(usual, name):
            raise InputError(f"--{name}: is not built for a fleet whose replicas compute; leave it out.")


def _run(
    trace: Trace,
    config: RunConfig,
    plan: Plan,
    directory: Path | None,
    progress: Progress,
    engines: ReplicaEngines | None,
    write: Callable[[FleetRun], object] = lambda run: None,
) -> FleetRun:
    """Run all replicas, into their directories in that of the fleet, or without files. write: takes what was done by a
    fleet whose run ends early."""
    shares = _known_shares(trace, config, plan)
    if shares is None:
        return _run_stepped(trace, config, plan, directory, progress, engines, write)
    return FleetRun(_run_independent(trace, config, plan.configs, shares, directory, progress), shares, plan.configs)


def _known_shares(trace: Trace, config: RunConfig, plan: Plan) -> list["array[int]"] | None:
    """The indices of the requests of each replica, if they are known before the run and the replicas do not depend on
    each other; None if they are not, or a replica has none."""
    columns, count, router = columns_of(trace.requests), len(plan.configs), plan.router
    if plan.changes or (count > 1 and config.kv_remote_bytes):
        return None
    if any(one.hardware is None for one in plan.configs):  # the null device takes no time on the one clock of a fleet
        return None
    if count == 1:
        return [array("q", range(len(trace)))]
    keeps_sessions = columns.after is None or (config.router == "session" and columns.session_id is None)
    if router.looks_at or config.concurrency is not None or not keeps_sessions:
        return None
    replicas = [Replica(number, PrefixIndex(0)) for number in range(count)]
    sessions = session_numbers(columns)
    chosen = np.empty(len(trace), np.int64)
    for index in range(len(trace)):
        routed = RoutedRequest(
            index,
            columns.request_id[index],
            columns.arrival_s[index],
            columns.prompt_len[index],
            int(sessions[index]),
        )
        chosen[index] = router.choose(routed, replicas).number
    shares = [array("q", np.flatnonzero(chosen == number).tobytes()) for number in range(count)]
    return shares if all(shares) else None


def _run_independent(
    trace: Trace,
    config: RunConfig,
    configs: Sequence[RunConfig],
    shares: Sequence["array[int]"],
    directory: Path | None,
    progress: Progress,
) -> list[Ended]:
    """Run each replica on its own, in as many processes as there are cores."""
    trace = in_memory(trace) if len(shares) > 1 else trace
    columns, count = columns_of(trace.requests), len(shares)
    # Requests and sessions that go to replicas in turn are those of --replica.
    is_in_turn = config.router in (None, ROUTERS[0]) or (config.router == "session" and columns.session_id is None)
    in_turn = count > 1 and is_in_turn

    def run(number: int, report: Callable[[int], None]) -> Ended:
        own = configs[number].with_values(replica=f"{number + 1}/{count}" if in_turn else None)
        share = trace if count == 1 else replace(trace, requests=chosen_requests(columns, np.asarray(shares[number])))
        parts: list[tuple[Any, ...]] = []
        shown = _Answered(report) if count > 1 else progress

        def take(recorder: SummaryRecorder) -> None:
            parts.append(parts_of(recorder))

        with unlogged():
            if directory is None:
                summary = summarise_loaded(share, own, shown, on_end=take)
            else:
                path = replica_directory(directory, number)
                shutil.rmtree(path, ignore_errors=True)  # of a process that was killed
                own = own.with_values(output=str(path), **NO_SIDE_OUTPUTS)
                summary = run_loaded(share, own, shown, on_end=take).summary
        return summary, parts[0]

    # A process of a sweep may have none of its own.
    processes = 1 if current_process().daemon else min(usable_cores(), count)
    if processes == 1:
        return [run(number, lambda answered: None) for number in range(count)]
    progress.stage(REPLAYING)
    ended: dict[int, Ended] = {}
    done = 0

    def show(running: int) -> None:
        progress.update(done + running, len(trace), f"{len(ended)} of {count} replicas")

    for number, result in run_in_processes(run, count, processes, show):
        if isinstance(result, Exception):
            raise result if isinstance(result, IfbbenchError) else RunFailed(f"replica {number}: {result}")
        ended[number] = result
        done += len(shares[number])
    return [ended[number] for number in range(count)]


def _run_stepped(
    trace: Trace,
    config: RunConfig,
    plan: Plan,
    directory: Path | None,
    progress: Progress,
    engines: ReplicaEngines | None,
    write: Callable[[FleetRun], object],
) -> FleetRun:
    """Run all replicas together, in steps from one arrival to the next.

    engines: engines of replicas that compute.
    write: see `_run`.
    """
    configs = [one.with_values(**OF_FLEET) for one in plan.configs]
    descriptions: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:
        of_replicas, remotes = list[RunConfig](), list[KvStore | None]()

        def make_engine(own: RunConfig) -> Engine:
            if engines is not None:
                of_replicas.append(own)
                return engines.make(own)
            with unlogged():
                engine = stack.enter_context(engine_for(trace, own))
            of_replicas.append(own)
            if own.kv_remote_bytes:
                remotes.append(remotes[0] if remotes else remote_store(engine.config, engine.model))
                number, resolved = len(of_replicas), engine.config
                engine = replace(engine, tiers=make_tiers(resolved, engine.model, engine.clock, remotes[0], number))
            is_real_time = not isinstance(engine.clock, VirtualClock)
            return replace(engine, clock=VirtualClock()) if is_real_time else engine

        def make_recorder(number: int, share: Trace, engine: Engine, client: ReplayClient) -> SummaryRecorder:
            if directory is None:
                return summary_recorder_of(share, engine, client)
            path = replica_directory(directory, number)
            own_config = engine.config.with_values(output=str(path))
            own = of_replicas[number]
            description = descriptions[number] = describe(share, replace(engine, config=own_config), own)
            description["name"] = path.name

            def begin(there: Path, _name: str) -> None:
                write_trace(share.requests, there / f"trace.{own.recording_format}", overwrite=True)
                run_directory.write_begun(there, description)

            stack.enter_context(run_directory.begun([path], False, begin))
            return recorder_of(share, engine, client, path, description)

        def make_replica(number: int, like: int) -> SteppedReplica:
            sees_first_tokens = PREFILLS in plan.router.looks_at
            sees_first_tokens |= plan.rule is not None and plan.rule.measure == TTFT
            shows_state = STATE in plan.router.looks_at
            shows_state |= plan.rule is not None and plan.rule.measure in (KV_USE, QUEUE)
            engine = make_engine(configs[like])
            share = with_drawn_loras(trace, engine)
            one = SteppedReplica(number, engine, share, make_recorder, sees_first_tokens, shows_state=shows_state)
            if config.responses_json:
                one.client.keep_outputs()
            return one

        replicas = [make_replica(number, number) for number in range(len(configs))]
        changes = Changes(plan.events, plan.rule, config.replica_start_up, make_replica)
        fleet = SteppedFleet(trace, config, plan.router, replicas, changes, progress)
        progress.stage(REPLAYING)
        gc.freeze()
        ended: list[Ended] = []
        run = FleetRun(ended, (), of_replicas, fleet)
        try:
            fleet.run()
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"{outcome_of(fleet.front, trace, directory)}.")
            raise
        except Exception as error:
            done = outcome_of(fleet.front, trace, directory)
            raise RunFailed(f"the fleet's run ended early: {error}", done) from error
        finally:
            gc.unfreeze()
            for number, one in enumerate(replicas):
                ended.append(closed(one, not fleet.front.done, descriptions.get(number), directory))
            if not fleet.front.done:
                write(replace(run, members=[one.members for one in replicas]))
    outputs = {name: tokens for one in replicas for name, tokens in one.client.outputs.items()}
    return replace(run, members=[one.members for one in replicas], outputs=outputs)


def outcome_of(front: ReplayClient, trace: Trace, directory: Path | None) -> str:
    """What was done of a fleet's run that ends early, and where it is."""
    kept = "nothing was recorded" if directory is None else f"results are kept in {directory}"
    return f"{front.answered} of {len(trace)} requests were done; {kept}"


def closed(one: SteppedReplica, is_partial: bool, description: dict[str, Any] | None, directory: Path | None) -> Ended:
    """End the recording of a replica."""
    count = len(one.members)
    one.recorder.metrics.total = count
    if directory is not None and description is not None:
        description["trace"]["requests"] = count
        path = replica_directory(directory, one.view.number)
        write_trace(one.trace.requests, path / f"trace.{one.engine.config.recording_format}", overwrite=True)
    complete = partial(more_figures, one.engine, one.client, one.loop)
    summary = one.recorder.close(partial=is_partial, complete=complete)
    return summary, parts_of(one.recorder)


def _write_requests(directory: Path, config: RunConfig, run: FleetRun, lost: Sequence[bytes]) -> None:
    """Write the requests of all replicas. lost: the lines of those that no replica took."""
    stepped = run.stepped
    if stepped is None:
        write_requests(directory, config.recording_format, run.members)
        return
    replica_of = stepped.replica_of
    write_requests(
        directory,
        config.recording_format,
        run.members,
        stepped.offers_of,
        lambda index, number: replica_of[index] == number,
        lost,
    )


class _FleetRecorder(SummaryRecorder):
    """A recorder of all replicas together.

    lost: the lines of requests that no replica took.
    """

    lost: list[bytes]

    def _write_request(self, line: RequestLine) -> None:
        self.lost.append(encode(line))


def fleet_summary(
    trace: Trace, config: RunConfig, engine: Engine, run: FleetRun
) -> tuple[dict[str, Any], _FleetRecorder]:
    """The summary of all requests of all replicas: percentiles over all of them, rates over the time from the first
    arrival to the last end; and its recorder.

    A fleet is overloaded if one of its replicas is. The expected error is that of the one with most requests at a
    time."""
    ended, own, lost = run.ended, run.configs, {} if run.stepped is None else run.stepped.lost
    whole = _FleetRecorder(
        engine.config.as_dict() | {"concurrency": config.concurrency},
        0,
        lambda request: lost[request.index][0],
        class_of=columns_of(trace.requests).class_at,
    )
    whole.lost = []
    for _, parts in ended:
        add_server(whole, parts)
    whole.metrics.forget_failures(run.sent_again)
    make_request = request_maker(engine)
    for index, (_, error) in lost.items():
        whole.left(make_request(index, trace.requests[index]), error)
    if run.stepped is not None:
        whole.metrics.total = run.stepped.front.submitted if run.stepped.front.done else len(trace)
    summaries = [summary for summary, _ in ended]
    if len(ended) == 1 and not lost:
        summary = dict(summaries[0])
    else:
        digest = hashlib.sha256(" ".join(one["schedule_digest"] for one in summaries).encode()).hexdigest()
        summary = whole.summary(any(one["partial"] for one in summaries), digest)
        growth = sum(one["queue_growth_requests_per_s"] for one in summaries)
        if growth > summary["queue_growth_requests_per_s"]:
            summary |= {"overloaded": True, "queue_growth_requests_per_s": growth}
        busiest = max(summaries, key=lambda one: one["request_throughput_per_s"] * (one["e2e_s"]["mean"] or 0.0))
        if "expected_error" in busiest:
            summary |= {"expected_error": busiest["expected_error"]}
    services, figures = _served(run, whole.metrics.last_end_s)
    if run.stepped is not None:
        services, figures = run.stepped.changes.service_times(whole.metrics.last_end_s), run.stepped.changes.figures()
    if len(ended) > 1:
        up_s = [end_s - begin_s if figures else summary["duration_s"] for begin_s, end_s, _ in services]
        summary |= energy_of_replicas(summaries, summary, [one.hardware for one in own], up_s)
    members = [
        Member(settings, one.tp_size * one.pp_size, price_of(one), *service)
        for one, settings, service in zip(own, own_settings(own), services, strict=True)
    ]
    if tiers := tier_figures(summaries):
        summary |= {"kv_tiers": tiers}
    if retention := retention_figures(summaries):
        summary |= {"kv_retention": retention}
    return summary | {"fleet": fleet_figures(config.router or ROUTERS[0], summaries, members) | figures}, whole


def _served(run: FleetRun, end_s: float) -> tuple[list[tuple[float, float, dict[str, Any]]], dict[str, Any]]:
    """See `Changes.service_times` and `figures`, of a fleet whose replicas were there from its beginning."""
    failed_s = {one["replica"]: one["at_s"] for one in run.failures}
    services = list[tuple[float, float, dict[str, Any]]]()
    for number in range(len(run.configs)):
        ended_s = failed_s.get(number, end_s)
        facts = service_facts(0.0, 0.0, ended_s, FAIL if number in failed_s else "") if failed_s else {}
        services.append((0.0, ended_s, facts))
    return services, {"events": list(run.failures)} if failed_s else {}


def price_of(config: RunConfig) -> float | None:
    """The price of a GPU hour of a replica, where its profile has one."""
    return None if config.hardware is None else load_hardware(config.hardware).price_per_hour


class _Answered:
    """The progress of a replica as the number of its requests that are answered."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report, self._is_replaying = report, False

    def stage(self, label: str) -> None:
        self._is_replaying = label == REPLAYING

    def update(self, completed: int, total: int | None, text: str) -> None:
        if self._is_replaying:
            self._report(completed)
