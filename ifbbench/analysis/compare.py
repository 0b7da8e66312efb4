"""Two runs side by side: figures with their uncertainty, the first different decision, and who gained and lost.

The uncertainty of a figure over requests is that of a bootstrap: requests are drawn again with replacement, the same
ones in both runs where the traces are equal (paired), and the figure is computed anew each time.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.analysis.explain import LIMIT_WORDS
from ifbbench.analysis.recorded import Id, IterationRow, RecordedRun, Span
from ifbbench.analysis.waiting import HeadsOfLine
from ifbbench.errors import InputError

DRAWS = 200
CONFIDENCE = 95.0
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9}
PER_REQUEST = ("queue_time_s", "ttft_s", "tpot_s", "e2e_s")
MIN_SAMPLES = 20
Floats = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """A figure of both runs.

    difference: b minus a. ratio: b over a; None if a is 0. low, high: confidence interval of the difference; None where
    the figure is not one of the latencies of requests. is_noise: whether the interval holds 0, so that the runs do not
    differ in it.
    """

    a: float
    b: float
    low: float | None = None
    high: float | None = None

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a else None

    @property
    def is_noise(self) -> bool:
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high

    def as_dict(self) -> dict[str, Any]:
        interval = {} if self.low is None else {"interval_95": [self.low, self.high], "is_noise": self.is_noise}
        return {"a": self.a, "b": self.b, "difference": self.difference, "ratio": self.ratio} | interval


@dataclass(frozen=True)
class Divergence:
    """The first iteration in which the runs decided differently.

    a, b: what each run did in it that the other did not, in words. a_start_s, b_start_s: when it began.
    states: of a and of b: what the run had in use, and which request it left out first.
    """

    iteration: int
    a_start_s: float | None
    b_start_s: float | None
    a: list[str]
    b: list[str]
    states: list[str]

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Change:
    """How much longer a request took in run b. cause: of the run in which it took longer, why, by the part of its time
    that differs most."""

    request_id: Id
    e2e_a_s: float
    e2e_b_s: float
    cause: str

    @property
    def difference_s(self) -> float:
        return self.e2e_b_s - self.e2e_a_s

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"difference_s": self.difference_s}


class Comparison:
    """Run `b` compared with run `a`."""

    def __init__(self, a: RecordedRun, b: RecordedRun) -> None:
        self.a, self.b = a, b

    @property
    def same_trace(self) -> bool:
        """Whether both replayed the same requests, so that they can be compared one by one."""
        traces = [run.data.run.get("trace") or {} for run in (self.a, self.b)]
        if traces[0].get("sha256") and traces[0].get("sha256") == traces[1].get("sha256"):
            return self.a.trace.keys() == self.b.trace.keys()
        return {one: row.prompt_len for one, row in self.a.trace.items()} == {
            one: row.prompt_len for one, row in self.b.trace.items()
        }

    @property
    def same_schedule(self) -> bool:
        """Whether every iteration decided the same, times aside."""
        digests = [run.data.run.get("schedule_digest") for run in (self.a, self.b)]
        if all(digests):
            return digests[0] == digests[1]
        return self.first_divergence is None

    @property
    def identical(self) -> bool:
        """Whether decisions and times of all requests are the same."""
        return self.same_schedule and self.a.row_of == self.b.row_of

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """Each number of `summary.json` that both runs have, by its dotted name."""
        flat = [dict(_numbers(run.data.summary or {})) for run in (self.a, self.b)]
        intervals = self._intervals()
        return {
            name: Figure(value, flat[1][name], *intervals.get(name, ()))
            for name, value in flat[0].items() if name in flat[1]
        }  # fmt: skip

    def _intervals(self) -> dict[str, Interval]:
        generator = np.random.default_rng(0)
        paired = self.same_trace
        found: dict[str, Interval] = {}
        draws: dict[tuple[bool, int], NDArray[np.int32]] = {}
        for name in PER_REQUEST:
            values = [
                {one: row[name] for one, row in run.row_of.items() if row.get(name) is not None}
                for run in (self.a, self.b)
            ]
            if paired:
                common = [one for one in values[0] if one in values[1]]
                values = [{one: side[one] for one in common} for side in values]
            a, b = (np.array(list(side.values()), np.float64) for side in values)
            if min(len(a), len(b)) < MIN_SAMPLES:
                continue
            sides = (False, len(a)), (not paired, len(b))
            for side in sides:
                if side not in draws:
                    draws[side] = _draws(side[1], generator)
            for statistic, interval in _bootstrap(a, b, (draws[sides[0]], draws[sides[1]])).items():
                found[f"{name}.{statistic}"] = interval
        return found

    @cached_property
    def first_divergence(self) -> Divergence | None:
        """None if all decisions are the same."""
        decisions = [set(_decisions(run)) for run in (self.a, self.b)]
        only = [sorted(decisions[0] - decisions[1]), sorted(decisions[1] - decisions[0])]
        if not only[0] and not only[1]:
            return None
        iteration = min(side[0][0] for side in only if side)
        texts = [[_in_words(one) for one in side if one[0] == iteration] for side in only]
        rows = [run.row_at(iteration) for run in (self.a, self.b)]
        starts = [None if row is None else row.details.start_s for row in rows]
        return Divergence(iteration, starts[0], starts[1], texts[0], texts[1], [_state(row) for row in rows])

    def changes(self, count: int) -> tuple[list[Change], list[Change]]:
        """The `count` requests that gained most in run b, and those that lost most; none if the traces differ."""
        if not self.same_trace:
            return [], []
        rows = [
            (self.b.row_of[one]["e2e_s"] - row["e2e_s"], one) for one, row in self.a.row_of.items()
            if row.get("e2e_s") is not None and self.b.row_of.get(one, {}).get("e2e_s") is not None
        ]  # fmt: skip
        rows.sort(key=lambda item: item[0])
        gained = [one for difference, one in rows[:count] if difference < 0]
        lost = [one for difference, one in rows[::-1][:count] if difference > 0]
        heads = HeadsOfLine(self.a, from_spans=True), HeadsOfLine(self.b, from_spans=True)
        return [self._change(one, heads) for one in gained], [self._change(one, heads) for one in lost]

    def _change(self, request_id: Id, heads: tuple[HeadsOfLine, HeadsOfLine]) -> Change:
        rows = self.a.row_of[request_id], self.b.row_of[request_id]
        parts = [row.get("attribution_s") or {} for row in rows]
        names = {**parts[0], **parts[1]}
        differences = {name: parts[1].get(name, 0.0) - parts[0].get(name, 0.0) for name in names}
        e2e = rows[0]["e2e_s"], rows[1]["e2e_s"]
        sign = 1 if e2e[1] > e2e[0] else -1
        name = max(differences, key=lambda one: sign * differences[one], default="")
        longer = 1 if sign > 0 else 0  # the run in which the request took longer says why
        run, seconds = (self.a, self.b)[longer], abs(differences.get(name, 0.0))
        cause = f"took {seconds:.3f} s longer for {name.replace('_', ' ')}"
        if name.startswith("waiting"):
            cause = f"waited {seconds:.3f} s longer{_behind(run, heads[longer], request_id)}"
        elif name == "paused":
            for_whom = next((span.cause for span in run.spans.get(request_id, ()) if span.phase == "paused"), None)
            cause = f"was paused {seconds:.3f} s longer, to make room for {for_whom}"
        return Change(request_id, e2e[0], e2e[1], cause)

    def as_dict(self, count: int) -> dict[str, Any]:
        """For JSON."""
        gained, lost = self.changes(count)
        divergence = self.first_divergence
        return {
            "a": str(self.a.data.path),
            "b": str(self.b.data.path),
            "identical": self.identical,
            "same_schedule": self.same_schedule,
            "same_trace": self.same_trace,
            "settings": self.different_settings,
            "first_divergence": None if divergence is None else divergence.as_dict(),
            "figures": {name: figure.as_dict() for name, figure in self.figures.items()},
            "gained": [change.as_dict() for change in gained],
            "lost": [change.as_dict() for change in lost],
        }

    @property
    def different_settings(self) -> dict[str, list[Any]]:
        """Settings in which the runs differ, with both values; not where their results go."""
        a, b = self.a.config, self.b.config
        names = [name for name in a | b if name not in ("output", "overwrite", "quiet")]
        return {name: [a.get(name), b.get(name)] for name in names if a.get(name) != b.get(name)}


def _numbers(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Nested numbers by dotted names: `ttft_s.p99`."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


def _draws(size: int, generator: np.random.Generator) -> NDArray[np.int32]:
    """[size, DRAWS]: how many times each of `size` requests occurs in each draw with replacement."""
    drawn = (np.bincount(generator.integers(0, size, size), minlength=size) for _ in range(DRAWS))
    return np.array([*drawn], np.int32).T.copy()


def _bootstrap(a: Floats, b: Floats, draws: tuple[NDArray[np.int32], NDArray[np.int32]]) -> dict[str, Interval]:
    """Confidence intervals of the differences of mean and percentiles.

    In sorted order, the percentile of a draw is the value at which the number of drawn requests passes the rank.
    """
    samples: list[dict[str, Floats]] = []
    for values, counts in zip((a, b), draws, strict=True):
        order = np.argsort(values, kind="stable")
        ranked, sums = values[order], np.cumsum(counts[order], axis=0, dtype=np.int32)
        of_draws = {"mean": values @ counts / len(values)}
        for name, percentile in PERCENTILES.items():
            places = _search(sums, percentile / 100 * (len(values) - 1))
            of_draws[name] = ranked[np.minimum(places, len(values) - 1)]
        samples.append(of_draws)
    tail = (100 - CONFIDENCE) / 2
    found: dict[str, Interval] = {}
    for name in samples[0]:
        low, high = np.percentile(samples[1][name] - samples[0][name], (tail, 100 - tail))
        found[name] = (float(low), float(high))
    return found


def _search(sums: NDArray[np.int32], rank: float) -> NDArray[np.int64]:
    """The first row of each column of ascending `sums` that is above `rank`, by bisection in all columns at once."""
    columns = np.arange(sums.shape[1])
    low, high = np.zeros(len(columns), np.int64), np.full(len(columns), len(sums), np.int64)
    while (low < high).any():
        middle = np.minimum((low + high) // 2, len(sums) - 1)
        above = sums[middle, columns] > rank
        high = np.where(above & (low < high), middle, high)
        low = np.where(~above & (low < high), middle + 1, low)
    return low


# Decisions: (iteration, text of the request id, what begins, amount), comparable between runs.

Decision = tuple[int, str, str, str]


def _decisions(run: RecordedRun) -> Iterator[Decision]:
    """What each iteration decided, as far as it changes something. Waiting is the absence of a decision."""
    for request_id, spans in run.spans.items():
        name = str(request_id)
        for span in spans:
            if span.phase in ("context", "recompute"):
                for place, tokens in enumerate(span.chunks):
                    yield span.first + place, name, span.phase, str(tokens)
            elif span.phase == "generation":
                yield span.first, name, "generation", ""
                yield span.last + 1, name, "stops", ""
            elif span.phase in ("paused", "skipped"):
                yield span.first, name, span.phase, str(span.cause or "")


def _in_words(decision: Decision) -> str:
    _, request_id, kind, amount = decision
    return {
        "context": f"request {request_id} runs {amount} tokens of its prompt",
        "recompute": f"request {request_id} computes {amount} tokens again",
        "generation": f"request {request_id} generates",
        "stops": f"request {request_id} stops generating",
        "paused": f"request {request_id} is paused to make room for {amount}",
        "skipped": f"request {request_id} is skipped",
    }[kind]


def _state(row: IterationRow | None) -> str:
    """What an iteration had and left out, in words."""
    if row is None:
        return "no such iteration"
    details, left_out = row.details, row.details.first_left_out
    blocks = "" if row.used_blocks is None else f", {row.used_blocks:,} KV blocks in use"
    reason = "no request was left out"
    if left_out is not None:
        reason = f"request {left_out.request_id} was left out first, for {_words(left_out.reason)}"
    return f"{row.active:,} active requests, {details.budget_used:,} tokens{blocks}; {reason}"


def _words(limit: str | None) -> str:
    return LIMIT_WORDS.get(limit or "", limit or "")


def _behind(run: RecordedRun, heads: HeadsOfLine, request_id: Id) -> str:
    """The request behind which this one waited for the most iterations, and what that one waited for."""
    held = [part for span in _waits(run, request_id) for part in heads.holding(span)]
    if not held:
        return ""
    longest = max(held, key=lambda part: part.last - part.first)
    words = _words(longest.limit)
    if longest.behind is None:
        return f": for {words}" if longest.limit else ""
    blocks = ""
    size = run.config.get("tokens_per_block")
    row = run.row_of.get(longest.behind)
    if longest.limit == "kv_blocks" and size and row:
        tokens = row["prompt_len"] + (0 if run.config.get("policy") == "max_utilization" else row["max_new_tokens"])
        blocks = f" ({-(-tokens // int(size)):,} for itself)"
    return f": behind {longest.behind}, which waited for {words}{blocks}"


def _waits(run: RecordedRun, request_id: Id) -> Iterator[Span]:
    return (span for span in run.spans.get(request_id, ()) if span.waits_for is not None)


# Conditions of a regression gate.

_CONDITION = re.compile(r"\s*([\w.]+)\s*([<>])\s*([+-]?)(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(%?)\s*")


def failed_condition(text: str, figures: Mapping[str, Figure]) -> str | None:
    """Why a condition such as `ttft_s.p99>+5%` (grew by more than 5 %), `pauses>+10` (by more than 10) or
    `ttft_s.p99>1.5` (is above 1.5 in run b) holds; None if it does not. InputError if it is not such a text, or names
    no figure of both runs."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise InputError(
            f"--fail-if {text!r} is not valid; expected NAME>+5% or NAME<-5% (relative change), NAME>+10 (change) or "
            "NAME>1.5 (value of the second run), where NAME is a figure such as ttft_s.p99."
        )
    name, operator, sign, amount, percent = match.groups()
    figure = figures.get(name)
    if figure is None:
        near = [one for one in figures if one.split(".")[0] == name.split(".")[0]] or list(figures)
        known = ", ".join(near[:8])
        raise InputError(f"--fail-if {text!r}: {name} is no figure of both runs; expected one such as {known}.")
    bound = float(sign + amount) if sign else float(amount)
    if percent:
        value = 0.0 if figure.difference == 0 else (figure.ratio - 1) * 100 if figure.ratio is not None else np.inf
    else:
        value = figure.difference if sign else figure.b
    holds = value > bound if operator == ">" else value < bound
    unit = " %" if percent else ""
    kind = "changed by" if sign or percent else "is"
    return f"{name} {kind} {value:+.4g}{unit}: {text.strip()}" if holds else None
