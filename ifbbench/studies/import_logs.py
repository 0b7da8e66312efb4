"""What the logs of vLLM, SGLang and TensorRT-LLM say of their iterations, for `ifbbench import`."""

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.engines import ENGINES, SGLANG, VLLM
from ifbbench.settings.fields import integer, located, shown
from ifbbench.studies.engine_logs import (
    MILLISECONDS,
    TIMESTAMP_FORMAT,
    VLLM_CACHE_SIZE,
    VLLM_FACTS,
    VllmSummary,
    is_tensorrt_llm,
    is_vllm,
    rows_of_rank,
    vllm_lines,
)
from ifbbench.studies.imported import UNDATED, Imported, LoggedIteration, Written, ends_within, write_run
from ifbbench.studies.log import Log, of_one_engine, text_of
from ifbbench.studies.request_stats import NOT_LOGGED, by_id
from ifbbench.studies.sglang_logs import FACTS as SGLANG_FACTS
from ifbbench.studies.sglang_logs import Decode, Prefill, interval_of, is_sglang, sglang_batches, sglang_starts

EXPECTED = (
    "the log of vLLM with --enable-logging-iteration-details, that of SGLang, or TensorRT-LLM's iteration statistics "
    "(trtllm-bench --iteration_log, trtllm-serve /metrics)"
)
TRTLLM_LIMITS = "What requests waited for, unless all slots were taken or a request was paused; priorities."
# Its own, or that of a container or of JSON lines, with the year before.
VLLM_STAMP = re.compile(r"\b(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)\b")
# In the line in which vLLM prints the arguments that were given, and in that of SGLang's settings.
VLLM_SETTINGS = {
    "max_batch_size": re.compile(r"'max_num_seqs': (\d+)"),
    "max_num_tokens": re.compile(r"'max_num_batched_tokens': (\d+)"),
    "tokens_per_block": re.compile(r"'block_size': (\d+)"),
}
SGLANG_SETTINGS = {
    "max_batch_size": re.compile(r"\bmax_running_requests=(\d+)"),
    "max_num_tokens": re.compile(r"\bchunked_prefill_size=(\d+)"),
    "tokens_per_block": re.compile(r"\bpage_size=(\d+)"),
}
SGLANG_CACHE = re.compile(r"\bmax_total_num_tokens=(\d+)")
HALF_A_YEAR = timedelta(days=183)
DEFAULT_BLOCK_SIZE = {VLLM: 16, SGLANG: 1}
NO_REQUESTS = (
    "Requests: when each came, what it waited for, its latencies. The log has counts only.",
    "Which request was left out first, and why.",
)
QUEUE_OF_SUMMARIES = "The queue: requests that wait are those of the latest summary, which comes every ten seconds."
NO_QUEUE = "The queue: whether requests waited."
NO_CACHE = "The KV cache: its size is in the lines of the server's start, which this file lacks."
NO_TIMES = "Waits between iterations: the lines have no time stamps, so that iterations follow each other."
WHOLE_SECONDS = (
    "Exact times: time stamps are whole seconds; in between, iterations follow each other by their durations."
)


def import_log(path: Path, output: Path, overwrite: bool, rank: int | None = None) -> tuple[Path, Imported]:
    """Write the run directory of the log at `path`; returns its path, and what was read. rank: of data parallelism,
    needed where the log has several. InputError for what is no log, for one of another version, and if the directory
    may not be written."""
    log = Log(path)
    content = log.content(EXPECTED)
    text = text_of(content)
    if is_vllm(text) and is_sglang(text):
        raise InputError(f"{path}: has lines of vLLM and of SGLang; give the log of one server.")
    if is_tensorrt_llm(text):
        found = _of_tensorrt_llm(log, text, rank)
    elif is_vllm(text):
        found = _of_vllm(log, text, rank)
    elif is_sglang(text):
        found = _of_sglang(log, text, rank)
    else:
        begins = f"it begins with {shown(text.strip())}" if text.strip() else "it is empty"
        raise InputError(f"{path}: no known log, {begins}; expected {EXPECTED}.")
    found.lost += [f"{note[0].upper()}{note[1:]}" for note in log.notes]
    return write_run(found, path, content, output, overwrite), found


def _settings(log: Log, patterns: Mapping[str, re.Pattern[str]], text: str) -> dict[str, Any]:
    """Settings that the log names. InputError if it has those of several servers."""
    log.add_facts(patterns, text)
    return {name: value if name == "model" else int(value) for name, value in log.facts.items()}


# vLLM.


