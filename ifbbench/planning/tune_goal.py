"""What a search maximises, and by how much a run misses its objectives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ifbbench.errors import InputError
from ifbbench.objectives import Objective, parse_objectives

GOALS = {
    "goodput": ("goodput_requests_per_s", "requests/s that meet the objectives"),
    "output_throughput": ("output_throughput_tokens_per_s", "output tokens/s"),
    "max_rate": ("max_rate_requests_per_s", "requests/s"),
    "cost": ("cost_per_million_output_tokens", "per million output tokens"),
}
OVERLOAD = "overloaded"
FAILED = "failed requests"
# Scores that differ by less are equal; the shorter mean latency decides then.
EQUAL_SHARE = 1e-3

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """name: one of GOALS. objectives: of `--slo`. refused: requests that no setting of the search can run."""

    name: str
    objectives: tuple[Objective, ...]
    refused: int = 0

    @classmethod
    def of(cls, name: str | None, slo: str | None) -> "Goal":
        """The goal asked for; by default goodput if there is an objective of each request, else output throughput."""
        objectives = parse_objectives(slo) if slo else ()
        has_goodput = any(one.statistic is None for one in objectives)
        if name == "goodput" and not has_goodput:
            raise InputError("--goal goodput counts the requests that meet an objective of each request; give one, "
                             "such as --slo ttft=1s, or choose --goal output_throughput.")  # fmt: skip
        return cls(name or ("goodput" if has_goodput else "output_throughput"), objectives)

    @property
    def figure(self) -> str:
        """The name of the figure that is maximised (or minimised: the cost)."""
        return GOALS[self.name][0]

    @property
    def unit(self) -> str:
        return GOALS[self.name][1]

    @property
    def needs_stable_queue(self) -> bool:
        """Whether a queue that grows without bound is a failure."""
        return self.name in ("max_rate", "cost")

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
        cost is negative), then the mean latency."""
        missed = sum(math.log(ratio) for ratio in self.shortfalls(summary).values())
        level = score if score < 0 else round(math.log(score) / EQUAL_SHARE) if score else -math.inf
        return -missed, level, -(summary["e2e_s"]["mean"] or math.inf)
