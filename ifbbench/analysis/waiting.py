"""Which request held which others: the head of the line in each iteration, and the requests that waited behind it.

A scheduler considers requests in order and stops at the first one that does not fit. All requests behind that one wait,
and their waiting is charged to it and to the limit that held it. Capacity and micro-batch scheduling each have such a
request, so that there can be two in one iteration; a request waits for the nearest one before it. Requests that have
arrived and are not active yet stand in the same line: they wait for a batch slot only if no active request is held.
SGLang's queue is apart from its running requests, and has an order of its own: all in it wait for one request.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ifbbench.analysis.recorded import QUEUE, RecordedRun
from ifbbench.engine.plan import Limit
from ifbbench.rundir.line_types import Phase
from ifbbench.rundir.rows import Id, Span
from ifbbench.rundir.spans import CONCURRENCY, HEAD_OF_LINE
from ifbbench.rundir.timeline import NO_REQUEST, Floats
from ifbbench.settings.engines import SGLANG, VLLM

PAUSED = Phase.PAUSED
BEFORE_ALL = -2  # before the place of requests that are in no trace, too
# The limit that only the micro-batch scheduler has.
MICRO_BATCH_LIMIT = Limit.NUM_TOKENS.value


class Held(NamedTuple):
    """From iteration `first` to `last` a request was held by `limit`: itself at the head of the line if `behind` is
    None, else behind that request. `limit` is None where the recording does not say what held the line, and "none" in a
    queue that nothing held: the request came while an iteration was decided, and waits for the next one."""

    first: int
    last: int
    limit: str | None
    behind: Id | None


class Head(NamedTuple):
    """A request at the head of the line, by its place in the order of scheduling (BEFORE_ALL if all others wait behind
    it, whatever their place), and the limit that held it."""

    rank: int
    request_id: Id
    limit: str


@dataclass(frozen=True)
class Blocker:
    """What waited behind one request that one limit held.

    waited_s: request-seconds of others.
    max_behind: the maximum number of requests at a time.
    own_wait_s: how long it was itself held.
    first, last: the iterations in which it held the line.
    """

    request_id: Id
    limit: str
    waited_s: float
    max_behind: int
    own_wait_s: float
    first: int
    last: int


class HeadsOfLine:
    """The heads of the line of a run, in stretches of iterations in which they stay the same.

    from_spans: iterations are not read, which is quicker; heads that ran a part of their prompt are then unknown. Those
    of vLLM and SGLang are read all the same: what holds the head of their queues is in iterations only.
    """

    def __init__(self, run: RecordedRun, from_spans: bool = False) -> None:
        self._run = run
        self._starts, self._heads = self._found(from_spans and not names_queue_head(run))

    @property
    def stretches(self) -> tuple[list[int], list[list[Head]]]:
        """The first iteration of each stretch, and the heads in it by rank."""
        return self._starts, self._heads

    def holding(self, span: Span) -> Iterator[Held]:
        """What held the request of `span`, a span of waiting, in order of time."""
        is_queued = is_in_queue(span, self._run.spans[span.request_id], self._run)
        if span.cause != HEAD_OF_LINE and not is_queued:
            yield Held(span.first, span.last, str(span.cause), None)
            return
        rank = self._run.rank.get(span.request_id, NO_REQUEST)
        without_head = "none" if names_queue_head(self._run) else QUEUE
        latest: Held | None = None
        index = max(bisect_left(self._starts, span.first + 1) - 1, 0)
        while index < len(self._starts) and self._starts[index] <= span.last:
            end = self._starts[index + 1] - 1 if index + 1 < len(self._starts) else span.last
            head, limit, behind = nearest(self._heads[index], rank), without_head if is_queued else None, None
            if head is not None:
                limit, behind = head.limit, head.request_id
            own = [one.limit for one in self._heads[index] if one.request_id == span.request_id]
            if is_queued and own:  # it is the head of the line itself
                limit, behind = own[0], None
            first, last = max(self._starts[index], span.first), min(end, span.last)
            if latest is not None and (latest.limit, latest.behind) == (limit, behind):
                latest = latest._replace(last=last)
            else:
                if latest is not None:
                    yield latest
                latest = Held(first, last, limit, behind)
            index += 1
        if latest is not None:
            yield latest

    @cached_property
    def blockers(self) -> list[Blocker]:
        """Every request and limit that others waited behind, by the waiting that they caused, the largest first."""
        run = self._run
        behind = _WaitingByRank(run)
        waited: dict[tuple[Id, str], list[float]] = {}
        for index, heads in enumerate(self._heads):
            first = self._starts[index]
            last = self._starts[index + 1] - 1 if index + 1 < len(self._starts) else behind.last_iteration
            last = min(last, behind.last_iteration)  # of a killed run, heads may be recorded further than others
            for position, head in enumerate(heads):
                next_rank = heads[position + 1].rank if position + 1 < len(heads) else None
                # All wait behind a single head; to choose among several takes a look at each request.
                seconds, most = (
                    behind.all(first, last) if len(heads) == 1 else behind.between(head.rank, next_rank, first, last)
                )
                entry = waited.setdefault((head.request_id, head.limit), [0.0, 0, first, last])
                entry[0] += seconds
                entry[1] = max(entry[1], most)
                entry[3] = last
        own = self.own_waiting_s
        found = [
            Blocker(request_id, limit, seconds, int(most), own.get((request_id, limit), 0.0), int(first), int(last))
            for (request_id, limit), (seconds, most, first, last) in waited.items()
            if seconds > 0
        ]
        return sorted(found, key=lambda blocker: (-blocker.waited_s, str(blocker.request_id)))

    @cached_property
    def own_waiting_s(self) -> dict[tuple[Id, str], float]:
        """Seconds that each request was itself held by each limit."""
        own: dict[tuple[Id, str], float] = {}
        iterations = self._run.iterations
        for spans in self._run.spans.values():
            for span in spans:
                if is_own_wait(span, spans, self._run):
                    key = (span.request_id, str(span.cause))
                    seconds = iterations.start_of(span.last + 1) - iterations.start_of(span.first)
                    own[key] = own.get(key, 0.0) + seconds
        return own

    def _found(self, from_spans: bool) -> tuple[list[int], list[list[Head]]]:
        """The first iteration of each stretch, and the heads in it by rank."""
        firsts, pairs = ([], []) if from_spans else self._named()
        if self._run.config.get("engine") == SGLANG:
            return firsts, [[] if pair is None else [Head(BEFORE_ALL, *pair)] for pair in pairs]
        rank = self._run.rank
        # Requests that another scheduler left out have a span of their own; so have the paused, which do not fit.
        held = sorted(
            (
                span
                for spans in self._run.spans.values()
                for span in spans
                if span.cause != CONCURRENCY and (span.phase == PAUSED or is_own_wait(span, spans, self._run))
            ),
            key=lambda span: span.first,
        )
        bounds = sorted({*firsts, *(span.first for span in held), *(span.last + 1 for span in held)})
        heads: list[list[Head]] = []
        open_spans: list[Span] = []
        index, next_span = -1, 0
        for bound in bounds:
            while index + 1 < len(firsts) and firsts[index + 1] <= bound:
                index += 1
            while next_span < len(held) and held[next_span].first <= bound:
                open_spans.append(held[next_span])
                next_span += 1
            open_spans = [span for span in open_spans if span.last >= bound]
            found = {span.request_id: str(span.cause) for span in open_spans if span.phase != PAUSED}
            if index >= 0 and (pair := pairs[index]) is not None:
                found[pair[0]] = pair[1]
            paused = [span.request_id for span in open_spans if span.phase == PAUSED]
            if paused and not any(limit != MICRO_BATCH_LIMIT for limit in found.values()):
                # The first of them holds the line of the capacity scheduler.
                found[min(paused, key=lambda one: rank.get(one, NO_REQUEST))] = "kv_blocks"
            heads.append(sorted(Head(rank.get(one, NO_REQUEST), one, limit) for one, limit in found.items()))
        return bounds, heads

    def _named(self) -> tuple[list[int], list[tuple[Id, str] | None]]:
        """What iterations name as left out first, or as what holds the queue, in runs of equal ones: the first
        iteration of each."""
        iterations, pairs = self._run.iterations, list[tuple[Id, str] | None]()
        changes = np.flatnonzero(np.diff(iterations.queue_head, prepend=NO_REQUEST - 1))
        for code in iterations.queue_head[changes].tolist():
            pair = None if code == NO_REQUEST else iterations.left_out_pairs[code]
            if pair is not None and pair[1] == Limit.PREFILL:
                # A run of an earlier version does not name what holds the queue while running requests stand aside for
                # prompts: it is taken to be as before.
                pair = pairs[-1] if pairs else None
            pairs.append(pair)
        return iterations.number[changes].tolist(), pairs


def names_queue_head(run: RecordedRun) -> bool:
    """Whether iterations name what holds the head of the queue. vLLM and SGLang start requests from their queue."""
    return run.config.get("engine") in (VLLM, SGLANG)


def is_in_queue(span: Span, spans: list[Span], run: RecordedRun) -> bool:
    """Whether `span`, one of `spans` of a request, is its time in the queue: the first one, after the client held it
    back. Where iterations name what holds the head of the queue, such spans have the limit that held it last, not the
    one that held it at each time."""
    first = next((one for one in spans if one.cause != CONCURRENCY), None)
    return span is first and (span.cause == QUEUE or names_queue_head(run))


def is_own_wait(span: Span, spans: list[Span], run: RecordedRun) -> bool:
    """Whether `span`, one of `spans` of a request, is waiting at the head of the line."""
    return span.waits_for not in (None, HEAD_OF_LINE) and not is_in_queue(span, spans, run)


def nearest(heads: list[Head], rank: int) -> Head | None:
    """The last of `heads`, which are in order, before `rank`."""
    before = None
    for head in heads:
        if head.rank >= rank:
            break
        before = head
    return before


class _WaitingByRank:
    """How many requests wait behind the head of the line, in stretches of iterations, by their place in the order."""

    def __init__(self, run: RecordedRun) -> None:
        spans = [
            span
            for of_request in run.spans.values()
            for span in of_request
            if span.waits_for is not None and not is_own_wait(span, of_request, run)
        ]
        self._first = np.array([span.first for span in spans], np.int64)
        self._last = np.array([span.last for span in spans], np.int64)
        self._rank = np.array([run.rank.get(span.request_id, NO_REQUEST) for span in spans], np.int64)
        order = np.argsort(self._first, kind="stable")
        self._first, self._last, self._rank = self._first[order], self._last[order], self._rank[order]
        self.last_iteration = int(max(self._last.max(initial=0), run.iterations.number[-1]))
        # Cumulated waiting: of all requests, up to the start of each iteration.
        steps = np.zeros(self.last_iteration + 2, np.int64)
        np.add.at(steps, self._first, 1)
        np.add.at(steps, self._last + 1, -1)
        self._count = steps.cumsum()
        numbers = np.arange(self.last_iteration + 2)
        starts: Floats = np.interp(numbers, run.iterations.number, run.iterations.start_s)
        starts[-1] = run.iterations.end_s[-1]
        self._starts = starts
        self._waited = np.concatenate(([0.0], np.cumsum(self._count[:-1] * np.diff(starts))))

    def all(self, first: int, last: int) -> tuple[float, int]:
        """As `between`, of all requests that wait behind the head of the line."""
        if last < first:
            return 0.0, 0
        return float(self._waited[last + 1] - self._waited[first]), int(self._count[first : last + 1].max())

    def between(self, after: int, before: int | None, first: int, last: int) -> tuple[float, int]:
        """Request-seconds of waiting in iterations `first` to `last`, and the maximum number of requests that wait at a
        time, of requests behind rank `after` and up to rank `before`; None is no such end."""
        if last < first or not len(self._first):
            return 0.0, 0
        chosen = (self._first <= last) & (self._last >= first) & (self._rank > after)
        if before is not None:
            chosen &= self._rank <= before
        begin = np.maximum(self._first[chosen], first)
        end = np.minimum(self._last[chosen], last)
        seconds = float((self._starts[end + 1] - self._starts[begin]).sum())
        return seconds, int(chosen.sum())
