"""The timeline of a small run, as in-flight batching is usually drawn: a row a request, a column an iteration."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from ifbbench.report.charts.style import INK, LIMIT, MUTED, PHASE_COLOURS, REQUEST_COLOURS, draw_limit, heading, tint
from ifbbench.report.charts.timeline_cells import request_order, timeline_cells
from ifbbench.report.load import RunData

CELL_HEIGHT = 0.36
BUDGET_HEIGHT = 1.15
# With more columns than this, cells and letters become smaller, so that the chart still fits a page.
WIDE = 24
KEY = {
    "context": "C: context (tokens)",
    "generation": "G: generation (step)",
    "recompute": "R: recompute (tokens)",
    "paused": "P: paused",
    "waiting": "grey: waiting",
    "skipped": "pale: skipped",
}


def draw_grid(run: RunData) -> Figure:
    """Cells with letters above, the token budget used in each iteration below."""
    cells, requests = timeline_cells(run), request_order(run)
    iterations = run.iterations["iteration_counter"]
    first, last = int(iterations.min()), int(iterations.max())
    columns, letters = last - first + 1, int(cells["label"].str.len().max())
    cell_width = 0.1 + 0.065 * max(letters, 3) if columns > WIDE else 0.17 + 0.085 * max(letters, 2)
    height = CELL_HEIGHT * len(requests)
    figure = Figure(figsize=(max(7.5, columns * cell_width + 1.6), height + BUDGET_HEIGHT + 1.5))
    ratios = {"height_ratios": [height, BUDGET_HEIGHT]}
    grid, budget = figure.subplots(2, 1, sharex=True, gridspec_kw=ratios)
    _cells(grid, cells, requests, letter_size=7 if columns > WIDE else 8.5)
    _rows(grid, requests, run)
    _budget(budget, run)
    budget.set_xlim(first - 0.5, last + 0.5)
    budget.set_xlabel("iteration")
    budget.xaxis.set_major_locator(MaxNLocator(nbins=columns, integer=True))
    heading(grid, "Scheduler timeline", run)
    seen = set(cells["phase"])
    figure.supxlabel("     ".join(KEY[phase] for phase in KEY if phase in seen), fontsize=8, color=MUTED)
    return figure


def _cells(axes: Axes, cells: pd.DataFrame, requests: list[str], letter_size: float) -> None:
    rows = {request: row for row, request in enumerate(requests)}
    for request, iteration, label, phase in cells.itertuples(index=False):
        row = rows[request]
        fill, ink = _cell_colours(phase, REQUEST_COLOURS[row % len(REQUEST_COLOURS)])
        hatch = "////" if phase == "paused" else None
        axes.add_patch(
            Rectangle((iteration - 0.47, row - 0.42), 0.94, 0.84, facecolor=fill, hatch=hatch,
                      edgecolor="#D8D8D8" if hatch else fill, linewidth=0.6 if hatch else 0)
        )  # fmt: skip
        weight = "bold" if phase in ("context", "recompute", "paused") else "normal"
        halo = [withStroke(linewidth=3, foreground="white")] if hatch else None
        axes.text(iteration, row, label, ha="center", va="center", color=ink, fontsize=letter_size, fontweight=weight,
                  path_effects=halo)  # fmt: skip


def _cell_colours(phase: str, colour: str) -> tuple[str, str]:
    """Fill and ink of a cell of a request with this colour."""
    return {
        "context": (colour, "white"),
        "recompute": (tint(colour, -0.45), "white"),
        "generation": (tint(colour, 0.68), INK),
        "paused": ("white", colour),
        "skipped": (tint(colour, 0.9), colour),
    }.get(phase, (PHASE_COLOURS["waiting"], INK))


def _rows(axes: Axes, requests: list[str], run: RunData) -> None:
    axes.set_yticks(range(len(requests)), requests)
    axes.set_ylim(len(requests) - 0.4, -0.6)
    axes.set_ylabel("request")
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0, labelbottom=False)
    failed = set(run.requests.loc[run.requests["outcome"] == "failed", "request_id"])
    for row, request in enumerate(requests):
        if request in failed:
            axes.text(0.003, row, "failed", transform=axes.get_yaxis_transform(), color=LIMIT, va="center", fontsize=8)


def _budget(axes: Axes, run: RunData) -> None:
    table = run.iterations
    where, used = table["iteration_counter"], table["budget_used"].fillna(0)
    context = table["total_context_tokens"].fillna(0).clip(upper=used)
    axes.bar(where, used - context, width=0.94, color=PHASE_COLOURS["generation"], label="generation")
    axes.bar(where, context, bottom=used - context, width=0.94, color=PHASE_COLOURS["context"], label="context")
    halo = [withStroke(linewidth=2.5, foreground="white")]
    for iteration, tokens in zip(where, used, strict=True):
        axes.annotate(f"{tokens:.0f}", (iteration, tokens), xytext=(0, 2), textcoords="offset points", ha="center",
                      fontsize=7.5, color=MUTED, path_effects=halo)  # fmt: skip
    draw_limit(axes, "max_num_tokens", run.config.get("max_num_tokens"), float(used.max()))
    axes.set_ylabel("tokens\nin the batch")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
