"""`ifbbench tune`: searches the settings with which a simulated device serves a trace best under its objectives.

Pattern search: all changes of one setting that can matter run in parallel, the best ones are combined, and steps get
smaller. It runs on the first requests of the trace, as many as show the concurrency of the whole; the finalists run the
whole trace, and the search goes on around the best of them with what is left of MAX_WORK.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import log
from statistics import fmean
from typing import Any

import numpy as np

from ifbbench.analysis.words import SIZES, setting_of
from ifbbench.errors import InputError
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.settings.bounds import MAX_REPLICAS
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import ENGINE_NAMES
from ifbbench.simulated.hardware import load_hardware
from ifbbench.studies.heuristics import TUNERS, trtllm_bench_limits
from ifbbench.studies.tune_candidates import EQUAL_SHARE, TIE, Candidate, Goal, Judge
from ifbbench.studies.tune_rate import (
    FINE,
    MAX_FACTOR,
    find_max_rate,
    find_max_rates,
    find_replicas,
    has_stretches,
    max_runs_for_rate,
    max_runs_for_replicas,
    rates_of_stretches,
)
from ifbbench.studies.tune_runs import Case, Runs
from ifbbench.studies.tune_space import Settings, Space, idle_limits
from ifbbench.workload.load import read_source
from ifbbench.workload.trace import Trace, columns_of

FIRST_REQUESTS = 250
# A prefix: at least this share of the trace, and so many times the requests that run at once.
MIN_PREFIX, PREFIX_SHARE, CONCURRENCY_FACTOR = 300, 1 / 12, 2
# On such a prefix, the baseline's figure differs by less than this share from that on the whole trace.
MAX_PREFIX_ERROR = 0.1
# Work: simulated requests, as a share of those of an exhaustive grid, between limits in whole traces. The search on
# prefixes takes at most a third.
WORK_SHARE, MIN_WORK, MAX_WORK, PREFIX_WORK = 0.07, 14.0, 20.0, 1 / 3
# In the end, settings are changed alone, by this step: in so many runs those that were not before, and in so many runs
# altogether, with limits that bind.
ALONE_STEP, UNKNOWN_RUNS, ALONE_RUNS = 1.9, 3, 5
FINALISTS = 3
# Further starts: shares of the requests that run at once without a limit, and token budgets.
SPREAD_DIVISORS, SPREAD_TOKENS = (2, 4, 8), (512, 2048)
PREFIX_STEPS, WHOLE_STEPS, LAST_STEP = (4.0, 2.0), (2.0, 2.0**0.5), 2.0**0.25
# Where objectives are missed, or settings with so many times the best figure miss them: a grid of the two limits that
# decide gaps and waiting, shares of the requests that run at once by token budgets, and further work in whole traces
# around the nearest of its points.
HELD_BACK = 1.05
GRID_DIVISORS, GRID_TOKENS = (1, 2, 3, 4, 6, 8), (128, 256, 384, 512, 1024, 2048, 4096, 8192)
NEAREST, NEAREST_STEPS, NEAREST_WORK = 3, (2.0**0.5, 2.0**0.25), 12.0
# With max_rate, settings are compared at this many times the rate that the best ones so far reach.
# ROUND_WORK: the share of the work that a round of comparing takes.
PRESSURE, MIN_GAIN, MAX_ROUNDS, ROUND_WORK = 1.05, 1.01, 10, 0.6
# In the end, settings are run at ABOVE times the highest rate, until so many were run or so many requests simulated;
# ABOVE_BATCH at a time, those first that are expected to miss least: by what settings that ran miss (the sum of the
# logarithms of their shortfalls), and so much more for each factor of 2 between their limits. Those that are expected
# to miss by more than MAX_EXPECTED are not run: see docs/measured/tuning.md.
ABOVE, ABOVE_RUNS, ABOVE_REQUESTS, ABOVE_BATCH, MISS_OF_DISTANCE, MAX_EXPECTED = 1.01, 250, 50_000, 8, 0.3, 0.4
# A deployment that costs so many times the best so far, with the limits of trtllm-bench's rule, is not searched.
COST_GPUS, FAR_OFF = 64, 1.3


@dataclass
class Tuning:
    """What a search found.

    best: None if no setting runs.
    baselines: what users get without a search.
    is_complete: whether it was not interrupted.
    rates_of_stretches: maximum rate of each third of the trace alone, in order, with the goal max_rate.
    as_recorded: with it and recorded arrivals, the best settings under these.
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


