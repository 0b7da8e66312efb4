"""The simulated runs of a search: each once, in memory, in parallel, and the number of requests simulated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ifbbench.settings.config import RunConfig
from ifbbench.studies.points import PointResult, run_points, summarise_replicas
from ifbbench.studies.tune_space import Settings
from ifbbench.workload.arrivals import predecessors, session_starts
from ifbbench.workload.load import in_memory, load_trace
from ifbbench.workload.trace import Trace, columns_of

# Settings that have made the requests of a trace; they are not applied again.
APPLIED: Mapping[str, Any] = {
    "request_rate": None,
    "enable_exp_delays": False,
    "burstiness": None,
    "rate_schedule": None,
    "duration": None,
    "reserve": "trace",
    "max_prompt_len": None,
    "replica": None,
}


@dataclass(frozen=True)
class Case:
    """One run. requests: the first of the trace; None is all. replicas: servers that share them. rate: arrivals come so
    many times as fast. seed: of arrivals that are drawn; None is that of the settings."""

    settings: Settings
    requests: int | None = None
    replicas: int = 1
    rate: float = 1.0
    seed: int | None = None


@dataclass(frozen=True)
class Run:
    """A case that has run. summary: as in `summary.json`, of all replicas together; empty if it failed with `error`."""

    case: Case
    summary: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class Runs:
    """source: as recorded (`read_source`). work: number of requests that were simulated. done: runs in their order.
    on_work: is called when runs have ended."""

    def __init__(self, source: Trace, base: RunConfig, processes: int | None = None) -> None:
        self.base = base
        self.work = 0
        self.on_work: Callable[[], None] = lambda: None
        self._source = source
        self._processes = processes
        self._traces: dict[int, Trace] = {}
        self._known: dict[Case, Run] = {}
        self.trace = self._trace(base.seed)

    @property
    def total(self) -> int:
        return len(self.trace)

    @property
    def sessions(self) -> int:
        """Sessions of the trace; a request that belongs to none is one of its own."""
        columns = columns_of(self.trace.requests)
        return len(columns) if columns.after is None else len(set(session_starts(predecessors(columns)).tolist()))

    @property
    def done(self) -> list[Run]:
        return list(self._known.values())

    @property
    def rate_per_s(self) -> float | None:
        """The given rate of arrivals, else their mean rate; None if all requests arrive at once."""
        if self.base.request_rate is not None:
            return self.base.request_rate
        arrivals = columns_of(self.trace.requests).arrival_s
        span_s = arrivals[-1] - arrivals[0]
        return (len(arrivals) - 1) / span_s if span_s > 0 else None

    def run(self, cases: Sequence[Case]) -> list[Run]:
        """The outcome of each case; those of before are not run again."""
        groups: dict[tuple[int | None, int], list[Case]] = {}
        for case in dict.fromkeys(cases):
            if case not in self._known:
                groups.setdefault((case.seed, case.replicas), []).append(case)
        for (_, replicas), wanted in groups.items():
            trace = self.trace_of(wanted[0])
            self.work += sum(min(case.requests or len(trace), len(trace)) for case in wanted)
            configs = [self.config(case) for case in wanted]
            run_point = partial(summarise_replicas, replicas=replicas)
            results = run_points(trace, configs, self._processes, run_point=run_point)
            for case, result in zip(wanted, results, strict=True):
                self._known[case] = _run_of(case, result)
            self.on_work()
        return [self._known[case] for case in cases]

    def trace_of(self, case: Case) -> Trace:
        """The requests that a case runs over, of which it may take the first ones."""
        return self._trace(self.base.seed if case.seed is None else case.seed)

    def config(self, case: Case) -> RunConfig:
        """The settings of a run over a trace that has its arrivals and lengths already."""
        keeps_arrivals = self.base.concurrency is not None and self.base.keeps_arrivals
        return self.base.with_values(
            **{
                **APPLIED,
                "arrival": "recorded" if keeps_arrivals else None,
                "time_scale": 1 / case.rate,
                "max_num_samples": case.requests,
                "quiet": True,
                **dict(case.settings),
            }
        )

    def _trace(self, seed: int) -> Trace:
        """The requests with the arrivals that `base` asks for."""
        if seed not in self._traces:
            self._traces[seed] = in_memory(load_trace(self._source, self.base.with_values(seed=seed)))
        return self._traces[seed]


def _run_of(case: Case, result: PointResult) -> Run:
    if not result.error and not result.summary["requests"]["completed"]:
        return Run(case, error="every request is refused")
    return Run(case, result.summary, result.error)
