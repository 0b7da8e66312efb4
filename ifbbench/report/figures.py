"""The figures of a run: those of summary.json or, for a killed run, the same worked out from what it had written."""

from typing import Any

import numpy as np
import pandas as pd

from ifbbench.recording.distribution import distribution
from ifbbench.recording.metrics import BOUND_BY, PER_REQUEST
from ifbbench.report.load import RunData
from ifbbench.report.token_times import inter_token_gaps


def figures(run: RunData) -> dict[str, Any]:
    """summary.json's figures. Where it is missing they cover the requests completed before the run was killed."""
    if run.summary is not None:
        return run.summary
    return _request_figures(run) | _iteration_figures(run) | {"schedule_digest": None, "partial": True}


def _request_figures(run: RunData) -> dict[str, Any]:
    done = run.completed
    duration = float(done["end_s"].max() - run.requests["arrival_s"].min()) if len(done) else 0.0
    per_second = 1 / duration if duration > 0 else 0.0
    prompt_tokens, output_tokens = int(done["prompt_len"].sum()), int(done["output_len"].sum())
    failed = len(run.requests) - len(done)
    total = (run.run.get("trace") or {}).get("requests") or len(run.requests)
    return {
        "requests": {"total": int(total), "completed": len(done), "failed": failed},
        "duration_s": duration,
        "request_throughput_per_s": len(done) * per_second,
        "output_throughput_tokens_per_s": output_tokens * per_second,
        "total_throughput_tokens_per_s": (prompt_tokens + output_tokens) * per_second,
        **{name: distribution(done[name].dropna().to_numpy(dtype=float)) for name in PER_REQUEST},
        # Between iterations that were recorded, times are interpolated: good for a drawing, not for percentiles.
        "itl_s": distribution([] if run.recorded_every > 1 else inter_token_gaps(run)),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "prefix_hit_rate": float(done["reused_tokens"].sum()) / prompt_tokens if prompt_tokens else 0.0,
    }


def _total(table: pd.DataFrame, column: str) -> int:
    """The sum of a column that need not be there."""
    return int(table[column].fillna(0).sum()) if column in table else 0


def _padding(run: RunData) -> dict[str, int | float | None]:
    if run.recorded_every > 1:
        return {"empty_generation_slots": None, "padding_waste": None}
    empty, padding = (_total(run.iterations, name) for name in ("empty_generation_slots", "padding_tokens"))
    used = _total(run.iterations, "budget_used")
    waste = (empty + padding) / (used + empty + padding) if used else 0.0
    return {"empty_generation_slots": empty, "padding_waste": waste}


def _recomputed(run: RunData) -> int:
    """By iteration; where not each was recorded, by the requests that ended."""
    if run.recorded_every > 1:
        return _total(run.requests, "recomputed_tokens")
    return _total(run.iterations, "tokens_recomputed")


def _iteration_figures(run: RunData) -> dict[str, Any]:
    iterations = run.iterations
    shares = iterations["bound_by"].value_counts(normalize=True)
    blocks = {
        "max": iterations["max_kv_cache_blocks"].max(),
        "peak_used": iterations["used_kv_cache_blocks"].max(),
        "tokens_per_block": iterations["tokens_per_kv_cache_block"].max(),
    }
    return {
        "iterations": len(iterations),
        **_padding(run),
        "pauses": int(iterations["pauses"].sum()),
        "recomputed_tokens": _recomputed(run),
        "kv_blocks": {name: None if np.isnan(value) else int(value) for name, value in blocks.items()},
        "bound_by": {limit: float(shares.get(limit, 0.0)) for limit in dict.fromkeys((*BOUND_BY, *shares.index))},
    }
