"""The timeline of a large run: a thin row a request, its phases as horizontal bars on an axis of time."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ifbbench.report.charts.style import PHASE_COLOURS, PHASE_NAMES, STATIC_PHASE_NAMES, draw_limit, heading, thousands
from ifbbench.report.charts.time_axis import TimeBins
from ifbbench.report.charts.timeline_cells import request_order
from ifbbench.report.load import RunData

# Later ones are drawn over earlier ones: the rare and short phases must not vanish under the common and long.
DRAWING_ORDER = ("waiting", "generation", "skipped", "paused", "context", "recompute")
ROW_HEIGHT = 0.03
# Beyond this an SVG of outlines is slow to open; the bars alone become an image in it.
MOST_SPANS_AS_OUTLINES = 20_000


def draw_bars(run: RunData) -> Figure:
    """Phases of each request above, the token budget used over time below."""
    requests, bins = request_order(run), TimeBins.of(run)
    height = float(np.clip(ROW_HEIGHT * len(requests), 3.5, 9))
    figure = Figure(figsize=(12, height + 2.6))
    phases, budget = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [height, 1.3]})
    _phases(phases, bins, run, requests)
    _budget(budget, bins, run)
    bins.label(budget)
    heading(phases, "Scheduler timeline", run)
    return figure


def _phases(axes: Axes, bins: TimeBins, run: RunData, requests: list[str]) -> None:
    rows = {request: row for row, request in enumerate(requests)}
    seen = [phase for phase in DRAWING_ORDER if (run.spans["phase"] == phase).any()]
    for phase in seen:
        spans = run.spans[run.spans["phase"] == phase]
        left = bins.scaled(bins.clock.starts(spans["first_iteration"]))
        right = bins.scaled(bins.clock.ends(spans["last_iteration"]))
        top = spans["request_id"].map(rows).to_numpy(dtype=float) - 0.5
        corners = [(left, top), (right, top), (right, top + 1), (left, top + 1)]
        outlines = np.stack([np.column_stack(corner) for corner in corners], axis=1)
        colour = PHASE_COLOURS[phase]
        # A hairline in the bar's own colour keeps a context of one short iteration visible.
        width = 0.5 if phase in ("context", "recompute") else 0.0
        axes.add_collection(PolyCollection(list(outlines), facecolors=colour, edgecolors=colour, linewidths=width,
                                           rasterized=len(run.spans) > MOST_SPANS_AS_OUTLINES))  # fmt: skip
    axes.set_ylim(len(requests) - 0.5, -0.5)
    axes.set_ylabel("request, in trace order")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    thousands(axes.yaxis)
    axes.grid(visible=False)
    names = STATIC_PHASE_NAMES if run.config.get("type") == "v1" else PHASE_NAMES
    handles = [Patch(color=PHASE_COLOURS[phase], label=name) for phase, name in names.items() if phase in seen]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), borderaxespad=0.2)


def _budget(axes: Axes, bins: TimeBins, run: RunData) -> None:
    used = run.iterations["budget_used"].to_numpy(dtype=float)
    context = np.minimum(run.iterations["total_context_tokens"].to_numpy(dtype=float), used)
    generation = bins.means(used - context)
    total = bins.means(used)
    axes.stairs(total, bins.edges, baseline=generation, fill=True, color=PHASE_COLOURS["context"], linewidth=0)
    axes.stairs(generation, bins.edges, fill=True, color=PHASE_COLOURS["generation"], linewidth=0)
    draw_limit(axes, "max_num_tokens", run.config.get("max_num_tokens"), float(total.max()))
    axes.set_ylabel("tokens in the batch,\nmean over time")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
