"""The figures of summary.json from the other files of a run: of a killed run, and of the steady state of any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ifbbench.engine.drafts import DraftCounts
from ifbbench.rundir.client_figures import client_figures
from ifbbench.rundir.client_side import UNKNOWN_FIGURES
from ifbbench.rundir.drafts import DraftTotals
from ifbbench.rundir.metrics import (
    BOUND_BY,
    Population,
    by_group,
    limit_waited_for,
    own_seconds,
    shares_of_limits,
    slow_ttft_s,
)
from ifbbench.rundir.reader import RunData, delivered_s, producing_spans
from ifbbench.rundir.run_directory import write_json
from ifbbench.rundir.traffic import MIN_REQUESTS, NO_TRAFFIC, TRAFFIC_COLUMNS, Window, steady_state, traffic
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY
from ifbbench.settings.objectives import parse_objectives

if TYPE_CHECKING:  # it takes a third of a second to import, and a run that prints its report reads no table
    import pandas as pd

PART_OF_ATTRIBUTION = "attribution_s."


def figures(run: RunData) -> dict[str, Any]:
    """The figures of summary.json. Where it is missing they cover the requests completed before the run was killed."""
    return recorded_figures(run) if run.summary is None else run.summary


def recorded_figures(run: RunData, window: Window | None = None) -> dict[str, Any]:
    """The figures of summary.json, of the requests that completed; of a run with --recording summary without those of
    iterations and gaps between tokens.

    window: only of the requests, iterations and gaps between tokens that ended in it; rates are over its length. The
    times of iterations that thinned statistics leave out are interpolated: good for charts, not for ITL."""
    if run.endpoint:
        return client_figures(run, window)
    requests, thinned, ends_s = run.requests, run.recorded_every > 1, np.empty(0)
    of_iterations, drafts = UNKNOWN_FIGURES, dict[str, Any]()
    if window is not None:
        # Failed requests have no end.
        requests = requests[window.holds(requests["end_s"].fillna(requests["arrival_s"]).to_numpy(dtype=float))]
    if window is not None or not run.has_only_summary:
        iterations = run.iterations
        ends_s = delivered_s(iterations)
        chosen = window.holds(ends_s) if window else np.full(len(ends_s), True)
        blocks = {size: run.window_blocks(size) for size in run.windows}
        windows = {
            size: {"max": pool, "peak_used": int(np.nanmax(used[chosen], initial=0))}
            for size, (used, pool) in blocks.items()
        }
        of_iterations = _of_iterations(iterations[chosen], requests, thinned, windows, run.num_micro_batches)
        drafts = _of_drafts(iterations[chosen], thinned)
    done, failed = (requests[requests["outcome"] == outcome] for outcome in ("completed", "failed"))
    if window is not None:
        span_s = window.end_s - window.start_s
    else:
        span_s = float(done["end_s"].max() - requests["arrival_s"].min()) if len(done) else 0.0
    total = None if window else (run.run.get("trace") or {}).get("requests")
    slo = run.config.get("slo")
    objectives = parse_objectives(slo) if slo else ()
    populations = _populations(run, done, failed, len(ends_s))
    whole = Population.merged(list(populations.values()))
    figures = whole.figures(span_s, ends_s, objectives, window)
    counts = figures.pop("requests")
    found = {
        "requests": counts | {"total": int(total or counts["total"])},
        "duration_s": span_s,
        **figures,
        **of_iterations,
        "waiting_by_limit": _waiting_by_limit(done),
        **NO_TRAFFIC,
    }
    if len(done) >= MIN_REQUESTS and run.config.get("concurrency") is None:
        arrival_s, queue_time_s, ttft_s = (done[name].to_numpy(dtype=float) for name in TRAFFIC_COLUMNS)
        found |= traffic(arrival_s, queue_time_s, ttft_s, slow_ttft_s(objectives))
    found |= by_group(populations, span_s, ends_s, objectives, window)
    if thinned:  # gaps between tokens are not those of interpolated times
        groups = [figures for title in ("by_class", "by_priority") for figures in found.get(title, {}).values()]
        for figures in (found, *groups):
            figures["itl_s"] = dict.fromkeys(figures["itl_s"])
    found |= drafts
    summary = run.summary or {}
    # These are in no other file, and stay those of the whole run.
    found |= {name: summary[name] for name in ("arrivals", "expected_error", "lora") if name in summary}
    return found | {"schedule_digest": summary.get("schedule_digest"), "partial": run.partial}


def steady_figures(run: RunData) -> dict[str, Any]:
    """The figures of the run's steady state, and under `steady_state` its window; where there is none that is None, and
    the figures are those of the whole run."""
    done = run.completed
    # The time until the first token stands for the time in the queue where the server is not ours.
    names = ("arrival_s", "ttft_s" if run.endpoint else "queue_time_s", "e2e_s")
    columns = (done[name].to_numpy(dtype=float) for name in names)
    window = steady_state(*columns)
    if window is None and run.summary is not None:
        return run.summary | {"steady_state": None}
    return recorded_figures(run, window) | {"steady_state": None if window is None else window._asdict()}


def restrict_summary(run: RunData) -> dict[str, Any]:
    """Replace summary.json by the figures of the run's steady state, and return them."""
    figures = steady_figures(run)
    write_json(run.path / "summary.json", figures)
    return figures


