"""Two sets of repeats (`run --repeat`) side by side: means of figures, with the interval of their difference over
repeats."""

from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from ifbbench.analysis.figures import Figure, numbers_of
from ifbbench.errors import InputError
from ifbbench.recording.run_directory import REPEATS_FILE
from ifbbench.report.confidence import CONFIDENCE, student_t
from ifbbench.report.load import RunData, find_runs, load_run


def is_repeats(directory: Path) -> bool:
    return (directory / REPEATS_FILE).is_file()


class RepeatsComparison:
    """The repeats in directory `b` compared with those in `a`."""

    def __init__(self, a: Path, b: Path) -> None:
        self.a, self.b = a, b
        self.runs = [_completed(directory) for directory in (a, b)]

    @property
    def same_schedule(self) -> bool:
        """Whether every repeat decided the same as the one of the same number."""
        digests = [[run.run.get("schedule_digest") for run in runs] for runs in self.runs]
        return digests[0] == digests[1]

    @property
    def figures(self) -> dict[str, Figure]:
        """The mean of each number of `summary.json` over the repeats. The interval of a difference is Welch's, for
        sides of different variances."""
        tables = [[dict(numbers_of(run.summary or {})) for run in runs] for runs in self.runs]
        found = {}
        for name in tables[0][0]:
            sides = [[table[name] for table in side if name in table] for side in tables]
            if all(sides):
                found[name] = Figure(fmean(sides[0]), fmean(sides[1]), *_welch(sides[0], sides[1]))
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON; repeats have no decisions or requests of their own."""
        return {
            "a": str(self.a), "b": str(self.b), "repeats": [len(runs) for runs in self.runs],
            "identical": self.same_schedule and all(one.a == one.b for one in self.figures.values()),
            "same_schedule": self.same_schedule, "first_divergence": None,
            "figures": {name: figure.as_dict() for name, figure in self.figures.items()},
        }  # fmt: skip


def _completed(directory: Path) -> list[RunData]:
    runs = [run for run in map(load_run, find_runs(directory)) if run.summary is not None and not run.partial]
    if not runs:
        raise InputError(f"{directory}: no repeat was completed. Run it again.")
    return runs


def _welch(a: list[float], b: list[float]) -> tuple[float, float] | tuple[()]:
    """The confidence interval of the difference of the means; none with fewer than two values on a side."""
    if min(len(a), len(b)) < 2:
        return ()
    parts = variance(a) / len(a), variance(b) / len(b)
    total = sum(parts)
    difference = fmean(b) - fmean(a)
    if not total:
        return difference, difference
    degrees = total**2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    half_width = student_t(CONFIDENCE, max(int(degrees), 1)) * sqrt(total)
    return difference - half_width, difference + half_width
