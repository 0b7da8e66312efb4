"""`ifbbench tune`: searches the settings with which a simulated device serves a trace best under its objectives.

Pattern search: all changes of one setting that can matter run in parallel, the best ones are combined, and steps get
smaller. It runs on the first requests of the trace, as many as show the concurrency of the whole; the finalists run the
whole trace, and the search goes on around the best of them with what is left of MAX_WORK.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from ifbbench.clock import NO_PROGRESS, Progress
from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.planning.heuristics import TUNERS, trtllm_bench_limits
from ifbbench.planning.tune_goal import Goal, Summary
from ifbbench.planning.tune_rate import MAX_FACTOR, MaxRate, find_max_rate, find_replicas
from ifbbench.planning.tune_runs import Case, Run, Runs
from ifbbench.planning.tune_space import Settings, Space
from ifbbench.workload.load import read_source
from ifbbench.workload.trace import columns_of

FIRST_REQUESTS = 250
# A prefix: at least this share of the trace, and so many times the requests that run at once.
MIN_PREFIX, PREFIX_SHARE, CONCURRENCY_FACTOR = 300, 1 / 12, 2
# On such a prefix, the baseline's figure differs by less than this share from that on the whole trace.
MAX_PREFIX_ERROR = 0.1
# Work: simulated requests, as a share of those of an exhaustive grid, between limits in whole traces. The search on
# prefixes takes at most a third.
WORK_SHARE, MIN_WORK, MAX_WORK, PREFIX_WORK = 0.08, 7.0, 16.0, 1 / 3
FINALISTS = 3
PREFIX_STEPS, WHOLE_STEPS = (4.0, 2.0), (2.0, 2.0**0.5)
# With max_rate, settings are compared at this many times the rate that the best ones so far reach.
PRESSURE, MIN_GAIN, MAX_ROUNDS = 1.1, 1.01, 3
COST_GPUS = 64


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


@dataclass
class Tuning:
    """What a search found. best: None if no setting runs. baselines: what users get without a search. importance: see
    `importance_of`. is_complete: it was not interrupted."""

    goal: Goal
    space: Space
    runs: Runs
    best: Candidate | None = None
    candidates: list[Candidate] = field(default_factory=list)
    baselines: list[Candidate] = field(default_factory=list)
    importance: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_complete: bool = False


OnBest = Callable[[Candidate], None]


class Tuner:
    """The search over one trace. max_gpus: of all replicas together. price: of a GPU hour. on_best: is called with
    each new best candidate."""

    def __init__(
        self, source: str | None, base: RunConfig, fixed: frozenset[str], goal: Goal, max_gpus: int | None = None,
        price: float = 1.0, progress: Progress = NO_PROGRESS, on_best: OnBest = lambda best: None,
    ) -> None:  # fmt: skip
        if base.hardware is None:
            raise InputError(f"--device {base.device}: tune simulates; give a hardware profile, such as sim:h100-sxm.")
        self.base = base
        self.runs = Runs(read_source(source, base, progress), base)
        self.space = Space.of(base, fixed, self.runs.trace)
        self.goal = Goal(goal.name, goal.objectives, self._refused())
        self.price = price
        if goal.name == "max_rate" and (self.runs.rate_per_s is None or base.concurrency is not None):
            raise InputError("--goal max_rate: requests do not arrive at a rate of their own; give a trace with "
                             "arrival times or --request_rate, without --concurrency.")  # fmt: skip
        self.max_gpus = max_gpus or (COST_GPUS if goal.name == "cost" else self._least_gpus())
        self.found = Tuning(self.goal, self.space, self.runs)
        self._progress = progress
        self._on_best = on_best
        self._candidates: dict[Case, Candidate] = {}

    def _refused(self) -> int:
        """Requests too long for the model, whatever the settings."""
        from ifbbench.model.named_models import load_model_config

        longest = self.base.max_seq_len or load_model_config(self.base.model).max_position_embeddings
        return sum(length >= longest for length in columns_of(self.runs.trace.requests).prompt_len)

    def _least_gpus(self) -> int:
        if self.base.tp_size * self.base.pp_size > 1:
            return self.base.tp_size * self.base.pp_size
        return min(self.space.tp_sizes(max_gpus=8))

    # The search.

    def run(self) -> Tuning:
        """Search. A KeyboardInterrupt ends it with what was found so far."""
        try:
            self._search()
            self.found.is_complete = True
        except KeyboardInterrupt:
            if self.found.best is None:
                raise
        self.found.candidates = sorted(self._candidates.values(), key=self.key, reverse=True)
        return self.found

    def _search(self) -> None:
        whole, best = self.runs.total, None
        self._progress.stage("first answer")
        deployments = [(tp, self._replicas(tp)) for tp in self.space.tp_sizes(self.max_gpus)]
        starts = {tp: self._starts(tp) for tp, _ in deployments}
        for tp, replicas in deployments:
            first = self._evaluate([Case(point, min(FIRST_REQUESTS, whole), replicas) for point in starts[tp]])
            best = self._better([best, *first])
        if best is None:
            raise InputError(f"no setting runs this trace: {self.runs.done[0].error}.")
        self._announce(best)
        self._progress.stage("baselines")
        self._baselines(deployments, starts)
        if self.goal.needs_stable_queue:
            for tp, replicas in deployments:
                self._search_load(starts[tp], replicas)
            return
        for tp, replicas in deployments:
            self._search_settings(starts[tp], replicas, len(deployments))

    def _replicas(self, tp: int) -> int:
        return 1 if self.goal.name == "cost" else max(self.max_gpus // (tp * self.base.pp_size), 1)

    def _starts(self, tp: int) -> list[Settings]:
        """The settings as they are, with the limits of trtllm-bench's rule, and at a small token budget."""
        columns = columns_of(self.runs.trace.requests)
        rule = trtllm_bench_limits(self.base.with_values(tp_size=tp), fmean(columns.prompt_len),
                                   fmean(columns.output_len))  # fmt: skip
        points = (self.space.point(tp_size=tp, **rule), self.space.point(tp_size=tp),
                  self.space.point(tp_size=tp, max_num_tokens=1024))  # fmt: skip
        return list(dict.fromkeys(points))

    def _baselines(self, deployments: Sequence[tuple[int, int]], starts: dict[int, list[Settings]]) -> None:
        """Run what users get without a search on the whole trace, with the fewest GPUs for each replica."""
        tp, replicas = deployments[0]
        tuned = (*self.space.point(tp_size=tp), *TUNERS.items())
        wanted = {"trtllm-bench rule": starts[tp][0], "dynamic tuning": tuned}
        if self.goal.needs_stable_queue:
            found = [self._at_full_load(point, replicas, None) for point in wanted.values()]
        else:
            found = self._candidates_of([Case(point, None, replicas) for point in wanted.values()])
        for name, one in zip(wanted, found, strict=True):
            if one is not None:
                self.found.baselines.append(replace(one, name=name))
        self._announce(found[0])

    def _search_settings(self, starts: list[Settings], replicas: int, deployments: int) -> None:
        """Goodput or output throughput, of `replicas` that share the traffic."""
        work, left = self.runs.work, (self.allowed_work - self.runs.work) / deployments
        allowed, prefix = work + left, self._prefix(starts[0], replicas)
        if prefix is not None:
            self._progress.stage(f"searching on the first {prefix:,} requests")
            limit = work + PREFIX_WORK * left
            self._descend([Case(point, prefix, replicas) for point in starts], PREFIX_STEPS, limit)
            ranked = [one for one in self._candidates.values() if one.run.case.requests == prefix]
            ranked = [one for one in ranked if one.run.case.replicas == replicas]
            ranked.sort(key=self.key, reverse=True)
            finalists = [one.run.case.settings for one in ranked[:FINALISTS]]
        else:
            finalists = starts
        self._progress.stage("searching on the whole trace")
        best = self._descend([Case(point, None, replicas) for point in finalists], WHOLE_STEPS, allowed)
        if best is not None:
            self._set_importance(best)

    @property
    def allowed_work(self) -> float:
        """Simulated requests of the whole search."""
        return min(max(WORK_SHARE * len(self.space.grid()), MIN_WORK), MAX_WORK) * self.runs.total

    def _prefix(self, point: Settings, replicas: int) -> int | None:
        """How many of the first requests show what the whole trace does; None if no small number of them does."""
        whole = self.runs.total // replicas
        (probe,) = self._candidates_of([Case(point, None, replicas)])
        if probe is None:
            return None
        peak = probe.summary["peak_scheduled_requests"]
        prefix = max(int(whole * PREFIX_SHARE), CONCURRENCY_FACTOR * peak, MIN_PREFIX)
        while prefix <= whole / 2:
            (part,) = self._candidates_of([Case(point, prefix, replicas)])
            if part is not None and abs(part.score - probe.score) <= MAX_PREFIX_ERROR * abs(probe.score):
                return prefix
            prefix *= 2
        return None

    def _search_load(self, starts: list[Settings], replicas: int) -> None:
        """The highest rate, or the fewest replicas. Settings are compared under a little more load than the best ones
        so far can take, by how much they miss; then the load that the best of them takes is found."""
        is_rate, settings, full_load = self.goal.name == "max_rate", starts[0], replicas
        best: Candidate | None = None
        for _ in range(MAX_ROUNDS):
            self._progress.stage("finding the highest rate" if is_rate else "finding the fewest replicas")
            found = self._at_full_load(settings, replicas, best)
            if best is not None and (found is None or found.score <= best.score * (MIN_GAIN if is_rate else 1)):
                break
            best = found
            if is_rate:  # below any rate that meets the objectives, settings are compared at the lowest one
                factor = 1 / MAX_FACTOR if best is None or best.rate is None else best.rate.low * PRESSURE
                case = Case(settings, None, replicas, rate=factor)
            else:
                full_load = self._most_replicas(settings) if best is None else best.run.case.replicas - 1
                if not full_load:
                    break
                case = Case(settings, None, full_load)
            self._progress.stage("comparing settings under pressure")
            cases = [replace(case, settings=point) for point in dict.fromkeys([settings, *starts])]
            limit = self.runs.work + PREFIX_WORK * self.allowed_work
            under_pressure = self._descend(cases, PREFIX_STEPS, limit, announce=best is None)
            if under_pressure is None or under_pressure.run.case.settings == settings:
                break
            self._set_importance(under_pressure)
            settings = under_pressure.run.case.settings

    def _most_replicas(self, settings: Settings) -> int:
        return max(self.max_gpus // (dict(settings)["tp_size"] * self.base.pp_size), 1)

    def _at_full_load(self, settings: Settings, replicas: int, known: Candidate | None) -> Candidate | None:
        """The candidate of `settings` at the highest rate, or with the fewest replicas, that meets the objectives."""
        if self.goal.name == "cost":
            start = known.run.case.replicas if known else 1
            run = find_replicas(self.runs, self.goal, settings, self._most_replicas(settings), start)
            candidate = self.candidate(run) if run is not None else None
        else:
            start = known.rate.low if known and known.rate else 1.0
            found = find_max_rate(self.runs, self.goal, settings, replicas, start)
            candidate = self.candidate(found.run, rate=found) if found.run is not None else None
        if candidate is not None:
            self._candidates[candidate.run.case] = candidate
            self._announce(candidate)
        return candidate

    def _descend(
        self, starts: Sequence[Case], steps: Sequence[float], max_work: float, announce: bool = True
    ) -> Candidate | None:
        """The best candidate that is found from `starts` on; no more runs begin once `max_work` requests have run."""
        best = self._better(self._evaluate(starts))
        for step in steps:
            while best is not None and self.runs.work < max_work and not self._is_perfect(best):
                if announce:
                    self._announce(best)
                case = best.run.case
                moves = self.space.moves(case.settings, best.summary, step)
                room = max(int(max_work - self.runs.work) // self._requests(case), 1)
                moved = self._evaluate([replace(case, settings=point) for _, point in moves[:room]])
                better = [one for one in moved if self.key(one) > self.key(best)]
                if len(better) > 1:  # the best change of each setting, all at once
                    joint = dict(case.settings)
                    for one in sorted(better, key=self.key):
                        joint |= dict(set(one.run.case.settings) - set(case.settings))
                    better += self._evaluate([replace(case, settings=tuple(joint.items()))])
                if not better:
                    break
                best = self._better([best, *better])
        if best is not None and announce:
            self._announce(best)
        return best

    # Candidates.

    def _evaluate(self, cases: Sequence[Case]) -> list[Candidate]:
        """The candidates of those cases that run."""
        found = [one for one in self._candidates_of(cases) if one is not None]
        self._candidates |= {one.run.case: one for one in found}
        best = self.found.best
        text = "" if best is None else f"best so far: {abs(best.score):,.4g} {self.goal.unit}"
        self._progress.update(self.runs.work, None, text)
        return found

    def _candidates_of(self, cases: Sequence[Case]) -> list[Candidate | None]:
        return [self.candidate(run) for run in self.runs.run(cases)]

    def _requests(self, case: Case) -> int:
        """How many requests a run of `case` simulates."""
        share = max(self.runs.total // case.replicas, 1)
        return min(case.requests or share, share)

    def candidate(self, run: Run, rate: MaxRate | None = None) -> Candidate | None:
        """The candidate of a run; None if it failed."""
        case, summary = run.case, run.summary
        if run.error:
            return None
        gpus = case.replicas * dict(case.settings)["tp_size"] * self.base.pp_size
        if self.goal.name == "cost":
            tokens_per_s = case.replicas * summary["output_throughput_tokens_per_s"]
            score = -gpus * self.price / 3600 / tokens_per_s * 1e6 if tokens_per_s else float("-inf")
        elif self.goal.name == "max_rate":
            score = (self.runs.rate_per_s or 0.0) * (rate.low if rate else 0.0)
        else:
            score = case.replicas * summary[self.goal.figure]
        return Candidate(run, gpus, score, rate=rate)

    def key(self, one: Candidate) -> tuple[float, ...]:
        missed, level, latency = self.goal.rank(one.summary, one.score)
        return (missed, one.score if one.score < 0 else level, latency)

    def _better(self, candidates: Sequence[Candidate | None]) -> Candidate | None:
        return max((one for one in candidates if one is not None), key=self.key, default=None)

    def _is_perfect(self, one: Candidate) -> bool:
        """Whether every request met its objective, which no other settings can improve."""
        return self.goal.name == "goodput" and one.summary["goodput_share"] == 1.0 and not self.goal.shortfalls(one.summary)

    def _announce(self, candidate: Candidate | None) -> None:
        """Keep `candidate` if it is the best of those that ran so much of the trace, or ran more."""
        best = self.found.best
        if candidate is None or candidate == best:
            return
        if best is None or self._evidence(candidate) > self._evidence(best):
            self.found.best = candidate
            self._on_best(candidate)

    def _evidence(self, one: Candidate) -> tuple[Any, ...]:
        """Whether the figure of the goal was found, how much of the trace ran, and then how good it is."""
        return one.rate is not None or self.goal.name != "max_rate", one.run.case.requests is None, self.key(one)

    def _set_importance(self, best: Candidate) -> None:
        """For each setting, what the values beside the best one lose, in shares of the score; of what ran anyway."""
        if best != self.found.best and not self.goal.needs_stable_queue:
            return
        case, mine = best.run.case, dict(best.run.case.settings)
        others = [one for one in self._candidates.values()
                  if replace(one.run.case, settings=case.settings) == case and one is not best]  # fmt: skip
        importance: dict[str, dict[str, Any]] = {}
        for name in mine:
            if name in self.space.fixed or name == "tp_size":
                continue
            values = {}
            for one in others:
                changed = {key for key, _ in set(one.run.case.settings) ^ set(case.settings)}
                if changed == {name}:
                    values[str(one.settings[name])] = self._loss(best, one)
            importance[name] = {"effect": max(values.values(), default=0.0), "values": values}
        self.found.importance = importance

    def _loss(self, best: Candidate, other: Candidate) -> float:
        """What `other` loses: the share of the score, and 1 where it misses an objective that `best` meets."""
        missed = self.goal.shortfalls(other.summary), self.goal.shortfalls(best.summary)
        if self.goal.needs_stable_queue:  # compared under pressure, by what they miss
            return max(missed[0].values(), default=1.0) / max(missed[1].values(), default=1.0) - 1.0
        if missed[0] and not missed[1]:
            return 1.0
        return 1.0 - other.score / best.score if best.score else 0.0
