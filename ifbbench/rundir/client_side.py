"""The recording of a run against an endpoint: what its client saw of each request, and the figures of that.

The run directory has the files of every run but `iterations.jsonl`: what the server did in its iterations is unknown.
Spans have times instead of iterations.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET, Struct, UnsetType, field

from ifbbench.clock import WallClock
from ifbbench.files import removed
from ifbbench.rundir.lines import JsonLinesWriter, encode, number
from ifbbench.rundir.metrics import (
    Floats,
    Integers,
    Population,
    TokenGaps,
    by_group,
    distribution,
    slow_ttft_s,
)
from ifbbench.rundir.recorder import FLUSH_INTERVAL_S
from ifbbench.rundir.request_metrics import ClassOf
from ifbbench.rundir.run_directory import write_begun, write_json
from ifbbench.rundir.traffic import MIN_REQUESTS, NO_TRAFFIC, Window, traffic
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY
from ifbbench.settings.objectives import Objective, meets_all, parse_objectives

# Parts of the time of a request. The server's queue and its context phase cannot be told apart from outside.
CLIENT, UNTIL_FIRST_TOKEN, GENERATION = "waiting_client", "until_first_token", "generation"
# What may be wrong with a complete answer: tokens beyond those asked for are not counted, and the stream counts where
# the usage that the server reports differs from it.
MORE_THAN_ASKED, USAGE_CONTRADICTS = "more_tokens_than_asked", "usage_contradicts_stream"
# Figures of summary.json that only the server knows, or its iterations.
UNKNOWN_FIGURES: dict[str, Any] = {
    "iterations": None,
    "pauses": None,
    "recomputed_tokens": None,
    "recomputed_share": None,
    "empty_generation_slots": None,
    "padding_waste": None,
    "kv_blocks": {"max": None, "peak_used": None, "tokens_per_block": None},
    "kv_tokens": None,
    "peak_scheduled_requests": None,
    "bound_by": {},
    "bound_by_time": {},
    "waiting_by_limit": {},
}


class ChunkTokens(StrEnum):
    """How the number of tokens of each chunk of an answer is known.

    STREAM: from token ids, log-probabilities or the usage in each chunk. USAGE: the usage at the end, which is one
    token for each chunk. TOKENIZER: from the text. EVENLY: the usage at the end, divided evenly. CHUNKS: unknown, taken
    as one for each chunk.
    """

    STREAM = "stream"
    USAGE = "usage"
    TOKENIZER = "tokenizer"
    EVENLY = "evenly"
    CHUNKS = "chunks"


class ClientSpanLine(Struct):
    """A line of `spans.jsonl` of a run against an endpoint: one phase of one request as its client sees it.

    waiting: a phase from its arrival until it is sent.
    context: a phase until the first token, with the time in the server's queue.
    generation: a phase until the last token, with the time and the number of tokens of each chunk, the first one
        included.
    """

    request_id: int
    phase: str
    start_s: float
    end_s: float
    tokens: int
    first_iteration: None = None
    last_iteration: None = None
    chunk_s: list[float] | UnsetType = UNSET
    chunks: list[int] | UnsetType = UNSET


class ClientRequestLine(Struct, kw_only=True):
    """A line of `requests.jsonl` of a run against an endpoint.

    Fields are those of RequestLine; None is what only the server knows.

    prompt_len: as the server counts it, if it reports that.
    max_new_tokens: as asked for.
    sent_s: when the last attempt was written to a connection.
    chunks: number of chunks of the answer.
    chunk_tokens: how the number of their tokens is known (ChunkTokens).
    kind: kind of the error.
    retries: kinds of the errors of earlier attempts.
    warnings: what is wrong with a complete answer.
    replica, offers: as in a RequestLine, of a router in front of servers.
    """

    request_id: int
    index: int
    arrival_s: float
    prompt_len: int
    output_len: int
    queue_time_s: None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    first_scheduled_s: None = None
    first_token_s: float | None = None
    end_s: float | None = None
    max_new_tokens: int
    pauses: None = None
    recomputed_tokens: None = None
    reused_tokens: int | None = None
    attribution_s: dict[str, float] = {}
    outcome: str = "failed"
    error: str | None = None
    sent_s: float | None = None
    chunks: int = 0
    chunk_tokens: str | None = None
    kind: str | None = None
    retries: list[str] = []
    warnings: list[str] | UnsetType = UNSET
    request_class: str | UnsetType = field(default=UNSET, name="class")
    priority: float | UnsetType = UNSET
    slo_met: bool | UnsetType = UNSET
    replica: int | UnsetType = UNSET
    offers: dict[str, list[float | None]] | UnsetType = UNSET


class ChunkGaps(TokenGaps):
    """The gaps between the tokens of answers that come in chunks: the tokens of a chunk have no gap between them."""

    def __init__(self) -> None:
        super().__init__()
        # Each chunk has the time since the one before (NaN for the first of an answer), when it came, and its tokens.
        self.gap_s, self.end_s, self.tokens = array("d"), array("d"), array("q")

    def add_chunks(self, times_s: Sequence[float], tokens: Sequence[int]) -> None:
        """Take in an answer."""
        self.gap_s.append(np.nan)
        self.gap_s.extend([after - before for before, after in pairwise(times_s)])
        self.end_s.extend(times_s)
        self.tokens.extend(tokens)

    def extend(self, other: TokenGaps, offset: int = 0) -> None:
        assert isinstance(other, ChunkGaps)
        for name in ("gap_s", "end_s", "tokens"):
            getattr(self, name).extend(getattr(other, name))

    def counted(self, ends: Sequence[float] | Floats, window: Window | None = None) -> tuple[Floats, Integers]:
        gap_s, end_s, tokens = np.asarray(self.gap_s), np.asarray(self.end_s), np.asarray(self.tokens)
        if window is not None:
            is_in = window.holds(end_s)
            gap_s, tokens = gap_s[is_in], tokens[is_in]
        gaps = np.sort(gap_s[~np.isnan(gap_s)])
        counts = np.ones(len(gaps), np.int64)
        within = int((tokens - 1).sum())
        return (np.append(0.0, gaps), np.append(within, counts)) if within else (gaps, counts)


class ClientPopulation(Population):
    """Requests of one class and priority against an endpoint. `queue_time_s` is the time until the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps = ChunkGaps()

    def figures(
        self,
        span_s: float,
        ends: Sequence[float] | Floats = (),
        objectives: tuple[Objective, ...] = (),
        window: Window | None = None,
    ) -> dict[str, Any]:
        found = super().figures(span_s, ends, objectives, window)
        found["queue_time_s"] = distribution([])
        if not self.reused_tokens:  # a server that reports none may have none, or may not report them
            found["prefix_hit_rate"] = None
        return found


