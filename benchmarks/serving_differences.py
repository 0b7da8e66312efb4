"""Errors of predicted ratios: of two rows that one server was measured in, with more GPUs or with more clients; which
of two deployments is better under one load, and which of an aggregated and a disaggregated one at equal GPUs."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from benchmarks.serving_rows import METRICS, Comparison
from ifbbench.simulated.expected_error import COVERAGE

# What the two rows of a pair differ in, and what else they have in common.
DIFFER_IN: Mapping[str, Sequence[str]] = {"tensor parallelism": ("tp", "num_gpus"), "clients": ("concurrency",)}
# Deployments that are compared with each other have these in common, and TPOTs within a factor of SIMILAR_TPOT. Which
# is better is known where their tokens/s of each GPU differ by more than a factor of NOISE: rows that repeat a
# measurement differ by up to 9 %.
DEPLOYED = ("source", "engine", "gpu", "model", "dtype", "lengths_of", "drafts")
# Two deployments under one load have these in common, and differ in one of the others.
UNDER_ONE_LOAD = ("source", "gpu", "model", "lengths_of", "concurrency")
OF_DEPLOYMENT = ("engine", "dtype", "drafts", "tp", "ep", "dp_attention")
SIMILAR_TPOT, NOISE = 1.25, 1.1
NAMES = ("source", "engine", "version", "gpu", "num_gpus", "tp", "model", "dtype", "input", "output", "concurrency")


def differences(comparisons: Iterable[Comparison]) -> dict[str, dict[str, dict[str, float]]]:
    """By what differs and by metric: the number of pairs, the median of their relative errors, the error that COVERAGE
    of them have at most, and the share of pairs in which the wrong one of the two is predicted to be larger."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    listed = list(comparisons)
    for title, free in DIFFER_IN.items():
        for metric in METRICS:
            groups: defaultdict[str, list[Comparison]] = defaultdict(list)
            for one in listed:
                if one.metric == metric:
                    groups[json.dumps([one.row.get(name) for name in NAMES if name not in free])].append(one)
            pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
            if pairs:
                found.setdefault(title, {})[metric] = _errors(pairs)
    return found


def _errors(pairs: Sequence[tuple[Comparison, Comparison]]) -> dict[str, Any]:
    measured = np.array([b.measured / a.measured for a, b in pairs])
    predicted = np.array([b.predicted / a.predicted for a, b in pairs])
    errors = np.abs(predicted / measured - 1)
    return {
        "pairs": len(pairs),
        "median": round(float(np.median(errors)), 4),
        f"p{COVERAGE:.0%}".rstrip("%"): round(float(np.quantile(errors, COVERAGE)), 4),
        "wrong_sign": round(float(((predicted > 1) != (measured > 1)).mean()), 4),
    }


def better_deployment(comparisons: Iterable[Comparison]) -> dict[str, Any]:
    """Compare pairs of aggregated deployments on the same GPU with the same random lengths and clients. Returns in how
    many the one with more output tokens/s of each GPU is predicted, of those that differ by more than NOISE in it, and
    of all. Rows that repeat a measurement count once, with their medians."""
    repeated: defaultdict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for one in comparisons:
        if one.metric == "throughput" and one.row.get("lengths_of") and not one.row.get("sides"):
            load = json.dumps([one.row.get(name) for name in UNDER_ONE_LOAD])
            repeated[load, json.dumps([one.row.get(name) for name in OF_DEPLOYMENT])].append(one)
    of_load: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for (load, _), rows in repeated.items():
        gpus = rows[0].row["num_gpus"]
        figures = [[one.measured / gpus for one in rows], [one.predicted / gpus for one in rows]]
        of_load[load].append((float(np.median(figures[0])), float(np.median(figures[1]))))
    pairs = [(a[0] / b[0], a[1] / b[1]) for group in of_load.values() for a, b in combinations(group, 2)]
    clear = [pair for pair in pairs if not 1 / NOISE <= pair[0] <= NOISE]
    return {
        "pairs": len(clear),
        "right": _in_order(clear),
        "all_pairs": len(pairs),
        "all_right": _in_order(pairs),
    }


def _in_order(pairs: Iterable[tuple[float, float]]) -> int:
    """In how many pairs of a measured and a predicted ratio both are above 1, or both are not."""
    return sum((measured > 1) == (predicted > 1) for measured, predicted in pairs)


def better_apart(comparisons: Iterable[Comparison]) -> dict[str, Any]:
    """Compare pairs of an aggregated and a disaggregated deployment with about the same measured TPOT, both of random
    lengths. Returns in how many the one with more output tokens/s of each GPU (of both sides) is predicted, and in how
    many that is the disaggregated one. Rows that repeat a measurement count once."""
    found: defaultdict[str, dict[str, dict[str, Comparison]]] = defaultdict(dict)
    for one in comparisons:
        if one.row.get("lengths_of"):
            same = json.dumps([one.row.get(name) for name in (*DEPLOYED, "concurrency", "tp", "ep", "dp_attention")])
            found[same + json.dumps(one.row.get("sides"))].setdefault(one.row.get("id", 0), {})[one.metric] = one
    deployments: defaultdict[str, list[dict[str, Comparison]]] = defaultdict(list)
    for repeated in found.values():
        known = next((one for one in repeated.values() if {"tpot", "throughput"} <= one.keys()), None)
        if known:
            deployments[json.dumps([known["tpot"].row.get(name) for name in DEPLOYED])].append(known)
    pairs = [
        (together, apart)
        for group in deployments.values()
        for together in group
        for apart in group
        if apart["tpot"].row.get("sides") and not together["tpot"].row.get("sides") and _are_comparable(together, apart)
    ]
    ratios = [(_gain(together, apart, "measured"), _gain(together, apart, "predicted")) for together, apart in pairs]
    return {
        "pairs": len(pairs),
        "right": _in_order(ratios),
        "apart_is_better": sum(measured > 1 for measured, _ in ratios),
    }


def _are_comparable(together: Mapping[str, Comparison], apart: Mapping[str, Comparison]) -> bool:
    slower, faster = sorted((together["tpot"].measured, apart["tpot"].measured), reverse=True)
    gain = _gain(together, apart, "measured")
    return slower <= SIMILAR_TPOT * faster and not 1 / NOISE <= gain <= NOISE


def _gain(together: Mapping[str, Comparison], apart: Mapping[str, Comparison], kind: str) -> float:
    """The throughput of each GPU apart, relative to that together. kind: measured or predicted."""
    of_gpu = [getattr(one["throughput"], kind) / one["throughput"].row["num_gpus"] for one in (apart, together)]
    return float(of_gpu[0] / of_gpu[1])
