"""Records of iterations, which explain every decision and hold only what changed; and the digest of a schedule."""

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Final

from ifbbench.engine.arrays import Rows
from ifbbench.engine.batch import AdapterLoad, Batch
from ifbbench.engine.drafts import DraftCounts
from ifbbench.engine.plan import ContextChunk, LeftOut, Pause
from ifbbench.engine.request import Request


class WindowBlocks:
    """The device blocks of one of several attention windows.

    size: size of the window, in tokens.
    """

    def __init__(self, size: int, max_blocks: int, used_blocks: int) -> None:
        self.size, self.max_blocks, self.used_blocks = size, max_blocks, used_blocks


class CacheState:
    """The KV cache while an iteration ran. Blocks are those of the device, and None in a cache without blocks.

    allocated_total, allocated_new, reused, missed: sums since the start of the run (see BlockCounters).
    max_tokens: token positions in all.
    held_tokens: positions that requests hold.
    filled_tokens: positions with a token in them.
    windows: the blocks of each attention window, which add up to the others; empty with one window.
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
        return fragmentation(self.filled_tokens, self.held_tokens)


def fragmentation(filled: int, held: int) -> float:
    """Share of the held positions that have no token. Beams share tokens, so that it is at least 0."""
    return max(0.0, 1.0 - filled / held) if held else 0.0


# The cache of a record that is not complete yet.
NO_CACHE_STATE = CacheState(None, None, None, None, None, None, 0, 0, 0)


class IterationRecord:
    """One iteration. Times are seconds on the run's clock; requests, chunks and tokens are those of this iteration.

    start_s: when it began. With overlap that is before the previous one ends.
    timestamp: `start_s` in seconds since the Unix epoch.
    active: number of requests in the running set.
    queued: number of requests that have arrived and are not active.
    activated: requests that became active.
    context: the chunks that it ran, `num_context_tokens` tokens in all.
    recomputed: how many of these tokens had been computed before a pause.
    num_generation: number of generation requests that it ran: the active ones that are neither in `held`, nor paused,
        nor in another micro batch.
    left_out: the first request, in the order of the active list and then of the queue, that did not run or had its
        chunk cut.
    blocked: the first such request of each part of the scheduler, for which all behind it wait.
    idle: number of complete requests of a static batch (V1) that stay in it until all others are complete; they are
        among `held`.
    padding: tokens computed in addition to those of the requests (V1).
    submit_s: when its batch was submitted.
    context_end_s: end of the context pass, if context and generation have one pass each.
    end_s: when its outputs were collected.
    finished: requests that it completed.
    num_micro_batches: number of parts that the requests are divided into. The requests of this one can run again so
        many iterations later.
    in_flight: number of requests in the other micro batches.
    steps: first and last iteration of a record that sums up a static batch.
    loads: LoRA adapters that it copied to the device.
    drafts: draft tokens that it verified, which are among num_generation_tokens.
    continued, queue_head: see Plan.
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
        continued: Sequence[tuple[Request, int]] = (),
        queue_head: LeftOut | None = None,
    ) -> None:
        self.iteration, self.micro_batch, self.num_micro_batches = iteration, micro_batch, num_micro_batches
        self.start_s, self.submit_s, self.context_end_s, self.end_s = start_s, submit_s, context_end_s, end_s
        self.timestamp, self.active, self.queued, self.in_flight = timestamp, active, queued, in_flight
        self.activated, self.finished = activated, [] if finished is None else finished
        self.context, self.num_context_tokens, self.recomputed = context, num_context_tokens, recomputed
        self.num_generation, self.num_generation_tokens = num_generation, num_generation_tokens
        self.held, self.paused, self.left_out, self.blocked = held, paused, left_out, blocked
        self.cache, self.idle, self.padding, self.steps = cache, idle, padding, steps
        self.loads, self.drafts, self.continued, self.queue_head = loads, drafts, continued, queue_head

    @property
    def bound_by(self) -> str:
        """The reason for which the first request did not run in full, `none` if every one did."""
        return "none" if self.left_out is None else str(self.left_out.limit)

    @property
    def only_generates(self) -> bool:
        """Whether no request entered, was computed in part, paused, held or left out, or had draft tokens."""
        changed = self.activated or self.context or self.paused or self.held or self.blocked or self.continued
        return not changed and self.drafts is None

    @property
    def num_scheduled(self) -> int:
        """Requests that it ran, idle ones left out."""
        return len(self.context) + self.num_generation

    @property
    def budget_used(self) -> int:
        """Tokens of the packed batch."""
        return self.num_context_tokens + self.num_generation_tokens


class InFlightIteration:
    """One iteration from its submission to its outputs.

    batches: one for each pass.
    output_rows: [outputs], the table row of each output.
    dropped: rows whose outputs are ignored, because the request has left or only pads the batch.
    is_repeated: whether it is one of `Scheduler.repeat`, which has no batch.
    num_submitted: number of passes that are not collected yet.
    """

    def __init__(
        self,
        record: IterationRecord,
        batches: tuple[Batch, ...],
        output_rows: Rows,
        dropped: set[int] | None = None,
        is_repeated: bool = False,
    ) -> None:
        self.record, self.batches, self.output_rows, self.is_repeated = record, batches, output_rows, is_repeated
        self.dropped = set[int]() if dropped is None else dropped
        self.num_submitted = 0
        self.error: Exception | None = None

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
        if record.continued:
            entering = entering | {request.index for request, _ in record.continued}
        joined, left, paused, held = entering, _NO_REQUESTS, _NO_REQUESTS, _NO_REQUESTS
        if leaving or self._held or record.paused or record.held:
            paused = {pause.victim.index for pause in record.paused}
            held = {request.index for request in record.held}
            stopping = leaving | paused | held if leaving or paused else held
            left, joined = stopping & self._generating, (entering | self._held) - stopping
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

    def add_stretch(self, turns: Sequence[IterationRecord], length: int, finished: list[Request]) -> None:
        """Take in `length` iterations: `turns` in turn, the last of which completes `finished`. From its second on, or
        the second of each micro batch, no request joins or leaves generation."""
        for record in turns:
            self.add(record)
        line = _line_of(turns[0].context, _NO_CHANGES)
        if len(turns) == 1:
            self._add_line(line * (length - 1))
        else:
            rounds, more = divmod(length - len(turns), len(turns))
            has_line = [record.budget_used > 0 for record in turns]
            self._add_line(line * (rounds * sum(has_line) + sum(has_line[:more])))
        last_iteration = turns[0].iteration + length - 1
        self._leaving[last_iteration % turns[0].num_micro_batches] = {request.index for request in finished}

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