class Tuner:
    """The search over one trace.

    max_gpus: maximum number of GPUs of all replicas together.
    price: price of a GPU hour.
    on_best: is called with each new best candidate.
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
        self.base = base
        trace = source if isinstance(source, Trace) else read_source(source, base, progress)
        self.runs = Runs(trace, base)
        self.space = Space.of(base, fixed, self.runs.trace)
        self.goal = Goal(goal.name, goal.objectives, self._refused())
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
        self.max_gpus = max_gpus or (COST_GPUS if goal.is_minimised else self._least_gpus())
        self.judge = Judge(self.goal, self.runs, price)
        self.found = Tuning(self.space, self.judge)
        self._progress = progress
        self._on_best = on_best
        self._candidates: dict[Case, Candidate] = {}
        self._stage_label = ""
        # A factor of the rate that the first requests alone take.
        self._near = 1.0
        # Simulated requests at the end of the stage, and of the stages after it, both at most.
        self._stage_end = self._later_work = 0.0

    def _refused(self) -> int:
        """Requests too long for the model, whatever the settings."""
        from ifbbench.models.named_models import load_model_config

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
        self.found.candidates = sorted(self._candidates.values(), key=self.judge.key, reverse=True)
        return self.found

    def without_search(self, max_gpus: int) -> Candidate | None:
        """With the goal cost: the cheapest candidate of the settings from which a search starts, with at most so many
        GPUs; None if these are not enough. InputError if the model does not fit."""
        (tp,) = self.space.tp_sizes(max_gpus)
        most = min(self._max_replicas(tp), max_gpus // (tp * self.base.pp_size))
        best: Candidate | None = None
        for point in self._starts(tp)[:2]:
            near = most if best is None else best.run.case.replicas
            run = find_replicas(self.runs, self.goal, point, most, near)
            best = self.judge.best_of([best, None if run is None else self.judge.candidate(run)])
            most = most if best is None else best.run.case.replicas
        return best

    def nearest(self, max_gpus: int) -> Candidate | None:
        """The candidate that meets the objectives best with so many GPUs, of the settings from which a search starts;
        None if none runs."""
        (tp,) = self.space.tp_sizes(max_gpus)
        replicas = min(max(max_gpus // (tp * self.base.pp_size), 1), self._max_replicas(tp))
        return self.judge.best_of(self._evaluate([Case(point, None, replicas) for point in self._starts(tp)[:2]]))

    def spare_rate(self, one: Candidate) -> float:
        """How much faster requests may come, as a share of their rate, before the replicas of `one` miss objectives."""
        (found,) = find_max_rates(self.runs, self.goal, [one.run.case])
        return max(found.low - 1.0, 0.0)

    def _search(self) -> None:
        best = None
        self._progress.stage("searching")
        self.runs.on_work = self._update
        deployments = [(tp, self._replicas(tp)) for tp in self.space.tp_sizes(self.max_gpus)]
        of_load = [self._load_work(tp, MAX_ROUNDS) for tp, _ in deployments] if self.goal.needs_stable_queue else []
        later = sum(of_load) if of_load else self.allowed_work
        later += self._last_work
        of_first = 1 + (self.goal.name == "max_rate") * max_runs_for_rate(self.runs, is_final=False)
        self._stage("first answer", of_first * FIRST_REQUESTS * sum(count for _, count in deployments), later)
        starts = {tp: self._starts(tp) for tp, _ in deployments}
        if self.base.enable_steady_state and (self.goal.is_minimised or any(count > 1 for _, count in deployments)):
            raise InputError(
                "--enable_steady_state: the figures of several replicas are those of all their requests; "
                "leave it out, or give --max-gpus for one replica with another goal."
            )
        for tp, replicas in deployments:
            prefix = FIRST_REQUESTS * replicas if self.runs.total > FIRST_REQUESTS * replicas else None
            first = self._evaluate([Case(point, prefix, replicas) for point in starts[tp]])
            best = self.judge.best_of([best, *first])
        if best is None:
            raise InputError(f"no setting runs this trace: {self.runs.done[0].error}.")
        if self.goal.name == "max_rate" and best.run.case.requests is not None:
            case = best.run.case
            near = find_max_rate(self.runs, self.goal, case.settings, case.replicas, requests=case.requests)
            if near.run is not None:
                best = self.judge.candidate(near.run, rate=near) or best
                self._near = near.low
        self._announce(best)
        of_baselines = 2 * (self._load_runs(deployments[0][0]) if of_load else 1) * self.runs.total
        self._stage("baselines", of_baselines, later)
        self._baselines(deployments, starts)
        if self.goal.needs_stable_queue:
            for index, (tp, replicas) in enumerate(deployments):
                self._search_load(starts[tp], replicas, sum(of_load[index + 1 :]) + self._last_work)
            self._finish_load()
            return
        for index, (tp, replicas) in enumerate(deployments):
            self._search_settings(starts[tp], replicas, len(deployments), len(deployments) - 1 - index)

    def _replicas(self, tp: int) -> int:
        return 1 if self.goal.is_minimised else self._max_replicas(tp)

    def _starts(self, tp: int) -> list[Settings]:
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

    def _baselines(self, deployments: Sequence[tuple[int, int]], starts: dict[int, list[Settings]]) -> None:
        """Run what users get without a search on the whole trace, with the fewest GPUs for each replica."""
        tp, replicas = deployments[0]
        tuned = (*self.space.point(tp_size=tp), *TUNERS.items())
        wanted = {"trtllm-bench rule": starts[tp][0], "dynamic tuning": tuned}
        if self.space.is_server:
            wanted = {f"{ENGINE_NAMES[self.base.engine]}'s defaults": starts[tp][0]}
        if self.goal.needs_stable_queue:
            found = self._all_at_full_load(list(wanted.values()), replicas)
        else:
            found = self._candidates_of([Case(point, None, replicas) for point in wanted.values()])
        for name, one in zip(wanted, found, strict=True):
            if one is not None:
                self.found.baselines.append(replace(one, name=name))
        self._announce(found[0])

    def _search_settings(self, starts: list[Settings], replicas: int, deployments: int, later: int) -> None:
        """Goodput or output throughput, of `replicas` that share the traffic. later: deployments after this one."""
        work, left = self.runs.work, (self.allowed_work - self.runs.work) / deployments
        alone = ALONE_RUNS * self.runs.total
        after = alone + later * left
        allowed, prefix = work + left, self._prefix(starts[0], replicas)
        starts = [*starts, *self._spread(starts[0], replicas)]
        if prefix is not None:
            limit = work + PREFIX_WORK * left
            self._stage(f"searching on the first {prefix:,} requests", limit - self.runs.work, allowed - limit + after)
            self._descend([Case(point, prefix, replicas) for point in starts], PREFIX_STEPS, limit)
            ranked = [one for one in self._candidates.values() if one.run.case.requests == prefix]
            ranked = [one for one in ranked if one.run.case.replicas == replicas]
            ranked.sort(key=self.judge.key, reverse=True)
            finalists = [one.run.case.settings for one in ranked[:FINALISTS]]
        else:
            finalists = starts  # the whole trace is the only prefix
        self._stage("searching on the whole trace", allowed - self.runs.work, after)
        best = self._descend([Case(point, None, replicas) for point in finalists], (*WHOLE_STEPS, LAST_STEP), allowed)
        if best is not None and self._is_held_back(best):
            best = self.judge.best_of([best, self._search_nearest(starts[0], replicas, prefix, after)])
        self._stage("trying settings alone", alone, later * left)
        if best is not None and best == self.found.best:
            best = self._improved(best, self._try_alone(best)) or best
            self._replace_best(self._with_defaults(best))

    def _try_alone(self, best: Candidate) -> list[Candidate]:
        """Change alone settings that were not changed alone before, and limits that decisions depended on unless no
        change can help, so that it is known what that does."""
        known = self.judge.alone(best, self._candidates.values())
        idle = idle_limits(best.summary, best.settings["max_batch_size"])
        binding = {setting_of(limit) for limit in SIZES if limit not in idle and not self.judge.is_perfect(best)}
        moves = self.space.moves(best.run.case.settings, best.summary, ALONE_STEP)
        points = [point for name, point in moves if not known[name]][:UNKNOWN_RUNS]
        points += [point for name, point in moves if name in binding and known[name]]
        return self._evaluate([replace(best.run.case, settings=point) for point in points[:ALONE_RUNS]])

    def _with_defaults(self, best: Candidate) -> Candidate:
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
            for one in self._evaluate([replace(case, settings=point)]):
                if self._is_as_good(one, best, score):
                    best = replace(one, rate=best.rate, score=score if best.rate else one.score)
        return best

    def _replace_best(self, best: Candidate) -> None:
        if best != self.found.best:
            self.found.best = best
            self._on_best(best)

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

    def _is_held_back(self, best: Candidate) -> bool:
        """Whether `best` misses objectives, or settings that are clearly faster miss them."""
        if self.goal.shortfalls(best.summary):
            return True
        return any(
            one.score > HELD_BACK * best.score and self.goal.shortfalls(one.summary)
            for one in self._candidates.values()
            if one.run.case.replicas == best.run.case.replicas
        )

    def _search_nearest(self, point: Settings, replicas: int, prefix: int | None, later: float) -> Candidate | None:
        """Search further where objectives with a statistic hold the best settings so far back: those that meet them may
        be few, and in between limits that were tried. Candidates are compared by how much they miss."""
        in_grid = len(GRID_DIVISORS) * len(GRID_TOKENS) * (prefix or self.runs.total)
        work = in_grid + NEAREST_WORK * self.runs.total
        self._stage("searching settings that meet the objectives", work, later)
        (probe,) = self._candidates_of([Case(point, None, replicas)])
        if probe is None:
            return None
        tp, peak = dict(point)["tp_size"], probe.summary["peak_scheduled_requests"]
        found: list[Candidate] = []
        for divisor in GRID_DIVISORS:  # from few limits to narrow ones, until settings meet the objectives
            batch = None if divisor == 1 else max(peak // divisor, 1)
            points = dict.fromkeys(self.space.with_limits(tp, tokens, batch) for tokens in GRID_TOKENS)
            found += self._evaluate([Case(one, prefix, replicas) for one in points])
            if any(not self.goal.shortfalls(one.summary) for one in found):
                break
        found.sort(key=self.judge.key, reverse=True)
        nearest = [replace(one.run.case, requests=None) for one in found[:NEAREST]]
        return self._descend(nearest, NEAREST_STEPS, self.runs.work + NEAREST_WORK * self.runs.total)

    def _spread(self, point: Settings, replicas: int) -> list[Settings]:
        """With objectives, smaller limits to start from too: where few requests meet them, small changes of large
        limits show no direction."""
        (probe,) = self._candidates_of([Case(point, None, replicas)])
        if probe is None or not self.goal.objectives or self.judge.is_perfect(probe):
            return []
        tp, peak = dict(point)["tp_size"], probe.summary["peak_scheduled_requests"]
        batches = dict.fromkeys(max(peak // divisor, 1) for divisor in SPREAD_DIVISORS)
        return [self.space.with_limits(tp, tokens, batch) for batch in batches for tokens in SPREAD_TOKENS]

    @property
    def allowed_work(self) -> float:
        """Simulated requests of the whole search."""
        return min(max(WORK_SHARE * len(self.space.grid()), MIN_WORK), MAX_WORK) * self.runs.total

    def _prefix(self, point: Settings, replicas: int) -> int | None:
        """How many of the first requests show what the whole trace does; None if no small number of them does."""
        (probe,) = self._candidates_of([Case(point, None, replicas)])
        if probe is None:
            return None
        peak: int = probe.summary["peak_scheduled_requests"]
        prefix = max(int(self.runs.total * PREFIX_SHARE), replicas * max(CONCURRENCY_FACTOR * peak, MIN_PREFIX))
        while prefix <= self.runs.total / 2:
            (part,) = self._candidates_of([Case(point, prefix, replicas)])
            if part is not None and abs(part.score - probe.score) <= MAX_PREFIX_ERROR * abs(probe.score):
                return prefix
            prefix *= 2
        return None

    def _load_runs(self, tp: int, is_final: bool = False) -> int:
        """How many runs the search for the highest rate, or the fewest replicas, makes at most."""
        if self.goal.name == "max_rate":
            return max_runs_for_rate(self.runs, is_final)
        return 0 if is_final else max_runs_for_replicas(self._max_replicas(tp))

    def _load_work(self, tp: int, rounds: int) -> float:
        """Simulated requests of `_search_load`, at most, with so many rounds to go."""
        of_a_round = self._load_runs(tp) * self.runs.total + ROUND_WORK * self.allowed_work
        return rounds * of_a_round + self._load_runs(tp, is_final=True) * self.runs.total

    def _search_load(self, starts: list[Settings], replicas: int, later: float) -> None:
        """The highest rate, or the fewest replicas. Settings are compared under a little more load than the best ones
        so far can take, by how much they miss; then the load that the best of them takes is found.

        later: simulated requests of the search that follows, at most."""
        is_rate, settings, full_load = self.goal.name == "max_rate", starts[0], replicas
        best: Candidate | None = None
        start, steps = self._near, list(WHOLE_STEPS)
        tp, of_comparing = dict(settings)["tp_size"], ROUND_WORK * self.allowed_work
        for rounds in range(MAX_ROUNDS - 1, -1, -1):
            after = self._load_work(tp, rounds) + later
            label = "finding the highest rate" if is_rate else "finding the fewest replicas"
            self._stage(label, self._load_runs(tp) * self.runs.total, of_comparing + after)
            found = self._at_full_load(settings, replicas, best, start)
            if best is not None and (found is None or found.score <= best.score * (MIN_GAIN if is_rate else 1)):
                break
            if found is not None and not is_rate and self._is_far_off(found):
                return
            best = found
            if is_rate:  # below any rate that meets the objectives, settings are compared at the lowest one
                factor = 1 / MAX_FACTOR if best is None or best.rate is None else best.rate.low * PRESSURE
                case = Case(settings, None, replicas, rate=factor)
            else:
                most = self._max_replicas(dict(settings)["tp_size"])
                full_load = most if best is None else best.run.case.replicas - 1
                if not full_load:
                    break
                case = Case(settings, None, full_load)
            points = [settings, starts[0], starts[-1]] if rounds == MAX_ROUNDS - 1 else [settings]
            cases = [replace(case, settings=point) for point in dict.fromkeys(points)]
            limit = self.runs.work + of_comparing
            self._stage("comparing settings under pressure", of_comparing, after)
            under_pressure = self._descend(cases, steps, limit, announce=best is None)
            if under_pressure is None or under_pressure.run.case.settings == settings:
                break
            settings, start, steps = under_pressure.run.case.settings, case.rate, [WHOLE_STEPS[-1]]
        if is_rate and best is not None:
            self._stage("confirming the highest rate", self._load_runs(tp, is_final=True) * self.runs.total, later)
            near = best.rate.low if best.rate else 1.0
            self._at_full_load(best.run.case.settings, replicas, best, near, is_final=True)

    def _finish_load(self) -> None:
        """The default values of settings that do not matter, and what the best settings do under other loads."""
        best = self.found.best
        assert best is not None
        if self.goal.is_minimised:
            best = self._with_defaults(best)
            self._replace_best(best)
            self._try_alone(best)
        elif best.rate is not None and best.rate.is_final:
            of_final = self._load_runs(1, is_final=True) * self.runs.total
            best = self._search_above(best, self._last_work - self._work_above)
            self._stage("returning to default values", of_final, self._last_work - self._work_above - of_final)
            settings, case = self._with_defaults(best).run.case.settings, best.run.case
            if settings != case.settings:
                again = self._at_full_load(settings, case.replicas, best, case.rate, is_final=True)
                if again is not None and again.score >= best.score * (1 - FINE):
                    self._replace_best(again)
                    best = again
            self._try_alone(best)
            self._other_loads(best)

    @property
    def _last_work(self) -> float:
        """Simulated requests, at most, of what follows when the highest rate, or the fewest replicas, are known."""
        if self.goal.name != "max_rate":
            return float(ALONE_RUNS * self.runs.total)
        runs = self._load_runs(1, is_final=True) + ALONE_RUNS + self._load_runs(1)
        if self.base.request_rate is None:
            runs += max_runs_for_replicas(COST_GPUS)
        return runs * self.runs.total + self._work_above

    @property
    def _work_above(self) -> float:
        """Simulated requests of `_search_above`, at most."""
        return float(min(ABOVE_RUNS * self.runs.total, ABOVE_REQUESTS))

    def _search_above(self, best: Candidate, later: float) -> Candidate:
        """The best settings when others were run a little above the highest rate; those that meet the objectives there
        become the best, and the others are run above their highest rate.

        Whether objectives are met does not fall steadily with the rate, nor with a limit: which requests run together
        changes with each. So bisections, and steps from the best settings on, miss settings that are not far away."""
        self._stage("trying settings above the highest rate", self._work_above, later)
        allowed, tried = self.runs.work + self._work_above, set[Case]()
        while self.runs.work < allowed:
            case = replace(best.run.case, rate=best.run.case.rate * ABOVE)
            cases = [replace(case, settings=point) for point in self.space.lattice(case.settings, best.summary)]
            cases = self._by_expected_misses([one for one in cases if one not in tried], case)[:ABOVE_BATCH]
            tried.update(cases)
            if not cases:
                break
            above = self.judge.best_of(self._evaluate(cases))
            if above is not None and not self.goal.shortfalls(above.summary):
                settings = above.run.case.settings
                found = self._at_full_load(settings, case.replicas, best, case.rate, is_final=True)
                best = found if found is not None and found.score > best.score else best
        return best

    def _by_expected_misses(self, cases: Sequence[Case], case: Case) -> list[Case]:
        """Cases that differ from `case` in settings, those first that are expected to miss least; without those that
        are expected to miss by more than MAX_EXPECTED."""
        if not cases:
            return []
        known = [
            one
            for one in self._candidates.values()
            if replace(one.run.case, settings=case.settings, rate=case.rate) == case
            and one.run.case.rate >= case.rate / PRESSURE
        ]
        misses = np.array([sum(log(ratio) for ratio in self.goal.shortfalls(one.summary).values()) for one in known])
        limits, of_known = (
            np.log2([[dict(one.settings)[setting_of(limit)] for limit in SIZES] for one in ran])
            for ran in (cases, [one.run.case for one in known])
        )
        distances = np.abs(limits[:, np.newaxis] - of_known).sum(axis=2)
        expected = (misses + MISS_OF_DISTANCE * distances).min(axis=1)
        return [cases[index] for index in np.argsort(expected, kind="stable") if expected[index] <= MAX_EXPECTED]

    def _other_loads(self, best: Candidate) -> None:
        """What the best settings do with the traffic as it was recorded, and with each third of it alone."""
        assert best.rate is not None
        if has_stretches(self.runs):
            self._stage("the highest rates of thirds", self._load_runs(1) * self.runs.total, 0.0)
            self.found.rates_of_stretches = rates_of_stretches(self.runs, self.goal, best.rate)
        if self.base.request_rate is not None:
            return
        settings, most = best.run.case.settings, min(self.runs.sessions, COST_GPUS)
        self._stage("the traffic as recorded", max_runs_for_replicas(most) * self.runs.total, 0.0)
        near = max(round(1 / best.run.case.rate * best.run.case.replicas), 1)
        run = find_replicas(self.runs, self.goal, settings, most, near)
        self.found.as_recorded = None if run is None else self.judge.candidate(run)

    def _is_far_off(self, one: Candidate) -> bool:
        """Whether the cost is so far above the best so far that no change of limits will make up for it."""
        best = self.found.best
        return best is not None and not self.goal.shortfalls(best.summary) and one.score < FAR_OFF * best.score

    def _max_replicas(self, tp: int) -> int:
        """Replicas that the GPUs are enough for, each with at least one session of the trace."""
        return max(min(self.max_gpus // (tp * self.base.pp_size), self.runs.sessions, MAX_REPLICAS), 1)

    def _at_full_load(
        self,
        settings: Settings,
        replicas: int,
        known: Candidate | None,
        start: float = 1.0,
        is_final: bool = False,
    ) -> Candidate | None:
        """The candidate of `settings` at the highest rate, or with the fewest replicas, that meets the objectives.

        known: another one, whose number of replicas is near.
        start: a rate that is near.
        """
        if self.goal.is_minimised:
            near = known.run.case.replicas if known else 1
            most = self._max_replicas(dict(settings)["tp_size"])
            run = find_replicas(self.runs, self.goal, settings, most, near)
            candidate = self.judge.candidate(run) if run is not None else None
        else:
            found = find_max_rate(self.runs, self.goal, settings, replicas, start, is_final)
            candidate = self.judge.candidate(found.run, rate=found) if found.run is not None else None
        if candidate is not None:
            self._candidates[candidate.run.case] = candidate
            self._announce(candidate)
        return candidate

    def _all_at_full_load(self, wanted: Sequence[Settings], replicas: int) -> list[Candidate | None]:
        """The candidates of `wanted` at full load; see `_at_full_load`. The highest rates are found in parallel."""
        if self.goal.is_minimised:
            first = self._at_full_load(wanted[0], replicas, None)
            return [first, *(self._at_full_load(settings, replicas, first) for settings in wanted[1:])]
        cases = [Case(settings, None, replicas) for settings in wanted]
        found = find_max_rates(self.runs, self.goal, cases, self._near)
        candidates = [self.judge.candidate(one.run, rate=one) if one.run is not None else None for one in found]
        for one in filter(None, candidates):
            self._candidates[one.run.case] = one
            self._announce(one)
        return candidates

    def _descend(
        self, starts: Sequence[Case], steps: Sequence[float], max_work: float, announce: bool = True
    ) -> Candidate | None:
        """The best candidate that is found from `starts` on; no more runs begin once `max_work` requests have run."""
        best = self.judge.best_of(self._evaluate(starts))
        for step in steps:
            while best is not None and self.runs.work < max_work and not self.judge.is_perfect(best):
                if announce:
                    self._announce(best)
                case = best.run.case
                moves = self.space.moves(case.settings, best.summary, step)
                room = max(int(max_work - self.runs.work) // self._requests(case), 1)
                moved = self._evaluate([replace(case, settings=point) for _, point in moves[:room]])
                if (better := self._improved(best, moved)) is None:
                    break
                best = better
        if best is not None and announce:
            self._announce(best)
        return best

    def _improved(self, best: Candidate, moved: Sequence[Candidate]) -> Candidate | None:
        """The best of `moved`, and of all that are better than `best` together; None if none is."""
        case = best.run.case
        better = [one for one in moved if self.judge.key(one) > self.judge.key(best)]
        if len(better) > 1:  # the best change of each setting, all at once
            joint = dict(case.settings)
            for one in sorted(better, key=self.judge.key):
                joint |= dict(set(one.run.case.settings) - set(case.settings))
            better += self._evaluate([replace(case, settings=tuple(joint.items()))])
        return self.judge.best_of(better)

    # Candidates.

    def _evaluate(self, cases: Sequence[Case]) -> list[Candidate]:
        """The candidates of those cases that run."""
        found = [one for one in self._candidates_of(cases) if one is not None]
        self._candidates |= {one.run.case: one for one in found}
        return found

    def _stage(self, label: str, work: float, later: float) -> None:
        """A stage of the search begins. work, later: simulated requests of it and of the stages after it, at most; so
        progress shows about the longest time that the search may take. That for settings that meet the objectives is
        counted from when it turns out to be needed."""
        self._stage_label, self._stage_end, self._later_work = label, self.runs.work + work, later
        self._update()

    def _update(self) -> None:
        best, work = self.found.best, self.runs.work
        so_far = "" if best is None else f"best so far: {abs(best.score):,.4g} {self.goal.unit}"
        total = round(max(self._stage_end, work) + self._later_work)
        self._progress.update(work, max(total, 1), ", ".join(filter(None, (self._stage_label, so_far))))

    def _candidates_of(self, cases: Sequence[Case]) -> list[Candidate | None]:
        return [self.judge.candidate(run) for run in self.runs.run(cases)]

    def _requests(self, case: Case) -> int:
        """How many requests a run of `case` simulates."""
        return min(case.requests or self.runs.total, self.runs.total)

    def _announce(self, candidate: Candidate | None) -> None:
        """Keep `candidate` if it is the best of those that ran so much of the trace, or ran more."""
        best = self.found.best
        if candidate is None or candidate == best:
            return
        if best is None or self.judge.evidence(candidate) > self.judge.evidence(best):
            self.found.best = candidate
            self._on_best(candidate)
