"""The load that given settings take: the highest rate of arrivals, and the fewest replicas."""

from collections.abc import Callable
from math import ceil, log, log1p, log2, sqrt
from statistics import fmean

from ifbbench.studies.tune_candidates import Goal, MaxRate
from ifbbench.studies.tune_runs import Case, Run, Runs
from ifbbench.studies.tune_space import Settings

# The rate is found to this share, while settings are compared and in the end. Around the border one rate may fail and a
# higher one pass, so that a few more rates are tried above it in the end.
COARSE, FINE, RATES_ABOVE = 0.02, 0.005, (1.01, 1.02, 1.03)
MAX_FACTOR = 64.0
SEEDS = 3

Meets = Callable[[float], bool]


def find_max_rate(
    runs: Runs, goal: Goal, settings: Settings, replicas: int = 1, start: float = 1.0, is_final: bool = False
) -> MaxRate:
    """By bisection, on the whole trace. start: a factor near the answer. is_final: to FINE, and with several seeds
    where arrivals are drawn; `low` is then the mean."""
    found = _border(runs, goal, settings, replicas, start, runs.base.seed, is_final)
    if found.run is None or not is_final or not draws_arrivals(runs):
        return found
    seeds = range(runs.base.seed + 1, runs.base.seed + SEEDS)
    others = [_border(runs, goal, settings, replicas, found.low, seed, is_final) for seed in seeds]
    by_seed = (found.low, *(one.low for one in others))
    return MaxRate(found.run, fmean(by_seed), found.high, by_seed, is_final)


def max_runs_for_rate(runs: Runs, is_final: bool) -> int:
    """How many runs `find_max_rate` makes at most: the bracket, in steps that double up to MAX_FACTOR, the bisection
    between two of them, and the rates above."""
    step = 1 + COARSE if is_final else 1.1
    growing = ceil(log2(log(2.0) / log(step)))
    bisection = ceil(log2(log(2.0) / log1p(FINE if is_final else COARSE)))
    one = 1 + growing + ceil(log2(MAX_FACTOR)) + bisection + is_final * len(RATES_ABOVE)
    return one * (SEEDS if is_final and draws_arrivals(runs) else 1)


def max_runs_for_replicas(most: int) -> int:
    """How many runs `find_replicas` makes at most: numbers that double up to `most`, and the bisection between two."""
    return 1 + 2 * ceil(log2(most))


def draws_arrivals(runs: Runs) -> bool:
    """Whether arrivals depend on the seed."""
    base = runs.base
    return base.enable_exp_delays or base.burstiness is not None or base.arrival is not None


def _border(
    runs: Runs, goal: Goal, settings: Settings, replicas: int, start: float, seed: int, is_fine: bool
) -> MaxRate:
    def run(factor: float) -> Run:
        return runs.run([Case(settings, None, replicas, rate=factor, seed=None if seed == runs.base.seed else seed)])[0]

    def meets(factor: float) -> bool:
        tried = run(factor)
        return not tried.error and not goal.shortfalls(tried.summary)

    low, high = _bracket(meets, start, 2.0 if start == 1.0 else 1 + (COARSE if is_fine else 0.1))
    if low is None:
        return MaxRate(None, 0.0, high)
    while high is not None and high > low * (1 + (FINE if is_fine else COARSE)):
        middle = sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    if high is not None and is_fine:
        passing = [factor for factor in (low * above for above in RATES_ABOVE) if meets(factor)]
        low, high = max([low, *passing]), high if not passing else max(passing) * RATES_ABOVE[0]
    return MaxRate(run(low), low, high, is_final=is_fine)


def _bracket(meets: Meets, start: float, step: float) -> tuple[float | None, float | None]:
    """A factor that meets the objectives and a larger one that does not, in growing steps from `start` on; None where
    there is none."""
    factor = start
    if meets(start):
        while factor * step <= start * MAX_FACTOR:
            if not meets(factor * step):
                return factor, factor * step
            factor, step = factor * step, min(step * step, 2.0)
        return factor, None
    while factor / step >= start / MAX_FACTOR:
        if meets(factor / step):
            return factor / step, factor
        factor, step = factor / step, min(step * step, 2.0)
    return None, factor


def find_replicas(runs: Runs, goal: Goal, settings: Settings, most: int, start: int = 1) -> Run | None:
    """The run of the fewest replicas that meet the objectives; None if `most` do not. start: a number near it."""

    def meets(replicas: int) -> bool:
        (tried,) = runs.run([Case(settings, None, replicas)])
        return not tried.error and not goal.shortfalls(tried.summary)

    low, high = 0, min(max(start, 1), most)
    while not meets(high):
        if high >= most:
            return None
        low, high = high, min(high * 2, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return runs.run([Case(settings, None, high)])[0]
