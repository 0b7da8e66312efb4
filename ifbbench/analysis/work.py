"""The work of each iteration of a recorded run and of each request, rebuilt from spans.

Work is useful if a run without pauses and padding does it too: the prompt once, and each output token once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.rundir.reader import cumulated
from ifbbench.rundir.rows import Id, Span
from ifbbench.rundir.timeline import Floats, Integers
from ifbbench.simulated.step_work import StepWork, StepWorks

Windows = Sequence[tuple[int | None, float]]
UNLIMITED = 2**40
STATIC = "v1"


@dataclass(frozen=True)
class RunWork:
    """What a run computed.

    computed: [iterations], all work.
    unpadded: the work without the padding of static batches: positions beyond a prompt and the empty slots of complete
        requests.
    useful: the unpadded work without what had been computed before a pause.
    ids: ids of the requests that ran.
    needed: [requests], the useful work of each, its prompt in one chunk.
    outputs: [requests], iterations in which each needs an output.
    held_blocks: [requests], KV blocks that it needs in each of these, added up.
    """

    computed: StepWorks
    unpadded: StepWorks
    useful: StepWorks
    ids: list[Id]
    needed: StepWorks
    outputs: Integers
    held_blocks: Floats

    def needed_by(self, place: int) -> tuple[StepWork, StepWork]:
        """The useful work of one request: of its context phase and of its generation phase."""
        tokens, count, pairs, keys, steps, kv_tokens, outputs = (int(column[place]) for column in self.needed)
        return StepWork(tokens, count, pairs, keys, outputs=outputs - steps), StepWork(
            generation_tokens=steps, generation_kv_tokens=kv_tokens, outputs=steps
        )


class _Chunk(NamedTuple):
    """A context chunk.

    known: positions computed before.
    output: 1 if it yields a token that was not there before.
    is_step: its last position is the step of an output token that a pause interrupted.
    """

    iteration: int
    start: int
    length: int
    known: int
    is_last: bool
    output: int
    is_step: bool


class _Steps(NamedTuple):
    """Generation in iterations `first` to `last`, those of a micro batch.

    keys: number of keys that the first of them reads.
    grows: whether each further one reads one more.
    """

    first: int
    last: int
    keys: int
    beams: int
    grows: bool = True


class _Needed(NamedTuple):
    """The useful work of one request: its prompt from `start` to `end`, and `steps` generation steps after it."""

    request_id: Id
    start: int
    end: int
    is_complete: bool
    steps: int
    beams: int


class _Reader:
    """Reads the spans of one request after the other."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._is_static = run.config.get("type") == STATIC
        self._max_input_len = int(run.config.get("max_input_len") or UNLIMITED)
        self.chunks: list[_Chunk] = []
        self.useful_steps: list[_Steps] = []
        self.steps_again: list[_Steps] = []
        self.idle: list[_Steps] = []
        self.needed: list[_Needed] = []
        # The request that is read has so many output tokens so far, and positions computed at any time.
        self._produced = self._known = 0

    def read(self, request_id: Id, spans: Sequence[Span]) -> None:
        row, planned = self._run.row_of.get(request_id, {}), self._run.trace[request_id]
        beams = int(self._run.config.get("beam_width") or planned.beam_width)
        prompt_len = int(row.get("prompt_len") or planned.prompt_len)
        if not prompt_len:  # a trace of tokens, and the request had not ended
            first = next((span.first_output for span in spans if span.phase == "generation"), 1)
            done = sum(span.tokens for span in spans if span.phase == "context")
            prompt_len = max(done - first + 1, 1)
        self._produced = self._known = 0
        index, chunks_before, group = len(self.chunks), len(self.chunks), list[Span]()
        for span in spans:
            if span.phase in ("context", "recompute"):
                group.append(span)
            elif span.phase == "generation":
                self._context(group, prompt_len + span.first_output - 1, prompt_len, beams)
                self._generation(span, prompt_len, beams)
            elif span.phase == "paused":
                self._context(group, None, prompt_len, beams, int(row.get("reused_tokens") or 0))
            elif span.phase == "skipped" and self._is_static:
                self._context(group, None, prompt_len, beams)
                self.idle.append(_Steps(span.first, span.last, prompt_len + self._produced - 1, beams, grows=False))
        end = prompt_len if row.get("outcome") == "completed" and not self._produced else None
        self._context(group, end, prompt_len, beams, int(row.get("reused_tokens") or 0))
        if len(self.chunks) > chunks_before:
            is_complete = self._produced > 0
            end = prompt_len if is_complete else max(chunk.start + chunk.length for chunk in self.chunks[index:])
            start = min(self.chunks[index].start, end)
            self.needed.append(_Needed(request_id, start, end, is_complete, max(self._produced - 1, 0), beams))

    def _context(self, group: list[Span], end: int | None, prompt_len: int, beams: int, reused: int = 0) -> None:
        """The chunks of `group`, spans since the latest pause, which it empties.

        end: positions that they completed; None if unknown, or if a pause or the end of the recording came before.
        reused: tokens found in the cache.
        """
        if not group:
            return
        total = sum(span.tokens for span in group)
        output = int(any(span.produced for span in group))
        if output and end is None:
            joined = self._produced if beams == 1 else 0
            end = max(min(prompt_len + joined, self._max_input_len), prompt_len)
        start = max(end - total, 0) if end is not None else (0 if self._known else reused)
        for span in group:
            for number, length in enumerate(span.chunks):
                is_last = start + length == end
                is_step = is_last and output > 0 and self._produced > 0
                self.chunks.append(
                    _Chunk(
                        span.first + number * span.every,
                        start,
                        length,
                        self._known,
                        is_last,
                        output if is_last else 0,
                        is_step,
                    )
                )
                start += length
        self._known = max(self._known, start)
        self._produced += output
        group.clear()

    def _generation(self, span: Span, prompt_len: int, beams: int) -> None:
        keys, every = prompt_len + span.first_output, span.every
        useful = span.last - (span.produced - 1) * every
        if useful > span.first:
            self.steps_again.append(_Steps(span.first, useful - every, keys, beams))
        if span.produced:
            self.useful_steps.append(_Steps(useful, span.last, keys + (useful - span.first) // every, beams))
        self._produced += span.produced
        self._known = max(self._known, keys + (span.last - span.first) // every)


def read_work(run: RecordedRun, windows: Windows) -> RunWork:
    """The work of a run. windows: the attention windows (tokens; None for all) and the share of the layers of each."""
    reader = _Reader(run)
    for request_id, spans in run.spans.items():
        reader.read(request_id, spans)
    size = max((span.last for spans in run.spans.values() for span in spans), default=0) + 1
    iteration, start, length, known, is_last, output, is_step = _columns(reader.chunks, len(_Chunk._fields))
    again = np.clip(known - start, 0, length)
    every = run.data.num_micro_batches
    useful = _Sums(size, windows, every)
    useful.add_context(iteration, start + again, np.where(is_step, 0, length - again), np.where(is_step, 0, output))
    resumed = [
        _Steps(chunk.iteration, chunk.iteration, chunk.start + chunk.length, 1)
        for chunk in reader.chunks
        if chunk.is_step
    ]
    useful.add_steps([*reader.useful_steps, *resumed])
    unpadded = _Sums(size, windows, every)
    unpadded.add_context(iteration, start, length, is_last)
    unpadded.add_steps([*reader.useful_steps, *reader.steps_again])
    computed = unpadded
    if run.config.get("type") == STATIC:
        longest = np.zeros(size, np.int64)
        np.maximum.at(longest, iteration, length)
        computed = _Sums(size, windows)
        computed.add_context(iteration, start, longest[iteration], is_last)
        computed.add_steps([*reader.useful_steps, *reader.idle])
    ids = [one.request_id for one in reader.needed]
    needed, outputs, held = _needed(run, reader.needed, windows)
    return RunWork(computed.works, unpadded.works, useful.works, ids, needed, outputs, held)


def _columns(rows: Sequence[Any], count: int) -> list[Integers]:
    table = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * count).reshape(len(rows), count)
    return [table[:, index] for index in range(count)]


class _Sums:
    """Sums the work of chunks and generation steps by iteration, with attention windows as in a mean layer.

    every: the number of micro batches; a step is in one of so many iterations."""

    def __init__(self, size: int, windows: Windows, every: int = 1) -> None:
        self._windows, self._size, self._every = windows, size, every
        self.works = StepWorks(*(np.zeros(size, np.int64) for _ in StepWorks._fields))

    def add_context(self, iteration: Integers, start: Integers, length: Integers, outputs: Integers) -> None:
        works, size = self.works, self._size
        pairs, keys = mean_context(start, length, self._windows)
        columns = (length, length > 0, pairs, keys, outputs)
        targets = (
            works.context_tokens,
            works.context_requests,
            works.attention_pairs,
            works.context_kv_tokens,
            works.outputs,
        )
        for target, values in zip(targets, columns, strict=True):
            target += np.rint(np.bincount(iteration, values, size)).astype(np.int64)

    def add_steps(self, steps: list[_Steps]) -> None:
        first, last, keys, beams, grows = _columns(steps, len(_Steps._fields))
        tokens = np.zeros(self._size + self._every, np.int64)
        np.add.at(tokens, first, beams)
        np.add.at(tokens, last + self._every, -beams)
        tokens = cumulated(tokens, self._every)[: self._size]
        self.works.generation_tokens[:] += tokens
        self.works.outputs[:] += tokens
        read = sum(
            share
            * _keys_read(
                first, last, keys, beams, grows, UNLIMITED if window is None else window, self._size, self._every
            )
            for window, share in self._windows
        )
        self.works.generation_kv_tokens[:] += np.rint(read).astype(np.int64)


def mean_context(start: Integers, length: Integers, windows: Windows) -> tuple[Floats, Floats]:
    """Query-key pairs and keys read of context chunks, each; see StepWork."""
    pairs, keys = np.zeros(len(start)), np.zeros(len(start))
    for window, share in windows:
        limit = UNLIMITED if window is None else window
        growing = np.clip(limit - start, 0, length)
        pairs += share * (growing * start + growing * (growing + 1) // 2 + (length - growing) * limit)
        keys += share * np.where(length > 0, np.minimum(start, limit - 1) + length, 0)
    return pairs, keys


def _keys_read(
    first: Integers,
    last: Integers,
    keys: Integers,
    beams: Integers,
    grows: Integers,
    window: int,
    size: int,
    every: int,
) -> Integers:
    """Keys that generation steps read in each iteration. Each reads one more than the step before, up to the window."""
    begin = np.minimum(keys, window)
    growing = grows * np.minimum((last - first) // every, window - begin)
    steps, slopes = np.zeros(size + 2 * every, np.int64), np.zeros(size + 2 * every, np.int64)
    np.add.at(steps, first, begin * beams)
    np.add.at(steps, last + every, -(begin + growing) * beams)
    np.add.at(slopes, first + every, beams)
    np.add.at(slopes, first + (1 + growing) * every, -beams)
    read: Integers = cumulated(steps + cumulated(slopes, every), every)[:size]
    return read


def _needed(run: RecordedRun, requests: list[_Needed], windows: Windows) -> tuple[StepWorks, Integers, Floats]:
    columns = _columns([one[1:] for one in requests], len(_Needed._fields) - 1)
    start, end, is_complete, steps, beams = columns
    pairs, keys = mean_context(start, end - start, windows)
    read = np.zeros(len(requests))
    for window, share in windows:
        limit = UNLIMITED if window is None else window
        growing = np.clip(limit - end, 0, steps)  # steps that read fewer keys than the window
        read += share * (growing * end + growing * (growing + 1) // 2 + (steps - growing) * limit)
    needed = StepWorks(
        end - start,
        (end > start).astype(np.int64),
        np.rint(pairs).astype(np.int64),
        np.rint(keys).astype(np.int64),
        steps * beams,
        np.rint(read).astype(np.int64) * beams,
        steps * beams + is_complete,
    )
    outputs = np.where(is_complete, steps + 1, 0)
    return needed, outputs, _held_blocks(run, end, outputs, windows)


def _held_blocks(run: RecordedRun, end: Integers, outputs: Integers, windows: Windows) -> Floats:
    """KV blocks that each request needs in the iterations of its outputs, added up: at least those of its prompt and
    the outputs before. Reused blocks may be shared, so that only outputs count. A cache of several windows has several
    pools, and is not counted."""
    size = int(run.config.get("tokens_per_block") or 0)
    if not size or len(windows) > 1:
        return np.zeros(len(end))
    if run.config.get("enable_kv_cache_reuse"):
        return outputs * (outputs - 1) / 2 / size
    window = windows[0][0]
    # A window that wraps has a place for each of its tokens; one more block may be partly used.
    limit = UNLIMITED if window is None else max(window - size, 1)
    longest = end + outputs - 1
    growing = np.minimum(longest, limit)
    full = _blocks_up_to(growing, size) - _blocks_up_to(np.minimum(end - 1, growing), size)
    at_limit = np.maximum(longest - np.maximum(end - 1, limit), 0) * (limit // size)
    return np.where(outputs > 0, full + at_limit, 0).astype(np.float64)


def _blocks_up_to(tokens: Integers, size: int) -> Integers:
    """The sum over n = 1 … tokens of the blocks that n tokens need."""
    quotient, rest = tokens // size, tokens % size
    summed: Integers = size * quotient * (quotient + 1) // 2 + rest * (quotient + 1)
    return summed
