"""The figures of requests that have ended: latencies, gaps between tokens, rates and goodput, of all or of some; and
the limits that bound iterations and held the head of the line."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import ArrayLike, NDArray

from ifbbench.rundir.traffic import SLOW_TTFT_S, Window, jain_index
from ifbbench.settings.objectives import Objective

Objectives = tuple[Objective, ...]
Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]

PER_REQUEST = ("queue_time_s", "ttft_s", "tpot_s", "e2e_s")
# What every summary has a share of. The other reasons (`Limit`, and those of a user's policy) are there where they
# bound an iteration.
BOUND_BY = ("batch_size", "num_tokens", "kv_blocks", "none")
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9}
# Figures are given for each class and each priority where there are at least and at most so many.
MIN_GROUPS, MAX_GROUPS = {"by_class": 1, "by_priority": 2}, 100
STATISTICS = ("mean", "min", *PERCENTILES, "max")
# Parts of an attribution: waiting for a limit that left the request itself out; behind the head of the line, for the
# limit that held the head; and, before its first iteration, for the one in progress to end.
WAITING_FOR, WAITING_BEHIND, WAITING_ITERATION = "waiting_", "waiting_head_of_line_", "waiting_iteration"
# A part that is not: keys and values were on their way to the request, from another engine or a store.
TRANSFER = "transfer"


def shares_of_limits(limits: Sequence[str], numbers: ArrayLike, seconds: Floats) -> dict[str, dict[str, float]]:
    """Which share of the iterations each limit bound, by number (`bound_by`) and by time (`bound_by_time`).

    numbers: position in `limits` of the limit of each iteration.
    seconds: duration of each iteration, see `own_seconds`.
    """
    numbers = np.asarray(numbers, np.int64)
    counts, times = np.bincount(numbers, minlength=len(limits)), np.bincount(numbers, seconds, minlength=len(limits))
    shares = {"bound_by": counts / (counts.sum() or 1), "bound_by_time": times / (times.sum() or 1.0)}
    return {title: dict(zip(limits, of_each.tolist(), strict=True)) for title, of_each in shares.items()}


def own_seconds(starts: ArrayLike, ends: ArrayLike, num_micro_batches: int) -> Floats:
    """How long each iteration took, without the time for which the one before it (of its micro batch) still ran, as it
    does where iterations are decided one ahead. Iterations of several servers may follow each other."""
    begins, ends, every = np.asarray(starts, np.float64), np.asarray(ends, np.float64), num_micro_batches
    # In place, as the iterations of a fleet are many.
    seconds: Floats = begins.copy()
    np.clip(ends[:-every], begins[every:], ends[every:], out=seconds[every:])
    np.copyto(seconds[every:], begins[every:], where=begins[every:] < begins[:-every])
    np.subtract(ends, seconds, out=seconds)
    return seconds


@cache
def limit_waited_for(part: str) -> str | None:
    """The limit that this part of an attribution was spent waiting for: `none` where no limit is the reason, None for a
    part that is not waiting."""
    if part == WAITING_ITERATION:
        return "none"
    for prefix in (WAITING_BEHIND, WAITING_FOR):
        if part.startswith(prefix):
            return part.removeprefix(prefix)
    return None


class HeadOfLine:
    """Which limit held the head of the line, the first request that was left out, over time.

    limit: the limit that holds the head now, since `_since_s`; None before the first iteration.
    _held: times in which each limit held it.
    """

    def __init__(self) -> None:
        self.limit: str | None = None
        self._since_s = 0.0
        self._held: dict[str, _Held] = {}

    def change(self, limit: str, start_s: float) -> None:
        """`limit`, another one than so far, holds the head from `start_s` on."""
        if self.limit is not None:
            held = self._held[self.limit]
            held.ends.append(start_s)
            held.seconds += start_s - self._since_s
        if (held_now := self._held.get(limit)) is None:
            held_now = self._held[limit] = _Held()
        held_now.begins.append(start_s)
        held_now.before.append(held_now.seconds)
        self.limit, self._since_s = limit, start_s

    def split(self, begin_s: float, end_s: float) -> dict[str, float]:
        """The time from `begin_s` to `end_s` by the limit that held the head; the parts add up to it."""
        if self.limit is not None and self._since_s <= begin_s:
            return {self.limit: end_s - begin_s}
        parts = {limit: held.until(end_s) - held.until(begin_s) for limit, held in self._held.items()}
        largest = max(parts, key=parts.__getitem__)
        parts[largest] = end_s - begin_s - sum([seconds for limit, seconds in parts.items() if limit != largest], 0.0)
        return {limit: seconds for limit, seconds in parts.items() if seconds > 0}


class _Held:
    """When one limit held the head of the line.

    begins, ends, before: each time, in seconds, and the seconds that it had held it before. It still holds it if it
        began once more than it ended.
    seconds: durations of all spans that have ended.
    """

    def __init__(self) -> None:
        self.begins, self.ends, self.before = array("d"), array("d"), array("d")
        self.seconds = 0.0

    def until(self, time_s: float) -> float:
        """How many seconds it held the head before `time_s`."""
        index = bisect_right(self.begins, time_s) - 1
        if index < 0:
            return 0.0
        end_s = min(time_s, self.ends[index]) if index < len(self.ends) else time_s
        return self.before[index] + (end_s - self.begins[index])


def distribution(values: Sequence[float] | Floats) -> dict[str, float | None]:
    """mean, min, percentiles (linear interpolation) and max of `values`, in their unit; all None if there are none."""
    data = np.asarray(values, np.float64)
    if data.size == 0:
        return dict.fromkeys(STATISTICS)
    return _statistics(data.mean(), np.sort(data), data.size, lambda places: places)


def counted_distribution(values: Floats, counts: Integers) -> dict[str, float | None]:
    """`distribution` of `values`, which ascend, the i-th of them `counts[i]` times (at least once), without repeating
    them."""
    if values.size == 0:
        return dict.fromkeys(STATISTICS)
    sum_of_all = (values * counts).sum()
    ends = counts.cumsum()  # the number of values up to and including the i-th
    total = int(ends[-1])
    mean = sum_of_all / total
    return _statistics(mean, values, total, lambda places: ends.searchsorted(places, side="right"))


def _statistics(
    mean: float, values: Floats, total: int, index_of: Callable[[Integers], Integers]
) -> dict[str, float | None]:
    """STATISTICS of `total` values.

    values: the different ones, ascending.
    index_of(places): the indices in `values` of those at these places among all in order.
    """
    # The arithmetic of numpy's percentile, to the last bit: between the values before and after the rank. That function
    # itself takes longer than the rest of a short run's summary, and imports numpy.ma.
    ranks = (total - 1) * (np.array(list(PERCENTILES.values())) / 100)
    before = np.floor(ranks).astype(np.int64)
    after = np.minimum(before + 1, total - 1)
    lower, upper = values[index_of(before)], values[index_of(after)]
    share, step = ranks - before, upper - lower
    percentiles = np.where(share < 0.5, lower + step * share, upper - step * (1 - share))
    return dict(zip(STATISTICS, map(float, (mean, values[0], *percentiles, values[-1])), strict=True))


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenGaps:
    """The gaps between consecutive output tokens of requests (ITL), counted rather than stored.

    A request that produces a token in two consecutive iterations of its micro batch adds one gap: the time between
    their ends. So it is enough to know the stretches of iterations in which requests produced a token each time. Gaps
    over several iterations, where a request was skipped or paused, are kept one by one. All are iteration numbers, 4
    bytes each.

    every: the number of micro batches; one runs in each so many iterations.
    """

    def __init__(self) -> None:
        self.every = 1
        # First and last iteration whose end ends a gap of one step; before and after the other gaps.
        self._steps = array("i"), array("i")
        self._long = array("i"), array("i")
        # The gaps after first tokens that another engine computed: seconds, and the iteration of the second token.
        self._first = array("d"), array("i")

    def add(self, stretches: Iterable[tuple[int, int]], every: int = 1) -> None:
        """Take in a request that produced a token in each `every`-th iteration of `stretches`, [first, last] in order
        of time."""
        self.every = every
        # Lists, because arrays take longer to grow by one.
        begins, ends, befores, afters = list[int](), list[int](), list[int](), list[int]()
        before, is_first = 0, True
        for first, last in stretches:
            if is_first:
                first += every
                is_first = False
            elif first != before + every:
                befores.append(before)
                afters.append(first)
                first += every
            if first <= last:
                begins.append(first)
                ends.append(last)
            before = last
        self._steps[0].extend(begins)
        self._steps[1].extend(ends)
        self._long[0].extend(befores)
        self._long[1].extend(afters)

    def add_first(self, seconds: float, iteration: int) -> None:
        """Take in a gap of so many seconds that ends with `iteration`, and began with none of this engine."""
        self._first[0].append(seconds)
        self._first[1].append(iteration)

    def parts(self) -> tuple[Any, ...]:
        """All that it knows, as what another process can be sent."""
        return self.every, self._steps, self._long, self._first

    @classmethod
    def of_parts(cls, parts: tuple[Any, ...]) -> "TokenGaps":
        """What `parts` was called of."""
        gaps = cls()
        gaps.every, gaps._steps, gaps._long, gaps._first = parts
        return gaps

    def extend(self, other: "TokenGaps", offset: int = 0) -> None:
        """Take in the gaps of other requests. offset: added to their iteration numbers."""
        self.every = max(self.every, other.every)
        for mine, others in zip((*self._steps, *self._long), (*other._steps, *other._long), strict=True):
            mine.extend(others if not offset else array("i", (number + offset for number in others)))
        self._first[0].extend(other._first[0])
        self._first[1].extend([number + offset for number in other._first[1]])

    def counted(self, ends: Sequence[float] | Floats, window: Window | None = None) -> tuple[Floats, Integers]:
        """Gaps in seconds, ascending, and the number of times that each occurs; both of shape [gaps].

        ends: end of each iteration, in seconds.
        window: counts only the gaps that end in it.
        """
        seconds = np.asarray(ends, np.float64)
        begin, last = (np.asarray(column) for column in self._steps)
        every, size = self.every, (len(seconds) // self.every + 2) * self.every
        # In place, as the iterations of a fleet are many.
        counts = np.bincount(begin, minlength=size)
        counts -= np.bincount(last + every, minlength=size)
        by_turn = counts.reshape(-1, every)
        by_turn.cumsum(axis=0, out=by_turn)
        counts = counts[: len(seconds)]
        before, after = (np.asarray(column) for column in self._long)
        firsts, first_ends = (np.asarray(column) for column in self._first)
        if window is not None:
            counts, is_in = counts * window.holds(seconds), window.holds(seconds[after])
            before, after = before[is_in], after[is_in]
            firsts = firsts[window.holds(seconds[first_ends])]
        is_end = counts[every:] != 0  # none ends with the first iterations
        steps = seconds[every:] - seconds[:-every]
        steps = steps[is_end]
        times = counts[every:][is_end]
        del counts, by_turn
        gaps = np.concatenate([steps, seconds[after] - seconds[before], firsts])
        del steps
        times = np.concatenate([times, np.ones(len(after) + len(firsts), np.int64)])
        order = gaps.argsort(kind="stable")
        gaps = gaps[order]
        return gaps, times[order]


@mypyc_attr(allow_interpreted_subclasses=True)
class Population:
    """The requests of one class and priority that have ended: times and lengths of the completed ones as columns.

    columns: name to seconds [completed]; `tpot_s` is NaN for answers of one token.
    places: position of each request in the order in which those of all populations completed.
    failed: number of failed requests.
    """

    def __init__(self) -> None:
        self.columns = {name: array("d") for name in ("arrival_s", *PER_REQUEST)}
        self.prompt_lens, self.output_lens, self.places = array("q"), array("q"), array("q")
        self.reused_tokens = self.failed = 0
        self.gaps = TokenGaps()

    def add(
        self,
        arrival_s: float,
        queue_time_s: float,
        ttft_s: float,
        tpot_s: float | None,
        e2e_s: float,
        prompt_len: int,
        output_len: int,
        place: int,
    ) -> None:
        """Take in a completed request."""
        columns = self.columns
        columns["arrival_s"].append(arrival_s)
        columns["queue_time_s"].append(queue_time_s)
        columns["ttft_s"].append(ttft_s)
        columns["tpot_s"].append(math.nan if tpot_s is None else tpot_s)
        columns["e2e_s"].append(e2e_s)
        self.prompt_lens.append(prompt_len)
        self.output_lens.append(output_len)
        self.places.append(place)

    def parts(self) -> tuple[Any, ...]:
        """All that it knows, as what another process can be sent."""
        counts = self.reused_tokens, self.failed
        return self.columns, self.prompt_lens, self.output_lens, self.places, counts, self.gaps.parts()

    @classmethod
    def of_parts(cls, parts: tuple[Any, ...]) -> "Population":
        """What `parts` was called of."""
        one = cls()
        one.columns, one.prompt_lens, one.output_lens, one.places, counts, gaps = parts
        one.reused_tokens, one.failed = counts
        one.gaps = TokenGaps.of_parts(gaps)
        return one

    @classmethod
    def merged(cls, parts: Sequence["Population"]) -> "Population":
        """All requests of `parts`, in the order in which they completed."""
        if len(parts) == 1:
            return parts[0]
        whole = type(parts[0])() if parts else cls()
        order = np.argsort([index for part in parts for index in part.places])
        for name in whole.columns:
            of_all = np.concatenate([part.columns[name] for part in parts]) if parts else np.empty(0)
            whole.columns[name] = array("d", of_all[order].tobytes())
        for part in parts:
            whole._add_rest(part)
        return whole

    def add_all(self, other: "Population", place: int, iteration: int) -> None:
        """Take in the requests of another server. place, iteration: added to their places and iteration numbers."""
        for name, column in self.columns.items():
            column.extend(other.columns[name])
        self.places.extend([one + place for one in other.places])
        self._add_rest(other, iteration)

    def _add_rest(self, other: "Population", iteration: int = 0) -> None:
        """Take in what is no column and no place."""
        self.prompt_lens.extend(other.prompt_lens)
        self.output_lens.extend(other.output_lens)
        self.reused_tokens += other.reused_tokens
        self.failed += other.failed
        self.gaps.extend(other.gaps, iteration)

    def figures(
        self, span_s: float, ends: Sequence[float] | Floats, objectives: Objectives = (), window: Window | None = None
    ) -> dict[str, Any]:
        """Counts, rates over `span_s`, latencies and, with `objectives`, goodput.

        ends: end of each iteration, in seconds.
        window: gaps between tokens are those that end in it.
        """
        # A run without duration (an executor that answers at once, on a virtual clock) has no rates.
        per_second = 1.0 / span_s if span_s > 0 else 0.0
        columns = {name: np.asarray(column) for name, column in self.columns.items()}
        completed, prompt, output = len(self.output_lens), sum(self.prompt_lens), sum(self.output_lens)
        tpot_s = columns["tpot_s"][~np.isnan(columns["tpot_s"])]
        found = {
            "requests": {"total": completed + self.failed, "completed": completed, "failed": self.failed},
            "request_throughput_per_s": completed * per_second,
            "output_throughput_tokens_per_s": output * per_second,
            "total_throughput_tokens_per_s": (prompt + output) * per_second,
            **{name: distribution(tpot_s if name == "tpot_s" else columns[name]) for name in PER_REQUEST},
            "itl_s": counted_distribution(*self.gaps.counted(ends, window)),
            "per_user_output_speed_tokens_per_s": distribution(1 / tpot_s[tpot_s > 0]),
            "prefix_hit_rate": self.reused_tokens / prompt if prompt else 0.0,
            "prompt_tokens": prompt,
            "output_tokens": output,
        }
        if objectives:
            found |= goodput(objectives, columns, found, per_second)
        return found


def slow_ttft_s(objectives: Objectives) -> float:
    """The TTFT from which a request is slow: the target for each request, if there is one."""
    return next((one.target_s for one in objectives if one.name == "ttft"), SLOW_TTFT_S)


def goodput(
    objectives: Objectives, columns: Mapping[str, Floats], known: Mapping[str, Any], per_second: float
) -> dict[str, Any]:
    """The figures of service level objectives.

    columns: latencies of the completed requests.
    known: figures of these requests.

    A request is good if it meets every objective of each request; without such an objective there is no goodput. One
    that failed is not good, and counts in the share. `value` of an objective of each request is the worst latency.
    """
    slo, good = {}, None
    for one in objectives:
        value = known[one.latency][one.statistic or "max"]
        slo[one.name] = {"target": one.target_s, "value": value, "met": value is None or value <= one.target_s}
        if one.statistic is None:
            is_met = one.is_met(columns[one.latency])
            slo[one.name]["share"] = float(is_met.mean()) if is_met.size else 0.0
            good = is_met if good is None else good & is_met
    count, total = None if good is None else int(good.sum()), known["requests"]["total"]
    return {
        "goodput_requests_per_s": None if count is None else count * per_second,
        "goodput_share": None if count is None else count / max(total, 1),
        "slo": slo,
    }


def by_group(
    populations: Mapping[tuple[str | None, float], Population],
    span_s: float,
    ends: Sequence[float] | Floats,
    objectives: Objectives,
    window: Window | None = None,
) -> dict[str, Any]:
    """`by_class` and `by_priority`, where there are several of them, and the fairness among classes.

    populations: by class and priority. Fairness is Jain's index of what classes get: output tokens for each second that
    a request of theirs spends in the system."""
    found: dict[str, Any] = {}
    for position, title in enumerate(("by_class", "by_priority")):
        names = sorted({key[position] for key in populations} - {None}, reverse=position == 1)  # type: ignore[type-var]
        if not MIN_GROUPS[title] <= len(names) <= MAX_GROUPS:
            continue
        of_name = {
            name: Population.merged([part for key, part in populations.items() if key[position] == name])
            for name in names
        }
        found[title] = {str(name): part.figures(span_s, ends, objectives, window) for name, part in of_name.items()}
        for name, part in of_name.items():
            in_system_s = sum(part.columns["e2e_s"])
            speed = sum(part.output_lens) / in_system_s if in_system_s else 0.0
            found[title][str(name)]["output_tokens_per_request_s"] = speed
    if len(classes := found.get("by_class", ())) > 1:
        speeds = [classes[name]["output_tokens_per_request_s"] for name in classes]
        found["fairness_index"] = jain_index(speeds)
    return found


def fullest_window(blocks: Mapping[str, tuple[float, float]]) -> str:
    """The attention window with the largest share of its blocks in use, which is the one that requests wait for.

    blocks: used blocks and all blocks, by the tokens of the window."""
    return max(blocks, key=lambda size: blocks[size][0] / max(blocks[size][1], 1))
