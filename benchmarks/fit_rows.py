"""Which published measurements constants may be fitted to: those of the sources, GPUs and versions in fit_rows.csv.

All others are judged: no constant comes from them, and errors are stated of them alone. A column of the file that is
empty stands for rows without such a value.
"""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".csv")
KEYS = ("source", "gpu", "engine", "version")
FIT, JUDGED = "fit", "judged"


@cache
def _fitted() -> frozenset[tuple[str, ...]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return frozenset(tuple(row[key] for key in KEYS) for row in csv.DictReader(file))


def part_of(row: Mapping[str, Any]) -> str:
    """FIT or JUDGED."""
    return FIT if tuple(str(row.get(key) or "") for key in KEYS) in _fitted() else JUDGED
