"""The load that given settings take: the highest rate of arrivals, and the fewest replicas."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from math import ceil, log, log1p, log2, sqrt
from statistics import fmean

from ifbbench.studies.tune_candidates import Goal, MaxRate
from ifbbench.studies.tune_runs import MIN_STRETCH, STRETCHES, Case, Run, Runs, mean_rate
from ifbbench.studies.tune_space import Settings

# The rate is found to this share, while settings are compared and in the end. Around the border one rate may fail and a
# higher one pass, so that a few more rates are tried above it in the end.
COARSE, FINE, RATES_ABOVE = 0.02, 0.005, (1.01, 1.02, 1.03)
MAX_FACTOR = 64.0
SEEDS = 3

Asking = Generator[list[float], list[bool], "Border"]
"""Yields factors of the rate that run at the same time; is sent whether objectives are met at each of them."""


@dataclass(frozen=True)
class Border:
    """What is known of the highest rate, as factors of the rate of the trace.

    low: the highest that meets the objectives; None if none does.
    high: the lowest one found above it that does not; None if none was found.
    """

    low: float | None
    high: float | None


def find_max_rate(
    runs: Runs,
    goal: Goal,
    settings: Settings,
    replicas: int = 1,
    start: float = 1.0,
    is_final: bool = False,
    requests: int | None = None,
) -> MaxRate:
    """By bisection, on the whole trace or its first `requests`.

    start: a factor near the answer.
    is_final: whether the rate is found to FINE, and with several seeds where arrivals are drawn; `low` is then the
        mean.
    """
    case = Case(settings, requests, replicas)
    (found,) = find_max_rates(runs, goal, [case], start, is_final)
    if found.run is None or not is_final or not draws_arrivals(runs):
        return found
    seeds = [replace(case, seed=seed) for seed in range(runs.base.seed + 1, runs.base.seed + SEEDS)]
    by_seed = (found.low, *(one.low or 0.0 for one in _borders(runs, goal, seeds, found.low, is_final)))
    return MaxRate(found.run, fmean(by_seed), found.high, by_seed, is_final)


def find_max_rates(
    runs: Runs, goal: Goal, cases: Sequence[Case], start: float = 1.0, is_final: bool = False
) -> list[MaxRate]:
    """The highest rate of each case, with its own seed; they are found at the same time, in parallel."""
    found = []
    for case, border in zip(cases, _borders(runs, goal, cases, start, is_final), strict=True):
        run = None if border.low is None else runs.run([replace(case, rate=border.low)])[0]
        found.append(MaxRate(run, border.low or 0.0, border.high, is_final=is_final and run is not None))
    return found


def rates_of_stretches(runs: Runs, goal: Goal, found: MaxRate) -> list[float]:
    """The highest rate (requests/s) of each third of the trace, alone, with the settings of `found`; 0 where none meets
    the objectives. Empty if thirds are too short to say."""
    if found.run is None or not has_stretches(runs):
        return []
    case = replace(found.run.case, rate=1.0)
    cases = [replace(case, stretch=number) for number in range(STRETCHES)]
    borders = _borders(runs, goal, cases, found.run.case.rate, is_fine=False)
    rates = [mean_rate(runs.trace_of(one)) or 0.0 for one in cases]
    return [(border.low or 0.0) * rate for border, rate in zip(borders, rates, strict=True)]


def has_stretches(runs: Runs) -> bool:
    """Whether the trace can be cut into stretches that show how much the highest rate varies. With arrivals that are
    drawn, other seeds show that."""
    return min(runs.total, runs.sessions) >= STRETCHES * MIN_STRETCH and not draws_arrivals(runs)


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


def _borders(runs: Runs, goal: Goal, cases: Sequence[Case], start: float, is_fine: bool) -> list[Border]:
    """The border of each case, of which `rate` changes; the cases take their steps at the same time, in parallel."""
    step = 2.0 if start == 1.0 else 1 + (COARSE if is_fine else 0.1)
    asking = dict(enumerate(_border(start, step, is_fine) for _ in cases))
    wanted = {number: next(one) for number, one in asking.items()}
    found: dict[int, Border] = {}
    while wanted:
        asked = [(number, factor) for number, factors in wanted.items() for factor in factors]
        tried = runs.run([replace(cases[number], rate=factor) for number, factor in asked])
        is_met: dict[int, list[bool]] = {number: [] for number in wanted}
        for (number, _), run in zip(asked, tried, strict=True):
            is_met[number].append(not run.error and not goal.shortfalls(run.summary))
        for number, met in is_met.items():
            try:
                wanted[number] = asking[number].send(met)
            except StopIteration as ended:
                found[number] = ended.value
                del wanted[number]
    return [found[number] for number in range(len(cases))]


def _border(start: float, step: float, is_fine: bool) -> Asking:
    low, high = yield from _bracket(start, step)
    if low is None:
        return Border(None, high)
    while high is not None and high > low * (1 + (FINE if is_fine else COARSE)):
        middle = sqrt(low * high)
        low, high = (middle, high) if all((yield [middle])) else (low, middle)
    if high is not None and is_fine:
        rates = [low * above for above in RATES_ABOVE]
        met = yield rates
        passing = [rate for rate, is_met in zip(rates, met, strict=True) if is_met]
        low, high = max([low, *passing]), high if not passing else max(passing) * RATES_ABOVE[0]
    return Border(low, high)


def _bracket(start: float, step: float) -> Generator[list[float], list[bool], tuple[float | None, float | None]]:
    """A factor that meets the objectives and a larger one that does not, in growing steps from `start` on; None where
    there is none."""
    factor = start
    if all((yield [start])):
        while factor * step <= start * MAX_FACTOR:
            if not all((yield [factor * step])):
                return factor, factor * step
            factor, step = factor * step, min(step * step, 2.0)
        return factor, None
    while factor / step >= start / MAX_FACTOR:
        if all((yield [factor / step])):
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
