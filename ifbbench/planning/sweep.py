"""`ifbbench sweep`: one run for each point of a grid of settings, and `sweep.csv`, the table of all points."""

import csv
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ifbbench.config import SIDE_OUTPUTS, RunConfig, settings
from ifbbench.engine.policies import find_policy
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.recording.run_directory import RESULTS
from ifbbench.replay.run import RunResult
from ifbbench.settings import setting
from ifbbench.workload.load import load_trace

SWEEP_FILE = "sweep.csv"
ERROR_COLUMN = "error"

Point = dict[str, Any]
"""Setting name to its value at one point of the grid."""

Row = dict[str, Any]
"""One point in the table: its swept settings, `error`, the other settings, and the figures of its summary."""


Axes = Mapping[str, Sequence[Any]]
"""The swept settings by name, and the values of each."""


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """The setting and its values in `KEY=V1,V2,…`, where KEY is a setting's name or alias.

    InputError for another form, an unknown setting, one that cannot be swept, and a value that is empty, out of range
    or given twice.
    """
    key, equals, listed = (part.strip() for part in text.partition("="))
    if not key or not equals or not listed:
        raise InputError(f"--over {text}: expected KEY=V1,V2,… such as max_batch_size=8,16,32.")
    swept = setting(key)
    if swept.group == "recording":
        raise InputError(f"--over {text}: {swept.name} says where results go; sweep a setting that changes them.")
    values: list[Any] = []
    for value_text in (part.strip() for part in listed.split(",")):
        if not value_text:
            raise InputError(f"--over {text}: a value is empty; give one between all commas.")
        value = swept.check(value_text)
        if swept.name == "policy":
            find_policy(value)
        if value in values:
            raise InputError(f"--over {text}: {value_text} is there twice; give each value once.")
        values.append(value)
    return swept.name, values


def parse_axes(texts: Sequence[str]) -> Axes:
    """The axes in order. InputError as in `parse_axis`, and for two axes of one setting."""
    axes = [parse_axis(text) for text in texts]
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--over {name} is given {names.count(name)} times; list all its values in one --over.")
    return dict(axes)


def grid(axes: Axes) -> list[Point]:
    """Every combination of values; the last axis changes fastest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def point_label(point: Point) -> str:
    """`key=value[,…]`, unique for each point and valid as the name of a directory."""
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in point.items()}
    return ",".join(f"{name}={quote(text, safe='')}" for name, text in texts.items())


@dataclass(frozen=True, slots=True)
class SweepTable:
    """The contents of `sweep.csv`: names of the swept settings, and rows with every column (None where empty)."""

    over: list[str]
    rows: list[Row]

    @property
    def finished(self) -> list[Row]:
        """The rows of points without an error."""
        return [row for row in self.rows if not row[ERROR_COLUMN]]

    @property
    def run_names(self) -> list[str]:
        """Names of the run directories, each directly below the sweep's own directory.

        Only the last part of `output` counts, because a sweep's directory may have been moved, and only a name that a
        point can have (`key=value`), so that no row names a directory elsewhere.
        """
        names = [Path(str(row.get("output") or "")).name for row in self.rows]
        return [name for name in names if "=" in name]

    def with_one_axis(self) -> tuple["SweepTable", str]:
        """A table in which one column identifies a point, and the name of that column. Several settings are joined."""
        if len(self.over) == 1:
            return self, self.over[0]
        axis = ", ".join(self.over)
        rows = [{**row, axis: ", ".join(str(row[name]) for name in self.over)} for row in self.rows]
        return SweepTable(self.over, rows), axis


def read_sweep(directory: Path) -> SweepTable:
    """The table in `directory`. InputError if there is none or it is not that of a sweep."""
    path = directory / SWEEP_FILE
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [{name: _value(text) for name, text in row.items()} for row in reader]
            columns = list(reader.fieldnames or [])
    except OSError as error:
        raise InputError(f"{path}: the sweep cannot be read: {error.strerror}.") from error
    if ERROR_COLUMN not in columns:
        raise InputError(f"{path}: no column `{ERROR_COLUMN}`; expected the table that `ifbbench sweep` writes.")
    return SweepTable(columns[: columns.index(ERROR_COLUMN)], rows)


def _value(text: str) -> Any:
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


RunPoint = Callable[[str | None, RunConfig], RunResult]
"""Runs one point, given the trace and the settings of the point, `output` included."""

OnPoint = Callable[[int, int, str, str], None]
"""Called after each point: number of finished points, number of all points, the point's label, and its error or ''."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """failed: points with an error or with failed requests."""

    directory: Path
    points: int
    failed: int


