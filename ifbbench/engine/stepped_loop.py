"""The loops of a fleet: several on one clock, each of which takes in its outputs when the others are as far."""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from ifbbench.engine.interfaces import EngineLost, IterationWork, PredictableExecutor, PredictedTimes
from ifbbench.engine.plan import Plan
from ifbbench.engine.predicted_loop import MAX_ITERATIONS_AT_ONCE, RanTogether
from ifbbench.engine.transferring_loop import TransferringLoop
from ifbbench.virtual_clock import tick

# After an interruption so many iterations run together, at least, and twice as many once all of them have run: those
# that are undone have cost time, and so does another step.
FEWEST_TOGETHER = 32


class SteppedLoop(TransferringLoop):
    """A loop whose `step` leaves the clock at the end of its iterations and holds their outputs; `take_in` takes them
    in before the next step. In between, the caller of several loops learns what arrives until then. For the same
    reason, a step that refuses requests runs no iteration.

    may_be_interrupted: a step may run iterations that start later than something comes which is not known yet;
    `interrupt` and `shorten` undo them. Set before the first step."""

    _held: Callable[[], None] | None = None
    _held_together: RanTogether | None = None
    _did_nothing: bool = False
    _idle_since_s: float = -math.inf
    _known_refused: int = 0
    _device_before: Any = None  # before the latest iterations that ran together
    _max_together: int = 1024  # as MAX_ITERATIONS_AT_ONCE
    _ran_all: bool = False  # whether the latest step ran as many
    may_be_interrupted: bool = False

    def step(self) -> bool:
        """See TokenGenerationLoop."""
        self._did_nothing = not super().step()
        self._idle_since_s = self._clock.now()
        return not self._did_nothing

    @property
    def is_idle(self) -> bool:
        """Whether it does nothing until more requests arrive, or keys and values."""
        if self._in_flight or self._held is not None:
            return False
        return self._did_nothing or not self._has_work

    @property
    def waits_for_transfers(self) -> bool:
        """Whether its latest step did nothing because all that it has taken waits for keys and values. Requests that
        have arrived may wait until those leave."""
        return self._did_nothing and self._has_work

    @property
    def seen_s(self) -> float:
        """If it waits so, the time of its latest step: it has left what had arrived by then."""
        return self._idle_since_s if self.waits_for_transfers else -math.inf

    @property
    def is_held(self) -> bool:
        """Whether outputs of the latest step are to be taken in."""
        return self._held is not None

    def take_in(self) -> None:
        """Take in outputs of the latest step; if it has more, they are held, and the clock is at their end."""
        held, self._held, self._held_together = self._held, None, None
        if held is not None:
            held()

    def wake(self) -> None:
        """Something has come that it was not asked for: a request, or keys and values."""
        self._did_nothing, self._quiet_until_s = False, -math.inf

    def interrupt(self, time_ns: int) -> None:
        """Something comes that the latest step did not know of: its iterations that start at `time_ns` or later are
        undone, but for the first one. The loop is then as if it ran one iteration at a time: the last one that is left
        is held, and those before it are taken in."""
        ran = self._held_together
        if ran is None or len(ran.times.start_ns) == 1:
            return
        count = _num_begun(ran, time_ns)
        ran = self._run_again(ran, max(count - 1, 1))
        if count == 1:
            self._take_together(ran)
        else:
            self._held = self._held_together = None
            self._complete_together(ran)
            self._ran_all, self._max_together = False, 1
            self.step()
        self._expect_more(count)

    def shorten(self, time_ns: int) -> None:
        """A request comes at `time_ns`, which the next step looks for: iterations of the latest step that start then or
        later are undone, but for the first one. All that are left stay held."""
        self._quiet_until_s = -math.inf
        ran = self._held_together
        if ran is not None and (count := _num_begun(ran, time_ns)) < len(ran.times.start_ns):
            self._take_together(self._run_again(ran, count))
            self._expect_more(count)

    def used_blocks_at(self, time_ns: int) -> int:
        """Blocks of the KV cache in use at `time_ns`, which is not before the latest step began: those of a loop that
        runs one iteration at a time, and holds the one that runs then. Iterations are interrupted only if the scheduler
        cannot tell."""
        ran, scheduler = self._held_together, self.scheduler
        if ran is not None and (before := _num_begun(ran, time_ns) - 1):
            used: int | None = scheduler.used_blocks_after(ran.plan, before)
            if used is not None:
                return used
            self.interrupt(time_ns)
        return scheduler.cache_state().used_blocks or 0

    def _run_again(self, ran: RanTogether, count: int) -> RanTogether:
        """The first `count` of these held iterations, in place of all of them."""
        device = self._device
        assert device is not None
        device.restore(self._device_before)
        self._device_before = device.state()
        return ran._replace(times=super()._run_device(device, ran.works[:count], count, ran.number))

    def _expect_more(self, count: int) -> None:
        """After so many iterations something came: it may come as soon again."""
        self._ran_all, self._max_together = False, max(2 * count, FEWEST_TOGETHER)

    def lose_engine(self, time_s: float) -> None:
        """The engine is lost at `time_s`: iterations that have not ended by then never do. The loop is of no use
        afterwards, and its requests have not ended."""
        ran, self._held, self._held_together = self._held_together, None, None
        if ran is not None:
            self._complete_before(ran, tick(time_s))
        self._in_flight.clear()

    def _complete_before(self, ran: RanTogether, time_ns: int) -> None:
        """Take in those iterations, and in flight before them, that are collected before `time_ns`."""
        times = ran.times
        collected = times.collected_before(time_ns)
        count = collected - len(self._in_flight)
        if count > 0:
            del times.start_ns[count:], times.submit_ns[count:], times.collect_ns[collected:]
            self._complete_together(ran)
        else:
            self._complete_at(times.collect_ns[:collected])

    # What a step does in another way.

    def _admits_again(self) -> bool:
        """What the answers to refused requests let arrive at this very time is admitted, too."""
        if self._refused[0] == self._known_refused:
            return False
        self._known_refused, self._quiet_until_s = self._refused[0], -math.inf
        return True

    def _complete_all_but(self, count: int) -> None:
        """Collect the oldest iteration in flight, and hold it; end the step if only so many are left. EngineLost, with
        all requests as they were, if the newest one could not be submitted because of that."""
        if self._in_flight and isinstance(lost := self._in_flight[-1].error, EngineLost):
            raise lost
        if len(self._in_flight) <= count:
            self._end_step()
            return
        iteration = self._in_flight.popleft()
        outputs = self._collect(iteration)
        end_s = self._clock.now()

        def complete() -> None:
            self._complete(iteration, outputs, end_s)
            self._complete_all_but(count)

        self._held = complete

    def _num_together(self, plan: Plan) -> int:
        if self._ran_all:
            self._ran_all, self._max_together = False, min(2 * self._max_together, MAX_ITERATIONS_AT_ONCE)
        return min(super()._num_together(plan), self._max_together)

    def _run_device(
        self,
        device: PredictableExecutor,
        works: list[IterationWork],
        count: int,
        number: int,
        change_ns: int | None = None,
    ) -> PredictedTimes:
        if self.may_be_interrupted and count > 1:
            self._device_before = device.state()
        times = super()._run_device(device, works, count, number, change_ns)
        self._ran_all = len(times.start_ns) == self._max_together
        return times

    def _take_together(self, ran: RanTogether) -> None:
        self._held, self._held_together = lambda: self._complete_together(ran), ran


def _num_begun(ran: RanTogether, time_ns: int) -> int:
    """How many of these iterations start before `time_ns`; the first one does at least."""
    return max(bisect_left(ran.times.start_ns, time_ns), 1)
