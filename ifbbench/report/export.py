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
from msgspec import Raw
from msgspec.json import Encoder

from ifbbench.errors import InputError
from ifbbench.files import new_file
from ifbbench.rundir.figures import figures
from ifbbench.rundir.lines import encode
from ifbbench.rundir.reader import RunData
from ifbbench.rundir.reader import load_run as read_run
from ifbbench.rundir.rows import read_lines
from ifbbench.rundir.run_directory import find_lines

TABLES = ("iterations", "requests", "spans", "trace")
TRACE_FIELDS = ("request_id", "arrival_s")
# Columns with values of several types.
MIXED = ("cause",)
ROWS_AT_ONCE = 10_000
_NEEDS_QUOTES = re.compile('[,"\\r\\n]')
NOTHING, EMPTY = Raw(b""), Raw(b"[]")
_ENCODER = Encoder()
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
            file.write((",".join(map(_text, table)) + "\n").encode())
            for start in range(0, len(table), ROWS_AT_ONCE):
                rows = table.iloc[start : start + ROWS_AT_ONCE]
                file.write(_lines([_cells(rows[name]) for name in rows]))
    else:
        texts = {name: table[name].map(str, na_action="ignore") for name in MIXED if name in table}
        with new_file(path, overwrite=True) as file:
            table.assign(**texts).to_parquet(cast(BinaryIO, file), index=False)
    return path


def _lines(columns: list[list[Any]]) -> bytes:
    """Lines of CSV, of columns of cells as `_cells` returns them: JSON arrays without their brackets, which msgspec
    writes in a third of the time that joining texts takes."""
    encoded = _ENCODER.encode_lines(zip(*columns, strict=True))
    if encoded.count(b"]\n[") == len(columns[0]) - 1:
        return encoded[1:-2].replace(b"]\n[", b"\n") + b"\n"
    return b"".join(encode(row)[1:-1] + b"\n" for row in zip(*columns, strict=True))  # a text has such characters too


def _cells(column: "pd.Series[Any]") -> list[Any]:
    """The cells of a column: numbers that JSON and CSV write in the same way, and texts of CSV (see `_text`)."""
    if column.dtype == object:
        return [value if type(value) is int else _cell(value) for value in column.tolist()]
    numbers = column.to_numpy()
    if numbers.dtype == np.int64 or (
        numbers.dtype == np.float64
        and ((numbers >= 1e-4) & (numbers < 1e16) | (numbers == 0) & ~np.signbit(numbers)).all()
    ):
        return column.tolist()  # msgspec writes these floats as `repr` does: see `number`
    # Few different values: each becomes a text once; -0.0 would become that of 0.0.
    if numbers.dtype != np.float64 or not np.signbit(numbers).any():
        codes, values = pd.factorize(column)
        cells = [*map(_cell, values.tolist()), NOTHING]
        return [cells[code] for code in codes.tolist()]
    return list(map(_cell, column.tolist()))


def _cell(value: Any) -> Raw:
    if value is None:
        return NOTHING
    return EMPTY if value == [] else Raw(_text(value).encode())


def _text(value: Any) -> str:
    """A value as `csv.writer` writes it, and a list as JSON; empty where there is none."""
    if type(value) is float:
        return "" if value != value else repr(value)
    if isinstance(value, list):
        return _quoted(_encode(value))
    return "" if value is None or value != value else _quoted(str(value))


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if _NEEDS_QUOTES.search(text) else text
