"""Records of iterations, which explain every decision and hold only what changed; the documented statistics and the
digest of a schedule, which are made of them."""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import gmtime, strftime
from typing import Any, Final

from ifbbench.engine.arrays import Rows
from ifbbench.engine.batch import AdapterLoad, Batch
from ifbbench.engine.drafts import DraftCounts
from ifbbench.engine.plan import ContextChunk, LeftOut, Pause
from ifbbench.engine.request import Request
from ifbbench.settings.modes import BatchingType

CACHE_FIELDS = (
    "Max KV cache blocks",
    "Free KV cache blocks",
    "Used KV cache blocks",
    "Tokens per KV cache block",
    "Allocated total KV cache blocks",
    "Allocated new KV cache blocks",
    "Reused KV cache blocks",
)
COMMON_FIELDS = (
    "Timestamp",
    "Iteration Counter",
    "Active Request Count",
    "Max Request Count",
    *CACHE_FIELDS,
    "Scheduled Requests",
    "Context Requests",
)
INFLIGHT_FIELDS = ("Generation Requests", "Total Context Tokens", "MicroBatch ID", "Paused Requests")
STATIC_FIELDS = ("Total Generation Tokens", "Total Context Tokens", "Empty Generation Slots")
TIMESTAMP_FORMAT = "%m-%d-%Y %H:%M:%S"


class WindowBlocks:
    """The device blocks of one of several attention windows. size: of the window, in tokens."""

    def __init__(self, size: int, max_blocks: int, used_blocks: int) -> None:
        self.size, self.max_blocks, self.used_blocks = size, max_blocks, used_blocks


class CacheState:
    """The KV cache while an iteration ran.

    Blocks are those of the device, None in a cache without blocks; allocated_total, allocated_new, reused and missed
    are sums since the start (see BlockCounters). max_tokens, held_tokens, filled_tokens: token positions in all, those
    that requests hold, and those with a token in them. windows: the blocks of each attention window, which add up to
    the others; empty with one window.
    """

    def __init__(
        self,
        max_blocks: int | None,
        used_blocks: int | None,
        tokens_per_block: int | None,
        allocated_total: int | None,
        allocated_new: int | None,
        reused: int | None,
        max_tokens: int,
        held_tokens: int,
        filled_tokens: int,
        missed: int | None = None,
        windows: Sequence[WindowBlocks] = (),
    ) -> None:
        self.windows = windows
        self.max_blocks, self.used_blocks, self.tokens_per_block = max_blocks, used_blocks, tokens_per_block
        self.allocated_total, self.allocated_new = allocated_total, allocated_new
        self.reused, self.missed = reused, missed
        self.max_tokens, self.held_tokens, self.filled_tokens = max_tokens, held_tokens, filled_tokens

    @property
    def fragmentation(self) -> float:
        """Share of the held positions that have no token. Beams share tokens, so that it is at least 0."""
        return max(0.0, 1.0 - self.filled_tokens / self.held_tokens) if self.held_tokens else 0.0

    def moved(self, blocks: int, tokens: int, new_blocks: int, of_windows: Sequence[int] = ()) -> "CacheState":
        """This state after generation took so many blocks, `new_blocks` of them without known tokens, and filled so
        many positions; before it, if negative. of_windows: the blocks of each of several attention windows."""
        used, size, total, new = self.used_blocks, self.tokens_per_block, self.allocated_total, self.allocated_new
        held, filled = self.held_tokens, self.filled_tokens + tokens
        if used is not None and size is not None and total is not None and new is not None:
            used, total, new, held = used + blocks, total + blocks, new + new_blocks, held + blocks * size
        windows = self.windows
        if len(windows):
            windows = [
                WindowBlocks(window.size, window.max_blocks, window.used_blocks + more)
                for window, more in zip(windows, of_windows, strict=True)
            ]
        return CacheState(
            self.max_blocks, used, size, total, new, self.reused, self.max_tokens, held, filled, self.missed, windows
        )


# The cache of a record that is not complete yet.
NO_CACHE_STATE = CacheState(None, None, None, None, None, None, 0, 0, 0)


