"""Many runs, one after the other: each point of a grid of settings in a directory of its own, and a table of all."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ifbbench.config import RunConfig
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.recording.run_directory import RESULTS
from ifbbench.sweep.grid import Axis, Point, grid, point_label
from ifbbench.sweep.table import ERROR_COLUMN, SWEEP_FILE, Row, make_row, read_sweep, write_sweep
from ifbbench.workload.load import load_trace


class FinishedRun(Protocol):
    """What a sweep reads of a run's result."""

    @property
    def summary(self) -> Mapping[str, Any]: ...

    @property
    def failed(self) -> int: ...


RunPoint = Callable[[str | None, RunConfig], FinishedRun]
"""Runs one point: the trace and the point's settings, its `output` among them."""

OnPoint = Callable[[int, int, str, str], None]
"""Told of each point as it ends: how many have ended, of how many, the point's label, and its error or ''."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Where a sweep's results are, and how many of its points failed or had failed requests."""

    directory: Path
    points: int
    failed: int


def run_sweep(
    source: str | None, base: RunConfig, axes: Sequence[Axis], run_point: RunPoint, on_point: OnPoint
) -> SweepResult:
    """Run every point of the grid of `axes`, the other settings being those of `base`.

    `sweep.csv` holds each point as soon as it has ended, a failed one with its error. InputError, before anything is
    run, if the trace is missing, results would be overwritten, or all points would write one and the same file.
    """
    over = [axis.name for axis in axes]
    directory = Path(base.output) if base.output else RESULTS / f"sweep-{'-'.join(over)}"
    _check_input(source, base)
    points = grid(axes)
    configs = [_point_config(base, point, directory) for point in points]
    _prepare(directory, base.overwrite)
    rows: list[Row] = []
    failed = 0
    for point, config in zip(points, configs, strict=True):
        try:
            row, is_failed = _run_one(source, config, over, run_point)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"{len(rows)} of {len(points)} points are kept in {directory}.")
            raise
        rows.append(row)
        failed += is_failed
        write_sweep(directory, rows)
        on_point(len(rows), len(points), point_label(point), row[ERROR_COLUMN])
    return SweepResult(directory, len(points), failed)


def _check_input(source: str | None, base: RunConfig) -> None:
    load_trace(source, base)  # A bad trace would fail at every point; better to say so once, before the first.
    for name in ("output_csv", "responses_json"):
        if getattr(base, name) is not None:
            raise InputError(f"--{name} names one file, but a sweep makes many runs; use it with `ifbbench run`.")


def _point_config(base: RunConfig, point: Point, directory: Path) -> RunConfig:
    return base.with_values(**point, output=str(directory / point_label(point)))


def _prepare(directory: Path, overwrite: bool) -> None:
    """Make `directory`. With `overwrite`, delete the table of an earlier sweep and the runs that this table names.

    Nothing else is deleted: `directory` may hold other runs too. InputError if it is not empty and `overwrite` is off,
    or its sweep.csv is not the table of a sweep.
    """
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is not a directory; choose another --output.")
    if directory.exists() and any(directory.iterdir()) and not overwrite:
        raise InputError(f"{directory} already holds results; choose another --output, or replace it by --overwrite.")
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / SWEEP_FILE).exists():
        return
    runs = [directory / name for name in read_sweep(directory).run_names]
    (directory / SWEEP_FILE).unlink()
    for run in runs:
        if (run / "run.json").is_file() and not run.is_symlink():
            shutil.rmtree(run)


def _run_one(source: str | None, config: RunConfig, over: Sequence[str], run_point: RunPoint) -> tuple[Row, bool]:
    """The point's row, and whether the point failed. A setting that does not work is a result of the sweep too."""
    try:
        finished = run_point(source, config)
    except (IfbbenchError, MemoryError, RuntimeError) as error:  # torch runs out of memory with a RuntimeError
        message = str(error) or type(error).__name__
        return make_row(config, over, {}, error=" ".join(message.split())), True
    return make_row(config, over, finished.summary), finished.failed > 0
