"""Which published measurements constants may be fitted to: those of the sources, GPUs and versions in fit_rows.csv.

All others are judged, and so are disaggregated ones: no constant comes from them, and errors are stated of them alone.
A column of KEYS that is empty stands for rows without such a value. Of a source with many curves, `dtype`, `lengths`
(prompt/output) and `drafts` (`none`, or what proposes them) name those that are fit; where they are empty, all are.
"""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".csv")
KEYS = ("source", "gpu", "engine", "version")
CURVE = ("dtype", "lengths", "drafts")
FIT, JUDGED = "fit", "judged"


@cache
def _fitted() -> Mapping[tuple[str, ...], list[dict[str, str]]]:
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(tuple(row[key] for key in KEYS), []).append(
                {name: row[name] for name in CURVE if row[name]}
            )
    return found


def part_of(row: Mapping[str, Any]) -> str:
    """FIT or JUDGED."""
    if row.get("disaggregated"):
        return JUDGED
    curve = {"dtype": row.get("dtype"), "lengths": row.get("lengths_of"), "drafts": row.get("drafts") or "none"}
    curves = _fitted().get(tuple(str(row.get(key) or "") for key in KEYS), [])
    is_fit = any(all(curve[name] == value for name, value in one.items()) for one in curves)
    return FIT if is_fit else JUDGED
