"""`ifbbench sweep`: a run for each point of a grid of settings, in parallel if simulated, and the table of all points.

A sweep that was killed goes on where it was: `points.jsonl` has a line for each run that ended, under the hash of its
trace, settings and version.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, convert
from msgspec.json import decode

from ifbbench import __version__
from ifbbench.analysis.confidence import summary_of
from ifbbench.clock import WallClock
from ifbbench.compressed import DamagedFile, check_regular
from ifbbench.errors import InputError
from ifbbench.files import (
    check_new_directory,
    check_not_input,
    is_part,
    part_beside,
    replace_file,
    sole_writer,
    writing,
)
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.replay.run import run_trace
from ifbbench.report.outputs import write_outputs
from ifbbench.rundir.checking import check_summary
from ifbbench.rundir.reader import load_run
from ifbbench.rundir.rows import read_lines
from ifbbench.rundir.run_directory import RESULTS, SERVER_LOGS, SWEEP_CONFIG, git_revision, say_number
from ifbbench.settings.config import RunConfig, settings
from ifbbench.settings.devices import SIMULATED
from ifbbench.settings.groups.recording import SIDE_OUTPUTS
from ifbbench.studies.grid import TRACE, Point, point_label
from ifbbench.studies.point_table import SWEEP_FILE, SWEEP_JSON, Row, read_sweep, row_of, write_sweep
from ifbbench.studies.points import PointResult, Report, RunPoint, prove, run_all, summarise
from ifbbench.workload.load import in_memory, read_source, reading_of
from ifbbench.workload.trace import Trace

POINTS_FILE = "points.jsonl"
# With more runs than these, only summaries are kept unless run directories are asked for: those of an hour of traffic
# have 100 MB each.
MAX_KEPT_RUNS = 16
# While points end, the table is written at most so often, and for at most this share of the time.
TABLE_INTERVAL_S, MAX_TABLE_SHARE = 1.0, 0.02

ConfigOf = Callable[[Point], RunConfig]
"""The settings of a point."""

OnPoint = Callable[[int, int, str, str], None]
"""Called after each run: number of runs that have ended, number of all, the label of the run, and its error or ''."""


def record(trace: Trace, config: RunConfig, progress: Progress) -> tuple[dict[str, Any], None]:
    """Run a point into its run directory, in place of what a killed run left there."""
    remove_runs([Path(str(config.output))])

    def write(directory: Path) -> None:
        if config.result_format is not None or config.iteration_stats_format in SERVER_LOGS:
            write_outputs(load_run(directory), config)

    return run_trace(trace, config, progress, owns_process=True, on_recorded=write).summary, None


KEEP: dict[str, RunPoint] = {"run": record, "summary": partial(summarise, owns_process=True)}
"""What is kept of each run, and the function that runs a point so."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a sweep.

    label: unique, and the name of its directory.
    config: settings with its run directory.
    key: the hash of trace, settings and version.
    """

    label: str
    trace: Trace
    config: RunConfig
    key: str


class Executor(Protocol):
    """Where runs are executed."""

    def check(self, runs: Sequence[Run]) -> None:
        """InputError if it cannot execute them."""
        ...

    def execute(self, run_point: RunPoint, runs: Sequence[Run], report: Report) -> Iterator[tuple[int, PointResult]]:
        """Yield the number and the result of each run as it ends. report: takes the number of requests that are
        answered in those that are running."""
        ...


class LocalProcesses:
    """Simulated runs in parallel processes of this machine, the others one after the other.

    processes: all usable cores if None.
    """

    def __init__(self, processes: int | None = None) -> None:
        self._processes = processes

    def check(self, runs: Sequence[Run]) -> None:
        pass

    def execute(self, run_point: RunPoint, runs: Sequence[Run], report: Report) -> Iterator[tuple[int, PointResult]]:
        return run_all(run_point, [(run.trace, run.config) for run in runs], self._processes, report)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep did.

    rows: rows of all points.
    failed: number of points with an error or with failed requests.
    resumed: number of runs that had ended before.
    warnings: warnings of points, by label.
    was_removed: whether the directory was removed meanwhile, or `points.jsonl`.
    """

    directory: Path
    rows: Sequence[Row]
    failed: int
    resumed: int = 0
    warnings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    was_removed: bool = False


