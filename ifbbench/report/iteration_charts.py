"""Charts of iterations over time: use of the token budget and of the batch, the queue by cause, and what bound them."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ifbbench.analysis.number_texts import percent
from ifbbench.analysis.token_times import span_ends
from ifbbench.analysis.words import Words, words_of
from ifbbench.engine.plan import Limit
from ifbbench.report.cells import tint
from ifbbench.report.colours import FAINT, INK, LIMIT, MUTED, PHASE_COLOURS, limit_colours
from ifbbench.report.style import (
    LIMIT_DASHES,
    WIDTH,
    TimeBins,
    heading,
    in_percent,
    is_near,
    label_limit,
    label_mean,
    legend_above,
    limit_of,
    round_ticks,
    stack,
    steps,
)
from ifbbench.report.timeline import phase_names
from ifbbench.rundir.reader import Floats, RunData, once_a_run
from ifbbench.settings.engines import SGLANG, VLLM

HISTOGRAM_BINS = 40
# Prefix of the cause of requests that stand behind another one, which a limit held.
BEHIND = "behind "


def draw_budget(run: RunData) -> Figure:
    """How much of the token budget and of the batch size each iteration used: over time, and as a distribution."""
    figure = Figure(figsize=(WIDTH, 5.6))
    grid = figure.subplots(2, 2, sharex="col", sharey="row", gridspec_kw={"width_ratios": [4, 1]})
    bins, iterations = TimeBins.of(run), run.iterations
    used = iterations["budget_used"].to_numpy(dtype=float)
    context = np.minimum(iterations["total_context_tokens"].to_numpy(dtype=float), used)
    recomputed = np.minimum(iterations["tokens_recomputed"].fillna(0).to_numpy(dtype=float), context)
    requests = iterations["scheduled_requests"].to_numpy(dtype=float)
    context_requests = iterations["context_requests"].to_numpy(dtype=float)
    panels = (
        (
            "tokens in the batch",
            "num_tokens",
            used,
            {"generation": used - context, "context": context - recomputed, "recompute": recomputed},
        ),
        (
            "requests in the batch",
            "batch_size",
            requests,
            {"generation": requests - context_requests, "context": context_requests},
        ),
    )
    for (axes, shares), (label, name, values, layers) in zip(grid, panels, strict=True):
        means = {name: bins.means(layer) for name, layer in layers.items() if layer.any()}
        stack(axes, bins.edges, means, PHASE_COLOURS, phase_names(run))
        steps(axes, bins.highest(values), bins.edges, baseline=None, color=INK, linewidth=0.9, label="maximum")
        limit = limit_of(run, name)
        _axis_to_limit(axes, words_of(run.config).setting_name(name), limit, float(values.max()))
        axes.set_ylabel(label)
        latency = iterations["latency_ms"].to_numpy(dtype=float)
        _time_at(shares, values, latency, float(axes.get_ylim()[1]), limit)
    legend_above(grid[0, 0], 4)
    grid[1, 1].set_xlabel("share of the time")
    bins.label(grid[1, 0])
    heading(
        grid[0, 0], f"Use of the {words_of(run.config).limit_name('num_tokens')} and of the batch", run, legend=True
    )
    figure.align_ylabels(grid[:, 0])
    return figure


def _axis_to_limit(axes: Axes, name: str, limit: int | None, highest: float) -> None:
    """Scale to the limit if the values come near it; else to the values, with the limit in words."""
    near = is_near(limit, highest)
    axes.set_ylim(0, max((limit or 0) * 1.2 if near else 0.0, highest * 1.25, 1.0))
    round_ticks(axes.yaxis, 5, whole=True)
    if limit is not None:
        label_limit(axes, f"{name} {limit:,} · largest use {percent(highest / limit)}", limit, near)


def _time_at(axes: Axes, values: Floats, weights: Floats, top: float, limit: int | None) -> None:
    """The share of the time that iterations used so much, as horizontal bars beside the values over time."""
    known = np.nan_to_num(values)
    shares, edges = np.histogram(known, HISTOGRAM_BINS, (0, top), weights=weights)
    total = weights.sum() or 1.0
    axes.stairs(shares / total, edges, orientation="horizontal", fill=True, color=FAINT, linewidth=0)
    if limit is not None and limit <= top:
        axes.axhline(limit, color=LIMIT, linewidth=1, linestyle=LIMIT_DASHES)
    round_ticks(axes.xaxis, 3, text=in_percent)
    axes.grid(visible=True, axis="x")


def draw_queue(run: RunData) -> Figure:
    """How many requests wait, by what each of them waits for; paused ones on top."""
    figure = Figure(figsize=(WIDTH, 4))
    axes = figure.subplots()
    bins = TimeBins.of(run)
    all_causes = run.spans["cause"]
    if run.config.get("engine") in (VLLM, SGLANG):
        # In the queue all wait for what holds its head at each time; a span has only what held it last.
        is_first = ~run.spans.sort_values("first_iteration")["request_id"].duplicated().sort_index()
        all_causes = all_causes.mask(is_first & (run.spans["phase"] == "waiting"), Limit.BATCH_SIZE.value)
    spans = run.spans[run.spans["phase"].isin(["waiting", "paused"])]
    causes = all_causes[spans.index].where(spans["phase"] == "waiting", "paused").fillna("none").astype(str)
    ends_s = span_ends(run)
    layers = {cause: bins.covered(spans[causes == cause], ends_s) for cause in causes.unique()}
    layers = _by_head(layers, bins, run)
    colours = limit_colours({cause.removeprefix(BEHIND) for cause in layers})
    colours = {
        kind + cause: tint(colour, 0.5) if kind else colour
        for cause, colour in colours.items()
        for kind in ("", BEHIND)
        if kind + cause in layers
    }
    widths = np.diff(bins.edges_s)
    waited_s = {cause: float((values * widths).sum()) for cause, values in layers.items()}
    total_s = sum(waited_s.values()) or 1.0
    names = {
        cause: f"{_cause_name(cause, words_of(run.config))} ({percent(waited_s[cause] / total_s)})" for cause in layers
    }
    total = stack(axes, bins.edges, {cause: layers[cause] for cause in colours}, colours, names)
    axes.set_ylabel("requests that wait")
    legend_rows = -(-len(layers) // 3)
    axes.set_ylim(0, max(1.0, float(total.max()) * 1.1))
    round_ticks(axes.yaxis, 6, whole=True)
    if layers:
        legend_above(axes, -(-len(layers) // legend_rows))
        mean = sum(waited_s.values()) / (bins.edges_s[-1] - bins.edges_s[0])
        label_mean(axes, mean)
    else:
        about = "the log has no requests" if run.lacks_requests else "no request waited for a limit"
        axes.text(0.5, 0.5, about, transform=axes.transAxes, ha="center", color=MUTED)
    bins.label(axes)
    heading(axes, "Queue by cause", run, legend=True, rows=legend_rows)
    return figure


def _cause_name(cause: str, words: Words) -> str:
    limit = cause.removeprefix(BEHIND)
    name = words.limit_name(limit) if limit != "none" else words.waits_for(limit)
    return name if limit == cause else f"behind one that waits for {name}"


def limits_of_line(run: RunData) -> pd.Series:
    """The limit that held the head of the line in each iteration: what bound it, or what held the queue where that is
    said. A request that generates and stands aside for prompts holds no line: in runs of earlier versions, what waits
    is taken to be held as in the iteration before."""
    bound = run.iterations["bound_by"].fillna("none").astype(str)
    if (named := run.iterations.get("queue_head_reason")) is not None:
        bound = named.fillna(bound).astype(str)
    return bound.mask(bound == Limit.PREFILL.value).ffill().fillna("none")


def _by_head(layers: dict[str, Floats], bins: TimeBins, run: RunData) -> dict[str, Floats]:
    """`layers` with the requests behind another one by the limit that held that one, the limit of the iteration.

    A request that is not active yet waits for a batch slot only if that limit bound the iteration; if none did, it came
    while the iteration was decided, and waits for the next one."""
    bound = limits_of_line(run)
    # As requests wait: from the start of an iteration to that of the next, also where they overlap.
    times = {limit: bins.until_next((bound == limit).to_numpy(dtype=float)) for limit in bound.unique()}
    whole = np.maximum(sum(times.values(), np.zeros(len(bins.edges_s) - 1)), 1e-12)
    nothing = times.get("none", 0.0)
    queued, behind = (layers.pop(name, np.zeros(len(whole))) for name in ("batch_size", "head_of_line"))
    held = np.maximum(whole - nothing, 1e-12)
    layers["batch_size"], layers["none"] = queued * times.get("batch_size", 0.0) / whole, queued * nothing / whole
    for limit, time in times.items():
        if limit != "none":
            of_queue = 0.0 if limit == "batch_size" else queued * time / whole
            layers[BEHIND + limit] = behind * time / held + of_queue
    layers["head_of_line"] = np.where(held > 1e-12, 0.0, behind)
    return {cause: values for cause, values in layers.items() if values.any()}


@once_a_run
def _bound_times(run: RunData) -> dict[str, Floats]:
    """The share of each bin in which iterations were bound by each limit."""
    bound = run.iterations["bound_by"].fillna("none").astype(str)
    return {limit: TimeBins.of(run).means((bound == limit).to_numpy(dtype=float)) for limit in bound.unique()}


def draw_bound(run: RunData) -> Figure:
    """What bound each stretch of time: the limit that bound most of it as a strip, and the share of each limit."""
    figure = Figure(figsize=(WIDTH, 3.6))
    strip, shares = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 4]})
    bins, iterations = TimeBins.of(run), run.iterations
    found = iterations["bound_by"].fillna("none").astype(str)
    colours = limit_colours(found.unique())
    times = {limit: _bound_times(run)[limit] for limit in colours}
    whole = np.maximum(sum(times.values(), np.zeros(len(bins.edges_s) - 1)), 1e-12)
    latency_ms = iterations["latency_ms"].to_numpy(dtype=float)
    total_ms = float(latency_ms.sum()) or 1.0
    words = words_of(run.config)
    names = {
        limit: f"{words.limit_name(limit)} ({percent(float(latency_ms[found == limit].sum()) / total_ms)})"
        for limit in colours
    }
    # Stretches without an iteration stay white.
    stack(
        shares,
        bins.edges,
        {limit: np.where(whole > 1e-9, values / whole, 0.0) for limit, values in times.items()},
        colours,
        names,
    )
    winner = np.argmax(np.array(list(times.values())), axis=0)
    for index, (_, colour) in enumerate(colours.items()):
        chosen = np.where((winner == index) & (whole > 1e-9), 1.0, 0.0)
        steps(strip, chosen, bins.edges, fill=True, color=colour, linewidth=0)
    strip.set(ylim=(0, 1), yticks=[], ylabel="most of\nthe time")
    strip.grid(visible=False)
    strip.spines[["left", "bottom"]].set_visible(False)
    strip.tick_params(length=0)
    shares.set(ylim=(0, 1), ylabel="share of the time")
    round_ticks(shares.yaxis, text=in_percent)
    handles, labels = shares.get_legend_handles_labels()
    strip.legend(handles, labels, loc="lower right", bbox_to_anchor=(1, 1), ncols=5, borderaxespad=0.2)
    bins.label(shares)
    heading(strip, "What bound the iterations", run, legend=True)
    figure.align_ylabels()
    return figure
