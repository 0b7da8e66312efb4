"""The exact timeline: a row a request, a column an iteration, a cell for what the request did in it."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from ifbbench.analysis.words import Words, window_name, words_of
from ifbbench.errors import InputError
from ifbbench.report.colours import INK, LIMIT, LIMIT_COLOURS, MUTED, PHASE_COLOURS, REQUEST_COLOURS
from ifbbench.report.style import LIMIT_DASHES, heading, is_near, legend_above, limit_of, note_inside, round_ticks
from ifbbench.rundir.reader import RunData, once_a_run
from ifbbench.rundir.run_directory import find_lines

MAX_ROWS, MAX_COLUMNS = 16, 64
# With --exact: what a picture of 16,000 pixels holds.
MAX_EXACT_ROWS, MAX_EXACT_COLUMNS = 80, 240
CHUNK_LETTERS = {"context": "C", "recompute": "R"}
CELL_COLUMNS = ["request_id", "iteration", "label", "phase", "cause"]
CELL_HEIGHT = 0.36
STRIP_HEIGHT = 1.05
# With more columns than this, cells and letters become smaller, so that the chart still fits a page.
WIDE = 24
# What a waiting cell says of its cause. The id behind P is shown if it is as short as this.
LONGEST_ID = 3
KEY = {
    "context": "C: context (tokens)",
    "generation": "G: generation (step)",
    "recompute": "R: recompute (tokens)",
}


@once_a_run
def request_order(run: RunData) -> list[str]:
    """Every request of the run, a row each: by index in the trace, then those that ran when it was killed."""
    first_seen = run.spans.sort_values("first_iteration", kind="stable")["request_id"]
    return list(dict.fromkeys(run.requests["request_id"].tolist() + first_seen.tolist()))


def num_columns(run: RunData) -> int:
    """The number of iterations from the first to the last one."""
    numbers = run.iterations["iteration_counter"]
    return int(numbers.max() - numbers.min()) + 1


def fits_cells(run: RunData) -> bool:
    """Whether letters in the cells of all requests and iterations are legible."""
    return num_columns(run) <= MAX_COLUMNS and len(request_order(run)) <= MAX_ROWS


def timeline_cells(run: RunData) -> pd.DataFrame:
    """One row a request and iteration of its micro batch: `request_id`, `iteration`, `label`, `phase`, `cause`.

    Labels: `C5` context, a chunk of 5 tokens; `R5` recompute, likewise; `G2` second generation step (`G2-4` one that
    yields three tokens, with draft tokens); `P` paused;
    empty while waiting or skipped. Requests are in the order of their rows.
    """
    spans = run.spans
    if not len(spans):
        return pd.DataFrame(columns=CELL_COLUMNS)
    every = np.where(spans["phase"].isin([*CHUNK_LETTERS, "generation"]), run.num_micro_batches, 1)
    lengths = (spans["last_iteration"] - spans["first_iteration"]).to_numpy(dtype=int) // every + 1
    fields = (spans[name].tolist() for name in ("request_id", "phase", "first_output", "chunks", "steps"))
    labels: list[str] = []
    for request, phase, first_output, chunks, steps, length in zip(*fields, lengths.tolist(), strict=True):
        if phase in CHUNK_LETTERS:
            known = len(chunks) if isinstance(chunks, list) else 0
            if known != length:
                raise InputError(
                    f"{find_lines(run.path, 'spans')}: request {request}: {known} chunks for a {phase} span of "
                    f"{length} iterations; expected one chunk size an iteration. Record the run again."
                )
            labels += [f"{CHUNK_LETTERS[phase]}{chunk}" for chunk in chunks]
        elif phase == "generation":
            first = int(first_output)
            for tokens in steps if isinstance(steps, list) else [1] * length:  # several with draft tokens
                labels.append(f"G{first}" if tokens == 1 else f"G{first}-{first + tokens - 1}")
                first += tokens
        else:
            labels += ["P" if phase == "paused" else ""] * length
    cells = spans.loc[spans.index.repeat(lengths), ["request_id", "phase", "cause", "first_iteration"]]
    cells["iteration"] = cells.pop("first_iteration").to_numpy() + np.concatenate(
        [np.arange(n) * step for n, step in zip(lengths, every, strict=True)]
    )
    cells["label"] = labels
    cells["row"] = cells["request_id"].map({request: row for row, request in enumerate(request_order(run))})
    return cells.sort_values(["row", "iteration"], ignore_index=True)[CELL_COLUMNS]


def draw_cells(run: RunData, exact: bool = False) -> Figure:
    """Cells with letters above; the tokens in the batch and the KV blocks of each iteration below.

    exact: also of more requests and iterations than fit a page. InputError if there are too many for a picture.
    """
    requests, columns = request_order(run), num_columns(run)
    if exact and (columns > MAX_EXACT_COLUMNS or len(requests) > MAX_EXACT_ROWS):
        raise InputError(
            f"--exact: {len(requests):,} requests in {columns:,} iterations; expected at most {MAX_EXACT_ROWS} "
            f"requests in {MAX_EXACT_COLUMNS} iterations. Choose a part with --from, --to and --requests."
        )
    cells, iterations = timeline_cells(run), run.iterations["iteration_counter"]
    first, last = int(iterations.min()), int(iterations.max())
    cells = cells[cells["iteration"] <= last]  # spans of a killed run may be known for longer than its iterations
    letters = int(cells["label"].str.len().max()) if len(cells) else 1
    cell_width = 0.1 + 0.065 * max(letters, 4) if columns > WIDE else 0.17 + 0.085 * max(letters, 3)
    height = CELL_HEIGHT * max(len(requests), 1)
    with_cache = bool(run.iterations["max_kv_cache_blocks"].max() > 0)
    heights = [height, STRIP_HEIGHT] + [STRIP_HEIGHT] * with_cache
    figure = Figure(figsize=(max(7.5, columns * cell_width + 1.6), sum(heights) + 1.7))
    panels = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    grid, tokens = panels[:2]
    _cells(grid, cells, requests, words_of(run.config), letter_size=7 if columns > WIDE else 8.5)
    _request_labels(grid, requests, run)
    _tokens_by_iteration(tokens, run, columns)
    if with_cache:
        _blocks_by_iteration(panels[2], run, columns)
    panels[-1].set(xlim=(first - 0.5, last + 0.5), xlabel="iteration")
    round_ticks(panels[-1].xaxis, min(columns, 24), whole=True)
    heading(grid, "Scheduler timeline", run)
    figure.supxlabel(_key(cells, words_of(run.config), figure.get_figwidth()), fontsize=8, color=MUTED)
    figure.align_ylabels()
    return figure


def _key(cells: pd.DataFrame, words: Words, width: float) -> str:
    """What the letters in the cells mean, in lines that fit the figure."""
    seen = set(cells["phase"])
    key = KEY | {"skipped": f"pale: {words.phase('skipped')}"}
    parts = [key[phase] for phase in key if phase in seen]
    paused = cells.loc[cells["phase"] == "paused", "cause"]
    if "paused" in seen:
        parts.append(f"P→3: {words.paused} to make room for 3" if paused.notna().any() else f"P: {words.paused}")
    causes = dict.fromkeys(cells.loc[cells["phase"] == "waiting", "cause"].dropna())
    names = [f"{words.short(one)}: {words.limit_name(one)}" for one in causes]
    if names:
        parts.append("waiting for  " + " · ".join(names))
    elif "waiting" in seen:
        parts.append("grey: waiting")
    lines, letters = [""], int(width * 17)
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > letters:
            lines.append("")
        lines[-1] += ("     " if lines[-1] else "") + part
    return "\n".join(lines)


def _cells(axes: Axes, cells: pd.DataFrame, requests: list[str], words: Words, letter_size: float) -> None:
    rows = {request: row for row, request in enumerate(requests)}
    for request, iteration, label, phase, cause in cells.itertuples(index=False):
        row = rows[request]
        fill, ink = _cell_colours(phase, REQUEST_COLOURS[row % len(REQUEST_COLOURS)])
        hatch = "////" if phase == "paused" else None
        axes.add_patch(
            Rectangle(
                (iteration - 0.47, row - 0.42),
                0.94,
                0.84,
                facecolor=fill,
                hatch=hatch,
                edgecolor="#D8D8D8" if hatch else fill,
                linewidth=0.6 if hatch else 0,
            )
        )
        size, weight = letter_size, "bold" if phase in ("context", "recompute", "paused") else "normal"
        if phase == "waiting" and isinstance(cause, str):
            label, size, ink = words.short(cause), letter_size - 1.5, MUTED
        elif phase == "paused" and cause is not None and cause == cause and len(str(cause)) <= LONGEST_ID:
            label = f"P→{cause}"
        halo = [withStroke(linewidth=3, foreground="white")] if hatch else None
        axes.text(
            iteration,
            row,
            label,
            ha="center",
            va="center",
            color=ink,
            fontsize=size,
            fontweight=weight,
            path_effects=halo,
        )


def _cell_colours(phase: str, colour: str) -> tuple[str, str]:
    """Colours of the cell and its letters, for a request with this colour."""
    return {
        "context": (colour, "white"),
        "recompute": (tint(colour, -0.45), "white"),
        "generation": (tint(colour, 0.68), INK),
        "paused": ("white", colour),
        "skipped": (tint(colour, 0.9), colour),
    }.get(phase, (PHASE_COLOURS["waiting"], INK))


def tint(colour: str, white: float) -> str:
    """`colour` mixed with `white` (0 to 1) of white; a negative share mixes with black."""
    target = 1.0 if white > 0 else 0.0
    red, green, blue = (part + (target - part) * abs(white) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _request_labels(axes: Axes, requests: list[str], run: RunData) -> None:
    axes.set_yticks(range(len(requests)), requests)
    axes.set(ylim=(max(len(requests), 1) - 0.4, -0.6), ylabel="request")
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0, labelbottom=False)
    for request in run.requests.loc[run.requests["outcome"] == "failed", "request_id"]:
        axes.text(
            0.003,
            requests.index(request),
            "failed",
            transform=axes.get_yaxis_transform(),
            color=LIMIT,
            va="center",
            fontsize=8,
        )


def _tokens_by_iteration(axes: Axes, run: RunData, columns: int) -> None:
    table = run.iterations
    where, used = table["iteration_counter"], table["budget_used"].fillna(0)
    context = table["total_context_tokens"].fillna(0).clip(upper=used)
    axes.bar(where, used - context, width=0.94, color=PHASE_COLOURS["generation"], label="generation")
    axes.bar(where, context, bottom=used - context, width=0.94, color=PHASE_COLOURS["context"], label="context")
    _numbers(axes, where, used, columns)
    _limit(axes, words_of(run.config).setting_name("num_tokens"), limit_of(run, "num_tokens"), float(used.max()))
    axes.set_ylabel("tokens\nin the batch")
    round_ticks(axes.yaxis, 4, whole=True)
    legend_above(axes, 2)


def _blocks_by_iteration(axes: Axes, run: RunData, columns: int) -> None:
    table = run.iterations
    used_blocks, pool, window = run.blocks_of_fullest()
    used = pd.Series(used_blocks, table.index).fillna(0)
    axes.bar(table["iteration_counter"], used, width=0.94, color=LIMIT_COLOURS["kv_blocks"], alpha=0.55)
    _numbers(axes, table["iteration_counter"], used, columns)
    _limit(axes, "pool of", pool, float(used.max()))
    kept = words_of(run.config).blocks(run.config.get("tokens_per_block"))
    axes.set_ylabel(f"KV {kept}\nused" + (f" of the\n{window_name(window)}" if window else ""))
    round_ticks(axes.yaxis, 4, whole=True)


def _limit(axes: Axes, name: str, limit: int | None, highest: float) -> None:
    """As draw_limit, with the name at the top: the numbers of the bars are at the line."""
    near = is_near(limit, highest)
    axes.set_ylim(0, max(highest, (limit or 0) if near else 0, 1.0) * 1.5)
    if limit is None:
        return
    if near:
        axes.axhline(limit, color=LIMIT, linewidth=1, linestyle=LIMIT_DASHES, zorder=0.9)
    text = f"{name} {limit:,}" + ("" if near else " (above this scale)")
    note_inside(axes, text, color=LIMIT, margin=1)


def _numbers(axes: Axes, where: pd.Series, values: pd.Series, columns: int) -> None:
    """Write each value above its bar, where there is room."""
    if columns > MAX_COLUMNS:
        return
    halo = [withStroke(linewidth=2.5, foreground="white")]
    for iteration, value in zip(where, values, strict=True):
        axes.annotate(
            f"{value:.0f}",
            (iteration, value),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7.5 if columns <= WIDE else 6,
            color=MUTED,
            path_effects=halo,
        )
