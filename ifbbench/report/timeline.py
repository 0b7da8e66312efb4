"""The scheduler timeline: cells while letters are legible, else bars, or requests aligned at their arrival."""

from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ifbbench.analysis.number_texts import time_unit
from ifbbench.analysis.token_times import IterationClock, span_ends, token_times
from ifbbench.analysis.words import Words, words_of
from ifbbench.report.cells import draw_cells, fits_cells, request_order
from ifbbench.report.colours import INK, MUTED, PAUSE, PHASE_COLOURS
from ifbbench.report.phase_image import draw_phase_image
from ifbbench.report.style import WIDTH, TimeBins, boxes, draw_limit, heading, legend_above, round_ticks, stack, steps
from ifbbench.rundir.reader import RunData

# Later ones are drawn over earlier ones, so that the common and long phases do not hide the rare and short.
DRAWING_ORDER = ("waiting", "generation", "skipped", "paused", "context", "recompute")
# From the axis up: what a request holds resources for, then what it does not.
STACKING_ORDER = ("generation", "context", "recompute", "skipped", "paused", "waiting")
BAR_HEIGHT = 0.03
PAUSE_MARK: dict[str, Any] = {
    "marker": ">",
    "color": PAUSE,
    "markersize": 6,
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
}
# Up to so many requests, a gap between their rows is visible, and a pause is marked.
MAX_NAMED_ROWS = 40
MAX_ROWS_WITH_GAPS, MAX_ROWS_WITH_MARKS = 120, 400
# With more requests, or where the median request takes less than this share of the run, a bar would be a hairline.
MAX_BARS = 1000
HAIRLINE_SHARE = 1 / 60
FEW = 60
# Beyond this an SVG of outlines is slow to open; the bars alone become an image in it.
MAX_SPANS_AS_OUTLINES = 20_000
# Columns of cells in the picture of requests from their arrival, and the percentile of E2E that it reaches.
ALIGNED_COLUMNS, REACHED = 700, 99.0


def draw_timeline(run: RunData) -> Figure:
    """One row a request, one column an iteration; on an axis of time if there are too many of either for letters; of
    many requests how many are in each phase, and what each did from its arrival on."""
    if run.endpoint is None and fits_cells(run):
        return draw_cells(run)
    requests = request_order(run)
    return _draw_many(run) if _is_large(run, len(requests)) else _draw_bars(run, requests)


def _title(run: RunData) -> str:
    return "Request timeline" if run.endpoint else "Scheduler timeline"


def _is_large(run: RunData, requests: int) -> bool:
    if requests > MAX_BARS or requests <= FEW:
        return requests > MAX_BARS
    lives = run.completed["e2e_s"].median()
    clock = IterationClock.of(run)
    return bool(lives < HAIRLINE_SHARE * (clock.end_s[-1] - clock.start_s[0]))


def phase_names(run: RunData) -> dict[str, str]:
    """The phases in a legend, in its order."""
    words = words_of(run.config)
    names = {
        "context": "context",
        "generation": "generation",
        "recompute": f"recompute after a {words.pause}",
        "paused": words.paused,
        "waiting": "waiting",
        "skipped": "generation skipped" if words.skipped == Words.skipped else words.phase("skipped"),
    }
    if run.endpoint:  # a client cannot tell the queue of a server from its context phase
        return names | {"waiting": "not sent yet", "context": "until the first token"}
    # In a static batch a request that does not run is complete, and its slot is empty.
    return names | ({"skipped": "empty slot"} if run.config.get("type") == "v1" else {})


def pause_handle(run: RunData) -> Line2D:
    """The key of the mark of a pause."""
    return Line2D([], [], linestyle="", label=words_of(run.config).pause, **PAUSE_MARK)


def phase_handles(run: RunData, seen: Collection[str], counts: bool = True) -> list[Artist]:
    """The key of the phases. counts: with the number of pauses."""
    pauses = int(run.iterations["pauses"].sum())
    times = {"paused": f" ({pauses:,} time{'s' if pauses > 1 else ''})"} if pauses and counts else {}
    return [
        Patch(color=PHASE_COLOURS[phase], label=name + times.get(phase, ""))
        for phase, name in phase_names(run).items()
        if phase in seen
    ]


def _draw_bars(run: RunData, requests: list[str]) -> Figure:
    """Phases of each request as horizontal bars above, the tokens in the batch over time below."""
    bins, height = TimeBins.of(run), float(np.clip(BAR_HEIGHT * len(requests), 3.5, 9))
    figure = Figure(figsize=(WIDTH, height + 2.6))
    phases, tokens = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [height, 1.3]})
    draw_bars(phases, bins, run, requests)
    _tokens(tokens, bins, run)
    bins.label(tokens)
    heading(phases, _title(run), run, legend=True)
    return figure


def _tokens(axes: Axes, bins: TimeBins, run: RunData) -> None:
    if run.endpoint:
        times_s = np.concatenate([np.empty(0), *token_times(run).values()])
        rates = np.histogram(times_s, bins.edges_s)[0] / np.diff(bins.edges_s)
        steps(axes, rates, bins.edges, fill=True, color=PHASE_COLOURS["generation"], linewidth=0)
        axes.set(ylabel="output tokens/s", ylim=(0, float(rates.max()) * 1.1 or 1.0))
        round_ticks(axes.yaxis)
        return
    used = run.iterations["budget_used"].to_numpy(dtype=float)
    context = np.minimum(run.iterations["total_context_tokens"].to_numpy(dtype=float), used)
    layers = {"generation": bins.means(used - context), "context": bins.means(context)}
    total = stack(axes, bins.edges, layers, PHASE_COLOURS, phase_names(run))
    draw_limit(axes, run, "num_tokens", float(total.max()))
    axes.set_ylabel("tokens in the batch,\nmean over time")
    round_ticks(axes.yaxis, 4, whole=True)


