"""Iterations from a run directory of ifbbench: their work exactly, from the spans of the requests."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.rundir.checking import read_object
from ifbbench.rundir.line_types import documented_fields
from ifbbench.rundir.reader import SPAN_FIELDS, check_lines, cumulated, micro_batches_of
from ifbbench.rundir.rows import read_lines
from ifbbench.rundir.run_directory import OPEN_SPANS, find_iterations, find_lines
from ifbbench.simulated.step_work import StepWork
from ifbbench.studies.log import BatchCounts, BatchTracker, Log, overlap_of_periods
from ifbbench.studies.measure import Sample

MILLISECONDS = 1000
# A longer pause between two iterations is a wait for requests.
WAIT_S = 1e-3
MAX_UNUSED = 0.1
# What each iteration must have, in its fields and in those of `ifbbench`.
ITERATION_FIELDS = ("iteration_counter", "context_requests", "total_context_tokens")
DETAIL_FIELDS = ("start_s", "latency_ms", "host_ms", "kv_fragmentation")
CONTEXT_PHASES = ("context", "recompute")
# Settings of a run that calibration must be given too, if they are not those of its model.
FACTS = ("model", "dtype", "kv_cache_dtype", "tp_size", "pp_size")

Integers = NDArray[np.int64]


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory, or the file of iterations in one."""
    is_inside = path.name.startswith("iterations.") and (path.parent / "run.json").is_file()
    return (path / "run.json").is_file() or is_inside


def read_run(log: Log, knows_model: bool = False) -> None:
    """Add the iterations of the run directory `log.path`. knows_model: the model is given, where a recorded server has
    a name of its own for it. InputError for a run of a kind that calibration cannot use, and for a bad file."""
    directory = log.path
    description = read_object(directory / "run.json")
    config, imported = description.get("config") or {}, description.get("imported")
    if imported and not description["trace"]["requests"]:
        raise InputError(
            f"{directory}: was imported from {imported['file']}, which has no requests; give --from that log itself."
        )
    for name, unusable in (("type", "v1"), ("device", "null")):
        if config.get(name) == unusable:
            raise InputError(
                f"{directory}: a run with --{name} {unusable} has no times that a profile describes; "
                "expected one with in-flight batching on a device."
            )
    if config.get("max_attention_window"):
        raise InputError(f"{directory}: a run with --max_attention_window; expected one that attends to all tokens.")
    if (stages := int(config.get("pp_size") or 1)) > 1:
        raise InputError(
            f"{directory}: a run with --pp_size {stages}: its iterations wait for each other's stages; "
            "expected one without pipeline stages."
        )
    log.facts |= {name: str(config[name]) for name in FACTS if config.get(name) is not None}
    if knows_model and "recorded" in description:
        log.facts.pop("model", None)
    log.overlaps = bool(config.get("overlap") or config.get("enable_trt_overlap"))
    path = find_iterations(directory)
    rows = _rows(path, read_lines(path, ("ifbbench",)))
    if not rows:
        raise InputError(f"{directory}: has no iterations; expected iterations.jsonl of a run.")
    last, recorded = max(row["iteration_counter"] for row in rows), int(config.get("iteration_stats_every") or 1)
    check_lines(path, last, len(rows), recorded)
    every = micro_batches_of(config)
    works = _works(directory, last, every)
    _add_samples(log, rows, [works[row["iteration_counter"]] for row in rows], every)


