"""A fleet: replicas of an engine behind a router, each a run of its own, and the figures of all requests together.

A router that looks at nothing decides alike however quick replicas are: each replica is then an independent run of its
share, in a process of its own. Otherwise the replicas are stepped together (`stepped_fleet`).
"""

import gc
import hashlib
import logging
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.build.engine import Engine
from ifbbench.clock import NO_PROGRESS, Progress, VirtualClock
from ifbbench.errors import IfbbenchError, InputError, RunFailed
from ifbbench.fleet.prefix_index import PrefixIndex
from ifbbench.fleet.router import STATE, Replica, RoutedRequest, Router, make_router
from ifbbench.fleet.sides import check_no_sides
from ifbbench.processes import run_in_processes, usable_cores
from ifbbench.replay.client import ReplayClient
from ifbbench.replay.single import (
    REPLAYING,
    RunResult,
    beginning,
    describe,
    engine_for,
    more_figures,
    places,
    recorder_of,
    run_loaded,
    say_number,
    summarise_loaded,
    summary_recorder_of,
)
from ifbbench.replay.stepped_fleet import SteppedFleet, SteppedReplica
from ifbbench.rundir import run_directory
from ifbbench.rundir.fleet import OffersOf, fleet_figures, replica_directory, write_requests
from ifbbench.rundir.recorder import SummaryRecorder
from ifbbench.settings.config import BY_ITERATION, LOGGED_ENGINES, ROUTERS, SIDE_OUTPUTS, RunConfig
from ifbbench.simulated.energy import energy_of_replicas
from ifbbench.workload.formats import write_trace
from ifbbench.workload.load import Source, chosen_requests, in_memory, load_trace, session_numbers
from ifbbench.workload.trace import Trace, columns_of

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
NO_SIDE_OUTPUTS = dict.fromkeys((*SIDE_OUTPUTS, "result_format"))
OnEnd = Callable[[SummaryRecorder], None]
Ended = tuple[dict[str, Any], tuple[Any, ...]]
"""The summary of a replica, and the parts of its recorder."""


@dataclass(frozen=True)
class Routes:
    """Which requests each replica had. members: the index in the whole trace of each of its requests, by replica.
    offers_of: see `write_requests`."""

    members: Sequence[Sequence[int]]
    offers_of: OffersOf = lambda index: None


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
    router = checked_router(config)
    run_directory.check_some(places(config, trace), config.overwrite)
    own = config.of_one_replica()
    with engine_for(trace, own, progress) as engine:
        description = describe(trace, engine, own)
        description["config"] |= {name: getattr(config, name) for name in ("replicas", "router_state_age")}
        description["config"] |= {"router": config.router or ROUTERS[0]}
        description["derived"] += ["router"] if config.router is None else []

        begin = beginning(trace, config, description, progress)
        with run_directory.begun(places(config, trace), config.overwrite, begin) as directory:
            say_number(config, trace, directory)
            if on_recording:
                on_recording(directory)
            with ExitStack() as outputs:
                if on_recorded:
                    outputs.callback(on_recorded, directory)
                routes, ended = _run(trace, config, router, directory, progress)
                progress.stage("writing requests")
                write_requests(directory, config.recording_format, routes.members, routes.offers_of)
                summary, _ = _summary(trace, config, engine, ended)
                run_directory.write_json(directory / "summary.json", summary)
                digest = {"schedule_digest": summary["schedule_digest"], "partial": summary["partial"]}
                run_directory.write_json(directory / run_directory.RUN, {**description, **digest})
    return RunResult(directory, summary, summary["requests"]["failed"], description)


def summarise_fleet(
    source: Source, config: RunConfig, progress: Progress = NO_PROGRESS, on_end: OnEnd = lambda recorder: None
) -> dict[str, Any]:
    """`summarise_run` of a fleet. on_end: takes a recorder of all replicas together."""
    trace = load_trace(source, config, progress)
    router = checked_router(config)
    with engine_for(trace, config.of_one_replica(), progress) as engine:
        _, ended = _run(trace, config, router, None, progress)
        summary, recorder = _summary(trace, config, engine, ended)
    on_end(recorder)
    return summary


def checked_router(config: RunConfig) -> Router:
    """The router. InputError for settings that a fleet cannot have."""
    check_settings(config)
    check_no_sides(config)
    router = make_router(config.router or ROUTERS[0], config.replicas, config.seed)
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
        raise InputError(
            f"--replicas, --router: --device {config.device} runs one engine; a fleet needs a simulated device "
            "(--device sim:PROFILE), or null."
        )


def _run(
    trace: Trace, config: RunConfig, router: Router, directory: Path | None, progress: Progress
) -> tuple[Routes, list[Ended]]:
    """Run all replicas, into their directories in that of the fleet, or without files."""
    shares = _known_shares(trace, config, router)
    if shares is None:
        return _run_stepped(trace, config, router, directory, progress)
    return Routes(shares), _run_independent(trace, config, shares, directory, progress)


