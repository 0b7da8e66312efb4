"""Predictions held against published measurements of servers: errors by source, engine, GPU, metric and regime.

`python -m benchmarks.serving FILE` replays each row of FILE, or of several (JSON with `rows`, and `models` that are not
built in; see serving_rows) and prints tables of errors, and one JSON object at the end. An error is predicted over
measured, less 1; `median` and `p90` are of its absolute values, `bias` is the median of the signed ones, and
`within_20` the share of rows within 20 %.

Constants may be fitted to the rows that fit_rows.csv lists; all others are judged. No figure is of both.

- `--current` takes rows of today's engines only, `--judged` judged rows only.
- `--plot DIR` draws predicted against measured by regime.
- `--bands` writes ifbbench/simulated/expected_errors.json from the judged rows, and from what
  `python -m benchmarks.published > PUBLISHED` printed for runs without an engine overhead (`--published`).
- `--cache FILE` keeps each prediction as soon as it is there, for the next call: after an interruption the same command
  goes on. They are used while rows, settings and package are the same.
- `--jobs N` processes; `--minutes M` begins no row after M minutes, and names those that were not run.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fit_rows import FIT, JUDGED, part_of
from benchmarks.serving_bands import bands, held_out, write_bands
from benchmarks.serving_differences import better_apart, better_deployment, differences
from benchmarks.serving_rows import (
    METRICS,
    Comparison,
    Row,
    clients_of,
    degree_of,
    is_current,
    measured_figures,
    rows_of,
)
from benchmarks.serving_runs import POWER, predictions
from ifbbench.rundir.run_directory import hardware, versions


def _range(value: float, limits: Sequence[int]) -> str:
    """The range between two limits that holds `value`, in words that sort as the ranges do."""
    above = next((limit for limit in limits if value <= limit), None)
    return f"over {limits[-1]:>5}" if above is None else f"up to {above:>4}"


DIMENSIONS: Mapping[str, Callable[[Row], str]] = {
    "source": lambda row: row["source"],
    "engine": lambda row: f"{row['engine']} {row.get('version') or ''}".strip(),
    "GPU": lambda row: row["gpu"],
    "model": lambda row: row["model"],
    "data type": lambda row: row["dtype"],
    "engine and GPU": lambda row: f"{row['engine']} {row['gpu']}",
    "TP": lambda row: str(degree_of(row)),
    "clients": lambda row: _range(clients_of(row) or 0, (1, 8, 32, 128)) if clients_of(row) else "other arrivals",
    "prompt length": lambda row: _range(row["input"], (256, 1024, 2048, 4096)),
}


def errors(comparisons: Iterable[Comparison]) -> dict[str, dict[str, float]]:
    """The errors of each metric."""
    by_metric: defaultdict[str, list[float]] = defaultdict(list)
    for one in comparisons:
        by_metric[one.metric].append(one.error)
    found = {}
    for metric in (*METRICS, POWER):
        if by_metric[metric]:
            signed = np.array(by_metric[metric])
            absolute = np.abs(signed)
            found[metric] = {
                "rows": len(signed),
                "median": round(float(np.median(absolute)), 4),
                "p90": round(float(np.quantile(absolute, 0.9)), 4),
                "bias": round(float(np.median(signed)), 4),
                "within_20": round(float((absolute <= 0.2).mean()), 4),
            }
    return found


def grouped(comparisons: Iterable[Comparison], key: Callable[[Row], Any]) -> dict[Any, list[Comparison]]:
    """The comparisons by a value of their rows, in its order."""
    groups: defaultdict[Any, list[Comparison]] = defaultdict(list)
    for one in comparisons:
        groups[key(one.row)].append(one)
    return dict(sorted(groups.items()))


def fastest_degree(comparisons: Iterable[Comparison]) -> dict[str, Any]:
    """In how many groups of rows that differ in the number of GPUs only the one with the highest throughput is
    predicted, or one that was measured within 5 % of it."""
    names = ("source", "engine", "version", "gpu", "model", "dtype", "input", "output", "concurrency", "rate")
    groups = grouped(
        (one for one in comparisons if one.metric == "throughput"), lambda row: json.dumps([*map(row.get, names)])
    )
    several = [group for group in groups.values() if len({one.row["num_gpus"] for one in group}) > 1]
    chosen = [
        max(group, key=lambda one: one.predicted).measured / max(one.measured for one in group) for group in several
    ]
    return {
        "groups": len(several),
        "right": sum(share == 1 for share in chosen),
        "within_5_percent": sum(share >= 0.95 for share in chosen),
    }


def report(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The errors of fit and of judged rows, each in total and by dimension, with tables of them printed."""
    found: dict[str, Any] = {}
    for part in (FIT, JUDGED):
        own = [one for one in comparisons if part_of(one.row) == part]
        found[f"{part}_rows"] = errors(own)
        _print_table(f"{part} rows", {"all": found[f"{part}_rows"]})
        found[f"{part}_by"] = {
            name: {value: errors(group) for value, group in grouped(own, key).items()}
            for name, key in DIMENSIONS.items()
        }
        for name, groups in found[f"{part}_by"].items():
            _print_table(f"{part} rows, by {name}", groups)
        found[f"{part}_fastest_degree"] = fastest_degree(own)
        found[f"{part}_differences"] = differences(own)
        found[f"{part}_better_deployment"] = better_deployment(own)
        print(
            f"\n{part} rows, fastest number of GPUs: {found[f'{part}_fastest_degree']}\n"
            f"{part} rows, the better of two deployments under one load: {found[f'{part}_better_deployment']}\n"
            f"{part} rows, ratios of two: {json.dumps(found[f'{part}_differences'])}\n"
        )
    found["better_apart"] = better_apart(comparisons)
    print(f"aggregated or disaggregated, at equal GPUs and about the same TPOT: {found['better_apart']}")
    found["expected_error"] = {part: held_out(comparisons, part) for part in (FIT, JUDGED)}
    for part, one in found["expected_error"].items():
        _print_coverage(part, one)
    found["judged"] = {
        metric: {name: figures[name] for name in ("rows", "median", "p90", "bias")}
        for metric, figures in found["judged_rows"].items()
    }
    return found