def run_sweep(
    source: str | None, base: RunConfig, axes: Axes, run_point: RunPoint, on_point: OnPoint
) -> SweepResult:
    """Run every point of the grid of `axes`, with the other settings from `base`.

    `sweep.csv` is written after each point; a point that failed is in it with its error. InputError, before anything is
    run, if the trace cannot be read, results would be overwritten, or all points would write the same file.
    """
    # A bad trace would fail at every point; report it once.
    load_trace(source, base)
    for name in SIDE_OUTPUTS:
        if getattr(base, name) is not None:
            raise InputError(f"--{name} names one file, but a sweep makes many runs; use it with `ifbbench run`.")
    over = list(axes)
    directory = Path(base.output) if base.output else RESULTS / f"sweep-{'-'.join(over)}"
    points = grid(axes)
    configs = [base.with_values(**point, output=str(directory / point_label(point))) for point in points]
    prepare_directory(directory, base.overwrite)
    if (directory / SWEEP_FILE).exists():
        runs = [directory / name for name in read_sweep(directory).run_names]
        (directory / SWEEP_FILE).unlink()
        remove_runs(runs)
    rows: list[Row] = []
    failed = 0
    for point, config in zip(points, configs, strict=True):
        try:
            row, is_failed = run_one(source, config, over, run_point)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"{len(rows)} of {len(points)} points are kept in {directory}.")
            raise
        rows.append(row)
        failed += is_failed
        write_table(directory / SWEEP_FILE, rows)
        on_point(len(rows), len(points), point_label(point), row[ERROR_COLUMN])
    return SweepResult(directory, len(points), failed)


def prepare_directory(directory: Path, overwrite: bool) -> None:
    """Make `directory`, for several runs. InputError if it is not empty and `overwrite` is off.

    Nothing is deleted: `directory` may hold other runs too."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is not a directory; choose another --output.")
    if directory.exists() and any(directory.iterdir()) and not overwrite:
        raise InputError(f"{directory} already holds results; choose another --output, or replace it by --overwrite.")
    directory.mkdir(parents=True, exist_ok=True)


def remove_runs(paths: Iterable[Path]) -> None:
    """Delete those of `paths` that are run directories."""
    for path in paths:
        if (path / "run.json").is_file() and not path.is_symlink():
            shutil.rmtree(path)


def run_one(source: str | None, config: RunConfig, over: Sequence[str], run_point: RunPoint) -> tuple[Row, bool]:
    """The row of a point, and whether the point failed. Settings that do not work are a result of the sweep too."""
    summary: Mapping[str, Any] = {}
    message, is_failed = "", True
    try:
        finished = run_point(source, config)
        summary, is_failed = finished.summary, finished.failed > 0
    except (IfbbenchError, MemoryError, RuntimeError) as error:  # torch runs out of memory with a RuntimeError
        message = " ".join((str(error) or type(error).__name__).split())
    values = config.as_dict()
    swept = {name: values[name] for name in over}
    others = {item.name: values[item.name] for item in settings() if item.group != "recording"}
    return {**swept, ERROR_COLUMN: message, **others, "output": config.output, **_flatten(summary)}, is_failed


def _flatten(figures: Mapping[str, Any], prefix: str = "") -> Row:
    """Nested figures with dotted names: `{"ttft_s": {"p99": 1.0}}` gives `ttft_s.p99`."""
    flat: Row = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Replace a CSV file atomically. A failed point has no figures, so the columns are those of all rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    partial = path.with_name(f".{path.name}.part")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)
