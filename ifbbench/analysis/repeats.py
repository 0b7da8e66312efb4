"""Two sets of runs with several seeds side by side: means of figures, with the interval of their difference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from ifbbench.analysis.confidence import Margin, combined, half_width, half_width_of_difference
from ifbbench.analysis.figures import Figure, compared_figures, numbers_of
from ifbbench.errors import InputError
from ifbbench.rundir.reader import find_runs, load_run
from ifbbench.rundir.run_directory import REPEATS_FILE


def is_repeats(directory: Path) -> bool:
    return (directory / REPEATS_FILE).is_file()


@dataclass(frozen=True)
class Repeats:
    """Runs with the same settings.

    seeds, summaries, digests: one of each run, which reached its end; digests of all decisions are None where they were
        not recorded.
    """

    path: Path
    seeds: Sequence[int]
    summaries: Sequence[Mapping[str, Any]]
    digests: Sequence[str | None]

    @classmethod
    def load(cls, directory: Path) -> "Repeats":
        """The runs of `run --repeat` that were completed. InputError if there are none."""
        runs = [run for run in map(load_run, find_runs(directory)) if run.summary is not None and not run.partial]
        if not runs:
            raise InputError(f"{directory}: no repeat was completed. Run it again.")
        return cls(
            directory,
            [run.config["seed"] for run in runs],
            [run.summary or {} for run in runs],
            [run.run.get("schedule_digest") for run in runs],
        )

    @property
    def are_equal(self) -> bool:
        """Whether several seeds gave the same figures, so that nothing in the run depends on them."""
        return len(self.summaries) > 1 and all(one == self.summaries[0] for one in self.summaries)


class RepeatsComparison:
    """The repeats `b` compared with `a`.

    Repeats with the same seed have the same requests wherever the settings that draw them are the same. So their
    differences are taken seed by seed: what the requests add to both sides drops out."""

    def __init__(self, a: Repeats, b: Repeats) -> None:
        self.a, self.b = a, b

    @property
    def same_schedule(self) -> bool:
        """Whether every repeat decided the same as the one of the same number; without digests, whether all figures are
        the same."""
        return self.a.digests == self.b.digests if all((*self.a.digests, *self.b.digests)) else self.identical

    @property
    def identical(self) -> bool:
        """Whether all figures are the same."""
        return all(one.a == one.b for one in self.figures.values())

    @property
    def is_paired(self) -> bool:
        """Whether both sides have the same seeds."""
        return sorted(self.a.seeds) == sorted(self.b.seeds) and len(set(self.a.seeds)) == len(self.a.seeds)

    @property
    def interval_of(self) -> str:
        """What the intervals are of, in words."""
        counts = [len(side.seeds) for side in (self.a, self.b)]
        if min(counts) < 2:
            return "No intervals: a mean over one seed has none."
        if self.a.are_equal or self.b.are_equal:
            return "No intervals: the seed changes nothing, because the requests and their arrivals are recorded."
        if self.is_paired:
            return f"Means of {counts[0]} repeats. 95 % intervals: Student's t over the differences of equal seeds."
        return f"Means of {counts[0]} and {counts[1]} repeats. 95 % intervals: Welch's t, because the seeds differ."

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """The mean of each number of `summary.json` over the repeats."""
        means = [combined(side.summaries, fmean) for side in (self.a, self.b)]
        return compared_figures(means[0], means[1], self._margins())

    def _margins(self) -> dict[str, Margin]:
        if self.a.are_equal or self.b.are_equal:
            return {}
        by_seed = [
            {seed: dict(numbers_of(summary)) for seed, summary in zip(side.seeds, side.summaries, strict=True)}
            for side in (self.a, self.b)
        ]
        found = {}
        for name in {name for of_seed in by_seed[0].values() for name in of_seed}:
            a, b = ({seed: figures[name] for seed, figures in side.items() if name in figures} for side in by_seed)
            if self.is_paired and a.keys() == b.keys():
                half = half_width([b[seed] - a[seed] for seed in a])
            else:
                half = half_width_of_difference([*a.values()], [*b.values()])
            if half is not None:
                found[name] = Margin(half)
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON; repeats have no decisions or requests of their own."""
        return {
            "a": str(self.a.path),
            "b": str(self.b.path),
            "repeats": [len(self.a.seeds), len(self.b.seeds)],
            "identical": self.same_schedule and self.identical,
            "same_schedule": self.same_schedule,
            "first_divergence": None,
            "interval_of": self.interval_of,
            "figures": {name: figure.as_dict() for name, figure in self.figures.items()},
        }
