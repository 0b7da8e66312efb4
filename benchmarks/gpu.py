"""Everything that a GPU is asked for, in one go.

`python -m benchmarks.gpu` prints one JSON object: the machine; the attention kernels (see `gpu_kernels`); then a
checkpoint of random weights of llama-3.1-8b's shape, and 256 requests of 1,024 tokens in and 256 out through it, all at
once: output tokens a second, and how near generation comes to what reading weights and keys and values takes at the
speed of a copy. With and without CUDA graphs, with overlap and what it hides of the host's time, with weights and KV
cache in eight bits; the same requests in `transformers`' continuous batching; and the error of a simulated profile
calibrated here; and last the tests of the kernels, which elsewhere run in Triton's interpreter.

Each part runs in a process of its own. One that fails leaves its error in its place, and the others run. `--quick`
takes a small model and few requests; `--output FILE` has what is known after each part; `--parts` names some of them.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import gpu_kernels
from benchmarks.gpu_checkpoint import write_checkpoint
from benchmarks.gpu_engine import Workload, hidden_host_time, run_engine
from benchmarks.gpu_transformers import run_transformers
from ifbbench.rundir.run_directory import git_revision, hardware, versions
from ifbbench.settings.config import RunConfig

MODEL, WORKLOAD = "llama-3.1-8b", Workload(requests=256, prompt_len=1024, output_len=256)
QUICK_WORKLOAD = Workload(requests=32, prompt_len=256, output_len=64)
QUICK_SHAPE = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
# Of a part, in seconds.
TIME_LIMIT_S = 600.0
REPOSITORY = Path(__file__).parents[1]
# How an exception's own line in a traceback begins; PyTorch has hints behind it.
EXCEPTION = re.compile(r"[\w.]+: ")
LINES_OF_AN_ERROR = 20
RESULT = "RESULT "
NO_GPU = "This measures a GPU, and PyTorch finds none here. Run it on a machine with one."
# A part's figures, or `error`.
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What the parts have in common. directory: for the checkpoint, and for runs."""

    directory: Path
    quick: bool

    @property
    def checkpoint(self) -> str:
        return str(self.directory / "checkpoint")

    @property
    def workload(self) -> Workload:
        return QUICK_WORKLOAD if self.quick else WORKLOAD


def checkpoint(setup: Setup) -> Figures:
    """Random weights on disk, for all other parts."""
    shape = MODEL
    if setup.quick:
        shape = str(setup.directory / "small.json")
        Path(shape).write_text(json.dumps(QUICK_SHAPE))
    write_checkpoint(shape, Path(setup.checkpoint), gpu_kernels.DEVICE)
    files = Path(setup.checkpoint).glob("*.safetensors")
    return {"model": QUICK_SHAPE if setup.quick else MODEL, "bytes": sum(file.stat().st_size for file in files)}


def engine(setup: Setup, **settings: Any) -> Figures:
    """The engine with these settings beside the usual ones."""
    bandwidth = gpu_kernels.copy_bandwidth()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(dir=setup.directory) as directory:
        return run_engine(setup.checkpoint, setup.workload, Path(directory), bandwidth, **settings)


def engine_without_graphs(setup: Setup) -> Figures:
    """Every kernel launched by the host."""
    from ifbbench.torch.model_executor import ModelExecutor

    with patch.object(ModelExecutor, "use_graphs"):
        return engine(setup)


def transformers(setup: Setup) -> Figures:
    """`transformers` with the same requests."""
    return run_transformers(setup.checkpoint, setup.workload)


def calibration(setup: Setup) -> Figures:
    """How well a cost model fitted to this GPU predicts the iterations that it was fitted to."""
    from ifbbench.studies.calibrate import calibrate

    config = RunConfig(model=setup.checkpoint, device="cuda", dtype="bf16", max_batch_size=64, max_seq_len=4096)
    found = calibrate(config, setup.directory / "here.toml", overwrite=True, quick=True)
    return dict(found.profile.calibration or {})


