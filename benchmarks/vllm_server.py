"""A vLLM server whose scheduler is recorded, under two clients: does everybody who counts count the same?

Runs where vLLM is installed, beside this project's dependencies; docs/live.md has the commands. `python -m
benchmarks.vllm_server [--requests 2000]` starts vLLM's API server with a small random model, few KV blocks and
`--scheduler-cls`, and sends it requests with shared prefixes: one half by `ifbbench run --endpoint`, the other at the
same time by the package `openai`. Then it compares the recording with what a wrapper around `schedule` saw, with both
clients, with the server's /metrics, and with a replay. It does so for a server with synchronous scheduling, and for one
with asynchronous scheduling, which vLLM turns off on a CPU (`benchmarks.vllm_async_cpu` turns it on). Prints one JSON
object; exit status 1 for a difference.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from benchmarks import vllm_async_cpu
from benchmarks.vllm_end_to_end import MODEL
from benchmarks.vllm_recording import difference_of_recording
from ifbbench.live.notes import RECORD
from ifbbench.live.vllm import RecordingAsyncScheduler, RecordingScheduler
from tests.live.recordings import decisions, difference_of_replay, holders_of, lines

WITNESS = "IFBBENCH_WITNESS"
WAIT_S = 600.0
SAMPLED = 100  # iterations in which `why` is asked who holds a request
VOCABULARY = range(10, 900)
MODES = ("sync", "async")
BLOCKS = "num-gpu-blocks-override"
SETTINGS = {
    "max-model-len": 1024,
    "block-size": 32,
    BLOCKS: 60,
    "max-num-seqs": 16,
    "max-num-batched-tokens": 256,
}
# Sums over the life of the server, by what the recording has of them.
METRICS = {
    "requests": "vllm:request_success_total",
    "prompt tokens": "vllm:prompt_tokens_total",
    "output tokens": "vllm:generation_tokens_total",
    "prefix hits": "vllm:prefix_cache_hits_total",
    "pre-emptions": "vllm:num_preemptions_total",
}


class _Witnessed:
    """A recorded scheduler around whose `schedule` somebody else looks, too. waiting: without the requests that vLLM
    passes over, because outputs from before their pre-emption are in flight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._witness = open(os.environ[WITNESS], "w", buffering=1)  # noqa: SIM115 - as long as the server runs

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        scheduler: Any = self
        if output.num_scheduled_tokens or output.preempted_req_ids:
            seen = {
                "scheduled": [[name, count, 0] for name, count in output.num_scheduled_tokens.items()],
                "preempted": sorted(output.preempted_req_ids or ()),
                "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                "running": len(scheduler.running),
                "cut": [one.request_id for one in scheduler.running if one.num_computed_tokens < one.num_tokens],
                "waiting": [one.request_id for one in scheduler.waiting if one not in scheduler.deferred_waiting],
            }
            self._witness.write(json.dumps(seen) + "\n")
        return output


class WitnessedScheduler(_Witnessed, RecordingScheduler):
    """The synchronous one."""


class WitnessedAsyncScheduler(_Witnessed, RecordingAsyncScheduler):
    """The asynchronous one."""


SCHEDULERS = dict(zip(MODES, (WitnessedScheduler, WitnessedAsyncScheduler), strict=True))


def draw_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Lines of a trace. Of five prompts, three begin with one of four prefixes; some go on for several blocks."""
    rng = random.Random(seed)
    prefixes = [rng.choices(VOCABULARY, k=length) for length in (32, 64, 96, 160)]
    rows = list[dict[str, Any]]()
    for number in range(count):
        prompt = rng.choice(prefixes) if number % 5 < 3 else []
        prompt = prompt + rng.choices(VOCABULARY, k=rng.choice([3, 10, 20, 40, 90, 150]))
        length = rng.randint(2, 60)
        row = {"request_id": number, "arrival_s": number * 0.01, "prompt_tokens": prompt}
        rows.append({**row, "output_len": length, "max_new_tokens": length})
    return rows


@contextmanager
def server(folder: Path, port: int, blocks: int, mode: str) -> Iterator[str]:
    """The address of a server, which is recorded in folder/recording and logs to folder/server.log. mode: of its
    scheduling, in MODES."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 2048}))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "model", "--port", str(port)]
    command += ["--skip-tokenizer-init", "--load-format", "dummy", "--dtype", "float32", "--enforce-eager"]
    command += ["--scheduler-cls", f"benchmarks.vllm_server.{SCHEDULERS[mode].__name__}"]
    command += ["--enable-logging-iteration-details"]
    paths = [str(Path(__file__).parents[1])]
    if mode == "async":
        vllm_async_cpu.describe(folder / "plugins")
        paths.append(str(folder / "plugins"))
        command += ["--async-scheduling"]
    command += [part for name, value in {**SETTINGS, BLOCKS: blocks}.items() for part in (f"--{name}", str(value))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "IFBBENCH_PURE_PYTHON": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",
        "OMP_NUM_THREADS": "1",
        RECORD: str(folder / "recording"),
        WITNESS: str(folder / "witness.jsonl"),
    }
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            address = f"http://localhost:{port}"
            _wait(lambda: process.poll() is None and _is_healthy(address), process, folder, "did not start")
            yield address
        finally:
            process.terminate()
            process.wait(WAIT_S)
    _wait((folder / "recording" / "summary.json").exists, process, folder, "left no complete recording")


