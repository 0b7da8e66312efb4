"""Real vLLM servings, with the times of each request, beside `ifbbench run --engine vllm` on the same arrivals.

`python -m benchmarks.vllm_request_times FILE` reads runs of [arrival_s, prompt tokens, output tokens, queued_s,
scheduled_s, first token_s, last token_s]. Two constants of each run are fitted to the mean TTFT, time per output token
and latency of one half of its requests: the memory bandwidth and the FLOP/s of the GPU, relative to its profile. The
other half judges, in both directions. Prints one JSON object: errors of the three means, and the share of pairs of
requests that are first scheduled in the same order.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from ifbbench.cli.given_settings import engine_defaults
from ifbbench.replay.run import run_trace
from ifbbench.rundir.reader import load_run
from ifbbench.settings.names import from_mapping, own_names
from ifbbench.simulated.hardware import load_hardware, write_profile

ARRIVAL, PROMPT, OUTPUT, QUEUED, SCHEDULED, FIRST, LAST = range(7)
MEANS = ("ttft_s", "tpot_s", "e2e_s")
TAKEN = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "tensor_parallel_size")
# Relative to the constants of a profile: how far a fit may go, and the steps of its derivatives, which are larger than
# what one request that is scheduled otherwise changes. A constant that is off by 50 % weighs as much as an error of
# 1 %, because the means of one half may not determine both.
LIMITS, STEP, EVALUATIONS, PRIOR = (0.4, 2.5), 0.05, 8, 0.02


def settings_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `run` by vLLM's names, and its pool where that is known."""
    known = run["settings"]
    given: dict[str, Any] = {name: known[name] for name in TAKEN if known.get(name) is not None}
    cache = run["kv_cache"] or {"gpu_memory_utilization": 0.9}
    names = (
        ("num_gpu_blocks_override", "num_gpu_blocks") if "num_gpu_blocks" in cache else ("gpu_memory_utilization",) * 2
    )
    return {"engine": "vllm", "model": run["model"], names[0]: cache[names[1]]} | given


def replayed(run: Mapping[str, Any], memory: float, compute: float, folder: Path) -> dict[str, np.ndarray]:
    """TTFT, TPOT, latency and first scheduling of each request of `run`, [requests], on its GPU with so many times the
    memory bandwidth and FLOP/s."""
    profile, trace, gpu = folder / f"{run['gpu']}.toml", folder / "trace.jsonl", load_hardware(run["gpu"])
    peak_flops = {dtype: value * compute for dtype, value in gpu.peak_flops.items()}
    fitted = replace(gpu, memory_bandwidth=gpu.memory_bandwidth * memory, peak_flops=peak_flops)
    write_profile(fitted, profile, "Fitted to times of requests.")
    rows = [
        {"request_id": index, "arrival_s": row[ARRIVAL], "prompt_len": row[PROMPT], "output_len": row[OUTPUT]}
        for index, row in enumerate(run["requests"])
    ]
    trace.write_text("\n".join(json.dumps(row | {"max_new_tokens": row["output_len"]}) for row in rows) + "\n")
    asked = own_names(settings_of(run) | {"device": f"sim:{profile}"})
    config = from_mapping({**engine_defaults(asked), **asked}, command_line=True)
    output = folder / "run"
    run_trace(str(trace), config.with_values(output=str(output), overwrite=True, recording="summary"))
    found = load_run(output).requests.sort_values("index")
    return {name: found[name].to_numpy(float) for name in (*MEANS, "first_scheduled_s")}


def measured(rows: Sequence[Sequence[float]]) -> dict[str, np.ndarray]:
    """What `replayed` returns, as the real run measured it."""
    real = np.array(rows, float)
    tpot_s = (real[:, LAST] - real[:, FIRST]) / np.maximum(real[:, OUTPUT] - 1, 1)
    return {
        "ttft_s": real[:, FIRST] - real[:, ARRIVAL],
        "tpot_s": tpot_s,
        "e2e_s": real[:, LAST] - real[:, ARRIVAL],
        "first_scheduled_s": real[:, SCHEDULED],
    }


def errors(found: Mapping[str, np.ndarray], real: Mapping[str, np.ndarray], part: slice) -> dict[str, float]:
    """Relative errors of the means over a part of the requests."""
    return {name: round(float(np.nanmean(found[name][part]) / np.nanmean(real[name][part]) - 1), 4) for name in MEANS}


def judged(run: Mapping[str, Any]) -> dict[str, Any]:
    """Fit to each half, and the errors of the other."""
    real, count = measured(run["requests"]), len(run["requests"])
    halves = {"first": slice(count // 2), "second": slice(count // 2, None)}
    first, second = np.triu_indices(count, 1)
    result: dict[str, Any] = {"name": run["name"]}
    with TemporaryDirectory() as directory:
        replay = cache(lambda memory, compute: replayed(run, memory, compute, Path(directory)))
        for (name, fitted), (other, rest) in permutations(halves.items()):

            def residuals(factors: np.ndarray, part: slice = fitted) -> list[float]:
                off = errors(replay(*np.round(factors, 3)), real, part)
                return [*off.values(), *(PRIOR * (factors - 1))]

            found = least_squares(residuals, (1.0, 1.0), bounds=LIMITS, diff_step=STEP, max_nfev=EVALUATIONS)
            memory, compute = np.round(found.x, 3).tolist()
            times = replay(memory, compute)
            order, real_order = (
                np.sign(one["first_scheduled_s"][first] - one["first_scheduled_s"][second]) for one in (times, real)
            )
            result[f"fitted to the {name} half"] = {
                "memory_bandwidth": memory,
                "peak_flops": compute,
                "fitted": errors(times, real, fitted),
                f"{other} half": errors(times, real, rest),
                "same_order": round(float(np.mean(order == real_order)), 4),
            }
    return result


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["runs"]
    print(
        json.dumps(
            {"benchmark": "request times of real vLLM servings", "runs": [judged(run) for run in runs]}, indent=2
        )
    )
