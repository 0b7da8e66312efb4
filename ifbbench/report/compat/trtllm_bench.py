"""The files of trtllm-bench (`--report_json`, `--request_json`, `--iteration_log`) with its names, units and formulas.

Source: tensorrt_llm/bench/dataclasses/reporting.py and statistics.py of TensorRT-LLM. Its percentiles are
`sorted[int(n * p)]`, and a request with one output token counts as 0 in `tpot_percentiles`.
"""

import json
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ifbbench.errors import InputError
from ifbbench.files import new_file, replace_file
from ifbbench.rundir.line_types import TIMESTAMP_FORMAT, documented_fields, executor_statistics
from ifbbench.rundir.lines import encode
from ifbbench.rundir.reader import RunData
from ifbbench.rundir.rows import read_lines
from ifbbench.rundir.run_directory import find_lines
from ifbbench.settings.fields import unexpected

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
NANOSECONDS = 1e9
# trtllm-bench's words for data types of quantized weights.
QUANTIZED = {
    "fp8": "FP8",
    "fp8_block": "FP8_BLOCK_SCALES",
    "int4": "W4A16",
    "mxfp4": "W4A8_MXFP4_FP8",
    "nvfp4": "NVFP4",
}


def write_report(run: RunData, path: Path) -> None:
    """Write the figures of `run` as `trtllm-bench --report_json` does."""
    replace_file(path, json.dumps(report(run), indent=4, allow_nan=False) + "\n")


def report(run: RunData) -> dict[str, Any]:
    """The content of a report. Figures cover completed requests; those that cannot be computed are None."""
    done, config = run.completed, run.config
    span_s = float(done["end_s"].max() - run.requests["arrival_s"].min()) if len(done) else 0.0
    prompt_tokens, output_tokens = int(done["prompt_len"].sum()), int(done["output_len"].sum())
    latency_ms = percentiles(done["e2e_s"] * 1000)
    world_size = (config.get("tp_size") or 1) * (config.get("pp_size") or 1)
    content = {
        "engine": _engine(run),
        "machine": _machine(run),
        "world_info": {
            "tp_size": config.get("tp_size"),
            "pp_size": config.get("pp_size"),
            "ep_size": 1,
            "world_size": world_size,
            "max_batch_size": config.get("max_batch_size"),
            "max_num_tokens": config.get("max_num_tokens"),
            "scheduling_policy": str(config.get("policy")).upper(),
            "kv_cache_percentage": config.get("kv_cache_free_gpu_mem_fraction"),
            "issue_rate": _ratio(len(done), float(np.ptp(done["arrival_s"])) if len(done) else 0.0) or 0.0,
        },
        "request_info": {
            "num_requests": len(done),
            "avg_num_concurrent_requests": _ratio(float(done["e2e_s"].sum()), span_s),
            "avg_input_length": _ratio(prompt_tokens, len(done)),
            "avg_output_length": _ratio(output_tokens, len(done)),
        },
        "performance": {
            "total_latency_ms": span_s * 1000,
            "avg_request_latency_ms": latency_ms["average"],
            "request_throughput_req_s": _ratio(len(done), span_s),
            "system_output_throughput_tok_s": _ratio(output_tokens, span_s),
            "system_total_throughput_tok_s": _ratio(prompt_tokens + output_tokens, span_s),
            "output_throughput_per_user_tok_s": percentiles(_quotients(done["output_len"], done["e2e_s"]))["average"],
            "output_throughput_per_gpu_tok_s": _ratio(output_tokens, span_s * world_size),
            "request_latency_percentiles_ms": latency_ms,
        },
    }
    if config.get("streaming"):
        content["streaming_metrics"] = _streaming(done)
    if config.get("draft_len"):
        content["decoding_stats"] = _decoding(run, done)
    return content | {"dataset": _dataset(run)}


def _decoding(run: RunData, done: pd.DataFrame) -> dict[str, Any]:
    """Figures of draft tokens, by request. The acceptance length is that of all its decoding steps."""
    drafted, accepted = (
        done[name].fillna(0) if name in done else done["output_len"] * 0
        for name in ("draft_tokens", "accepted_draft_tokens")
    )
    rates = (accepted / drafted)[drafted > 0]
    return {
        "mode": "NGram" if run.config.get("draft_ngram") else "DraftTarget",
        "num_draft_tokens_percentiles": percentiles(drafted),
        "num_accepted_draft_tokens_percentiles": percentiles(accepted),
        "draft_acceptance_rate_percentiles": percentiles(rates),
        "acceptance_length_percentiles": percentiles(done["output_len"] / (done["output_len"] - accepted)),
    }


def _streaming(done: pd.DataFrame) -> dict[str, Any]:
    """Figures of single tokens."""
    generated, generation_s = done["output_len"] - 1, done["e2e_s"] - done["ttft_s"]
    ttft = percentiles(done["ttft_s"] * 1000)
    tpot = percentiles((generation_s / generated.where(generated > 0)).fillna(0.0) * 1000)
    speeds = percentiles(_quotients(generated, generation_s))
    return {
        "token_output_speed_tok_s": speeds["average"],
        "avg_ttft_ms": ttft["average"],
        "avg_tpot_ms": tpot["average"],
        "tpot_percentiles": tpot,
        "ttft_percentiles": ttft,
        "gen_tps_percentiles": speeds,
    }


def percentiles(values: ArrayLike) -> dict[str, float | None]:
    """trtllm-bench's percentiles, extremes and mean of `values`, in their unit; all None if there are none."""
    ordered = np.sort(np.asarray(values, dtype=float))
    if not ordered.size:
        return dict.fromkeys((*PERCENTILES, "minimum", "maximum", "average"))
    ranks = {name: float(ordered[int(ordered.size * share)]) for name, share in PERCENTILES.items()}
    return {**ranks, "minimum": float(ordered[0]), "maximum": float(ordered[-1]), "average": float(ordered.mean())}


