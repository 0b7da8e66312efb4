"""How certain the answer of a search is: what other requests like these would give, what the simulation's error against
real servers leaves open, and what the next best settings cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from ifbbench.analysis.confidence import OF_BLOCKS, RunSample, margins
from ifbbench.analysis.figures import neighbours, numbers_of
from ifbbench.analysis.number_texts import percent
from ifbbench.analysis.words import setting_of
from ifbbench.settings.objectives import Objective
from ifbbench.simulated.expected_error import ERROR_OF, THROUGHPUT
from ifbbench.studies.tune_candidates import EQUAL_SHARE, TIE, Candidate, Goal, Summary, misses_text
from ifbbench.studies.tune_search import Tuning


def intervals(tuning: Tuning, sample: RunSample) -> dict[str, list[float]]:
    """95 % intervals of the figures of the best candidate and of the goal, if other requests like these came; none of
    a run that is too short or overloaded.

    The highest rate has one only if arrivals are drawn: over their seeds. sample: the requests of all replicas."""
    best, goal = tuning.best, tuning.goal
    assert best is not None
    found: dict[str, list[float]] = {}
    if best.rate is not None and best.rate.low and (interval := best.rate.interval):
        found[goal.figure] = [best.score / best.rate.low * factor for factor in interval]
    figures = dict(numbers_of(best.summary))
    for name, margin in margins(sample).items():
        if (value := figures.get(name)) is not None:
            low, high = margin.around(value)
            found[name] = [max(low, 0.0), high]
    if "goodput_share" in found:
        found["goodput_share"][1] = min(found["goodput_share"][1], 1.0)
    if goal.name == "cost" and (found.get(THROUGHPUT) or [0.0])[0]:
        tokens_per_s = figures[THROUGHPUT]
        low, high = (-best.score * tokens_per_s / limit for limit in reversed(found[THROUGHPUT]))
        found[goal.figure] = [low, high]
    return found


def interval_of(sample: RunSample) -> str:
    """What the intervals of the best candidate are of, or why there are none, in words."""
    if reason := sample.too_short:
        return f"No intervals: the run is too short to tell how much other requests like these vary; {reason}."
    return OF_BLOCKS.format(sample.blocks)


def next_best(best: Candidate, tuning: Tuning, known: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """The best other settings of those that were measured alike, and what they cost; None if there are none.

    known: intervals of figures.

    The result has these entries, among others:

    noise: half of the interval of the goal's figure, relative; None if it has none.
    is_noise: whether the difference is smaller.
    is_undecided: see the function of that name.
    """
    alike = [
        one
        for one in tuning.candidates
        if (one.run.case.requests, one.rate is None) == (best.run.case.requests, best.rate is None)
        and one.settings != best.settings
    ]
    if not alike:
        return None
    other, goal = alike[0], tuning.goal
    loss = loss_of(other, best)
    interval = known.get(goal.figure)
    width = None
    if interval is not None and best.score:
        width = (interval[1] - interval[0]) / 2 / abs(best.score)
    return {
        "settings": other.settings,
        "changed": {name: value for name, value in other.settings.items() if best.settings.get(name) != value},
        "score": other.score,
        "loss": loss,
        "misses": goal.shortfalls(other.summary),
        "noise": width,
        "is_noise": width is not None and abs(loss) <= width,
        "is_undecided": is_undecided(best, other, goal),
    }


def loss_of(other: Candidate, best: Candidate) -> float:
    """What the goal's figure of `other` is worse by, relative to that of `best`."""
    # A cost is a negative score: the larger it is, the higher the ratio.
    return abs(1 - other.score / best.score) * (1 if other.score <= best.score else -1) if best.score else 0.0


def tried_alone(best: Candidate, tuning: Tuning, limits: Sequence[str]) -> list[dict[str, Any]]:
    """What other values of one setting did, under the same load: of a number the nearest smaller and larger one. First
    those of `limits`. loss: of the goal's figure; None with the goal max_rate, which is not known at one rate."""
    first = [setting_of(limit) for limit in limits]
    alone = tuning.alone
    names = sorted(alone, key=lambda name: first.index(name) if name in first else len(first))
    found = []
    for name in names:
        others, value = alone[name], best.settings[name]
        if isinstance(value, int) and not isinstance(value, bool):
            others = [others[index] for index in neighbours([one.settings[name] for one in others], value)]
        found += [
            {
                "changed": {name: one.settings[name]},
                "loss": None if tuning.goal.name == "max_rate" else loss_of(one, best),
                "misses": tuning.goal.shortfalls(one.summary),
            }
            for one in others
        ]
    return found


def loss_text(other: Mapping[str, Any], goal: str) -> str:
    """What other settings are worse by, in the goal's figure. other: as of `next_best` or `tried_alone`."""
    if other["misses"]:
        return misses_text(other["misses"])
    if other["loss"] is None:
        return "meets the objectives at this rate, too"
    if abs(other["loss"]) < EQUAL_SHARE:
        return "makes no difference"
    share, is_worse = percent(abs(other["loss"]), 1), other["loss"] >= 0
    tie = "" if is_worse or -other["loss"] > TIE else ", too little to leave default values for"
    if goal == "energy":
        return f"takes {share} {'more' if is_worse else 'less'} energy{tie}"
    if goal == "cost":
        return f"is {share} {'dearer' if is_worse else 'cheaper'}{tie}"
    figure = {"goodput": "goodput", "output_throughput": "throughput", "max_rate": "highest rate"}[goal]
    return f"has a {figure} that is {share} {'lower' if is_worse else 'higher'}{tie}"


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
