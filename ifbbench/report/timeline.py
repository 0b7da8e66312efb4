"""The scheduler timeline, a row a request: cells with letters while they are legible, otherwise bars over time."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from ifbbench.errors import InputError
from ifbbench.recording.run_directory import find_lines
from ifbbench.report.load import RunData
from ifbbench.report.style import INK, LIMIT, MUTED, PHASE_COLOURS, TimeBins, draw_limit, heading, thousands

MAX_ROWS_WITH_LETTERS = 16
MAX_COLUMNS_WITH_LETTERS = 64
CHUNK_LETTERS = {"context": "C", "recompute": "R"}
CELL_COLUMNS = ["request_id", "iteration", "label", "phase"]
CELL_HEIGHT = 0.36
TOKENS_HEIGHT = 1.15
# With more columns than this, cells and letters become smaller, so that the chart still fits a page.
WIDE = 24
KEY = {
    "context": "C: context (tokens)", "generation": "G: generation (step)", "recompute": "R: recompute (tokens)",
    "paused": "P: paused", "waiting": "grey: waiting", "skipped": "pale: skipped",
}  # fmt: skip
# Okabe and Ito's colours without black, and with the yellow darkened, so that white letters stay legible on them.
REQUEST_COLOURS = ("#0072B2", "#D55E00", "#007F5F", "#A8447F", "#B07A00", "#2F8FBF", "#6A4C93", "#7A5C3E")
PHASE_NAMES = {
    "context": "context", "generation": "generation", "recompute": "recompute after a pause", "paused": "paused",
    "waiting": "waiting", "skipped": "generation skipped",
}  # fmt: skip
# In a static batch a request that does not run is complete, and its slot is empty.
STATIC_PHASE_NAMES = PHASE_NAMES | {"skipped": "empty slot"}
# Later ones are drawn over earlier ones, so that the common and long phases do not hide the rare and short.
DRAWING_ORDER = ("waiting", "generation", "skipped", "paused", "context", "recompute")
BAR_HEIGHT = 0.03
# Beyond this an SVG of outlines is slow to open; the bars alone become an image in it.
MAX_SPANS_AS_OUTLINES = 20_000


def draw_timeline(run: RunData) -> Figure:
    """One row a request, one column an iteration; on an axis of time if there are too many of either for letters."""
    numbers, requests = run.iterations["iteration_counter"], request_order(run)
    columns = int(numbers.max() - numbers.min()) + 1
    small = columns <= MAX_COLUMNS_WITH_LETTERS and len(requests) <= MAX_ROWS_WITH_LETTERS
    return _draw_cells(run, requests) if small else _draw_bars(run, requests)


def request_order(run: RunData) -> list[str]:
    """Every request of the run, a row each: by index in the trace, then those that ran when it was killed."""
    first_seen = run.spans.sort_values("first_iteration", kind="stable")["request_id"]
    return list(dict.fromkeys([*run.requests["request_id"], *first_seen]))


def timeline_cells(run: RunData) -> pd.DataFrame:
    """One row a request and iteration: `request_id`, `iteration`, `label`, `phase`, as the timeline draws them.

    Labels: `C5` context, a chunk of 5 tokens; `R5` recompute, likewise; `G2` second generation step; `P` paused;
    empty while waiting or skipped. Requests are in the order of their rows.
    """
    spans = run.spans
    if not len(spans):
        return pd.DataFrame(columns=CELL_COLUMNS)
    lengths = (spans["last_iteration"] - spans["first_iteration"] + 1).to_numpy(dtype=int)
    fields = (spans[name].tolist() for name in ("request_id", "phase", "first_output", "chunks"))
    labels: list[str] = []
    for request, phase, first_output, chunks, length in zip(*fields, lengths.tolist(), strict=True):
        if phase in CHUNK_LETTERS:
            known = len(chunks) if isinstance(chunks, list) else 0
            if known != length:
                raise InputError(
                    f"{find_lines(run.path, 'spans')}: request {request}: {known} chunks for a {phase} span of "
                    f"{length} iterations; expected one chunk size an iteration. Record the run again."
                )
            labels += [f"{CHUNK_LETTERS[phase]}{chunk}" for chunk in chunks]
        elif phase == "generation":
            labels += [f"G{int(first_output) + step}" for step in range(length)]
        else:
            labels += ["P" if phase == "paused" else ""] * length
    cells = spans.loc[spans.index.repeat(lengths), ["request_id", "phase", "first_iteration"]]
    cells["iteration"] = cells.pop("first_iteration").to_numpy() + np.concatenate([np.arange(n) for n in lengths])
    cells["label"] = labels
    cells["row"] = cells["request_id"].map({request: row for row, request in enumerate(request_order(run))})
    return cells.sort_values(["row", "iteration"], ignore_index=True)[CELL_COLUMNS]


def _draw_cells(run: RunData, requests: list[str]) -> Figure:
    """Cells with letters above, the tokens in the batch of each iteration below."""
    cells, iterations = timeline_cells(run), run.iterations["iteration_counter"]
    first, last = int(iterations.min()), int(iterations.max())
    columns, letters = last - first + 1, int(cells["label"].str.len().max())
    cell_width = 0.1 + 0.065 * max(letters, 3) if columns > WIDE else 0.17 + 0.085 * max(letters, 2)
    height = CELL_HEIGHT * len(requests)
    figure = Figure(figsize=(max(7.5, columns * cell_width + 1.6), height + TOKENS_HEIGHT + 1.5))
    grid, tokens = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [height, TOKENS_HEIGHT]})
    _cells(grid, cells, requests, letter_size=7 if columns > WIDE else 8.5)
    _request_labels(grid, requests, run)
    _tokens_by_iteration(tokens, run)
    tokens.set(xlim=(first - 0.5, last + 0.5), xlabel="iteration")
    tokens.xaxis.set_major_locator(MaxNLocator(nbins=columns, integer=True))
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
    """Colours of the cell and its letters, for a request with this colour."""
    return {
        "context": (colour, "white"),
        "recompute": (_tint(colour, -0.45), "white"),
        "generation": (_tint(colour, 0.68), INK),
        "paused": ("white", colour),
        "skipped": (_tint(colour, 0.9), colour),
    }.get(phase, (PHASE_COLOURS["waiting"], INK))


def _tint(colour: str, white: float) -> str:
    """`colour` mixed with `white` (0 to 1) of white; a negative share mixes with black."""
    target = 1.0 if white > 0 else 0.0
    red, green, blue = (part + (target - part) * abs(white) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _request_labels(axes: Axes, requests: list[str], run: RunData) -> None:
    axes.set_yticks(range(len(requests)), requests)
    axes.set(ylim=(len(requests) - 0.4, -0.6), ylabel="request")
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0, labelbottom=False)
    for request in run.requests.loc[run.requests["outcome"] == "failed", "request_id"]:
        axes.text(0.003, requests.index(request), "failed", transform=axes.get_yaxis_transform(), color=LIMIT,
                  va="center", fontsize=8)  # fmt: skip


def _tokens_by_iteration(axes: Axes, run: RunData) -> None:
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


def _draw_bars(run: RunData, requests: list[str]) -> Figure:
    """Phases of each request as horizontal bars above, the tokens in the batch over time below."""
    bins, height = TimeBins.of(run), float(np.clip(BAR_HEIGHT * len(requests), 3.5, 9))
    figure = Figure(figsize=(12, height + 2.6))
    phases, tokens = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [height, 1.3]})
    _bars(phases, bins, run, requests)
    used = run.iterations["budget_used"].to_numpy(dtype=float)
    context = np.minimum(run.iterations["total_context_tokens"].to_numpy(dtype=float), used)
    generation, total = bins.means(used - context), bins.means(used)
    tokens.stairs(total, bins.edges, baseline=generation, fill=True, color=PHASE_COLOURS["context"], linewidth=0)
    tokens.stairs(generation, bins.edges, fill=True, color=PHASE_COLOURS["generation"], linewidth=0)
    draw_limit(tokens, "max_num_tokens", run.config.get("max_num_tokens"), float(total.max()))
    tokens.set_ylabel("tokens in the batch,\nmean over time")
    tokens.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    bins.label(tokens)
    heading(phases, "Scheduler timeline", run)
    return figure


def _bars(axes: Axes, bins: TimeBins, run: RunData, requests: list[str]) -> None:
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
                                           rasterized=len(run.spans) > MAX_SPANS_AS_OUTLINES))  # fmt: skip
    axes.set(ylim=(len(requests) - 0.5, -0.5), ylabel="request, in trace order")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    thousands(axes.yaxis)
    axes.grid(visible=False)
    names = STATIC_PHASE_NAMES if run.config.get("type") == "v1" else PHASE_NAMES
    handles = [Patch(color=PHASE_COLOURS[phase], label=name) for phase, name in names.items() if phase in seen]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), borderaxespad=0.2)
