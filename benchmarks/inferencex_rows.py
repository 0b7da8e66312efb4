"""Rows of InferenceX in the form of other rows: one deployment, closed loops, lengths drawn evenly.

`decode` is the deployment of an aggregated row, with `tp` GPUs: its throughput for each GPU is that of the clients by
Little's law over so many, and `gpus` is the product of `tp` and `ep`. Requests have random lengths of SHORTEST to 1
times those of the row, ROUNDS for each client. `itl_ms` is that of chunks, in which a server sends several tokens (its
stream interval), so that it is not a time between tokens: it is left out, and `tpot_ms` is compared.

Medians are compared: most rows have no means, and in the means of the others is what happened once (compilation).

Throughput is all output tokens over the time from the first request to the last answer, in which the last requests
run by themselves.

`settings` are those of the servers' own scripts (github.com/SemiAnalysisAI/InferenceX, benchmarks/single_node,
`dsr1_*`), which change with time:

- SGLang looks for requests in each 10th or 30th decode batch on Blackwell (`--scheduler-recv-interval`), and sends 10
  or 30 tokens together (`--stream-interval`), as the median ITL over the TPOT shows too. Running requests reserve a
  share of the rest of their outputs (`reserve_by_ratio`), as SGLang did before 0.5.23.
- TensorRT-LLM's `max_num_tokens` is that of one prompt and the batch, so that one prompt runs in an iteration; from
  WARMED_UP on 8192 at least, but with multi-token prediction. With attention data parallelism, limits are of one part,
  and prompts wait until each part has one (`attention_dp_config`).
- Disaggregated rows have two sides, each with workers of their own: see inferencex_recipes. The output throughput of a
  row is that of each decode GPU, whatever the file says about it: so many times the decode GPUs, it is the output share
  of all tokens/s of all GPUs (within 8 % in 193 of 197 rows), and Little's law holds. The other four rows have no
  workers, and the GPUs of both sides together on each: they cannot be replayed.
- The client sends random token ids as text. Where it had a wrong tokenizer (TRANSFORMERS_5), the server made
  RETOKENIZED times as many tokens of a prompt.
- Before WARMED_UP the client sent no requests to warm the server up. SGLang on Blackwell then compiles kernels when it
  first cuts a prompt into chunks: nothing runs for COMPILING_S, which the throughput has in it. (TTFT p99 has them
  too. That this happens was found with all rows in view; how long it takes was set by eye.)
"""

from collections.abc import Mapping
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.inferencex_recipes import SIDES, recipe_of, sides_of

SHORTEST = 0.8
ROUNDS = 10
# Pairs of lengths that requests take in turn.
PAIRS = 1009
GPUS = {"h100": "h100-sxm", "h200": "h200-sxm"}
DTYPES = {"fp4": "nvfp4", "fp8": "fp8_block"}
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
# The date of the commit that sends twice as many requests as there are clients before it measures.
WARMED_UP = "2026-01-22"
# Set by eye, not fitted: about the extra time of the SGLang rows of fit_rows.csv in which a prompt is cut, 68 to 98 s.
COMPILING_S = 72.0
# First dates of SGLang's images with transformers 5 (0.5.10.post1 has 5.3.0, 0.5.11 has 5.6.0, 0.5.9 has 4.57.1) by
# GPU, in InferenceX's nvidia-master.yaml. Its client, which runs in the same image, loaded DeepSeek's tokenizer wrongly
# until TOKENIZER_MENDED (its commit 5fe6d56e), so that the server read a prompt of 7,140 tokens as 35,921 (its pull
# request 937). The cause was looked for because rows with TTFTs of seconds were predicted wrongly; the factor is that
# of the pull request, not fitted.
TRANSFORMERS_5 = {"b300": "2026-04-17", "h200": "2026-05-12", "b200": "2026-05-14"}
TOKENIZER_MENDED = "2026-05-16"
RETOKENIZED = 35_921 / 7_140
# TensorRT-LLM's versions after 1.1 (1.1.0rc2.post2), and the first dates of their images in InferenceX's
# nvidia-master.yaml by GPU, data type and whether there are drafts; those of H200 went from 1.1 to 1.3.
TENSORRT_LLM = ("1.1.0rc2", "1.2.0rc6", "1.3.0rc14")
TENSORRT_LLM_DATES = {
    ("b200", "fp4", False): ("2026-02-03", "2026-05-18"),
    ("b200", "fp4", True): ("2026-02-06", "2026-05-18"),
    ("b200", "fp8", False): ("2026-01-29", "2026-05-18"),
    ("b200", "fp8", True): ("2026-02-05", "2026-05-18"),
    ("h200", "fp8", False): ("2026-05-18", "2026-05-18"),
    ("h200", "fp8", True): ("2026-05-18", "2026-05-18"),
}
# Disaggregated servers have the version of their Dynamo: 0.8 has 1.2.0rc6, by its support matrix. Until 2026-01-29
# GB200 in nvfp4 had Dynamo 0.5.1, whose version is not known: it is taken to be 1.1.
NEVER = "9999"
DYNAMO_0_8 = {("gb200", "fp4"): ("2026-01-30", NEVER)}
DYNAMO_0_8_ELSEWHERE = ("2026-01-27", NEVER)
# The client's own part of a TTFT, from sending a request to reading the first chunk: set by eye, with the rows of all
# engines in view.
CLIENT_S = 0.02
# Draft tokens: SGLang's `--speculative-num-steps`; TensorRT-LLM's `num_nextn_predict_layers`, and with attention DP.
SGLANG_DRAFTS, TENSORRT_LLM_DRAFTS, DRAFTS_WITH_DP = 2, 3, 1
# By engine, and whether outputs are longer than LONG_OUTPUT. A model answers random prompts and repeats itself the more
# the longer it does.
# TensorRT-LLM's are measured, not fitted to times. Its servers send a chunk after each tenth iteration, so that a tenth
# of `itl_ms`, which is of chunks, over `tpot_ms` are the tokens of an iteration. Fit rows (H200) have 2.38 with three
# drafts and outputs of 1,024, and 2.88 with outputs of 8,192; SGLang's have 2.15 with two drafts. Rates that fall by
# the same factor from draft to draft meet 2.15 and 2.38; those of long outputs are given that factor.
# SGLang's rate is fitted to TPOT of H200, and an iteration has 1.52 tokens with it. So it also stands for iterations
# with drafts that take 1.2 to 1.4 times as long as is predicted; why they do is not known.
LONG_OUTPUT = 4096
ACCEPTANCE = {
    ("tensorrt-llm", False): "0.71,0.615,0.533",
    ("tensorrt-llm", True): "0.85,0.74,0.64",
    ("sglang", False): "0.38",
    ("sglang", True): "0.38",
}
# SGLang's drafts run without overlap where SGLANG_ENABLE_SPEC_V2 is not set (0.5.8, 0.5.9). `dsr1_fp8_b200_mtp.sh`
# sets it without exporting it. The date from which its image is 0.5.11 or later, which has it by default.
OVERLAPPED_DRAFTS = "2026-05-15"
Row = Mapping[str, Any]


