"""Two runs side by side: their figures, the first different decision, and the requests that gained and lost."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ifbbench.analysis.confidence import OF_BLOCKS, margins
from ifbbench.analysis.figures import Figure, compared_figures
from ifbbench.analysis.fleet import Parting, first_parting
from ifbbench.analysis.number_texts import number_of, significant
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.repeats import RepeatsComparison
from ifbbench.analysis.waiting import HeadsOfLine
from ifbbench.analysis.words import Words, words_of
from ifbbench.rundir.line_types import RUNNING
from ifbbench.rundir.metrics import limit_waited_for
from ifbbench.rundir.rows import Id, Span
from ifbbench.rundir.timeline import Iterations
from ifbbench.settings.config import ARRIVAL_SETTINGS, READ_SETTINGS, settings
from ifbbench.settings.engines import ENGINES
from ifbbench.settings.modes import Overlap

# Policies and engines that keep no blocks for the output of a request that starts.
NO_RESERVE = ("max_utilization", "vllm")
# So many requests with the same reason are named.
IDS_NAMED = 6
# How a trace is drawn or read: of no account where both runs replayed the same requests.
TRACE_SETTINGS = {*READ_SETTINGS, *ARRIVAL_SETTINGS, "time_scale", "reserve", "max_prompt_len"}


@dataclass(frozen=True)
class Divergence:
    """The first iteration in which the runs decided differently.

    a_start_s, b_start_s: when it began.
    a, b: what each run did in it that the other did not, in words.
    states: what each run had in use, and which request it left out first.
    parted: the requests of two engines that ran in one run and not in the other, each with the reason, and which run
        plans ahead.
    """

    iteration: int
    a_start_s: float | None
    b_start_s: float | None
    a: list[str]
    b: list[str]
    states: list[str]
    parted: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        facts = dict(vars(self))
        return facts if self.parted else {name: value for name, value in facts.items() if name != "parted"}


@dataclass(frozen=True)
class Change:
    """How much longer a request took in run b.

    cause: why the run in which it took longer was slower, by the part of its time that differs most.
    """

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
    """Run `b` compared with run `a`.

    repeats: runs of both with several seeds, from which the figures are then taken.
    name: name of `b` in sentences.
    """

    def __init__(
        self, a: RecordedRun, b: RecordedRun, repeats: RepeatsComparison | None = None, name: str = "b"
    ) -> None:
        self.a, self.b, self.repeats, self.name = a, b, repeats, name

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
    def has_decisions(self) -> bool:
        """Whether the decisions of both runs are recorded: those of a server that is not ours are not, `--recording
        summary` leaves them out, and a run may have ended before its first."""
        runs = self.a, self.b
        return not self.has_endpoint and not any(one.data.has_only_summary or one.nothing_ran for one in runs)

    @property
    def has_endpoint(self) -> bool:
        """Whether one is of a server that is not ours."""
        return bool(self.a.data.endpoint or self.b.data.endpoint)

    @property
    def has_two_engines(self) -> bool:
        """Whether the runs had schedulers of different engines."""
        engines = {run.config.get("engine") or ENGINES[0] for run in (self.a, self.b)}
        return len(engines) > 1

    @property
    def _block_names(self) -> list[str]:
        """What the KV cache of each run is divided into; with the tokens of a block where these differ."""
        sizes = [run.config.get("tokens_per_block") for run in (self.a, self.b)]
        names = [f"KV {words_of(run.config).blocks(size)}" for run, size in zip((self.a, self.b), sizes, strict=True)]
        if sizes[0] == sizes[1] or None in sizes:
            return names
        return [name if size == 1 else f"{name} of {size} tokens" for name, size in zip(names, sizes, strict=True)]

    @property
    def has_digests(self) -> bool:
        """Whether both runs have a digest of all their decisions."""
        return all(run.data.run.get("schedule_digest") for run in (self.a, self.b))

    @property
    def same_schedule(self) -> bool:
        """Whether every iteration decided the same, times aside; False if that is unknown."""
        if self.has_digests:
            return bool(self.a.data.run["schedule_digest"] == self.b.data.run["schedule_digest"])
        return self.has_decisions and self.first_divergence is None

    @property
    def identical(self) -> bool:
        """Whether decisions and times of all requests are the same."""
        return self.same_schedule and self.a.row_of == self.b.row_of

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """Each number of `summary.json` that both runs have, by its dotted name."""
        if self.repeats is not None:
            return self.repeats.figures
        summaries = [run.data.summary or {} for run in (self.a, self.b)]
        return compared_figures(summaries[0], summaries[1], margins(self.b.sample, self.a.sample))

    @property
    def is_too_short(self) -> bool:
        """Whether there are no intervals because a run is too short."""
        return self.repeats is None and bool(self.a.sample.too_short or self.b.sample.too_short)

    @property
    def interval_of(self) -> str:
        """What the intervals are of, or why there are none, in words."""
        if self.repeats is not None:
            return self.repeats.interval_of
        for run in (self.a, self.b):
            if run.sample.too_short:
                why = run.sample.too_short
                return f"No intervals: {run.path} is too short to tell chance from a difference; {why}."
        return OF_BLOCKS.format(min(self.a.sample.blocks, self.b.sample.blocks))

    @cached_property
    def first_divergence(self) -> Divergence | None:
        """None if all decisions are the same, or unknown."""
        if not self.has_decisions:
            return None
        decisions = [set(_decisions(run)) for run in (self.a, self.b)]
        only = [sorted(decisions[0] - decisions[1]), sorted(decisions[1] - decisions[0])]
        if not only[0] and not only[1]:
            return None
        iteration = min(side[0][0] for side in only if side)
        runs = self.a, self.b
        words = [words_of(run.config) for run in runs]
        texts = [
            [_in_words(one, words_of_run) for one in side if one[0] == iteration]
            for side, words_of_run in zip(only, words, strict=True)
        ]
        found = [run.iteration(iteration) for run in runs]
        starts = [None if one is None else float(one.start_s[0]) for one in found]
        states = list(map(_state, found, words, self._block_names))
        parted = list[str]()
        if self.has_two_engines:
            named = {one[1] for side in only for one in side if one[0] == iteration}
            parted = [
                *_parted(runs, iteration, named, ("a", self.name)),
                *_parted(runs[::-1], iteration, named, (self.name, "a")),
                *_planned_ahead(runs, iteration, starts, ("a", self.name)),
            ]
        return Divergence(iteration, starts[0], starts[1], texts[0], texts[1], states, parted)

    @cached_property
    def routing(self) -> Parting | None:
        """Where the routing of two fleets first differs; None if it does not, or a run is no fleet."""
        if not (self.a.data.is_fleet and self.b.data.is_fleet and self.same_trace):
            return None
        if self.a.data.is_disaggregated or self.b.data.is_disaggregated:
            return None  # their replicas are not alike
        return first_parting(self.a.data, self.b.data)

    def changes(self, count: int) -> tuple[list[Change], list[Change]]:
        """The `count` requests that gained most in run b, and those that lost most; none if the traces differ."""
        if not self.same_trace:
            return [], []
        rows = [
            (self.b.row_of[one]["e2e_s"] - row["e2e_s"], one)
            for one, row in self.a.row_of.items()
            if row.get("e2e_s") is not None and self.b.row_of.get(one, {}).get("e2e_s") is not None
        ]
        rows.sort(key=lambda item: item[0])
        gained = [one for difference, one in rows[:count] if difference < 0]
        lost = [one for difference, one in rows[::-1][:count] if difference > 0]
        if self.has_endpoint:
            return list(map(self._change_seen, gained)), list(map(self._change_seen, lost))
        heads = None
        if self.has_decisions:
            heads = HeadsOfLine(self.a, from_spans=True), HeadsOfLine(self.b, from_spans=True)
        return [self._change(one, heads) for one in gained], [self._change(one, heads) for one in lost]

    def _change_seen(self, request_id: Id) -> Change:
        """The cause as far as a client sees it: before or after the first token."""
        a, b = self.a.row_of[request_id], self.b.row_of[request_id]
        until_s, total_s = b["ttft_s"] - a["ttft_s"], b["e2e_s"] - a["e2e_s"]
        parts = {"until the first token": until_s, "for the other tokens": total_s - until_s}
        part, seconds = max(parts.items(), key=lambda item: item[1] if total_s > 0 else -item[1])
        return Change(request_id, a["e2e_s"], b["e2e_s"], f"took {abs(seconds):.3f} s longer {part}")

    def _change(self, request_id: Id, heads: tuple[HeadsOfLine, HeadsOfLine] | None) -> Change:
        """heads: None where spans are not recorded; the cause then names no other request."""
        rows = self.a.row_of[request_id], self.b.row_of[request_id]
        parts = [row.get("attribution_s") or {} for row in rows]
        names = {**parts[0], **parts[1]}
        differences = {name: parts[1].get(name, 0.0) - parts[0].get(name, 0.0) for name in names}
        e2e = rows[0]["e2e_s"], rows[1]["e2e_s"]
        sign = 1 if e2e[1] > e2e[0] else -1
        name = max(differences, key=lambda one: sign * differences[one], default="")
        longer = 1 if sign > 0 else 0  # the run in which the request took longer says why
        run, seconds = (self.a, self.b)[longer], abs(differences.get(name, 0.0))
        words = words_of(run.config)
        cause = f"took {seconds:.3f} s longer for {words.part_name(name)}"
        if heads is None:
            limit = limit_waited_for(name)
            if limit is not None and limit != "none":
                cause = f"waited {seconds:.3f} s longer: for {words.waits_for(limit)}"
        elif name.startswith("waiting"):
            cause = f"waited {seconds:.3f} s longer{_behind(run, heads[longer], request_id)}"
        elif name == "paused":
            for_whom = next((span.cause for span in run.spans.get(request_id, ()) if span.phase == "paused"), None)
            cause = f"was {words.paused} {seconds:.3f} s longer, to make room for {for_whom}"
        return Change(request_id, e2e[0], e2e[1], cause)

    def as_dict(self, count: int) -> dict[str, Any]:
        """For JSON."""
        gained, lost = self.changes(count)
        divergence = self.first_divergence
        routing = {} if self.routing is None else {"first_routed_differently": self.routing.as_dict()}
        return routing | {
            "a": str(self.a.data.path),
            "b": str(self.b.data.path),
            "identical": self.identical,
            "same_schedule": self.same_schedule,
            "same_trace": self.same_trace,
            "settings": self.different_settings,
            "first_divergence": None if divergence is None else divergence.as_dict(),
            "interval_of": self.interval_of,
            "figures": {name: figure.as_dict() for name, figure in self.figures.items()},
            "gained": [change.as_dict() for change in gained],
            "lost": [change.as_dict() for change in lost],
        }

    @property
    def different_settings(self) -> dict[str, list[Any]]:
        """Settings in which the runs differ, with both values; not where their results go."""
        a, b = self.a.config, self.b.config
        names = [name for name in a | b if name not in ("output", "overwrite", "quiet")]
        for run in (self.a, self.b):
            if imported := run.data.run.get("imported"):  # a log says only some settings of its server
                names = [name for name in names if name in ("engine", *imported.get("settings", ()))]
        if self.has_endpoint:  # the settings of a server that is not ours are unknown
            only_own = {one.name for one in settings() if one.group == "endpoint"} | {"model", "warm_up", "streaming"}
            if self.same_trace:  # one run drew what the other read
                only_own |= TRACE_SETTINGS
            names = [name for name in names if name in a and name in b and name not in only_own]
        return {name: [a.get(name), b.get(name)] for name in names if a.get(name) != b.get(name)}


# Decisions: (iteration, text of the request id, what begins, amount), comparable between runs.

Decision = tuple[int, str, str, str]


def _decisions(run: RecordedRun) -> Iterator[Decision]:
    """What each iteration decided, as far as it changes something. Waiting is the absence of a decision."""
    for request_id, spans in run.spans.items():
        name = str(request_id)
        for span in spans:
            if span.phase in ("context", "recompute"):
                for index, tokens in enumerate(span.chunks):
                    yield span.first + index, name, span.phase, str(tokens)
            elif span.phase == "generation":
                yield span.first, name, "generation", ""
                yield span.last + 1, name, "stops", ""
            elif span.phase in ("paused", "skipped"):
                yield span.first, name, span.phase, str(span.cause or "")


def _in_words(decision: Decision, words: Words) -> str:
    _, request_id, kind, amount = decision
    tokens = number_of(int(amount), "token") if kind in ("context", "recompute") else ""
    return {
        "context": f"request {request_id} runs {tokens} of its prompt",
        "recompute": f"request {request_id} computes {tokens} again",
        "generation": f"request {request_id} generates",
        "stops": f"request {request_id} stops generating",
        "paused": f"request {request_id} is {words.paused} to make room for {amount}",
        "skipped": f"request {request_id} {words.skipped[1]}",
    }[kind]


def _parted(
    runs: tuple[RecordedRun, ...], iteration: int, named: Collection[str], names: tuple[str, str]
) -> Iterator[str]:
    """Which of the requests `named` ran in this iteration of the first run and not of the second, and why not."""
    ran, other = runs
    heads, reasons = HeadsOfLine(other, from_spans=True), dict[str, list[str]]()
    for request_id, spans in ran.spans.items():
        others = other.spans.get(request_id, [])
        if str(request_id) in named and _runs_in(spans, iteration) and not _runs_in(others, iteration):
            reasons.setdefault(_not_run(others, iteration, other, heads), []).append(str(request_id))
    for reason, found in reasons.items():
        some, more = ", ".join(found[:IDS_NAMED]), f" and {len(found) - IDS_NAMED:,} more" * (len(found) > IDS_NAMED)
        requests, pronoun = ("requests", "each") if len(found) > 1 else ("request", "it")
        yield f"{requests} {some}{more} ran in {names[0]} and not in {names[1]}, where {pronoun} {reason}"


def _planned_ahead(
    runs: tuple[RecordedRun, ...], iteration: int, starts: Sequence[float | None], names: tuple[str, str]
) -> Iterator[str]:
    """Which run decides an iteration while the one before runs, if only one does so and began this one earlier."""
    ahead = [run.config.get("overlap") == Overlap.ASYNC for run in runs]
    if iteration == 0 or ahead[0] == ahead[1]:
        return
    first = ahead.index(True)
    ahead_name = words_of(runs[first].config).ahead
    earlier, later = starts[first], starts[1 - first]
    if earlier is not None and later is not None and earlier < later:
        yield (
            f"in {names[first]} an iteration is decided while the one before it runs ({ahead_name}), here "
            f"{significant(later - earlier)} s before {names[1 - first]}: it sees fewer arrivals"
        )


def _runs_in(spans: Sequence[Span], iteration: int) -> bool:
    return any(
        span.phase in RUNNING and span.first <= iteration <= span.last and (iteration - span.first) % span.every == 0
        for span in spans
    )


def _not_run(spans: Sequence[Span], iteration: int, run: RecordedRun, heads: HeadsOfLine) -> str:
    """Why a request with these spans did not run in an iteration of `run`."""
    words, recorded = words_of(run.config), run.iteration(iteration)
    if not spans or iteration < spans[0].first:
        return "had not arrived"
    if iteration > spans[-1].last:
        return "had ended"
    found = [span for span in spans if span.first <= iteration <= span.last]
    if found and found[0].waits_for is not None:
        held = next((part for part in heads.holding(found[0]) if part.first <= iteration <= part.last), None)
        if held is None or recorded is None or not recorded.left_out_pairs:
            return "arrived while the iteration ran"
        behind = "" if held.behind is None else f" behind {held.behind}, which waited"
        return f"waited{behind} for {words.waits_for(held.limit)}"
    return f"was {words.phase(found[0].phase)}" if found else "did not run"


def _state(one: Iterations | None, words: Words, kept: str) -> str:
    """What one iteration had and left out, in words. kept: what the KV cache is divided into."""
    if one is None:
        return "no such iteration"
    blocks = ""
    if not np.isnan(used := one.used_blocks[0]):
        blocks = f", {used:,.0f} {kept.replace('s', '', 1) if used == 1 else kept} in use"
    reason = "no request was left out"
    if one.left_out_pairs:
        request_id, limit = one.left_out_pairs[0]
        reason = f"request {request_id} was left out first, for {words.waits_for(limit)}"
    active, tokens = number_of(one.active[0], "active request"), number_of(one.budget_used[0], "token")
    return f"{active}, {tokens}{blocks}; {reason}"


def _behind(run: RecordedRun, heads: HeadsOfLine, request_id: Id) -> str:
    """The request behind which this one waited for the most iterations, and what that one waited for."""
    held = [part for span in _waits(run, request_id) for part in heads.holding(span)]
    if not held:
        return ""
    longest = max(held, key=lambda part: part.last - part.first)
    words = words_of(run.config).waits_for(longest.limit)
    if longest.behind is None:
        return f": for {words}" if longest.limit else ""
    blocks = ""
    size = run.config.get("tokens_per_block")
    row = run.row_of.get(longest.behind)
    if longest.limit == "kv_blocks" and size and row:
        reserved = 0 if run.data.decided_by in NO_RESERVE else row["max_new_tokens"]
        tokens = row["prompt_len"] + reserved
        blocks = f" ({-(-tokens // int(size)):,} for itself)"
    return f": behind {longest.behind}, which waited for {words}{blocks}"


def _waits(run: RecordedRun, request_id: Id) -> Iterator[Span]:
    return (span for span in run.spans.get(request_id, ()) if span.waits_for is not None)
