"""How certain the answer of a search is: what other requests like these would give, what the simulation's error against
real servers leaves open, and what the next best settings cost."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.objectives import Objective
from ifbbench.planning.tune import Tuning
from ifbbench.planning.tune_candidates import Candidate, Goal, Summary
from ifbbench.recording.metrics import PERCENTILES
from ifbbench.report.confidence import CONFIDENCE, student_t

# Bootstrap of blocks of consecutive requests, because the latencies of neighbours depend on each other.
BLOCKS, DRAWS, TAIL = 40, 200, 2.5
# Parts of a run of equal duration, whose throughputs hardly depend on each other (batch means).
PARTS = 20
# Figures of which the simulation's error against real servers is known, and those that follow them.
THROUGHPUT, ITL = "output_throughput_tokens_per_s", "itl_s"
ERROR_OF = {"tpot_s": ITL, "cost_per_million_output_tokens": THROUGHPUT, "max_rate_requests_per_s": THROUGHPUT,
            "goodput_requests_per_s": THROUGHPUT}  # fmt: skip
Floats = NDArray[np.float64]


def intervals(tuning: Tuning, run: RecordedRun) -> dict[str, list[float]]:
    """95 % intervals of the figures of the best candidate and of the goal, if other requests like these came.

    run: of the best candidate; of its replicas, one."""
    best, goal = tuning.best, tuning.goal
    assert best is not None
    rows = sorted((row for row in run.row_of.values() if row.get("e2e_s") is not None), key=lambda row: row["index"])
    found: dict[str, list[float]] = {}
    if best.rate is not None and best.rate.low:
        found[goal.figure] = [best.score / best.rate.low * factor for factor in best.rate.interval]
    if len(rows) < BLOCKS:
        return found
    generator = np.random.default_rng(0)
    blocks = np.array_split(np.arange(len(rows)), BLOCKS)
    draws = [np.concatenate([blocks[block] for block in generator.integers(0, BLOCKS, BLOCKS)])
             for _ in range(max(min(DRAWS, 20_000_000 // len(rows)), 20))]  # fmt: skip
    for name in ("ttft_s", "tpot_s", "e2e_s", "queue_time_s"):
        values = np.array([np.nan if row[name] is None else row[name] for row in rows])
        for statistic in ("mean", "p50", "p99"):
            drawn = [_statistic(values[draw], statistic) for draw in draws]
            found[f"{name}.{statistic}"] = _interval(np.array(drawn))
    throughput = best.summary[THROUGHPUT] * best.run.case.replicas
    share = _half_width_of_throughput(rows)
    found[THROUGHPUT] = [throughput * (1 - share), throughput * (1 + share)]
    if goal.name == "cost":
        found[goal.figure] = [-best.score / (1 + share), -best.score / max(1 - share, 1e-9)]
    if any(one.statistic is None for one in goal.objectives):
        met = np.array([bool(row.get("slo_met")) for row in rows])
        found["goodput_share"] = _interval(np.array([met[draw].mean() for draw in draws]))
        if goal.name == "goodput" and (good := best.summary["goodput_share"]):
            found[goal.figure] = [best.score / good * limit for limit in found["goodput_share"]]
    return found


def _half_width_of_throughput(rows: Sequence[Mapping[str, Any]]) -> float:
    """Half of the interval of the output tokens in a second, as a share of their mean: by the tokens that were
    generated in each of PARTS of the run, a request's spread evenly over its generation."""
    begins = np.array([row["first_token_s"] for row in rows])
    ends = np.maximum(np.array([row["end_s"] for row in rows]), begins + 1e-9)
    lengths = np.array([row["output_len"] for row in rows], np.float64)
    edges = np.linspace(min(row["arrival_s"] for row in rows), ends.max(), PARTS + 1)
    done = [float((lengths * ((edge - begins) / (ends - begins)).clip(0, 1)).sum()) for edge in edges]
    parts = np.diff(done)
    half = student_t(CONFIDENCE, PARTS - 1) * parts.std(ddof=1) / sqrt(PARTS)
    return float(half / parts.mean()) if parts.mean() else 0.0


def _statistic(values: Floats, name: str) -> float:
    return float(np.nanmean(values) if name == "mean" else np.nanpercentile(values, PERCENTILES[name]))


def _interval(drawn: Floats) -> list[float]:
    low, high = np.percentile(drawn, (TAIL, 100 - TAIL))
    return [float(low), float(high)]


def next_best(best: Candidate, tuning: Tuning, known: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """The best other settings of those that were measured alike, and what they cost; None if there are none.

    known: intervals. is_noise: whether the difference is within the interval of the goal's figure. is_undecided: see
    there."""
    alike = [one for one in tuning.candidates
             if (one.run.case.requests, one.rate is None) == (best.run.case.requests, best.rate is None)
             and one.settings != best.settings]  # fmt: skip
    if not alike:
        return None
    other, goal = alike[0], tuning.goal
    loss = 1 - other.score / best.score if best.score else 0.0
    changed = {name: value for name, value in other.settings.items() if best.settings.get(name) != value}
    low, high = known.get(goal.figure, (0.0, 0.0))
    width = (high - low) / 2 / abs(best.score) if best.score else 0.0
    return {"settings": other.settings, "changed": changed, "score": other.score, "loss": loss,
            "misses": goal.shortfalls(other.summary), "noise": width, "is_noise": abs(loss) <= width,
            "is_undecided": is_undecided(best, other, goal)}  # fmt: skip


def is_undecided(best: Candidate, other: Candidate, goal: Goal) -> bool:
    """Whether both meet the objectives, and the simulation's error is larger than the difference of the goal's figure:
    on real servers `other` may be the better one."""
    band = _error_of(goal.figure, best.summary)
    if band is None or not best.score or goal.shortfalls(best.summary) or goal.shortfalls(other.summary):
        return False
    return band[0] <= other.score / best.score - 1 <= band[1]


def at_risk(summary: Summary, objectives: Sequence[Objective]) -> dict[str, list[float]]:
    """The objectives with a statistic that are met in the simulation, and within its error are not: the range of the
    value on real servers, in seconds."""
    found = {}
    for one in objectives:
        band, value = _error_of(one.latency, summary), summary["slo"][one.name]["value"]
        if one.statistic is None or band is None or value is None:
            continue
        low, high = (value * (1 + limit) for limit in band)
        if value <= one.target_s < high:
            found[one.name] = [low, high]
    return found


def _error_of(figure: str, summary: Summary) -> Sequence[float] | None:
    """The expected relative error of a figure; None if it was never compared with real servers."""
    error: Sequence[float] | None = (summary.get("expected_error") or {}).get(ERROR_OF.get(figure, figure))
    return error
