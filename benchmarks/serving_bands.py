"""Bands of the expected error: from the errors of published rows, by engine, GPU and load.

A server that is not among the rows differs from them as one curve of them does from the others: rows of one curve
(a deployment and its lengths, at several loads and dates) share most of their error. So each curve counts as much as
any other, whatever the number of its rows, and a band is tried on a curve that it was made without:

- A band has the share `made_for` of the rows that it is made of, and more than COVERAGE of them, because a further
  curve lies further out: the least share with which bands of fit rows have COVERAGE of the rows of fit curves that are
  left out, one after the other (`chosen_share`). Judged rows do not enter it.
- `held_out` says how many judged rows are in the band that is made without their curve, by engine, GPU and load.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from benchmarks.fit_rows import FIT, JUDGED, part_of
from benchmarks.serving_rows import Comparison, Row, clients_of, degree_of, engine_name
from ifbbench.simulated.expected_error import BANDS, COVERAGE, LOADS, NO_ENGINE, limit_of

# With fewer curves of a load, the band of all loads is taken, and with fewer of a GPU that of all GPUs of the engine.
MIN_CURVES = 3
# With fewer rows of an engine and GPU, nothing is said of it.
MIN_ROWS = 10
FIGURES = {"ttft": "ttft_s", "itl": "itl_s", "tpot": "itl_s", "throughput": "output_throughput_tokens_per_s"}
# What rows of one curve have in common.
CURVE = ("source", "engine", "version", "gpu", "tp", "ep", "dp_attention", "num_gpus", "model", "dtype", "drafts")
LENGTHS = ("lengths_of", "lengths", "input", "output")
SHARES = tuple(COVERAGE + step / 100 for step in range(round(100 * (1 - COVERAGE)) + 1))
# Of sums of weights.
ROUNDING = 1e-9
ABOUT = (
    "Measured over predicted, less 1: the low and high end of the part that `coverage` of rows of a further curve are "
    "expected in, by engine overhead, GPU and number of requests at a time. No constant was fitted to these rows. Made "
    "by python -m benchmarks.serving FILE --bands."
)
Setup = dict[str, Any]
# The curve of a row, and measured over predicted.
Ratio = tuple[str, float]


def curve_of(row: Row) -> str:
    """A name of the curve that a row is of: rows that differ in their load and date only have the same."""
    lengths = next(([name, row[name]] for name in LENGTHS[:2] if row.get(name)), [row["input"], row["output"]])
    return json.dumps([[row.get(name) for name in CURVE], lengths])


def band(ratios: Sequence[Ratio], made_for: float) -> tuple[float, float]:
    """The range, less 1, that has `made_for` of the rows, each curve counted once."""
    rows: defaultdict[str, int] = defaultdict(int)
    for curve, _ in ratios:
        rows[curve] += 1
    ordered = sorted((ratio, 1 / rows[curve] / len(rows)) for curve, ratio in ratios)
    values = np.array([value for value, _ in ordered])
    weights = np.array([weight for _, weight in ordered])
    below = np.cumsum(weights)
    outside, last = (1 - made_for) / 2 + ROUNDING, len(values) - 1
    low = values[min(int(np.searchsorted(below, outside)), last)]
    high = values[last - min(int(np.searchsorted(np.cumsum(weights[::-1]), outside)), last)]
    return round(float(low) - 1, 3), round(float(high) - 1, 3)


class _Known:
    """The ratios of comparisons by figure, engine, GPU and load, and bands of them."""

    def __init__(self, comparisons: Iterable[Comparison]) -> None:
        self.all: defaultdict[tuple[str, ...], list[Ratio]] = defaultdict(list)
        self.listed = []
        for one in comparisons:
            engine, figure = engine_name(one.row), FIGURES.get(one.metric)
            if engine is None or figure is None:
                continue
            ratio = curve_of(one.row), one.measured / one.predicted
            cell = figure, engine, one.row["gpu"], str(load(one))
            self.listed.append((cell, ratio))
            for length in range(2, len(cell) + 1):
                self.all[cell[:length]].append(ratio)

    def of_cell(self, cell: tuple[str, ...], without: str | None = None) -> Sequence[Ratio]:
        """The ratios that a band for `cell` is made of: of its load, else of its GPU, else of its engine. without: a
        curve that is left out. Empty if there are not enough curves."""
        for length in range(len(cell), 1, -1):
            found = [ratio for ratio in self.all[cell[:length]] if ratio[0] != without]
            if len({curve for curve, _ in found}) >= MIN_CURVES:
                return found
        return ()

    def held_out(self, made_for: float) -> list[tuple[tuple[str, ...], Ratio, bool]]:
        """Each ratio with its cell, and whether it is in the band that is made without its curve."""
        ranges: dict[tuple[tuple[str, ...], str], tuple[float, float] | None] = {}
        found = list[tuple[tuple[str, ...], Ratio, bool]]()
        for cell, (curve, ratio) in self.listed:
            if (cell, curve) not in ranges:
                ratios = self.of_cell(cell, curve)
                ranges[cell, curve] = band(ratios, made_for) if ratios else None
            if (limits := ranges[cell, curve]) is not None:
                found.append((cell, (curve, ratio), limits[0] <= ratio - 1 <= limits[1]))
        return found


def chosen_share(comparisons: Iterable[Comparison]) -> float:
    """The least of SHARES with which COVERAGE of the fit rows, each curve counted once, are in the bands that are made
    without their curve; the largest if none has so many."""
    known = _Known(one for one in comparisons if part_of(one.row) == FIT)
    return next((share for share in SHARES if _share(known.held_out(share)) >= COVERAGE), SHARES[-1])


def _share(found: Sequence[tuple[tuple[str, ...], Ratio, bool]]) -> float:
    """The share of rows inside, each curve of a figure counted once."""
    by_curve: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    for cell, (curve, _), is_inside in found:
        by_curve[cell[0], curve].append(is_inside)
    return float(np.mean([np.mean(values) for values in by_curve.values()])) if by_curve else 1.0


def held_out(comparisons: Sequence[Comparison], part: str = JUDGED) -> dict[str, Any]:
    """How many rows of a part are in the band made of its other curves, with the width that fit rows gave: of all, by
    figure, and by engine, GPU and load."""
    made_for = chosen_share(comparisons)
    found = _Known(one for one in comparisons if part_of(one.row) == part).held_out(made_for)

    def by(key: Callable[[tuple[str, ...]], str]) -> dict[str, dict[str, Any]]:
        groups: defaultdict[str, list[tuple[tuple[str, ...], Ratio, bool]]] = defaultdict(list)
        for one in found:
            groups[key(one[0])].append(one)
        return {
            name: {
                "rows": len(group),
                "curves": len({curve for _, (curve, _), _ in group}),
                "inside": round(float(np.mean([is_inside for *_, is_inside in group])), 4),
                "inside_by_curve": round(_share(group), 4),
            }
            for name, group in sorted(groups.items())
        }

    return {
        "made_for": made_for,
        "all": by(lambda _: "all"),
        "by_figure": by(lambda cell: cell[0]),
        "by_regime": by(lambda cell: " ".join([*cell[1:3], "over 128" if cell[3] == "None" else f"up to {cell[3]}"])),
    }


def bands(comparisons: Sequence[Comparison], made_for: float) -> list[Setup]:
    """The entries of expected_errors.json for rows with an engine overhead: setups with at least MIN_ROWS rows."""
    known = _Known(comparisons)
    setups: defaultdict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for one in comparisons:
        if (engine := engine_name(one.row)) is not None:
            setups[engine, one.row["gpu"]].append(one)
    return [
        _setup(engine, gpu, group, known, made_for)
        for (engine, gpu), group in sorted(setups.items())
        if _count(group) >= MIN_ROWS
    ]


def _setup(engine: str, gpu: str, group: Sequence[Comparison], known: _Known, made_for: float) -> Setup:
    rows = [one.row for one in group]

    def entry(part: Sequence[Comparison], *cell: str) -> dict[str, Any]:
        found = {}
        for figure in dict.fromkeys(FIGURES.values()):
            if (figure, *cell) in known.all and (ratios := known.of_cell((figure, *cell))):
                found[figure] = band(ratios, made_for)
        return {"rows": _count(part), "curves": len({curve_of(one.row) for one in part}), "bands": found}

    by_load = {limit: [one for one in group if load(one) == limit] for limit in LOADS}
    loads = [
        {"up_to": limit, **entry(part, engine, gpu, str(limit))}
        for limit, part in by_load.items()
        if len({curve_of(one.row) for one in part}) >= MIN_CURVES
    ]
    return {
        "engine": engine,
        "hardware": gpu,
        "sources": sorted({f"{row['source']}: {_version(row)}, {row['model']}" for row in rows}),
        "models": sorted({row["model"] for row in rows}),
        "dtypes": sorted({row["dtype"] for row in rows}),
        "tp_sizes": sorted({degree_of(row) for row in rows}),
        "pp_sizes": [1],
        "loads": loads,
        "all_loads": entry(group, engine, gpu),
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


def write_bands(setups: Sequence[Setup], published: Mapping[str, Any] | None, made_for: float) -> None:
    """Write expected_errors.json. published: what benchmarks.published printed; without it, the entries without
    an engine overhead stay."""
    old = json.loads(BANDS.read_text(encoding="utf-8"))["setups"]
    alone = [one for one in old if one["engine"] == NO_ENGINE] if published is None else _published(published, made_for)
    made = datetime.now(UTC).date().isoformat()
    text = json.dumps({"about": ABOUT, "made": made, "coverage": COVERAGE, "setups": [*alone, *setups]}, indent=1)
    BANDS.write_text(text + "\n", encoding="utf-8")


def _published(result: Mapping[str, Any], made_for: float) -> list[Setup]:
    """Entries without an engine overhead, from held-out throughput tables: all requests at once, so one load."""
    groups: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for name, table in result["held_out"]["tables"].items():
        gpu = name.split()[1]
        groups[gpu] += [(name, 1 / (1 + row["error"])) for row in table["results"]]
    found = []
    for gpu, rows in sorted(groups.items()):
        names = sorted({name for name, _ in rows})
        parts = [name.split() for name in names]
        limits = {"output_throughput_tokens_per_s": band(rows, made_for)}
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