def run_sweep(
    source: str | None,
    base: RunConfig,
    points: Sequence[Point],
    on_point: OnPoint = lambda *point: None,
    *,
    repeats: int = 1,
    keep: str | None = None,
    executor: Executor | None = None,
    progress: Progress = NO_PROGRESS,
    described: str = "",
    config_of: ConfigOf | None = None,
) -> SweepResult:
    """Run every point, with the other settings from `base`, and write the table.

    repeats: runs of each point, with the seeds `seed`, `seed` + 1, …; its row has the means.
    keep: one of KEEP; what MAX_KEPT_RUNS says if None.
    described: content of `sweep.yaml`.
    config_of: where other settings of a point than its own depend on it. The table is written while points end; a point
        that failed is in it with its error.

    InputError, before anything is run, if a trace cannot be read, results would be overwritten, no point can be run or
    all would write the same file.
    """
    _check_settings(source, base, points, repeats)
    keep = keep or ("run" if len(points) * repeats <= MAX_KEPT_RUNS else "summary")
    configs = list(map(config_of or partial(_with_point, base), points))
    runs, executor = _runs(source, configs, points, repeats, progress), executor or LocalProcesses()
    executor.check(runs)
    identity = hashlib.sha256(" ".join(run.key for run in runs).encode()).hexdigest()
    directory = _directory(base, list(points[0]), identity)
    runs = [replace(run, config=run.config.with_values(output=str(directory / run.label))) for run in runs]
    files = [SWEEP_FILE, SWEEP_JSON, POINTS_FILE]
    if replaces_config := bool(described) and not _is_described(directory, identity, described):
        files.append(SWEEP_CONFIG)
    check_new_directory(directory, "--output", files)
    _check_replaceable([directory / name for name in (*files, SWEEP_CONFIG)])
    prove([(run.trace, run.config) for run in runs], replaces=base.overwrite and directory.exists())
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with sole_writer(directory):
        ended = Ended(directory, identity, [point_label(point) for point in points], base.overwrite)
        if replaces_config:
            replace_file(directory / SWEEP_CONFIG, described)
        waiting = [run for run in runs if not ended.has(run, is_recorded=keep == "run")]
        resumed, total = len(runs) - len(waiting), sum(len(run.trace) for run in waiting)
        answered = running = 0
        number_ended, clock, next_table_s = resumed, WallClock(), 0.0
        errors: dict[str, str] = {}

        def write() -> list[Row]:
            found = (
                _row(point, runs[number * repeats :][:repeats], ended, errors, keep == "run")
                for number, point in enumerate(points)
            )
            rows = [row for row in found if row is not None]
            write_sweep(directory, rows)
            return rows

        def report(now_running: int) -> None:
            nonlocal running
            running = now_running
            progress.update(min(answered + running, total), total, f"{number_ended:,} of {len(runs):,} runs")

        progress.stage("requests")
        report(0)
        try:
            for number, result in executor.execute(KEEP[keep], waiting, report):
                run = waiting[number]
                number_ended, answered = number_ended + 1, answered + len(run.trace)
                if result.error:
                    errors[run.label] = result.error
                else:
                    ended.add(run, result)
                if (begun_s := clock.now()) >= next_table_s:
                    write()
                    next_table_s = clock.now() + max(TABLE_INTERVAL_S, (clock.now() - begun_s) / MAX_TABLE_SHARE)
                report(running)
                on_point(number_ended, len(runs), run.label, result.error)
        except KeyboardInterrupt as interrupt:
            kept = f"{number_ended} of {len(runs)} runs are kept in {directory}"
            interrupt.add_note(f"{kept}; the same command goes on there.")
            raise
        finally:
            ended.restore()
            table = write()
        failed = sum(bool(row["error"] or row.get("requests.failed")) for row in table)
        return SweepResult(directory, table, failed, resumed, ended.warnings(runs), ended.was_removed)


def _check_settings(source: str | None, base: RunConfig, points: Sequence[Point], repeats: int) -> None:
    """InputError for settings that a sweep cannot have, or that exclude each other."""
    for name in SIDE_OUTPUTS:
        if getattr(base, name) is not None:
            raise InputError(f"--{name} names one file, but a sweep makes many runs; use it with `ifbbench run`.")
    for name, other in ((TRACE, f"TRACE ({source})" if source else ""), ("seed", "--repeat" if repeats > 1 else "")):
        if name in points[0] and other:
            raise InputError(f"--over {name} and {other} exclude each other; leave out one of them.")


