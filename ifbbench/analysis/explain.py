"""What one request did and waited for from its arrival to its end, and what one iteration decided and why."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ifbbench.analysis.generation_time import PROMPTS
from ifbbench.analysis.number_texts import number_of, percent
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.waiting import HeadsOfLine
from ifbbench.analysis.words import TENSORRT_LLM, Words, setting_of, words_of
from ifbbench.errors import InputError
from ifbbench.rundir.line_types import IN_BATCH
from ifbbench.rundir.metrics import fullest_window, own_seconds
from ifbbench.rundir.reader import waiting_field
from ifbbench.rundir.rows import Id, Span
from ifbbench.rundir.timeline import NO_REQUEST, Iterations
from ifbbench.settings.engines import SGLANG
from ifbbench.settings.modes import Overlap


@dataclass(frozen=True)
class Stretch:
    """From `start_s` to `end_s` the request did one thing, in iterations `first` to `last`.

    phase: as in a span.
    limit, behind: what held a waiting request, see Held.
    paused_for: the request that it made room for.
    chunks: context tokens of each iteration.
    tokens: all that it computed.
    """

    phase: str
    start_s: float
    end_s: float
    first: int
    last: int
    limit: str | None = None
    behind: Id | None = None
    paused_for: Id | None = None
    chunks: tuple[int, ...] = ()
    tokens: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def as_dict(self, words: Words) -> dict[str, Any]:
        """For JSON; without the fields that do not apply."""
        facts = {name: value for name, value in vars(self).items() if value not in (None, ())}
        return facts | {"duration_s": self.duration_s, "reason": self.reason(words)}

    def reason(self, words: Words) -> str:
        """The stretch in words."""
        steps = len(self.chunks) or self.last - self.first + 1
        iterations = number_of(steps, "iteration")
        if self.phase == "arrival":
            return "waits for the next iteration to begin"
        if self.phase == "waiting":
            what = words.waits_for(self.limit)
            return f"waits for {what}" if self.behind is None else f"waits behind {self.behind}, which waits for {what}"
        if self.phase == "paused":
            return f"is {words.paused} to make room for {self.paused_for}"
        if self.phase == "skipped":
            return words.skipped[1]
        if self.phase == "generation":
            return f"generates {number_of(self.tokens, 'token')}"
        verb = "computes its prompt" if self.phase == "context" else f"computes again what the {words.pause} dropped"
        chunks = f" in {len(self.chunks)} chunks" if len(self.chunks) > 1 else ""
        return f"{verb}: {number_of(self.tokens, 'token')}{chunks} in {iterations}"


@dataclass(frozen=True)
class RequestLife:
    """A request from its arrival to its end.

    row: its line of `requests.jsonl`, empty if it had not ended.

    attribution_s: seconds by what it did or waited for; they add up to its end-to-end latency.
    least_s: a lower bound of that latency, its time alone on the device; None if unknown.
    generation_s: what the time between its tokens was spent on, see `generation_time`; empty if unknown.
    words: words of the engine.
    """

    request_id: Id
    arrival_s: float
    row: dict[str, Any]
    stretches: list[Stretch]
    attribution_s: dict[str, float]
    least_s: float | None = None
    generation_s: dict[str, float] = field(default_factory=dict)
    words: Words = TENSORRT_LLM

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = {
            name: self.row.get(name)
            for name in (
                "outcome",
                "error",
                "prompt_len",
                "output_len",
                "queue_time_s",
                "ttft_s",
                "tpot_s",
                "e2e_s",
                "pauses",
                "recomputed_tokens",
                "reused_tokens",
            )
        }
        return (
            {"request_id": self.request_id, "arrival_s": self.arrival_s}
            | facts
            | {
                "summary": self.summary,
                "life": [stretch.as_dict(self.words) for stretch in self.stretches],
                "attribution_s": self.attribution_s,
                "generation_s": self.generation_s,
                "lower_bound_s": self.least_s,
            }
        )

    @property
    def summary(self) -> str:
        """What happened to the request, in words."""
        return " ".join([*self.sentences(), *self._between_tokens()])

    def _between_tokens(self) -> list[str]:
        """How much of the time between its tokens prompts of others took, if that matters."""
        tokens_s, prompts_s = sum(self.generation_s.values()), self.generation_s.get(PROMPTS, 0.0)
        if prompts_s < 0.01 * (self.row.get("e2e_s") or math.inf):
            return []
        return [
            f"Prompts of others in the same iterations took {prompts_s:.3f} s ({percent(prompts_s / tokens_s)}) of the "
            f"{tokens_s:.3f} s between its tokens."
        ]

    def sentences(self) -> list[str]:
        """The times of the request and what it waited for, in words."""
        if self.row.get("error"):
            return [f"Request {self.request_id} failed: {self.row['error']}"]
        if not self.row:
            return [f"Request {self.request_id} had not ended when the recording did."]
        e2e_s = self.row.get("e2e_s")
        if not e2e_s:
            return [f"Request {self.request_id}: {self.row['outcome']}."]
        waited = {name: spent for name, spent in self.attribution_s.items() if name.startswith(("waiting", "paused"))}
        largest = max(waited, key=waited.__getitem__, default=None)
        text = (
            f"Request {self.request_id} arrived at {self.arrival_s:.3f} s, had its first token after "
            f"{self.row['ttft_s']:.3f} s and its last after {e2e_s:.3f} s."
        )
        if self.least_s is not None:
            text += f" Alone on the device it takes at least {self.least_s:.3f} s."
        if largest is None or waited[largest] < 0.01 * e2e_s:
            return [text, "No limit held it back for more than 1 % of that time."]
        sentences = [
            text,
            f"It waited or was {self.words.paused} for {percent(sum(waited.values()) / e2e_s)} of that time.",
        ]
        idle = [one for one in self.stretches if one.phase in ("waiting", "paused")]
        if idle:
            longest = max(idle, key=lambda one: one.duration_s)
            span = f"{longest.duration_s:.3f} s from {longest.start_s:.3f} s"
            sentences.append(f"The longest stretch, {span}: it {longest.reason(self.words)}.")
        if pauses := self.row.get("pauses"):
            sentences.append(
                f"It was {self.words.paused} {number_of(pauses, 'time')} and computed "
                f"{number_of(self.row['recomputed_tokens'], 'token')} again."
            )
        return sentences


def request_life(run: RecordedRun, heads: HeadsOfLine, request_id: Id) -> RequestLife:
    """The stretches of one request: as its spans, with waiting behind others divided by who held the line."""
    row = run.row_of.get(request_id, {})
    spans, iterations = run.spans.get(request_id, []), run.iterations
    arrival_s = run.arrival_s(request_id)
    # A span lasts until the next one begins, and the last one until the end.
    ends = [max(_begin_s(run, before, span), arrival_s) for before, span in pairwise(spans)]
    last_s = row.get("end_s")
    if spans:
        ends.append(float(last_s) if last_s is not None else iterations.end_of(spans[-1].last))
    stretches: list[Stretch] = []
    begin = arrival_s
    if spans and (first_s := max(iterations.start_of(spans[0].first), arrival_s)) > arrival_s:
        stretches.append(Stretch("arrival", arrival_s, first_s, spans[0].first, spans[0].first))
        begin = first_s
    for span, end_s in zip(spans, ends, strict=True):
        stretches += _stretches(run, heads, span, begin, end_s)
        begin = end_s
    return RequestLife(
        request_id, arrival_s, row, stretches, dict(row.get("attribution_s") or {}), words=words_of(run.config)
    )


def _begin_s(run: RecordedRun, before: Span, span: Span) -> float:
    """When `span` begins, which follows `before`: as in attributions (`RequestTimeline.attribution`)."""
    begin_s = run.iterations.start_of(span.first)
    if before.phase in IN_BATCH and span.phase in IN_BATCH:
        ended = np.array([max(span.first - run.data.num_micro_batches, 0)])
        begin_s = max(begin_s, float(run.iterations.delivered_at(ended)[0]))
    return begin_s


def _stretches(run: RecordedRun, heads: HeadsOfLine, span: Span, start_s: float, end_s: float) -> list[Stretch]:
    if span.waits_for is None:
        paused_for = span.cause if span.phase == "paused" else None
        return [
            Stretch(
                span.phase,
                start_s,
                end_s,
                span.first,
                span.last,
                paused_for=paused_for,
                chunks=tuple(span.chunks),
                tokens=span.tokens,
            )
        ]
    held = list(heads.holding(span))
    bounds = [start_s, *(max(run.iterations.start_of(part.first), start_s) for part in held[1:]), end_s]
    return [
        Stretch("waiting", bounds[index], bounds[index + 1], part.first, part.last, part.limit, part.behind)
        for index, part in enumerate(held)
    ]


@dataclass(frozen=True)
class IterationFacts:
    """What one iteration ran and decided.

    own_s: the part of its duration after the iteration before it, of its micro batch, had ended; less than all of it
        where iterations are decided one ahead; None if thinned statistics lack the iteration before.
    bound_by: the limit that left out the first request.
    left_out: the first request that was left out, and the limit.
    missing: how much more of the limit it needed; None where the recording does not say.
    waiting: requests that wait.
    aside: those that generate and do not run.
    used, available: amounts of each limit: requests, tokens, KV blocks.
    contexts: (request, tokens) of each chunk.
    generating: ids of the requests that generated a token.
    window: tokens of the fullest one of several attention windows, which the KV blocks are of; empty with one window.
    queue_head: what holds the queue, and the limit, where that is another request.
    words: words of the engine.
    """

    number: int
    start_s: float
    duration_s: float
    own_s: float | None
    bound_by: str
    left_out: tuple[Id, str] | None
    missing: float | None
    waiting: int
    aside: int
    used: dict[str, int]
    available: dict[str, int]
    contexts: list[tuple[Id, int]]
    recomputes: list[tuple[Id, int]]
    generating: list[Id]
    paused: list[tuple[Id, Id]]
    window: str = ""
    queue_head: tuple[Id, str] | None = None
    words: Words = TENSORRT_LLM

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "words"}


def iteration_facts(run: RecordedRun, number: int) -> IterationFacts:
    """The facts of the iteration of this number; InputError if it was not recorded."""
    iterations = run.iterations
    index = iterations.position(number)
    if iterations.number[index] != number:
        why = "statistics were thinned" if run.data.recorded_every > 1 else "the run had no such iteration"
        last = int(iterations.number[-1])
        raise InputError(f"iteration {number} is not recorded ({why}); expected one from 0 to {last}.")
    chunks: dict[str, list[tuple[Id, int]]] = {"context": [], "recompute": []}
    generating: list[Id] = []
    for request_id, spans in run.spans.items():
        for span in spans:
            if span.first <= number <= span.last and (number - span.first) % span.every == 0:
                if span.phase == "generation":
                    generating.append(request_id)
                elif span.phase in chunks:
                    chunks[span.phase].append((request_id, span.chunks[(number - span.first) // span.every]))
    left_out, queue_head = (
        None if column[index] == NO_REQUEST else iterations.left_out_pairs[int(column[index])]
        for column in (iterations.left_out, iterations.queue_head)
    )
    contexts, recomputes = chunks["context"], chunks["recompute"]
    scheduled = len(contexts) + len(recomputes) + len(generating)
    # SGLang's limit is of the requests that run, also while they stand aside for prompts.
    running = int(iterations.active[index]) if run.config.get("engine") == SGLANG else scheduled
    used = {"batch_size": running, "num_tokens": int(iterations.budget_used[index])}
    available = {name: int(size) for name in used if (size := run.config.get(setting_of(name)))}
    if run.config.get("overlap") == Overlap.PARTITIONED and int(run.config.get("pp_size") or 1) == 1:
        available["batch_size"] = -(-available["batch_size"] // run.data.num_micro_batches)
    blocks = run.data.run.get("num_kv_blocks")
    if blocks and iterations.used_blocks[index] == iterations.used_blocks[index]:
        used["kv_blocks"], available["kv_blocks"] = int(iterations.used_blocks[index]), int(blocks)
    of_window = {size: (float(column[index]), pool) for size, (column, pool) in iterations.blocks_of_window.items()}
    window = fullest_window(of_window) if of_window else ""
    if window:
        used["kv_blocks"], available["kv_blocks"] = int(of_window[window][0]), of_window[window][1]
    num_waiting = int(getattr(iterations, waiting_field(run.config))[index])
    return IterationFacts(
        number,
        float(iterations.start_s[index]),
        float(iterations.end_s[index] - iterations.start_s[index]),
        _own_s(iterations, index, run.data.num_micro_batches),
        iterations.limits[int(iterations.limit[index])],
        left_out,
        None
        if left_out is None
        else _missing(run, number, left_out, used, available, dict(contexts + recomputes), window),
        num_waiting,
        int(iterations.waiting[index]) - num_waiting,
        used,
        available,
        contexts,
        recomputes,
        generating,
        [(pause.victim, pause.beneficiary) for pause in iterations.pauses if pause.iteration == number],
        window,
        None if queue_head == left_out else queue_head,
        words_of(run.config),
    )


def _own_s(iterations: Iterations, index: int, every: int) -> float | None:
    """`IterationFacts.own_s` of the iteration at `index`. every: number of micro batches."""
    number = int(iterations.number[index])
    if number >= every and (index < every or iterations.number[index - every] != number - every):
        return None
    return float(own_seconds(iterations.start_s, iterations.end_s, every)[index])


def _missing(
    run: RecordedRun,
    number: int,
    left_out: tuple[Id, str],
    used: dict[str, int],
    available: dict[str, int],
    chunks: dict[Id, int],
    window: str,
) -> float | None:
    """How much of the limit the request that was left out lacked: tokens of its prompt beyond the rest of the budget,
    blocks beyond the free ones, or a slot."""
    request_id, limit = left_out
    if limit == "batch_size":
        return 1
    row = run.trace.get(request_id)
    if row is None:
        return None
    done = sum(
        sum(span.chunks[: -(-(number - span.first) // span.every)])
        for span in run.spans.get(request_id, ())
        if span.phase == "context" and span.first <= number
    )
    prompt_len = int(run.row_of.get(request_id, {}).get("prompt_len", row.prompt_len))
    if limit == "num_tokens" and "num_tokens" in available:
        left = max(available["num_tokens"] - used["num_tokens"], 0)
        return _if_positive(prompt_len - done - chunks.get(request_id, 0) - left)
    if limit == "kv_blocks" and "kv_blocks" in available and run.config.get("policy") == "max_utilization":
        size, tokens = int(run.config["tokens_per_block"]), prompt_len - done
        if window and run.config.get("window_mode") != "linear":
            tokens = min(tokens, int(window))
        return _if_positive(-(-tokens // size) - (available["kv_blocks"] - used["kv_blocks"]))
    return None


def _if_positive(missing: int) -> int | None:
    """None where whole chunk units or a recomputation decided, so that the difference says nothing."""
    return missing if missing > 0 else None
