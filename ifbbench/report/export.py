"""Run directories as pandas data frames, and these tables as files."""

import importlib.util
import json
import re
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pandas as pd

from ifbbench.errors import InputError
from ifbbench.files import new_file
from ifbbench.rundir.figures import figures
from ifbbench.rundir.lines import encode
from ifbbench.rundir.reader import RunData, read_lines
from ifbbench.rundir.reader import load_run as read_run
from ifbbench.rundir.run_directory import find_lines

TABLES = ("iterations", "requests", "spans", "trace")
TRACE_FIELDS = ("request_id", "arrival_s")
# Columns with values of several types.
MIXED = ("cause",)
ROWS_AT_ONCE = 10_000
_NEEDS_QUOTES = re.compile('[,"\\r\\n]')
_encode = json.JSONEncoder(separators=(",", ":")).encode


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
            file.write((",".join(map(_cell, table)) + "\n").encode())
            for start in range(0, len(table), ROWS_AT_ONCE):
                rows = table.iloc[start : start + ROWS_AT_ONCE]
                lines = map(",".join, zip(*(_cells(rows[name]) for name in rows), strict=True))
                file.write(("\n".join(lines) + "\n").encode())
    else:
        texts = {name: table[name].map(str, na_action="ignore") for name in MIXED if name in table}
        with new_file(path, overwrite=True) as file:
            table.assign(**texts).to_parquet(cast(BinaryIO, file), index=False)
    return path


def _cells(column: "pd.Series[Any]") -> list[str]:
    """The cells of a column in CSV: lists as JSON, empty where there is no value."""
    if column.dtype == object:
        return ["" if value is None else _cell(value) for value in column.tolist()]
    if column.dtype == np.float64 and ((column >= 1e-4) & (column < 1e16) | (column == 0) & ~np.signbit(column)).all():
        return encode(column.tolist())[1:-1].decode().split(",")  # as `repr` writes them: see `number`
    numbers = column.to_numpy() if column.dtype in (np.int64, np.float64) else None
    # Few different values: each becomes a text once; -0.0 would become that of 0.0.
    if numbers is None or not np.signbit(numbers).any():
        codes, values = pd.factorize(column)
        cells: list[str] = np.array([*map(_cell, values.tolist()), ""], object)[codes].tolist()
        return cells
    return list(map(_cell, numbers.tolist()))


def _cell(value: Any) -> str:
    """A value as `csv.writer` writes it, and a list as JSON."""
    if type(value) is float:
        return "" if value != value else repr(value)
    if type(value) is int:
        return str(value)
    if isinstance(value, list):
        return _quoted(_encode(value)) if value else "[]"
    return "" if value is None or value != value else _quoted(str(value))


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if _NEEDS_QUOTES.search(text) else text