class ClientMetrics:
    """Sums and samples of a run against an endpoint.

    class_of: returns the class of a request by its index.
    config: has `slo` and `concurrency`.
    errors, retries, warnings: numbers by kind.
    send_delay_s: time from the arrival of each request that was sent until it was sent.
    """

    def __init__(self, class_of: ClassOf, config: Mapping[str, Any]) -> None:
        self.errors: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self._class_of = class_of
        self._objectives = parse_objectives(config["slo"]) if config.get("slo") else ()
        self._has_goodput = any(one.statistic is None for one in self._objectives)
        self._is_closed_loop = config.get("concurrency") is not None
        self._populations: dict[tuple[str | None, float], ClientPopulation] = {}
        self._sources: Counter[str] = Counter()
        self.send_delay_s = array("d")
        self._first_arrival_s, self._last_end_s = float("inf"), 0.0
        self._completed = self._num_short = 0

    def add(self, line: ClientRequestLine, times_s: Sequence[float], tokens: Sequence[int]) -> None:
        """Take in a request that has ended; times_s, tokens: of the chunks of its answer. Sets `slo_met`, the class and
        the priority of its line."""
        name = self._class_of(line.index)
        priority = DEFAULT_PRIORITY if line.priority is UNSET else float(line.priority)
        if name is not None:
            line.request_class = name
        if (population := self._populations.get((name, priority))) is None:
            population = self._populations[name, priority] = ClientPopulation()
        self._first_arrival_s = min(self._first_arrival_s, line.arrival_s)
        self.retries.update(line.retries)
        if line.warnings is not UNSET:
            self.warnings.update(line.warnings)
        if line.sent_s is not None:
            self.send_delay_s.append(line.sent_s - line.arrival_s)
        if line.kind is not None or line.ttft_s is None or line.e2e_s is None or line.end_s is None:
            self.errors[line.kind or "unknown"] += 1
            population.failed += 1
            line.slo_met = False if self._has_goodput else UNSET
            return
        population.add(
            line.arrival_s,
            line.ttft_s,
            line.ttft_s,
            line.tpot_s,
            line.e2e_s,
            line.prompt_len,
            line.output_len,
            self._completed,
        )
        self._completed += 1
        self._num_short += line.output_len < line.max_new_tokens
        self._sources[line.chunk_tokens or ChunkTokens.CHUNKS] += 1
        assert isinstance(population.gaps, ChunkGaps)
        population.gaps.add_chunks(times_s, tokens)
        population.reused_tokens += line.reused_tokens or 0
        self._last_end_s = max(self._last_end_s, line.end_s)
        if self._has_goodput:
            latencies = {"ttft_s": line.ttft_s, "tpot_s": line.tpot_s, "e2e_s": line.e2e_s}
            line.slo_met = meets_all(self._objectives, latencies)

    def summary(self, total: int, partial: bool, window: Window | None = None) -> dict[str, Any]:
        """The content of `summary.json`. window: rates are over it, and gaps are those that end in it."""
        span_s = self._last_end_s - self._first_arrival_s if self._completed else 0.0
        if window is not None:
            span_s = window.end_s - window.start_s
        whole = ClientPopulation.merged(list(self._populations.values()) or [ClientPopulation()])
        figures = whole.figures(span_s, (), self._objectives, window)
        figures["requests"] |= {"total": total}
        found = {"requests": figures.pop("requests"), "duration_s": span_s, **figures, **UNKNOWN_FIGURES, **NO_TRAFFIC}
        if self._completed >= MIN_REQUESTS and not self._is_closed_loop:
            arrival_s, ttft_s = (np.asarray(whole.columns[name]) for name in ("arrival_s", "ttft_s"))
            found |= traffic(arrival_s, ttft_s, ttft_s, slow_ttft_s(self._objectives))
        found |= by_group(dict(self._populations), span_s, (), self._objectives, window)
        assert isinstance(whole.gaps, ChunkGaps)
        gap_s = np.asarray(whole.gaps.gap_s)
        found["endpoint"] = {
            "errors": dict(self.errors.most_common()),
            "retries": dict(self.retries.most_common()),
            "warnings": dict(self.warnings.most_common()),
            "shorter_than_asked": self._num_short,
            "chunk_tokens": dict(self._sources.most_common()),
            "tokens_per_chunk": distribution(np.asarray(whole.gaps.tokens, np.float64)),
            "chunk_gap_s": distribution(gap_s[~np.isnan(gap_s)]),
            "send_delay_s": distribution(self.send_delay_s),
        }
        return found | {"schedule_digest": None, "partial": partial}


