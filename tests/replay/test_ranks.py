"""Runs in several processes: the tokens and the schedule of one process, one message when a rank fails, no orphans."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import IfbbenchError, InputError, RunFailed
from ifbbench.replay import rank_processes
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.settings.config import RunConfig
from ifbbench.torch.ranks import launched_place, place_in_environment
from tests.processes import PATIENCE_S, check_ended, children_of
from tests.replay.ranked_runs import ROOT, SIZES, run, simulated_digest, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "trace.jsonl")


class Notes:
    """A progress, and the directory that a run reports."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.recorded: list[Path] = []

    def stage(self, label: str) -> None:
        self.stages.append(label)

    def update(self, completed: int, total: int | None, text: str) -> None:
        pass


def test_tensor_parallelism(trace: Path, tmp_path: Path) -> None:
    """Also what the process that starts the ranks takes part in."""
    one, expected = run(trace, tmp_path / "one")
    notes, tokens = Notes(), tmp_path / "tokens.json"
    config = RunConfig(**SIZES, tp_size=2, output=str(tmp_path / "tp2"), responses_json=str(tokens))
    two = run_trace(str(trace), config, notes, on_recording=notes.recorded.append, on_recorded=notes.recorded.append)
    assert json.loads(tokens.read_text()) == expected
    assert two.summary["schedule_digest"] == one.summary["schedule_digest"]
    assert notes.stages == ["reading trace", "loading model", "writing trace", "replaying", "writing results"]
    assert notes.recorded == [tmp_path / "tp2"] * 2
    ranks = json.loads((tmp_path / "tp2" / "run.json").read_text())["ranks"]
    assert [(row["rank"], row["tp_rank"], row["stage"], row["device"]) for row in ranks] == [
        (0, 0, 0, "cpu"),
        (1, 1, 0, "cpu"),
    ]
    assert len({row["pid"] for row in ranks} | {os.getpid()}) == 3
    assert simulated_digest(trace, tmp_path, tp_size=2) == two.summary["schedule_digest"]


@pytest.mark.slow
def test_no_rank_times_out_while_no_request_is_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "request_id": number,
                    "arrival_s": 5.0 * number,
                    "prompt_len": 20,
                    "max_new_tokens": 5,
                    "output_len": 5,
                }
            )
            + "\n"
            for number in range(2)
        )
    )
    settings = {"time_scale": 1.0, "tp_size": 2, "rank_timeout": 2.0}
    assert summarise_run(str(path), RunConfig(**SIZES | settings))["requests"]["completed"] == 2


