"""Workload specifications: a workload as distributions, and the drawing of its requests."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ifbbench.workload.arrivals import KINDS as ARRIVAL_KINDS
from ifbbench.workload.arrivals import AllAtOnce, ArrivalProcess
from ifbbench.workload.distributions import KINDS as LENGTH_KINDS
from ifbbench.workload.distributions import LengthDistribution, require
from ifbbench.workload.reserve import Reserve
from ifbbench.workload.streams import Stream, generator
from ifbbench.workload.trace import Trace, TraceRequest

ARRIVAL_DECIMALS = 6


@dataclass(frozen=True)
class WorkloadSpec:
    """Requests to be drawn. `reserve` sets `max_new_tokens` from the output length drawn; see `reserve.Reserve`."""

    name: str
    num_requests: int
    prompt_len: LengthDistribution
    output_len: LengthDistribution
    arrival: ArrivalProcess = field(default_factory=AllAtOnce)
    reserve: str = "actual"

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
        return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def draw_trace(spec: WorkloadSpec, seed: int, source: str, max_num_samples: int | None = None) -> Trace:
    """The first `max_num_samples` requests of `spec` (default: all); a pure function of (spec, seed)."""
    count = min(spec.num_requests, max_num_samples or spec.num_requests)
    prompt_lens = spec.prompt_len.draw(generator(seed, Stream.INPUT_LENGTH), count)
    output_lens = spec.output_len.draw(generator(seed, Stream.OUTPUT_LENGTH), count)
    arrivals_s = spec.arrival.draw(generator(seed, Stream.ARRIVAL), count).round(ARRIVAL_DECIMALS)
    reserve = Reserve(spec.reserve)
    requests = [
        reserve.apply(TraceRequest(index, arrival_s, prompt_len, max_new_tokens=output_len, output_len=output_len))
        for index, (arrival_s, prompt_len, output_len) in enumerate(
            zip(arrivals_s.tolist(), prompt_lens.tolist(), output_lens.tolist(), strict=True)
        )
    ]
    sha256 = hashlib.sha256(spec.canonical_text(seed).encode()).hexdigest()
    return Trace(spec.name, requests, sha256, source)


def _tagged(choice: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    (kind,) = (name for name, candidate in kinds.items() if type(choice) is candidate)
    return {"kind": kind, **asdict(choice)}
