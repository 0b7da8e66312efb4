"""The points of a sweep on a Ray cluster. Needs the extra `ray`."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.studies.points import PointResult, Report, RunPoint, in_one_line, outcome
from ifbbench.studies.sweep import Run
from ifbbench.workload.trace import Trace

MAX_RETRIES = 5


class RayCluster:
    """Simulated runs as tasks of one CPU each on the cluster that RAY_ADDRESS names, else on one that is started here,
    with `processes` CPUs (all if None). Each trace is sent once; the task of a lost worker is run again.

    Run directories are written by the workers: --output must be on a file system that all machines have. InputError if
    Ray is not installed or cannot be reached, or a run is not simulated."""

    def __init__(self, processes: int | None = None) -> None:
        self._processes = processes

    def check(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if run.config.hardware is None:
                raise InputError(
                    f"--executor ray: device {run.config.device} is not simulated, and machines of a "
                    "cluster differ; leave --executor out."
                )
        try:
            import ray
        except ImportError as error:
            raise InputError("--executor ray needs Ray; install it with: pip install 'ifbbench[ray]'.") from error
        self._ray = ray
        self._is_started_here = not ray.is_initialized()
        if self._is_started_here:
            # A cluster that exists knows its number of CPUs.
            cpus = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": self._processes}
            try:
                ray.init(**cpus, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise InputError(f"--executor ray: the cluster cannot be used: {in_one_line(error)}") from error

    def execute(self, run_point: RunPoint, runs: Sequence[Run], report: Report) -> Iterator[tuple[int, PointResult]]:
        try:
            yield from _execute(self._ray, run_point, runs)
        finally:
            if self._is_started_here:
                self._ray.shutdown()


def _execute(ray: Any, run_point: RunPoint, runs: Sequence[Run]) -> Iterator[tuple[int, PointResult]]:
    def task(trace: Trace, config: RunConfig, directory: str) -> PointResult:
        # A worker has a working directory of its own.
        result = outcome(run_point, trace, config.with_values(output=directory), lambda answered: None)
        return replace(result, config=config)

    remote = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(task)
    traces = {id(run.trace): run.trace for run in runs}
    sent = {key: ray.put(trace) for key, trace in traces.items()}
    numbers = {
        remote.remote(sent[id(run.trace)], run.config, str(Path(str(run.config.output)).resolve())): number
        for number, run in enumerate(runs)
    }
    while numbers:
        (ended,), _ = ray.wait(list(numbers), num_returns=1)
        number = numbers.pop(ended)
        try:
            yield number, ray.get(ended)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            yield number, PointResult(runs[number].config, error=in_one_line(error))
