"""Conversations of several turns: when each turn comes, and which conversation it belongs to."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ifbbench.workload.arrivals import ArrivalProcess
from ifbbench.workload.distributions import LengthDistribution
from ifbbench.workload.durations import DurationDistribution
from ifbbench.workload.streams import Stream, generator


@dataclass(frozen=True)
class Session:
    """One conversation: its first turn as a number among all turns drawn, and when each of its turns comes (s)."""

    first_turn: int
    arrivals_s: tuple[float, ...]

    @property
    def turns(self) -> range:
        """The numbers of its turns among all drawn."""
        return range(self.first_turn, self.first_turn + len(self.arrivals_s))


@dataclass(frozen=True)
class Sessions:
    """Conversations of `turns` turns. A turn comes `think_time` seconds after the one before it came, answered or not.

    A longer drawing begins with the conversations of a shorter one, of which the last may have been cut off.
    """

    turns: LengthDistribution
    think_time: DurationDistribution

    def draw(self, seed: int, num_turns: int, starts: ArrivalProcess) -> Iterator[Session]:
        """Conversations of `num_turns` turns in all, which begin at the times that `starts` draws."""
        counts = self.turns.draw(generator(seed, Stream.TURNS), num_turns)
        ends = np.minimum(np.cumsum(counts), num_turns)
        ends = ends[: int(np.searchsorted(ends, num_turns)) + 1]
        starts_s = starts.draw(generator(seed, Stream.ARRIVAL), len(ends)).tolist()
        think_s = self.think_time.draw(generator(seed, Stream.THINK_TIME), num_turns)
        first_turn = 0
        for start_s, end in zip(starts_s, ends.tolist(), strict=True):
            waits_s = np.concatenate(([start_s], think_s[first_turn + 1 : end]))
            yield Session(first_turn, tuple(np.cumsum(waits_s).tolist()))
            first_turn = end
