"""The charts of a run, as PNG, SVG or PDF."""

import gc
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ifbbench.analysis.number_texts import percent
from ifbbench.analysis.token_times import output_tokens
from ifbbench.analysis.words import BINDING, window_name, words_of
from ifbbench.errors import InputError
from ifbbench.processes import run_in_processes, usable_cores
from ifbbench.report.cells import draw_cells, tint
from ifbbench.report.chart_files import Output
from ifbbench.report.client_charts import draw_client_throughput, draw_server_metrics
from ifbbench.report.colours import INK, LIMIT, LIMIT_COLOURS, PAUSE, PHASE_COLOURS, limit_colours
from ifbbench.report.figure_files import save
from ifbbench.report.fleet_charts import draw_replicas
from ifbbench.report.iteration_charts import draw_bound, draw_budget, draw_queue, limits_of_line
from ifbbench.report.lanes import draw_lanes
from ifbbench.report.latency_charts import draw_itl, draw_latency, draw_ttft
from ifbbench.report.style import (
    LIMIT_DASHES,
    WIDTH,
    TimeBins,
    chosen_ticks,
    draw_limit,
    heading,
    in_percent,
    label_mean,
    legend_above,
    line_styles,
    note_inside,
    nothing_to_draw,
    retitle,
    round_ticks,
    steps,
    styled,
)
from ifbbench.report.timeline import draw_timeline
from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import Floats, RunData
from ifbbench.rundir.run_directory import METRICS, find_lines

# The axis of KV blocks reaches to the size of the pool if that is up to so many times the blocks in use.
NEAR = 10
# The colours of several attention windows: that of KV blocks, darker or lighter.
WINDOW_TINTS = (0.0, -0.55, 0.45, -0.3)
# Charts of runs with so many iterations are drawn in several processes: of others, to fork takes as long as it gains.
MIN_SHARED = 100_000
# Columns of iterations that no chart shows.
NOT_DRAWN = frozenset(
    {
        "timestamp",
        "active_request_count",
        "max_request_count",
        "free_kv_cache_blocks",
        "allocated_total_kv_cache_blocks",
        "allocated_new_kv_cache_blocks",
        "reused_kv_cache_blocks",
        "microbatch_id",
        "paused_requests",
        "host_ms",
        "device_ms",
        "paused",
        "missed_blocks",
        "first_left_out",
        "first_left_out_request",
        "first_left_out_reason",
        "queue_head_request",
    }
)
# The charts of a run against an endpoint, which has no iterations.
ENDPOINT_CHARTS = ("timeline", "throughput", "latency", "ttft", "itl", "server")
# The charts that need neither iterations nor spans.
SUMMARY_CHARTS = ("latency", "ttft")
# The charts of a log that was imported and that has no requests.
LOG_CHARTS = ("bound", "budget", "kv_cache", "throughput")
# The charts of a fleet; others are of a replica.
FLEET_CHARTS = ("replicas", *SUMMARY_CHARTS)
# Charts that most runs do not have: of an endpoint, of a fleet.
NOT_OF_A_RUN = frozenset(("server", "replicas"))
_log = logging.getLogger("ifbbench")


