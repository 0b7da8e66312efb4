"""A server with several ranks: the tokens of one process, clients that go away, and ranks that die or hang."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ifbbench.build.engine import build_engine, generate
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from tests.processes import PATIENCE_S, check_ended
from tests.replay.test_ranks import check_readable
from tests.serving.clients import ROOT, ServerProcess, announced, server_process, stream_completion

SETTINGS: dict[str, Any] = {"device": "cpu", "model": "tiny", "max_seq_len": 512, "max_batch_size": 4}
SETTINGS["max_tokens_in_paged_kvcache"] = 8192  # ranks clear their pools; the default has 2 GiB
OUTPUT_LEN = 12
PROMPTS = [[(7 * number + index) % 4096 for index in range(3 + 5 * number)] for number in range(9)]
SPLITS = [{"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "pp_size": 2}]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    outputs = generate(build_engine(RunConfig(**SETTINGS)), PROMPTS, OUTPUT_LEN)
    return [tokens.tolist() for tokens in outputs]


@contextmanager
def serving(directory: Path, *options: str, **split: int) -> Iterator[ServerProcess]:
    sizes = [text for name, value in {**SETTINGS, **split}.items() for text in (f"--{name}", str(value))]
    with server_process(*sizes, "--record", str(directory), *options) as running:
        yield running


def pids_of(directory: Path) -> list[int]:
    return [row["pid"] for row in json.loads((directory / "run.json").read_text()).get("ranks", [])]


def complete(server: ServerProcess, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": OUTPUT_LEN, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=300) as response:
        return list(json.load(response)["choices"][0]["token_ids"])


def leave(server: ServerProcess, count: int) -> None:
    """Clients that go away in the middle of their streams."""

    async def main() -> None:
        body = {"prompt": [3, 1, 4], "max_tokens": 500, "temperature": 0, "ignore_eos": True}
        await asyncio.gather(*(stream_completion(server.port, body, leave_after=2 + one) for one in range(count)))

    asyncio.run(main())


def check_server(directory: Path, expected: list[list[int]], leaving: int, **split: int) -> None:
    """A server whose clients all come at once, some of which go away; its end, and the replay of its recording, in one
    process or, after many clients, in as many."""
    recorded = directory / "recorded"
    with serving(recorded, **split) as server, ThreadPoolExecutor(len(PROMPTS) + 1) as threads:
        gone = threads.submit(leave, server, leaving)
        found = list(threads.map(lambda prompt: complete(server, prompt), PROMPTS))
        gone.result()
        pids = pids_of(recorded)
        status, printed = server.end()
    assert found == expected
    assert status == 0, printed
    assert f"{len(PROMPTS)} of {len(PROMPTS) + leaving} requests completed, 0 failed" in printed
    assert "Traceback" not in printed
    assert len(set(pids)) == split.get("tp_size", 1) * split.get("pp_size", 1)
    check_ended(pids)
    rows = [json.loads(line) for line in (recorded / "requests.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in rows].count("stopped") == leaving
    responses = directory / "responses.json"
    run_trace(
        str(recorded),
        RunConfig(
            **SETTINGS
            | (split if leaving > 2 else {})
            | {
                "output": str(directory / "replayed"),
                "responses_json": str(responses),
                "time_scale": 0.0,
                "quiet": True,
            }
        ),
    )
    replayed = [row["response_tokens"] for row in json.loads(responses.read_text())]
    assert all(tokens in replayed for tokens in expected)


def test_two_ranks_serve_the_tokens_of_one(tmp_path: Path, expected: list[list[int]]) -> None:
    check_server(tmp_path, expected, leaving=2, tp_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_all_splits(tmp_path: Path, expected: list[list[int]], split: dict[str, int]) -> None:
    check_server(tmp_path, expected, leaving=12, **split)


@pytest.mark.slow
def test_ranks_of_a_launcher(expected: list[list[int]]) -> None:
    """Which sends the signal to all of them."""
    sizes = ["--device", "cpu", "--tp_size", "2", "--max_seq_len", "512", "--port", "0"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "ifbbench", "serve", *sizes],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ)
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            | {
                f"OMPI_COMM_WORLD_{name}": str(value)
                for name, value in (("RANK", rank), ("SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_SIZE", 2))
            },
        )
        for rank in range(2)
    ]
    with announced(processes[0], r" at (http://\S+);") as (found, text):
        server = ServerProcess(processes[0], found[1], text)
        assert complete(server, PROMPTS[2]) == expected[2]
        processes[1].send_signal(signal.SIGTERM)
        assert complete(server, PROMPTS[3]) == expected[3]
        assert server.end()[0] == 0
    printed, _ = processes[1].communicate(timeout=PATIENCE_S)
    assert processes[1].returncode == 0, printed


def test_a_server_ends_when_its_engine_fails(tmp_path: Path) -> None:
    """Also without other ranks."""
    policy = "tests.replay.odd_rank_policies:FailsInRank0"
    with busy(tmp_path / "run", "--policy", policy, tp_size=1) as (server, _):
        printed, _ = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 1, printed
    assert re.search("Error: the batch manager ended early: policy .* failed: .*no memory", printed)


@contextmanager
def busy(
    directory: Path, *options: str, is_partial: bool = True, tp_size: int = 2
) -> Iterator[tuple[ServerProcess, list[int]]]:
    """A server that has a long stream, and the process ids of its ranks; all must end with the block, and the recording
    must be readable."""
    with serving(directory, *options, tp_size=tp_size) as server, ThreadPoolExecutor(1) as threads:
        body = {"prompt": [3, 1, 4], "max_tokens": 500, "ignore_eos": True}
        complete(server, [1, 2, 3])
        begun = threading.Event()
        stream = partial(stream_completion, server.port, body, pause_s=0.05, begun=begun)
        streaming = threads.submit(lambda: asyncio.run(stream()))
        assert begun.wait(PATIENCE_S)
        pids = pids_of(directory)
        yield server, pids
        assert streaming.exception(PATIENCE_S) is not None or streaming.result().tokens < 500
    check_ended([*pids, server.process.pid])
    if is_partial:
        check_readable(directory)
    else:
        assert json.loads((directory / "summary.json").read_text())["partial"] is False


def check_message(server: ServerProcess, message: str) -> None:
    """The server ends by itself with this one error, and its streams with an error or a broken connection."""
    printed, _ = server.process.communicate(timeout=PATIENCE_S)
    assert server.process.returncode == 1, printed
    assert [line for line in printed.splitlines() if re.match(f"Error: the server ended early: {message}", line)]
    assert "Traceback" not in printed


def test_a_rank_that_is_killed_ends_the_server(tmp_path: Path) -> None:
    with busy(tmp_path / "run") as (server, pids):
        os.kill(pids[1], signal.SIGKILL)
        check_message(server, r"rank 1 was killed by SIGKILL.*recorded is kept in .*run\)$")


@pytest.mark.slow
def test_a_rank_that_is_killed_while_no_request_is_there(tmp_path: Path) -> None:
    with serving(tmp_path / "run", tp_size=2) as server:
        time.sleep(3)
        pids = pids_of(tmp_path / "run")
        os.kill(pids[1], signal.SIGKILL)
        check_message(server, "rank 1 was killed by SIGKILL")
    check_ended(pids)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["partial"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "sign", "message"),
    [
        (0, signal.SIGKILL, "rank 0 was killed by SIGKILL"),
        (0, signal.SIGSTOP, "rank 0 did not answer for 5 s"),
        (1, signal.SIGSTOP, "rank 1 did not answer for 5 s"),
    ],
)
def test_other_ranks_that_die_or_hang(tmp_path: Path, rank: int, sign: signal.Signals, message: str) -> None:
    with busy(tmp_path / "run", "--rank_timeout", "5") as (server, pids):
        os.kill(pids[rank], sign)
        check_message(server, message)


@pytest.mark.slow
def test_a_rank_that_fails(tmp_path: Path) -> None:
    with busy(tmp_path / "run", "--policy", "tests.replay.odd_rank_policies:OutOfMemory") as (server, _):
        check_message(server, "in rank 1, policy .* failed: .*no memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "status"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGINT, 0),
        (signal.SIGTERM, 0),
    ],
)
def test_the_end_of_the_command_ends_all_ranks(tmp_path: Path, sign: signal.Signals, status: int) -> None:
    with busy(tmp_path / "run", "--drain_timeout", "1", is_partial=status != 0) as (server, _):
        assert server.end(sign)[0] == status


def test_a_simulated_device_needs_one_process(tmp_path: Path) -> None:
    model = ("--model", "llama-3.1-8b", "--device", "sim:h100-sxm")
    with serving(tmp_path / "run", *model, tp_size=2) as server:
        assert bytes(complete(server, [1, 2, 3])) == b"This is synt"
        assert server.end()[0] == 0
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["config"]["tp_size"] == 2
    assert not described.get("ranks")


def test_wrong_splits_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="3 devices cannot share 8 attention heads"),
        serving(tmp_path / "run", tp_size=3),
    ):
        pass
    assert not (tmp_path / "run").exists()
