"""Iterations from the logs of other engines: TensorRT-LLM's iteration statistics, and the log lines of vLLM.

TensorRT-LLM: objects with `iterLatencyMS` and `inflightBatchingStats`, as lines of JSON or of Python (trtllm-bench
--iteration_log) or as one or several JSON arrays (trtllm-serve /metrics).
vLLM: lines of --enable-logging-iteration-details, and the engine's summary of every ten seconds.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from ifbbench.errors import InputError
from ifbbench.settings.fields import integer, located, number, unexpected
from ifbbench.simulated.step_work import StepWork
from ifbbench.studies.fit import Observation
from ifbbench.studies.log import CONSTANT_LOAD, BatchCounts, BatchTracker, Log, of_one_engine, overlap_of_periods
from ifbbench.studies.measure import Sample

MILLISECONDS = 1000
TIMESTAMP_FORMAT = "%m-%d-%Y %H:%M:%S.%f"
# As in older versions, whose seconds are too coarse for the time between two iterations.
WHOLE_SECONDS = re.compile(r"\d+-\d+-\d+ \d+:\d+:\d+")
# Fields of TensorRT-LLM's statistics that are equal in all iterations of one engine.
OF_ENGINE = {"kvCacheStats": ("maxNumBlocks", "tokensPerBlock"), "": ("maxNumActiveRequests",)}
BETWEEN_OBJECTS = re.compile(r"[\s,\[\]]*")

VLLM_ITERATION = re.compile(
    r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, .*?iteration elapsed time: ([\d.]+) ms(?:, \w+ KV cache usage: ([\d.]+)%)?(.*)"
)
VLLM_SUMMARY = re.compile(
    r"Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs(?:, Waiting: (\d+) reqs)?.*?\w+ KV cache usage: ([\d.]+)%"
)
VLLM_ENGINE = re.compile(r"(?:EngineCore_DP|Engine )(\d+)")
ANOTHER_VLLM = (
    "an iteration of another version of vLLM, {!r}; expected `Iteration(N): … context requests, … generation tokens, "
    "iteration elapsed time: … ms`."
)
# What vLLM prints with draft tokens.
VLLM_DRAFTS = re.compile(r"SpecDecoding metrics|speculative_config=(?!None)")
VLLM_CACHE_SIZE = re.compile(r"\w+ KV cache size: ([\d,]+) tokens")
# Facts of the line in which vLLM prints its settings.
VLLM_FACTS = {
    "model": re.compile(r"\bmodel='([^']+)'"),
    "tp_size": re.compile(r"\btensor_parallel_size=(\d+)"),
    "pp_size": re.compile(r"\bpipeline_parallel_size=(\d+)"),
}


class VllmSummary(NamedTuple):
    """What vLLM logs every ten seconds: tokens a second, requests, and the share of the KV cache in use."""

    prompt_rate: float
    generation_rate: float
    running: int
    waiting: int
    usage: float


class VllmIteration(NamedTuple):
    """What vLLM logs of an iteration.

    line: where it stands.
    number: since the server started.
    usage: share of the KV cache in use, None if it is not there.
    has_drafts: whether generation requests may have several tokens because of draft tokens.
    """

    line: int
    number: int
    contexts: int
    context_tokens: int
    generating: int
    generated: int
    seconds: float
    usage: float | None
    has_drafts: bool


class VllmLine(NamedTuple):
    """What a line of vLLM says.

    engine: its number, "" if the line has none.
    """

    engine: str
    text: str
    found: VllmIteration | VllmSummary


def is_tensorrt_llm(text: str) -> bool:
    """Whether `text` begins with TensorRT-LLM's iteration statistics."""
    head = text[:20_000]
    return head.lstrip()[:1] in ("{", "[") and ("iterLatencyMS" in head or "inflightBatchingStats" in head)


def is_vllm(text: str) -> bool:
    """Whether `text` has log lines of vLLM with times or throughput."""
    return "Avg prompt throughput" in text or "iteration elapsed time" in text


# TensorRT-LLM.


