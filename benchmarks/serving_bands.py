"""Bands of the expected error: from the errors of published rows, by engine, GPU and load."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import ceil
from typing import Any

import numpy as np

from benchmarks.fit_rows import FIT, part_of
from benchmarks.serving_rows import Comparison, Row, clients_of, degree_of, engine_name
from ifbbench.simulated.expected_error import BANDS, COVERAGE, LOADS, NO_ENGINE, limit_of

# Bands are made for a larger share of the rows that they come from, because other rows lie further out.
MADE_FOR = 0.88
# With fewer rows of a load, the band of all loads is taken.
MIN_ROWS = 10
FIGURES = {"ttft": "ttft_s", "itl": "itl_s", "tpot": "itl_s", "throughput": "output_throughput_tokens_per_s"}
ABOUT = (
    "Measured over predicted, less 1: the low and high end of the part that `coverage` of the rows are in, by engine "
    "overhead, GPU and number of requests at a time. No constant was fitted to these rows. Made by python -m "
    "benchmarks.serving FILE --bands."
)
Setup = dict[str, Any]


def bands(comparisons: Iterable[Comparison]) -> list[Setup]:
    """The entries of expected_errors.json for rows with an engine overhead: setups with at least MIN_ROWS rows."""
    setups: defaultdict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for one in comparisons:
        if (engine := engine_name(one.row)) is not None:
            setups[engine, one.row["gpu"]].append(one)
    return [_setup(engine, gpu, group) for (engine, gpu), group in sorted(setups.items()) if _count(group) >= MIN_ROWS]


def _setup(engine: str, gpu: str, group: Sequence[Comparison]) -> Setup:
    rows = [one.row for one in group]
    by_load = {limit: [one for one in group if load(one) == limit] for limit in LOADS}
    return {
        "engine": engine,
        "hardware": gpu,
        "sources": sorted({f"{row['source']}: {_version(row)}, {row['model']}" for row in rows}),
        "models": sorted({row["model"] for row in rows}),
        "dtypes": sorted({row["dtype"] for row in rows}),
        "tp_sizes": sorted({degree_of(row) for row in rows}),
        "pp_sizes": [1],
        "loads": [{"up_to": limit, **_bands(part)} for limit, part in by_load.items() if _count(part) >= MIN_ROWS],
        "all_loads": _bands(group),
    }


def _version(row: Row) -> str:
    return f"{row['engine']} {row.get('version') or ''}".strip()


def load(one: Comparison) -> int | None:
    """The entry of LOADS for a row: its clients, or by Little's law what a rate keeps running."""
    row = one.row
    if clients := clients_of(row):
        return limit_of(clients)
    if row.get("rate") and (row.get("e2e_ms") or {}).get("mean"):
        return limit_of(row["rate"] * row["e2e_ms"]["mean"] / 1000)
    return limit_of(row.get("num_requests") or 1)


def _count(group: Iterable[Comparison]) -> int:
    return len({json.dumps(one.row, sort_keys=True) for one in group})


def _bands(group: Sequence[Comparison]) -> dict[str, Any]:
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for one in group:
        if (key := FIGURES.get(one.metric)) is not None:
            ratios[key].append(one.measured / one.predicted - 1)
    found = {key: band(ratios[key]) for key in dict.fromkeys(FIGURES.values()) if ratios[key]}
    return {"rows": _count(group), "bands": found}


def band(ratios: Sequence[float]) -> tuple[float, float]:
    """The range that a further value of the same kind is in with a probability of MADE_FOR: between two of the ordered
    values, further out the fewer there are (a conformal interval)."""
    ordered = np.sort(ratios)
    outside = min(int((len(ordered) + 1) * (1 - MADE_FOR) / 2), len(ordered) // 2)
    first = max(outside - 1, 0)
    return round(float(ordered[first]), 3), round(float(ordered[len(ordered) - 1 - first]), 3)


def coverage(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """How many judged rows are inside the bands of fit rows, by metric, and how wide these are relative
    to the narrowest range that has COVERAGE of the judged rows (medians over setups and loads)."""
    setups = bands(one for one in comparisons if part_of(one.row) == FIT)
    inside: defaultdict[str, list[bool]] = defaultdict(list)
    cells: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    widths: dict[tuple[str, int], float] = {}
    for one in comparisons:
        key = FIGURES.get(one.metric, "")
        if part_of(one.row) == FIT or (part := _part(setups, one.row, load(one))) is None or key not in part["bands"]:
            continue
        low, high = part["bands"][key]
        ratio = one.measured / one.predicted - 1
        inside[one.metric].append(low <= ratio <= high)
        cells[one.metric, id(part)].append(ratio)
        widths[one.metric, id(part)] = high - low
    found = {}
    for metric, values in inside.items():
        relative = [
            widths[key] / _needed(ratios)
            for key, ratios in cells.items()
            if key[0] == metric and len(ratios) >= MIN_ROWS
        ]
        found[metric] = {
            "rows": len(values),
            "inside": round(float(np.mean(values)), 4),
            "width_over_needed": round(float(np.median(relative)), 2) if relative else None,
        }
    return found


def _part(setups: Iterable[Setup], row: Row, limit: int | None) -> dict[str, Any] | None:
    wanted = (engine_name(row), row["gpu"])
    setup = next((one for one in setups if (one["engine"], one["hardware"]) == wanted), None)
    if setup is None:
        return None
    part: dict[str, Any] = next((one for one in setup["loads"] if one["up_to"] == limit), setup["all_loads"])
    return part


def _needed(ratios: Sequence[float]) -> float:
    """The narrowest range with COVERAGE of the values."""
    ordered, count = np.sort(ratios), ceil(COVERAGE * len(ratios))
    return float(np.min(ordered[count - 1 :] - ordered[: len(ordered) - count + 1]))


def write_bands(setups: Sequence[Setup], published: Mapping[str, Any] | None) -> None:
    """Write expected_errors.json. published: what benchmarks.published printed; without it, the entries without
    an engine overhead stay."""
    old = json.loads(BANDS.read_text(encoding="utf-8"))["setups"]
    alone = [one for one in old if one["engine"] == NO_ENGINE] if published is None else _published(published)
    made = datetime.now(UTC).date().isoformat()
    text = json.dumps({"about": ABOUT, "made": made, "coverage": COVERAGE, "setups": [*alone, *setups]}, indent=1)
    BANDS.write_text(text + "\n", encoding="utf-8")


def _published(result: Mapping[str, Any]) -> list[Setup]:
    """Entries without an engine overhead, from held-out throughput tables: all requests at once, so one load."""
    groups: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for name, table in result["held_out"]["tables"].items():
        gpu = name.split()[1]
        groups[gpu] += [(name, 1 / (1 + row["error"]) - 1) for row in table["results"]]
    found = []
    for gpu, rows in sorted(groups.items()):
        names = sorted({name for name, _ in rows})
        parts = [name.split() for name in names]
        limits = {"output_throughput_tokens_per_s": band([ratio for _, ratio in rows])}
        found.append(
            {
                "engine": NO_ENGINE,
                "hardware": gpu,
                "sources": [f"TensorRT-LLM {name}" for name in names],
                "models": sorted({part[2] for part in parts}),
                "dtypes": sorted({part[3] for part in parts}),
                "tp_sizes": sorted({int(part[4][2:]) for part in parts}),
                "pp_sizes": [1],
                "loads": [],
                "all_loads": {"rows": len(rows), "bands": limits},
            }
        )
    return found
