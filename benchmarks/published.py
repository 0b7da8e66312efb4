"""The simulation held against published figures of TensorRT-LLM: predicted, published and error, row by row.

`python -m benchmarks.published` prints one JSON object with these parts:

- table: Llama-3.1-8B in fp8 on one H100, TensorRT-LLM 1.0. Aims: median error under 10 %, worst under 25 %.
- case_study: Llama-3.3-70B in bf16 on four H100s at two batch sizes (performance tuning guide of TensorRT-LLM 0.16).
- fitted: further tables that the constants of an architecture come from.
- held_out: tables that no constant was fitted on: other GPUs, models, degrees and versions. What the cost model has
  terms for was decided with them in view, so they are a check of the constants more than of the form.
- older: held out too; 70B in 16 bits on H100s with TensorRT-LLM 0.14, which was slower than is predicted, most of all
  on eight GPUs. Why is not known; the case study, of 0.16 and on four, is met.
- policies: MAX_UTILIZATION against GUARANTEED_NO_EVICT where the KV cache is oversubscribed (NVIDIA/TensorRT-LLM issue
  16827).

Figures are in published_figures.csv: output tokens a second of all GPUs together, all requests there at once, after the
sources that are printed with them. Settings are those of these tables: max_num_tokens 8,192, KV fraction 0.9, chunked
context, GUARANTEED_NO_EVICT, KV cache in the data type of the weights. TTFT, TPOT and throughput of a row are from one
run. Arguments choose parts: `… published table policies`.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ifbbench.replay.run import run_trace
from ifbbench.rundir.run_directory import hardware, versions
from ifbbench.settings.config import RunConfig
from ifbbench.workload.formats import write_trace
from ifbbench.workload.trace import TraceRequest

FIGURES = Path(__file__).parent / "published_figures.csv"
ROLES = ("table", "case_study", "fitted", "held_out", "older")
# Not published. With room for 21 requests of 16,896 tokens and for 22 prompts, GUARANTEED_NO_EVICT has the published
# figures; the cache that the cost model would size (about 400,000 tokens) has room for 23 and 24.
TOKENS_OF_POLICY_CACHE = 365_000
OVERVIEW = "github.com/NVIDIA/TensorRT-LLM, docs/source/performance/perf-overview.md"
SOURCES = {
    "0.14": f"{OVERVIEW}, release 0.14",
    "0.16": "TensorRT-LLM 0.16, performance tuning guide, tuning max batch size and max num tokens",
    "0.17": f"{OVERVIEW} at commit 258c7540",
    "0.20": f"{OVERVIEW}, release 0.20",
    "1.0": f"{OVERVIEW} at commit 00f37686",
}
POLICIES = {
    "guaranteed_no_evict": {"tokens_per_s": 161.0, "ttft_p50_s": 35.8, "tpot_p99_s": 0.122},
    "max_utilization": {"tokens_per_s": 95.7, "ttft_p50_s": 27.1, "tpot_p99_s": 1.111},
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure, and the run that it is of."""

    role: str
    version: str
    hardware: str
    model: str
    dtype: str
    tp_size: int
    prompt_tokens: int
    output_tokens: int
    requests: int
    max_batch_size: int
    tokens_per_s: float

    @property
    def setup(self) -> str:
        """What the rows of one table have in common."""
        return f"{self.version} {self.hardware} {self.model} {self.dtype} TP{self.tp_size}"

    def config(self) -> RunConfig:
        return RunConfig(
            device=f"sim:{self.hardware}",
            model=self.model,
            dtype=self.dtype,
            tp_size=self.tp_size,
            max_batch_size=self.max_batch_size,
            max_seq_len=self.prompt_tokens + self.output_tokens,
            enable_chunked_context=True,
        )


def figures() -> list[Figure]:
    """All of published_figures.csv."""
    with FIGURES.open(encoding="utf-8", newline="") as file:
        return [_figure(row) for row in csv.DictReader(file)]


