"""Recordings of vLLM: the events of real workloads become run directories, and these are replayed to the iteration.

`vllm_events.json.gz` has what the recording scheduler of `ifbbench.live.vllm` sent for five random workloads of vLLM
0.32, and what vLLM decided (`python -m benchmarks.vllm_recording keep FILE`); `vllm_0_15_events.json.gz` has two of
vLLM 0.15.1 (`--seeds 5007 5010`), in which rules matter that later versions changed.
"""

import gzip
import json
import os
import re
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.live import writer
from ifbbench.live.channel import Channel
from ifbbench.live.events import Added, Begin, Ended, Event, Step, take
from ifbbench.live.events import write as write_frame
from ifbbench.live.mirror import trace_priority
from tests.live.recordings import batches, decisions, lines
from tests.report.test_schema import check

CASES, OLD_CASES = (
    json.loads(gzip.decompress((Path(__file__).parent / name).read_bytes()))
    for name in ("vllm_events.json.gz", "vllm_0_15_events.json.gz")
)
IDS = [f"{case['kind']}-{number}" for number, case in enumerate(CASES)]


def events_of(case: dict[str, Any]) -> list[Event]:
    return list(take(bytearray(b64decode(case["events"]))))


def write_events(events: Iterable[Event], directory: Path) -> None:
    """Let the writer write what a pipe brings."""
    with (directory.parent / f"{directory.name}.events").open("w+b") as file:
        for event in events:
            write_frame(file, event)
        file.seek(0)
        writer.write(file.fileno(), directory)


