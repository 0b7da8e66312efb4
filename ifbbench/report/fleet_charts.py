"""The chart of a fleet: a lane for each replica, with its KV cache and its queue over time."""

import numpy as np
from matplotlib.figure import Figure

from ifbbench.analysis.number_texts import time_unit
from ifbbench.report.colours import LIMIT_COLOURS, PAUSE
from ifbbench.report.style import MAX_BINS, WIDTH, heading, in_percent, round_ticks, steps
from ifbbench.rundir.fleet import replica_directories
from ifbbench.rundir.reader import Floats, RunData, load_run

LANE_HEIGHT, OTHER_HEIGHT = 0.8, 1.4
KV_COLOUR, QUEUE_COLOUR = LIMIT_COLOURS["kv_blocks"], PAUSE


def draw_replicas(run: RunData) -> Figure:
    """The share of the KV cache in use and the requests that wait, of each replica, on one axis of time."""
    replicas = [_lane(load_run(path)) for path in replica_directories(run.path)]
    end_s = max((float(times[-1]) for times, _, _ in replicas if len(times)), default=1e-3)
    edges_s = np.linspace(0.0, max(end_s, 1e-3), MAX_BINS + 1)
    unit, scale = time_unit([end_s])
    count = len(replicas)
    figure = Figure(figsize=(WIDTH, LANE_HEIGHT * count + OTHER_HEIGHT))
    lanes = np.atleast_1d(figure.subplots(count, 1, sharex=True))
    most = max((float(waiting.max()) for _, _, waiting in replicas if len(waiting)), default=1.0)
    for number, (axes, (times, used, waiting)) in enumerate(zip(lanes, replicas, strict=True)):
        steps(
            axes, _at(edges_s, times, used), edges_s * scale, fill=True, color=KV_COLOUR, alpha=0.35, linewidth=0,
            label="KV cache in use",
        )  # fmt: skip
        axes.set(ylim=(0, 1.05), ylabel=str(number))
        queue = axes.twinx()
        steps(
            queue, _at(edges_s, times, waiting), edges_s * scale, baseline=None, color=QUEUE_COLOUR, linewidth=1,
            label="requests waiting",
        )  # fmt: skip
        queue.set_ylim(0, max(1.0, most) * 1.05)
        round_ticks(axes.yaxis, 2, text=in_percent)
        round_ticks(queue.yaxis, 2, whole=True)
        queue.spines["right"].set_visible(False)
        queue.tick_params(length=0)
        if not number:
            handles = [axes.patches[0], queue.patches[0]] if queue.patches else []
            if handles:
                axes.legend(
                    handles, ["KV cache in use (left)", "requests waiting (right)"], loc="lower left",
                    bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0,
                )  # fmt: skip
    lanes[-1].set_xlabel(f"time ({unit})")
    heading(lanes[0], f"Replicas behind {run.config.get('router')}", run, legend=True)
    return figure


def _lane(run: RunData) -> tuple[Floats, Floats, Floats]:
    """The starts of the iterations of a replica in seconds, the share of the KV cache in use, the requests waiting."""
    if not (run.summary or {}).get("iterations", 1):
        return np.empty(0), np.empty(0), np.empty(0)
    table = run.iterations
    used, pool, _ = run.blocks_of_fullest()
    times = table["start_s"].to_numpy(dtype=float)
    return times, np.nan_to_num(used) / max(pool, 1), table["waiting"].to_numpy(dtype=float)


def _at(edges_s: Floats, times: Floats, values: Floats) -> Floats:
    """The highest value in each bin; in one in which nothing starts, the value before it."""
    if not len(times):
        return np.zeros(len(edges_s) - 1)
    found = np.full(len(edges_s) - 1, np.nan)
    bins = np.clip(np.searchsorted(edges_s, times, side="right") - 1, 0, len(found) - 1)
    order = np.unique(bins)
    found[order] = np.maximum.reduceat(values, np.searchsorted(bins, order))
    known = np.where(np.isnan(found), 0, np.arange(len(found)))
    latest = np.maximum.accumulate(known)
    filled: Floats = np.nan_to_num(found[latest])
    return filled
