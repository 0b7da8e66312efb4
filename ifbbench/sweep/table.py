"""`sweep.csv`: a row a point. First the swept settings, then `error`, then the other settings and the figures."""

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ifbbench.config import RunConfig, settings
from ifbbench.errors import InputError

SWEEP_FILE = "sweep.csv"
ERROR_COLUMN = "error"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SweepTable:
    """What `sweep.csv` says: the swept settings' names, and the rows, each with every column (None where empty)."""

    over: list[str]
    rows: list[Row]

    @property
    def finished(self) -> list[Row]:
        """The rows of points that have figures."""
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
        """A table with one column that tells its points apart, and that column's name; a grid's joins its settings."""
        if len(self.over) == 1:
            return self, self.over[0]
        axis = ", ".join(self.over)
        rows = [{**row, axis: ", ".join(str(row[name]) for name in self.over)} for row in self.rows]
        return SweepTable(self.over, rows), axis


def make_row(config: RunConfig, over: Sequence[str], summary: Mapping[str, Any], error: str = "") -> Row:
    """The row of one point: its settings and the figures of its `summary.json`, or why there are none."""
    values = config.as_dict()
    swept = {name: values[name] for name in over}
    return {**swept, ERROR_COLUMN: error, **_other_settings(values), **flatten(summary)}


def flatten(figures: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures under names joined with dots: `{"ttft_s": {"p99": 1.0}}` gives `ttft_s.p99`."""
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def write_sweep(directory: Path, rows: Sequence[Row]) -> None:
    """Write `sweep.csv` anew, in one step, so that a reader or a crash never meets half a table.

    Points may differ in their figures (a failed one has none), so the columns are known only from all rows.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    unfinished = directory / f".{SWEEP_FILE}.part"
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(unfinished, directory / SWEEP_FILE)


def read_sweep(directory: Path) -> SweepTable:
    """The table in `directory`; InputError if there is none or it is not a sweep's."""
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


def _other_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    recorded = [setting.name for setting in settings() if setting.group != "recording"]
    return {name: values[name] for name in [*recorded, "output"]}


def _value(text: str) -> Any:
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