def is_inferencex(row: Row) -> bool:
    return "decode" in row


def standard_row(row: Row) -> dict[str, Any]:
    """`row` in the form of serving_rows. disaggregated: it cannot be replayed as one deployment."""
    decode, lengths = row["decode"], Random(0)
    longest = {"input": row["input"] * (RETOKENIZED if _is_retokenized(row) else 1), "output": row["output"]}
    pairs = [
        tuple(max(1, round(most * lengths.uniform(SHORTEST, 1))) for most in longest.values()) for _ in range(PAIRS)
    ]
    is_apart = bool(row.get("disaggregated"))
    named = ("source", "engine", "model", "concurrency", "generation", "id", "drafts", "disaggregated", "date")
    settings = _of_sglang(row) if row["engine"] == "sglang" else _of_tensorrt_llm(row)
    recipe = recipe_of(row) if is_apart else None
    if is_apart:  # SGLang's recipes for Hopper leave it to SGLang
        settings = {} if row["engine"] == "sglang" and not _is_blackwell(row) else {"kv_cache_dtype": "fp8"}
        settings |= {"stream_interval": int(recipe["stream_interval"])} if recipe else {}
    is_cold = row["engine"] == "sglang" and _is_blackwell(row) and row.get("date", WARMED_UP) < WARMED_UP
    prompts = row["concurrency"] * fmean(prompt_len for prompt_len, _ in pairs)
    return {
        **{name: row[name] for name in (*named, "version", "power_w_per_gpu") if name in row},
        **({"version": tensorrt_llm_version(row)} if row["engine"] == "tensorrt-llm" else {}),
        **{name: _without_mean(row[name]) for name in LATENCIES if name in row},
        "gpu": GPUS.get(row["gpu"], row["gpu"]),
        "num_gpus": sum(row[side]["gpus"] for side in SIDES) if is_apart else decode["tp"],
        **({"sides": sides_of(row, recipe)} if recipe else {}),
        "tp": decode["tp"],
        "ep": decode["ep"],
        "dp_attention": decode["dp_attention"],
        "dtype": DTYPES.get(row["dtype"], row["dtype"]),
        "input": round(fmean(prompt_len for prompt_len, _ in pairs)),
        "output": round(fmean(output_len for _, output_len in pairs)),
        "lengths_of": f"{row['input']}/{row['output']}",
        "pairs": pairs,
        "num_requests": ROUNDS * row["concurrency"],
        "num_drafts": (int(recipe["num_drafts"]) if recipe else _drafts(row)) if row.get("drafts") else None,
        "settings": settings | ({"acceptance_rate": acceptance_rate(row)} if row.get("drafts") else {}),
        "client_s": CLIENT_S,
        "waiting_s": COMPILING_S if is_cold and not is_apart and prompts > settings["max_num_tokens"] else 0.0,
        "output_tokens_per_s": row["output_tokens_per_s_per_gpu"] * decode["gpus" if is_apart else "tp"],
    }