def read_tensorrt_llm(log: Log, text: str, overlaps: bool) -> None:
    """Add the iterations in `text` to `log`. overlaps: whether they did, where the log does not say.

    InputError for what is no such statistics, or of several engines."""
    rows = tensorrt_llm_rows(log, text)
    for line, row in rows:
        if row.get("attentionDpRank"):
            raise InputError(
                f"{log.path}, line {line}: attentionDpRank is not 0: attention data parallelism is not simulated."
            )
        if (row.get("specDecodingStats") or {}).get("numDraftTokens"):
            raise InputError(
                f"{log.path}, line {line}: specDecodingStats has draft tokens: speculative decoding is not simulated."
            )
    log.overlaps = _overlaps([row for _, row in rows])
    if log.overlaps is None and rows:
        lacks = _lacking([row for _, row in rows])
        if overlaps:
            raise InputError(
                f"{log.path}: {lacks}, and iterLatencyMS covers two iterations that overlap. Log each iteration, with "
                "timestamps of microseconds, or without the overlap scheduler."
            )
        log.notes.append(
            f"{lacks}, and they are taken not to overlap. If the overlap scheduler was on, iterLatencyMS "
            "covers two iterations, and this profile is wrong."
        )
    batches = [_counts(row) for _, row in rows]
    tracker = BatchTracker(budget=max((one.context_tokens + one.generation_requests for one in batches), default=0))
    for index, ((line, row), batch) in enumerate(zip(rows, batches, strict=True)):
        with located(f"{log.path}, line {line}"):
            work = tracker.work(batch, _kv_tokens(row) if batch.generation_requests else None)
            timing = _timing([later for _, later in rows[index : index + 3]], bool(log.overlaps))
        if timing is not None:
            seconds, has_host = timing
            log.samples.append((Sample(work, seconds, None), has_host))


def rows_of_rank(log: Log, text: str, rank: int | None) -> list[tuple[int, dict[str, Any]]]:
    """`tensorrt_llm_rows` of one rank of attention data parallelism. InputError if there are several, and `rank` names
    none."""
    rows = tensorrt_llm_rows(log, text)
    number = of_one_engine(log.path, {_rank_of(row) for _, row in rows}, rank)
    return [(line, row) for line, row in rows if _rank_of(row) == number]


def tensorrt_llm_rows(log: Log, text: str) -> list[tuple[int, dict[str, Any]]]:
    """The iterations in `text` that ran a request, each with its line. A note says where iterations are missing.
    InputError for what is no such statistics, or of several engines."""
    rows, numbers = list[tuple[int, dict[str, Any]]](), dict[str, list[tuple[int, int]]]()
    for line, row in _objects(log, text):
        with located(f"{log.path}, line {line}"):
            if isinstance(number := row.get("iter"), int):
                numbers.setdefault(_rank_of(row), []).append((line, number))
            if _scheduled(row):
                rows.append((line, row))
    _check_one_engine(log, rows)
    for of_rank in list(numbers.values())[:1]:  # all ranks run together
        log.note_restarts(of_rank)
        log.note_gaps(of_rank)
    return rows


def _rank_of(row: Mapping[str, Any]) -> str:
    """The rank of attention data parallelism whose iteration a row describes."""
    return str(row.get("attentionDpRank") or 0)


