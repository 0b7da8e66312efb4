"""Bands of the expected error: from the errors of published rows, by engine, GPU and load.

A server that is not among the rows differs from them as one curve of them does from the others: rows of one curve
(a deployment and its lengths, at several loads and dates) share most of their error. So each curve counts as much as
any other, whatever the number of its rows, and a band is tried on a curve that it was made without.

- The score of a row is the absolute logarithm of measured over predicted. A band is symmetric in it: the figure times
  and over the same factor.
- A regime is an engine, a GPU and a load. One with fewer than CURVES curves has no band of its own: it has that of the
  engine on this GPU under any load, else on GPUs of this generation, else on all GPUs, else that of all engines:
  whichever is the first with so many. Numbers of curves decide, never their errors.
- The score of a further curve is as likely to lie in any of the n + 1 gaps between n known ones. So the band ends at
  the COVERAGE (n + 1)-th score in order, between two of them in proportion (each row counts as its part of a curve).
  Bands of simulated curves cover 77 to 82 % of the rows of a further one, whether a curve's rows err together or not
  (tests/simulated/test_serving_rows.py). No measured row was used to choose this rule.
- `held_out` says how many rows of each regime with a band are in the band that is made without their curve.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from benchmarks.fit_rows import JUDGED, part_of
from benchmarks.serving_rows import Comparison, Row, clients_of, degree_of, engine_name
from ifbbench.simulated.expected_error import (
    BANDS,
    COVERAGE,
    LOADS,
    NO_DRAFTS,
    NO_ENGINE,
    engine_of,
    limit_of,
    regime_in_words,
)
from ifbbench.simulated.hardware import load_hardware

# A regime with fewer curves has the band of a larger one.
CURVES = 8
# Parts of what benchmarks.published prints that no constant was fitted to.
NOT_FITTED = ("held_out", "case_study")
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
    "expected in, by engine overhead, GPU and number of requests at a time. `of`: whose rows a band is of; where a "
    "setup has too few curves, those of a larger regime. No constant was fitted to these rows. Made by "
    "python -m benchmarks.serving FILE --bands."
)
Setup = dict[str, Any]
# The curve of a row, and the absolute logarithm of measured over predicted.
Score = tuple[str, float]
# A score, and the curves that it counts as.
Weighted = tuple[float, float]
# Engine, GPU and load, or the first of them; a generation of GPUs stands for its GPUs.
Regime = tuple[str, ...]


def curve_of(row: Row) -> str:
    """A name of the curve that a row is of: rows that differ in their load and date only have the same."""
    lengths = next(([name, row[name]] for name in LENGTHS[:2] if row.get(name)), [row["input"], row["output"]])
    return json.dumps([[row.get(name) for name in CURVE], lengths])


def weighted(scores: Iterable[Score]) -> list[Weighted]:
    """The scores of curves that count as one together each."""
    by_curve: defaultdict[str, list[float]] = defaultdict(list)
    for curve, score in scores:
        by_curve[curve].append(score)
    return [(score, 1 / len(values)) for values in by_curve.values() for score in values]


def limit(scores: Sequence[Weighted]) -> float:
    """The score that COVERAGE of the rows of a further curve are expected below; infinite with too few curves."""
    ordered = sorted(scores)
    weights = np.array([weight for _, weight in ordered])
    curves = float(weights.sum())
    if COVERAGE * (curves + 1) > curves + ROUNDING:
        return math.inf
    # One row of each curve has the places 1, 2, 3, …; a row that is a part of a curve is in the middle of its part.
    places = np.cumsum(weights) - weights / 2 + 0.5
    return float(np.interp(COVERAGE * (curves + 1), places, [score for score, _ in ordered]))


def band(scores: Sequence[Weighted]) -> tuple[float, float]:
    """The range of measured over predicted, less 1, that COVERAGE of the rows of a further curve are expected in."""
    factor = math.exp(limit(scores))
    return round(1 / factor - 1, 3), round(factor - 1, 3)


def regimes_of(cell: Regime) -> list[Regime]:
    """Those that a server may have its band from, the nearest first. cell: engine, GPU and load, or without a load."""
    engine, gpu, *_ = cell
    found = [cell, (engine, gpu), (engine, f"{load_hardware(gpu).architecture} GPUs"), (engine,), ()]
    return list(dict.fromkeys(found))


class Known:
    """Scores by figure and regime, each with its curve."""

    def __init__(self, scores: Iterable[tuple[str, Regime, Score]]) -> None:
        self.listed = list(scores)
        self._of: defaultdict[Regime, defaultdict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
        for figure, cell, score in self.listed:
            for regime in regimes_of(cell):
                self._of[regime][figure].append(score)

    def curves(self, regime: Regime) -> int:
        return len({curve for scores in self._of[regime].values() for curve, _ in scores})

    def regime_of(self, cell: Regime) -> Regime:
        """The regime that the band of `cell` is of: the nearest one with CURVES curves, else that of all."""
        return next((one for one in regimes_of(cell) if self.curves(one) >= CURVES), ())

    def scores(self, regime: Regime, figure: str) -> list[Score]:
        return self._of[regime][figure]

    def bands(self, regime: Regime, figures: Iterable[str]) -> dict[str, tuple[float, float]]:
        """The bands of those of `figures` that CURVES curves of the regime have."""
        found = {figure: self.scores(regime, figure) for figure in figures}
        return {
            figure: band(weighted(scores))
            for figure, scores in found.items()
            if len({curve for curve, _ in scores}) >= CURVES
        }

    def held_out(self, regime: Regime, figure: str) -> list[tuple[str, bool]]:
        """The curve of each score of a regime, and whether it is in the band that is made without this curve."""
        scores = self.scores(regime, figure)
        curves = {curve for curve, _ in scores}
        if len(curves) < CURVES:
            return []
        limits = {curve: limit(weighted(score for score in scores if score[0] != curve)) for curve in curves}
        return [(curve, score <= limits[curve]) for curve, score in scores]


def scores_of(comparisons: Iterable[Comparison]) -> list[tuple[str, Regime, Score]]:
    """The scores of comparisons of servers, each with its figure, and its engine, GPU and load. Those with prefill and
    decode apart are no such servers."""
    found = list[tuple[str, Regime, Score]]()
    for one in comparisons:
        overhead, figure = engine_name(one.row), FIGURES.get(one.metric)
        if overhead is not None and figure is not None and not one.row.get("disaggregated"):
            engine = engine_of(overhead)
            score = abs(math.log(one.measured / one.predicted))
            found.append((figure, (engine, one.row["gpu"], str(load(one))), (curve_of(one.row), score)))
    return found


def _share(found: Sequence[tuple[str, str, bool]]) -> float:
    """The share of rows inside, each curve of a figure counted once."""
    by_curve: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    for figure, curve, is_inside in found:
        by_curve[figure, curve].append(is_inside)
    return float(np.mean([np.mean(values) for values in by_curve.values()])) if by_curve else 1.0


def _coverage(found: Sequence[tuple[str, str, bool]]) -> dict[str, Any]:
    """found: figure and curve of each row, and whether it is inside."""
    return {
        "rows": len(found),
        "curves": len({curve for _, curve, _ in found}),
        "inside": round(float(np.mean([is_inside for *_, is_inside in found])), 4),
        "inside_by_curve": round(_share(found), 4),
    }


def held_out(comparisons: Sequence[Comparison], part: str = JUDGED) -> dict[str, dict[str, Any]]:
    """How many rows of each regime that a server of a part has its band from are in the band that is made of its other
    curves: by regime, and by regime and figure."""
    known = Known(scores_of(one for one in comparisons if part_of(one.row) == part))
    found: dict[str, dict[str, Any]] = {"by_regime": {}, "by_figure": {}}
    for regime in sorted({known.regime_of(cell) for _, cell, _ in known.listed}):
        figures = dict.fromkeys(FIGURES.values())
        rows = {figure: [(figure, *one) for one in known.held_out(regime, figure)] for figure in figures}
        if not any(rows.values()):
            continue
        name = regime_in_words(*regime)
        found["by_regime"][name] = _coverage([one for own in rows.values() for one in own])
        found["by_figure"] |= {f"{name}: {figure}": _coverage(own) for figure, own in rows.items() if own}
    return found


def bands(comparisons: Sequence[Comparison]) -> list[Setup]:
    """The entries of expected_errors.json for rows with an engine overhead: setups with at least MIN_ROWS rows."""
    known = Known(scores_of(comparisons))
    setups: defaultdict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for one in comparisons:
        if (overhead := engine_name(one.row)) is not None and not one.row.get("disaggregated"):
            setups[engine_of(overhead), one.row["gpu"]].append(one)
    return [
        _setup(engine, gpu, group, known)
        for (engine, gpu), group in sorted(setups.items())
        if _count(group) >= MIN_ROWS
    ]


def _setup(engine: str, gpu: str, group: Sequence[Comparison], known: Known) -> Setup:
    rows = [one.row for one in group]
    figures = list(dict.fromkeys(FIGURES[one.metric] for one in group if one.metric in FIGURES))
    known_loads = {load(one) for one in group}
    loads = [
        {"up_to": limit} | _entry((engine, gpu, str(limit)), figures, known) for limit in LOADS if limit in known_loads
    ]
    return {
        "engine": engine,
        "hardware": gpu,
        "sources": sorted({f"{row['source']}: {_version(row)}, {row['model']}" for row in rows}),
        "models": sorted({row["model"] for row in rows}),
        "dtypes": sorted({row["dtype"] for row in rows}),
        "tp_sizes": sorted({degree_of(row) for row in rows}),
        "pp_sizes": [1],
        "drafts": sorted({row.get("drafts") or NO_DRAFTS for row in rows}),
        "loads": loads,
        "all_loads": _entry((engine, gpu), figures, known),
    }


def _entry(cell: Regime, figures: Iterable[str], known: Known) -> dict[str, Any]:
    """What expected_errors.json says of a regime: whose band it has, and of how many rows and curves."""
    regime = known.regime_of(cell)
    rows = Counter(figure for figure in figures for _ in known.scores(regime, figure))
    return {
        "of": regime_in_words(*regime),
        "rows": max(rows.values(), default=0),
        "curves": known.curves(regime),
        "bands": known.bands(regime, figures),
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
    """Entries without an engine overhead, from throughput tables that nothing was fitted to. All requests are there at
    once, so that there is one load."""
    figure = FIGURES["throughput"]
    groups: defaultdict[str, list[str]] = defaultdict(list)
    scores = list[tuple[str, Regime, Score]]()
    tables = {name: table for role in NOT_FITTED for name, table in result[role]["tables"].items()}
    for name, table in tables.items():
        gpu = name.split()[1]
        groups[gpu].append(name)
        scores += [(figure, (NO_ENGINE, gpu), (name, abs(math.log1p(row["error"])))) for row in table["results"]]
    found, known = [], Known(scores)
    for gpu, names in sorted(groups.items()):
        parts = [name.split() for name in sorted(names)]
        found.append(
            {
                "engine": NO_ENGINE,
                "hardware": gpu,
                "sources": [f"TensorRT-LLM {name}" for name in sorted(names)],
                "models": sorted({part[2] for part in parts}),
                "dtypes": sorted({part[3] for part in parts}),
                "tp_sizes": sorted({int(part[4][2:]) for part in parts}),
                "pp_sizes": [1],
                "drafts": [NO_DRAFTS],
                "loads": [],
                "all_loads": _entry((NO_ENGINE, gpu), [figure], known),
            }
        )
    return found