def _rows(path: Path, lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fields of each line in either form of the statistics, in snake_case, and `ifbbench`."""
    rows = []
    for number, line in enumerate(lines, start=1):
        row = documented_fields(line) | {"ifbbench": line["ifbbench"]}
        missing = [name for name in ITERATION_FIELDS if row.get(name) is None]
        missing += [f"ifbbench.{name}" for name in DETAIL_FIELDS if row["ifbbench"].get(name) is None]
        if missing:
            raise InputError(
                f"{path}, line {number}: {missing[0]} is missing; expected an iteration as `ifbbench run` "
                "writes it. Restore the file, or remove the line."
            )
        rows.append(row)
    return rows


def read_iterations(log: Log, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add the iterations of an iterations.jsonl outside of its run directory; their work is estimated from counts."""
    log.notes.append("it is outside of its run directory: tokens in the KV cache are estimated. Give the directory.")
    rows, works = _rows(log.path, lines), []
    tracker = BatchTracker(budget=max(row["total_context_tokens"] + row.get("generation_requests", 0) for row in rows))
    for row in rows:
        batch = BatchCounts(row["context_requests"], row["total_context_tokens"], row.get("generation_requests", 0))
        held = (row["used_kv_cache_blocks"] or 0) * (row["tokens_per_kv_cache_block"] or 0)
        filled = round(held * (1 - row["ifbbench"]["kv_fragmentation"])) - batch.context_tokens
        works.append(tracker.work(batch, max(filled, batch.generation_requests) if filled > 0 else None))
    log.overlaps = overlap_of_periods(
        (later["ifbbench"]["start_s"] - row["ifbbench"]["start_s"], row["ifbbench"]["latency_ms"] / MILLISECONDS)
        for row, later in pairwise(rows)
        if later["iteration_counter"] == row["iteration_counter"] + 1
    )
    _add_samples(log, rows, works, 1 + max(row.get("microbatch_id") or 0 for row in rows))


def _add_samples(log: Log, rows: Sequence[Mapping[str, Any]], works: Sequence[StepWork], every: int = 1) -> None:
    """A sample for each row whose counts agree with its work, except where the run waited for requests. every: the
    number of micro batches."""
    numbers = np.array([row["iteration_counter"] for row in rows])
    details = [row["ifbbench"] for row in rows]
    start_s, latency_s, host_s = (
        np.array([one[name] for one in details], dtype=float) / unit
        for name, unit in (("start_s", 1), ("latency_ms", MILLISECONDS), ("host_ms", MILLISECONDS))
    )
    end_s = start_s + latency_s
    gap_s = np.concatenate([[np.inf], start_s[1:] - end_s[:-1]])
    gap_s[1:][np.diff(numbers) != 1] = np.inf  # thinned statistics
    known = gap_s[gap_s < WAIT_S]
    usual_gap_s = float(np.median(known)) if len(known) else 0.0
    unused = 0
    for index, (row, work) in enumerate(zip(rows, works, strict=True)):
        counted = (row["context_requests"], row["total_context_tokens"], row.get("generation_requests", 0))
        if counted != (work.context_requests, work.context_tokens, work.generation_tokens):
            unused += 1
            continue
        waited = gap_s[index] >= WAIT_S
        if log.overlaps:
            # The device's time of micro batches is known where one was submitted before the other ended.
            is_known = not waited and index and counted[0] + counted[2] > 0
            if every > 1:
                is_known = is_known and start_s[index] + host_s[index] <= end_s[index - 1]
            if is_known:
                log.samples.append((Sample(work, float(end_s[index] - end_s[index - 1]), None), True))
            continue
        gap = usual_gap_s if waited else float(gap_s[index])
        log.samples.append((Sample(work, gap + float(latency_s[index]), gap + float(host_s[index])), True))
    # With overlap, the last iteration of a request runs in vain, and is in no span.
    if unused > MAX_UNUSED * len(rows):
        log.notes.append(
            f"{unused:,} of {len(rows):,} iterations are not used: the run was cut, and requests of these "
            "are not recorded."
        )


class _Works:
    """The work of each iteration, summed over the spans of requests. Counts are arrays over iterations.

    every: the number of micro batches; a request runs in one of so many iterations."""

    def __init__(self, last: int, every: int) -> None:
        self._last, self._every = last, every
        (self._context_tokens, self._context_requests, self._pairs, self._context_kv, self._outputs) = (
            np.zeros(last + 1, dtype=np.int64) for _ in range(5)
        )
        self._first: list[int] = []
        self._end: list[int] = []
        self._before: list[int] = []

    def add_chunks(self, chunks: Sequence[tuple[int, int]], start: int, is_complete: bool) -> None:
        """The context chunks of one prompt, as (iteration, tokens), of which the first begins at position `start`."""
        for position, (iteration, tokens) in enumerate(chunks):
            self._context_tokens[iteration] += tokens
            self._context_requests[iteration] += 1
            self._pairs[iteration] += tokens * start + tokens * (tokens + 1) // 2
            start += tokens
            self._context_kv[iteration] += start
            self._outputs[iteration] += is_complete and position == len(chunks) - 1

    def add_generation(self, first: int, last: int, first_keys: int) -> None:
        """One request that generates from iteration `first` to `last`, with `first_keys` keys in the first."""
        self._first.append(first)
        self._end.append(last)
        self._before.append(first_keys - first // self._every)

    def works(self) -> list[StepWork]:
        """One value for each iteration."""
        first, end, before = (np.array(column, dtype=np.int64) for column in (self._first, self._end, self._before))
        size, every = self._last + 1, self._every
        requests, keys = np.zeros(size + every, dtype=np.int64), np.zeros(size + every, dtype=np.int64)
        np.add.at(requests, first, 1)
        np.add.at(requests, end + every, -1)
        requests = cumulated(requests, every)[:size]
        np.add.at(keys, first, before)
        np.add.at(keys, end + every, -before)
        keys = cumulated(keys, every)[:size] + requests * (np.arange(size) // every)
        columns = (
            self._context_tokens,
            self._context_requests,
            self._pairs,
            self._context_kv,
            requests,
            keys,
            self._outputs + requests,
        )
        return [StepWork(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def _works(directory: Path, last: int, every: int) -> list[StepWork]:
    """The work of each iteration up to `last`. every: see _Works."""
    trace = read_lines(find_lines(directory, "trace"), ("request_id",))
    # A server records the tokens of a prompt in place of its length.
    prompt_lens = {str(row["request_id"]): row.get("prompt_len", len(row.get("prompt_tokens") or ())) for row in trace}
    spans: defaultdict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    # A killed run also has the spans open when it was last flushed, unless they were closed in that flush too.
    for path in (directory / OPEN_SPANS, find_lines(directory, "spans")):
        for span in read_lines(path, SPAN_FIELDS):
            _check_span(path, span, last, every)
            spans[str(span["request_id"])][span["first_iteration"]] = span
    works = _Works(last, every)
    for request_id, of_request in spans.items():
        if request_id in prompt_lens:
            _add_request(works, prompt_lens[request_id], [of_request[first] for first in sorted(of_request)], every)
    return works.works()


def _check_span(path: Path, span: Mapping[str, Any], last: int, every: int) -> None:
    """InputError for a span without what its phase needs, or in iterations that there are not."""
    is_context, is_generation = span["phase"] in CONTEXT_PHASES, span["phase"] == "generation"
    needed = "chunks" if is_context else "first_output" if is_generation else "phase"
    length = every * len(span.get("chunks") or ()) if is_context else 0
    if span.get(needed) is None or max(span["last_iteration"], span["first_iteration"] + length - every) > last:
        raise InputError(
            f"{path}: the span of request {span['request_id']} from iteration {span['first_iteration']} "
            f"to {span['last_iteration']} has no {needed}, or is beyond the last iteration, {last}. "
            "Restore the file."
        )


def _add_request(works: _Works, prompt_len: int, spans: Sequence[Mapping[str, Any]], every: int) -> None:
    chunks: list[tuple[int, int]] = []
    outputs = 0
    for index, span in enumerate(spans):
        first, last, phase = span["first_iteration"], span["last_iteration"], span["phase"]
        if phase in CONTEXT_PHASES:
            chunks += [(first + step * every, tokens) for step, tokens in enumerate(span["chunks"])]
            following = [later["phase"] for later in spans[index + 1 :]]
            is_complete = span.get("produced", 0) > 0 or following[:1] == ["generation"]
            if is_complete or following[:1] == ["paused"] or not following:
                # A complete prompt ends with the tokens generated so far; what is before its chunks was in the cache.
                computed = sum(tokens for _, tokens in chunks)
                works.add_chunks(chunks, max(prompt_len + outputs - computed, 0) if is_complete else 0, is_complete)
                chunks = []
            outputs += span.get("produced", 0)
        elif phase == "generation":
            works.add_generation(first, last, prompt_len + span["first_output"])
            outputs += span.get("produced", 0)
