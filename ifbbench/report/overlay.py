"""Charts of several runs: their figures in one set of axes, and their requests over time one above the other."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ifbbench.analysis.number_texts import significant, time_unit
from ifbbench.analysis.token_times import inter_token_gaps, output_tokens, span_ends
from ifbbench.analysis.words import words_of
from ifbbench.report.cells import request_order
from ifbbench.report.chart_files import Output
from ifbbench.report.colours import INK, LIMIT_COLOURS, MUTED, PAUSE
from ifbbench.report.figure_files import save
from ifbbench.report.style import (
    MAX_BINS,
    WIDTH,
    TimeBins,
    in_percent,
    line_styles,
    retitle,
    round_ticks,
    steps,
    styled,
    title,
)
from ifbbench.report.timeline import MAX_ROWS_WITH_MARKS, draw_bars, draw_population, pause_handle, phase_handles
from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import Floats, RunData

# Settings that name a place or a clean-up rather than what was run.
NOT_COMPARED = frozenset({"output", "overwrite", "quiet", "output_csv", "responses_json", "recording_format"})
MAX_CURVE_POINTS = 2000
LOG_FROM_RATIO = 10
MAX_RUNS = 8
OVERLAYS = {
    "overlay": "throughput, queue, KV use and latencies of several runs in one set of axes",
    "schedules": "requests over time of several runs, one above the other on one axis",
}


def run_labels(runs: Sequence[RunData]) -> list[str]:
    """What tells each run from the others: the settings that differ; else its name, or its directory."""
    configs = [run.config for run in runs]
    differing = [
        name
        for name in dict.fromkeys(name for config in configs for name in config)
        if name not in NOT_COMPARED and len({str(config.get(name)) for config in configs}) > 1
    ]
    labels = [", ".join(_value(name, config.get(name)) for name in differing[:3]) for config in configs]
    if len(set(labels)) < len(runs) or len(differing) > 3:
        labels = [run.name for run in runs]
    return labels if len(set(labels)) == len(runs) else [str(run.path) for run in runs]


def _value(name: str, value: object) -> str:
    return str(value) if name in ("engine", "policy", "device", "model", "type") else f"{name} {value}"


def plot_overlay(runs: Sequence[RunData], output: Output, only: Sequence[str] = ()) -> list[Path]:
    """Draw the charts of several runs into the directory of `output`; returns the files written."""
    assert output.directory is not None
    written: list[Path] = []
    with styled():
        for name, draw in {"overlay": draw_overlay, "schedules": draw_schedules}.items():
            if not only or name in only:
                figure = draw(runs)
                if output.title:
                    retitle(figure, output.title)
                written += save(figure, output.directory, name, output.formats, output.dpi)
    return written


def _common_bins(runs: Sequence[RunData]) -> list[TimeBins]:
    """Bins for each run with the same edges, so that their axes agree."""
    own = [TimeBins.of(run) for run in runs]
    edges = np.linspace(min(one.edges_s[0] for one in own), max(one.edges_s[-1] for one in own), MAX_BINS + 1)
    return [TimeBins(one.clock, edges) for one in own]


def draw_overlay(runs: Sequence[RunData]) -> Figure:
    """Output tokens per second, the batch, the queue and KV use over time; distributions of TTFT, ITL and E2E."""
    labels, bins = run_labels(runs), _common_bins(runs)
    figure = Figure(figsize=(13, 7.6))
    grid = figure.add_gridspec(12, 2, width_ratios=[3, 2])
    over_time = [figure.add_subplot(grid[3 * index : 3 * index + 3, 0]) for index in range(4)]
    shares = [figure.add_subplot(grid[4 * index : 4 * index + 4, 1]) for index in range(3)]
    names = ("output\ntokens/s", "requests in\nthe batch", "requests\nwaiting", "KV cache used\n(share of pool)")
    for run, label, own, style in zip(runs, labels, bins, line_styles(len(runs), dashed=False), strict=True):
        table = run.iterations
        blocks, pool, _ = run.blocks_of_fullest()
        used = own.peaks(blocks) / pool if pool > 0 else None
        series = (
            own.rates(output_tokens(run)),
            own.means(table["scheduled_requests"].to_numpy(dtype=float)),
            own.means(run.requests_waiting),
            used,
        )
        ended = own.edges_s[:-1] >= own.clock.end_s.max()
        for axes, values in zip(over_time, series, strict=True):
            if values is not None:
                steps(axes, np.where(ended, np.nan, values), own.edges, baseline=None, label=label, **style)
        values_s = (
            run.completed["ttft_s"].dropna().to_numpy(dtype=float),
            np.empty(0) if run.recorded_every > 1 else inter_token_gaps(run),
            run.completed["e2e_s"].dropna().to_numpy(dtype=float),
        )
        for axes, seconds in zip(shares, values_s, strict=True):
            _curve(axes, seconds, style)
    for axes, name in zip(over_time, names, strict=True):
        axes.set_ylabel(name)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        round_ticks(axes.yaxis, 4)
        bins[0].label(axes)
        if axes is not over_time[-1]:
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)
    round_ticks(over_time[-1].yaxis, text=in_percent)
    for axes, name in zip(shares, ("TTFT", "ITL", "E2E"), strict=True):
        _latency_axis(axes, name)
    handles, known = over_time[0].get_legend_handles_labels()
    over_time[0].legend(handles, known, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
    _title(over_time[0], "Runs compared", runs[0], room=15)
    figure.align_ylabels(over_time)
    return figure


def _title(top: Axes, what: str, run: RunData, room: float) -> None:
    """The title of a chart of several runs: the settings that differ are not in it."""
    trace, model = run.run.get("trace") or {}, run.run.get("model") or {}
    where = " on ".join(str(name) for name in (model.get("name"), model.get("device")) if name)
    title(top, f"{what}: {', '.join(filter(None, (trace.get('name') or run.name, where)))}", room=room)


def _curve(axes: Axes, seconds: Floats, style: Mapping[str, Any]) -> None:
    """The share of values up to each one."""
    values = np.sort(seconds)
    if values.size:
        indices = np.unique(np.linspace(0, len(values) - 1, min(len(values), MAX_CURVE_POINTS)).astype(int))
        axes.plot(values[indices], indices / max(len(values) - 1, 1), **style)


def _latency_axis(axes: Axes, name: str) -> None:
    """Scale and label the axis of a latency that was drawn in seconds."""
    drawn = [np.asarray(line.get_xdata(), dtype=float) for line in axes.lines]
    values = np.concatenate(drawn) if drawn else np.array([1.0])
    unit, scale = time_unit([float(np.median(values))])
    for line in axes.lines:
        line.set_xdata(np.asarray(line.get_xdata(), dtype=float) * scale)
    axes.relim()
    axes.autoscale_view()
    if values.min() > 0 and values.max() / values.min() >= LOG_FROM_RATIO:
        axes.set_xscale("log")
    round_ticks(axes.xaxis)
    axes.set(xlabel=f"{name} ({unit})", ylim=(0, 1.04), ylabel="share of values")
    round_ticks(axes.yaxis, text=in_percent)
    axes.grid(visible=True, axis="both")


def draw_schedules(runs: Sequence[RunData]) -> Figure:
    """The requests of each run over time, one run above the other on one axis, each with its batch below: a row a
    request, or the number in each phase."""
    labels, bins = run_labels(runs), _common_bins(runs)
    requests = [request_order(run) for run in runs]
    as_rows = max(map(len, requests)) <= MAX_ROWS_WITH_MARKS
    height = float(np.clip(0.022 * max(map(len, requests)), 2.6, 5.5)) if as_rows else 2.6
    figure = Figure(figsize=(WIDTH, (height + 1.6) * len(runs) + 1.0))
    panels = figure.subplots(2 * len(runs), 1, sharex=True, gridspec_kw={"height_ratios": [height, 1.0] * len(runs)})
    batches = [
        own.means(run.iterations["scheduled_requests"].to_numpy(dtype=float))
        for run, own in zip(runs, bins, strict=True)
    ]
    highest = max(float(batch.max()) for batch in batches)
    population = max(float(own.covered(run.spans, span_ends(run)).max()) for run, own in zip(runs, bins, strict=True))
    seen: list[str] = []
    colour = LIMIT_COLOURS["batch_size"]
    for index, (run, label, own, batch) in enumerate(zip(runs, labels, bins, batches, strict=True)):
        upper, lower = panels[2 * index], panels[2 * index + 1]
        if as_rows:
            draw_bars(upper, own, run, requests[index], legend=False)
            seen += run.spans["phase"].unique().tolist()
        else:
            seen += draw_population(upper, own, run, population)
        steps(lower, batch, own.edges, fill=True, color=colour, alpha=0.35, linewidth=0)
        steps(lower, batch, own.edges, baseline=None, color=colour, linewidth=1)
        lower.set(ylim=(0, highest * 1.25), ylabel="requests in\nthe batch")
        _pause_marks(lower, own, run)
        upper.annotate(
            label,
            (0, 1),
            xycoords="axes fraction",
            xytext=(0, 5),
            textcoords="offset points",
            fontsize=10,
            fontweight="bold",
            color=INK,
        )
        upper.annotate(
            _facts(run),
            (1, 1),
            xycoords="axes fraction",
            xytext=(0, 5),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=MUTED,
        )
    bins[0].label(panels[-1])
    handles = phase_handles(runs[0], seen, counts=False)
    if as_rows and "paused" in seen:
        handles.append(pause_handle(runs[0]))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    _title(panels[0], "Requests over time", runs[0], room=15)
    figure.align_ylabels()
    return figure


def _pause_marks(axes: Axes, bins: TimeBins, run: RunData) -> None:
    """A tick for each iteration that paused a request."""
    paused = run.iterations["pauses"].to_numpy(dtype=float) > 0
    if paused.any():
        times = bins.scaled(bins.clock.start_s[paused])
        axes.plot(
            times,
            np.full(len(times), 0.94),
            "|",
            transform=axes.get_xaxis_transform(),
            color=PAUSE,
            markersize=6,
            markeredgewidth=0.8,
        )
        axes.annotate(
            words_of(run.config).pauses,
            (1, 0.94),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            color=PAUSE,
            fontsize=8,
            va="center",
        )


def _facts(run: RunData) -> str:
    """Pauses, batch, throughput and TTFT of a run in a line."""
    known, batch = figures(run), run.iterations["scheduled_requests"]
    ttft_s = (known.get("ttft_s") or {}).get("p50")
    unit, scale = time_unit([ttft_s])
    return (
        f"{int(run.iterations['pauses'].sum()):,} {words_of(run.config).pauses} · "
        f"up to {int(batch.max()):,} requests in the batch · "
        f"{significant(known.get('output_throughput_tokens_per_s'))} output tokens/s · "
        f"TTFT p50 {significant(ttft_s, scale)} {unit}"
    )