def plot_run(
    run: RunData,
    directory: Path | None = None,
    *,
    only: Collection[str] = (),
    exact: bool = False,
    output: Output | None = None,
) -> list[Path]:
    """Draw the charts of `run`, those called `only` or all, into `directory`, by default `charts` in the run directory;
    return the files written.

    exact: the timeline with a cell for each request and iteration. There is no chart of blocks of a contiguous cache.
    A run that was killed before its first iteration has no charts, and a warning says so; InputError for a complete run
    without iterations. Of a run with `--recording summary`, SUMMARY_CHARTS are drawn, of an imported log without
    requests LOG_CHARTS, and a warning says so.
    """
    if run.endpoint:
        if unknown := [name for name in only if name not in ENDPOINT_CHARTS]:
            raise InputError(
                f"--only {unknown[0]}: a run against an endpoint has no iterations to draw; expected "
                f"{', '.join(ENDPOINT_CHARTS)}."
            )
        only = only or [name for name in ENDPOINT_CHARTS if name != "server" or find_lines(run.path, METRICS).exists()]
    elif run.is_fleet:
        if unknown := [name for name in only if name not in FLEET_CHARTS]:
            raise InputError(
                f"--only {unknown[0]}: {run.path} is a fleet, of which {', '.join(FLEET_CHARTS)} are drawn; name the "
                "directory of a replica for others."
            )
        only = only or (FLEET_CHARTS if run.config.get("recording") != "summary" else SUMMARY_CHARTS)
    elif run.has_only_summary:
        needs = "recorded with --recording summary, which leaves out the iterations and spans that"
        if unknown := [name for name in only if name not in SUMMARY_CHARTS]:
            raise InputError(
                f"--only {unknown[0]}: {run.path} was {needs} it shows; expected "
                f"{', '.join(SUMMARY_CHARTS)}, or run again with --recording full."
            )
        if not only:
            only = SUMMARY_CHARTS
            _log.warning("%s: %s the charts other than %s need.", run.path, needs, " and ".join(only))
    elif run.iterations.empty:
        if run.partial:
            _log.warning("%s: no iterations, so there is nothing to draw.", run.path)
            return []
        raise nothing_to_draw(run)
    if run.lacks_requests:
        needs = "was imported from a log without requests, which"
        if unknown := [name for name in only if name not in LOG_CHARTS]:
            raise InputError(f"--only {unknown[0]}: {run.path} {needs} it shows; expected {', '.join(LOG_CHARTS)}.")
        if not only:
            only = LOG_CHARTS
            _log.warning("%s: %s the charts other than %s need.", run.path, needs, ", ".join(only))
    output = output or Output(directory)
    charts = {name: chart.draw for name, chart in CHARTS.items() if name in (only or set(CHARTS) - NOT_OF_A_RUN)}
    if run.endpoint and "throughput" in charts:
        charts["throughput"] = draw_client_throughput
    if not run.has_only_summary and not run.iterations["max_kv_cache_blocks"].max() > 0:
        charts.pop("kv_cache", None)
    if exact and "timeline" in charts:
        charts["timeline"] = partial(draw_cells, exact=True)
    return sorted(_draw_all(run, list(charts.items()), output))


def _draw_all(run: RunData, charts: Sequence[tuple[str, Callable[[RunData], Figure]]], output: Output) -> list[Path]:
    """Draw each of `charts` and write it; returns the files. Charts of a long run are drawn in several processes."""

    def draw(number: int, _report: Callable[[int], None]) -> list[Path]:
        name, make = charts[number]
        with styled():
            return save_chart(make(run), run, name, output)

    processes = min(usable_cores(), len(charts))
    if run.has_only_summary or run.endpoint or run.is_fleet or len(run.iterations) < MIN_SHARED or processes < 2:
        return [path for number in range(len(charts)) for path in draw(number, lambda _: None)]
    # Read before the fork, and not by each process. What is frozen is not looked at by their garbage collectors, which
    # would copy the memory that it is in.
    _ = run.requests, run.spans, TimeBins.of(run)
    gc.freeze()
    try:
        results = dict(run_in_processes(draw, len(charts), processes))
    finally:
        gc.unfreeze()
    for number in range(len(charts)):
        if isinstance(results[number], BaseException):
            raise results[number]
    return [path for number in range(len(charts)) for path in results[number]]


def save_chart(figure: Figure, run: RunData, name: str, output: Output) -> list[Path]:
    """Write one chart; returns its files."""
    if output.title:
        retitle(figure, output.title)
    return save(figure, output.directory or run.path / "charts", name, output.formats, output.dpi)


