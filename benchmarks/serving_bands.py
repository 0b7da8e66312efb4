"""Bands of the expected error: from the errors of published rows, by engine, GPU and load.

A server that is not among the rows differs from them as one curve of them does from the others: rows of one curve
(a deployment and its lengths, at several loads and dates) share most of their error. So each curve counts as much as
any other, whatever the number of its rows, and a band is tried on a curve that it was made without.

- The score of a row is the absolute logarithm of measured over predicted. A band is symmetric in it: the figure times
  and over the same factor.
- A regime (figure, engine, GPU and load) of few curves says little of a further one. Where it has fewer than CURVES,
  all curves of its GPU stand together for as many as are missing, then those of its engine, then those of all engines.
- A further curve lies further out than those that a band is made of, as likely as not. So the quantile is taken at
  COVERAGE (1 + FURTHER / curves). With these rules bands of simulated curves cover 79 to 84 % of the rows of a further
  one, whether a regime has one curve or eight (tests/simulated/test_serving_rows.py). No measured row was
  fitted; that several such rules cover judged rows about as well was known.
- `held_out` says how many rows are in the band that is made without their curve, by engine, GPU and load.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from benchmarks.fit_rows import JUDGED, part_of
from benchmarks.serving_rows import Comparison, Row, clients_of, degree_of, engine_name
from ifbbench.simulated.expected_error import BANDS, COVERAGE, LOADS, NO_ENGINE, limit_of

# With fewer curves of a regime, others stand for those that are missing.
CURVES = 8
# The part of a further curve that is taken to lie outside those that are known.
FURTHER = 0.5
# With fewer rows of an engine and GPU, nothing is said of it.
MIN_ROWS = 10
FIGURES = {"ttft": "ttft_s", "itl": "itl_s", "tpot": "itl_s", "throughput": "output_throughput_tokens_per_s"}
# What rows of one curve have in common.
CURVE = ("source", "engine", "version", "gpu", "tp", "ep", "dp_attention", "num_gpus", "model", "dtype", "drafts")
LENGTHS = ("lengths_of", "lengths", "input", "output")
# Of sums of weights.
ROUNDING = 1e-9
ABOUT = (
    "Measured over predicted, less 1: the low and high end of the part that `coverage` of rows of a further curve are "
    "expected in, by engine overhead, GPU and number of requests at a time. No constant was fitted to these rows. Made "
    "by python -m benchmarks.serving FILE --bands."
)
Setup = dict[str, Any]
# The curve of a row, and the absolute logarithm of measured over predicted.
Score = tuple[str, float]
# A score, and the curves that it counts as.
Weighted = tuple[float, float]
# Figure, engine, GPU and load.
Cell = tuple[str, ...]


def curve_of(row: Row) -> str:
    """A name of the curve that a row is of: rows that differ in their load and date only have the same."""
    lengths = next(([name, row[name]] for name in LENGTHS[:2] if row.get(name)), [row["input"], row["output"]])
    return json.dumps([[row.get(name) for name in CURVE], lengths])


def weighted(scores: Iterable[Score], curves: float | None = None) -> list[Weighted]:
    """The scores of curves that count as `curves` together, each as much as any other; as many as they are without."""
    by_curve: defaultdict[str, list[float]] = defaultdict(list)
    for curve, score in scores:
        by_curve[curve].append(score)
    each = 1.0 if curves is None else curves / len(by_curve)
    return [(score, each / len(values)) for values in by_curve.values() for score in values]


def limit(scores: Sequence[Weighted]) -> float:
    """The score that COVERAGE of the rows of a further curve are expected below."""
    ordered = sorted(scores)
    passed = np.cumsum([weight for _, weight in ordered])
    curves = float(passed[-1])
    share = min(1.0, COVERAGE * (1 + FURTHER / curves))
    return ordered[min(int(np.searchsorted(passed, share * curves - ROUNDING)), len(ordered) - 1)][0]


def band(scores: Sequence[Weighted]) -> tuple[float, float]:
    """The range of measured over predicted, less 1, that COVERAGE of the rows of a further curve are expected in."""
    factor = math.exp(limit(scores))
    return round(1 / factor - 1, 3), round(factor - 1, 3)


class Known:
    """Scores by figure, engine, GPU and load, each with its curve."""

    def __init__(self, scores: Iterable[tuple[Cell, Score]]) -> None:
        self.listed = list(scores)
        self._of: defaultdict[Cell, list[Score]] = defaultdict(list)
        for cell, score in self.listed:
            for length in range(1, len(cell) + 1):
                self._of[cell[:length]].append(score)

    def of_cell(self, cell: Cell, without: str | None = None) -> list[Weighted]:
        """The scores that a band for `cell` is made of; of a whole GPU without a load. without: a curve that is left
        out. Empty if there are no others of this figure."""
        found, curves = list[Weighted](), 0.0
        for length in range(len(cell), 0, -1):
            scores = [score for score in self._of.get(cell[:length], ()) if score[0] != without]
            number = len({curve for curve, _ in scores})
            missing = number if length == len(cell) else min(CURVES - curves, number)
            if missing > 0:
                found += weighted(scores, missing)
                curves += missing
        return found

    def held_out(self) -> list[tuple[Cell, str, bool]]:
        """Cell and curve of each score, and whether it is in the band that is made without its curve."""
        limits: dict[tuple[Cell, str], float | None] = {}
        found = list[tuple[Cell, str, bool]]()
        for cell, (curve, score) in self.listed:
            if (cell, curve) not in limits:
                others = self.of_cell(cell, curve)
                limits[cell, curve] = limit(others) if others else None
            if (most := limits[cell, curve]) is not None:
                found.append((cell, curve, score <= most))
        return found


def scores_of(comparisons: Iterable[Comparison]) -> list[tuple[Cell, Score]]:
    """The scores of comparisons of servers, each with its cell."""
    found = list[tuple[Cell, Score]]()
    for one in comparisons:
        engine, figure = engine_name(one.row), FIGURES.get(one.metric)
        if engine is not None and figure is not None:
            score = abs(math.log(one.measured / one.predicted))
            found.append(((figure, engine, one.row["gpu"], str(load(one))), (curve_of(one.row), score)))
    return found


def _share(found: Sequence[tuple[Cell, str, bool]]) -> float:
    """The share of rows inside, each curve of a figure counted once."""
    by_curve: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    for cell, curve, is_inside in found:
        by_curve[cell[0], curve].append(is_inside)
    return float(np.mean([np.mean(values) for values in by_curve.values()])) if by_curve else 1.0


def held_out(comparisons: Sequence[Comparison], part: str = JUDGED) -> dict[str, Any]:
    """How many rows of a part are in the band that is made of its other curves: of all, by figure, and by engine, GPU
    and load."""
    found = Known(scores_of(one for one in comparisons if part_of(one.row) == part)).held_out()

    def by(key: Callable[[Cell], str]) -> dict[str, dict[str, Any]]:
        groups: defaultdict[str, list[tuple[Cell, str, bool]]] = defaultdict(list)
        for one in found:
            groups[key(one[0])].append(one)
        return {
            name: {
                "rows": len(group),
                "curves": len({curve for _, curve, _ in group}),
                "inside": round(float(np.mean([is_inside for *_, is_inside in group])), 4),
                "inside_by_curve": round(_share(group), 4),
            }
            for name, group in sorted(groups.items())
        }

    return {
        "all": by(lambda _: "all"),
        "by_figure": by(lambda cell: cell[0]),
        "by_regime": by(lambda cell: " ".join([*cell[1:3], "over 128" if cell[3] == "None" else f"up to {cell[3]}"])),
    }


def bands(comparisons: Sequence[Comparison]) -> list[Setup]:
    """The entries of expected_errors.json for rows with an engine overhead: setups with at least MIN_ROWS rows."""
    known = Known(scores_of(comparisons))
    setups: defaultdict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for one in comparisons:
        if (engine := engine_name(one.row)) is not None:
            setups[engine, one.row["gpu"]].append(one)
    return [
        _setup(engine, gpu, group, known)
        for (engine, gpu), group in sorted(setups.items())
        if _count(group) >= MIN_ROWS
    ]


def _setup(engine: str, gpu: str, group: Sequence[Comparison], known: Known) -> Setup:
    rows = [one.row for one in group]

    def entry(part: Sequence[Comparison], *cell: str) -> dict[str, Any]:
        figures = dict.fromkeys(FIGURES[one.metric] for one in part if one.metric in FIGURES)
        found = {figure: band(known.of_cell((figure, *cell))) for figure in figures}
        return {"rows": _count(part), "curves": len({curve_of(one.row) for one in part}), "bands": found}

    by_load = {limit: [one for one in group if load(one) == limit] for limit in LOADS}
    loads = [{"up_to": limit, **entry(part, engine, gpu, str(limit))} for limit, part in by_load.items() if part]
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
    figure = FIGURES["throughput"]
    groups: defaultdict[str, list[str]] = defaultdict(list)
    scores = list[tuple[Cell, Score]]()
    for name, table in result["held_out"]["tables"].items():
        gpu = name.split()[1]
        groups[gpu] += [name for _ in table["results"]]
        scores += [((figure, gpu), (name, abs(math.log1p(row["error"])))) for row in table["results"]]
    found, known = [], Known(scores)
    for gpu, rows in sorted(groups.items()):
        names = sorted(set(rows))
        parts = [name.split() for name in names]
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
                "all_loads": {
                    "rows": len(rows),
                    "curves": len(names),
                    "bands": {figure: band(known.of_cell((figure, gpu)))},
                },
            }
        )
    return found
