"""Iterations that run together: where their tokens are, what a stretch of them has in common, the record of each."""

from collections.abc import Callable, Iterator, Sequence

from ifbbench.engine.arrays import NO_ROWS, Int64Array, Rows
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.records import CacheState, IterationRecord, WindowBlocks
from ifbbench.engine.request import Request


class Positions:
    """The positions of the next tokens of generation requests.

    count: number of requests.
    total: sum of the positions.
    of_each(): returns the positions, [requests].
    idle: positions of the requests that only pad the batch, which stay the same in further iterations.
    beam_width: beam width of all requests.
    slots: [requests], slot of each.
    """

    def __init__(
        self,
        count: int,
        total: int,
        of_each: Callable[[], Int64Array],
        idle: Rows = NO_ROWS,
        beam_width: int = 1,
        slots: Rows = NO_ROWS,
    ) -> None:
        self.count, self.total, self.of_each, self.idle = count, total, of_each, idle
        self.beam_width, self.slots = beam_width, slots


class Growth:
    """The KV cache while each of several iterations of one plan ran.

    last: its state while the last one ran.
    more_blocks: [iterations], blocks in use beyond those while the first one ran, or before it.
    more_tokens: [iterations], positions filled beyond those while the first one ran, or before it.
    more_new: [iterations], those of `more_taken` without known tokens.
    more_of_windows: [windows][iterations], `more_blocks` of each attention window; empty with one window.
    more_taken: [iterations], blocks taken since then; None if none are released, so that it equals `more_blocks`.
    recomputed: tokens of prompts that had been computed before a pause.
    num_leaving: number of requests that are active in the first iteration only.
    """

    def __init__(
        self,
        last: CacheState,
        more_blocks: list[int],
        more_tokens: list[int],
        more_new: list[int],
        more_of_windows: Sequence[list[int]] = (),
        more_taken: list[int] | None = None,
    ) -> None:
        self.last, self.more_of_windows, self.recomputed, self.num_leaving = last, more_of_windows, 0, 0
        self.more_taken = more_blocks if more_taken is None else more_taken
        self.more_blocks, self.more_tokens, self.more_new = more_blocks, more_tokens, more_new

    def cache(self, index: int) -> CacheState:
        """The cache while the iteration at `index` ran."""
        last = len(self.more_blocks) - 1
        if index == last:
            return self.last
        return _moved(
            self.last,
            self.more_blocks[index] - self.more_blocks[last],
            self.more_tokens[index] - self.more_tokens[last],
            self.more_taken[index] - self.more_taken[last],
            self.more_new[index] - self.more_new[last],
            [more[index] - more[last] for more in self.more_of_windows],
        )

    def after(self, first: CacheState, num_leaving: int) -> "Growth":
        """These iterations and the one before them, with a cache of one window that was `first`, after which
        `num_leaving` requests left."""
        second = self.cache(0)
        whole = Growth(
            self.last,
            _after(self.more_blocks, first.used_blocks, second.used_blocks),
            _after(self.more_tokens, first.filled_tokens, second.filled_tokens),
            _after(self.more_new, first.allocated_new, second.allocated_new),
            more_taken=_after(self.more_taken, first.allocated_total, second.allocated_total),
        )
        whole.num_leaving = num_leaving
        return whole


def _after(more: Sequence[int], first: int | None, second: int | None) -> list[int]:
    """What there is beyond `first`, in that iteration and the following ones, of which the next has `second`. more: of
    these, beyond any number."""
    beyond = (second or 0) - (first or 0) - more[0]
    return [0, *[beyond + one for one in more]]