def _is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _wait(is_done: Any, process: "subprocess.Popen[bytes]", folder: Path, problem: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_done():
        if time.monotonic() > end_s or (problem == "did not start" and process.poll() is not None):
            raise SystemExit(f"the server {problem}: {(folder / 'server.log').read_text()[-3000:]}")
        time.sleep(0.3)


def metrics_of(address: str) -> dict[str, int]:
    """The sums in /metrics, over all labels."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        name: round(sum(float(value) for value in re.findall(rf"^{re.escape(metric)}{{.*}} (\S+)$", text, re.M)))
        for name, metric in METRICS.items()
    }


async def _ask(address: str, rows: list[dict[str, Any]], concurrency: int) -> dict[str, int]:
    """Send requests with the package `openai`, so many at a time; what their usage adds up to."""
    found, at_once = {"requests": 0, "prompt tokens": 0, "output tokens": 0}, asyncio.Semaphore(concurrency)
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as client:

        async def ask(row: dict[str, Any]) -> None:
            async with at_once:
                answer = await client.completions.create(
                    model="model",
                    prompt=row["prompt_tokens"],
                    max_tokens=row["output_len"],
                    temperature=0.0,
                    extra_body={"ignore_eos": True},
                )
            assert answer.usage is not None
            found["requests"] += 1
            found["prompt tokens"] += answer.usage.prompt_tokens
            found["output tokens"] += answer.usage.completion_tokens

        await asyncio.gather(*map(ask, rows))
    return found


def drive(folder: Path, address: str, rows: list[dict[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """Send the requests, in halves by two clients at the same time; what each counted."""
    half = len(rows) // 2
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:half]))
    command = [sys.executable, "-m", "ifbbench", "run", "trace.jsonl", "--endpoint", address, "--output", "client"]
    command += ["--concurrency", "12", "--warm_up", "0", "--endpoint_vocab_size", "900", "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "IFBBENCH_PURE_PYTHON": "1"}
    with (folder / "client.log").open("w") as log:
        client = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        foreign = asyncio.run(_ask(address, rows[half:], 12))
        if client.wait(WAIT_S):
            raise SystemExit(f"the client failed: {(folder / 'client.log').read_text()[-3000:]}")
    summary = json.loads((folder / "client" / "summary.json").read_text())
    own = {"requests": summary["requests"]["completed"]}
    return own | {f"{name} tokens": summary[f"{name}_tokens"] for name in ("prompt", "output")}, foreign


def recorded_figures(directory: Path) -> dict[str, int]:
    """What a recording says of each of METRICS."""
    rows = lines(directory, "requests")
    completed = [row for row in rows if row["outcome"] == "completed"]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["requests"]["completed"] == len(completed)
    return {
        "requests": len(completed),
        "prompt tokens": sum(row["prompt_len"] for row in completed),
        "output tokens": sum(row["output_len"] for row in completed),
        "prefix hits": sum(row["reused_tokens"] for row in completed),
        "pre-emptions": summary["pauses"],
    }


def check(folder: Path, count: int, seed: int, port: int, blocks: int, mode: str) -> dict[str, Any]:
    """Serve `count` requests; what was counted, and under `differences` where it is not the same."""
    rows, differences = draw_requests(count, seed), dict[str, Any]()
    with server(folder, port, blocks, mode) as address:
        begun_s = time.monotonic()
        own, foreign = drive(folder, address, rows)
        took_s = time.monotonic() - begun_s
        metrics = metrics_of(address)
    recording, seen = folder / "recording", lines(folder, "witness")
    recorded = recorded_figures(recording)
    clients = {name: own[name] + foreign[name] for name in own}
    for who, counted in (("clients", clients), ("/metrics", metrics)):
        if wrong := {name: (value, recorded[name]) for name, value in counted.items() if value != recorded[name]}:
            differences[f"{who}, recording"] = wrong
    run = json.loads((recording / "run.json").read_text())
    if run["config"]["async_scheduling"] != (mode == "async"):
        differences["server"] = f"its scheduling is not {mode}"
    if found := difference_of_recording(recording, seen, mode):
        differences["wrapper, recording"] = found
    holders = holders_of(recording, seen, SETTINGS["max-num-seqs"], SETTINGS["max-num-batched-tokens"], SAMPLED, seed)
    if wrong_holders := [one for one in holders if one.expected != one.found]:
        differences["wrapper, why"] = str(wrong_holders[:3])
    if found := difference_of_replay(recording, folder / "replayed", "vllm"):
        differences["recording, replay"] = found
    return {
        "server_s": round(took_s, 1),
        "iterations": len(decisions(recording)),
        "recording": recorded,
        "ifbbench run --endpoint": own,
        "openai": foreign,
        "/metrics": metrics,
        "holders that why names": len(holders),
        "differences": differences,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of both clients together (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default 0)")
    parser.add_argument("--port", type=int, default=8123, help="of the server (default 8123)")
    parser.add_argument("--blocks", type=int, default=SETTINGS[BLOCKS], help="KV blocks of 32 tokens (default 60)")
    parser.add_argument("--mode", choices=MODES, help="only this scheduling (default: one after the other)")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep all files in this new directory")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.keep is not None:
            folder = options.keep.absolute()
            folder.mkdir(parents=True)
        modes = MODES if options.mode is None else (options.mode,)
        reports = {
            mode: check(folder / mode, options.requests, options.seed, options.port, options.blocks, mode)
            for mode in modes
        }
    print(json.dumps(reports, indent=1))
    return 1 if any(report["differences"] for report in reports.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
