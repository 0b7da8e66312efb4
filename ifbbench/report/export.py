"""Run directories as pandas data frames, and these tables as files."""

import csv
import importlib.util
import json
from functools import cached_property
from io import TextIOWrapper
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pandas as pd

from ifbbench.errors import InputError
from ifbbench.files import new_file
from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import RunData, read_lines
from ifbbench.rundir.reader import load_run as read_run
from ifbbench.rundir.run_directory import find_lines

TABLES = ("iterations", "requests", "spans", "trace")
TRACE_FIELDS = ("request_id", "arrival_s")
# Columns with values of several types.
MIXED = ("cause",)
ROWS_AT_ONCE = 10_000


class Run(RunData):
    """A run directory: `run` (run.json) and `summary` as dictionaries; `iterations`, `requests`, `spans` and `trace` as
    data frames, which are read when they are first used. Request ids are texts in them.

    Of a killed run, the figures of `summary` cover what was done, and `partial` is True.
    """

    summary: dict[str, Any]

    @cached_property
    def trace(self) -> pd.DataFrame:
        """A row a request of the trace that was replayed, in its order."""
        table = pd.DataFrame.from_records(list(read_lines(find_lines(self.path, "trace"), TRACE_FIELDS)))
        return table.astype({"request_id": str}) if len(table) else table


def load_run(directory: str | PathLike[str]) -> Run:
    """The one run directory at or below `directory`. InputError if there are several or none, or (for a table: when it
    is first used) if a file is bad."""
    run = read_run(Path(directory))
    return Run(run.path, run.run, figures(run))


def export_tables(run: Run, file_format: str) -> list[Path]:
    """Write every table of `run` into `export` of its directory, over those of an earlier export; returns the files.

    file_format: csv, with lists as JSON, or parquet. InputError if the package that writes Parquet is missing.
    """
    if file_format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise InputError(
            "--format parquet: needs the package pyarrow, which is not installed; install it with "
            "`pip install 'ifbbench[parquet]'`, or use --format csv."
        )
    return [_write(getattr(run, name), run.path / "export" / f"{name}.{file_format}") for name in TABLES]


def _write(table: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        with new_file(path, overwrite=True) as file:
            text = TextIOWrapper(cast(BinaryIO, file), "utf-8", newline="")
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(table)
            for start in range(0, len(table), ROWS_AT_ONCE):
                rows = table.iloc[start : start + ROWS_AT_ONCE]
                writer.writerows(zip(*(_cells(rows[name]) for name in rows), strict=True))
            text.detach()  # which writes the rest, and leaves the file open
    else:
        texts = {name: table[name].map(str, na_action="ignore") for name in MIXED if name in table}
        with new_file(path, overwrite=True) as file:
            table.assign(**texts).to_parquet(cast(BinaryIO, file), index=False)
    return path


def _cells(column: "pd.Series[Any]") -> list[Any]:
    """The values of a column as the writer of CSV takes them: lists as JSON, and None, an empty cell, where there is
    none."""
    if column.dtype == np.int64 and len(column) and (low := column.min()) > column.max() - len(column):
        # Few different numbers: each becomes a text once.
        texts = np.array([str(number) for number in range(low, column.max() + 1)], object)
        cells: list[Any] = texts[column.to_numpy() - low].tolist()
        return cells
    values: list[Any] = column.tolist()
    encode = json.JSONEncoder(separators=(",", ":")).encode
    if column.dtype == object:
        values = [(encode(value) if value else "[]") if isinstance(value, list) else value for value in values]
    return [None if value != value else value for value in values] if column.hasnans else values
