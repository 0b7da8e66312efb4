"""Many runs, of which only the summaries are kept: one after the other, or in parallel processes if simulated."""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ifbbench.build.engine import build_engine
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.processes import Lost, run_in_processes, usable_cores
from ifbbench.progress import Progress
from ifbbench.replay.run import summarise_run
from ifbbench.replay.single import REPLAYING
from ifbbench.rundir.recorder import SummaryRecorder
from ifbbench.settings.config import RunConfig
from ifbbench.studies.equal_schedules import EqualSchedules
from ifbbench.workload.load import Source, in_memory, load_trace, read_source
from ifbbench.workload.trace import Trace, columns_of

# The router that shares requests and sessions as `--replica` does.
SHARES = "session"
# What settings that do not work, or memory that is not enough, raise; torch runs out of memory with a RuntimeError.
FAILURES = (IfbbenchError, MemoryError, RuntimeError)


@dataclass(frozen=True, slots=True)
class PointResult:
    """The outcome of one run.

    summary: as in `summary.json`, empty if the run ended with `error`.
    warnings: what the run would have printed, such as why requests are refused.
    max_active: the highest number of active requests, if only the summary is kept.
    """

    config: RunConfig
    summary: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    warnings: tuple[str, ...] = ()
    max_active: int | None = field(default=None, compare=False)


Report = Callable[[int], None]
"""Takes the number of requests that are answered."""

RunPoint = Callable[[Trace, RunConfig, Progress], tuple[dict[str, Any], int | None]]
"""Runs one point of a trace that was read; returns its summary, and `max_active` of a PointResult."""


def run_points(
    source: Source,
    configs: Sequence[RunConfig],
    processes: int | None = None,
    run_point: RunPoint | None = None,
) -> list[PointResult]:
    """Replay `source` once for each of `configs`, in memory; the results are in their order.

    source: a trace that `read_source` returned, or its name; `skip_samples` and `max_num_samples` take some requests of
        it. It is read once, with the other READ_SETTINGS of the first configuration.
    processes: number of processes for simulated runs, the usable cores if None. Runs on a real device run in this
        process, one after the other.
    run_point: `summarise` if None.
    """
    if not configs:
        return []
    limits = [config.samples_read for config in configs]
    longest = None if None in limits else max(filter(None, limits))
    if not isinstance(source, Trace):
        source = read_source(source, configs[0].with_values(max_num_samples=longest, skip_samples=0))
    trace = in_memory(source)

    results = dict(run_all(run_point or summarise, [(trace, config) for config in configs], processes))
    return [results[number] for number in range(len(configs))]


def prove(runs: Iterable[tuple[Source, RunConfig]], replaces: bool) -> None:
    """InputError, that of the first, if none of `runs` can have its requests; with `replaces`, also if none can build
    its engine, so that earlier results are not removed for nothing. That of a server or of several processes is not
    built."""
    refusals = []
    for source, config in runs:
        try:
            trace = load_trace(source, config)
            if replaces and config.endpoint is None and (config.makes_no_tokens or config.num_ranks == 1):
                build_engine(config.of_one_replica(), columns_of(trace.requests).max_beam_width).executor.close()
            return
        except InputError as error:
            refusals.append(error)
    raise refusals[0]


def summarise(
    trace: Trace, config: RunConfig, progress: Progress, *, owns_process: bool = False
) -> tuple[dict[str, Any], int | None]:
    """A RunPoint that keeps only the summary."""
    ended: list[SummaryRecorder] = []
    summary = summarise_run(trace, config, progress, owns_process=owns_process, on_end=ended.append)
    return summary, ended[0].totals.peak_active if ended else None


def summarise_replicas(
    trace: Trace, config: RunConfig, progress: Progress, *, replicas: int
) -> tuple[dict[str, Any], int | None]:
    """A RunPoint of `replicas` servers behind the router of `config`; without one they share the requests as
    `--replica` says. With prefill and decode apart it is one, of the replicas in `config`. See `summarise_fleet`."""
    if replicas == 1 and not config.is_disaggregated:
        config = config.of_one_replica()
    if replicas == 1:
        return summarise(trace, config, progress)
    return summarise(trace, config.with_values(replicas=replicas, router=config.router or SHARES), progress)


def outcome(run_point: RunPoint, trace: Trace, config: RunConfig, report: Report) -> PointResult:
    """Run a point. Settings that do not work are a result too."""
    with _warnings() as warnings:
        try:
            summary, max_active = run_point(trace, config, _Requests(report))
            return PointResult(config, summary, "", tuple(warnings), max_active)
        except FAILURES as error:
            return PointResult(config, {}, in_one_line(error), tuple(warnings))


def in_one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join((str(error) or type(error).__name__).split())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings of runs in place of printing them."""
    logger, collected = logging.getLogger("ifbbench"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: collected.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    propagated, logger.propagate = logger.propagate, False
    try:
        yield collected
    finally:
        logger.propagate = propagated
        logger.removeHandler(handler)


def run_all(
    run_point: RunPoint,
    runs: Sequence[tuple[Trace, RunConfig]],
    processes: int | None = None,
    on_requests: Report = lambda answered: None,
) -> Generator[tuple[int, PointResult], None, None]:
    """Run a point for each of `runs`: simulated ones in `processes`, then the others here, one after the other; those
    whose schedule is that of an earlier one are not simulated. Yields the number and the result of each as it ends;
    closed before, it ends what is running.
    on_requests: takes the number of requests that are answered in the points that are running."""
    simulated = [number for number, (_, config) in enumerate(runs) if config.hardware is not None]
    in_parallel = min(len(simulated), processes or usable_cores())
    if in_parallel < 2:
        simulated = []
    schedules = EqualSchedules()

    def run(number: int, report: Report) -> PointResult:
        return outcome(run_point, *runs[number], report)

    def known(number: int) -> PointResult | None:
        trace, config = runs[number]
        with _warnings() as warnings:
            summary = schedules.summary_of(trace, config)
        return None if summary is None else PointResult(config, summary, "", tuple(warnings))

    def learn(number: int, result: PointResult) -> None:
        if result.max_active is not None:
            with _warnings():
                schedules.add(*runs[number], result.summary, result.max_active)

    in_processes = run_in_processes(
        lambda place, report: run(simulated[place], report),
        len(simulated),
        in_parallel,
        on_requests,
        lambda place: known(simulated[place]),
    )
    for place, result in in_processes:
        number = simulated[place]
        if isinstance(result, Lost):
            result = PointResult(runs[number][1], error=str(result))
        elif isinstance(result, Exception):
            raise result
        learn(number, result)
        yield number, result
    for number in sorted(set(range(len(runs))) - set(simulated)):
        result = known(number) or run(number, on_requests)
        on_requests(0)
        learn(number, result)
        yield number, result


class _Requests:
    """The progress of a run as the number of its requests that are answered."""

    def __init__(self, report: Report) -> None:
        self._report, self._is_replaying = report, False

    def stage(self, label: str) -> None:
        self._is_replaying = label == REPLAYING

    def update(self, completed: int, total: int | None, text: str) -> None:
        self._report(completed if self._is_replaying else 0)
