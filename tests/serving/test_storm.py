"""Many clients of which some go away, read slowly, or send what is no request: nothing leaks, all agree on what was."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ifbbench.progress import NO_PROGRESS
from ifbbench.serving.config import ServerConfig
from ifbbench.serving.server import serve
from ifbbench.settings.config import RunConfig
from tests.serving.clients import server_process, stream_completion
from tests.serving.test_simulated import MODEL, lines, scrape, wait_until_idle

STREAMS, SECONDS = 200, float(os.environ.get("IFBBENCH_STORM_SECONDS", "600"))
MAX_GROWTH_BYTES, MAX_FILES = 40_000_000, 40


async def client(port: int, draw: random.Random, seconds: float, seen: Counter[str]) -> None:
    """One client after another in the same place, until the time is over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        kind = draw.choices(["reads", "leaves", "slow", "malformed", "oversized"], [60, 20, 10, 5, 5])[0]
        body: dict[str, Any] = {
            "prompt": [draw.randrange(200) for _ in range(draw.randint(1, 800))],
            "max_tokens": draw.randint(1, 200),
            "stream_options": {"include_usage": True},
        }
        options: dict[str, Any] = {}
        if kind == "leaves":
            options["leave_after"] = draw.randint(0, 50)
        elif kind == "slow":
            options["pause_s"] = 0.02
        elif kind == "malformed":
            body = {"prompt": draw.choice([None, [[]], {"a": 1}]), "max_tokens": draw.choice([-1, "x", 2**40])}
        elif kind == "oversized":
            body["prompt"] = [1] * 140_000
        stream = await stream_completion(port, body, **options)
        if kind in ("reads", "slow"):
            assert (stream.status, stream.tokens, stream.error) == (200, body["max_tokens"], "")
            assert len(stream.text) == body["max_tokens"]
        elif kind != "leaves":
            assert stream.status == 400
        seen[kind] += 1


async def storm(port: int, streams: int, seconds: float, seen: Counter[str]) -> None:
    await asyncio.gather(*(client(port, random.Random(seed), seconds, seen) for seed in range(streams)))


def files_of(pid: int) -> int:
    """The open files of a process, once the connections that clients have closed are no longer among them."""
    for _ in range(6000):
        if (count := len(os.listdir(f"/proc/{pid}/fd"))) < MAX_FILES:
            break
        time.sleep(0.05)
    return count


def check(streams: int, seconds: float, recorded: Path) -> dict[str, Any]:
    """A storm of so many clients and seconds; returns figures of it."""
    seen: Counter[str] = Counter()
    with server_process(*MODEL, "--max_batch_size", "128", "--record", str(recorded)) as server:
        asyncio.run(storm(server.port, streams, min(seconds / 4, 10), seen))
        before = wait_until_idle(server)
        asyncio.run(storm(server.port, streams, seconds, seen))
        after = wait_until_idle(server)
        threads = len(os.listdir(f"/proc/{server.process.pid}/task"))
        files = files_of(server.process.pid)
        assert scrape(server)["nv_trt_llm_kv_cache_block_metrics used"] == 0
        status, printed = server.end()
    assert status == 0, printed
    assert "Traceback" not in printed
    assert "ERROR" not in printed

    memory = [found["nv_trt_llm_runtime_memory_metrics cpu"] for found in (before, after)]
    assert memory[1] - memory[0] < MAX_GROWTH_BYTES
    assert files < MAX_FILES
    requests = lines(recorded / "requests.jsonl")
    outcomes = Counter(row["outcome"] for row in requests)
    ids = sorted(row["request_id"] for row in requests)
    assert ids == list(range(len(requests))), "each request ends exactly once"
    assert len(lines(recorded / "trace.jsonl")) == len(requests)
    assert outcomes["failed"] == 0
    assert outcomes["completed"] == after["nv_inference_request_success_total"]
    assert outcomes["stopped"] == after["nv_inference_request_failure_total CANCELED"]
    # A client may leave when its answer is already complete.
    assert seen["reads"] + seen["slow"] <= outcomes["completed"] <= seen["reads"] + seen["slow"] + seen["leaves"]
    summary = json.loads((recorded / "summary.json").read_text())
    done = [row for row in requests if row["outcome"] == "completed"]
    assert after["nv_llm_output_token_len_sum"] == summary["output_tokens"] == sum(row["output_len"] for row in done)
    return {
        "requests": dict(seen),
        "outcomes": dict(outcomes),
        "memory": memory,
        "threads": threads,
        "files": files,
        "request_throughput_per_s": summary["request_throughput_per_s"],
    }


@pytest.mark.slow
def test_a_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    print(json.dumps(check(STREAMS, SECONDS, tmp_path / "recorded")))


def test_a_short_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    check(40, 1.0, tmp_path / "recorded")


def test_no_task_is_left_when_clients_have_gone() -> None:
    numbers: list[Future[tuple[int, int]]] = []

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    def clients(url: str, loop: asyncio.AbstractEventLoop) -> tuple[int, int]:
        """The number of the server's tasks before clients come, and when they have gone."""

        def count() -> int:
            return asyncio.run_coroutine_threadsafe(tasks(), loop).result(300)

        try:
            httpx.get(f"{url}/health", timeout=300)  # the server has begun to accept
            before = count()
            asyncio.run(storm(int(url.rpartition(":")[2]), 30, 0.5, Counter()))
            deadline = time.monotonic() + 300
            while (after := count()) > before and time.monotonic() < deadline:
                time.sleep(0.05)
            return before, after
        finally:
            loop.call_soon_threadsafe(signal.raise_signal, signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        serve(
            RunConfig(device="sim:h100-sxm", model="llama-3.1-8b"),
            ServerConfig(port=0),
            NO_PROGRESS,
            lambda url: numbers.append(pool.submit(clients, url, asyncio.get_running_loop())),
        )
    before, after = numbers[0].result()
    assert after == before
