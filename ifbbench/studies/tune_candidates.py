"""The goal of a search, the candidates for it, and which of them is better, by how much and why."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from ifbbench.analysis.confidence import CONFIDENCE, student_t
from ifbbench.analysis.number_texts import percent
from ifbbench.errors import InputError
from ifbbench.settings.objectives import Objective, parse_objectives
from ifbbench.studies.tune_runs import Run, Runs
from ifbbench.studies.tune_space import Space

GOALS = {
    "goodput": ("goodput_requests_per_s", "requests/s that meet the objectives"),
    "output_throughput": ("output_throughput_tokens_per_s", "output tokens/s"),
    "max_rate": ("max_rate_requests_per_s", "requests/s"),
    "cost": ("cost_per_million_output_tokens", "per million output tokens"),
    "energy": ("joules_per_output_token", "joules per output token"),
}
OVERLOAD = "overloaded"
FAILED = "failed requests"
OTHER_MISSES = {FAILED: "refuses requests", OVERLOAD: "has a queue that grows without bound"}
# Scores that differ by less are equal; the shorter mean latency decides then.
EQUAL_SHARE = 1e-3
# Values of settings that lose less than this share of the goal's figure make way for the default ones.
TIE = 5e-3

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """What a search looks for.

    name: one of GOALS.
    objectives: objectives of `--slo`.
    refused: number of requests that no setting of the search can run.
    """

    name: str
    objectives: tuple[Objective, ...]
    refused: int = 0

    @classmethod
    def of(cls, name: str | None, slo: str | None) -> "Goal":
        """The goal asked for; by default goodput if there is an objective of each request, else output throughput."""
        objectives = parse_objectives(slo) if slo else ()
        has_goodput = any(one.statistic is None for one in objectives)
        if name == "goodput" and not has_goodput:
            raise InputError(
                "--goal goodput counts the requests that meet an objective of each request; give one, "
                "such as --slo ttft=1s, or choose --goal output_throughput."
            )
        return cls(name or ("goodput" if has_goodput else "output_throughput"), objectives)

    @property
    def figure(self) -> str:
        """The name of the figure that is maximised (or minimised: the cost, the energy)."""
        return GOALS[self.name][0]

    @property
    def unit(self) -> str:
        return GOALS[self.name][1]

    @property
    def is_minimised(self) -> bool:
        """Whether the figure is what the GPUs take that serve the traffic as it is: as few replicas as that needs."""
        return self.name in ("cost", "energy")

    @property
    def needs_stable_queue(self) -> bool:
        """Whether a queue that grows without bound is a failure."""
        return self.name == "max_rate" or self.is_minimised

    def shortfalls(self, summary: Summary) -> dict[str, float]:
        """What a run misses, each as the ratio of the value to its target, above 1. Goodput counts the requests that
        miss an objective of each request itself."""
        missed = {}
        for one in self.objectives:
            found = summary["slo"][one.name]
            if not found["met"] and not (self.name == "goodput" and one.statistic is None):
                missed[one.name] = found["value"] / one.target_s
        requests = summary["requests"]
        if (failed := requests["failed"] - self.refused) > 0:
            missed[FAILED] = 1.0 + 100.0 * failed / requests["total"]
        if self.needs_stable_queue and summary["overloaded"]:
            offered = requests["completed"] / max(summary["duration_s"], 1e-9)
            missed[OVERLOAD] = 1.0 + summary["queue_growth_requests_per_s"] / max(offered, 1e-9)
        return missed

    def rank(self, summary: Summary, score: float) -> tuple[float, float, float]:
        """Larger is better: objectives first, then the score (a figure is equal within EQUAL_SHARE, a
        cost or energy is negative), then the mean latency."""
        missed = sum(math.log(ratio) for ratio in self.shortfalls(summary).values())
        level = score if score < 0 else round(math.log(score) / EQUAL_SHARE) if score else -math.inf
        return -missed, level, -(summary["e2e_s"]["mean"] or math.inf)


def misses_text(missed: Mapping[str, float]) -> str:
    """What settings miss, in words. missed: of `Goal.shortfalls`, not empty."""
    objectives = [f"{name} by {percent(ratio - 1)}" for name, ratio in missed.items() if name not in OTHER_MISSES]
    parts = [f"misses {', '.join(objectives)}"] if objectives else []
    return " and ".join([*parts, *(text for name, text in OTHER_MISSES.items() if name in missed)])


@dataclass(frozen=True)
class MaxRate:
    """The highest rate that meets the objectives, as a factor of the recorded or given one.

    run: at this rate; None if none meets them.
    low: the factor.
    high: the lowest one found above it that fails; None if arrivals cannot be made fast enough.
    by_seed: the factor with each seed of arrivals that are drawn.
    is_final: whether it was found to FINE.
    """

    run: Run | None
    low: float
    high: float | None
    by_seed: tuple[float, ...] = ()
    is_final: bool = False

    @property
    def interval(self) -> tuple[float, float] | None:
        """The confidence interval of the mean over several seeds of arrivals; None with one, as of recorded arrivals:
        the rate is then that of these requests, and how much it varies with others is not known."""
        if len(self.by_seed) < 2:
            return None
        half = student_t(CONFIDENCE, len(self.by_seed) - 1) * stdev(self.by_seed) / sqrt(len(self.by_seed))
        middle = fmean(self.by_seed)
        return middle - half, middle + half


@dataclass(frozen=True)
class Candidate:
    """Settings with the run that shows what they do.

    gpus: number of GPUs of all replicas.
    score: the goal's figure, larger is better (a cost or energy is negative).
    name: name of a baseline, else empty.
    rate: what was found with the goal max_rate.
    """

    run: Run
    gpus: int
    score: float
    name: str = ""
    rate: MaxRate | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.run.case.settings)

    @property
    def summary(self) -> Summary:
        return self.run.summary


def nearest_objective(one: Candidate, goal: Goal) -> tuple[str, float] | None:
    """The objective that is nearest to its limit, and its value as a share of the limit; None without objectives."""
    shares = {
        objective.name: value / objective.target_s
        for objective in goal.objectives
        if (value := one.summary["slo"][objective.name]["value"]) is not None
    }
    return max(shares.items(), key=lambda item: item[1]) if shares else None


class Judge:
    """Compares candidates by `goal`.

    price: price of a GPU hour.
    """

    def __init__(self, goal: Goal, runs: Runs, price: float = 1.0) -> None:
        self.goal = goal
        self.runs = runs
        self.price = price

    def candidate(self, run: Run, rate: MaxRate | None = None) -> Candidate | None:
        """The candidate of a run; None if it failed."""
        case, summary = run.case, run.summary
        if run.error:
            return None
        gpus = self.runs.gpus(case)
        if self.goal.name == "cost":
            tokens_per_s = summary["output_throughput_tokens_per_s"]
            score = -gpus * self.price / 3600 / tokens_per_s * 1e6 if tokens_per_s else float("-inf")
        elif self.goal.name == "energy":
            joules = summary["energy"]["joules_per_output_token"]
            score = float("-inf") if joules is None else -joules
        elif self.goal.name == "max_rate":
            score = (self.runs.rate_per_s or 0.0) * (rate.low if rate else 0.0)
        else:
            score = summary[self.goal.figure]
        return Candidate(run, gpus, score, rate=rate)

    def key(self, one: Candidate) -> tuple[float, ...]:
        """Larger is better."""
        return self.goal.rank(one.summary, one.score)

    def best_of(self, candidates: Sequence[Candidate | None]) -> Candidate | None:
        return max((one for one in candidates if one is not None), key=self.key, default=None)

    def is_perfect(self, one: Candidate) -> bool:
        """Whether every request met its objective, which no other settings can improve."""
        all_are_good = self.goal.name == "goodput" and one.summary["goodput_share"] == 1.0
        return all_are_good and not self.goal.shortfalls(one.summary)

    def evidence(self, one: Candidate) -> tuple[Any, ...]:
        """Whether the figure of the goal was found, how much of the trace ran, and then how good it is."""
        is_measured = one.rate is not None or self.goal.name != "max_rate"
        is_final = one.rate is not None and one.rate.is_final
        return is_measured, is_final, one.run.case.requests is None, self.key(one)

    def alone(self, best: Candidate, candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
        """By the name of each setting, the candidates that ran as `best` did but for the value of this setting."""
        case = best.run.case
        found: dict[str, list[Candidate]] = {name: [] for name in best.settings}
        for one in candidates:
            if replace(one.run.case, settings=case.settings) == case:
                changed = {name for name, _ in set(one.run.case.settings) ^ set(case.settings)}
                if len(changed) == 1:
                    found[changed.pop()].append(one)
        return found

    def importance(self, best: Candidate, candidates: Iterable[Candidate], space: Space) -> dict[str, dict[str, Any]]:
        """For each setting the largest loss (`effect`) among the other values that ran (`values`), all else equal.
        effect: None if no other value ran; 0 if none can change the schedule."""
        can_matter = {name for name, _ in space.moves(best.run.case.settings, best.summary, 1.4)}
        importance: dict[str, dict[str, Any]] = {}
        for name, others in self.alone(best, candidates).items():
            if name in space.fixed or name == "tp_size":
                continue
            values = {str(one.settings[name]): self._loss(best, one) for one in others}
            unknown = None if name in can_matter or name == "context_chunking_policy" else 0.0
            importance[name] = {"effect": max(values.values(), default=unknown), "values": values}
        return importance

    def _loss(self, best: Candidate, other: Candidate) -> float:
        """What `other` loses: the share of the score, and 1 where it misses an objective that `best` meets."""
        missed = self.goal.shortfalls(other.summary), self.goal.shortfalls(best.summary)
        if self.goal.needs_stable_queue:  # under the same load, by what they miss
            return max(missed[0].values(), default=1.0) / max(missed[1].values(), default=1.0) - 1.0
        if missed[0] and not missed[1]:
            return 1.0
        return 1.0 - other.score / best.score if best.score else 0.0