def _quotients(values: pd.Series, durations_s: pd.Series) -> pd.Series:
    """Rates of the requests that lasted; trtllm-bench divides by zero for the others."""
    return (values / durations_s)[durations_s > 0]


def _ratio(value: float, divisor: float) -> float | None:
    return value / divisor if divisor > 0 else None


def _engine(run: RunData) -> dict[str, Any]:
    config = run.config
    model = str(config.get("model"))
    return {
        "model": model,
        "model_path": model if Path(model).is_dir() else None,
        "engine_dir": None,
        "version": (run.run.get("versions") or {}).get("ifbbench"),
        "backend": "ifbbench",
        "dtype": config.get("dtype"),
        "kv_cache_dtype": config.get("kv_cache_dtype"),
        "quantization": QUANTIZED.get(config.get("dtype", "")),
        "max_input_length": config.get("max_input_len"),
        "max_sequence_length": config.get("max_seq_len"),
    }


def _machine(run: RunData) -> dict[str, Any] | None:
    """The GPU; the profile of a simulated one; None for a CPU."""
    device = str(run.config.get("device"))
    if device.startswith("sim:"):
        return {"name": device, "memory.total": None, "clocks.mem": None}
    gpu = (run.run.get("hardware") or {}).get("gpu")
    return gpu and {"name": gpu["name"], "memory.total": gpu["memory_bytes"] / 2**30, "clocks.mem": None}


def _dataset(run: RunData) -> dict[str, Any]:
    """Lengths of the requests that ended, failed ones included; the output length is max_new_tokens."""
    known = run.requests.dropna(subset=["prompt_len", "max_new_tokens"])
    isl, osl = known["prompt_len"], known["max_new_tokens"]
    stats = {"isl": percentiles(isl), "osl": percentiles(osl), "sequence_length": percentiles(isl + osl)}
    return {
        "isl_stats": stats["isl"],
        "osl_stats": stats["osl"],
        "seq_len_stats": stats["sequence_length"],
        "num_requests": len(known),
        "dataset_path": (run.run.get("trace") or {}).get("source"),
        **{f"max_{name}": _whole(values["maximum"]) for name, values in stats.items()},
        **{f"avg_{name}": _whole(values["average"]) for name, values in stats.items()},
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def write_requests(run: RunData, path: Path) -> None:
    """Write the completed requests of `run` as `trtllm-bench --request_json` does, one element each."""
    replace_file(path, json.dumps(list(map(_request, run.completed.to_dict("records")))) + "\n")


def _request(row: dict[Any, Any]) -> dict[str, Any]:
    """One request. Times are in ns, rates in tokens/ns. `output`, its text, is empty: token ids are not decoded."""
    names = ("arrival_s", "first_token_s", "end_s")
    start, first, end = (round(row[name] * NANOSECONDS) for name in names)
    tokens, accepted = int(row["output_len"]), row.get("accepted_draft_tokens", 0)
    steps = tokens - (0 if pd.isna(accepted) else int(accepted))
    request_id = str(row["request_id"])
    return {
        "id": int(request_id) if request_id.isdecimal() else request_id,
        "num_input_tokens": int(row["prompt_len"]),
        "error_tokens": 0,
        "start_timestamp": start,
        "first_token_timestamp": first,
        "end_timestamp": end,
        "decode_iteration": steps - 1,
        "num_total_output_tokens": tokens,
        "num_generated_tokens": tokens - 1,
        "generation_time": end - first,
        "time_to_first_token": first - start,
        "intertoken_latency": (end - first) / (tokens - 1) if tokens > 1 else 0.0,
        "end_to_end_latency": end - start,
        "output_token_throughput": _ratio(tokens, end - start),
        "generation_token_throughput": _ratio(tokens - 1, end - first),
        "output": "",
        "output_tokens": tokens,
    }


def write_iterations(run: RunData, path: Path) -> None:
    """Write the statistics of the recorded iterations in the executor's form, one JSON object a line.

    Timestamps have microseconds, as the executor's: their differences are exact, and a run is taken to begin with a
    second, because its lines have whole seconds only.
    """
    spans = run.spans[run.spans["request_id"].isin(run.completed["request_id"])]
    completed = Counter(spans.groupby("request_id")["last_iteration"].max().tolist())
    begin = None
    with new_file(path, overwrite=True) as file:
        for row in read_lines(find_lines(run.path, "iterations"), ("ifbbench",)):
            known = documented_fields(row) | row["ifbbench"]
            if (start_s := known.get("start_s")) is not None:
                begin = begin or _begin(find_lines(run.path, "iterations"), known["timestamp"], start_s)
                known["timestamp"] = (begin + timedelta(seconds=start_s)).strftime(f"{TIMESTAMP_FORMAT}.%f")
            known["completed"] = completed[known.get("last_step", known["iteration_counter"])]
            file.write(encode(executor_statistics(known)) + b"\n")


def _begin(path: Path, timestamp: Any, start_s: float) -> datetime:
    """When a run began whose iteration at `start_s` has this timestamp. InputError if that is none."""
    try:
        return datetime.strptime(timestamp, TIMESTAMP_FORMAT) - timedelta(seconds=int(start_s))
    except (ValueError, TypeError, OverflowError):
        raise InputError(
            f"{path}: {unexpected('Timestamp', timestamp, 'month-day-year hour:minute:second')} Restore the file."
        ) from None
