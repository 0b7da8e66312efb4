"""Traces and config files on standard input and in pipes, which commands read as often as files."""

import csv
import gzip
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ifbbench.cli.main import main
from ifbbench.settings.config import RunConfig
from ifbbench.workload.load import for_other_process, load_trace

pytestmark = pytest.mark.usefixtures("undrawn_sweeps", "one_process")

ROWS = "".join(f'{{"request_id":{row},"prompt_len":{20 + row},"output_len":3}}\n' for row in range(8))
SIMULATED = ("--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--request_rate", "30", "--enable_exp_delays")
COMMANDS = {
    "run": ("run", "TRACE", "--repeat", "3", "--device", "null", "--time_scale", "0", "--output", "r"),
    "sweep": ("sweep", "TRACE", "--over", "max_num_samples=4,8", "--repeat", "2", *SIMULATED, "--output", "r"),
    "compare": ("compare", "TRACE", "--over", "max_batch_size=1,8", "--repeat", "2", *SIMULATED, "--output", "r"),
    "tune": ("tune", "TRACE", *SIMULATED, "--slo", "ttft=1s", "--output", "r"),
    "bench": ("bench", "throughput", "TRACE", *SIMULATED, "--output", "r"),
}


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pipes() -> Iterator[list[int]]:
    """Open files of pipes, closed at the end of the test."""
    handles: list[int] = []
    yield handles
    for handle in handles:
        os.close(handle)


def pipe_of(content: bytes, pipes: list[int]) -> str:
    """The path of a pipe, as a shell makes it for `<(command)`."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    pipes.append(reading)
    return f"/dev/fd/{reading}"


def invoke(*words: str, given: str | None = None) -> Result:
    done = CliRunner().invoke(main, words, input=given)
    assert done.exit_code == 0, done.output
    return done


def of(command: str, trace: str) -> list[str]:
    return [trace if word == "TRACE" else word for word in COMMANDS[command]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_runs_a_trace_several_times_takes_standard_input_and_a_pipe(
    command: str, pipes: list[int]
) -> None:
    invoke(*of(command, "-"), given=ROWS)
    Path("r").rename("other")
    invoke(*of(command, pipe_of(gzip.compress(ROWS.encode()), pipes)))


def test_every_repeat_has_all_requests_of_standard_input() -> None:
    invoke(*of("run", "-"), given=ROWS)
    with Path("r/repeats.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["requests.completed"], row["error"]) for row in rows] == [("8", "")] * 3


def test_every_point_has_the_requests_that_it_asks_for_of_a_pipe(pipes: list[int]) -> None:
    invoke(*of("sweep", pipe_of(ROWS.encode(), pipes)))
    points = json.loads(Path("r/sweep.json").read_text())
    assert [point["requests.completed"] for point in points] == [4, 8]


def test_a_named_pipe_is_read_once() -> None:
    os.mkfifo("trace.fifo")
    writer = threading.Thread(target=Path("trace.fifo").write_text, args=(ROWS,))
    writer.start()
    invoke(*of("run", "trace.fifo"))
    writer.join()
    assert json.loads(Path("r/summary.json").read_text())["requests"]["completed"] == 8


def test_a_new_named_pipe_has_its_own_content() -> None:
    found = []
    for rows in (ROWS, ROWS[: ROWS.index("\n") + 1]):  # the file system may give both the same inode
        os.mkfifo("trace.fifo")
        writer = threading.Thread(target=Path("trace.fifo").write_text, args=(rows,))
        writer.start()
        found.append(len(load_trace("trace.fifo", RunConfig())))
        writer.join()
        Path("trace.fifo").unlink()
    assert found == [8, 1]


def test_a_config_file_and_rates_in_pipes(pipes: list[int]) -> None:
    Path("t.jsonl").write_text(ROWS)
    config = pipe_of(b"max_batch_size: 3\ndevice: h100-sxm\nmodel: llama-3.1-8b\nrepeat: 2", pipes)
    rates = pipe_of(b"start_s,rate\n0,50\n", pipes)
    invoke("run", "t.jsonl", "--config", config, "--rate_schedule", rates, "--output", "r")
    assert json.loads(Path("r/repeat-2/run.json").read_text())["config"]["max_batch_size"] == 3


def test_another_process_gets_the_requests_and_not_the_pipe(pipes: list[int]) -> None:
    config, path = RunConfig(), pipe_of(ROWS.encode(), pipes)
    sent = pickle.loads(pickle.dumps(for_other_process(path, config)))
    assert [request.prompt_len for request in load_trace(sent, config)] == list(range(20, 28))
    assert for_other_process("default", config) == "default"


def test_a_note_on_a_trace_is_printed_once() -> None:
    Path("chats.jsonl").write_text('{"prompt": "How far is it?", "output_tokens": 3}\n')
    command = [sys.executable, "-m", "ifbbench", "run", "chats.jsonl", "--repeat", "3", "--device", "null", "--quiet"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert printed.count("texts are counted as one token for each 4 characters") == 1
