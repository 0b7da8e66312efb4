"""The picture of `ifbbench tune`: throughput against latency of every candidate, and the Pareto front."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from ifbbench.report import time_unit
from ifbbench.report.style import LIMIT, LIMIT_DASHES, MUTED, SERIES, save, styled, thousands, title


class Point(NamedTuple):
    """A candidate: its latency (s), output tokens/s, and whether it meets the objectives."""

    latency_s: float
    tokens_per_s: float
    meets: bool


def plot_candidates(
    points: Sequence[Point], front: Sequence[Point], named: dict[str, Point], latency_name: str,
    target_s: float | None, subtitle: str, directory: Path,
) -> Path:  # fmt: skip
    """Write `pareto.png` (and .svg). front: in order of latency. named: points with a label. target_s: objective."""
    unit, scale = time_unit([point.latency_s for point in points])
    with styled():
        figure = Figure(figsize=(7.2, 4.4))
        axes = figure.add_subplot()
        for meets, label, colour in ((False, "misses an objective", "#C4C4C4"), (True, "candidate", SERIES[0])):
            some = [point for point in points if point.meets is meets]
            axes.scatter([point.latency_s * scale for point in some], [point.tokens_per_s for point in some], s=22,
                         color=colour, label=label if some else None, linewidths=0)  # fmt: skip
        line = [point.latency_s * scale for point in front], [point.tokens_per_s for point in front]
        axes.plot(*line, color=SERIES[0], linewidth=1.2, label="Pareto front")
        for number, (name, point) in enumerate(named.items()):
            at = (point.latency_s * scale, point.tokens_per_s)
            axes.scatter(*at, s=80, facecolors="none", edgecolors=SERIES[number % 3 + 1], linewidths=1.6, label=name)
        if target_s is not None:
            axes.axvline(target_s * scale, color=LIMIT, linewidth=1, linestyle=LIMIT_DASHES, label="objective")
        axes.set_xlabel(f"{latency_name} ({unit})")
        axes.set_ylabel("output tokens/s")
        axes.set_ylim(bottom=0)
        axes.grid(axis="x", color="#E3E3E3")
        thousands(axes.yaxis)
        axes.tick_params(colors=MUTED)
        axes.legend(loc="lower right")
        title(axes, "Throughput against latency of the settings that were tried", subtitle)
        return save(figure, directory, "pareto")[0]