class Growth:
    """The KV cache while each of several iterations of one plan ran.

    last: while the last one ran. more_blocks, more_tokens, more_new: [iterations], blocks, token positions, and blocks
    without known tokens, taken since the first one ran. more_of_windows: [windows][iterations], `more_blocks` of each
    attention window; empty with one window. recomputed: tokens of prompts that had been computed before a pause.
    """

    def __init__(
        self,
        last: CacheState,
        more_blocks: list[int],
        more_tokens: list[int],
        more_new: list[int],
        more_of_windows: Sequence[list[int]] = (),
    ) -> None:
        self.last, self.more_of_windows, self.recomputed = last, more_of_windows, 0
        self.more_blocks, self.more_tokens, self.more_new = more_blocks, more_tokens, more_new

    def cache(self, index: int) -> CacheState:
        """The cache while the iteration at `index` ran."""
        last = len(self.more_blocks) - 1
        if index == last:
            return self.last
        return self.last.moved(
            self.more_blocks[index] - self.more_blocks[last],
            self.more_tokens[index] - self.more_tokens[last],
            self.more_new[index] - self.more_new[last],
            [more[index] - more[last] for more in self.more_of_windows],
        )


class IterationRecord:
    """One iteration. Times are seconds on the run's clock.

    start_s, submit_s, end_s: the iteration began, its batch was submitted, its outputs were collected. With overlap an
        iteration begins before the previous one ends.
    context_end_s: end of the context pass, if context and generation have one pass each.
    activated: requests that became active in it.
    context: the chunks it ran, of num_context_tokens in all. `recomputed` of these tokens had been computed before a
        pause, and `padding` tokens (V1) were computed in addition.
    num_generation: generation requests that it ran: all active ones but those in `held`, the paused, and those in
        another micro batch.
    idle: complete requests of a static batch that stay in it until all others are complete (V1); part of `held`.
    finished: requests that it completed.
    left_out: the first request, in the order of the active list and then of the queue, that did not run or had its
        chunk cut. blocked: the first such request of each scheduler, for which all behind it wait.
    queued: requests that have arrived and are not active.
    steps: of a record that sums up a static batch, its first and last iteration.
    num_micro_batches: parts that the requests are divided into. Those of this one can run again so many iterations
        later, and `in_flight` requests are in the others.
    loads: LoRA adapters that it copied to the device.
    drafts: of an iteration that verified draft tokens, which are among num_generation_tokens.
    """

    def __init__(
        self,
        iteration: int,
        micro_batch: int,
        start_s: float,
        timestamp: float,
        active: int,
        queued: int,
        activated: list[Request],
        context: tuple[ContextChunk, ...],
        num_context_tokens: int,
        recomputed: int,
        num_generation: int,
        num_generation_tokens: int,
        held: list[Request],
        paused: list[Pause],
        left_out: LeftOut | None,
        blocked: tuple[LeftOut, ...],
        cache: CacheState,
        idle: int = 0,
        padding: int = 0,
        submit_s: float = 0.0,
        context_end_s: float | None = None,
        end_s: float = 0.0,
        finished: list[Request] | None = None,
        num_micro_batches: int = 1,
        in_flight: int = 0,
        steps: tuple[int, int] | None = None,
        loads: tuple[AdapterLoad, ...] = (),
        drafts: DraftCounts | None = None,
    ) -> None:
        self.iteration, self.micro_batch, self.num_micro_batches = iteration, micro_batch, num_micro_batches
        self.start_s, self.submit_s, self.context_end_s, self.end_s = start_s, submit_s, context_end_s, end_s
        self.timestamp, self.active, self.queued, self.in_flight = timestamp, active, queued, in_flight
        self.activated, self.finished = activated, [] if finished is None else finished
        self.context, self.num_context_tokens, self.recomputed = context, num_context_tokens, recomputed
        self.num_generation, self.num_generation_tokens = num_generation, num_generation_tokens
        self.held, self.paused, self.left_out, self.blocked = held, paused, left_out, blocked
        self.cache, self.idle, self.padding, self.steps = cache, idle, padding, steps
        self.loads, self.drafts = loads, drafts

    def copy(self) -> "IterationRecord":
        return IterationRecord(
            self.iteration,
            self.micro_batch,
            self.start_s,
            self.timestamp,
            self.active,
            self.queued,
            self.activated,
            self.context,
            self.num_context_tokens,
            self.recomputed,
            self.num_generation,
            self.num_generation_tokens,
            self.held,
            self.paused,
            self.left_out,
            self.blocked,
            self.cache,
            self.idle,
            self.padding,
            self.submit_s,
            self.context_end_s,
            self.end_s,
            self.finished,
            self.num_micro_batches,
            self.in_flight,
            self.steps,
            self.loads,
            self.drafts,
        )

    def later(
        self, iteration: int, index: int, start_s: float, epoch_s: int, growth: Growth, max_in_flight: int
    ) -> "IterationRecord":
        """The record of `iteration`, the one at `index` of a stretch, which ran the same plan from `start_s` on."""
        record = self.copy()
        record.micro_batch = (self.micro_batch + iteration - self.iteration) % max_in_flight
        record.iteration, record.timestamp, record.start_s = iteration, epoch_s + start_s, start_s
        record.cache = growth.cache(index)
        if index:
            record.activated, record.loads = [], ()
        record.context = tuple(
            [ContextChunk(one.request, one.start + index * one.length, one.length) for one in self.context]
        )
        return record

    @property
    def num_scheduled(self) -> int:
        """Requests that it ran, idle ones left out."""
        return len(self.context) + self.num_generation

    @property
    def budget_used(self) -> int:
        """Tokens of the packed batch."""
        return self.num_context_tokens + self.num_generation_tokens


