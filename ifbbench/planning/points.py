"""Many runs, of which only the summaries are kept: one after the other, or in parallel processes if simulated."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ifbbench.clock import Progress
from ifbbench.config import RunConfig
from ifbbench.errors import IfbbenchError
from ifbbench.planning.processes import Lost, run_in_processes, usable_cores
from ifbbench.replay.run import summarise_run
from ifbbench.workload.load import Source, in_memory, read_source
from ifbbench.workload.trace import Trace

# What settings that do not work, or memory that is not enough, raise; torch runs out of memory with a RuntimeError.
FAILURES = (IfbbenchError, MemoryError, RuntimeError, Lost)


@dataclass(frozen=True, slots=True)
class PointResult:
    """The outcome of one run. summary: as in `summary.json`, empty if the run ended with `error`. warnings: what the
    run would have printed, such as why requests are refused."""

    config: RunConfig
    summary: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    warnings: tuple[str, ...] = ()


OnPoint = Callable[[int, int, PointResult], None]
"""Called as each point ends: number of points that have ended, number of all points, and the result."""


def run_points(
    source: Source, configs: Sequence[RunConfig], processes: int | None = None, on_point: OnPoint | None = None
) -> list[PointResult]:
    """Replay `source` once for each of `configs`, in memory; the results are in their order.

    source: a trace that `read_source` returned, or its name; `max_num_samples` takes the first requests of it. It is
    read once, with the other READ_SETTINGS of the first configuration.
    processes: for simulated runs, the usable cores if None. Those on a real device run in this process, one after the
    other."""
    if not configs:
        return []
    limits = [config.max_num_samples for config in configs]
    longest = None if None in limits else max(filter(None, limits))
    if not isinstance(source, Trace):
        source = read_source(source, configs[0].with_values(max_num_samples=longest))
    trace = in_memory(source)

    def run(number: int, report: Callable[[float], None]) -> PointResult:
        return outcome(configs[number], lambda: summarise_run(trace, configs[number], ShareProgress(report)))

    results: dict[int, PointResult] = {}
    for number, result in run_all(run, configs, processes):
        results[number] = result
        if on_point is not None:
            on_point(len(results), len(configs), result)
    return [results[number] for number in range(len(configs))]


def outcome(config: RunConfig, run: Callable[[], dict[str, Any]]) -> PointResult:
    """The result of a run that returns its summary. Settings that do not work are a result too."""
    with _warnings() as warnings:
        try:
            return PointResult(config, run(), "", tuple(warnings))
        except FAILURES as error:
            return PointResult(config, {}, one_line(error), tuple(warnings))


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
    run: Callable[[int, Callable[[float], None]], PointResult], configs: Sequence[RunConfig],
    processes: int | None = None, on_share: Callable[[float], None] = lambda share: None,
) -> Iterator[tuple[int, PointResult]]:  # fmt: skip
    """Run a point for each of `configs`: simulated ones in `processes`, then the others here, one after the other.
    Yields the number and the result of each as it ends. on_share: see `run_in_processes`."""
    simulated = [number for number, config in enumerate(configs) if config.hardware is not None]
    in_parallel = min(len(simulated), processes or usable_cores())
    if in_parallel < 2:
        simulated = []
    ended = run_in_processes(lambda place, report: run(simulated[place], report), len(simulated), in_parallel, on_share)
    for place, result in ended:
        number = simulated[place]
        if isinstance(result, Lost):
            result = PointResult(configs[number], error=str(result))
        elif isinstance(result, Exception):
            raise result
        yield number, result
    for number in sorted(set(range(len(configs))) - set(simulated)):
        yield number, run(number, on_share)


def one_line(error: BaseException) -> str:
    """The message of an error as one line."""
    return " ".join((str(error) or type(error).__name__).split())


class ShareProgress(Progress):
    """Reports the share of a run's requests that are answered."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report = report

    def stage(self, label: str) -> None:
        pass

    def update(self, completed: int, total: int | None, text: str) -> None:
        self._report(completed / total if total else 0.0)
