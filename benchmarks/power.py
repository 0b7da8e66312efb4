"""Predicted watts of GPUs held against ML.ENERGY's measurements of vLLM servers.

`python -m benchmarks.power FILE` takes a task of its leaderboard (github.com/ml-energy/leaderboard, public/data/tasks/
lm-arena-chat.json or gpqa.json): mean watts, batch size, throughput and output length of dense models in bf16. A row
is a line, and the errors by GPU are one JSON object at the end. Watts follow from the work of a steady step with this
batch, in the time that the measured throughput gives it: so errors are of the watts alone, not of predicted times.

Prompt lengths are not published. Those of lm-arena-chat are taken to be PROMPT_LENS, with which the predicted times of
all steps together are the measured ones; questions of gpqa are short. The watts of H100 and B200 were fitted to
lm-arena-chat, within what matrix products alone take (AIConfigurator's gemm_perf), and are judged on gpqa.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.models.named_models import load_model_config
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.energy import joules_of_work
from ifbbench.simulated.engines import load_overhead
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard
from ifbbench.simulated.step_work import WorkDone

GPUS = {"H100": "h100-sxm", "B200": "b200"}
MODELS = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.3-70b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.3-70b",
    "meta-llama/Llama-3.1-405B-Instruct": "llama-3.1-405b",
}
PROMPT_LENS = {"lm-arena-chat": 900, "gpqa": 250}
DTYPE = "bf16"
# Output tokens of each request that stand for its prompt's share of a step.
STEPS = 100


def predicted_watts(row: dict[str, Any], prompt_len: int) -> float:
    """Mean watts of one GPU while STEPS steady steps run in the measured time."""
    hardware = load_overhead("vllm").applied_to(load_hardware(GPUS[row["gpu_model"]]), DTYPE)
    watts = hardware.watts
    assert watts is not None
    tp_size, batch, output_len = row["tensor_parallel"], round(row["avg_batch_size"]), row["avg_output_len"]
    model = CostModel(Shard(load_model_config(MODELS[row["model_id"]]), DTYPE, DTYPE, tp_size), hardware)
    done = WorkDone()
    prompts = STEPS * batch / output_len
    prompt_tokens = round(prompts * prompt_len / STEPS)
    done.add_iterations(batch + prompt_tokens, batch, STEPS)
    done.generation_kv_tokens = round(STEPS * batch * (prompt_len + output_len / 2))
    done.attention_pairs = round(prompts * prompt_len * (prompt_len + 1) / 2)
    seconds = STEPS * row["avg_batch_size"] / row["output_throughput_tokens_per_sec"]
    power = watts.idle + joules_of_work(model, done, watts) / tp_size / seconds
    return min(watts.limit, power)


def main() -> None:
    """Print the rows and the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    task = json.loads(parser.parse_args().file.read_text(encoding="utf-8"))
    rows, prompt_len = task["configurations"], PROMPT_LENS[task["task"]]
    errors: dict[str, list[float]] = {}
    for row in rows:
        is_dense = row["model_id"] in MODELS and row["weight_precision"] == "bfloat16" and row["data_parallel"] == 1
        if not is_dense or row["gpu_model"] not in GPUS:
            continue
        measured, watts = row["avg_power_watts"] / row["num_gpus"], predicted_watts(row, prompt_len)
        errors.setdefault(row["gpu_model"], []).append(watts / measured - 1)
        where = f"{row['gpu_model']} {MODELS[row['model_id']]} TP{row['tensor_parallel']}"
        where += f" batch {row['avg_batch_size']:.0f}"
        print(f"{where:<40} measured {measured:5.0f} W, predicted {watts:5.0f} W ({watts / measured - 1:+.1%})")
    found = {
        gpu: {
            "rows": len(signed),
            "median": round(float(np.median(np.abs(signed))), 4),
            "p90": round(float(np.quantile(np.abs(signed), 0.9)), 4),
            "bias": round(float(np.median(signed)), 4),
        }
        for gpu, signed in errors.items()
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