def _of_vllm(log: Log, text: str, rank: int | None) -> Imported:
    settings = _settings(log, VLLM_FACTS | VLLM_SETTINGS, text)
    lines = vllm_lines(log, text)
    engines = {engine for engine, _, one in lines if not isinstance(one, VllmSummary)}
    if not engines:
        raise InputError(
            f"{log.path}: has summaries of vLLM, and no iterations; start the server with "
            "--enable-logging-iteration-details."
        )
    engine = of_one_engine(log.path, engines, rank)
    size = settings.get("tokens_per_block") or DEFAULT_BLOCK_SIZE[VLLM]
    tokens = [int(found.replace(",", "")) for found in VLLM_CACHE_SIZE.findall(text)]
    num_blocks = max(tokens) // size if tokens else None
    rows, waiting, has_summary = list[tuple[float, LoggedIteration]](), 0, False
    begun: datetime | None = None
    times_s = list[tuple[int, float]]()
    for number, line, one in lines:
        if len(engines) > 1 and number != engine:
            continue
        if isinstance(one, VllmSummary):
            waiting, has_summary = one.waiting, True
            continue
        date = _vllm_date(line, begun)
        begun = begun or date
        second = (date - begun).total_seconds() if date and begun else 0.0
        times_s.append((one.line, second))
        used = None if one.usage is None or num_blocks is None else round(one.usage * num_blocks)
        logged = LoggedIteration(
            0.0,
            one.seconds,
            one.contexts,
            one.context_tokens,
            one.generating,
            one.generated,
            active=one.contexts + one.generating,
            queued=waiting,
            limit=NOT_LOGGED if waiting else "none",
            used_blocks=used,
        )
        rows.append((second, logged))
    log.note_clock(times_s)
    _place_in_time([second for second, _ in rows] if begun else [], [one for _, one in rows])
    lost = [*NO_REQUESTS, QUEUE_OF_SUMMARIES if has_summary else NO_QUEUE]
    lost.append(WHOLE_SECONDS if begun else NO_TIMES)
    lost.append("The host's time: vLLM logs how long it waited for the outputs, without its scheduler.")
    lost.append("KV blocks of requests that end: those in use are counted when these have left.")
    if num_blocks is None:
        lost.append(NO_CACHE)
    is_async = re.search(r"Asynchronous scheduling is (en|dis)abled", text)
    if is_async:
        settings["async_scheduling"] = is_async[1] == "en"
    return Imported(
        VLLM,
        "vLLM log",
        settings,
        [one for _, one in rows],
        lost,
        begun or UNDATED,
        num_blocks,
        size,
        settings.get("max_batch_size"),
    )


