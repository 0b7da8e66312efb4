"""The loop of a simulated device, which runs many iterations at once because their times are known in advance."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from ifbbench.clock import Clock
from ifbbench.engine.arrays import NO_ROWS
from ifbbench.engine.batch import NO_OUTPUTS
from ifbbench.engine.interfaces import Executor, IterationWork, PredictableExecutor, PredictedTimes
from ifbbench.engine.loop import NextChange, TokenGenerationLoop
from ifbbench.engine.plan import Plan
from ifbbench.engine.records import NO_CACHE_STATE, InFlightIteration, IterationRecord
from ifbbench.engine.stretch import Growth, Stretch, later_record
from ifbbench.virtual_clock import VirtualClock, tick, to_seconds

# More iterations at once are no faster, and no progress is shown while they are computed.
MAX_ITERATIONS_AT_ONCE = 1024


class RanTogether(NamedTuple):
    """Iterations of `plan` from `number` on, which began at `start_s` and ran at `times`: `turns` are the first records
    of them, and `works` what these ran."""

    plan: Plan
    turns: list[IterationRecord]
    works: list[IterationWork]
    times: PredictedTimes
    number: int
    start_s: float


def is_predicted(executor: Executor, clock: Clock, next_change: NextChange | None) -> bool:
    """Whether a loop knows in advance how long iterations take and when requests arrive."""
    return isinstance(executor, PredictableExecutor) and isinstance(clock, VirtualClock) and next_change is not None


@mypyc_attr(allow_interpreted_subclasses=True)
class PredictedLoop(TokenGenerationLoop):
    """A loop on a virtual clock. Iterations of one plan between two events run without batches, and without a call to
    any of the client's functions.

    sees_first_tokens: those that are taken in together are not several iterations after a prompt."""

    sees_first_tokens: bool = False

    def _run_together(self, plan: Plan, start_s: float) -> bool:
        """Run iterations of `plan` up to the one that starts after requests have arrived. With overlap the latest ones
        stay in flight, and those that were in flight before are completed first."""
        device, scheduler, number = self._device, self.scheduler, self.iteration
        if device is None or not (count := self._num_together(plan)):
            return False
        change_s = self._next_change(start_s) if count > 1 and self._next_change is not None else None
        if plan.valid_until_s != inf:
            until_s = max(plan.valid_until_s, self._clock.now())
            change_s = until_s if change_s is None else min(change_s, until_s)
        plans = scheduler.cycle(plan)[:count]
        turns = [self._record(one, NO_CACHE_STATE, start_s) for one in plans]
        works = [IterationWork(one.chunks, *scheduler.positions(one), one.loaded_tokens) for one in plans]
        if (adapters := works[0].adapters) is not None:
            turns[0].loads = adapters.loads
        times = self._run_device(device, works, count, number, None if change_s is None else tick(change_s))
        self._take_together(RanTogether(plan, turns, works, times, number, start_s))
        return True

    def _run_device(
        self,
        device: PredictableExecutor,
        works: list[IterationWork],
        count: int,
        number: int,
        change_ns: int | None = None,
    ) -> PredictedTimes:
        """Run at most `count` iterations, which are the next ones from `number` on, up to that which starts at
        `change_ns` or later."""
        steps = min(count, MAX_ITERATIONS_AT_ONCE)
        times = device.run(works, steps, number, len(self._in_flight), self._max_in_flight, change_ns)
        self.iteration = number + len(times.start_ns)
        return times

    def _num_together(self, plan: Plan) -> int:
        """The maximum number of iterations of `plan` to run at once; 0 if the next one needs a batch."""
        count = self.scheduler.horizon(plan)
        if count and plan.num_ending and not self._is_open_loop:
            return 1
        if count and self.sees_first_tokens and any(iteration.record.context for iteration in self._in_flight):
            return 1  # so that they are taken in when they are there
        return count

    def _take_together(self, ran: RanTogether) -> None:
        """Take in these iterations."""
        self._complete_together(ran)

    def _complete_together(self, ran: RanTogether) -> None:
        plan, turns, _, times, number, start_s = ran
        scheduler, in_flight = self.scheduler, self._in_flight
        starts = [to_seconds(time_ns) for time_ns in times.start_ns]
        starts[0] = start_s  # before what the decision had to wait for
        submitted = [to_seconds(time_ns) for time_ns in times.submit_ns]
        before_leaving = 1 if plan.num_ending or plan.awaits_in_flight else len(starts)
        growth = scheduler.repeat(plan, before_leaving)
        turns[0].recomputed = growth.recomputed
        self._activated = []
        num_before = len(in_flight)
        self._complete_at(times.collect_ns[:num_before])
        ends = [to_seconds(time_ns) for time_ns in times.collect_ns[num_before:]]
        if before_leaving < len(starts):
            growth = scheduler.repeat(plan, len(starts) - 1).after(growth.last, plan.num_ending)
        epoch_s = self._clock.epoch_s if isinstance(self._clock, VirtualClock) else 0
        self._complete_records(turns, starts, submitted, growth, epoch_s)
        collected = len(ends)
        for index in range(collected, len(starts)):
            turn = turns[index % len(turns)]
            record = later_record(turn, number + index, index, starts[index], epoch_s, growth, self._max_in_flight)
            record.submit_s = submitted[index]
            is_empty = turn.budget_used == 0 and turn.idle == 0
            in_flight.append(InFlightIteration(record, (), NO_ROWS, is_repeated=not is_empty))
        if collected:
            finished = scheduler.confirm(collected)
            turns[0].end_s = ends[0]
            del starts[collected:], submitted[collected:]
            del turns[collected:]
            self._observer.stretch(
                Stretch(turns, finished, starts, submitted, ends, growth, epoch_s, self._max_in_flight)
            )
            self._finish(finished)

    def _complete_at(self, ends_ns: Sequence[int]) -> None:
        """Complete the oldest iterations in flight, which end at these times."""
        for end_ns in ends_ns:
            iteration = self._in_flight.popleft()
            self._complete(iteration, [NO_OUTPUTS] * iteration.num_submitted, to_seconds(end_ns))

    def _complete_records(
        self,
        turns: list[IterationRecord],
        starts: list[float],
        submitted: list[float],
        growth: Growth,
        epoch_s: int,
    ) -> None:
        """Complete the records of the first iterations of a stretch, which were made before any of them began."""
        first = turns[0]
        first.cache, first.submit_s = growth.cache(0), submitted[0]
        del turns[len(starts) :]
        for index, record in enumerate(turns[1:], start=1):
            record.iteration = first.iteration + index
            record.micro_batch = record.iteration % self._max_in_flight
            record.start_s, record.timestamp = starts[index], epoch_s + starts[index]
            record.submit_s, record.cache, record.activated = submitted[index], growth.cache(index), []
            record.in_flight = first.in_flight + first.num_scheduled - record.num_scheduled
