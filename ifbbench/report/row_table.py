"""Rows of JSON as a table that is gathered column by column, for files that would not fit into memory as objects."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd


def table_of(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], others: frozenset[str]) -> pd.DataFrame:
    """`rows` with `columns` first, each there even where no row has it, so that readers need not ask.

    Columns are numbers but for `others`; those not asked for are what their first value is. Nulls in them (the times of
    a refused request, the blocks of a contiguous cache) become NaN, which every mean leaves out.
    """
    gathered: dict[str, _Numbers | _Objects] = {name: _Objects() if name in others else _Numbers() for name in columns}
    texts: dict[str, str] = {}
    count = 0
    for row in rows:
        for name, value in row.items():
            column = gathered.get(name)
            if column is None:
                column = gathered[name] = _Numbers() if type(value) in (int, float) else _Objects()
            column.put(count, texts.setdefault(value, value) if type(value) is str else value)
        count += 1
    return pd.DataFrame({name: column.padded(count) for name, column in gathered.items()})


class _Numbers:
    """Integers for as long as there is nothing else; eight bytes each."""

    def __init__(self) -> None:
        self._values: array[int] | array[float] = array("q")

    def put(self, row: int, value: Any) -> None:
        """Let `row`, which comes after all those before, have this value."""
        if row > len(self._values):
            self.padded(row)
        try:
            self._values.append(value)
        except (TypeError, OverflowError):
            self._values = array("d", self._values)
            self._values.append(math.nan if value is None else float(value))

    def padded(self, rows: int) -> Any:
        """The column with a value for each of so many rows."""
        missing = rows - len(self._values)
        if missing:
            self._values = array("d", self._values)
            self._values.extend([math.nan] * missing)
        return np.asarray(self._values)


class _Objects:
    """Anything else."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    def put(self, row: int, value: Any) -> None:
        """Let `row`, which comes after all those before, have this value."""
        if row > len(self._values):
            self.padded(row)
        self._values.append(value)

    def padded(self, rows: int) -> Any:
        """The column with a value for each of so many rows."""
        self._values.extend([None] * (rows - len(self._values)))
        return self._values