def _vllm_date(line: str, begun: datetime | None) -> datetime | None:
    """The time stamp of a line of vLLM, which has no year; None if it has none."""
    match = VLLM_STAMP.search(line)
    if match is None:
        return None
    month, day, hour, minute, second = map(int, match.groups())
    try:
        date = datetime((begun or UNDATED).year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    return date.replace(year=date.year + 1) if begun and begun - date > HALF_A_YEAR else date


def _place_in_time(seconds: list[float], iterations: list[LoggedIteration]) -> None:
    """Put iterations, each of which begins at 0, one after another. seconds: whole ones in which their lines were
    written; empty if that is not known."""
    if not seconds:
        seconds = [0.0] * len(iterations)
        ends, total = list[float](), 0.0
        for one in iterations:
            total += one.end_s
            ends.append(total)
    else:
        written = [
            Written(second, number - 1 if number else None, one.end_s)
            for number, (second, one) in enumerate(zip(seconds, iterations, strict=True))
        ]
        ends = ends_within(written)
    before_s = -math.inf
    for one, end_s in zip(iterations, ends, strict=True):
        one.start_s, one.end_s = max(end_s - one.end_s, before_s), end_s
        before_s = end_s


# SGLang.


def _of_sglang(log: Log, text: str, rank: int | None) -> Imported:
    settings, interval = _settings(log, SGLANG_FACTS | SGLANG_SETTINGS, text), interval_of(text)
    batches = sglang_batches(log, text)
    number = of_one_engine(log.path, {one.rank for one in batches}, rank)
    batches = [one for one in batches if one.rank == number]
    size = settings.get("tokens_per_block") or DEFAULT_BLOCK_SIZE[SGLANG]
    tokens = [int(found) for found in SGLANG_CACHE.findall(text)]
    num_blocks, max_requests = max(tokens) // size if tokens else None, settings.get("max_batch_size")
    log.note_restarts(sglang_starts(text))
    begun, written = _sglang_times(log, batches, interval)
    iterations, reused, missed, before_s = list[LoggedIteration](), 0, 0, None
    for one, end_s in zip(batches, ends_within(written), strict=True):
        if isinstance(one, Prefill):
            reused, missed = reused + one.cached // size, missed + one.tokens // size
            parts, counts, active = 1, (one.requests, one.tokens, 0, 0), one.running + one.requests
        else:
            parts, counts = interval, (0, 0, one.running, round(one.running * one.accepted))
            active = one.running
        limit = "none"
        if one.queued:
            limit = "batch_size" if max_requests is not None and active >= max_requests else NOT_LOGGED
        used = None if num_blocks is None else round(one.usage * num_blocks)
        begin_s = end_s if before_s is None else before_s
        for part in range(parts):
            start_s, stop_s = (begin_s + (end_s - begin_s) * share / parts for share in (part, part + 1))
            iterations.append(
                LoggedIteration(start_s, stop_s, *counts, active, one.queued, limit, used, reused, missed)
            )
        before_s = end_s
    lost = [
        *NO_REQUESTS,
        f"Decode batches: one of {interval} has a line. The {interval - 1} before it are taken to be like it, and "
        "those behind the last line are not there.",
        WHOLE_SECONDS if begun else NO_TIMES,
    ]
    if num_blocks is None:
        lost.append(NO_CACHE)
    return Imported(SGLANG, "SGLang log", settings, iterations, lost, begun or UNDATED, num_blocks, size, max_requests)


def _sglang_times(log: Log, batches: list[Prefill | Decode], interval: int) -> tuple[datetime | None, list[Written]]:
    """The time stamp of the first line that has one, and when each was written: lines of either kind say how many
    tokens a second there were since the line of the same kind before."""
    begun: datetime | None = None
    written, latest, second = list[Written](), dict[type[Any], int](), 0.0
    times_s = list[tuple[int, float]]()
    for number, one in enumerate(batches):
        if one.stamp is not None:
            date = datetime.fromisoformat(one.stamp).replace(tzinfo=UTC)
            begun = begun or date
            times_s.append((one.line, (date - begun).total_seconds()))
            second = max(times_s[-1][1], second)
        tokens = one.tokens if isinstance(one, Prefill) else interval * one.running * one.accepted
        since = latest.get(type(one)) if one.rate > 0 else None
        written.append(Written(second, since, tokens / one.rate if one.rate > 0 else 0.0))
        latest[type(one)] = number
    log.note_clock(times_s)
    return begun, written


# TensorRT-LLM.


def _of_tensorrt_llm(log: Log, text: str, rank: int | None) -> Imported:
    rows = rows_of_rank(log, text, rank)
    dates = [date for _, row in rows if (date := _trtllm_date(row)) is not None]
    begun = dates[0] if dates and len(dates) == len(rows) else None
    iterations, cache, end_s = list[LoggedIteration](), dict[str, Any](), 0.0
    for index, (line, row) in enumerate(rows):
        with located(f"{log.path}, line {line}"):
            # Without time stamps they follow each other.
            start_s = end_s if begun is None else (dates[index] - begun).total_seconds()
            iterations.append(_trtllm_iteration(row, start_s))
            end_s, cache = iterations[-1].end_s, row.get("kvCacheStats") or {}
    if any(later.start_s < one.start_s for one, later in pairwise(iterations)):
        raise InputError(f"{log.path}: its iterations are not in order of time; expected the statistics of one server.")
    if any(one.requests for one in iterations):
        lost = ["When requests came: they arrive with the first iteration that lists them.", TRTLLM_LIMITS]
    else:
        lost = [f"{NO_REQUESTS[0]} With enable_iter_req_stats: true, it has each request.", *NO_REQUESTS[1:]]
    if begun is None:
        lost.append("Waits between iterations: without time stamps, they follow each other.")
    most = max((row.get("maxNumActiveRequests") or 0 for _, row in rows), default=0)
    num_blocks, size = cache.get("maxNumBlocks") or None, cache.get("tokensPerBlock") or None
    settings = {"max_batch_size": most or None, "tokens_per_block": size}
    return Imported(
        ENGINES[0],
        "TensorRT-LLM iteration statistics",
        settings,
        iterations,
        lost,
        begun or UNDATED,
        num_blocks,
        size,
        most or None,
    )


def _trtllm_iteration(row: dict[str, Any], start_s: float) -> LoggedIteration:
    """An iteration. A request that was paused lacked blocks; one that waits lacked a slot where all are taken."""
    counts, cache = row["inflightBatchingStats"], row.get("kvCacheStats") or {}
    contexts, generating = counts["numContextRequests"], counts["numGenRequests"]
    queued, active, paused, most = (
        integer(values.get(name) or 0, name, 0)
        for values, name in (
            (row, "numQueuedRequests"),
            (row, "numActiveRequests"),
            (counts, "numPausedRequests"),
            (row, "maxNumActiveRequests"),
        )
    )
    active, limit = max(active, contexts + generating), "none"
    if paused:
        limit = "kv_blocks"
    elif queued or active > contexts + generating:
        limit = "batch_size" if most and active >= most else NOT_LOGGED
    return LoggedIteration(
        start_s,
        start_s + row["iterLatencyMS"] / MILLISECONDS,
        contexts,
        counts["numCtxTokens"],
        generating,
        generating,
        active,
        queued,
        limit,
        cache.get("usedNumBlocks"),
        cache.get("reusedBlocks"),
        cache.get("missedBlocks"),
        paused,
        by_id(row),
    )


def _trtllm_date(row: dict[str, Any]) -> datetime | None:
    try:
        return datetime.strptime(str(row.get("timestamp")), TIMESTAMP_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return None
