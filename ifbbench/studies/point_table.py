"""The table of a sweep, a row a point: as `sweep.csv` and `sweep.json`."""

import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ifbbench.compressed import check_regular
from ifbbench.errors import InputError
from ifbbench.files import replace_file
from ifbbench.rundir.checking import cell
from ifbbench.settings.config import RunConfig, settings
from ifbbench.settings.fields import located

SWEEP_FILE, SWEEP_JSON = "sweep.csv", "sweep.json"
ERROR_COLUMN = "error"

Row = dict[str, Any]
"""One point in the table: its swept settings, `error`, the other settings, and the figures of its summary."""


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


def row_of(
    swept: Mapping[str, Any], config: RunConfig, trace: str, output: str | None, summary: Mapping[str, Any], error: str
) -> Row:
    """The row of a point.

    trace: the source of its requests.
    output: its run directory, if that is kept.
    """
    others = {item.name: getattr(config, item.name) for item in settings() if item.group != "recording"}
    return {**swept, ERROR_COLUMN: error, "trace": trace, **others, **swept, "output": output, **_flatten(summary)}


def _flatten(figures: Mapping[str, Any], prefix: str = "") -> Row:
    """Nested figures with dotted names: `{"ttft_s": {"p99": 1.0}}` gives `ttft_s.p99`. The limits of an interval are
    `low` and `high`."""
    flat: Row = {}
    for name, value in figures.items():
        if prefix.startswith("confidence_interval") and isinstance(value, list):
            value = dict(zip(("low", "high"), value, strict=True))
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Replace a CSV file in one step. A failed point has no figures, so the columns are those of all rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, text.getvalue())


def write_sweep(directory: Path, rows: Sequence[Row]) -> None:
    """Write the table in both forms."""
    write_table(directory / SWEEP_FILE, rows)
    replace_file(directory / SWEEP_JSON, json.dumps(rows, indent=2, allow_nan=False) + "\n")


def read_sweep(directory: Path) -> SweepTable:
    """The table in `directory`. InputError if there is none, if it is not that of a sweep, and for a bad cell."""
    path, rows, columns = directory / SWEEP_FILE, list[Row](), list[str]()
    values: defaultdict[str, dict[str, Any]] = defaultdict(dict)  # of each column, by the text of a cell
    try:
        check_regular(path)
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            columns = next(reader, columns)
            if ERROR_COLUMN not in columns:
                raise InputError(
                    f"{path}: no column `{ERROR_COLUMN}`; expected the table that `ifbbench sweep` writes."
                )
            for texts in reader:
                with located(f"{path}, line {reader.line_num}", "Restore the file, or run the sweep again."):
                    if len(texts) != len(columns):
                        raise InputError(f"{len(texts)} cells; expected {len(columns)}, one for each column.")
                    for column, text in zip(columns, texts, strict=True):
                        if text not in values[column]:
                            values[column][text] = cell(column, text)
                rows.append({column: values[column][text] for column, text in zip(columns, texts, strict=True)})
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: the sweep cannot be read: {reason}. Restore the file, or run again.") from error
    return SweepTable(columns[: columns.index(ERROR_COLUMN)], rows)
