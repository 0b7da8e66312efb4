"""Service level objectives (SLOs): how they are written, and which requests meet them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings import fields

# The latency of a request that each name limits, as it is called in `requests.jsonl` and `summary.json`.
LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "queue_time": "queue_time_s"}
# `e2el` is the name in `vllm bench serve`. There is one ITL for each gap, so that it is an objective of a run only.
OF_A_RUN = {**LATENCIES, "itl": "itl_s"}
ALIASES = {"e2el": "e2e"}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p99_9", "max")
UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
EXPECTED = "NAME=TIME or NAME.pNN=TIME, such as ttft=1s, tpot=50ms, e2e=20s or ttft.p99=2s"


@dataclass(frozen=True, slots=True)
class Objective:
    """A maximum of a latency: of each request, or of one statistic of all requests.

    name: name in `summary.json`.
    latency: key of the latency.
    statistic: None for an objective of each request.
    """

    name: str
    latency: str
    statistic: str | None
    target_s: float

    def is_met(self, seconds: Any) -> Any:
        """Whether one latency meets the target, or which of an array. NaN does: a request has no such latency."""
        return (seconds <= self.target_s) | (seconds != seconds)


@cache
def parse_objectives(text: str) -> tuple[Objective, ...]:
    """The objectives in `NAME=TIME,NAME=TIME,…`, in order; InputError for another form, and for one given twice."""
    objectives = tuple(map(_parse, text.split(",")))
    names = [one.name for one in objectives]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--slo gives {name} twice; expected each objective once.")
    return objectives


def meets_all(objectives: tuple[Objective, ...], latencies: Mapping[str, float | None]) -> bool:
    """Whether a completed request meets every objective of each request. latencies: None where it has no such one."""
    known = {name: math.nan if value is None else value for name, value in latencies.items()}
    return all(one.is_met(known[one.latency]) for one in objectives if one.statistic is None)


def _parse(text: str) -> Objective:
    left, equals, amount = (part.strip() for part in text.partition("="))
    name, dot, statistic = left.replace("-", "_").lower().partition(".")
    name, statistic = ALIASES.get(name, name), statistic.replace(".", "_")
    if not equals or (dot and not statistic):
        raise InputError(f"--slo is {text.strip()!r}; expected {EXPECTED}.")
    before, _, after = name.rpartition("_")
    if before in OF_A_RUN and after in STATISTICS:
        raise InputError(f"--slo {left}: a statistic follows a dot; write {before}.{after}.")
    name = fields.choice(name, f"--slo {left}: the latency", OF_A_RUN if dot else LATENCIES)
    if dot:
        fields.choice(statistic, f"--slo {left}: the statistic", STATISTICS)
    number, unit = re.fullmatch(r"(.*?)\s*(us|µs|ms|s|)", amount).groups()  # type: ignore[union-attr]
    if not unit:
        raise InputError(f"--slo {left} is {fields.shown(amount)}; expected a time with its unit (s, ms or us).")
    seconds = fields.number(number, f"--slo {left}", above=0.0, unit=unit, from_text=True) * UNITS[unit]
    return Objective(f"{name}.{statistic}" if dot else name, OF_A_RUN[name], statistic or None, seconds)
