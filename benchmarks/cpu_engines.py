"""Output tokens a second on a CPU: this engine and every other that is installed, in turns, over the same checkpoints.

`python -m benchmarks.cpu_engines` prints one JSON object. 64 requests (prompts of 16 to 256 tokens, outputs of 16
to 128), all at once, 16 at once, 512 tokens an iteration; float32 and bfloat16; two threads. Beside each engine's speed
are its share of what memory and matrix products allow here (`cpu_limit`), and for how many requests its tokens are
those of ifbbench: in float32 for all but near ties, in bfloat16, and with the flash attention of llama.cpp, for fewer.

`--python vllm=PATH` names an interpreter where an engine is installed, if that is another one; llama.cpp needs the
package `gguf` here, and `llama-cpp-python` there. OpenMP's runtime alone can be worth as much as engines differ: set
LD_PRELOAD, and all use the same one. Other work on the machine spoils wall times, for OpenMP's threads wait for each
other in a loop; `--threads 1` and the CPU seconds tell engines apart even then.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu_engine_runs import ENGINES
from benchmarks.cpu_limit import DeviceSpeed, Limit, limit, matrix_flops_per_s, read_bytes_per_s
from benchmarks.cpu_task import DTYPES, Task, Tokens, gguf_path
from ifbbench.rundir import run_directory

MODELS: dict[str, dict[str, int]] = {
    "small": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 688,
        "max_position_embeddings": 512,
    },
    "middle": {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "max_position_embeddings": 512,
    },
}
OWN = "ifbbench"


@dataclass(frozen=True, slots=True)
class Measured:
    """What `cpu_engine_runs` prints of one run. Seconds; the tokens of each request."""

    wall_s: float
    cpu_s: float
    version: str
    outputs: Tokens


def make_checkpoint(directory: Path, shape: dict[str, int]) -> None:
    """A random Llama as transformers writes it, and, where the package `gguf` is, as GGUF files in both data types."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=None, bos_token_id=None))
    model.save_pretrained(directory)
    if importlib.util.find_spec("gguf") is None:
        return
    from tests.torch.model.gguf_writing import write_gguf_without_texts

    for dtype, kind in {"float32": "F32", "bfloat16": "BF16"}.items():
        write_gguf_without_texts(gguf_path(directory, dtype), model, kind)


def run(python: str, engine: str, task: Task) -> list[Measured]:
    """One run in a process of its own; none if the engine is not installed there or fails."""
    arguments = [engine, str(task.directory), task.dtype, str(task.threads), "1"]
    variables = os.environ | {"OMP_NUM_THREADS": str(task.threads), "TRANSFORMERS_VERBOSITY": "error"}
    command = [python, "-m", "benchmarks.cpu_engine_runs", *arguments]
    found = subprocess.run(command, env=variables, capture_output=True, text=True)
    lines = [line.removeprefix("RUN ") for line in found.stdout.splitlines() if line.startswith("RUN ")]
    if not lines:
        print(f"{engine}: left out ({(found.stderr.splitlines() or ['no output'])[-1]})", file=sys.stderr)
    return [Measured(**json.loads(line)) for line in lines]


def in_turns(task: Task, engines: list[str], pythons: dict[str, str], turns: int) -> dict[str, list[Measured]]:
    """The runs of each engine that could run."""
    found: dict[str, list[Measured]] = {engine: [] for engine in engines}
    for turn in range(turns):
        for engine, runs in found.items():
            if turn == 0 or runs:
                runs += run(pythons.get(engine, sys.executable), engine, task)
    return {engine: runs for engine, runs in found.items() if runs}


def figures(found: dict[str, list[Measured]], task: Task, most: Limit) -> dict[str, Any]:
    """What is reported of a model in a data type."""
    own = found[OWN][-1].outputs if OWN in found else None
    report: dict[str, Any] = {"limit": {name: round(value) for name, value in asdict(most).items()}}
    for engine, runs in found.items():
        speed = sum(task.lengths) / median(one.wall_s for one in runs)
        report[engine] = {
            "output_tokens_per_s": round(speed, 1),
            "share_of_limit": round(speed / most.tokens_per_s, 3),
            "cpu_s": round(median(one.cpu_s for one in runs), 3),
            "requests_as_ifbbench": None if own is None else _num_equal(runs[-1].outputs, own),
            "version": runs[-1].version,
        }
    return report


def _num_equal(some: Tokens, others: Tokens) -> int:
    return sum(one == other for one, other in zip(some, others, strict=True))


def main() -> None:
    """Measure in turns, and print the medians."""
    given = _arguments()
    read = read_bytes_per_s(given.threads)
    speeds = {dtype: DeviceSpeed(matrix_flops_per_s(dtype, given.threads), read) for dtype in given.dtypes}
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.models:
            directory = Path(temporary) / name
            make_checkpoint(directory, MODELS[name])
            for dtype, speed in speeds.items():
                task = Task.of_checkpoint(directory, dtype, given.threads)
                runs = in_turns(task, given.engines, dict(given.python), given.turns)
                found[f"{name}, {dtype}"] = figures(runs, task, limit(task, speed))
    report = {
        "benchmark": "engines on a CPU",
        "threads": given.threads,
        "preloaded": os.environ.get("LD_PRELOAD"),
        "read_gigabytes_per_s": round(read / 1e9, 1),
        "matrix_gigaflops_per_s": {dtype: round(speed.flops_per_s / 1e9, 1) for dtype, speed in speeds.items()},
        "figures": found,
        "hardware": run_directory.hardware(),
        "versions": run_directory.versions(),
    }
    print(json.dumps(report, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Engines on a CPU, side by side.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--python", action="append", default=[], type=_engine_and_python, metavar="ENGINE=PATH")
    return parser.parse_args()


def _engine_and_python(given: str) -> tuple[str, str]:
    engine, _, path = given.partition("=")
    if engine not in ENGINES:
        raise argparse.ArgumentTypeError(f"{given!r} names no engine; expected one of {', '.join(ENGINES)}, and =PATH")
    if shutil.which(path) is None:
        raise argparse.ArgumentTypeError(f"there is no interpreter {path!r} for {engine}")
    return engine, path


if __name__ == "__main__":
    main()