def _objects(log: Log, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in `text`, one by one, each with its line number. A last one that is not complete is left out."""
    decoder, position, line = json.JSONDecoder(), 0, 1
    while (between := BETWEEN_OBJECTS.match(text, position)) and between.end() < len(text):
        line += text.count("\n", position, between.end())
        position = between.end()
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        try:
            if text.startswith("{'", position):  # trtllm-bench writes dictionaries of Python
                value, after = ast.literal_eval(text[position:end]), end
            else:
                value, after = decoder.raw_decode(text, position)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            if not text[end:].strip():
                log.notes.append(f"it is cut in line {line}: what is left of its last iteration is not used.")
                return
            raise InputError(
                f"{log.path}, line {line}: not a valid object ({error}); expected one of TensorRT-LLM's iteration "
                "statistics. Restore the file, or remove what is damaged."
            ) from None
        if not isinstance(value, dict):
            raise InputError(f"{log.path}, line {line}: {str(value)[:40]!r}; expected iteration statistics.")
        yield line, value
        line += text.count("\n", position, after)
        position = after


def _scheduled(row: Mapping[str, Any]) -> bool:
    """Whether an iteration ran any request. InputError for statistics of another kind or version."""
    if "iterLatencyMS" not in row:
        raise unexpected("iterLatencyMS", None, "the latency of the iteration")
    counts = row.get("inflightBatchingStats")
    if not isinstance(counts, dict):
        found = "static batching" if row.get("staticBatchingStats") else "no inflightBatchingStats"
        raise InputError(f"statistics of {found}; expected those of in-flight batching.")
    for name in ("numContextRequests", "numGenRequests", "numCtxTokens"):
        integer(counts.get(name), f"inflightBatchingStats.{name}", 0)
    is_timed = number(row["iterLatencyMS"], "iterLatencyMS", 0.0) > 0
    return is_timed and counts["numContextRequests"] + counts["numGenRequests"] > 0


def _check_one_engine(log: Log, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    for table, names in OF_ENGINE.items():
        for name in names:
            found = {(row.get(table) or {} if table else row).get(name) or 0 for _, row in rows} - {0}
            if len(found) > 1:
                raise InputError(
                    f"{log.path}: {name} is {' and '.join(map(str, sorted(found)[:3]))}: the log mixes iterations of "
                    "several engines. Give the log of one, or each in a file."
                )


def _overlaps(rows: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether an iteration was submitted before the one before had ended; None if the rows do not say."""
    modes = {mode for row in rows if (mode := row.get("schedulerMode")) is not None}
    if modes:
        return "overlap" in modes
    return overlap_of_periods(
        (period_s, row["iterLatencyMS"] / MILLISECONDS)
        for row, later in pairwise(rows)
        if (period_s := _period_s(row, later)) is not None
    )


def _lacking(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why rows do not say whether iterations overlap."""
    timestamps = [str(row.get("timestamp") or "") for row in rows]
    if not any(timestamps):
        return "its iterations have no timestamps"
    if any(map(WHOLE_SECONDS.fullmatch, timestamps)):
        return "the timestamps of its iterations are whole seconds"
    if not any(later.get("iter") == (row.get("iter") or 0) + 1 for row, later in pairwise(rows)):
        return "it has no two successive iterations"
    return f"the timestamps of its iterations are not like {datetime(2026, 8, 19):{TIMESTAMP_FORMAT}}"


def _timing(rows: Sequence[Mapping[str, Any]], overlaps: bool) -> tuple[float, bool] | None:
    """The seconds of the first of three rows, and whether they include the host's. None if unknown.

    Without overlap `iterLatencyMS` is the iteration. With it, that covers about two: then the iteration's own GPU time
    counts, or how long the loop of the next one took, which waits for this one.
    """
    row = rows[0]
    latency_s = row["iterLatencyMS"] / MILLISECONDS
    device_ms = row.get("gpuForwardTimeMS")
    if not overlaps:
        return latency_s, True
    if device_ms:
        return number(device_ms, "gpuForwardTimeMS", above=0) / MILLISECONDS, False
    period_s = _period_s(rows[1], rows[2]) if len(rows) == 3 else None
    # A longer period has a wait for requests in it.
    if period_s is None or period_s > latency_s:
        return None
    return period_s, True


def _period_s(row: Mapping[str, Any], later: Mapping[str, Any]) -> float | None:
    """Seconds from the start of an iteration to that of the next; None if the rows do not say."""
    if row.get("iter") is None or later.get("iter") != row["iter"] + 1:
        return None
    try:
        begin, end = (datetime.strptime(str(one.get("timestamp")), TIMESTAMP_FORMAT) for one in (row, later))
    except ValueError:
        return None
    return (end - begin).total_seconds() or None


def _counts(row: Mapping[str, Any]) -> BatchCounts:
    names = ("numContextRequests", "numCtxTokens", "numGenRequests", "numCtxKvTokens")
    return BatchCounts(*(row["inflightBatchingStats"].get(name) or 0 for name in names))


def _kv_tokens(row: Mapping[str, Any]) -> int | None:
    """Keys that the generation requests read; None if neither counted nor to be had from the blocks in use."""
    batch, cache = _counts(row), row.get("kvCacheStats") or {}
    if row["inflightBatchingStats"].get("numGenKvTokens") is not None:
        return int(row["inflightBatchingStats"]["numGenKvTokens"])
    used, size = int(cache.get("usedNumBlocks") or 0), int(cache.get("tokensPerBlock") or 0)
    if not used or not size:
        return None
    # Blocks of all requests, of which the last is half empty in the mean.
    half_empty = (batch.context_requests + batch.generation_requests) * size // 2
    return max(used * size - half_empty - batch.context_tokens - batch.cached_tokens, batch.generation_requests)


# vLLM.


def read_vllm(log: Log, text: str, cache_tokens: int | None) -> None:
    """Add the iterations and the summaries in `text` to `log`.

    cache_tokens: size of the KV cache, where the log does not say. InputError for the log of several models, or of
    another version.
    """
    log.add_facts(VLLM_FACTS, text)
    sizes = {int(size.replace(",", "")) for size in VLLM_CACHE_SIZE.findall(text)}
    cache_tokens = max(sizes) if sizes else cache_tokens
    if scheduling := re.search(r"Asynchronous scheduling is (en|dis)abled", text):
        log.overlaps = scheduling[1] == "en"
    has_iterations, lines = "iteration elapsed time" in text, vllm_lines(log, text)
    if has_iterations:
        _read_vllm_iterations(log, lines, cache_tokens)
    if cache_tokens is not None:
        _read_vllm_summaries(log, lines, cache_tokens)
    elif not has_iterations:
        raise InputError(
            f"{log.path}: has summaries of vLLM, but not the size of its KV cache, which vLLM prints when it starts "
            "(`GPU KV cache size: … tokens`); add --max_tokens_in_paged_kvcache, or give the whole log."
        )
    if has_iterations and not log.observations:
        log.notes.append(
            "vLLM's times of iterations leave out its scheduler, and there are no summaries of constant load that show "
            "its time: the host's time is that of the base profile."
        )


def vllm_lines(log: Log, text: str) -> list[VllmLine]:
    """The iterations and summaries in `text`, in their order; a note says which lines are damaged.

    A resumed request computes its tokens again, which vLLM counts as generation: here it is one of context. InputError
    for iterations of another version of vLLM, and for those of several servers."""
    has_drafts, rows = VLLM_DRAFTS.search(text) is not None, list[VllmLine]()
    lines, damaged, numbers = text.rstrip().split("\n"), list[int](), dict[str, list[tuple[int, int]]]()
    for line_number, line in enumerate(lines, start=1):
        found = VLLM_ENGINE.search(line)
        engine = str(int(found[1])) if found else ""
        if summary := VLLM_SUMMARY.search(line):
            rates, usage = (float(summary[1]), float(summary[2])), float(summary[5]) / 100
            rows.append(VllmLine(engine, line, VllmSummary(*rates, int(summary[3]), int(summary[4] or 0), usage)))
        if "Iteration(" not in line or "context requests" not in line:
            continue
        match = VLLM_ITERATION.search(line)
        if match is None:
            damaged.append(line_number)
            continue
        numbers.setdefault(engine, []).append((line_number, int(match[1])))
        number, contexts, tokens, generating, generated = map(int, match.groups()[:5])
        if "(dummy)" in match[8] or not contexts + generating:
            continue
        if generated > generating and not has_drafts:
            contexts, tokens = contexts + 1, tokens + generated - generating + 1
            generating = generated = generating - 1
        in_use = float(match[7]) / 100 if match[7] else None
        seconds = float(match[6]) / MILLISECONDS
        counts = (number, contexts, tokens, generating, generated)
        rows.append(VllmLine(engine, line, VllmIteration(line_number, *counts, seconds, in_use, has_drafts)))
    num_read = sum(map(len, numbers.values()))
    if damaged:
        log.note_damaged(damaged, num_read, len(lines), ANOTHER_VLLM.format(lines[damaged[0] - 1][-100:]))
    for of_engine in numbers.values():
        log.note_restarts(of_engine)
        log.note_gaps(of_engine)
    return rows


def _read_vllm_iterations(log: Log, lines: Sequence[VllmLine], cache_tokens: int | None) -> None:
    iterations = [line.found for line in lines if isinstance(line.found, VllmIteration)]
    budget = max((one.context_tokens + one.generated for one in iterations), default=0)
    trackers: dict[str, BatchTracker] = {}
    for engine, _, one in lines:
        tracker = trackers.setdefault(engine, BatchTracker(budget))
        if isinstance(one, VllmSummary):
            if cache_tokens:
                tracker.correct(round(one.usage * cache_tokens))
            continue
        if one.generated > one.generating:
            raise InputError(
                f"{log.path}, line {one.line}: {one.generated} tokens of {one.generating} generation requests: "
                "speculative decoding is not simulated."
            )
        kv_tokens = None
        if one.usage is not None and cache_tokens:
            kv_tokens = max(round(one.usage * cache_tokens) - one.context_tokens, one.generating)
        batch = BatchCounts(one.contexts, one.context_tokens, one.generating)
        work = tracker.work(batch, kv_tokens if one.generating else None)
        if one.seconds > 0:
            # vLLM measures how long it waits for the outputs, without scheduling.
            log.samples.append((Sample(work, one.seconds, None), False))


def _read_vllm_summaries(log: Log, lines: Sequence[VllmLine], cache_tokens: int) -> None:
    """Summaries of constant load: the time of the mean iteration, a share of which have a prompt too."""
    running_before: dict[str, int] = {}
    for name, _, one in lines:
        if not isinstance(one, VllmSummary):
            continue
        running, before = one.running, running_before.get(name, 0)
        running_before[name] = running
        kv_tokens = round(one.usage * cache_tokens)
        is_constant = abs(running - before) <= CONSTANT_LOAD * running
        if not running or not one.generation_rate or not is_constant or kv_tokens < running:
            continue
        kv_len = kv_tokens // running
        generation = StepWork.of_lengths(kv_lengths=[kv_len] * running)
        mixed = StepWork.of_lengths([(0, kv_len, True)], [kv_len] * running)
        iterations, prompts = one.generation_rate / running, one.prompt_rate / kv_len
        if prompts <= iterations:
            share = prompts / iterations
            steps = ((generation, 1 - share), (mixed, share))
            log.observations.append(Observation(1 / iterations, steps, "mixed" if prompts else "generation"))
