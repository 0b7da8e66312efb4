"""Iterations on an axis of time: per-iteration amounts gathered into bins narrow enough to see, wide enough to draw."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from ifbbench.report.charts.style import thousands
from ifbbench.report.load import RunData
from ifbbench.report.token_times import IterationClock
from ifbbench.report.units import significant, time_unit

MOST_BINS = 150
MOST_ITERATIONS_SHOWN_SINGLY = 200

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TimeBins:
    """Consecutive stretches of a run's time: its iterations and the gaps between them, or even bins if there are many.

    `edges_s` has one element more than there are bins.
    """

    clock: IterationClock
    edges_s: Floats

    @classmethod
    def of(cls, run: RunData) -> "TimeBins":
        """The bins for the charts of `run`, which has iterations."""
        clock = IterationClock.of(run)
        if len(clock.numbers) <= MOST_ITERATIONS_SHOWN_SINGLY:
            edges = np.unique(np.concatenate([clock.start_s, clock.end_s]))
        else:
            edges = np.linspace(clock.start_s[0], clock.end_s.max(), MOST_BINS + 1)
        if len(edges) < 2 or edges[-1] <= edges[0]:
            # An executor that answers at once on a virtual clock takes no time at all.
            edges = np.array([clock.start_s[0], clock.start_s[0] + 1e-3])
        return cls(clock, edges)

    @cached_property
    def unit(self) -> tuple[str, float]:
        """The axis's unit and how many of it make a second."""
        return time_unit([float(self.edges_s[-1])])

    @property
    def singly(self) -> bool:
        """Whether each iteration has a bin of its own."""
        return len(self.clock.numbers) <= MOST_ITERATIONS_SHOWN_SINGLY

    @property
    def width(self) -> str:
        """The width of an even bin, in words."""
        unit, scale = time_unit([float(self.edges_s[1] - self.edges_s[0])])
        return f"{significant(float(self.edges_s[1] - self.edges_s[0]) * scale)} {unit}"

    @property
    def edges(self) -> Floats:
        """The edges in the axis's unit."""
        return self.scaled(self.edges_s)

    def scaled(self, seconds: Floats) -> Floats:
        """Seconds in the axis's unit."""
        return seconds * self.unit[1]

    def rates(self, amounts: Floats) -> Floats:
        """Per-iteration amounts (tokens) as amount per second in each bin, an iteration's spread over its time."""
        total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(amounts))])
        times = np.column_stack([self.clock.start_s, self.clock.end_s]).ravel()
        known = np.column_stack([total[:-1], total[1:]]).ravel()
        gathered: Floats = np.diff(np.interp(self.edges_s, times, known)) / np.diff(self.edges_s)
        return gathered

    def means(self, values: Floats) -> Floats:
        """Per-iteration values (a count of requests) averaged over the time of each bin; 0 between iterations."""
        return self.rates(values * (self.clock.end_s - self.clock.start_s))

    def peaks(self, values: Floats) -> Floats:
        """The largest per-iteration value of each bin; a bin in which no iteration ended keeps the value before it."""
        bins = np.clip(np.searchsorted(self.edges_s, self.clock.end_s) - 1, 0, len(self.edges_s) - 2)
        peaks = np.full(len(self.edges_s) - 1, -1.0)
        np.maximum.at(peaks, bins, np.nan_to_num(values))
        last_known = np.maximum.accumulate(np.where(peaks >= 0, np.arange(len(peaks)), 0))
        return np.asarray(np.maximum(peaks[last_known], 0.0), dtype=float)

    def label(self, axes: Axes) -> None:
        """Name the time axis, which spans the run."""
        axes.set_xlabel(f"time since the start of the run ({self.unit[0]})")
        thousands(axes.xaxis)
        axes.set_xlim(min(0.0, float(self.edges[0])), float(self.edges[-1]))