def _of_iterations(
    iterations: pd.DataFrame,
    requests: pd.DataFrame,
    thinned: bool,
    windows: dict[str, dict[str, int]],
    every: int,
) -> dict[str, Any]:
    """What the iterations did and what bound them.

    thinned: whether only some of them were recorded.
    windows: see `kv_blocks.per_window_size` of `summary.json`.
    every: number of micro batches.
    """
    recomputed = _total(requests if thinned else iterations, "recomputed_tokens" if thinned else "tokens_recomputed")
    computed, empty, padding = (
        _total(iterations, name) for name in ("budget_used", "empty_generation_slots", "padding_tokens")
    )
    slots = computed + empty + padding
    limits, numbers = _numbered(iterations["bound_by"])
    return {
        "iterations": len(iterations),
        "pauses": int(iterations["pauses"].sum()),
        # Where not each iteration was recorded, those of the requests that ended.
        "recomputed_tokens": recomputed,
        "recomputed_share": recomputed / computed if computed else 0.0,
        "empty_generation_slots": None if thinned else empty,
        "padding_waste": None if thinned else (empty + padding) / slots if slots else 0.0,
        **_of_cache(iterations, windows, thinned),
        "peak_scheduled_requests": int(iterations["scheduled_requests"].max()) if len(iterations) else 0,
        **shares_of_limits(limits, numbers, own_seconds(iterations["start_s"], delivered_s(iterations), every)),
    }


def _of_drafts(iterations: pd.DataFrame, thinned: bool) -> dict[str, Any]:
    """`speculative_decoding`, where iterations had draft tokens; unknown where only some of them were recorded."""
    known = iterations.filter(like="spec_decoding.").dropna()
    if thinned or known.empty:
        return {}
    names = ("numDraftTokens", "numAcceptedTokens", "numRequestsWithDraftTokens")
    drafted, accepted, requests = (int(known[f"spec_decoding.{name}"].sum()) for name in names)
    draft_s = float(known["spec_decoding.iterLatencyMS"].sum()) / 1000
    totals = DraftTotals()
    totals.add(DraftCounts(drafted, accepted, requests, draft_s=draft_s))
    return {"speculative_decoding": totals.figures()}