def summary(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_vllm_decided_is_recorded_and_replayed(case: dict[str, Any], tmp_path: Path) -> None:
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    write_events(events_of(case), recorded)
    found = decisions(recorded)
    assert [line[:4] for line in found] == [
        (
            len(step["scheduled"]),
            sum(count for _, count, _ in step["scheduled"]),
            len(step["preempted"]),
            step["free_blocks"],
        )
        for step in case["steps"]
    ]
    figures = summary(recorded)
    assert not figures["partial"]
    assert figures["pauses"] == sum(len(step["preempted"]) for step in case["steps"])
    assert figures["requests"]["total"] == len(lines(recorded, "trace")) == len(lines(recorded, "requests"))
    if case["kind"] == "sync":
        names = {row["request_id"]: row["name"] for row in lines(recorded, "requests")}
        expected = [{name: count for name, count, _ in step["scheduled"]} for step in case["steps"]]
        assert [{names[number]: count for number, count in batch.items()} for batch in batches(recorded)] == expected
    if case["kind"] == "drafts":  # a trace does not say which drafts were accepted
        return
    result = CliRunner().invoke(main, ["run", str(recorded), "--engine", "vllm", "--output", str(replayed), "--quiet"])
    assert result.exit_code == 0, result.output
    assert decisions(replayed) == found
    if case["kind"] == "sync":
        assert batches(replayed) == batches(recorded)


@pytest.mark.parametrize("case", OLD_CASES, ids=("5007", "5010"))
def test_a_replay_has_the_rules_of_the_version_that_was_recorded(case: dict[str, Any], tmp_path: Path) -> None:
    """Until 0.22 free blocks without content were not taken first; until 0.30 the cap of long prompts also held for a
    request that is alone."""
    recorded = tmp_path / "recorded"
    write_events(events_of(case), recorded)
    assert json.loads((recorded / "run.json").read_text())["config"]["vllm_version"] == "0.15"
    replay = ["run", str(recorded), "--engine", "vllm", "--quiet", "--output"]
    result = CliRunner().invoke(main, [*replay, str(tmp_path / "replayed")])
    assert result.exit_code == 0, result.output
    assert "not the recorded schedule" not in result.output
    assert decisions(tmp_path / "replayed") == decisions(recorded)
    assert batches(tmp_path / "replayed") == batches(recorded)
    other = CliRunner().invoke(main, [*replay, str(tmp_path / "other"), "--vllm_version", "0.32.0"])
    assert other.exit_code == 0, other.output
    assert "not the recorded schedule" in other.output
    unknown = CliRunner().invoke(main, [*replay, str(tmp_path / "unknown"), "--vllm_version", "0.9"])
    assert unknown.exit_code == 2
    assert "0.15" in unknown.output


@pytest.mark.usefixtures("without_layout")
def test_a_recording_is_read_by_other_commands(tmp_path: Path) -> None:
    directory = tmp_path / "recorded"
    write_events(events_of(CASES[1]), directory)
    assert check(directory) > {"run.json", "trace.jsonl", "requests.jsonl"}
    for command in (["report"], ["why", "--budget", "0"], ["plot", "--html"], ["export", "--format", "csv"]):
        result = CliRunner().invoke(main, [command[0], str(directory), *command[1:]])
        assert result.exit_code == 0, result.output
    assert "Pre-emptions" in CliRunner().invoke(main, ["report", str(directory)]).output
    by_clock = ["run", str(directory), "--arrival", "recorded", "--device", "sim:h100-sxm", "--model", "llama-3.1-8b"]
    result = CliRunner().invoke(main, [*by_clock, "--output", str(tmp_path / "by-clock"), "--quiet"])
    assert result.exit_code == 0, result.output
    arrivals = [[row["arrival_s"] for row in lines(path, "trace")] for path in (directory, tmp_path / "by-clock")]
    assert sorted(arrivals[0]) == arrivals[1]


def test_watch_of_a_server(tmp_path: Path) -> None:
    """How many requests there will be is not known while it runs."""
    events = events_of(CASES[1])
    begin = events[0]
    assert isinstance(begin, Begin)
    channel = Channel(tmp_path / "recorded", begin)
    for event in events[1:-20]:
        channel.put(event)
    watched = [tmp_path / "recorded" / name for name in ("run.json", "iterations.jsonl")]
    deadline = time.monotonic() + 60
    while not (all(path.exists() for path in watched) and watched[1].stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)  # until the first flush
    running = CliRunner().invoke(main, ["watch", str(tmp_path / "recorded"), "--once"]).output
    channel.close()
    ended = CliRunner().invoke(main, ["watch", str(tmp_path / "recorded"), "--once"]).output
    assert re.search(r"requests +\d+ ended", running)
    assert re.search(r"requests .* (\d+) of \1", ended)


def test_iterations_need_a_recording(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["run", "--arrival", "iteration", "--device", "null", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "--arrival iteration: not every request of the trace has the iteration" in result.output


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    """Its last event is cut off. What was running is in the trace, with the outputs that it had."""
    directory, frames = tmp_path / "recorded", tmp_path / "frames"
    content = b64decode(CASES[3]["events"])
    frames.write_bytes(content[: len(content) * 2 // 3])
    with frames.open("rb") as file:
        writer.write(file.fileno(), directory)
    assert summary(directory)["partial"]
    steps = [event for event in take(bytearray(frames.read_bytes())) if isinstance(event, Step)]
    assert len(lines(directory, "iterations")) == len(steps)
    added = sum(isinstance(change, Added) for step in steps for change in step.changes)
    assert len(lines(directory, "trace")) == len(lines(directory, "requests")) == added
    assert {row["outcome"] for row in lines(directory, "requests")} == {"completed", "stopped"}


def test_lost_iterations_begin_another_directory(tmp_path: Path) -> None:
    """The engine was faster than the recorder: the second directory begins with what the engine has then."""
    events = events_of(CASES[2])
    steps = [event for event in events if isinstance(event, Step)]
    middle = len(steps) // 2
    ended = {one.name for step in steps[: middle + 1] for one in (*step.changes, *step.ended) if isinstance(one, Ended)}
    added = {one.name: one for step in steps[: middle + 1] for one in step.changes if isinstance(one, Added)}
    present = [
        Added(one.name, one.arrival_s, one.prompt_len, one.max_new_tokens, one.priority)
        for name, one in added.items()
        if name not in ended
    ]
    fields = {name: getattr(steps[middle], name) for name in Step.__struct_fields__}
    lost = Step(**fields | {"num_lost": 3, "present": present})
    write_events([events[0], *steps[: middle - 3], lost], tmp_path / "recorded")
    first, second = tmp_path / "recorded", tmp_path / "recorded-2"
    described = json.loads((first / "run.json").read_text())
    assert described["recorded"]["goes_on"] == "4 iterations were lost: the engine was faster than the recorder"
    assert len(lines(first, "iterations")) == middle - 3
    assert [row["name"] for row in lines(second, "requests")] == [one.name for one in present]


def test_a_large_recording_goes_on_in_the_next_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(writer.MAX_MIB, "0.01")
    monkeypatch.setattr(writer, "FLUSH_INTERVAL_S", 0.0)  # the size is looked at with each flush
    write_events(events_of(CASES[4]), tmp_path / "recorded")
    directories = sorted(tmp_path.glob("recorded*"))
    directories = [path for path in directories if path.is_dir()]
    assert len(directories) > 2
    assert sum(len(lines(path, "iterations")) for path in directories) == len(CASES[4]["steps"])
    whole = tmp_path / "whole"
    monkeypatch.setenv(writer.MAX_MIB, "")
    write_events(events_of(CASES[4]), whole)
    tokens = [line[1] for path in sorted(directories, key=_number) for line in decisions(path)]
    assert tokens == [line[1] for line in decisions(whole)]
    assert CliRunner().invoke(main, ["report", str(directories[1])]).exit_code == 0


def test_figures_that_were_kept_in_a_file_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(events_of(CASES[4]), tmp_path / "at-once")
    monkeypatch.setattr(writer, "MAX_IN_MEMORY", 3)
    write_events(events_of(CASES[4]), tmp_path / "in-parts")
    assert summary(tmp_path / "at-once")["requests"]["completed"] > 6
    files = [path.name for path in (tmp_path / "in-parts").iterdir()]
    assert sorted(files) == sorted(path.name for path in (tmp_path / "at-once").iterdir())
    at_once, in_parts = summary(tmp_path / "at-once"), summary(tmp_path / "in-parts")
    assert in_parts == at_once


def _number(path: Path) -> int:
    return int(path.name.partition("-")[2] or 1)


def test_a_channel_writes_from_another_process(tmp_path: Path) -> None:
    """It completes the directory before the channel is closed, and its process has ended then."""
    events = events_of(CASES[1])
    begin = events[0]
    assert isinstance(begin, Begin)
    channel = Channel(tmp_path / "recorded", begin)
    for event in events[1:-1]:
        assert channel.put(event)
    channel.close()
    assert not channel.is_open
    assert not channel.put(events[1])
    assert len(lines(tmp_path / "recorded", "iterations")) == len(CASES[1]["steps"])
    assert not summary(tmp_path / "recorded")["partial"]


def test_a_channel_whose_writer_cannot_write(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The engine goes on; the process has said why it ended."""
    (tmp_path / "file").write_text("")
    begin = events_of(CASES[1])[0]
    assert isinstance(begin, Begin)
    channel = Channel(tmp_path / "file" / "recorded", begin)
    channel.close()
    assert not channel.put(begin)
    error = capfd.readouterr().err
    assert error.startswith("ifbbench recorder: ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("priorities", [(-2000, -500, -1, 0, 1, 7, 400, 401, 10**6)])
def test_priorities_keep_their_order(priorities: tuple[int, ...]) -> None:
    found = [trace_priority(priority) for priority in priorities]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)
    assert 0.0 <= found[-1] <= found[0] <= 1.0
    assert trace_priority(0) == 0.5


def test_vllm_itself(tmp_path: Path) -> None:
    """Where vLLM is installed."""
    pytest.importorskip("vllm")
    from benchmarks.vllm_recording import check_random

    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    assert check_random(6, 1000) == 0


class Writer:
    """The writer as a process of its own, whose files may have so many bytes."""

    def __init__(self, directory: Path, max_file_bytes: int) -> None:
        limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({max_file_bytes}, {max_file_bytes}))"
        code = f"{limit}; from ifbbench.live.writer import main; raise SystemExit(main(['{directory}']))"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE)

    def send(self, events: Iterable[Event]) -> tuple[int, str]:
        """Its exit status, and what it printed. It may end before all events are sent."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            for event in events:
                write_frame(cast(BinaryIO, self.process.stdin), event)
            self.process.stdin.close()
        assert self.process.stderr is not None
        error = self.process.stderr.read().decode()
        return self.process.wait(), error


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """One line says so, and what was written before can be read."""
    status, error = Writer(tmp_path / "recorded", 20_000).send(events_of(CASES[4]))
    assert status == 1
    assert error.startswith("ifbbench recorder: ")
    assert len(error.splitlines()) == 1
    assert json.loads((tmp_path / "recorded" / "run.json").read_text())["partial"]
    result = CliRunner().invoke(main, ["report", str(tmp_path / "recorded")])
    assert result.exit_code == 0, result.output
    assert "Partial" in result.output


def test_an_error_in_the_recorder_ends_the_recording_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM is installed: it decides what it decides without the error, and its recording ends there."""
    pytest.importorskip("vllm")
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    from benchmarks.vllm_recording import draw_recorded, record
    from ifbbench.live import vllm as recording

    init_none_hash(sha256)
    expected = record(draw_recorded(1000), 1000, tmp_path / "whole")
    calls, head = iter(range(10**6)), recording._Notes._head

    def failing(self: Any, *arguments: Any) -> Any:
        if next(calls) == len(expected) // 2:
            raise RuntimeError("a defect")
        return head(self, *arguments)

    monkeypatch.setattr(recording._Notes, "_head", failing)
    assert record(draw_recorded(1000), 1000, tmp_path / "ended") == expected
    deadline = time.monotonic() + 120
    while not (tmp_path / "ended" / "summary.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)  # the engine does not wait for the writer
    assert summary(tmp_path / "ended")["partial"]
    assert len(lines(tmp_path / "ended", "iterations")) < len(lines(tmp_path / "whole", "iterations"))


def test_a_server(tmp_path: Path) -> None:
    """Where vLLM is installed: a real server under two clients."""
    pytest.importorskip("vllm")
    from benchmarks.vllm_server import check as check_server

    report = check_server(tmp_path / "server", 60, seed=1, port=8139, blocks=36, mode="sync")
    assert report["differences"] == {}
    assert report["recording"]["requests"] == 60


ONLY_RECORDING = """
import sys
NEEDED = {"ifbbench", "msgspec", "numpy", "mypy_extensions", "typing_extensions"}
class Missing:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first not in NEEDED and first not in sys.stdlib_module_names and not first.endswith("__mypyc"):
            raise ImportError(f"{name} is not in the environment of the server")
sys.meta_path.insert(0, Missing())
from ifbbench.live import sglang
from ifbbench.live.writer import main
sys.exit(main(sys.argv[1:]))
"""


def test_recording_needs_no_package_that_servers_lack(tmp_path: Path) -> None:
    """docs/live.md installs without dependencies, so that the PyTorch of a server stays as it is."""
    directory = tmp_path / "recording"
    done = subprocess.run(
        [sys.executable, "-c", ONLY_RECORDING, str(directory)],
        input=b64decode(CASES[0]["events"]),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert summary(directory)["requests"]["completed"] > 0
