"""The search for the best figure under the traffic as it is: goodput or output throughput.

It runs on the first requests of the trace, as many as show the concurrency of the whole; the finalists run the whole
trace, and the search goes on around the best of them with what is left of the work.
"""

from dataclasses import replace

from ifbbench.studies.tune_candidates import Candidate
from ifbbench.studies.tune_runs import Case
from ifbbench.studies.tune_search import ALONE_RUNS, WHOLE_STEPS, Search
from ifbbench.studies.tune_space import Settings

# A prefix: at least this share of the trace, and so many times the requests that run at once.
MIN_PREFIX, PREFIX_SHARE, CONCURRENCY_FACTOR = 300, 1 / 12, 2
# On such a prefix, the baseline's figure differs by less than this share from that on the whole trace.
MAX_PREFIX_ERROR = 0.1
# The search on prefixes takes at most this share of the work.
PREFIX_WORK = 1 / 3
FINALISTS = 3
PREFIX_STEPS, LAST_STEP = (4.0, 2.0), 2.0**0.25
# Further starts: shares of the requests that run at once without a limit, and token budgets.
SPREAD_DIVISORS, SPREAD_TOKENS = (2, 4, 8), (512, 2048)
# Where objectives are missed, or settings with so many times the best figure miss them: a grid of the two limits that
# decide gaps and waiting, shares of the requests that run at once by token budgets, and further work in whole traces
# around the nearest of its points.
HELD_BACK = 1.05
GRID_DIVISORS, GRID_TOKENS = (1, 2, 3, 4, 6, 8), (128, 256, 384, 512, 1024, 2048, 4096, 8192)
NEAREST, NEAREST_STEPS, NEAREST_WORK = 3, (2.0**0.5, 2.0**0.25), 12.0


class TrafficSearch:
    """The part of a search that compares settings under the traffic as it is."""

    def __init__(self, search: Search) -> None:
        self._search = search

    def run(self, starts: list[Settings], replicas: int, deployments: int, later: int) -> None:
        """Compare settings, of `replicas` that share the traffic.

        deployments: number of deployments among which the work that is left is divided, this one included.
        later: number of deployments after this one.
        """
        search = self._search
        work, left = search.runs.work, (search.allowed_work - search.runs.work) / deployments
        alone = ALONE_RUNS * search.runs.total
        after = alone + later * left
        allowed, prefix = work + left, self._prefix(starts[0], replicas)
        starts = [*starts, *self._spread(starts[0], replicas)]
        if prefix is not None:
            limit = work + PREFIX_WORK * left
            search.stage(
                f"searching on the first {prefix:,} requests", limit - search.runs.work, allowed - limit + after
            )
            search.descend([Case(point, prefix, replicas) for point in starts], PREFIX_STEPS, limit)
            ranked = [one for one in search.known.values() if one.run.case.requests == prefix]
            ranked = [one for one in ranked if one.run.case.replicas == replicas]
            ranked.sort(key=search.judge.key, reverse=True)
            finalists = [one.run.case.settings for one in ranked[:FINALISTS]]
        else:
            finalists = starts  # the whole trace is the only prefix
        search.stage("searching on the whole trace", allowed - search.runs.work, after)
        best = search.descend([Case(point, None, replicas) for point in finalists], (*WHOLE_STEPS, LAST_STEP), allowed)
        if best is not None and self._is_held_back(best):
            best = search.judge.best_of([best, self._nearest(starts[0], replicas, prefix, after)])
        search.stage("trying settings alone", alone, later * left)
        if best is not None and best == search.found.best:
            best = search.improved(best, search.try_alone(best)) or best
            search.replace_best(search.with_defaults(best))

    def _is_held_back(self, best: Candidate) -> bool:
        """Whether `best` misses objectives, or settings that are clearly faster miss them."""
        search = self._search
        if search.goal.shortfalls(best.summary):
            return True
        return any(
            one.score > HELD_BACK * best.score and search.goal.shortfalls(one.summary)
            for one in search.known.values()
            if one.run.case.replicas == best.run.case.replicas
        )

    def _nearest(self, point: Settings, replicas: int, prefix: int | None, later: float) -> Candidate | None:
        """Search further where objectives with a statistic hold the best settings so far back: those that meet them may
        be few, and in between limits that were tried. Candidates are compared by how much they miss."""
        search = self._search
        in_grid = len(GRID_DIVISORS) * len(GRID_TOKENS) * (prefix or search.runs.total)
        work = in_grid + NEAREST_WORK * search.runs.total
        search.stage("searching settings that meet the objectives", work, later)
        (probe,) = search.candidates_of([Case(point, None, replicas)])
        if probe is None:
            return None
        tp, peak = dict(point)["tp_size"], probe.summary["peak_scheduled_requests"]
        found: list[Candidate] = []
        for divisor in GRID_DIVISORS:  # from few limits to narrow ones, until settings meet the objectives
            batch = None if divisor == 1 else max(peak // divisor, 1)
            points = dict.fromkeys(search.space.with_limits(tp, tokens, batch) for tokens in GRID_TOKENS)
            found += search.evaluate([Case(one, prefix, replicas) for one in points])
            if any(not search.goal.shortfalls(one.summary) for one in found):
                break
        found.sort(key=search.judge.key, reverse=True)
        nearest = [replace(one.run.case, requests=None) for one in found[:NEAREST]]
        return search.descend(nearest, NEAREST_STEPS, search.runs.work + NEAREST_WORK * search.runs.total)

    def _spread(self, point: Settings, replicas: int) -> list[Settings]:
        """With objectives, smaller limits to start from too: where few requests meet them, small changes of large
        limits show no direction."""
        search = self._search
        (probe,) = search.candidates_of([Case(point, None, replicas)])
        if probe is None or not search.goal.objectives or search.judge.is_perfect(probe):
            return []
        tp, peak = dict(point)["tp_size"], probe.summary["peak_scheduled_requests"]
        batches = dict.fromkeys(max(peak // divisor, 1) for divisor in SPREAD_DIVISORS)
        return [search.space.with_limits(tp, tokens, batch) for batch in batches for tokens in SPREAD_TOKENS]

    def _prefix(self, point: Settings, replicas: int) -> int | None:
        """How many of the first requests show what the whole trace does; None if no small number of them does."""
        search = self._search
        (probe,) = search.candidates_of([Case(point, None, replicas)])
        if probe is None:
            return None
        peak: int = probe.summary["peak_scheduled_requests"]
        prefix = max(int(search.runs.total * PREFIX_SHARE), replicas * max(CONCURRENCY_FACTOR * peak, MIN_PREFIX))
        while prefix <= search.runs.total / 2:
            (part,) = search.candidates_of([Case(point, prefix, replicas)])
            if part is not None and abs(part.score - probe.score) <= MAX_PREFIX_ERROR * abs(probe.score):
                return prefix
            prefix *= 2
        return None