def _populations(
    run: RunData, done: pd.DataFrame, failed: pd.DataFrame, num_iterations: int
) -> dict[tuple[str | None, float], Population]:
    """The requests by class and priority, with their gaps between tokens."""
    populations: dict[tuple[str | None, float], Population] = {}
    of_request: dict[str, Population] = {}
    names = [
        "request_id",
        "arrival_s",
        "queue_time_s",
        "ttft_s",
        "tpot_s",
        "e2e_s",
        "prompt_len",
        "output_len",
        "reused_tokens",
    ]
    for table in (done, failed):
        rows = zip(*(table[name].tolist() for name in names), *_groups(table), strict=True)
        for index, row in enumerate(rows):
            request, arrival_s, queue_time_s, ttft_s, tpot_s, e2e_s, prompt, output, reused, name, priority = row
            population = populations.setdefault((name, priority), Population())
            if table is failed:
                population.failed += 1
                continue
            population.add(arrival_s, queue_time_s, ttft_s, tpot_s, e2e_s, int(prompt), int(output), index)
            population.reused_tokens += int(reused)
            of_request[request] = population
    if not num_iterations:
        return populations
    spans = producing_spans(run)
    firsts = spans["last_iteration"] - (spans["produced"].astype(int) - 1) * run.num_micro_batches
    stretches: dict[str, list[tuple[int, int]]] = {}
    columns = (spans["request_id"].tolist(), firsts.tolist(), spans["last_iteration"].tolist())
    for request, first, last in zip(*columns, strict=True):
        stretches.setdefault(request, []).append((first, last))
    for request, of_one in stretches.items():
        if request in of_request:
            of_request[request].gaps.add(of_one, run.num_micro_batches)
    return populations


def _groups(table: pd.DataFrame) -> tuple[list[str | None], list[float]]:
    """The class and the priority of each request."""
    import pandas as pd

    nothing = pd.Series([None] * len(table), index=table.index, dtype=object)
    classes = table.get("class", nothing).astype(object)
    priorities = table.get("priority", nothing).astype(float).fillna(DEFAULT_PRIORITY)
    return classes.where(classes.notna(), None).tolist(), priorities.tolist()


def _numbered(limits: pd.Series) -> tuple[list[str], Any]:
    """The names of limits, and of each iteration the position of its limit in them."""
    names = list(dict.fromkeys((*BOUND_BY, *limits)))
    import pandas as pd

    return names, pd.Categorical(limits, categories=names).codes


def _waiting_by_limit(done: pd.DataFrame) -> dict[str, float]:
    """Request-seconds of waiting by the limit that they were for."""
    found = dict.fromkeys(BOUND_BY, 0.0)
    for column in done.columns:
        if not column.startswith(PART_OF_ATTRIBUTION):
            continue
        if (limit := limit_waited_for(column.removeprefix(PART_OF_ATTRIBUTION))) is not None:
            found[limit] = found.get(limit, 0.0) + float(done[column].fillna(0).sum())
    return found


def _of_cache(iterations: pd.DataFrame, windows: dict[str, dict[str, int]], thinned: bool) -> dict[str, Any]:
    """`kv_blocks` and `kv_tokens`; those of a cache without blocks are unknown, and peaks of thinned statistics."""
    columns = ("max_kv_cache_blocks", "used_kv_cache_blocks", "tokens_per_kv_cache_block")
    most, peak, size = (None if np.isnan(value := iterations[name].max()) else int(value) for name in columns)
    if thinned:
        return {"kv_blocks": {"max": most, "peak_used": None, "tokens_per_block": size}}
    held = iterations[columns[1]] * iterations[columns[2]]
    filled = (held * (1 - iterations["kv_fragmentation"])).max()
    tokens = (
        {}
        if most is None or peak is None or size is None
        else {"kv_tokens": {"max": most * size, "peak_held": peak * size, "peak_filled": round(filled)}}
    )
    of_windows = {"per_window_size": windows} if windows else {}
    return {"kv_blocks": {"max": most, "peak_used": peak, "tokens_per_block": size, **of_windows}, **tokens}


def _total(table: pd.DataFrame, column: str) -> int:
    """The sum of a column, 0 if there is no such column."""
    return int(table[column].fillna(0).sum()) if column in table else 0
