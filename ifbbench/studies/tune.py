"""`ifbbench tune`: searches the settings with which a simulated device serves a trace best under its objectives.

Pattern search: all changes of one setting that can matter run in parallel, the best ones are combined, and steps get
smaller (`tune_search.py`). A first answer and the baselines come first; then settings are compared under the traffic as
it is (`tune_traffic.py`), or the highest rate or the fewest replicas are found (`tune_load.py`).
"""

from collections.abc import Sequence
from dataclasses import replace

from ifbbench.errors import InputError
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import ENGINE_NAMES
from ifbbench.simulated.hardware import load_hardware
from ifbbench.studies.heuristics import TUNERS
from ifbbench.studies.tune_candidates import Candidate, Goal
from ifbbench.studies.tune_load import COST_GPUS, FewestReplicas, HighestRate, LoadSearch
from ifbbench.studies.tune_rate import find_max_rates, find_replicas
from ifbbench.studies.tune_runs import Case
from ifbbench.studies.tune_search import ALONE_RUNS, OnBest, Search, Tuning
from ifbbench.studies.tune_space import Settings
from ifbbench.studies.tune_traffic import TrafficSearch
from ifbbench.workload.load import read_source
from ifbbench.workload.trace import Trace

FIRST_REQUESTS = 250


class Tuner(Search):
    """The whole search: which degrees of tensor parallelism and how many replicas there may be, and the stages.

    price: price of a GPU hour.
    load: finds the load that settings take, where the goal is that; None for goals under the traffic as it is.
    """

    def __init__(
        self,
        source: str | Trace | None,
        base: RunConfig,
        fixed: frozenset[str],
        goal: Goal,
        max_gpus: int | None = None,
        price: float = 1.0,
        progress: Progress = NO_PROGRESS,
        on_best: OnBest = lambda best: None,
    ) -> None:
        if base.hardware is None:
            raise InputError(f"--device {base.device}: tune simulates; give a hardware profile, such as sim:h100-sxm.")
        trace = source if isinstance(source, Trace) else read_source(source, base, progress)
        super().__init__(trace, base, fixed, goal, price, progress, on_best)
        self._check_goal()
        self.max_gpus = max_gpus or (COST_GPUS if goal.is_minimised else self._least_gpus())
        self.load: LoadSearch | None = None
        if goal.needs_stable_queue:
            self.load = FewestReplicas(self) if goal.is_minimised else HighestRate(self)

    def _check_goal(self) -> None:
        """InputError if the goal has no figure with this trace or device."""
        base, goal = self.base, self.goal
        if goal.name == "max_rate" and (self.runs.rate_per_s is None or base.concurrency is not None):
            raise InputError(
                "--goal max_rate: requests do not arrive at a rate of their own; give a trace with "
                "arrival times or --request_rate, without --concurrency."
            )
        draws_rate = base.rate_schedule is not None or base.arrival not in (None, "recorded")
        if goal.name == "max_rate" and base.request_rate is None and draws_rate:
            raise InputError(
                "--goal max_rate: --arrival and --rate_schedule have rates of their own, which do not "
                "change; expected recorded arrivals, or --request_rate."
            )
        if goal.name == "energy" and (base.hardware is None or load_hardware(base.hardware).watts is None):
            raise InputError(
                f"--goal energy: the power of {base.hardware or base.device} is not known; choose another --device, or "
                "add the table [watts] to its profile."
            )

    def _least_gpus(self) -> int:
        if self.base.tp_size * self.base.pp_size > 1:
            return self.base.tp_size * self.base.pp_size
        return min(self.space.tp_sizes(max_gpus=8))

    def run(self) -> Tuning:
        """Search. A KeyboardInterrupt ends it with what was found so far."""
        try:
            self._search()
            self.found.is_complete = True
        except KeyboardInterrupt:
            if self.found.best is None:
                raise
        self.found.candidates = sorted(self.known.values(), key=self.judge.key, reverse=True)
        return self.found

    def without_search(self, max_gpus: int) -> Candidate | None:
        """With the goal cost: the cheapest candidate of the settings from which a search starts, with at most so many
        GPUs; None if these are not enough. InputError if the model does not fit."""
        (tp,) = self.space.tp_sizes(max_gpus)
        most = min(self.max_replicas(tp), max_gpus // (tp * self.base.pp_size))
        best: Candidate | None = None
        for point in self.starts(tp)[:2]:
            near = most if best is None else best.run.case.replicas
            run = find_replicas(self.runs, self.goal, point, most, near)
            best = self.judge.best_of([best, None if run is None else self.judge.candidate(run)])
            most = most if best is None else best.run.case.replicas
        return best

    def nearest(self, max_gpus: int) -> Candidate | None:
        """The candidate that meets the objectives best with so many GPUs, of the settings from which a search starts;
        None if none runs."""
        (tp,) = self.space.tp_sizes(max_gpus)
        replicas = min(max(max_gpus // (tp * self.base.pp_size), 1), self.max_replicas(tp))
        return self.judge.best_of(self.evaluate([Case(point, None, replicas) for point in self.starts(tp)[:2]]))

    def spare_rate(self, one: Candidate) -> float:
        """How much faster requests may come, as a share of their rate, before the replicas of `one` miss objectives."""
        (found,) = find_max_rates(self.runs, self.goal, [one.run.case])
        return max(found.low - 1.0, 0.0)

    # Stages.

    def _search(self) -> None:
        self._progress.stage("searching")
        self.runs.on_work = self.update
        load, total = self.load, self.runs.total
        deployments = [(tp, self._replicas(tp)) for tp in self.space.tp_sizes(self.max_gpus)]
        of_load = [] if load is None else [load.max_work(tp) for tp, _ in deployments]
        later = (sum(of_load) if of_load else self.allowed_work) + self._last_work
        of_first = 1 + (0 if load is None else load.first_runs)
        self.stage("first answer", of_first * FIRST_REQUESTS * sum(count for _, count in deployments), later)
        starts = {tp: self.starts(tp) for tp, _ in deployments}
        self._find_first_answer(deployments, starts)
        of_baselines = 2 * (1 if load is None else load.max_runs(deployments[0][0])) * total
        self.stage("baselines", of_baselines, later)
        self._run_baselines(deployments, starts)
        if load is None:
            traffic = TrafficSearch(self)
            for index, (tp, replicas) in enumerate(deployments):
                traffic.run(starts[tp], replicas, len(deployments), len(deployments) - 1 - index)
            return
        for index, (tp, replicas) in enumerate(deployments):
            load.run(starts[tp], replicas, sum(of_load[index + 1 :]) + self._last_work)
        load.finish()

    def _find_first_answer(self, deployments: Sequence[tuple[int, int]], starts: dict[int, list[Settings]]) -> None:
        """Run the settings that a search starts from with the first requests. InputError if none of them runs."""
        if self.base.enable_steady_state and (self.goal.is_minimised or any(count > 1 for _, count in deployments)):
            raise InputError(
                "--enable_steady_state: the figures of several replicas are those of all their requests; "
                "leave it out, or give --max-gpus for one replica with another goal."
            )
        best: Candidate | None = None
        for tp, replicas in deployments:
            prefix = FIRST_REQUESTS * replicas if self.runs.total > FIRST_REQUESTS * replicas else None
            first = self.evaluate([Case(point, prefix, replicas) for point in starts[tp]])
            best = self.judge.best_of([best, *first])
        if best is None:
            raise InputError(f"no setting runs this trace: {self.runs.done[0].error}.")
        self.announce(best if self.load is None else self.load.first_answer(best))

    def _run_baselines(self, deployments: Sequence[tuple[int, int]], starts: dict[int, list[Settings]]) -> None:
        """Run what users get without a search on the whole trace, with the fewest GPUs for each replica."""
        tp, replicas = deployments[0]
        tuned = (*self.space.point(tp_size=tp), *TUNERS.items())
        wanted = {"trtllm-bench rule": starts[tp][0], "dynamic tuning": tuned}
        if self.space.is_server:
            wanted = {f"{ENGINE_NAMES[self.base.engine]}'s defaults": starts[tp][0]}
        if self.load is None:
            found = self.candidates_of([Case(point, None, replicas) for point in wanted.values()])
        else:
            found = self.load.find_all(list(wanted.values()), replicas)
        for name, one in zip(wanted, found, strict=True):
            if one is not None:
                self.found.baselines.append(replace(one, name=name))
        self.announce(found[0])

    def _replicas(self, tp: int) -> int:
        return 1 if self.goal.is_minimised else self.max_replicas(tp)

    @property
    def _last_work(self) -> float:
        """Simulated requests, at most, of what follows when the best settings are known."""
        return float(ALONE_RUNS * self.runs.total) if self.load is None else self.load.last_work