def tensorrt_llm_version(row: Row) -> str:
    """TensorRT-LLM's version in the image of the date; the first one without a date."""
    kind = row["gpu"], row["dtype"]
    if row.get("disaggregated"):
        dates = DYNAMO_0_8.get(kind, DYNAMO_0_8_ELSEWHERE)
    else:
        dates = TENSORRT_LLM_DATES.get((*kind, bool(row.get("drafts"))), (NEVER, NEVER))
    return TENSORRT_LLM[sum(first <= row.get("date", "") for first in dates)]


def _is_retokenized(row: Row) -> bool:
    first = TRANSFORMERS_5.get(row["gpu"])
    is_single = row["engine"] == "sglang" and not row.get("disaggregated")
    return is_single and first is not None and first <= row.get("date", "") < TOKENIZER_MENDED


def _without_mean(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: figure for name, figure in figures.items() if name != "mean" or "p50" not in figures}


def _is_blackwell(row: Row) -> bool:
    return "b200" in row["gpu"] or "b300" in row["gpu"]


def _drafts(row: Row) -> int:
    """Draft tokens of a step of an aggregated server."""
    if row["engine"] == "sglang":
        return SGLANG_DRAFTS
    return DRAFTS_WITH_DP if row["decode"]["dp_attention"] else TENSORRT_LLM_DRAFTS


def acceptance_rate(row: Row) -> str:
    """How likely a draft is accepted, if those before it are: see ACCEPTANCE.

    Disaggregated servers of SGLang on Blackwell do not take what H200's rate has in it besides: the model accepts as
    under TensorRT-LLM. (Found with these rows in view; the rates are those of H200.)"""
    is_overlapped = row["engine"] == "sglang" and bool(row.get("disaggregated")) and _is_blackwell(row)
    return ACCEPTANCE["tensorrt-llm" if is_overlapped else row["engine"], row["output"] > LONG_OUTPUT]


def _of_sglang(row: Row) -> dict[str, Any]:
    """Settings of `dsr1_*_b200.sh`, `dsr1_fp8_h200.sh` and their `_mtp` forms."""
    clients, drafts = row["concurrency"], bool(row.get("drafts"))
    found: dict[str, Any] = {"disable_radix_cache": True, "gpu_memory_utilization": 0.82, "reserve_by_ratio": True}
    if not _is_blackwell(row):
        is_short = row["input"] == row["output"] == 1024
        return found | {
            "max_num_tokens": 32_768,
            "max_prefill_tokens": 32_768,
            "max_batch_size": 512 if is_short else 256,
            "stream_interval": 10,
        }
    found |= {"kv_cache_dtype": "fp8", "scheduler_recv_interval": 30 if clients >= 16 else 10}
    found["stream_interval"] = 10 if row["dtype"] == "fp4" else 30
    if drafts and row["dtype"] == "fp8" and row.get("date", OVERLAPPED_DRAFTS) < OVERLAPPED_DRAFTS:
        found["disable_overlap_schedule"] = True
    if row["dtype"] == "fp4":
        return found | {
            "gpu_memory_utilization": 0.85,
            "max_num_tokens": 16_384,
            "max_batch_size": 512 if drafts else 256,
        }
    chunk = 16_384 if drafts else 32_768
    return found | {"max_num_tokens": chunk, "max_prefill_tokens": chunk, "max_batch_size": 512 if drafts else 128}


def _of_tensorrt_llm(row: Row) -> dict[str, Any]:
    """Settings of `dsr1_*_trt.sh` and their `_mtp` forms."""
    decode, clients = row["decode"], row["concurrency"]
    parts = decode["tp"] if decode["dp_attention"] else 1
    batch = max(1, clients // parts) if row.get("drafts") else clients
    tokens = batch * (1 + _drafts(row)) if row.get("drafts") else clients
    tokens = (tokens + row["input"] + 64 + 63) // 64 * 64
    if row.get("date", WARMED_UP) >= WARMED_UP and not row.get("drafts"):
        tokens = max(tokens, 8192)
    balance = {"attention_dp_enable_balance": True, "attention_dp_time_out_iters": 60}
    return (balance | {"attention_dp_batching_wait_iters": 0} if parts > 1 else {}) | {
        "max_num_tokens": tokens * parts,
        "max_batch_size": batch * parts if row.get("drafts") else 2048,
        "enable_chunked_context": False,
        "kv_cache_dtype": "fp8",
        "kv_cache_free_gpu_mem_fraction": 0.8 if _is_blackwell(row) else 0.75,
    }
