"""The simulated runs of a search: each once, in memory, in parallel, and the number of requests simulated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ifbbench.fleet.sides import gpus_of_side
from ifbbench.rundir.disaggregated import SIDES
from ifbbench.settings.config import RunConfig
from ifbbench.studies.points import PointResult, run_all, summarise_replicas
from ifbbench.studies.tune_space import Settings
from ifbbench.workload.arrivals import predecessors, session_starts
from ifbbench.workload.load import in_memory, load_trace, stretch_of
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
    "skip_samples": 0,
}

# What a trace is cut into, to see how much the highest rate varies; a stretch has so many requests at least.
STRETCHES, MIN_STRETCH = 3, 100


@dataclass(frozen=True)
class Case:
    """One run.

    requests: the first of the trace; None is all.
    replicas: servers that share them.
    rate: arrivals come so many times as fast.
    seed: seed of arrivals that are drawn; None is that of the settings.
    stretch: a third of the trace, 0 to STRETCHES - 1; None is all of it.
    decode_replicas: number of decode replicas, with prefill and decode apart; `replicas` then compute prompts.
    """

    settings: Settings
    requests: int | None = None
    replicas: int = 1
    rate: float = 1.0
    seed: int | None = None
    stretch: int | None = None
    decode_replicas: int = 0

    @property
    def is_apart(self) -> bool:
        """Whether prefill and decode are apart."""
        return self.decode_replicas > 0


@dataclass(frozen=True)
class Run:
    """A case that has run.

    summary: as in `summary.json`, of all replicas together; empty if it failed with `error`.
    """

    case: Case
    summary: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class Runs:
    """The runs of a search, each of which is made once.

    source: the trace as recorded (`read_source`).
    work: number of requests that were simulated.
    on_work: is called when runs have ended.
    done: runs in their order.
    """

    def __init__(self, source: Trace, base: RunConfig, processes: int | None = None) -> None:
        self.base = base
        self.work = 0
        self.on_work: Callable[[], None] = lambda: None
        self._source = source
        self._processes = processes
        self._traces: dict[tuple[int, int | None], Trace] = {}
        self._known: dict[Case, Run] = {}
        self.trace = self._trace(base.seed, None)

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
        return mean_rate(self.trace)

    def run(self, cases: Sequence[Case]) -> list[Run]:
        """The outcome of each case; those of before are not run again."""
        wanted = [case for case in dict.fromkeys(cases) if case not in self._known]
        for replicas in dict.fromkeys(map(_shares, wanted)):
            alike = [case for case in wanted if _shares(case) == replicas]
            traces = [self.trace_of(case) for case in alike]
            self.work += sum(
                min(case.requests or len(trace), len(trace)) for case, trace in zip(alike, traces, strict=True)
            )
            pairs = [(trace, self.config(case)) for case, trace in zip(alike, traces, strict=True)]
            run_point = partial(summarise_replicas, replicas=replicas)
            for number, result in run_all(run_point, pairs, self._processes):
                self._known[alike[number]] = _run_of(alike[number], result)
            self.on_work()
        return [self._known[case] for case in cases]

    def trace_of(self, case: Case) -> Trace:
        """The requests that a case runs over, of which it may take the first ones."""
        return self._trace(self.base.seed if case.seed is None else case.seed, case.stretch)

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
                **sides_of(case),
                **dict(case.settings),
            }
        )

    def gpus(self, case: Case) -> int:
        """GPUs of all replicas."""
        config = self.base.with_values(**dict(case.settings))
        if not case.is_apart:
            return case.replicas * config.tp_size * config.pp_size
        counts = (case.replicas, case.decode_replicas)
        return sum(count * gpus_of_side(config, side) for count, side in zip(counts, SIDES, strict=True))

    def _trace(self, seed: int, stretch: int | None) -> Trace:
        """The requests with the arrivals that `base` asks for."""
        if (seed, stretch) not in self._traces:
            if stretch is None:
                trace = load_trace(self._source, self.base.with_values(seed=seed))
            else:
                trace = stretch_of(self._trace(seed, None), stretch, STRETCHES)
            self._traces[seed, stretch] = in_memory(trace)
        return self._traces[seed, stretch]


def sides_of(case: Case) -> dict[str, int]:
    """The settings of how many replicas each side has, with prefill and decode apart."""
    return {"prefill_replicas": case.replicas, "decode_replicas": case.decode_replicas} if case.is_apart else {}


def _shares(case: Case) -> int:
    """The number of servers that share the requests; 1 for both sides of a fleet, which are one run."""
    return 1 if case.is_apart else case.replicas


def mean_rate(trace: Trace) -> float | None:
    """The mean rate of arrivals (1/s); None if all requests arrive at once."""
    arrivals_s = columns_of(trace.requests).arrival_s
    span_s = arrivals_s[-1] - arrivals_s[0]
    return (len(arrivals_s) - 1) / span_s if span_s > 0 else None


def _run_of(case: Case, result: PointResult) -> Run:
    if not result.error and not result.summary["requests"]["completed"]:
        return Run(case, error="every request is refused")
    return Run(case, result.summary, result.error)
