"""What chunked context and max_num_tokens do to the worst TTFT and ITL where some prompts are long.

`python -m benchmarks.chunking [CHART.png]` prints one JSON object, and draws the chart. The bundled workload
`mixed` (nine chats to one document of thousands of tokens, prompts cut at 30,000 tokens) arrives at RATE. Each point
runs with three seeds; figures are their medians. Without chunked context, a prompt longer than max_num_tokens is
refused, so that these runs begin at 32,768.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ifbbench.report.colours import MUTED, SERIES
from ifbbench.report.style import round_ticks, styled
from ifbbench.rundir.run_directory import hardware
from ifbbench.settings.config import RunConfig
from ifbbench.studies.points import run_points
from ifbbench.workload.load import in_memory, read_source

RATE, LONGEST_PROMPT = 8.0, 30_000
BASE = RunConfig(
    device="sim:h100-sxm",
    model="llama-3.1-8b",
    request_rate=RATE,
    enable_exp_delays=True,
    max_num_samples=1500,
    max_prompt_len=LONGEST_PROMPT,
    quiet=True,
)
SEEDS = (0, 1, 2)
NUM_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
CONTEXTS: dict[str, dict[str, Any]] = {
    "chunked, first come first served": {"enable_chunked_context": True},
    "chunked, equal progress": {"enable_chunked_context": True, "context_chunking_policy": "equal_progress"},
    "whole prompts": {"enable_chunked_context": False},
}
FIGURES = {
    "itl_max": ("ITL, longest gap (ms)", 1e3),
    "itl_p99": ("ITL, p99 (ms)", 1e3),
    "ttft_max": ("TTFT, longest (s)", 1.0),
    "ttft_p99": ("TTFT, p99 (s)", 1.0),
}


def study() -> list[dict[str, Any]]:
    """A row for each way to run prompts and each token budget."""
    points = [
        (name, tokens)
        for name in CONTEXTS
        for tokens in NUM_TOKENS
        if CONTEXTS[name]["enable_chunked_context"] or tokens >= LONGEST_PROMPT
    ]
    summaries: dict[tuple[str, int], list[dict[str, Any]]] = {point: [] for point in points}
    for seed in SEEDS:
        trace = in_memory(read_source("mixed", BASE.with_values(seed=seed)))
        results = run_points(
            trace, [BASE.with_values(seed=seed, max_num_tokens=tokens, **CONTEXTS[name]) for name, tokens in points]
        )
        for point, result in zip(points, results, strict=True):
            assert not result.error, result.error
            summaries[point].append(result.summary)
    return [row_of(name, tokens, summaries[name, tokens]) for name, tokens in points]


def row_of(name: str, tokens: int, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"context": name, "max_num_tokens": tokens}
    for latency in ("ttft", "itl"):
        for statistic in ("p50", "p99", "max"):
            row[f"{latency}_{statistic}"] = median(one[f"{latency}_s"][statistic] for one in found)
    row["output_tokens_per_s"] = median(one["output_throughput_tokens_per_s"] for one in found)
    row["overloaded"] = sum(one["overloaded"] for one in found)
    return row


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each figure, a line for each way to run prompts."""
    with styled():
        figure = Figure(figsize=(9.5, 5.6))
        panels = figure.subplots(2, 2, sharex=True).flat
        for axes, (key, (label, scale)) in zip(panels, FIGURES.items(), strict=True):
            for name, colour in zip(CONTEXTS, SERIES, strict=False):
                some = [row for row in rows if row["context"] == name]
                axes.plot(
                    [row["max_num_tokens"] for row in some],
                    [row[key] * scale for row in some],
                    color=colour,
                    marker="D" if len(some) == 1 else "o",
                    markersize=7 if len(some) == 1 else 4,
                    linestyle="none" if len(some) == 1 else "-",
                    label=name,
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(label, fontsize=9.5, fontweight="bold")
            axes.set_xticks(NUM_TOKENS)
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            round_ticks(axes.xaxis)
            round_ticks(axes.yaxis)
            if key.startswith("ttft"):
                axes.set_xlabel("max_num_tokens")
        figure.axes[0].legend(loc="upper left")
        what = f"Workload `mixed` at {RATE:g} requests/s, llama-3.1-8b on a simulated H100 SXM"
        figure.suptitle(what, x=0.01, ha="left", fontsize=10, color=MUTED)
        figure.savefig(path, metadata={"Software": None})


def main() -> None:
    rows = study()
    if len(sys.argv) > 1:
        draw(rows, Path(sys.argv[1]))
    print(json.dumps({"benchmark": "chunked context", "rows": rows, "hardware": hardware()}, indent=1))


if __name__ == "__main__":
    main()
