"""Real vLLM servings, with the times of each request, beside `ifbbench run --engine vllm` on the same arrivals.

`python -m benchmarks.vllm_request_times FILE` reads runs of [arrival_s, prompt tokens, output tokens, queued_s,
scheduled_s, first token_s, last token_s]. One constant of each run is fitted to the time per output token of the first
half of its requests: the memory bandwidth that the GPU reaches. The second half judges. Prints one JSON object: errors
of mean TTFT, TPOT and latency, and the share of pairs of requests that are first scheduled in the same order.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ifbbench.cli.options import engine_defaults
from ifbbench.replay.run import run_trace
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import HARDWARE_PROFILES
from ifbbench.settings.names import from_mapping, own_names

ARRIVAL, PROMPT, OUTPUT, QUEUED, SCHEDULED, FIRST, LAST = range(7)
FACTORS = np.arange(0.76, 1.25, 0.02)
TAKEN = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
BANDWIDTH = re.compile(r"(?<=^memory_bandwidth = )\S+", re.MULTILINE)


def settings_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `run` by vLLM's names, and its pool where that is known."""
    known = run["settings"]
    given: dict[str, Any] = {name: known[name] for name in TAKEN if known.get(name) is not None}
    cache = run["kv_cache"] or {"gpu_memory_utilization": 0.9}
    names = (
        ("num_gpu_blocks_override", "num_gpu_blocks") if "num_gpu_blocks" in cache else ("gpu_memory_utilization",) * 2
    )
    return {"engine": "vllm", "model": "llama-3.1-8b", names[0]: cache[names[1]]} | given


def replayed(run: Mapping[str, Any], factor: float, folder: Path) -> dict[str, np.ndarray]:
    """TTFT, TPOT, latency and first scheduling of each request of `run`, [requests], on its GPU with `factor` times the
    bandwidth."""
    profile, trace = folder / f"{run['gpu']}.toml", folder / "trace.jsonl"
    text = (HARDWARE_PROFILES / profile.name).read_text(encoding="utf-8")
    profile.write_text(BANDWIDTH.sub(lambda found: f"{float(found.group().replace('_', '')) * factor:.6g}", text))
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
    return {name: found[name].to_numpy(float) for name in ("ttft_s", "tpot_s", "e2e_s", "first_scheduled_s")}


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
    names = ("ttft_s", "tpot_s", "e2e_s")
    return {name: round(np.nanmean(found[name][part]) / np.nanmean(real[name][part]) - 1, 4) for name in names}


def judged(run: Mapping[str, Any]) -> dict[str, Any]:
    """Fit on the first half, and the errors of the second."""
    real, half = measured(run["requests"]), len(run["requests"]) // 2
    with TemporaryDirectory() as folder:
        tries = {float(factor): replayed(run, float(factor), Path(folder)) for factor in FACTORS}
    factor = min(tries, key=lambda one: abs(errors(tries[one], real, slice(half))["tpot_s"]))
    first, second = np.triu_indices(len(run["requests"]), 1)
    order, real_order = (
        np.sign(times["first_scheduled_s"][first] - times["first_scheduled_s"][second])
        for times in (tries[factor], real)
    )
    return {
        "name": run["name"],
        "bandwidth_factor": round(factor, 2),
        "fitted": errors(tries[factor], real, slice(half)),
        "judged": errors(tries[factor], real, slice(half, None)),
        "same_order": round(float(np.mean(order == real_order)), 4),
    }


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["runs"]
    print(
        json.dumps(
            {"benchmark": "request times of real vLLM servings", "runs": [judged(run) for run in runs]}, indent=2
        )
    )