def draw_bars(axes: Axes, bins: TimeBins, run: RunData, requests: list[str], legend: bool = True) -> None:
    """A row a request, a bar a span."""
    rows = {request: row for row, request in enumerate(requests)}
    seen = [phase for phase in DRAWING_ORDER if (run.spans["phase"] == phase).any()]
    height = 0.78 if len(requests) <= MAX_ROWS_WITH_GAPS else 1.0
    for phase in seen:
        spans = run.spans[run.spans["phase"] == phase]
        left = bins.scaled(bins.clock.starts(spans["first_iteration"]))
        right = bins.scaled(bins.clock.ends(spans["last_iteration"]))
        top = spans["request_id"].map(rows).to_numpy(dtype=float) - height / 2
        # A hairline in the bar's own colour keeps a context of one short iteration visible.
        width = 0.5 if phase in ("context", "recompute", "paused") else 0.0
        is_large = len(run.spans) > MAX_SPANS_AS_OUTLINES
        boxes(axes, left, right, top, height, PHASE_COLOURS[phase], linewidths=width, rasterized=is_large)
    if "paused" in seen and len(requests) <= MAX_ROWS_WITH_MARKS:
        paused = run.spans[run.spans["phase"] == "paused"]
        axes.plot(
            bins.scaled(bins.clock.starts(paused["first_iteration"])),
            paused["request_id"].map(rows),
            linestyle="",
            zorder=3,
            **PAUSE_MARK,
        )
    axes.set(ylim=(max(len(requests), 1) - 0.5, -0.5), ylabel="request, in trace order")
    if len(requests) <= MAX_NAMED_ROWS:
        axes.set_yticks(range(len(requests)), requests, fontsize=7 if len(requests) > MAX_NAMED_ROWS // 2 else 8)
        axes.set_ylabel("request")
    else:
        round_ticks(axes.yaxis, 8, whole=True)
    axes.grid(visible=False)
    if legend:
        handles = phase_handles(run, seen)
        if axes.lines:
            handles.append(pause_handle(run))
        legend_above(axes, len(handles), handles)


def _draw_many(run: RunData) -> Figure:
    """How many requests are in each phase and the tokens in the batch over time; below, what each request did from its
    arrival on."""
    bins = TimeBins.of(run)
    figure = Figure(figsize=(WIDTH, 9))
    grid = figure.add_gridspec(3, 1, height_ratios=[2.2, 1.2, 4])
    counts = figure.add_subplot(grid[0])
    tokens = figure.add_subplot(grid[1], sharex=counts)
    aligned = figure.add_subplot(grid[2])
    seen = draw_population(counts, bins, run)
    counts.tick_params(labelbottom=False)
    handles = phase_handles(run, seen)
    legend_above(counts, len(handles), handles)
    _tokens(tokens, bins, run)
    bins.label(tokens)
    _aligned(aligned, run)
    heading(counts, _title(run), run, legend=True)
    figure.align_ylabels()
    return figure


def draw_population(axes: Axes, bins: TimeBins, run: RunData, highest: float | None = None) -> list[str]:
    """Requests in each phase over time, one upon the other; returns the phases that there are."""
    ends_s = span_ends(run)
    layers = {phase: bins.covered(run.spans[run.spans["phase"] == phase], ends_s) for phase in STACKING_ORDER}
    layers = {phase: values for phase, values in layers.items() if values.any()}
    total = stack(axes, bins.edges, layers, PHASE_COLOURS, phase_names(run))
    axes.set_ylabel("requests in\nthe system")
    axes.set_ylim(0, (highest or float(total.max()) or 1.0) * 1.06)
    round_ticks(axes.yaxis, 5, whole=True)
    return list(layers)


def _aligned(axes: Axes, run: RunData) -> None:
    """The requests from their arrival on, a row each or several in a row of pixels, in the colours of their phases."""
    clock, spans = IterationClock.of(run), run.spans
    numbers, ids = pd.factorize(spans["request_id"])
    starts, ends = clock.starts(spans["first_iteration"]), clock.ends(spans["last_iteration"])
    # Spans are ordered by request, then by time.
    first_of_request = np.flatnonzero(np.diff(numbers, prepend=-1))
    known = run.requests.set_index("request_id")["arrival_s"].reindex(ids).to_numpy(dtype=float)
    arrivals = np.where(np.isnan(known), starts[first_of_request], known)
    left, right = np.maximum(starts - arrivals[numbers], 0.0), ends - arrivals[numbers]
    lives = np.maximum.reduceat(right, first_of_request) if len(ids) else np.empty(0)
    reach = max(float(np.percentile(lives, REACHED)), 1e-6) if len(lives) else 1.0
    rows = np.argsort(np.argsort(arrivals, kind="stable"), kind="stable")
    unit, scale = time_unit([reach])
    extent = (0.0, reach * scale, len(ids))
    draw_phase_image(axes, spans["phase"], rows[numbers], left * scale, right * scale, extent, ALIGNED_COLUMNS)
    beyond = int((lives > reach).sum())
    note = f"; {beyond:,} longer requests are cut off at the right" if beyond else ""
    axes.set_title(f"Each request from its arrival on{note}", fontsize=9, color=INK)
    axes.set(xlabel=f"time since the request's arrival ({unit})", ylabel="request, in order of arrival")
    round_ticks(axes.yaxis, 8, whole=True)
    round_ticks(axes.xaxis)
    axes.tick_params(colors=MUTED)
