"""When MAX_UTILIZATION wins over GUARANTEED_NO_EVICT: reserved over actual output length, and pressure on the KV cache.

`python -m benchmarks.policies [CHART.png]` prints one JSON object, and draws the chart. 256 requests of the
bundled workload `chat` are always waiting or running. The pressure is the KV cache that they need together at their
full actual length, as a multiple of its size. Each point runs with three seeds; ratios are MAX_UTILIZATION over
GUARANTEED_NO_EVICT, medians of the seeds.
"""

import json
import sys
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from ifbbench.report.colours import MUTED
from ifbbench.report.style import styled
from ifbbench.rundir.run_directory import hardware
from ifbbench.settings.config import RunConfig
from ifbbench.studies.points import run_points
from ifbbench.workload.load import in_memory, read_source
from ifbbench.workload.trace import columns_of

CONCURRENCY = 256
BASE = RunConfig(
    device="sim:h100-sxm",
    model="llama-3.1-8b",
    enable_chunked_context=True,
    max_num_samples=1200,
    concurrency=CONCURRENCY,
    max_batch_size=CONCURRENCY,
    quiet=True,
)
FACTORS, PRESSURES, SEEDS = (1, 2, 4, 8), (0.5, 1.0, 1.5, 2.0, 4.0), (0, 1, 2)
POLICIES = ("guaranteed_no_evict", "max_utilization")
# Key of a figure: its path in the summary, the title of its panel, and whether more is better.
FIGURES = {
    "throughput": ("output_throughput_tokens_per_s", "Output throughput", True),
    "ttft_p99": ("ttft_s.p99", "TTFT, p99", False),
    "tpot_p99": ("tpot_s.p99", "TPOT, p99", False),
    "itl_max": ("itl_s.max", "ITL, longest gap", False),
}
# Why: what MAX_UTILIZATION does, of which GUARANTEED_NO_EVICT does nothing.
REASONS = {"pauses_per_request": "Pauses, of 100 requests", "recomputed_share": "Recomputed tokens, %"}


def figure_of(summary: dict[str, Any], path: str) -> float:
    value: Any = summary
    for name in path.split("."):
        value = value[name]
    return float(value)


def measure(seed: int) -> dict[tuple[int, float, str], dict[str, Any]]:
    """The summary of each point with the requests of one seed."""
    trace = in_memory(read_source("chat", BASE.with_values(seed=seed)))
    columns = columns_of(trace.requests)
    needed = CONCURRENCY * fmean(map(sum, zip(columns.prompt_len, columns.output_len, strict=True)))
    points = list(product(FACTORS, PRESSURES, POLICIES))
    configs = [
        BASE.with_values(
            seed=seed, reserve=f"factor:{factor}", policy=policy, max_tokens_in_paged_kvcache=round(needed / pressure)
        )
        for factor, pressure, policy in points
    ]
    results = run_points(trace, configs)
    assert not any(result.error for result in results), results
    return {point: result.summary for point, result in zip(points, results, strict=True)}


def study() -> list[dict[str, Any]]:
    """A row for each factor and pressure."""
    by_seed = [measure(seed) for seed in SEEDS]
    rows = []
    for factor, pressure in product(FACTORS, PRESSURES):
        row: dict[str, Any] = {"reserved_over_actual": factor, "pressure": pressure}
        for key, (path, _, _) in FIGURES.items():
            pairs = [[figure_of(found[factor, pressure, policy], path) for policy in POLICIES] for found in by_seed]
            row[key] = [median(values) for values in zip(*pairs, strict=True)]
            ratios = [theirs / ours for ours, theirs in pairs]
            row[f"{key}_ratio"] = median(ratios)
            row[f"{key}_ratio_range"] = [min(ratios), max(ratios)]
        evicting = [found[factor, pressure, POLICIES[1]] for found in by_seed]
        row["pauses_per_request"] = median(one["pauses"] / one["requests"]["completed"] for one in evicting)
        row["recomputed_share"] = median(one["recomputed_share"] for one in evicting)
        running = [
            [found[factor, pressure, policy]["peak_scheduled_requests"] for policy in POLICIES] for found in by_seed
        ]
        row["running_at_most"] = [median(values) for values in zip(*running, strict=True)]
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A heat map for each figure: blue where MAX_UTILIZATION is better."""
    found = {(row["reserved_over_actual"], row["pressure"]): row for row in rows}
    with styled():
        figure = Figure(figsize=(13.5, 3.6))
        panels = figure.subplots(1, len(FIGURES) + len(REASONS), sharey=True)
        for axes, (key, (_, label, more_is_better)) in zip(panels, FIGURES.items(), strict=False):
            ratios = np.array(
                [[found[factor, pressure][f"{key}_ratio"] for factor in FACTORS] for pressure in PRESSURES]
            )
            gain = np.log2(ratios if more_is_better else 1 / ratios)
            axes.imshow(gain, cmap="RdBu", norm=TwoSlopeNorm(0, -1.5, 1.5), aspect="auto", origin="lower")
            for (row, column), ratio in np.ndenumerate(ratios):
                colour = "white" if abs(gain[row, column]) > 1.0 else "#222222"
                axes.text(column, row, f"{ratio:.2f}", ha="center", va="center", fontsize=8.5, color=colour)
            axes.set_title(label, fontsize=9.5, fontweight="bold")
        for axes, (key, label) in zip(panels[len(FIGURES) :], REASONS.items(), strict=True):
            values = 100 * np.array([[found[factor, pressure][key] for factor in FACTORS] for pressure in PRESSURES])
            axes.imshow(values, cmap="Greys", vmin=0, vmax=2 * values.max(), aspect="auto", origin="lower")
            for (row, column), value in np.ndenumerate(values):
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8.5, color="#222222")
            axes.set_title(label, fontsize=9.5, fontweight="bold")
        for axes in panels:
            axes.set_xticks(range(len(FACTORS)), [f"{factor}×" for factor in FACTORS])
            axes.set_yticks(range(len(PRESSURES)), [f"{pressure:g}" for pressure in PRESSURES])
            axes.grid(visible=False)
            axes.set_xlabel("reserved / actual output")
        panels[0].set_ylabel("pressure on the KV cache")
        what = "MAX_UTILIZATION over GUARANTEED_NO_EVICT (blue: it is better), and its pauses and recomputed tokens"
        figure.suptitle(what, x=0.01, ha="left", fontsize=10, color=MUTED)
        figure.savefig(path, metadata={"Software": None})


def main() -> None:
    rows = study()
    if len(sys.argv) > 1:
        draw(rows, Path(sys.argv[1]))
    print(json.dumps({"benchmark": "capacity scheduler policies", "rows": rows, "hardware": hardware()}, indent=1))


if __name__ == "__main__":
    main()
