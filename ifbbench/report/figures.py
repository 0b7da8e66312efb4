"""The figures of a run: those of summary.json or, for a killed run, the same worked out from what it had written."""

from typing import Any

import numpy as np
import pandas as pd

from ifbbench.recording.metrics import BOUND_BY, PER_REQUEST, distribution
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
        "itl_s": distribution(inter_token_gaps(run)),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "prefix_hit_rate": float(done["reused_tokens"].sum()) / prompt_tokens if prompt_tokens else 0.0,
    }


def _total(iterations: pd.DataFrame, column: str) -> int:
    """The sum of a column that need not be there."""
    return int(iterations[column].fillna(0).sum()) if column in iterations else 0


def _iteration_figures(run: RunData) -> dict[str, Any]:
    iterations = run.iterations
    shares = iterations["bound_by"].value_counts(normalize=True)
    blocks = {
        "max": iterations["max_kv_cache_blocks"].max(),
        "peak_used": iterations["used_kv_cache_blocks"].max(),
        "tokens_per_block": iterations["tokens_per_kv_cache_block"].max(),
    }
    empty, padding = (_total(iterations, name) for name in ("empty_generation_slots", "padding_tokens"))
    used = _total(iterations, "budget_used")
    return {
        "iterations": len(iterations),
        "empty_generation_slots": empty,
        "padding_waste": (empty + padding) / (used + empty + padding) if used else 0.0,
        "pauses": int(iterations["pauses"].sum()),
        "recomputed_tokens": int(iterations["tokens_recomputed"].fillna(0).sum()),
        "kv_blocks": {name: None if np.isnan(value) else int(value) for name, value in blocks.items()},
        "bound_by": {limit: float(shares.get(limit, 0.0)) for limit in BOUND_BY},
    }
