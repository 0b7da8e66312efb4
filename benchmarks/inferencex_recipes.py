"""Settings of the two sides of InferenceX's disaggregated servers: those of inferencex_recipes.csv, which are facts.

A line is a recipe that Dynamo's servers were started with, found for a row by the table of its date in InferenceX
(github.com/SemiAnalysisAI/InferenceX, configs/nvidia-master.yaml): github.com/NVIDIA/srt-slurm (`recipes/` and
`recipes/trtllm/`), for B200 in fp4 under SGLang also InferenceX (benchmarks/multi_node/srt-slurm-recipes), for GB200 in
2025 github.com/ai-dynamo/dynamo (examples/backends/sglang/slurm_jobs/scripts) and the table itself. The one of 2025
with 24 decode GPUs is a script of a branch (github.com/Elnifio/dynamo, its gb200-fp8.sh) in a container that is not
known: its line is that of 2026 with the same workers.

- `prefill`, `decode`: workers x GPUs of each. `concurrency`: of the line's rows, or empty for all.
- `_dp`: whether attention is data parallel. The rows have it wrong where a recipe's script decides it (SGLang in 2025),
  and for prefill of H200.
- `_tokens`, `_batch`: TensorRT-LLM's `max_num_tokens` and `max_batch_size` of one part of an attention; SGLang's
  `chunked-prefill-size` and `max-running-requests` of all parts together (2048 where the recipe leaves it to SGLang).
- `_memory`: `free_gpu_memory_fraction`, or `mem-fraction-static`. `_receive`: `scheduler-recv-interval`.
- `num_drafts`: `num_nextn_predict_layers`, or `speculative-num-steps`. `stream_interval`: of both engines.
"""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".csv")
KEYS = ("engine", "gpu", "dtype", "lengths", "drafts", "prefill", "decode")
SIDES = ("prefill", "decode")
Row = Mapping[str, Any]


@cache
def _recipes() -> Mapping[tuple[str, ...], Mapping[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {tuple(line[key] for key in (*KEYS, "concurrency")): line for line in csv.DictReader(file)}


def recipe_of(row: Row) -> Mapping[str, str] | None:
    """The recipe of a disaggregated row of InferenceX. None if there is none, as for one without workers."""
    key = [str(row.get(name) or "none") for name in KEYS[:3]] + [f"{row['input']}/{row['output']}"]
    key.append(str(row.get("drafts") or "none"))
    key += [f"{row[side]['workers']}x{_degree(row[side])}" for side in SIDES]
    found = _recipes()
    return found.get((*key, str(row["concurrency"]))) or found.get((*key, ""))


def _degree(side: Row) -> int:
    """GPUs of a worker."""
    return int(side["gpus"] // side["workers"]) if side["workers"] else 0


def sides_of(row: Row, recipe: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """By side: replicas, the GPUs of each, and its settings."""
    rules = _of_sglang if row["engine"] == "sglang" else _of_tensorrt_llm
    return {side: _parallel(row[side], recipe[f"{side}_dp"] == "yes") | rules(recipe, side, row) for side in SIDES}


def _parallel(side: Row, is_dp: bool) -> dict[str, int]:
    """A row whose `tp` is not the GPUs of a worker does not say how experts are divided: among all with attention data
    parallelism, else not."""
    degree = _degree(side)
    ep = side["ep"] if side["tp"] == degree else degree if is_dp else 1
    return {
        "workers": side["workers"],
        "tp_size": degree,
        "ep_size": ep,
        "attention_dp_size": degree if is_dp else 1,
    }


def _of_sglang(recipe: Mapping[str, str], side: str, row: Row) -> dict[str, Any]:
    """Chunks are a matter of prefill. Of a batch, each part of an attention has its share."""
    chunk = int(recipe["prefill_tokens"])
    return {
        "gpu_memory_utilization": float(recipe[f"{side}_memory"]),
        "max_num_tokens": chunk,
        "max_prefill_tokens": chunk,
        "max_batch_size": int(recipe[f"{side}_batch"]),
        "scheduler_recv_interval": int(recipe[f"{side}_receive"]),
    }


def _of_tensorrt_llm(recipe: Mapping[str, str], side: str, row: Row) -> dict[str, Any]:
    """Limits of all parts together. An iteration of a decode server has room for its batch with drafts; here also for a
    prompt, which it never has."""
    parts = {one: _degree(row[one]) if recipe[f"{one}_dp"] == "yes" else 1 for one in SIDES}
    batch, tokens = int(recipe[f"{side}_batch"]) * parts[side], int(recipe["prefill_tokens"])
    if side == "decode":
        tokens = max(tokens, batch // parts[side] * (1 + int(recipe["num_drafts"])))
    return {
        "max_num_tokens": tokens * parts[side],
        "max_batch_size": batch,
        "enable_chunked_context": False,
        "kv_cache_free_gpu_mem_fraction": float(recipe[f"{side}_memory"]),
    }
