"""Candidates of a search: what the run of some settings means for the goal, which of them is better, and why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ifbbench.planning.tune_goal import Goal, Summary
from ifbbench.planning.tune_rate import MaxRate
from ifbbench.planning.tune_runs import Run, Runs
from ifbbench.planning.tune_space import Space


@dataclass(frozen=True)
class Candidate:
    """Settings with the run that shows what they do.

    name: of a baseline, else empty. gpus: of all replicas. score: the goal's figure, larger is better (a cost is
    negative). rate: with the goal max_rate, what was found."""

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


class Judge:
    """Compares candidates by `goal`. price: of a GPU hour."""

    def __init__(self, goal: Goal, runs: Runs, price: float = 1.0) -> None:
        self.goal = goal
        self.runs = runs
        self.price = price

    def candidate(self, run: Run, rate: MaxRate | None = None) -> Candidate | None:
        """The candidate of a run; None if it failed."""
        case, summary = run.case, run.summary
        if run.error:
            return None
        gpus = case.replicas * dict(case.settings)["tp_size"] * self.runs.base.pp_size
        if self.goal.name == "cost":
            tokens_per_s = case.replicas * summary["output_throughput_tokens_per_s"]
            score = -gpus * self.price / 3600 / tokens_per_s * 1e6 if tokens_per_s else float("-inf")
        elif self.goal.name == "max_rate":
            score = (self.runs.rate_per_s or 0.0) * (rate.low if rate else 0.0)
        else:
            score = case.replicas * summary[self.goal.figure]
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

    def importance(
        self, best: Candidate, candidates: Iterable[Candidate], space: Space
    ) -> dict[str, dict[str, Any]]:
        """For each setting the largest loss (`effect`) among the other values that ran (`values`), all else equal. No
        other value runs where it is certain to change nothing."""
        case, mine = best.run.case, dict(best.run.case.settings)
        others = [one for one in candidates if replace(one.run.case, settings=case.settings) == case]
        importance: dict[str, dict[str, Any]] = {}
        for name in mine:
            if name in space.fixed or name == "tp_size":
                continue
            values = {}
            for one in others:
                changed = {key for key, _ in set(one.run.case.settings) ^ set(case.settings)}
                if changed == {name}:
                    values[str(one.settings[name])] = self._loss(best, one)
            importance[name] = {"effect": max(values.values(), default=0.0), "values": values}
        return importance

    def _loss(self, best: Candidate, other: Candidate) -> float:
        """What `other` loses: the share of the score, and 1 where it misses an objective that `best` meets."""
        missed = self.goal.shortfalls(other.summary), self.goal.shortfalls(best.summary)
        if self.goal.needs_stable_queue:  # compared under pressure, by what they miss
            return max(missed[0].values(), default=1.0) / max(missed[1].values(), default=1.0) - 1.0
        if missed[0] and not missed[1]:
            return 1.0
        return 1.0 - other.score / best.score if best.score else 0.0
