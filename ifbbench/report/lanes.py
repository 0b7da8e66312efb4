"""The batch as swim-lanes: which requests run at a time."""

from heapq import heappop, heappush

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ifbbench.analysis.token_times import span_ends
from ifbbench.report.cells import request_order, tint
from ifbbench.report.colours import FAINT, INK, MUTED, PHASE_COLOURS, REQUEST_COLOURS
from ifbbench.report.phase_image import Integers, draw_phase_image
from ifbbench.report.style import WIDTH, TimeBins, boxes, heading, legend_above, round_ticks
from ifbbench.report.timeline import phase_handles, phase_names
from ifbbench.rundir.reader import Floats, RunData

MAX_OUTLINES = 4000
MAX_NAMED_LANES, NAME_FROM_SHARE = 40, 0.035
# With more boxes than MAX_OUTLINES, of which the median one takes less than this share of the run, each is too thin to
# be seen in a colour of its own. Columns of cells that are drawn instead.
HAIRLINE_SHARE, COLUMNS = 1 / 500, 1400


def draw_lanes(run: RunData) -> Figure:
    """The batch as swim-lanes: each request takes the lowest free lane while it runs; its context phase is dark. Where
    requests would be hairlines, the share of each phase in the time of each lane."""
    bins, spans = TimeBins.of(run), run.spans
    running = spans[spans["phase"].isin(["context", "recompute", "generation", "skipped"])]
    left = bins.clock.starts(running["first_iteration"])
    right = np.asarray(span_ends(run)[running.index], np.float64)
    lanes, count = _lanes(running["request_id"].tolist(), left, right)
    figure = Figure(figsize=(WIDTH, float(np.clip(count * 0.16, 2.4, 8)) + 1.2))
    axes = figure.subplots()
    duration_s = float(bins.edges_s[-1] - bins.edges_s[0])
    are_hairlines = len(running) > MAX_OUTLINES and float(np.median(right - left)) < HAIRLINE_SHARE * duration_s
    if are_hairlines:
        extent = (float(bins.edges[0]), float(bins.edges[-1]), count)
        times = bins.scaled(left), bins.scaled(right)
        draw_phase_image(axes, running["phase"], lanes, *times, extent, COLUMNS)
        handles = phase_handles(run, running["phase"].unique(), counts=False)
    else:
        handles = _draw_boxes(axes, run, running, (left, right), lanes, count)
    axes.set(ylim=(count - 0.4, -0.6), ylabel="lane: requests that run at a time")
    round_ticks(axes.yaxis, 8, whole=True)
    axes.grid(visible=False)
    legend_above(axes, len(handles), handles)
    bins.label(axes)
    shown = "Requests that run, by phase" if are_hairlines else "Requests that run, a colour each"
    heading(axes, shown, run, legend=True)
    return figure


def _draw_boxes(
    axes: Axes, run: RunData, running: pd.DataFrame, times_s: tuple[Floats, Floats], lanes: Integers, count: int
) -> list[Artist]:
    """A box for each of the spans `running`, from one time to the other, in the colour of its request; returns the key.
    count: number of lanes."""
    bins, (left, right) = TimeBins.of(run), times_s
    row_of = {request: row for row, request in enumerate(request_order(run))}
    rows = running["request_id"].map(row_of).to_numpy(dtype=int) % len(REQUEST_COLOURS)
    is_context = running["phase"].isin(["context", "recompute"]).to_numpy()
    paused_again = (running["phase"] == "recompute").to_numpy()
    height = 0.8 if count <= 80 else 1.0
    x0, x1, top = bins.scaled(left), bins.scaled(right), lanes - height / 2
    faces = [[tint(colour, 0.55) for colour in REQUEST_COLOURS], [tint(colour, -0.2) for colour in REQUEST_COLOURS]]
    colours = np.array([to_rgba_array(names) for names in faces])[is_context.astype(int), rows]
    colours[paused_again] = to_rgba(PHASE_COLOURS["recompute"])
    # Contexts are drawn later, so that they are on top, and with an outline: they are short.
    for chosen, width in ((~is_context, 0.0), (is_context, 0.4)):
        boxes(
            axes,
            x0[chosen],
            x1[chosen],
            top[chosen],
            height,
            colours[chosen],
            linewidths=width,
            rasterized=len(running) > MAX_OUTLINES,
        )
    if count <= MAX_NAMED_LANES:
        long_enough = (right - left) > NAME_FROM_SHARE * (bins.edges_s[-1] - bins.edges_s[0])
        for index in np.flatnonzero(long_enough & ~is_context):
            axes.text(
                (x0[index] + x1[index]) / 2,
                lanes[index],
                running["request_id"].iloc[index],
                ha="center",
                va="center",
                fontsize=7,
                color=INK,
            )
    names = {"context (dark)": MUTED, "generation (light)": FAINT}
    names |= {phase_names(run)["recompute"]: PHASE_COLOURS["recompute"]} if paused_again.any() else {}
    return [Patch(color=colour, label=name) for name, colour in names.items()]


def _lanes(requests: list[str], left: Floats, right: Floats) -> tuple[Integers, int]:
    """A lane for each stretch; consecutive stretches of a request keep theirs. Returns also how many there are."""
    lanes = np.zeros(len(requests), np.int64)
    held: dict[str, tuple[float, int]] = {}
    free: list[int] = []
    ends: list[tuple[float, str]] = []
    count = 0
    for index in np.lexsort((right, left)).tolist():
        begin, end, request = float(left[index]), float(right[index]), requests[index]
        own = held.get(request)
        while ends and ends[0][0] <= begin:
            ended, other = heappop(ends)
            # A request with a next stretch that begins when this one ends keeps its lane.
            if other != request and other in held and held[other][0] <= ended:
                heappush(free, held.pop(other)[1])
        if own is not None and request in held and own[0] >= begin - 1e-9:
            lane = own[1]
        else:
            if request in held:
                heappush(free, held.pop(request)[1])
            lane = heappop(free) if free else count
            count = max(count, lane + 1)
        held[request] = (end, lane)
        heappush(ends, (end, request))
        lanes[index] = lane
    return lanes, max(count, 1)