def _figure(row: dict[str, str]) -> Figure:
    return Figure(
        row["role"],
        row["version"],
        row["hardware"],
        row["model"],
        row["dtype"],
        int(row["tp_size"]),
        int(row["prompt_tokens"]),
        int(row["output_tokens"]),
        int(row["requests"]),
        int(row["max_batch_size"]),
        float(row["tokens_per_s"]),
    )


def simulate(config: RunConfig, requests: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """The summary of a run of equal requests that are all there at once."""
    with TemporaryDirectory() as directory:
        trace, output = Path(directory) / "trace.jsonl", Path(directory) / "run"
        write_trace(
            (
                TraceRequest(index, 0.0, prompt_tokens, max_new_tokens=output_tokens, output_len=output_tokens)
                for index in range(requests)
            ),
            trace,
        )
        run = run_trace(str(trace), config.with_values(output=str(output), quiet=True, iteration_stats_every=10_000))
        if run.failed:
            raise ValueError(f"{run.failed} of {requests} requests failed with {config}")
        return run.summary


def compare(figure: Figure) -> dict[str, Any]:
    """One row: what is predicted for a figure beside what is published, and the relative error."""
    summary = simulate(figure.config(), figure.requests, figure.prompt_tokens, figure.output_tokens)
    predicted = summary["output_throughput_tokens_per_s"]
    return {
        "prompt/output": f"{figure.prompt_tokens}/{figure.output_tokens}",
        "max_batch_size": figure.max_batch_size,
        "predicted": round(predicted, 1),
        "published": figure.tokens_per_s,
        "error": round(predicted / figure.tokens_per_s - 1, 4),
        "ttft_p50_s": round(summary["ttft_s"]["p50"], 4),
        "tpot_p50_s": round(summary["tpot_s"]["p50"], 6),
    }


def errors(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Median and worst absolute relative error."""
    absolute = [abs(row["error"]) for row in rows]
    return {"rows": len(absolute), "median_error": round(median(absolute), 4), "worst_error": max(absolute)}


def part(role: str) -> dict[str, Any]:
    """All tables of one role, and the errors over all their rows."""
    tables: dict[str, dict[str, Any]] = {}
    for setup, group in groupby((figure for figure in figures() if figure.role == role), lambda figure: figure.setup):
        rows = [compare(figure) for figure in group]
        tables[setup] = {**errors(rows), "results": rows}
    total = errors(row for table in tables.values() for row in table["results"])
    return {
        **total,
        "sources": {version: SOURCES[version] for version in sorted({key.split()[0] for key in tables})},
        "tables": tables,
    }


def policies() -> dict[str, Any]:
    """128 requests of 16,384/512 tokens, 32 at a time, Llama-3.3-70B in fp8 on one H200, whose cache holds fewer."""
    config = RunConfig(
        device="sim:h200-sxm",
        model="llama-3.3-70b",
        dtype="fp8",
        concurrency=32,
        max_seq_len=16_896,
        enable_chunked_context=True,
        max_tokens_in_paged_kvcache=TOKENS_OF_POLICY_CACHE,
    )
    runs = {}
    for policy, published in POLICIES.items():
        summary = simulate(config.with_values(policy=policy), 128, 16_384, 512)
        runs[policy] = {
            "tokens_per_s": round(summary["output_throughput_tokens_per_s"], 1),
            "ttft_p50_s": round(summary["ttft_s"]["p50"], 2),
            "tpot_p50_s": round(summary["tpot_s"]["p50"], 4),
            "tpot_p99_s": round(summary["tpot_s"]["p99"], 4),
            "pauses": summary["pauses"],
            "recomputed_tokens": summary["recomputed_tokens"],
            "published": published,
        }
    return runs


def main() -> None:
    """Simulate the parts asked for, all by default, and print the result as JSON."""
    asked = sys.argv[1:] or [*ROLES, "policies"]
    about = {"benchmark": "simulation against published figures", "hardware": hardware(), "versions": versions()}
    parts = dict(_parts(asked))
    print(json.dumps({**about, **parts}, indent=2))


def _parts(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        yield name, policies() if name == "policies" else part(name)


if __name__ == "__main__":
    main()