class ClientRecorder:
    """Writes the run directory of a run against an endpoint: `requests.jsonl` and `spans.jsonl` as requests end,
    `summary.json` at the end, and `run.json` at the beginning and at the end."""

    def __init__(
        self,
        directory: Path,
        description: dict[str, Any],
        config: Mapping[str, Any],
        recording_format: str,
        class_of: ClassOf,
    ) -> None:
        self.metrics = ClientMetrics(class_of, config)
        self._directory, self._description = directory, description
        write_begun(directory, description)
        self._requests, self._spans = self._writers = [
            JsonLinesWriter(directory / f"{name}.{recording_format}") for name in ("requests", "spans")
        ]
        self._clock, self._flushed_s = WallClock(), 0.0

    def add(self, line: ClientRequestLine, times_s: Sequence[float] = (), tokens: Sequence[int] = ()) -> None:
        """Write a request that has ended, with the chunks of its answer."""
        self.metrics.add(line, times_s, tokens)
        self._requests.write([encode(line)])
        self._spans.write(map(encode, _spans(line, times_s, tokens)))
        if self._clock.now() - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Make everything up to here readable."""
        for writer in self._writers:
            writer.flush()
        self._flushed_s = self._clock.now()

    def close(
        self, total: int, partial: bool, complete: Callable[[dict[str, Any]], None] = lambda summary: None
    ) -> dict[str, Any]:
        """End the recording; returns the summary. complete(summary): adds to it. OutputError, when all files are
        complete, if some had been removed."""
        wall_s = self._clock.now()
        for writer in self._writers:
            writer.close()
        summary = self.metrics.summary(total, partial)
        complete(summary)
        write_json(self._directory / "summary.json", summary)
        ended = {"schedule_digest": None, "partial": partial, "wall_s": wall_s}
        write_json(self._directory / "run.json", {**self._description, **ended})
        if any(writer.was_removed for writer in self._writers):
            raise removed(self._directory)
        return summary


def _spans(line: ClientRequestLine, times_s: Sequence[float], tokens: Sequence[int]) -> list[ClientSpanLine]:
    spans: list[ClientSpanLine] = []
    request_id, sent_s = line.request_id, line.sent_s
    if sent_s is None:
        return spans
    if sent_s > line.arrival_s:
        spans.append(ClientSpanLine(request_id, "waiting", number(line.arrival_s), number(sent_s), 0))
    if times_s:
        first, last = number(times_s[0]), number(times_s[-1])
        spans.append(ClientSpanLine(request_id, "context", number(sent_s), first, line.prompt_len))
        spans.append(
            ClientSpanLine(
                request_id,
                "generation",
                first,
                last,
                sum(tokens),
                None,
                None,
                [number(time_s) for time_s in times_s],
                list(tokens),
            )
        )
    return spans