# Ranks that fail.


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 requests with long outputs, so that a run of them does not end before a test ends it."""
    row = {"arrival_s": 0.0, "prompt_len": 20, "output_len": 100, "max_new_tokens": 100}
    path = tmp_path_factory.mktemp("trace") / "long.jsonl"
    path.write_text("".join(json.dumps({"request_id": number, **row}) + "\n" for number in range(64)))
    return path


@contextmanager
def started(trace: Path, directory: Path, *options: str, status: int) -> Iterator[list[int]]:
    """The command, and the process ids of its ranks followed by its own, once it has run iterations. It must end with
    `status` after the block, and no process may be left."""
    settings = SIZES | {"max_batch_size": 2}
    sizes = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    sizes = [text for text in sizes if text != "True"]
    command = [sys.executable, "-m", "ifbbench", "run", str(trace), "--output", str(directory), "--quiet"]
    process = subprocess.Popen(
        [*command, *sizes, "--tp_size", "2", *options],
        text=True,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    pids: list[int] = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not pids and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
            iterations = directory / "iterations.jsonl"
            if iterations.exists() and iterations.stat().st_size:
                pids = [row["pid"] for row in json.loads((directory / "run.json").read_text())["ranks"]]
        yield [*pids, process.pid]
        errors = process.communicate(timeout=PATIENCE_S)[1]
        (directory / "errors.txt").write_text(errors)
        assert process.returncode == status, errors
    finally:
        process.kill()
        process.wait()
    check_ended(pids)


def message_of(directory: Path) -> str:
    """The one line that the command printed."""
    (line,) = (directory / "errors.txt").read_text().splitlines()
    return line


def check_readable(directory: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(directory)])
    assert result.exit_code == 0
    assert "Partial" in result.output


def test_a_rank_that_is_killed(long_trace: Path, tmp_path: Path) -> None:
    with started(long_trace, tmp_path / "run", status=1) as pids:
        os.kill(pids[1], signal.SIGKILL)
    message = message_of(tmp_path / "run")
    assert message.startswith("Error: the run ended early: rank 1 was killed by SIGKILL, perhaps for lack of memory (")
    assert re.search(r"\(\d+ of 64 requests were done; results are kept in .*run\)$", message)
    check_readable(tmp_path / "run")


@pytest.mark.slow
def test_a_rank_that_hangs(long_trace: Path, tmp_path: Path) -> None:
    with started(long_trace, tmp_path / "run", "--rank_timeout", "5", status=1) as pids:
        os.kill(pids[1], signal.SIGSTOP)
    assert "rank 1 did not answer for 5 s, the limit of --rank_timeout" in message_of(tmp_path / "run")
    check_readable(tmp_path / "run")


@pytest.mark.parametrize(("message", "waited_s"), [(rank_processes.TIMED_OUT, 0.5), (rank_processes.LOST, 15.0)])
def test_how_long_other_ranks_are_waited_for(monkeypatch: pytest.MonkeyPatch, message: str, waited_s: float) -> None:
    """A rank that does not answer has had --rank_timeout already."""

    class Clock:
        """A tenth of a second passes with each look at it."""

        now_s = 0.0

        def restart(self) -> None:
            Clock.now_s = 0.0

        def now(self) -> float:
            Clock.now_s += 0.1
            return Clock.now_s

    monkeypatch.setattr(rank_processes, "WallClock", Clock)
    monkeypatch.setattr(rank_processes, "POLL_S", 0.0)
    ranks = rank_processes.Ranks(RunConfig(device="cpu", tp_size=2), Path("store"), "the run", {})
    pipes = [Pipe(), Pipe()]
    ranks._ranks = [rank_processes._Rank(number, connection=ours) for number, (ours, _) in enumerate(pipes)]
    pipes[1][1].send((message, IfbbenchError("rank 1 waits for rank 0")))
    with pytest.raises(RunFailed, match="rank 0 did not answer"):
        ranks.result()
    assert Clock.now_s == pytest.approx(waited_s, abs=0.11)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_interrupt_while_ranks_start(trace: Path, tmp_path: Path) -> None:
    """A rank that imports its modules ends without a word."""
    command = [
        sys.executable,
        "-m",
        "ifbbench",
        "run",
        str(trace),
        "--device",
        "cpu",
        "--model",
        "tiny",
        "--pp_size",
        "2",
        "--quiet",
        "--output",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + PATIENCE_S
    while len(children_of(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, printed.strip()) == (130, "Interrupted.")


@pytest.mark.slow
def test_an_interrupt(long_trace: Path, tmp_path: Path) -> None:
    with started(long_trace, tmp_path / "run", status=130) as pids:
        os.kill(pids[-1], signal.SIGINT)
    assert re.match(r"Interrupted. \d+ of 64 requests were done; results are kept in", message_of(tmp_path / "run"))
    check_readable(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "sign"), [(0, signal.SIGKILL), (0, signal.SIGSTOP), (-1, signal.SIGKILL), (-1, signal.SIGTERM)]
)
def test_other_processes_that_die_or_hang(long_trace: Path, tmp_path: Path, rank: int, sign: signal.Signals) -> None:
    status = 1 if rank == 0 else {signal.SIGKILL: -sign, signal.SIGTERM: 130}[sign]
    with started(long_trace, tmp_path / "run", "--rank_timeout", "2", status=status) as pids:
        os.kill(pids[rank], sign)
    if rank == 0:
        expected = "was killed by SIGKILL" if sign == signal.SIGKILL else "did not answer for 2 s"
        assert f"the run ended early: rank 0 {expected}" in message_of(tmp_path / "run")
    check_readable(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("OutOfMemory", r"in rank 1, policy .* failed: .*no memory for a list of requests"),
        ("Hangs", r"rank 0 did not answer for 2 s"),
        ("Differs", r"rank 1 decided otherwise than rank 0 in iteration \d+\."),
    ],
)
def test_a_rank_that_fails_or_hangs_in_a_policy(long_trace: Path, tmp_path: Path, policy: str, message: str) -> None:
    options = ["--policy", f"tests.replay.odd_rank_policies:{policy}", "--rank_timeout", "2"]
    with started(long_trace, tmp_path / "run", *options, status=1):
        pass
    assert re.search(message, message_of(tmp_path / "run"))
    check_readable(tmp_path / "run")


# Places of ranks.


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 8, 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, (0, 2, 0, 1)),
    ],
)
def test_the_place_in_the_environment(environment: dict[str, str], expected: tuple[int, ...] | None) -> None:
    place = place_in_environment(environment)
    assert (place and (place.rank, place.world_size, place.local_rank, place.local_size)) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE: expected the numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: 2 is not a rank of 2"),
    ],
)
def test_places_that_are_wrong(environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        place_in_environment(environment)


def test_another_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--tp_size 2 --pp_size 2: need 4 processes, and 2 were launched"):
        run_trace(None, RunConfig(device="cpu", tp_size=2, pp_size=2))
    with pytest.raises(InputError, match="need 1 processes, and 2 were launched"):
        run_trace(None, RunConfig(device="cpu"))
    assert launched_place(RunConfig(device="sim:h100-sxm")) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    place = launched_place(RunConfig(device="cpu", tp_size=2))
    assert place is not None
    with pytest.raises(InputError, match="MASTER_ADDR and MASTER_PORT are not set"):
        place.address()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_size": 3}, "--tp_size: 3 devices cannot share 8 attention heads"),
        ({"pp_size": 5}, "--pp_size: 5 stages are more than the model's 4 layers"),
    ],
)
def test_splits_are_refused_before_processes_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        summarise_run(None, RunConfig(device="cpu", **settings))
