"""Rows of InferenceX in the form of other rows: one deployment, closed loops, lengths drawn evenly.

`decode` is the deployment of an aggregated row, with `tp` GPUs: its throughput for each GPU is that of the clients by
Little's law over so many, and `gpus` is the product of `tp` and `ep`. Requests have random lengths of SHORTEST to 1
times those of the row, ten for each client. `itl_ms` is that of chunks, in which a server sends several tokens (its
stream interval), so that it is not a time between tokens: it is left out, and `tpot_ms` is compared.
"""

from collections.abc import Mapping
from random import Random
from statistics import fmean
from typing import Any

SHORTEST = 0.8
# Pairs of lengths that requests take in turn.
PAIRS = 1009
GPUS = {"h100": "h100-sxm", "h200": "h200-sxm"}
DTYPES = {"fp4": "nvfp4", "fp8": "fp8_block"}
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")


def is_inferencex(row: Mapping[str, Any]) -> bool:
    return "decode" in row


def standard_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """`row` in the form of serving_rows. disaggregated: it cannot be replayed as one deployment."""
    decode, lengths = row["decode"], Random(0)
    pairs = [
        tuple(max(1, round(row[name] * lengths.uniform(SHORTEST, 1))) for name in ("input", "output"))
        for _ in range(PAIRS)
    ]
    named = ("source", "engine", "model", "concurrency", "generation", "id", "drafts", "disaggregated", "date")
    return {
        **{name: row[name] for name in (*named, *LATENCIES, "version", "power_w_per_gpu") if name in row},
        "gpu": GPUS.get(row["gpu"], row["gpu"]),
        "num_gpus": decode["tp"],
        "tp": decode["tp"],
        "ep": decode["ep"],
        "dp_attention": decode["dp_attention"],
        "dtype": DTYPES.get(row["dtype"], row["dtype"]),
        "input": round(fmean(prompt_len for prompt_len, _ in pairs)),
        "output": round(fmean(output_len for _, output_len in pairs)),
        "pairs": pairs,
        "num_requests": 10 * row["concurrency"],
        "output_tokens_per_s": row["output_tokens_per_s_per_gpu"] * decode["tp"],
    }
