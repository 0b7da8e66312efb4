"""The searches for the load that settings take: the highest rate, or the fewest replicas that serve the traffic."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import log

import numpy as np

from ifbbench.analysis.words import SIZES, setting_of
from ifbbench.studies.tune_candidates import Candidate
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
from ifbbench.studies.tune_runs import Case
from ifbbench.studies.tune_search import ALONE_RUNS, WHOLE_STEPS, Search
from ifbbench.studies.tune_space import Settings

# ROUND_WORK: the share of the work that a round of comparing takes.
MAX_ROUNDS, ROUND_WORK = 10, 0.6
# Settings are compared at this many times the rate that the best ones so far reach, as long as that gains so much.
PRESSURE, MIN_GAIN = 1.05, 1.01
# In the end, settings are run at ABOVE times the highest rate, until so many were run or so many requests simulated;
# ABOVE_BATCH at a time, those first that are expected to miss least: by what settings that ran miss (the sum of the
# logarithms of their shortfalls), and so much more for each factor of 2 between their limits. Those that are expected
# to miss by more than MAX_EXPECTED are not run: see docs/measured/tuning.md.
ABOVE, ABOVE_RUNS, ABOVE_REQUESTS, ABOVE_BATCH, MISS_OF_DISTANCE, MAX_EXPECTED = 1.01, 250, 50_000, 8, 0.3, 0.4
# Maximum number of GPUs of a search for the fewest replicas, unless given.
COST_GPUS = 64
# A deployment that costs so many times the best so far, with the limits of trtllm-bench's rule, is not searched.
FAR_OFF = 1.3


class LoadSearch(ABC):
    """The part of a search that finds how much load settings take before objectives are missed.

    label: name of the stage that finds it.
    min_gain: the factor by which a round has to raise the score so that another one follows.
    near: a factor of the rate that is near the highest one.
    """

    label: str
    min_gain: float
    near = 1.0

    def __init__(self, search: Search) -> None:
        self._search = search

    @abstractmethod
    def max_runs(self, tp: int, is_final: bool = False) -> int:
        """How many runs finding the load that settings take makes at most."""

    @abstractmethod
    def find(
        self, settings: Settings, replicas: int, known: Candidate | None = None, start: float = 1.0
    ) -> Candidate | None:
        """The candidate of `settings` at the most load with which it meets the objectives.

        known: another one, which takes about as much.
        start: a rate that is near.
        """

    @abstractmethod
    def find_all(self, wanted: Sequence[Settings], replicas: int) -> list[Candidate | None]:
        """The candidates of `wanted` at the most load of each."""

    @abstractmethod
    def pressure(self, settings: Settings, replicas: int, best: Candidate | None) -> Case | None:
        """The case of `settings` under a little more load than `best` takes; None if there is none."""

    @abstractmethod
    def finish(self) -> None:
        """The default values of settings that do not matter, and what the best settings do under other loads."""

    @property
    def first_runs(self) -> int:
        """How many runs `first_answer` makes at most."""
        return 0

    @property
    def last_work(self) -> float:
        """Simulated requests of `finish`, at most."""
        return float(ALONE_RUNS * self._search.runs.total)

    def first_answer(self, best: Candidate) -> Candidate:
        """`best`, which ran the first requests alone, with the load that it takes of these."""
        return best

    def is_far_off(self, found: Candidate) -> bool:
        """Whether no change of limits makes `found` as good as the best so far."""
        return False

    @abstractmethod
    def confirm(self, best: Candidate, replicas: int, later: float) -> None:
        """Find the load that `best` takes more exactly. later: see `run`."""

    def max_work(self, tp: int, rounds: int = MAX_ROUNDS) -> float:
        """Simulated requests of `run`, at most, with so many rounds to go."""
        runs = self._search.runs
        of_a_round = self.max_runs(tp) * runs.total + ROUND_WORK * self._search.allowed_work
        return rounds * of_a_round + self.max_runs(tp, is_final=True) * runs.total

    def run(self, starts: list[Settings], replicas: int, later: float) -> None:
        """Compare settings under a little more load than the best ones so far can take, by how much they miss; then
        find the load that the best of them takes, and so on.

        later: simulated requests of the search that follows, at most.
        """
        search, settings = self._search, starts[0]
        best: Candidate | None = None
        start, steps = self.near, list(WHOLE_STEPS)
        tp, of_comparing = dict(settings)["tp_size"], ROUND_WORK * search.allowed_work
        for rounds in range(MAX_ROUNDS - 1, -1, -1):
            after = self.max_work(tp, rounds) + later
            search.stage(self.label, self.max_runs(tp) * search.runs.total, of_comparing + after)
            found = self.find(settings, replicas, best, start)
            if best is not None and (found is None or found.score <= best.score * self.min_gain):
                break
            if found is not None and self.is_far_off(found):
                return
            best = found
            case = self.pressure(settings, replicas, best)
            if case is None:
                break
            points = [settings, starts[0], starts[-1]] if rounds == MAX_ROUNDS - 1 else [settings]
            cases = [replace(case, settings=point) for point in dict.fromkeys(points)]
            limit = search.runs.work + of_comparing
            search.stage("comparing settings under pressure", of_comparing, after)
            under_pressure = search.descend(cases, steps, limit, announce=best is None)
            if under_pressure is None or under_pressure.run.case.settings == settings:
                break
            settings, start, steps = under_pressure.run.case.settings, case.rate, [WHOLE_STEPS[-1]]
        if best is not None:
            self.confirm(best, replicas, later)


class FewestReplicas(LoadSearch):
    """The fewest replicas that serve the traffic as it is."""

    label, min_gain = "finding the fewest replicas", 1.0

    def max_runs(self, tp: int, is_final: bool = False) -> int:
        return 0 if is_final else max_runs_for_replicas(self._search.max_replicas(tp))

    def find(
        self, settings: Settings, replicas: int, known: Candidate | None = None, start: float = 1.0
    ) -> Candidate | None:
        search, near = self._search, known.run.case.replicas if known else 1
        most = search.max_replicas(dict(settings)["tp_size"])
        run = find_replicas(search.runs, search.goal, settings, most, near)
        return search.add(None if run is None else search.judge.candidate(run))

    def find_all(self, wanted: Sequence[Settings], replicas: int) -> list[Candidate | None]:
        first = self.find(wanted[0], replicas)
        return [first, *(self.find(settings, replicas, first) for settings in wanted[1:])]

    def pressure(self, settings: Settings, replicas: int, best: Candidate | None) -> Case | None:
        most = self._search.max_replicas(dict(settings)["tp_size"])
        fewer = most if best is None else best.run.case.replicas - 1
        return Case(settings, None, fewer) if fewer else None

    def is_far_off(self, found: Candidate) -> bool:
        """Whether the cost is so far above the best so far that no change of limits will make up for it."""
        best = self._search.found.best
        is_met = best is not None and not self._search.goal.shortfalls(best.summary)
        return best is not None and is_met and found.score < FAR_OFF * best.score

    def confirm(self, best: Candidate, replicas: int, later: float) -> None:
        """The number is exact."""

    def finish(self) -> None:
        search = self._search
        assert search.found.best is not None
        best = search.with_defaults(search.found.best)
        search.replace_best(best)
        search.try_alone(best)


class HighestRate(LoadSearch):
    """The highest rate at which requests may arrive."""

    label, min_gain = "finding the highest rate", MIN_GAIN

    @property
    def first_runs(self) -> int:
        return self.max_runs(1)

    def max_runs(self, tp: int, is_final: bool = False) -> int:
        return max_runs_for_rate(self._search.runs, is_final)

    def first_answer(self, best: Candidate) -> Candidate:
        search, case = self._search, best.run.case
        if case.requests is None:
            return best
        found = find_max_rate(search.runs, search.goal, case.settings, case.replicas, requests=case.requests)
        if found.run is None:
            return best
        self.near = found.low
        return search.judge.candidate(found.run, rate=found) or best

    def find(
        self, settings: Settings, replicas: int, known: Candidate | None = None, start: float = 1.0
    ) -> Candidate | None:
        return self._find(settings, replicas, start)

    def _find(self, settings: Settings, replicas: int, start: float, is_final: bool = False) -> Candidate | None:
        search = self._search
        found = find_max_rate(search.runs, search.goal, settings, replicas, start, is_final)
        return search.add(None if found.run is None else search.judge.candidate(found.run, rate=found))

    def find_all(self, wanted: Sequence[Settings], replicas: int) -> list[Candidate | None]:
        """The highest rates are found in parallel."""
        search, cases = self._search, [Case(settings, None, replicas) for settings in wanted]
        found = find_max_rates(search.runs, search.goal, cases, self.near)
        candidates = [None if one.run is None else search.judge.candidate(one.run, rate=one) for one in found]
        return [search.add(one) for one in candidates]

    def pressure(self, settings: Settings, replicas: int, best: Candidate | None) -> Case | None:
        """Below any rate that meets the objectives, settings are compared at the lowest one."""
        factor = 1 / MAX_FACTOR if best is None or best.rate is None else best.rate.low * PRESSURE
        return Case(settings, None, replicas, rate=factor)

    def confirm(self, best: Candidate, replicas: int, later: float) -> None:
        search = self._search
        search.stage("confirming the highest rate", self._final_work, later)
        near = best.rate.low if best.rate else 1.0
        self._find(best.run.case.settings, replicas, near, is_final=True)

    def finish(self) -> None:
        search, best = self._search, self._search.found.best
        assert best is not None
        if best.rate is None or not best.rate.is_final:
            return
        best = self._search_above(best, self.last_work - self._work_above)
        later = self.last_work - self._work_above - self._final_work
        search.stage("returning to default values", self._final_work, later)
        settings, case = search.with_defaults(best).run.case.settings, best.run.case
        if settings != case.settings:
            again = self._find(settings, case.replicas, case.rate, is_final=True)
            if again is not None and again.score >= best.score * (1 - FINE):
                search.replace_best(again)
                best = again
        search.try_alone(best)
        self._run_other_loads(best)

    @property
    def _final_work(self) -> int:
        """Simulated requests of finding a rate exactly, at most."""
        return self.max_runs(1, is_final=True) * self._search.runs.total

    @property
    def last_work(self) -> float:
        runs = self.max_runs(1, is_final=True) + ALONE_RUNS + self.max_runs(1)
        if self._search.base.request_rate is None:
            runs += max_runs_for_replicas(COST_GPUS)
        return runs * self._search.runs.total + self._work_above

    @property
    def _work_above(self) -> float:
        """Simulated requests of `_search_above`, at most."""
        return float(min(ABOVE_RUNS * self._search.runs.total, ABOVE_REQUESTS))

    def _search_above(self, best: Candidate, later: float) -> Candidate:
        """The best settings when others were run a little above the highest rate; those that meet the objectives there
        become the best, and the others are run above their highest rate.

        Whether objectives are met does not fall steadily with the rate, nor with a limit: which requests run together
        changes with each. So bisections, and steps from the best settings on, miss settings that are not far away."""
        search = self._search
        search.stage("trying settings above the highest rate", self._work_above, later)
        allowed, tried = search.runs.work + self._work_above, set[Case]()
        while search.runs.work < allowed:
            case = replace(best.run.case, rate=best.run.case.rate * ABOVE)
            cases = [replace(case, settings=point) for point in search.space.lattice(case.settings, best.summary)]
            cases = self._by_expected_misses([one for one in cases if one not in tried], case)[:ABOVE_BATCH]
            tried.update(cases)
            if not cases:
                break
            above = search.judge.best_of(search.evaluate(cases))
            if above is not None and not search.goal.shortfalls(above.summary):
                found = self._find(above.run.case.settings, case.replicas, case.rate, is_final=True)
                best = found if found is not None and found.score > best.score else best
        return best

    def _by_expected_misses(self, cases: Sequence[Case], case: Case) -> list[Case]:
        """Cases that differ from `case` in settings, those first that are expected to miss least; without those that
        are expected to miss by more than MAX_EXPECTED."""
        if not cases:
            return []
        goal = self._search.goal
        known = [
            one
            for one in self._search.known.values()
            if replace(one.run.case, settings=case.settings, rate=case.rate) == case
            and one.run.case.rate >= case.rate / PRESSURE
        ]
        misses = np.array([sum(log(ratio) for ratio in goal.shortfalls(one.summary).values()) for one in known])
        limits, of_known = (
            np.log2([[dict(one.settings)[setting_of(limit)] for limit in SIZES] for one in ran])
            for ran in (cases, [one.run.case for one in known])
        )
        distances = np.abs(limits[:, np.newaxis] - of_known).sum(axis=2)
        expected = (misses + MISS_OF_DISTANCE * distances).min(axis=1)
        return [cases[index] for index in np.argsort(expected, kind="stable") if expected[index] <= MAX_EXPECTED]

    def _run_other_loads(self, best: Candidate) -> None:
        """Find what the best settings do with the traffic as it was recorded, and with each third of it alone."""
        assert best.rate is not None
        search = self._search
        if has_stretches(search.runs):
            search.stage("the highest rates of thirds", self.max_runs(1) * search.runs.total, 0.0)
            search.found.rates_of_stretches = rates_of_stretches(search.runs, search.goal, best.rate)
        if search.base.request_rate is not None:
            return
        case, most = best.run.case, min(search.runs.sessions, COST_GPUS)
        search.stage("the traffic as recorded", max_runs_for_replicas(most) * search.runs.total, 0.0)
        near = max(round(1 / case.rate * case.replicas), 1)
        run = find_replicas(search.runs, search.goal, case.settings, most, near)
        search.found.as_recorded = None if run is None else search.judge.candidate(run)
