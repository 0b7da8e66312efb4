"""gptManagerBenchmark's figures, under its names and in its order: stdout lines and a CSV of one row.

Percentiles are its own nearest rank, not the interpolated ones of summary.json. As there, figures of single tokens are
only told of streaming runs (summary.json has them of every run).
"""

import csv
import math
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ifbbench.report.load import RunData


def benchmark_figures(run: RunData) -> dict[str, float]:
    """Name (with unit) to value, in gptManagerBenchmark's order. Latencies are NaN where no request completed."""
    done = run.completed
    total_s = float(done["end_s"].max() - run.requests["arrival_s"].min()) if len(done) else math.nan
    output_tokens = int(done["output_len"].sum())
    overall = {
        "num_samples": len(done),
        "num_error_samples": len(run.requests) - len(done),
        "total_latency(ms)": total_s * 1000,
        "seq_throughput(seq/sec)": len(done) / total_s,
        "token_throughput(token/sec)": output_tokens / total_s,
        **_spread("sequence_latency(ms)", done["e2e_s"] * 1000),
        # Without speculative decoding each decoding step of a request yields exactly one token.
        "avg_acceptance_rate(tokens/decoding steps)": 1.0 if output_tokens else 0.0,
    }
    return overall | _streaming_figures(done) if run.config.get("streaming") else overall


def _streaming_figures(done: pd.DataFrame) -> dict[str, float]:
    per_token_ms = done["tpot_s"].dropna() * 1000
    return {
        **_spread("time_to_first_token(ms)", done["ttft_s"] * 1000),
        **_spread("inter_token_latency(ms)", per_token_ms),
        **_spread("user_tokens_per_second(tokens/sec/user)", 1000 / per_token_ms[per_token_ms > 0]),
    }


def benchmark_lines(run: RunData) -> list[str]:
    """`[BENCHMARK] <name> <value>` for each figure: counts as integers, the others with two decimals."""
    return [
        f"[BENCHMARK] {name} {value if isinstance(value, int) else format(value, '.2f')}"
        for name, value in benchmark_figures(run).items()
    ]


def write_benchmark_csv(run: RunData, path: Path) -> None:
    """Write a header and one row of `benchmark_figures` to `path`, making its folder."""
    values = benchmark_figures(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([values.keys(), values.values()])


def nearest_rank(ordered: np.ndarray, percent: int) -> float:
    """The smallest value of `ordered` (ascending, not empty) with at least `percent` % of the values up to it."""
    return float(ordered[math.ceil(percent / 100 * len(ordered)) - 1])


def _spread(name: str, values: ArrayLike) -> dict[str, float]:
    ordered = np.sort(np.asarray(values, dtype=float))
    keys = ("avg", "max", "min", "p99", "p90", "p50")
    if ordered.size:
        ranks = [nearest_rank(ordered, percent) for percent in (99, 90, 50)]
        spread = [float(ordered.mean()), float(ordered[-1]), float(ordered[0]), *ranks]
    else:
        spread = [math.nan] * len(keys)
    return {f"{key}_{name}": value for key, value in zip(keys, spread, strict=True)}