def _print_coverage(part: str, found: Mapping[str, Any]) -> None:
    """Print how many rows of each regime are in the stated range that is made without their curve."""
    title = f"{part} rows, in a range without their curve"
    groups = {**found["by_regime"], **found["by_figure"]}
    width = max(map(len, [*groups, title]))
    print(f"\n{title:<{width}}    rows  curves  inside  each curve once")
    for name, one in groups.items():
        print(f"{name:<{width}}  {one['rows']:6} {one['curves']:7} {one['inside']:7.1%} {one['inside_by_curve']:16.1%}")


def _print_table(title: str, groups: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    metrics = [name for name in (*METRICS, POWER) if any(name in figures for figures in groups.values())]
    width = max(map(len, [title, *groups]))
    print(f"\n{title:<{width}}" + "".join(f"  {metric + ': rows':>16} median    p90   bias" for metric in metrics))
    for name, figures in groups.items():
        cells = [
            f"  {one['rows']:>16} {one['median']:6.1%} {one['p90']:6.1%} {one['bias']:+6.1%}"
            if (one := figures.get(metric))
            else " " * 39
            for metric in metrics
        ]
        print(f"{name:<{width}}" + "".join(cells))


def _power_of(row: Row) -> dict[str, float]:
    return {POWER: row[POWER]} if row.get(POWER) else {}


def main() -> None:
    """Replay the rows, print the errors, and then the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, metavar="FILE", nargs="+")
    parser.add_argument("--current", action="store_true")
    parser.add_argument("--judged", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="DIR")
    parser.add_argument("--bands", action="store_true")
    parser.add_argument("--published", type=Path, metavar="PUBLISHED")
    parser.add_argument("--cache", type=Path, metavar="FILE")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float)
    asked = parser.parse_args()
    read = [json.loads(file.read_text(encoding="utf-8")) for file in asked.files]
    models = {name: shape for data in read for name, shape in data.get("models", {}).items()}
    rows = [row for data in read for row in rows_of(data) if is_current(row) or not asked.current]
    if asked.judged:
        rows = [row for row in rows if part_of(row) == JUDGED]
    predicted = predictions(rows, models, asked.jobs, asked.cache, asked.minutes)
    comparisons = [
        Comparison(row, metric, measured, figures[metric])
        for row, figures in zip(rows, predicted, strict=True)
        if "error" not in figures
        for metric, measured in (measured_figures(row) | _power_of(row)).items()
        if figures.get(metric)
    ]
    failed = [
        {"source": row.get("source"), "row": row.get("id"), **figures}
        for row, figures in zip(rows, predicted, strict=True)
        if "error" in figures
    ]
    about = {
        "benchmark": "predictions against published measurements of servers",
        "hardware": hardware(),
        "versions": versions(),
        "rows": len(rows),
        "failed": failed,
    }
    for (source, reason), count in sorted(Counter((str(one["source"]), one["error"]) for one in failed).items()):
        print(f"not replayed: {count} rows of {source}: {reason}")
    result = {**about, **report(comparisons)}
    if asked.bands:
        published = json.loads(asked.published.read_text()) if asked.published else None
        judged = [one for one in comparisons if part_of(one.row) == JUDGED]
        write_bands(bands(judged), published)
    if asked.plot:
        from benchmarks.serving_charts import draw

        for part in (FIT, JUDGED):
            own = [one for one in comparisons if part_of(one.row) == part and is_current(one.row)]
            if own:
                draw(own, asked.plot, part)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
