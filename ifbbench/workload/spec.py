"""Workload specifications: a workload as distributions."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ifbbench.workload.arrivals import KINDS as ARRIVAL_KINDS
from ifbbench.workload.arrivals import AllAtOnce, ArrivalProcess
from ifbbench.workload.distributions import KINDS as LENGTH_KINDS
from ifbbench.workload.distributions import LengthDistribution, require
from ifbbench.workload.durations import KINDS as DURATION_KINDS
from ifbbench.workload.sessions import Sessions
from ifbbench.workload.shared_prefix import SharedPrefix


@dataclass(frozen=True)
class WorkloadSpec:
    """Requests to be drawn. `reserve` sets `max_new_tokens` from the output length drawn; see `reserve.Reserve`.

    `prompt_len` is that of the whole prompt, but at least one token more than a shared prefix that it begins with. With
    `sessions`, it is that of each turn's new message, and `arrival` says when conversations begin.
    """

    name: str
    num_requests: int
    prompt_len: LengthDistribution
    output_len: LengthDistribution
    arrival: ArrivalProcess = field(default_factory=AllAtOnce)
    reserve: str = "actual"
    shared_prefix: SharedPrefix | None = None
    sessions: Sessions | None = None

    def __post_init__(self) -> None:
        require(self.num_requests >= 1, f"num_requests {self.num_requests} is below 1")

    def canonical_text(self, seed: int) -> str:
        """One text for one workload, however its file is laid out: what the trace's sha256 is taken of."""
        facts = {
            "arrival": _tagged(self.arrival, ARRIVAL_KINDS),
            "num_requests": self.num_requests,
            "output_len": _tagged(self.output_len, LENGTH_KINDS),
            "prompt_len": _tagged(self.prompt_len, LENGTH_KINDS),
            "reserve": self.reserve,
            "seed": seed,
        }
        if self.shared_prefix is not None:
            length = _tagged(self.shared_prefix.len, LENGTH_KINDS)
            facts["shared_prefix"] = asdict(self.shared_prefix) | {"len": length}
        if self.sessions is not None:
            facts["sessions"] = {
                "turns": _tagged(self.sessions.turns, LENGTH_KINDS),
                "think_time": _tagged(self.sessions.think_time, DURATION_KINDS),
            }
        return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def _tagged(choice: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    (kind,) = (name for name, candidate in kinds.items() if type(choice) is candidate)
    return {"kind": kind, **asdict(choice)}