def _with_point(base: RunConfig, point: Point) -> RunConfig:
    return base.with_values(**{name: value for name, value in point.items() if name != TRACE})


def _runs(
    source: str | None, configs: Sequence[RunConfig], points: Sequence[Point], repeats: int, progress: Progress
) -> list[Run]:
    """The runs of all points, each trace read once. configs: of each point."""
    traces: dict[tuple[Any, ...], Trace] = {}
    runs = []
    for point, of_point in zip(points, configs, strict=True):
        config = of_point.with_values(output=None)
        for repeat in range(repeats):
            one, name = config.with_values(seed=config.seed + repeat), point.get(TRACE, source)
            reading = reading_of(name, one)
            if reading not in traces:
                traces[reading] = in_memory(read_source(name, one, progress))
            label = point_label(point) if repeats == 1 else f"{point_label(point)}/repeat-{repeat + 1}"
            runs.append(Run(label, traces[reading], one, _key(traces[reading], one)))
    return runs


def _key(trace: Trace, config: RunConfig) -> str:
    """The hash of all that the results depend on. Of files that settings name, the size and the time of change."""
    values: dict[str, Any] = {item.name: getattr(config, item.name) for item in settings() if item.group != "recording"}
    paths = [Path(value.removeprefix(SIMULATED)) for value in values.values() if isinstance(value, str)]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()]
    facts = [values, files, config.enable_steady_state, trace.sha256, len(trace), __version__, git_revision()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _directory(base: RunConfig, over: Sequence[str], identity: str) -> Path:
    """The directory asked for; else results/sweep-<settings>, with a number where that holds another sweep."""
    if base.output:
        return Path(base.output)
    name = f"sweep-{'-'.join(over)}"
    directories = (RESULTS / (name if number == 1 else f"{name}-{number}") for number in count(1))
    found = next(one for one in directories if base.overwrite or not one.exists() or identity_in(one) == identity)
    return say_number(RESULTS / name, found)


def _check_replaceable(paths: Sequence[Path]) -> None:
    """InputError if something other than a file is at one of `paths`: writing to a pipe would wait for a reader."""
    for path in paths:
        try:
            if path.exists():
                check_regular(path)
        except (OSError, DamagedFile) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{path}: cannot be replaced ({reason}); remove it, or give another --output.") from error


def _is_described(directory: Path, identity: str, described: str) -> bool:
    """Whether `sweep.yaml` in `directory` asks for this sweep: it may be the config file that the command reads."""
    path = directory / SWEEP_CONFIG
    try:
        return path.is_file() and (identity_in(directory) == identity or path.read_text(encoding="utf-8") == described)
    except (OSError, ValueError):
        return False


def _row(point: Point, runs: Sequence[Run], ended: "Ended", errors: Mapping[str, str], is_recorded: bool) -> Row | None:
    """The row of a point, from its runs that have ended; None if there is none."""
    summaries = [summary for run in runs if (summary := ended.summaries.get(run.key)) is not None]
    error = next((errors[run.label] for run in runs if run.label in errors), "")
    if not summaries and not error:
        return None
    summary = summaries[0] if len(runs) == 1 and summaries else {}
    output = Path(str(runs[0].config.output))
    if len(runs) > 1:
        output, summary = output.parent, summary_of(summaries, len(runs)) if summaries else {}
    kept = str(output) if is_recorded else None
    return row_of(point, runs[0].config, runs[0].trace.source, kept, summary, error)


class Ended:
    """The runs of a sweep that have ended, as `points.jsonl` keeps them: a line that identifies the sweep, then a line
    for each run.

    Opening it makes the directory ready: what a sweep of another identity, or with `overwrite` any sweep, left there is
    deleted. InputError if that is not allowed.

    summaries: summaries by the key of the run.
    was_removed: whether the file was removed since, and is written again.
    """

    def __init__(self, directory: Path, identity: str, labels: Sequence[str], overwrite: bool) -> None:
        self.summaries: dict[str, dict[str, Any]] = {}
        self._warnings: dict[str, list[str]] = {}
        self._path = directory / POINTS_FILE
        self.was_removed = False
        self._lines: list[Mapping[str, Any]] = [{"sweep": identity, "version": __version__, "points": labels}]
        if overwrite or identity_in(directory) != identity:
            check_free(directory, overwrite)
            begun = _begun_in(directory)
            names = [Path(label).name for label in begun.points] if begun else []
            if begun is None and (directory / SWEEP_FILE).exists():  # it may not be the table of a sweep
                names = read_sweep(directory).run_names
            remove_runs(directory / name for name in names if "=" in name)
            for name in (POINTS_FILE, SWEEP_FILE, SWEEP_JSON):
                (directory / name).unlink(missing_ok=True)
            self._write()
            return
        self._lines = list(read_lines(self._path, ()))
        for number, line in enumerate(self._lines[1:], start=2):
            try:
                found = convert(line, _EndedRun)
                check_summary(found.summary)
            except ValueError as error:
                raise InputError(
                    f"{self._path}, line {number}: {error}; expected a run as `ifbbench sweep` writes it. "
                    "Remove the line to repeat the run, or add --overwrite."
                ) from None
            self.summaries[found.key], self._warnings[found.key] = found.summary, found.warnings
        self._write()  # without a line that was cut off, so that the next one begins on a line of its own

    def has(self, run: Run, is_recorded: bool) -> bool:
        """Whether a run has ended. is_recorded: and its run directory is there."""
        is_there = not is_recorded or (Path(str(run.config.output)) / "summary.json").is_file()
        return run.key in self.summaries and is_there

    def add(self, run: Run, result: PointResult) -> None:
        """Keep the result of a run that has ended."""
        self.summaries[run.key], self._warnings[run.key] = result.summary, list(result.warnings)
        self._append({"key": run.key, "run": run.label, "summary": result.summary, "warnings": result.warnings})

    def warnings(self, runs: Iterable[Run]) -> dict[str, list[str]]:
        """The warnings of runs, by their labels."""
        return {run.label: found for run in runs if (found := self._warnings.get(run.key))}

    def restore(self) -> None:
        """Write the file again if it was removed."""
        if not self._path.exists():
            self.was_removed = True
            self._write()

    def _append(self, line: Mapping[str, Any]) -> None:
        self.restore()
        self._lines.append(line)
        with writing(self._path), self._path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def _write(self) -> None:
        replace_file(self._path, "".join(json.dumps(line) + "\n" for line in self._lines))


class _Begun(Struct):
    """The first line of `points.jsonl`.

    sweep: its identity.
    points: the labels of all points.
    """

    sweep: str
    points: list[str]


class _EndedRun(Struct):
    """A further line of `points.jsonl`."""

    key: str
    summary: dict[str, Any]
    warnings: list[str]


def identity_in(directory: Path) -> str | None:
    """The identity of the sweep in `directory`; None if it holds none."""
    begun = _begun_in(directory)
    return begun.sweep if begun else None


def _begun_in(directory: Path) -> _Begun | None:
    """The first line of `points.jsonl`; None if it has none, or another content."""
    path = directory / POINTS_FILE
    with suppress(OSError, ValueError, RecursionError):
        check_regular(path)
        with path.open("rb") as file:
            return decode(file.readline(), type=_Begun)
    return None


def check_free(directory: Path, overwrite: bool) -> None:
    """InputError if `directory` is not empty and `overwrite` is off. Nothing is deleted later: it may hold other runs
    too."""
    if directory.exists() and not all(map(is_part, directory.iterdir())) and not overwrite:
        raise InputError(f"{directory} already holds results; choose another --output, or replace it by --overwrite.")


def remove_runs(paths: Iterable[Path]) -> None:
    """Delete those of `paths` that are run directories, or directories of repeats. InputError, before anything is
    deleted, if the command reads a file in one of them."""
    runs = [
        path
        for path in paths
        if not path.is_symlink() and ((path / "run.json").is_file() or any(path.glob("repeat-*/run.json")))
    ]
    for file in (file for path in runs for file in path.rglob("*")):
        check_not_input(file, "--output")
    for path in runs:
        part = part_beside(path)
        path.rename(part)  # it is there as a whole, or not at all
        shutil.rmtree(part)
