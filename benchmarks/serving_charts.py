"""Charts of predicted against measured figures of servers: all rows, and errors by regime."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.serving_rows import Comparison
from ifbbench.report.colours import INK, MUTED, SERIES
from ifbbench.report.style import in_percent, round_ticks, styled, title

SCALES = {"itl": (1000.0, "ITL (ms)"), "ttft": (1000.0, "TTFT (ms)"), "throughput": (1.0, "output tokens/s")}
ENGINES = {"tensorrt-llm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}
BAND = 0.2
CLIENTS = (8, 16, 32, 64, 128)
DEGREES = (1, 2, 4, 8)
MAX_ERROR = 1.0


def draw(comparisons: Sequence[Comparison], directory: Path, part: str) -> None:
    """Write the pictures of the fit or of the judged rows: serving-accuracy-PART.png and serving-regimes-PART.png."""
    directory.mkdir(parents=True, exist_ok=True)
    with styled():
        figure = Figure(figsize=(10, 3.9))
        for axes, metric in zip(figure.subplots(1, 3), SCALES, strict=True):
            _scatter(axes, [one for one in comparisons if one.metric == metric], metric)
        figure.savefig(directory / f"serving-accuracy-{part}.png", metadata={"Software": None})
        figure = Figure(figsize=(10, 6.2))
        rows = figure.subplots(2, 3, sharey=True)
        for index, metric in enumerate(SCALES):
            chosen = [one for one in comparisons if one.metric == metric]
            _strips(
                rows[0][index],
                {str(n): [one for one in chosen if one.row.get("concurrency") == n] for n in CLIENTS},
                "clients",
            )
            _strips(
                rows[1][index], {str(n): [one for one in chosen if one.row["num_gpus"] == n] for n in DEGREES}, "GPUs"
            )
            title(rows[0][index], f"Error of {metric.upper() if metric != 'throughput' else metric}")
        for row in rows:
            row[0].set_ylabel("predicted over measured, less 1")
        figure.savefig(directory / f"serving-regimes-{part}.png", metadata={"Software": None})


def _scatter(axes: Axes, chosen: Sequence[Comparison], metric: str) -> None:
    """Predicted over measured, with the line of equal values and the band within BAND."""
    factor, label = SCALES[metric]
    if not chosen:
        return
    measured = factor * np.array([one.measured for one in chosen])
    predicted = factor * np.array([one.predicted for one in chosen])
    ends = np.array([min(measured.min(), predicted.min()) / 1.3, max(measured.max(), predicted.max()) * 1.3])
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color=MUTED, alpha=0.13, linewidth=0)
    axes.plot(ends, ends, color=INK, linewidth=0.9)
    for (engine, name), colour in zip(ENGINES.items(), SERIES, strict=False):
        own = np.array([one.row["engine"] == engine for one in chosen], bool)
        axes.scatter(measured[own], predicted[own], s=10, color=colour, alpha=0.6, linewidths=0, label=name, zorder=3)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal", xlabel="measured", ylabel="predicted")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(visible=True, axis="both")
    error = np.median(np.abs(predicted / measured - 1))
    title(axes, label, f"{len(chosen)} rows, median error {100 * error:.1f} %")
    axes.legend(loc="upper left", handletextpad=0.2)


def _strips(axes: Axes, groups: dict[str, list[Comparison]], label: str) -> None:
    """The error of each row by regime, spread sideways, and its median."""
    jitter = np.random.default_rng(0)
    for place, chosen in enumerate(groups.values()):
        for (engine, _), colour in zip(ENGINES.items(), SERIES, strict=False):
            found = np.array([min(one.error, MAX_ERROR) for one in chosen if one.row["engine"] == engine])
            places = place + jitter.uniform(-0.3, 0.3, len(found))
            axes.scatter(places, found, s=8, color=colour, alpha=0.5, linewidths=0)
        if chosen:
            centre = float(np.median([one.error for one in chosen]))
            axes.plot([place - 0.35, place + 0.35], [centre, centre], color=INK, linewidth=1.6)
    axes.axhspan(-BAND, BAND, color=MUTED, alpha=0.13, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.7)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set(xlabel=label, ylim=(-MAX_ERROR, MAX_ERROR * 1.03))
    round_ticks(axes.yaxis, text=in_percent)
