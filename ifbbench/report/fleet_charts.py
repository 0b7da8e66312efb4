"""The chart of a fleet: a lane for each replica, with its KV cache and its queue over time, and the number of replicas
of a fleet that changes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ifbbench.analysis.fleet import FleetFindings
from ifbbench.analysis.fleet_changes import FleetChanges
from ifbbench.analysis.number_texts import time_unit
from ifbbench.fleet.events import FAIL
from ifbbench.report.colours import LIMIT_COLOURS, PAUSE
from ifbbench.report.style import MAX_BINS, WIDTH, chosen_ticks, heading, in_percent, round_ticks, steps
from ifbbench.rundir.fleet import replica_directories
from ifbbench.rundir.reader import Floats, RunData, load_run

LANE_HEIGHT, OTHER_HEIGHT = 0.8, 1.4
GREY = "0.5"
KV_COLOUR, QUEUE_COLOUR, TRANSFER_COLOUR = LIMIT_COLOURS["kv_blocks"], PAUSE, LIMIT_COLOURS["batch_size"]


def draw_replicas(run: RunData) -> Figure:
    """The share of the KV cache in use and the requests that wait, of each replica, on one axis of time; above them, of
    a fleet that changes, how many replicas take requests; below them, transfers of keys and values, between replicas
    or from stores. While a replica is not there, its lane is grey."""
    changes = FleetFindings(run).changes
    replicas = [lane_of(load_run(path)) for path in replica_directories(run.path)]
    if changes is not None:
        replicas = [_until(lane, one["ended_s"]) for lane, one in zip(replicas, changes.replicas, strict=True)]
    end_s = max((float(times[-1]) for times, _, _ in replicas if len(times)), default=1e-3)
    edges_s = np.linspace(0.0, max(end_s, 1e-3), MAX_BINS + 1)
    unit, scale = time_unit([end_s])
    count, names = len(replicas), _names(run, len(replicas))
    extra = int(run.is_disaggregated or "kv_tiers" in (run.summary or {}))
    more = changes is not None
    figure = Figure(figsize=(WIDTH, LANE_HEIGHT * (count + more + extra) + OTHER_HEIGHT))
    axes_of = list(np.atleast_1d(figure.subplots(count + more + extra, 1, sharex=True)))
    top, *lanes = ([] if more else [None]) + axes_of
    most = max((float(waiting.max()) for _, _, waiting in replicas if len(waiting)), default=1.0)
    # The lanes have one axis, so that they can be compared; one up to 100 % would hide what prefill replicas hold.
    largest_use = max((float(used.max()) for _, used, _ in replicas if len(used)), default=1.0) or 1.0
    for number, (axes, (times, used, waiting)) in enumerate(zip(lanes[:count], replicas, strict=True)):
        steps(
            axes, _at(edges_s, times, used), edges_s * scale, fill=True, color=KV_COLOUR, alpha=0.35, linewidth=0,
            label="KV cache in use",
        )  # fmt: skip
        axes.set(ylim=(0, largest_use * 1.05))
        name_lane(axes, names[number])
        if changes is not None:
            _shade_absence(axes, changes.replicas[number], float(edges_s[-1]), scale)
        queue = axes.twinx()
        steps(
            queue, _at(edges_s, times, waiting), edges_s * scale, baseline=None, color=QUEUE_COLOUR, linewidth=1,
            label="requests waiting",
        )  # fmt: skip
        queue.set_ylim(0, max(1.0, most) * 1.05)
        round_ticks(axes.yaxis, 2, text=in_percent)
        chosen_ticks(queue.yaxis, (0.0, max(1.0, most)))
        queue.spines["right"].set_visible(False)
        queue.tick_params(length=0)
        queue.grid(visible=False)  # its ticks are at other heights than those of the left axis
        if not number:
            handles = [axes.patches[0], queue.patches[0]] if queue.patches else []
            if handles:
                axes.legend(
                    handles, ["KV cache in use (left)", "requests waiting (right)"], loc="lower left",
                    bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0,
                )  # fmt: skip
    if extra:
        _draw_transfers(lanes[-1], run, edges_s, scale)
    lanes[-1].set_xlabel(f"time since the start of the run ({unit})")
    lanes[-1].set_xlim(0.0, float(edges_s[-1]) * scale)
    round_ticks(lanes[-1].xaxis, 12)
    if changes is not None:
        _draw_sizes(top, changes, edges_s, scale)
    heading(lanes[0] if top is None else top, f"Replicas behind {run.config.get('router')}", run, legend=True)
    return figure


def name_lane(axes: Axes, name: str) -> None:
    """Name a lane beside its axis, in a line that can be read."""
    axes.set_ylabel(name, rotation=0, horizontalalignment="right", verticalalignment="center")


def _names(run: RunData, count: int) -> list[str]:
    """The name of each lane."""
    if not run.is_disaggregated:
        return [f"replica {number}" for number in range(count)]
    return [f"{'prefill' if number < run.config['prefill_replicas'] else 'decode'} {number}" for number in range(count)]


def _draw_transfers(axes: Axes, run: RunData, edges_s: Floats, scale: float) -> None:
    """Transfers of keys and values in progress, the most in each bin."""
    table = run.requests
    sent = table[table["transfer_end_s"].notna()] if "transfer_end_s" in table else table.iloc[:0]
    starts, ends = (
        (sent[f"transfer_{edge}_s"].to_numpy(dtype=float) for edge in ("start", "end")) if len(sent) else ((), ())
    )
    times = np.concatenate([starts, ends])
    order = np.lexsort((np.repeat([0, 1], len(starts)), times))
    under_way = np.cumsum(np.repeat([1.0, -1.0], len(starts))[order])
    found = _at(edges_s, times[order], under_way)
    steps(axes, found, edges_s * scale, fill=True, color=TRANSFER_COLOUR, alpha=0.6, linewidth=0)
    highest = max(1.0, float(found.max()))
    axes.set(ylim=(0, highest * 1.05))
    name_lane(axes, "transfers")
    chosen_ticks(axes.yaxis, (0.0, highest))


def _shade_absence(axes: Axes, replica: Mapping[str, Any], end_s: float, scale: float) -> None:
    """Grey where a replica is not there, and lighter grey while it starts; a line at a failure."""
    started_s, ended_s, ready_s = replica["started_s"], replica["ended_s"], replica["ready_s"]
    for since_s, until_s, alpha in (
        (0.0, started_s, 0.35),
        (started_s, ended_s if ready_s is None else ready_s, 0.15),
        (ended_s, end_s, 0.35),
    ):
        if until_s > since_s:
            axes.axvspan(since_s * scale, until_s * scale, color=GREY, alpha=alpha, linewidth=0)
    if replica["ended_by"] == FAIL:
        axes.axvline(ended_s * scale, color=QUEUE_COLOUR, linewidth=1.5)


def _draw_sizes(axes: Axes, changes: FleetChanges, edges_s: Floats, scale: float) -> None:
    """How many replicas take requests over time."""
    times, sizes = changes.sizes
    where = np.searchsorted(times, edges_s[:-1], side="right") - 1
    steps(axes, np.where(where < 0, 0.0, sizes[where]), edges_s * scale, fill=True, color=GREY, alpha=0.6, linewidth=0)
    most = max(int(sizes.max()), 1)
    axes.set(ylim=(0, most * 1.1), yticks=(0, most))
    name_lane(axes, "replicas")


def lane_of(run: RunData) -> tuple[Floats, Floats, Floats]:
    """The starts of the iterations of a replica in seconds, and in each the share of the KV cache in use and the number
    of requests that wait."""
    if not (run.summary or {}).get("iterations", 1):
        return np.empty(0), np.empty(0), np.empty(0)
    table = run.iterations
    used, pool, _ = run.blocks_of_fullest()
    times = table["start_s"].to_numpy(dtype=float)
    waiting = run.requests_waiting
    # What an iteration began with does not last beyond it where no other one follows.
    ends_s = times[-1:] + table["latency_ms"].to_numpy(dtype=float)[-1:] / 1e3
    held = np.nan_to_num(used) / max(pool, 1)
    return np.append(times, ends_s), np.append(held, [0.0] * len(ends_s)), np.append(waiting, [0.0] * len(ends_s))


def _until(lane: tuple[Floats, Floats, Floats], end_s: float) -> tuple[Floats, Floats, Floats]:
    """A lane that holds nothing from `end_s` on."""
    times, used, waiting = lane
    return np.append(times, end_s), np.append(used, 0.0), np.append(waiting, 0.0)


def _at(edges_s: Floats, times: Floats, values: Floats) -> Floats:
    """The highest value in each bin; in one in which nothing changes, the last value before it."""
    size = len(edges_s) - 1
    if not len(times):
        return np.zeros(size)
    bins = np.clip(np.searchsorted(edges_s, times, side="right") - 1, 0, size - 1)
    order, firsts = np.unique(bins, return_index=True)
    before = np.searchsorted(bins, np.arange(size), side="right") - 1
    found: Floats = np.where(before >= 0, values[np.maximum(before, 0)], 0.0)
    found[order] = np.maximum.reduceat(values, firsts)
    return np.nan_to_num(found)