def _moved(
    cache: CacheState, blocks: int, tokens: int, taken: int, new_blocks: int, of_windows: Sequence[int] = ()
) -> CacheState:
    """`cache` with so many more blocks in use and positions filled, after so many blocks were taken, of which
    `new_blocks` without known tokens; before that, if negative. of_windows: the blocks of each of several attention
    windows."""
    used, size, total, new = cache.used_blocks, cache.tokens_per_block, cache.allocated_total, cache.allocated_new
    held, filled = cache.held_tokens, cache.filled_tokens + tokens
    if used is not None and size is not None and total is not None and new is not None:
        used, held, total, new = used + blocks, held + blocks * size, total + taken, new + new_blocks
    windows = cache.windows
    if len(windows):
        windows = [
            WindowBlocks(window.size, window.max_blocks, window.used_blocks + more)
            for window, more in zip(windows, of_windows, strict=True)
        ]
    return CacheState(
        cache.max_blocks, used, size, total, new, cache.reused, cache.max_tokens, held, filled, cache.missed, windows
    )


def copied(record: IterationRecord) -> IterationRecord:
    """The same record again, to be changed."""
    return IterationRecord(
        record.iteration,
        record.micro_batch,
        record.start_s,
        record.timestamp,
        record.active,
        record.queued,
        record.activated,
        record.context,
        record.num_context_tokens,
        record.recomputed,
        record.num_generation,
        record.num_generation_tokens,
        record.held,
        record.paused,
        record.left_out,
        record.blocked,
        record.cache,
        record.idle,
        record.padding,
        record.submit_s,
        record.context_end_s,
        record.end_s,
        record.finished,
        record.num_micro_batches,
        record.in_flight,
        record.steps,
        record.loads,
        record.drafts,
        record.continued,
        record.queue_head,
    )


def later_record(
    turn: IterationRecord,
    iteration: int,
    index: int,
    start_s: float,
    epoch_s: int,
    growth: Growth,
    max_in_flight: int,
) -> IterationRecord:
    """The record of `iteration`, the one at `index` of a stretch, which runs what `turn` ran, from `start_s` on."""
    record = copied(turn)
    record.micro_batch = (turn.micro_batch + iteration - turn.iteration) % max_in_flight
    record.iteration, record.timestamp, record.start_s = iteration, epoch_s + start_s, start_s
    record.cache = growth.cache(index)
    if index:
        record.activated, record.loads, record.active = [], (), turn.active - growth.num_leaving
        record.continued = ()
    record.context = tuple(
        [ContextChunk(one.request, one.start + index * one.length, one.length) for one in turn.context]
    )
    return record


class Stretch:
    """Consecutive iterations in which the same generation requests each generate a token, and the same prompts run
    chunks of the same lengths, without completing them in two iterations or more. With several micro batches, the
    generation requests of each have their turns.

    turns: records of the first iteration of each micro batch, without `finished`.
    finished: requests that the last iteration completes.
    start_s, submit_s, end_s: [iterations], as in an IterationRecord.
    growth: growth of the KV cache over these iterations and maybe further ones.
    epoch_s: the run's second zero in seconds since the Unix epoch.
    max_in_flight: maximum number of iterations in flight.
    first: record of the first iteration.
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
        """The KV cache while the last iteration ran."""
        return self.growth.cache(self.length - 1)

    @property
    def fullest_caches(self) -> list[CacheState]:
        """The KV cache while most blocks were in use, and while most positions were filled."""
        growth, length = self.growth, self.length
        if growth.more_taken is growth.more_blocks:
            return [self.last_cache]
        most = [more[:length].index(max(more[:length])) for more in (growth.more_blocks, growth.more_tokens)]
        return [growth.cache(index) for index in most]

    def record(self, index: int) -> IterationRecord:
        """The record of the iteration at `index`."""
        turn, iteration = self.turns[index % len(self.turns)], self.first.iteration + index
        start_s = self.start_s[index]
        record = later_record(turn, iteration, index, start_s, self.epoch_s, self.growth, self.max_in_flight)
        record.submit_s, record.end_s = self.submit_s[index], self.end_s[index]
        record.finished = self.finished if index == self.length - 1 else []
        return record

    def records(self) -> Iterator[IterationRecord]:
        for index in range(self.length):
            yield self.record(index)
