"""Output tokens a second on a CPU: this engine and every other that is installed, in turns, over the same checkpoints.

`python -m tests.benchmarks.cpu_engines` prints one JSON object. 64 requests (prompts of 16 to 256 tokens, outputs of 16
to 128), all at once, 16 at once, 512 tokens an iteration; float32 and bfloat16; two threads. `--python vllm=PATH` names
an interpreter where an engine is installed, if that is another one. Other work on the machine spoils wall times, for
OpenMP's threads wait for each other in a loop; `--threads 1` and the CPU seconds tell engines apart even then.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from ifbbench.model.config import load_model_config
from ifbbench.recording import environment
from tests.benchmarks.cpu_engine_runs import ENGINES, workload

MODELS: dict[str, dict[str, int]] = {
    "small": {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
              "num_key_value_heads": 4, "intermediate_size": 688, "max_position_embeddings": 512},
    "middle": {"vocab_size": 32_000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
               "num_key_value_heads": 4, "intermediate_size": 2048, "max_position_embeddings": 512},
}  # fmt: skip
DTYPES = ("float32", "bfloat16")


def make_checkpoint(directory: Path, shape: dict[str, int]) -> None:
    """A random Llama, as transformers writes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=None, bos_token_id=None)).save_pretrained(directory)


def run(python: str, engine: str, directory: Path, dtype: str, threads: int, runs: int) -> list[dict[str, Any]]:
    """Runs in a process of its own; none if the engine is not installed there or fails."""
    command = [python, "-m", "tests.benchmarks.cpu_engine_runs", engine, str(directory), dtype, str(threads), str(runs)]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
    found = subprocess.run(command, env=variables, capture_output=True, text=True)
    lines = [line.removeprefix("RUN ") for line in found.stdout.splitlines() if line.startswith("RUN ")]
    if not lines:
        print(f"{engine}: left out ({(found.stderr.splitlines() or ['no output'])[-1]})", file=sys.stderr)
    return [json.loads(line) for line in lines]


def matrix_speed(dtype: str, threads: int) -> float:
    """FLOP/s of products of 512 rows with packed weights of 2048 × 2048, too many for the caches."""
    import torch

    from ifbbench.model.linear import make_linear

    torch.set_num_threads(threads)
    values = getattr(torch, dtype)
    with torch.inference_mode():
        weights = [make_linear(torch.randn(2048, 2048).to(values)) for _ in range(16)]
        rows = torch.randn(512, 2048).to(values)
        times = []
        for _ in range(5):
            start_s = time.process_time()
            for weight in weights:
                weight(rows)
            times.append(time.process_time() - start_s)
    return threads * len(weights) * 2 * 512 * 2048 * 2048 / min(times)


def limit(directory: Path, flops_per_s: float) -> float:
    """Output tokens/s if all matrix products, and nothing else, took their time at full speed."""
    config = load_model_config(directory)
    prompts, lengths = workload(config.vocab_size)
    head = config.vocab_size * config.hidden_size
    per_token = config.num_parameters - 2 * head
    passed = sum(map(len, prompts)) + sum(lengths) - len(lengths)
    return sum(lengths) * flops_per_s / (2 * per_token * passed + 2 * head * sum(lengths))


def main() -> None:
    """Measure in turns, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    given = parser.parse_args()
    pythons = dict(item.split("=", 1) for item in given.python)
    report: dict[str, Any] = {"benchmark": "engines on a CPU", "threads": given.threads, "figures": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.models:
            directory = Path(temporary) / name
            make_checkpoint(directory, MODELS[name])
            for dtype in given.dtypes:
                figures = _in_turns(given, pythons, directory, dtype)
                reachable = limit(directory, matrix_speed(dtype, given.threads))
                report["figures"][f"{name}, {dtype}"] = {"matrix_limit_tokens_per_s": round(reachable), **figures}
    print(json.dumps(report | {"hardware": environment.hardware(), "versions": environment.versions()}, indent=1))


def _in_turns(given: argparse.Namespace, pythons: dict[str, str], directory: Path, dtype: str) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in given.engines}
    for turn in range(given.turns):
        for engine, runs in found.items():
            if turn == 0 or runs:
                runs += run(pythons.get(engine, sys.executable), engine, directory, dtype, given.threads, 1)
    num_outputs = sum(workload(load_model_config(directory).vocab_size)[1])
    return {
        engine: {
            "output_tokens_per_s": round(num_outputs / median(item["wall_s"] for item in runs), 1),
            "cpu_s": round(median(item["cpu_s"] for item in runs), 3),
            "tokens": runs[-1]["tokens"],
        }
        for engine, runs in found.items() if runs
    }  # fmt: skip


if __name__ == "__main__":
    main()
