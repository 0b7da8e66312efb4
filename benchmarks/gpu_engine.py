"""What one run of the engine on a GPU did, from what it recorded: tokens a second, and its share of the bandwidth.

An iteration of generation tokens alone has to read every weight of the layers and of the output layer once, and the
keys and values of all its sequences. At the speed of a copy within the GPU's memory that would take so long; the share
is that time over what it took.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ifbbench.models.named_models import load_model_config
from ifbbench.replay.run import run_trace
from ifbbench.replay.single import RunResult
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.shard import Shard

DIGITS = 3


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all there at once. Lengths are in tokens."""

    requests: int
    prompt_len: int
    output_len: int

    def write(self, path: Path) -> Path:
        """It as a trace."""
        row = {"arrival_s": 0.0, "prompt_len": self.prompt_len, "output_len": self.output_len}
        path.write_text(f"{json.dumps(row)}\n" * self.requests)
        return path


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of generation tokens alone. Milliseconds.

    period_ms: from the end of the iteration before to the end of this one. host_ms, device_ms: as recorded, before and
    after it went to the executor. kv_tokens: that its sequences have in the cache. busy_ms: of a profiled run, how long
    the GPU itself worked.
    """

    period_ms: float
    host_ms: float
    device_ms: float
    kv_tokens: float
    busy_ms: float | None = None


def run_engine(
    checkpoint: str, workload: Workload, directory: Path, bandwidth: float, **settings: Any
) -> dict[str, Any]:
    """Run `workload` on `checkpoint` into `directory`, and return its figures.

    bandwidth: bytes a second of a copy. settings: of the run, beside those that the workload needs.
    """
    trace = workload.write(directory / "trace.jsonl")
    config = RunConfig(
        **{
            "model": checkpoint,
            "device": "cuda",
            "dtype": "bf16",
            "time_scale": 0.0,
            "quiet": True,
            "max_batch_size": workload.requests,
            "max_seq_len": workload.prompt_len + workload.output_len + 1,
            "output": str(directory / "run"),
            "overwrite": True,
            **settings,
        }
    )
    result = run_trace(str(trace), config)
    dtype = config.weight_dtype
    shard = Shard(load_model_config(checkpoint), dtype, config.kv_cache_dtype or dtype)
    return figures(result, list(steps(result.directory)), shard, bandwidth)


def steps(directory: Path) -> Iterator[Step]:
    """The iterations of generation tokens alone of a run, but for those right behind one with context."""
    with (directory / "iterations.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    for before, line in pairwise(lines):
        if before["Context Requests"] or line["Context Requests"]:
            continue
        own = line["ifbbench"]
        held = line["Used KV cache blocks"] * line["Tokens per KV cache block"]
        yield Step(
            _end_ms(line) - _end_ms(before),
            own["host_ms"],
            own["device_ms"],
            held * (1 - own["kv_fragmentation"]),
            own.get("device_busy_ms"),
        )


def _end_ms(line: dict[str, Any]) -> float:
    return float(line["ifbbench"]["start_s"] * 1000 + line["ifbbench"]["latency_ms"])


def bytes_read(shard: Shard, kv_tokens: float) -> float:
    """What an iteration of generation tokens has to read; `kv_tokens` in the cache."""
    output_layer = shard.model.vocab_size * shard.model.hidden_size * shard.compute_bytes
    return shard.layers * shard.layer_bytes + output_layer + kv_tokens * shard.kv_bytes_per_token


def figures(result: RunResult, generation: Sequence[Step], shard: Shard, bandwidth: float) -> dict[str, Any]:
    """What a run came to. ValueError if it has no two iterations of generation tokens in a row."""
    if not generation:
        raise ValueError("the run has no two iterations in a row without context; give it longer outputs")
    read = sum(bytes_read(shard, step.kv_tokens) for step in generation)
    busy = [step.busy_ms for step in generation if step.busy_ms is not None]
    whole_s, device_s = (
        sum(times) / 1000
        for times in ([step.period_ms for step in generation], [step.device_ms for step in generation])
    )
    return {
        "output_tokens_per_s": round(result.summary["output_throughput_tokens_per_s"], 1),
        "duration_s": round(result.summary["duration_s"], DIGITS),
        "iterations": result.summary["iterations"],
        "failed": result.failed,
        "generation": {
            "iterations": len(generation),
            "gigabytes_read_each": round(read / len(generation) / 1e9, DIGITS),
            "share_of_copy_bandwidth": round(read / whole_s / bandwidth, DIGITS),
            "share_of_copy_bandwidth_on_device": round(read / device_s / bandwidth, DIGITS),
            "period_ms": round(median(step.period_ms for step in generation), DIGITS),
            "host_ms": round(median(step.host_ms for step in generation), DIGITS),
            "device_ms": round(median(step.device_ms for step in generation), DIGITS),
            "device_busy_ms": round(median(busy), DIGITS) if busy else None,
        },
    }


def hidden_host_time(without_overlap: dict[str, Any], with_overlap: dict[str, Any]) -> dict[str, float]:
    """How much of the host's time overlap hides in generation, from the figures of a run without and one with it.

    host_ms: what an iteration takes without overlap beside its time in the executor. hidden_ms: by how much it is
    shorter with overlap. The share may exceed 1, for overlap hides the executor's own launches too.
    """
    alone, together = without_overlap["generation"], with_overlap["generation"]
    host_ms = alone["period_ms"] - alone["device_ms"]
    hidden_ms = alone["period_ms"] - together["period_ms"]
    return {
        "host_ms": round(host_ms, DIGITS),
        "hidden_ms": round(hidden_ms, DIGITS),
        "hidden_share": round(hidden_ms / host_ms, DIGITS) if host_ms > 0 else 0.0,
    }