def kernel_tests(setup: Setup) -> Figures:
    """Whether the kernels give what they should, compiled and on this GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "tests/torch/kernels"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    told = done.stdout.splitlines()
    failed = [line for line in told if line.startswith(("FAILED", "ERROR"))]
    return {"outcome": told[-1] if told else done.stderr[-500:], "failed": failed}


PARTS: Mapping[str, Callable[[Setup], Figures]] = {
    "generation_attention": lambda setup: gpu_kernels.generation_figures(),
    "context_attention": lambda setup: gpu_kernels.context_figures(),
    "checkpoint": checkpoint,
    "engine": engine,
    "engine_profiled": lambda setup: engine(setup, profile=True),
    "engine_with_overlap": lambda setup: engine(setup, overlap="async"),
    "engine_without_graphs": engine_without_graphs,
    "engine_with_fp8_weights": lambda setup: engine(setup, dtype="fp8", kv_cache_dtype="bf16"),
    "engine_in_fp8": lambda setup: engine(setup, dtype="fp8", kv_cache_dtype="fp8"),
    "transformers": transformers,
    "calibration": calibration,
    "kernel_tests": kernel_tests,
}


def in_a_process(part: str, setup: Setup, time_limit_s: float) -> Figures:
    """A part's figures, or its error, and the last lines that it wrote to stderr."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", part, "--directory", str(setup.directory)]
    command += ["--quick"] if setup.quick else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {time_limit_s:g} s"}
    found = [line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if found:
        return dict(json.loads(found[-1]))
    told = [line for line in done.stderr.splitlines() if line.strip()]
    named = [line for line in told if EXCEPTION.match(line)] or told or [f"ended with status {done.returncode}"]
    return {"error": named[-1], "stderr": told[-LINES_OF_AN_ERROR:]}


def measured(
    parts: Iterable[str], run: Callable[[str], Figures], told: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The figures of each part, and what follows from two of them. told: hears what is known after each part."""
    found: dict[str, Any] = {}
    for part in parts:
        found[part] = run(part)
        found |= compared(found)
        told(found)
    return found


def compared(found: Mapping[str, Figures]) -> dict[str, Figures]:
    """What two parts say together, where both have figures."""
    results: dict[str, Figures] = {}

    def both(*names: str) -> bool:
        return all("error" not in found.get(name, {"error": "not run"}) for name in names)

    def times(name: str, other: str) -> float:
        return round(found[name]["output_tokens_per_s"] / found[other]["output_tokens_per_s"], 2)

    if both("engine", "engine_with_overlap"):
        results["host_time_hidden"] = hidden_host_time(found["engine"], found["engine_with_overlap"])
    speeds = {
        f"to_{other}": times("engine", other)
        for other in ("engine_without_graphs", "transformers")
        if both("engine", other)
    }
    speeds |= {
        f"of_{name}": times(name, "engine") for name in ("engine_with_overlap", "engine_in_fp8") if both("engine", name)
    }
    if speeds:
        results["speed_ratios"] = speeds
    return results


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small model and few requests")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--directory", type=Path, help="for the checkpoint; default: a temporary one")
    parser.add_argument("--output", type=Path, help="also write the result here, after each part")
    parser.add_argument("--time_limit", type=float, default=TIME_LIMIT_S, help="seconds of a part")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(NO_GPU)
    with tempfile.TemporaryDirectory() as temporary:
        setup = Setup(asked.directory or Path(temporary), asked.quick)
        setup.directory.mkdir(parents=True, exist_ok=True)
        if asked.only:
            print(RESULT + json.dumps(PARTS[asked.only](setup)), flush=True)
            return
        about = {
            "benchmark": "the engine on a GPU",
            "gpu": torch.cuda.get_device_name(),
            "hardware": hardware(),
            "versions": versions(),
            "git_revision": git_revision(),
            "quick": asked.quick,
        }

        def tell(found: dict[str, Any]) -> None:
            print(f"{len(found)} parts are done.", file=sys.stderr, flush=True)
            if asked.output:
                asked.output.write_text(json.dumps(about | found, indent=2) + "\n")

        found = measured(asked.parts, lambda part: in_a_process(part, setup, asked.time_limit), tell)
    print(json.dumps(about | found, indent=2))


if __name__ == "__main__":
    main()
