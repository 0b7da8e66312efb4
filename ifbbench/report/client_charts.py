"""Charts of a run against an endpoint: its load as the client saw it, and the polled metrics of the server."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ifbbench.analysis.token_times import token_times
from ifbbench.errors import InputError
from ifbbench.report.colours import MUTED, PHASE_COLOURS, SERIES
from ifbbench.report.style import WIDTH, TimeBins, heading, legend_above, round_ticks, steps
from ifbbench.report.timeline import draw_population, phase_handles
from ifbbench.rundir.client_figures import load_gauges
from ifbbench.rundir.reader import RunData
from ifbbench.rundir.run_directory import METRICS, find_lines

MAX_BINS, LEAST_BINS = 160, 20
ROW_HEIGHT = 1.5


def draw_client_throughput(run: RunData) -> Figure:
    """Requests in flight by phase, output tokens/s, and TTFT by arrival, one above the other on one axis of time."""
    bins = _even(run)
    figure = Figure(figsize=(WIDTH, 7))
    active, output, ttft = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1.6, 1.6]})
    handles = phase_handles(run, draw_population(active, bins, run))
    legend_above(active, len(handles), handles)
    active.set_ylabel("requests in flight")
    times_s = np.concatenate([np.empty(0), *token_times(run).values()])
    rates = np.histogram(times_s, bins.edges_s)[0] / np.diff(bins.edges_s)
    steps(output, rates, bins.edges, fill=True, color=PHASE_COLOURS["generation"], linewidth=0)
    output.set(ylabel="output tokens/s", ylim=(0, float(rates.max(initial=0)) * 1.1 or 1.0))
    round_ticks(output.yaxis)
    done, failed = run.completed, run.requests[run.requests["outcome"] != "completed"]
    ttft.plot(
        bins.scaled(done["arrival_s"].to_numpy(float)),
        done["ttft_s"].to_numpy(float) * 1000,
        ".",
        color=SERIES[0],
        markersize=4,
    )
    for arrival in bins.scaled(failed["arrival_s"].to_numpy(float)):
        ttft.axvline(arrival, color=MUTED, linewidth=0.5, linestyle=":")
    ttft.set(ylabel="TTFT (ms), by arrival" + ("\ndotted: failed" if len(failed) else ""))
    ttft.set_ylim(bottom=0)
    round_ticks(ttft.yaxis)
    bins.label(ttft)
    heading(active, "Load seen by the client", run, legend=True)
    figure.align_ylabels()
    return figure


def draw_server_metrics(run: RunData) -> Figure:
    """The gauges of load in the server's metrics over time, a panel each; those that stay the same are left out.
    InputError if the metrics were not polled."""
    gauges = load_gauges(run)
    changing = {name: series for name, series in gauges.items() if np.ptp(series[1]) > 0} or gauges
    if not changing:
        raise InputError(f"{find_lines(run.path, METRICS)}: no metrics of the server's load; run with --poll_metrics.")
    bins = _even(run)
    figure = Figure(figsize=(WIDTH, 1.3 + ROW_HEIGHT * len(changing)))
    panels: list[Axes] = list(figure.subplots(len(changing), 1, sharex=True, squeeze=False)[:, 0])
    for axes, (name, (at_s, values)) in zip(panels, changing.items(), strict=True):
        axes.step(bins.scaled(at_s), values, where="post", color=SERIES[0], linewidth=1.4)
        axes.plot(bins.scaled(at_s), values, ".", color=SERIES[0], markersize=3)
        axes.set_ylim(0, float(values.max()) * 1.15 or 1.0)
        axes.annotate(name, (0, 1), xycoords="axes fraction", xytext=(0, 3), textcoords="offset points", fontsize=8)
        round_ticks(axes.yaxis, 4, whole=bool((values == values.round()).all()))
    bins.label(panels[-1])
    heading(panels[0], "Metrics of the server", run, legend=True)
    return figure


def _even(run: RunData) -> TimeBins:
    """Even bins from the first arrival to the last token."""
    ends_s = run.spans["end_s"].to_numpy(float)
    last_s = float(ends_s.max(initial=0.0)) or 1e-3  # there may be no request that was sent
    count = int(np.clip(len(ends_s), LEAST_BINS, MAX_BINS))
    return TimeBins(TimeBins.of(run).clock, np.linspace(0.0, last_s, count + 1))