def draw_throughput(run: RunData) -> Figure:
    """Requests that wait by the limit that held the first of them, output tokens/s, context tokens/s and requests in
    the batch, one above the other on one axis of time."""
    figure = Figure(figsize=(WIDTH, 8))
    panels = figure.subplots(4, 1, sharex=True, gridspec_kw={"height_ratios": [1.6, 2, 1.4, 2]})
    waiting, output, context, batch = panels
    bins, iterations = TimeBins.of(run), run.iterations
    tokens = output_tokens(run)
    if run.lacks_requests:  # each generation request got one
        tokens = (iterations["scheduled_requests"] - iterations["context_requests"]).to_numpy(dtype=float)
    _rate(output, bins, tokens, "generation", "output tokens/s")
    _rate(context, bins, iterations["total_context_tokens"].to_numpy(dtype=float), "context", "context tokens/s")
    total = bins.means(iterations["scheduled_requests"].to_numpy(dtype=float))
    generation = np.maximum(total - bins.means(iterations["context_requests"].to_numpy(dtype=float)), 0.0)
    steps(
        batch,
        total,
        bins.edges,
        baseline=generation,
        fill=True,
        color=PHASE_COLOURS["context"],
        linewidth=0,
        label="in context phase",
    )
    steps(
        batch,
        generation,
        bins.edges,
        fill=True,
        color=PHASE_COLOURS["generation"],
        linewidth=0,
        label="in generation phase",
    )
    batch.set_ylabel("requests in the batch")
    draw_limit(batch, run, "batch_size", float(total.max()))
    round_ticks(batch.yaxis, 5, whole=True)
    batch.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    _waiting(waiting, bins, run)
    bins.label(batch)
    heading(waiting, "Throughput", run)
    figure.align_ylabels()
    return figure


def _waiting(axes: Axes, bins: TimeBins, run: RunData) -> None:
    """Requests that have arrived and do not run, by the limit that held the head of the line."""
    number, below, bound = run.requests_waiting, np.zeros(len(bins.edges) - 1), limits_of_line(run)
    shares = figures(run).get("waiting_by_limit") or {}
    for limit, colour in limit_colours((*BINDING, *bound.unique())).items():
        above = below + bins.means(np.where(bound == limit, number, 0.0))
        if above.max() > below.max() or shares.get(limit):
            # In a killed run, no request that waited for this limit may have completed.
            share = f" ({percent(shares.get(limit, 0.0) / sum(shares.values()))})" if sum(shares.values()) else ""
            steps(
                axes,
                above,
                bins.edges,
                baseline=below,
                fill=True,
                color=colour,
                linewidth=0,
                label=f"{words_of(run.config).limit_name(limit)}{share}",
            )
        below = above
    axes.set_ylabel("requests waiting")
    axes.set_ylim(0, max(1.0, float(below.max())) * 1.35)  # the legend is above the highest value
    round_ticks(axes.yaxis, 4, whole=True)
    if axes.patches:
        axes.legend(loc="upper right", ncols=4, borderaxespad=0)


def _rate(axes: Axes, bins: TimeBins, tokens: Floats, phase: str, label: str) -> None:
    rates = bins.rates(tokens)
    steps(axes, rates, bins.edges, fill=True, color=PHASE_COLOURS[phase], linewidth=0)
    mean = tokens[tokens == tokens].sum() / (bins.edges_s[-1] - bins.edges_s[0])
    axes.axhline(mean, color=INK, linewidth=0.8, linestyle=":")
    label_mean(axes, mean)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    round_ticks(axes.yaxis)


def draw_kv_cache(run: RunData) -> Figure:
    """Used blocks and the size of the pool above; pauses below, if there were any."""
    bins, iterations = TimeBins.of(run), run.iterations
    paused, words = iterations["pauses"].to_numpy(dtype=float), words_of(run.config)
    if paused.any():
        figure = Figure(figsize=(WIDTH, 4.6))
        blocks, last = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
        counts, _ = np.histogram(bins.clock.start_s, bins.edges_s, weights=paused)
        steps(last, counts, bins.edges, fill=True, color=PAUSE, linewidth=0)
        last.set_ylabel(f"{words.pauses}{bins.per_bin}")
        last.set_ylim(0, max(1.0, float(counts.max())) * 1.2)
        round_ticks(last.yaxis, 2, whole=True)
    else:
        figure = Figure(figsize=(WIDTH, 4))
        blocks = last = figure.subplots()
        note_inside(blocks, f"no request was {words.paused}")
    (_windows_used if run.windows else _blocks_used)(blocks, bins, run)
    bins.label(last)
    heading(blocks, "KV cache", run, legend=bool(run.windows))
    figure.align_ylabels()
    return figure


