"""vLLM's scheduler, recorded while it runs: each recorded iteration beside vLLM's own, and the replay beside both.

Runs where vLLM is installed, beside this project's dependencies; docs/live.md has the commands. `python -m
benchmarks.vllm_recording random [--count 100] [--seed 0]` records random workloads of vLLM's `Scheduler` and
`AsyncScheduler` (those of `benchmarks.vllm_oracle`: shared prefixes, prompts that go on with other outputs, short
caches, aborts, priorities) and replays each recording. `python -m benchmarks.vllm_recording cost [--running 256]`
measures what the recorder adds to an iteration in the engine's process. Each prints one JSON object; exit status 1 for
a difference. `keep FILE` writes the events of some of these workloads, with vLLM's own decisions, for tests that need
no vLLM.
"""

import argparse
import gzip
import json
import os
import random
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm.config import SchedulerConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from benchmarks.vllm_oracle import KINDS, Original, draw_case, known_to
from ifbbench.live import notes
from ifbbench.live import vllm as recording
from ifbbench.live.channel import Channel
from ifbbench.live.notes import RECORD
from tests.live.recordings import Kept, batches, decisions, difference_of_replay, first_difference, lines

RECORDING_CLASS = "ifbbench.live.vllm.RecordingScheduler"
# What versions before some setting do.
WITHOUT = {
    "max_num_active_seqs": None,
    "max_num_scheduled_tokens": None,
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.0,
}
KEPT_SEEDS = (2, 10, 15, 19, 27)  # a few hundred iterations of each kind, with pre-emptions and aborts
SECONDS_PER_STEP = 1e-5  # of arrival times, which decide the order of equal priorities


def draw_recorded(seed: int) -> dict[str, Any]:
    """A workload without windows, which a replay would need a model for, and with the blocks that vLLM asks for at its
    start."""
    case = draw_case(seed)
    settings = case["settings"]
    longest = -(-settings["max_model_len"] // settings["block_size"])
    num_blocks = max(settings["num_gpu_blocks"], 1 + longest)
    case["settings"] |= {"windows": [None], "prefix_cache_retention_interval": 0, "num_gpu_blocks": num_blocks}
    unknown = WITHOUT.keys() - known_to(SchedulerConfig, WITHOUT)
    case["settings"] |= {name: WITHOUT[name] for name in unknown}
    return case


def record(case: dict[str, Any], seed: int, directory: Path) -> list[dict[str, Any]]:
    """Run a workload through vLLM's scheduler, recorded in `directory`; returns the turns of vLLM's loop that scheduled
    or pre-empted something."""
    os.environ[RECORD] = str(directory)
    original, begun_s = Original(case, random.Random(seed), RECORDING_CLASS), time.time()
    for request in case["requests"]:
        request["arrival_time"] = begun_s + request["arrival_time"] * SECONDS_PER_STEP
    time.sleep(SECONDS_PER_STEP * case["requests"][-1]["step"] + SECONDS_PER_STEP)  # until all have arrived
    steps = list(original.steps())
    original.scheduler.shutdown()
    return [step for step in steps if step.get("scheduled") or step.get("preempted")]


def difference_of_recording(directory: Path, steps: list[dict[str, Any]], kind: str) -> str | None:
    """The first iteration in which a recording differs from vLLM's own, or None. kind: of the workload, in KINDS."""
    names = {row["request_id"]: row["name"] for row in lines(directory, "requests")}
    recorded, expected = decisions(directory), list[tuple[int, int, int, int]]()
    for step in steps:
        tokens = [count for _, count, _ in step["scheduled"]]
        expected.append((len(tokens), sum(tokens), len(step["preempted"]), step["free_blocks"]))
    found = [line[:4] for line in recorded]
    if found != expected:
        return first_difference(expected, found)
    if kind != "sync":  # spans have no step too many of a request that has ended, and no drafts that were rejected
        return None
    named = [{names[number]: count for number, count in batch.items()} for batch in batches(directory)]
    return first_difference([{name: count for name, count, _ in step["scheduled"]} for step in steps], named)


def check_random(count: int, first_seed: int) -> int:
    """Record and replay random workloads."""
    init_none_hash(sha256)
    totals: dict[str, Any] = {"vllm": vllm.__version__}
    totals, differences = totals | {"workloads": 0, "iterations": 0, "pre-emptions": 0, "replayed": 0}, dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first_seed, first_seed + count):
            case, directory = draw_recorded(seed), Path(folder) / str(seed)
            steps = record(case, seed, directory)
            kind = KINDS[seed % len(KINDS)]
            found = difference_of_recording(directory, steps, kind)
            if kind != "drafts" and steps:  # which drafts were accepted is not in a trace
                found = found or difference_of_replay(directory, Path(folder) / f"{seed}-replayed", "vllm")
                totals["replayed"] += 1
            if found:
                differences[case["name"]] = found
            totals["workloads"] += 1
            totals["iterations"] += len(steps)
            totals["pre-emptions"] += sum(len(step["preempted"]) for step in steps)
    print(json.dumps(totals | {"differences": differences}, indent=1))
    return 1 if differences else 0