def _known_shares(trace: Trace, config: RunConfig, router: Router) -> list["array[int]"] | None:
    """The indices of the requests of each replica, if they are known before the run and the replicas do not depend on
    each other; None if they are not, or a replica has none."""
    columns, count = columns_of(trace.requests), config.replicas
    if config.hardware is None:  # the null device takes no time on the one clock of a fleet
        return None
    if count == 1:
        return [array("q", range(len(trace)))]
    keeps_sessions = columns.after is None or config.router == "session"
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
    shares: Sequence["array[int]"],
    directory: Path | None,
    progress: Progress,
) -> list[Ended]:
    """Run each replica on its own, in as many processes as there are cores."""
    trace = in_memory(trace) if len(shares) > 1 else trace
    columns, count = columns_of(trace.requests), len(shares)
    # Requests and sessions that go to replicas in turn are those of --replica.
    in_turn = count > 1 and config.router in (None, ROUTERS[0], "session")

    def run(number: int, report: Callable[[int], None]) -> Ended:
        own = config.of_one_replica(replica=f"{number + 1}/{count}" if in_turn else None)
        share = trace if count == 1 else replace(trace, requests=chosen_requests(columns, np.asarray(shares[number])))
        parts: list[tuple[Any, ...]] = []
        shown = _Answered(report) if count > 1 else progress

        def take(recorder: SummaryRecorder) -> None:
            parts.append(recorder.parts())

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
    trace: Trace, config: RunConfig, router: Router, directory: Path | None, progress: Progress
) -> tuple[Routes, list[Ended]]:
    """Run all replicas together, in steps from one arrival to the next."""
    own = config.of_one_replica(concurrency=None, duration=None, output=None, **NO_SIDE_OUTPUTS)
    descriptions: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:
        engines: list[Engine] = []
        for _ in range(config.replicas):
            with unlogged():
                engine = stack.enter_context(engine_for(trace, own))
            is_real_time = not isinstance(engine.clock, VirtualClock)
            engines.append(replace(engine, clock=VirtualClock()) if is_real_time else engine)

        def make_recorder(number: int, share: Trace, engine: Engine, client: ReplayClient) -> SummaryRecorder:
            if directory is None:
                return summary_recorder_of(share, engine, client)
            path = replica_directory(directory, number)
            own_config = engine.config.with_values(output=str(path))
            description = descriptions[number] = describe(share, replace(engine, config=own_config), own)
            description["name"] = path.name

            def begin(there: Path, _name: str) -> None:
                write_trace(share.requests, there / f"trace.{own.recording_format}", overwrite=True)
                run_directory.write_begun(there, description)

            stack.enter_context(run_directory.begun([path], False, begin))
            return recorder_of(share, engine, client, path, description)

        replicas = [SteppedReplica(number, engine, trace, make_recorder) for number, engine in enumerate(engines)]
        fleet = SteppedFleet(trace, config, router, replicas, progress)
        progress.stage(REPLAYING)
        gc.freeze()
        ended: list[Ended] = []
        try:
            fleet.run()
        except KeyboardInterrupt as interrupt:
            kept = "nothing was recorded" if directory is None else f"results are kept in {directory}"
            interrupt.add_note(f"{fleet.front.answered} of {len(trace)} requests were done; {kept}.")
            raise
        except Exception as error:
            done = f"{fleet.front.answered} of {len(trace)} requests were done"
            raise RunFailed(f"the fleet's run ended early: {error}", done) from error
        finally:
            gc.unfreeze()
            for number, one in enumerate(replicas):
                ended.append(closed(one, not fleet.front.done, descriptions.get(number), directory))
    return Routes([one.members for one in replicas], fleet.offers_of), ended


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
    return summary, one.recorder.parts()


def _summary(
    trace: Trace, config: RunConfig, engine: Engine, ended: Sequence[Ended]
) -> tuple[dict[str, Any], SummaryRecorder]:
    """The summary of all requests of all replicas: percentiles over all of them, rates over the time from the first
    arrival to the last end; and its recorder.

    A fleet is overloaded if one of its replicas is. The expected error is that of the one with most requests at a
    time."""
    whole = SummaryRecorder(
        engine.config.as_dict() | {"concurrency": config.concurrency},
        0,
        lambda request: 0.0,
        class_of=columns_of(trace.requests).class_at,
    )
    for _, parts in ended:
        whole.add_server(parts)
    summaries = [summary for summary, _ in ended]
    if len(ended) == 1:
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
        summary |= energy_of_replicas(summaries, summary, config.hardware)
    gpus = [config.tp_size * config.pp_size] * len(ended)
    up_s = [whole.metrics.last_end_s] * len(ended)
    return summary | {"fleet": fleet_figures(config.router or ROUTERS[0], summaries, gpus, up_s)}, whole


class _Answered:
    """The progress of a replica as the number of its requests that are answered."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report, self._is_replaying = report, False

    def stage(self, label: str) -> None:
        self._is_replaying = label == REPLAYING

    def update(self, completed: int, total: int | None, text: str) -> None:
        if self._is_replaying:
            self._report(completed)


@contextmanager
def unlogged() -> Iterator[None]:
    """Leave out the warnings of a replica: the fleet's own engine has given them."""
    logger = logging.getLogger("ifbbench")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
