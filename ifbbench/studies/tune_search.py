"""What every search of `tune` is made of: the candidates that ran, and steps from the best of them that improve it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from ifbbench.analysis.words import SIZES, setting_of
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.settings.bounds import MAX_REPLICAS
from ifbbench.settings.config import RunConfig
from ifbbench.studies.heuristics import trtllm_bench_limits
from ifbbench.studies.tune_candidates import EQUAL_SHARE, TIE, Candidate, Goal, Judge
from ifbbench.studies.tune_runs import Case, Runs
from ifbbench.studies.tune_space import Settings, Space, idle_limits
from ifbbench.workload.trace import Trace, columns_of

# Work: simulated requests, as a share of those of an exhaustive grid, between limits in whole traces.
WORK_SHARE, MIN_WORK, MAX_WORK = 0.07, 14.0, 20.0
WHOLE_STEPS = (2.0, 2.0**0.5)
# In the end, settings are changed alone, by this step: in so many runs those that were not before, and in so many runs
# altogether, with limits that bind.
ALONE_STEP, UNKNOWN_RUNS, ALONE_RUNS = 1.9, 3, 5


@dataclass
class Tuning:
    """What a search found.

    best: the best candidate, None if no setting runs.
    baselines: what users get without a search.
    is_complete: whether it was not interrupted.
    rates_of_stretches: maximum rate of each third of the trace alone, in order, with the goal max_rate.
    as_recorded: the best settings under arrivals as recorded, with the goal max_rate and recorded arrivals.
    """

    space: Space
    judge: Judge
    best: Candidate | None = None
    candidates: list[Candidate] = field(default_factory=list)
    baselines: list[Candidate] = field(default_factory=list)
    is_complete: bool = False
    rates_of_stretches: list[float] = field(default_factory=list)
    as_recorded: Candidate | None = None

    @property
    def goal(self) -> Goal:
        return self.judge.goal

    @property
    def runs(self) -> Runs:
        return self.judge.runs

    @property
    def alone(self) -> dict[str, list[Candidate]]:
        """See Judge."""
        return {} if self.best is None else self.judge.alone(self.best, self.candidates)

    @property
    def importance(self) -> dict[str, dict[str, Any]]:
        """See Judge."""
        return {} if self.best is None else self.judge.importance(self.best, self.candidates, self.space)


OnBest = Callable[[Candidate], None]


class Search:
    """A search over one trace, whatever it looks for.

    on_best: is called with each new best candidate.
    known: the candidates that ran, by case.
    max_gpus: maximum number of GPUs of all replicas together.
    """

    max_gpus: int

    def __init__(
        self,
        trace: Trace,
        base: RunConfig,
        fixed: frozenset[str],
        goal: Goal,
        price: float = 1.0,
        progress: Progress = NO_PROGRESS,
        on_best: OnBest = lambda best: None,
    ) -> None:
        self.base = base
        self.runs = Runs(trace, base)
        self.space = Space.of(base, fixed, self.runs.trace)
        self.goal = Goal(goal.name, goal.objectives, self._refused())
        self.judge = Judge(self.goal, self.runs, price)
        self.found = Tuning(self.space, self.judge)
        self.known: dict[Case, Candidate] = {}
        self._progress, self._on_best = progress, on_best
        self._stage_label = ""
        # Simulated requests at the end of the stage, and of the stages after it, both at most.
        self._stage_end = self._later_work = 0.0

    def _refused(self) -> int:
        """Requests too long for the model, whatever the settings."""
        from ifbbench.models.named_models import load_model_config

        longest = self.base.max_seq_len or load_model_config(self.base.model).max_position_embeddings
        return sum(length >= longest for length in columns_of(self.runs.trace.requests).prompt_len)

    def starts(self, tp: int) -> list[Settings]:
        """The settings as they are, with the limits of trtllm-bench's rule, and at a small token budget."""
        columns = columns_of(self.runs.trace.requests)
        rule = trtllm_bench_limits(
            self.base.with_values(tp_size=tp), fmean(columns.prompt_len), fmean(columns.output_len)
        )
        points = (
            *(() if self.space.is_server else (self.space.point(tp_size=tp, **rule),)),
            self.space.point(tp_size=tp),
            self.space.with_limits(tp, num_tokens=1024),
        )
        return list(dict.fromkeys(points))

    def max_replicas(self, tp: int) -> int:
        """Replicas that the GPUs are enough for, each with at least one session of the trace."""
        return max(min(self.max_gpus // (tp * self.base.pp_size), self.runs.sessions, MAX_REPLICAS), 1)

    @property
    def allowed_work(self) -> float:
        """Simulated requests of the whole search."""
        return min(max(WORK_SHARE * len(self.space.grid()), MIN_WORK), MAX_WORK) * self.runs.total

    def descend(
        self, starts: Sequence[Case], steps: Sequence[float], max_work: float, announce: bool = True
    ) -> Candidate | None:
        """The best candidate that is found from `starts` on; no more runs begin once `max_work` requests have run."""
        best = self.judge.best_of(self.evaluate(starts))
        for step in steps:
            while best is not None and self.runs.work < max_work and not self.judge.is_perfect(best):
                if announce:
                    self.announce(best)
                case = best.run.case
                moves = self.space.moves(case.settings, best.summary, step)
                room = max(int(max_work - self.runs.work) // self._requests(case), 1)
                moved = self.evaluate([replace(case, settings=point) for _, point in moves[:room]])
                if (better := self.improved(best, moved)) is None:
                    break
                best = better
        if best is not None and announce:
            self.announce(best)
        return best

    def improved(self, best: Candidate, moved: Sequence[Candidate]) -> Candidate | None:
        """The best of `moved`, and of all that are better than `best` together; None if none is."""
        case = best.run.case
        better = [one for one in moved if self.judge.key(one) > self.judge.key(best)]
        if len(better) > 1:  # the best change of each setting, all at once
            joint = dict(case.settings)
            for one in sorted(better, key=self.judge.key):
                joint |= dict(set(one.run.case.settings) - set(case.settings))
            better += self.evaluate([replace(case, settings=tuple(joint.items()))])
        return self.judge.best_of(better)

    def evaluate(self, cases: Sequence[Case]) -> list[Candidate]:
        """The candidates of those cases that run."""
        found = [one for one in self.candidates_of(cases) if one is not None]
        self.known |= {one.run.case: one for one in found}
        return found

    def add(self, candidate: Candidate | None) -> Candidate | None:
        """Keep a candidate that was found at the most load that its settings take, if there is one."""
        if candidate is not None:
            self.known[candidate.run.case] = candidate
            self.announce(candidate)
        return candidate

    def candidates_of(self, cases: Sequence[Case]) -> list[Candidate | None]:
        return [self.judge.candidate(run) for run in self.runs.run(cases)]

    def _requests(self, case: Case) -> int:
        """How many requests a run of `case` simulates."""
        return min(case.requests or self.runs.total, self.runs.total)

    def announce(self, candidate: Candidate | None) -> None:
        """Keep `candidate` if it is the best of those that ran so much of the trace, or ran more."""
        best = self.found.best
        if candidate is None or candidate == best:
            return
        if best is None or self.judge.evidence(candidate) > self.judge.evidence(best):
            self.found.best = candidate
            self._on_best(candidate)

    def replace_best(self, best: Candidate) -> None:
        if best != self.found.best:
            self.found.best = best
            self._on_best(best)

    def try_alone(self, best: Candidate) -> list[Candidate]:
        """Change alone settings that were not changed alone before, and limits that decisions depended on unless no
        change can help, so that it is known what that does."""
        known = self.judge.alone(best, self.known.values())
        idle = idle_limits(best.summary, best.settings["max_batch_size"])
        binding = {setting_of(limit) for limit in SIZES if limit not in idle and not self.judge.is_perfect(best)}
        moves = self.space.moves(best.run.case.settings, best.summary, ALONE_STEP)
        points = [point for name, point in moves if not known[name]][:UNKNOWN_RUNS]
        points += [point for name, point in moves if name in binding and known[name]]
        return self.evaluate([replace(best.run.case, settings=point) for point in points[:ALONE_RUNS]])

    def with_defaults(self, best: Candidate) -> Candidate:
        """`best` with the default value of each setting with which the goal's figure stays the same: a value that
        gains nothing with these requests, such as few batch slots, may cost much with the next ones."""
        case, score = best.run.case, best.score
        usual = dict(self.space.point(tp_size=best.settings["tp_size"]))
        names = [name for name, value in usual.items() if best.settings.get(name) != value]
        trials = [names, *([name] for name in names)] if len(names) > 1 else [names] * len(names)
        for trial in trials:
            changed = {name: usual[name] for name in trial if best.settings[name] != usual[name]}
            if not changed:
                continue
            point = tuple((best.settings | changed).items())
            for one in self.evaluate([replace(case, settings=point)]):
                if self._is_as_good(one, best, score):
                    best = replace(one, rate=best.rate, score=score if best.rate else one.score)
        return best

    def _is_as_good(self, one: Candidate, best: Candidate, score: float) -> bool:
        """Whether `one` misses no more than `best`, which runs under the same load, and has about this score."""
        missed = self.goal.shortfalls(one.summary), self.goal.shortfalls(best.summary)
        if any(ratio > missed[1].get(name, 1.0) for name, ratio in missed[0].items()):
            return False
        if self.goal.name == "max_rate":
            return True
        # What needs no search is not better, but for differences that are none.
        rules = [other.score for other in self.found.baselines if not self.goal.shortfalls(other.summary)]
        return one.score >= max(
            [score - TIE * abs(score), *(rule - EQUAL_SHARE * abs(rule) for rule in rules if rule <= score)]
        )

    def stage(self, label: str, work: float, later: float) -> None:
        """A stage of the search begins. work, later: simulated requests of it and of the stages after it, at most; so
        progress shows about the longest time that the search may take. That for settings that meet the objectives is
        counted from when it turns out to be needed."""
        self._stage_label, self._stage_end, self._later_work = label, self.runs.work + work, later
        self.update()

    def update(self) -> None:
        best, work = self.found.best, self.runs.work
        so_far = "" if best is None else f"best so far: {abs(best.score):,.4g} {self.goal.unit}"
        total = round(max(self._stage_end, work) + self._later_work)
        self._progress.update(work, max(total, 1), ", ".join(filter(None, (self._stage_label, so_far))))