def _windows_used(axes: Axes, bins: TimeBins, run: RunData) -> None:
    """The share of the blocks of each attention window that are in use, a line a window."""
    colours = [tint(LIMIT_COLOURS["kv_blocks"], share) for share in WINDOW_TINTS]
    for size, how in zip(run.windows, line_styles(len(run.windows), colours), strict=True):
        used, pool = run.window_blocks(size)
        label = f"{window_name(size)}: {pool:,} blocks"
        steps(axes, bins.peaks(used) / max(pool, 1), bins.edges, baseline=None, label=label, **how)
    axes.axhline(1, color=LIMIT, linewidth=1, linestyle=LIMIT_DASHES)
    axes.set(ylabel="KV blocks used\n(share of the window's)", ylim=(0, 1.08))
    round_ticks(axes.yaxis, text=in_percent)
    legend_above(axes, len(run.windows))


def _blocks_used(blocks: Axes, bins: TimeBins, run: RunData) -> None:
    """The blocks in use, and the size of the pool."""
    iterations = run.iterations
    pool, size = (iterations[name].max() for name in ("max_kv_cache_blocks", "tokens_per_kv_cache_block"))
    used = bins.peaks(iterations["used_kv_cache_blocks"].to_numpy(dtype=float))
    colour = LIMIT_COLOURS["kv_blocks"]
    steps(blocks, used, bins.edges, fill=True, color=colour, alpha=0.25, linewidth=0)
    steps(blocks, used, bins.edges, baseline=None, color=colour, linewidth=1.2)
    # What uses little of the pool is drawn larger, with the size of the pool in words.
    near = pool <= NEAR * used.max()
    engine = words_of(run.config)
    of_size = "" if size == 1 else f" of {size:.0f} tokens"
    words = f"pool: {pool:,.0f} {engine.blocks(size)}{of_size}" + ("" if near else " (above this scale)")
    blocks.annotate(
        words,
        (0, pool if near else 1),
        xycoords=("axes fraction", "data" if near else "axes fraction"),
        xytext=(4, 4 if near else -10),
        textcoords="offset points",
        color=LIMIT,
        fontsize=8,
    )
    if near:
        blocks.axhline(pool, color=LIMIT, linewidth=1, linestyle=LIMIT_DASHES)
    blocks.set(ylabel=f"KV {engine.blocks(size)} used", ylim=(0, pool * 1.14 if near else max(used.max() * 1.3, 1.0)))
    round_ticks(blocks.yaxis, 6, whole=True)
    to_percent, to_blocks = 100 / pool, pool / 100
    share = blocks.secondary_yaxis(
        "right", functions=(lambda y: np.asarray(y) * to_percent, lambda y: np.asarray(y) * to_blocks)
    )
    share.set(ylabel="% of the pool")
    if near:
        chosen_ticks(share.yaxis, [0, 25, 50, 75, 100])
    else:
        round_ticks(share.yaxis, 4)
    share.spines["right"].set_visible(False)
    share.tick_params(length=0)


@dataclass(frozen=True)
class Chart:
    """A chart of one run, and what it shows."""

    draw: Callable[[RunData], Figure]
    shows: str


CHARTS: Mapping[str, Chart] = MappingProxyType(
    {
        "timeline": Chart(draw_timeline, "what each request did, from its arrival to its end"),
        "lanes": Chart(draw_lanes, "the requests that run at a time, a lane each"),
        "throughput": Chart(draw_throughput, "requests waiting, tokens per second and the batch over time"),
        "budget": Chart(draw_budget, "how much of the token budget and the batch size iterations used"),
        "queue": Chart(draw_queue, "how many requests wait, by what each waits for"),
        "bound": Chart(draw_bound, "the limit that bound each stretch of time"),
        "kv_cache": Chart(draw_kv_cache, "KV blocks used, and pauses"),
        "latency": Chart(draw_latency, "distributions of TTFT and ITL"),
        "ttft": Chart(draw_ttft, "TTFT against prompt length, by what the request waited for"),
        "itl": Chart(draw_itl, "gaps between tokens over time, with stalls"),
        "replicas": Chart(draw_replicas, "of a fleet, the KV cache and the queue of each replica, a lane each"),
        "server": Chart(draw_server_metrics, "of a run against an endpoint, the server's metrics over time"),
    }
)
