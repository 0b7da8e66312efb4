"""Errors of predicted ratios: of two rows that one server was measured in, with more GPUs or with more clients."""

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