class Stretch:
    """Consecutive iterations in which the same generation requests each generate a token, and the same prompts run
    chunks of the same lengths, without completing them in two iterations or more. With several micro batches, the
    generation requests of each have their turns.

    turns: records of the first iteration of each micro batch, without `finished`: those requests are completed by the
    last iteration. first: of the first one of all. start_s, submit_s, end_s: [iterations], as in an IterationRecord.
    growth: of the KV cache, of these iterations and maybe further ones. epoch_s: the run's second zero in seconds since
    the Unix epoch. max_in_flight: iterations that may be in flight.
    """

    def __init__(
        self,
        turns: Sequence[IterationRecord],
        finished: list[Request],
        start_s: list[float],
        submit_s: list[float],
        end_s: list[float],
        growth: Growth,
        epoch_s: int,
        max_in_flight: int = 1,
    ) -> None:
        self.turns, self.finished, self.growth, self.epoch_s = turns, finished, growth, epoch_s
        self.first = turns[0]
        self.max_in_flight = max_in_flight
        self.start_s, self.submit_s, self.end_s = start_s, submit_s, end_s

    @property
    def length(self) -> int:
        return len(self.start_s)

    @property
    def last_iteration(self) -> int:
        return self.first.iteration + self.length - 1

    @property
    def last_cache(self) -> CacheState:
        """The KV cache while the last iteration ran, when requests hold most."""
        return self.growth.cache(self.length - 1)

    def records(self) -> Iterator[IterationRecord]:
        for index, (start_s, submit_s, end_s) in enumerate(zip(self.start_s, self.submit_s, self.end_s, strict=True)):
            turn, iteration = self.turns[index % len(self.turns)], self.first.iteration + index
            record = turn.later(iteration, index, start_s, self.epoch_s, self.growth, self.max_in_flight)
            record.submit_s, record.end_s = submit_s, end_s
            record.finished = self.finished if index == self.length - 1 else []
            yield record