def keep(target: Path, seeds: Sequence[int]) -> int:
    """Write events and decisions of random workloads as JSON: [{kind, events (base64), steps}]. Arrivals are stamped
    with the time, so that each writing differs."""
    init_none_hash(sha256)
    setattr(notes, Channel.__name__, Kept)
    kept = list[dict[str, Any]]()
    for seed in seeds:
        steps = [
            {name: step[name] for name in ("scheduled", "preempted", "free_blocks")}
            for step in record(draw_recorded(seed), seed, target)
        ]
        events = b64encode(Kept.latest.frames.getvalue()).decode()
        kept.append({"kind": KINDS[seed % len(KINDS)], "events": events, "steps": steps})
    with gzip.open(target, "wt", encoding="utf-8") as file:
        json.dump(kept, file)
    return 0


def cost_case(running: int, iterations: int) -> dict[str, Any]:
    """`running` requests that generate for so many iterations."""
    case = draw_case(0)
    settings = case["settings"] | {
        "windows": [None],
        "block_size": 16,
        "num_gpu_blocks": 1 + running * (iterations // 16 + 4),
        "max_model_len": 4096,
        "max_num_seqs": running,
        "max_num_active_seqs": None,
        "max_num_batched_tokens": 8192,
        "max_num_scheduled_tokens": None,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "scheduling_policy": "fcfs",
        "watermark": 0.0,
        "async_scheduling": False,
    }
    requests = [
        {
            "id": f"cmpl-{number:032x}",
            "step": 1,
            "arrival_time": time.time(),
            "prompt": [number % 900 + 5] * 16,
            "max_tokens": iterations,
            "outputs": [7] * iterations,
            "priority": 0,
        }
        for number in range(running)
    ]
    return {"name": "cost", "settings": settings, "requests": requests, "aborts": []}


def measure_cost(running: int, iterations: int, rounds: int) -> int:
    """Processor time that the engine's thread spends in notes, an iteration."""
    init_none_hash(sha256)
    note, spent_s, found = recording._Recorded._note, [0.0], list[float]()

    def timed(self: Any, *arguments: Any) -> None:
        begun_s = time.thread_time()
        note(self, *arguments)
        spent_s[0] += time.thread_time() - begun_s

    setattr(recording._Recorded, note.__name__, timed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            os.environ[RECORD] = str(Path(folder) / str(number))
            original = Original(cost_case(running, iterations), random.Random(0), RECORDING_CLASS)
            spent_s[0] = 0.0
            count = sum(1 for _ in original.steps())
            found.append(spent_s[0] / count * 1e6)
            original.scheduler.shutdown()
    print(json.dumps({"running": running, "us_per_iteration": [round(value, 1) for value in sorted(found)]}, indent=1))
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("random", "cost", "keep"))
    parser.add_argument("file", type=Path, nargs="?", help="keep: the file to write")
    parser.add_argument("--count", type=int, default=100, help="random: workloads (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="random: seed of the first one (default 0)")
    parser.add_argument("--seeds", type=int, nargs="+", default=KEPT_SEEDS, help="keep: those of the workloads")
    parser.add_argument("--running", type=int, default=256, help="cost: running requests (default 256)")
    parser.add_argument("--iterations", type=int, default=400, help="cost: iterations of a round (default 400)")
    parser.add_argument("--rounds", type=int, default=5, help="cost: rounds of each (default 5)")
    options = parser.parse_args(arguments)
    if options.what == "cost":
        return measure_cost(options.running, options.iterations, options.rounds)
    if options.what == "keep":
        return keep(options.file, options.seeds)
    return check_random(options.count, options.seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
