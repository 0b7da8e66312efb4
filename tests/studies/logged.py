"""Simulated servers, whose constants are known, and their logs as other engines write them."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.hardware import load_hardware, write_profile

MODEL: dict[str, Any] = {"model": "llama-3.1-8b", "dtype": "bf16"}
CHUNKED: dict[str, Any] = {"enable_chunked_context": True, "max_num_tokens": 512}
START = datetime(2026, 8, 19, 14, 11, 49, tzinfo=UTC).timestamp()


def true_profile(directory: Path) -> str:
    """A device like `h100-sxm`, but with other constants and twice the host time, as a `--device`."""
    base = load_hardware("h100-sxm")
    constants = replace(
        base.constants, matmul=0.45, memory=0.6, context_attention=0.3, generation_attention=0.5, context_s=2e-4
    )
    path = directory / "true.toml"
    write_profile(replace(base, host_iteration_s=1.2e-3, host_request_s=1e-5, constants=constants), path, "Known.")
    return f"sim:{path}"


def replayed(directory: Path, device: str, trace: str = "chat", **settings: Any) -> dict[str, Any]:
    """The summary of a run on `device`, recorded in `directory`."""
    config = RunConfig(device=device, output=str(directory), overwrite=True, **MODEL | settings)
    return run_trace(trace, config).summary


def iterations(directory: Path) -> list[dict[str, Any]]:
    """The lines of iterations.jsonl."""
    return [json.loads(line) for line in (directory / "iterations.jsonl").read_text().splitlines()]


def tensorrt_llm(directory: Path, *, overlaps: bool = False, has_keys: bool = False) -> list[dict[str, Any]]:
    """The run's iterations as TensorRT-LLM's statistics.

    overlaps: an iteration's latency covers the next one too, as with the overlap scheduler. has_keys: newer versions
    count the tokens that generation reads.
    """
    rows = iterations(directory)
    objects = []
    start_s = before_ms = 0.0
    for row, later in zip(rows, [*rows[1:], rows[-1]], strict=True):
        details = row["ifbbench"]
        milliseconds = details["latency_ms"] + (later["ifbbench"]["latency_ms"] if overlaps else 0.0)
        counts = {
            "numScheduledRequests": row["Scheduled Requests"],
            "numContextRequests": row["Context Requests"],
            "numGenRequests": row["Generation Requests"],
            "numPausedRequests": 0,
            "numCtxTokens": row["Total Context Tokens"],
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 0.0,
        }
        held = row["Used KV cache blocks"] * 32 * (1 - details["kv_fragmentation"])
        tokens = round(held) - row["Total Context Tokens"]
        if has_keys:
            counts["numGenKvTokens"] = max(tokens, 0) if row["Generation Requests"] else 0
        timestamp = datetime.fromtimestamp(START + (start_s if overlaps else details["start_s"]), UTC)
        # With overlap, the loop of an iteration waits for the one before.
        start_s += before_ms / 1000
        before_ms = details["latency_ms"]
        objects.append(
            {
                "timestamp": timestamp.strftime("%m-%d-%Y %H:%M:%S.%f"),
                "iter": row["Iteration Counter"],
                "iterLatencyMS": milliseconds,
                "numActiveRequests": row["Active Request Count"],
                "maxNumActiveRequests": row["Max Request Count"],
                "gpuMemUsage": 58941767680,
                "kvCacheStats": {
                    "maxNumBlocks": row["Max KV cache blocks"],
                    "freeNumBlocks": row["Free KV cache blocks"],
                    "usedNumBlocks": row["Used KV cache blocks"],
                    "tokensPerBlock": 32,
                },
                "inflightBatchingStats": counts,
                "staticBatchingStats": None,
                "specDecodingStats": None,
            }
        )
    return objects


def vllm(directory: Path, cache_tokens: int = 450_000, every: int = 50, *, has_iterations: bool = True) -> str:
    """The run's iterations as log lines of vLLM, without the host's time, and a summary of every so many of them."""
    core = "(EngineCore_DP0 pid=1205) INFO 07-09 03:15:05 [core.py:359]"
    api = "(APIServer pid=1100) INFO 07-09 03:15:05 [loggers.py:127] Engine 000:"
    lines = [
        "INFO 07-09 03:10:00 [core.py:58] Initializing a V1 LLM engine with config: model='meta-llama/Llama-3.1-8B', "
        "tokenizer='meta-llama/Llama-3.1-8B', dtype=torch.bfloat16, tensor_parallel_size=1, pipeline_parallel_size=1",
        f"INFO 07-09 03:10:09 [kv_cache_utils.py:1286] GPU KV cache size: {cache_tokens:,} tokens",
    ]
    seconds, prompt_tokens, generated = 0.0, 0, 0
    for row in iterations(directory):
        generating, details = row["Generation Requests"], row["ifbbench"]
        if has_iterations:
            lines.append(
                f"{core} Iteration({row['Iteration Counter']}): {row['Context Requests']} context requests, "
                f"{row['Total Context Tokens']} context tokens, {generating} generation requests, {generating} "
                f"generation tokens, iteration elapsed time: {details['device_ms']:.2f} ms"
            )
        seconds += details["latency_ms"] / 1000
        prompt_tokens += row["Total Context Tokens"]
        generated += generating
        if row["Iteration Counter"] % every == every - 1:
            tokens = row["Used KV cache blocks"] * 32 * (1 - details["kv_fragmentation"])
            lines.append(
                f"{api} Avg prompt throughput: {prompt_tokens / seconds:.1f} tokens/s, Avg generation throughput: "
                f"{generated / seconds:.1f} tokens/s, Running: {generating} reqs, Waiting: 0 reqs, GPU KV cache usage: "
                f"{100 * tokens / cache_tokens:.1f}%, Prefix cache hit rate: 0.0%"
            )
            seconds, prompt_tokens, generated = 0.0, 0, 0
    return "\n".join(lines) + "\n"


def load_tests(directory: Path, device: str, rows: list[dict[str, Any]], **settings: Any) -> str:
    """A CSV file of load tests on `device`: `rows` have input_len, output_len, and concurrency or rate."""
    lines = ["input_len,output_len,concurrency,rate,tp,throughput,ttft,itl"]
    for row in rows:
        trace = directory / "equal.jsonl"
        requests = [
            {
                "request_id": index,
                "arrival_s": index / row.get("rate", 1e9),
                "prompt_len": row["input_len"],
                "output_len": row["output_len"],
            }
            for index in range(3 * row.get("concurrency", 8))
        ]
        trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
        load = {"concurrency": row.get("concurrency"), "tp_size": row.get("tp", 1)}
        found = replayed(directory / "load", device, str(trace), **load, **settings)
        figures = (
            found["output_throughput_tokens_per_s"],
            found["ttft_s"]["mean"] * 1000,
            found["itl_s"]["mean"] * 1000,
        )
        names = ("input_len", "output_len", "concurrency", "rate", "tp")
        lines.append(",".join([*(str(row.get(name, "")) for name in names), *(f"{value:.4f}" for value in figures)]))
    return "\n".join(lines) + "\n"