@dataclass(slots=True)
class InFlightIteration:
    """One iteration from its submission to its outputs.

    batches: its passes. output_rows: [outputs], the table row of each output. dropped: rows with outputs to ignore,
    because the request has left or only pads the batch. num_submitted: passes that were not collected yet.
    is_repeated: one of `Scheduler.repeat`, which has no batch.
    """

    record: IterationRecord
    batches: tuple[Batch, ...]
    output_rows: Rows
    dropped: set[int] = field(default_factory=set)
    num_submitted: int = 0
    error: Exception | None = None
    is_repeated: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it is the turn of a micro batch without requests."""
        return not self.batches and not self.is_repeated


def forget_empty_turns(in_flight: deque[InFlightIteration]) -> int:
    """Remove the latest of the iterations in flight, the oldest of which is the first, if they are turns of micro
    batches without requests; returns how many."""
    count = 0
    while in_flight and in_flight[-1].is_empty:
        in_flight.pop()
        count += 1
    return count


class IterationStatistics:
    """The statistics of each iteration under the names of TensorRT-LLM's batch manager.

    max_requests: the engine's limit of active requests. names: the fields of the batching type, in order. is_static:
    V1. Static batches are reported as a whole (see `reported`), as TensorRT-LLM does, which runs one in one call.
    """

    def __init__(self, batching_type: BatchingType, max_requests: int) -> None:
        self.batching_type, self.max_requests = batching_type, max_requests
        self.is_static = batching_type is BatchingType.V1
        self.names = (*COMMON_FIELDS, *(STATIC_FIELDS if self.is_static else INFLIGHT_FIELDS))
        self._num_static_batches = 0
        # The static batch that is not reported yet, and the host's time in each of its steps.
        self._batch: IterationRecord | None = None
        self._host_s: list[float] = []
        self._second, self._timestamp = -1, ""

    def reported(self, record: IterationRecord) -> Sequence[IterationRecord]:
        """The records to report after `record`: itself, or the static batch of which it is the last step. One whose
        members all failed or were stopped is reported with the next."""
        if not self.is_static:
            return (record,)
        host_s = [record.submit_s - record.start_s]
        return self._add_steps(record, host_s, record.end_s, record.cache, record.finished)

    def reported_of(self, stretch: Stretch) -> Sequence[IterationRecord]:
        """As `reported`, after all steps of a stretch of static batches."""
        host_s = [submit_s - start_s for start_s, submit_s in zip(stretch.start_s, stretch.submit_s, strict=True)]
        return self._add_steps(stretch.first, host_s, stretch.end_s[-1], stretch.last_cache, stretch.finished)

    def _add_steps(
        self, first: IterationRecord, host_s: list[float], end_s: float, cache: CacheState, finished: list[Request]
    ) -> list[IterationRecord]:
        """Take in steps like `first`. host_s: [steps]. The others are of the last one."""
        reported, count = self.unreported() if first.context else [], len(host_s)
        batch = self._batch
        if batch is None:
            batch = self._batch = first.copy()
            batch.num_generation = batch.num_generation_tokens = batch.idle = 0
        batch.num_generation += first.num_generation * count
        batch.num_generation_tokens += first.num_generation_tokens * count
        batch.idle += first.idle * count
        batch.steps = batch.iteration, first.iteration + count - 1
        batch.end_s, batch.cache, batch.finished = end_s, cache, finished
        self._host_s += host_s
        return reported + (self.unreported() if finished else [])

    def unreported(self) -> list[IterationRecord]:
        """The static batch of the steps that were not reported yet, if there are any."""
        batch, self._batch = self._batch, None
        if batch is None:
            return []
        batch.iteration, batch.submit_s = self._num_static_batches, batch.start_s + sum(self._host_s, 0.0)
        self._host_s = []
        self._num_static_batches += 1
        return [batch]

    def fields(self, record: IterationRecord) -> dict[str, Any]:
        """Documented name to value. Blocks and tokens are counts; the time stamp is in UTC."""
        return dict(zip(self.names, self.values(record), strict=True))

    def values(self, record: IterationRecord) -> tuple[str | int | None, ...]:
        """The values of the fields, in the order of `names`."""
        chunks = len(record.context)
        # In each step of a static batch, a member generates a token or leaves its slot empty.
        scheduled = chunks if record.steps else chunks + record.num_generation + record.idle
        of_type = (
            (chunks + record.num_generation, record.num_context_tokens, record.idle)
            if self.is_static
            else (record.num_generation, record.num_context_tokens, record.micro_batch, len(record.paused))
        )
        cache, used = record.cache, record.cache.used_blocks
        free = None if cache.max_blocks is None or used is None else cache.max_blocks - used
        return (
            self.format_timestamp(record.timestamp),
            record.iteration,
            record.active,
            self.max_requests,
            cache.max_blocks,
            free,
            used,
            cache.tokens_per_block,
            cache.allocated_total,
            cache.allocated_new,
            cache.reused,
            scheduled,
            chunks,
            *of_type,
        )

    def format_timestamp(self, timestamp: float) -> str:
        """Month-day-year hour:minute:second of seconds since the Unix epoch, in UTC. Formatted once a second."""
        if not self._second <= timestamp < self._second + 1:
            self._second = int(timestamp)
            self._timestamp = strftime(TIMESTAMP_FORMAT, gmtime(self._second))
        return self._timestamp


_NO_REQUESTS: Final = set[int]()
_LINES_AT_ONCE: Final = 256
_NO_CHANGES: Final = '"joined":[],"left":[],"paused":[]}\n'


def _line_of(context: tuple[ContextChunk, ...], changes: str) -> str:
    """One line of the digest, canonical JSON. changes: its end, from `joined` on."""
    if len(context) == 1:
        return f'{{"context":[[{context[0].request.index},{context[0].length}]],{changes}'
    chunks = sorted([(chunk.request.index, chunk.length) for chunk in context])
    return f'{{"context":[{",".join([f"[{index},{length}]" for index, length in chunks])}],{changes}'


def _listed(numbers: set[int]) -> str:
    return ",".join([str(number) for number in sorted(numbers)]) if numbers else ""


class ScheduleDigest:
    """sha256 of all decisions of a run, without times: one line of JSON for each iteration that scheduled or paused
    something.

    A line has the context chunks as [index, tokens], the requests that joined and left generation since the line
    before, and those paused. Requests are given by their index in the trace, and sorted by it.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._lines: list[str] = []  # those that are not in the hash yet
        self._generating, self._held = set[int](), set[int]()
        # The requests that enter or leave generation with the next turn of each micro batch.
        self._entering, self._leaving = list[set[int]](), list[set[int]]()

    def add(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        # Changes since the iteration before, or the latest one of the same micro batch.
        while len(self._entering) < record.num_micro_batches:
            self._entering.append(set())
            self._leaving.append(set())
        turn = record.iteration % record.num_micro_batches
        entering, leaving = self._entering[turn], self._leaving[turn]
        joined, left, paused, held = entering, _NO_REQUESTS, _NO_REQUESTS, _NO_REQUESTS
        if leaving or self._held or record.paused or record.held:
            paused = {pause.victim.index for pause in record.paused}
            held = {request.index for request in record.held}
            left = (leaving | paused | held) & self._generating
            joined = (entering | (self._held - held)) - leaving - paused - held
            self._generating -= left
            if paused and record.num_micro_batches > 1:
                for others in self._entering:
                    others -= paused
        if joined:
            self._generating |= joined
        if record.budget_used or paused:
            changes = _NO_CHANGES
            if joined or left or paused:
                changes = f'"joined":[{_listed(joined)}],"left":[{_listed(left)}],"paused":[{_listed(paused)}]}}\n'
            self._add_line(_line_of(record.context, changes))
        entering = {chunk.request.index for chunk in record.context if chunk.is_last}
        self._entering[turn], self._leaving[turn] = entering, {request.index for request in record.finished}
        self._held = held

    def leave(self, request: Request) -> None:
        """A request is stopped between two iterations: it leaves generation as one that is complete does."""
        for leaving in self._leaving:
            leaving.add(request.index)

    def add_stretch(self, stretch: Stretch) -> None:
        """Take in all iterations of a stretch. From its second on, or the second of each micro batch, no request joins
        or leaves generation."""
        turns = stretch.turns
        for record in turns:
            self.add(record)
        line = _line_of(turns[0].context, _NO_CHANGES)
        if len(turns) == 1:
            self._add_line(line * (stretch.length - 1))
        else:
            rounds, more = divmod(stretch.length - len(turns), len(turns))
            has_line = [record.budget_used > 0 for record in turns]
            self._add_line(line * (rounds * sum(has_line) + sum(has_line[:more])))
        self._leaving[stretch.last_iteration % turns[0].num_micro_batches] = {one.index for one in stretch.finished}

    def _add_line(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) == _LINES_AT_ONCE:
            self._hash_lines()

    def _hash_lines(self) -> None:
        self._hash.update("".join(self._lines).encode())
        self._lines.clear()

    def hexdigest(self) -> str:
        self._hash_lines()
        return self._hash.hexdigest()
