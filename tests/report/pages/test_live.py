"""What a run does now, from the ends of its files: `watch`, and the view during `run`."""

import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.cli.watch import run_progress
from ifbbench.compressed import BUFFER_BYTES, open_to_write
from ifbbench.report.pages.live import Follower

RUN = (
    "run chat --device sim:h100-sxm --model llama-3.1-8b --max_num_samples 40 --request_rate 40 --max_batch_size 24 "
    "--max_num_tokens 1024 --max_tokens_in_paged_kvcache 30000 --policy max_utilization --quiet --output"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("live") / "run"
    assert CliRunner().invoke(main, [*RUN.split(), str(directory)]).exit_code == 0
    return directory


def going_on(run: Path, copy: Path, share: float) -> Path:
    """A directory as the run left it when it had written a share of its lines."""
    copy.mkdir()
    for name in ("run.json", "trace.jsonl"):
        (copy / name).write_bytes((run / name).read_bytes())
    for name in ("iterations.jsonl", "requests.jsonl"):
        content = (run / name).read_bytes()
        (copy / name).write_bytes(content[: int(len(content) * share)])
    return copy


def test_a_last_line_that_goes_beyond_a_piece(run: Path, tmp_path: Path) -> None:
    """What is read after the last whole line is not the end of one."""
    part = going_on(run, tmp_path / "part", 1.0)
    content = (run / "iterations.jsonl").read_bytes()
    begin = content.rfind(b"\n", 0, BUFFER_BYTES) + 1
    assert content.find(b"\n", begin) > BUFFER_BYTES + 3
    (part / "iterations.jsonl").write_bytes(content[: BUFFER_BYTES + 3])
    now = Follower(part, json.loads((part / "run.json").read_text())).snapshot()
    assert now is not None
    assert now.iteration == content[:begin].count(b"\n") - 1


def test_a_snapshot_has_the_last_iteration_and_the_requests_so_far(run: Path, tmp_path: Path) -> None:
    part = going_on(run, tmp_path / "part", 0.5)
    content = json.loads((part / "run.json").read_text())
    follower = Follower(part, content)
    now = follower.snapshot()
    assert now is not None
    last = json.loads((part / "iterations.jsonl").read_bytes().split(b"\n")[-2])
    ended = [json.loads(line) for line in (part / "requests.jsonl").read_bytes().split(b"\n")[:-1]]
    assert (now.iteration, now.context, now.generation, now.used_blocks) == (
        last["Iteration Counter"],
        last["Context Requests"],
        last["Generation Requests"],
        last["Used KV cache blocks"],
    )
    assert (now.completed, now.requests, now.ended) == (len(ended), 40, False)
    assert now.tokens == sum(row["output_len"] for row in ended)
    assert now.ttft_s in [row["ttft_s"] for row in ended]
    # The files grow.
    for name in ("iterations.jsonl", "requests.jsonl", "summary.json"):
        (part / name).write_bytes((run / name).read_bytes())
    then = follower.snapshot()
    assert then is not None
    assert (then.completed, then.ended) == (40, True)
    assert then.tokens == then.planned_tokens
    summary = json.loads((run / "summary.json").read_text())
    assert then.iteration == summary["iterations"] - 1


def test_the_last_pauses_are_shown(run: Path, tmp_path: Path) -> None:
    lines = (run / "iterations.jsonl").read_bytes().splitlines(keepends=True)
    paused = [index for index, line in enumerate(lines) if b'"paused":[{' in line]
    part = going_on(run, tmp_path / "part", 0.0)
    (part / "iterations.jsonl").write_bytes(b"".join(lines[: paused[0] + 1]))
    now = Follower(part, json.loads((part / "run.json").read_text())).snapshot()
    assert now is not None
    pause = json.loads(lines[paused[0]])["ifbbench"]["paused"][-1]
    assert now.pauses[-1] == (paused[0], pause["request_id"], pause["for"])


def test_watch_prints_lines_until_the_run_has_ended(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["watch", str(run)])
    assert done.exit_code == 0
    assert re.match(r"40 of 40 requests, \d+ running, 0 waiting", done.output)
    assert "The run has ended" in done.output
    once = CliRunner().invoke(main, ["watch", str(going_on(run, tmp_path / "part", 0.3)), "--once"])
    assert "output tokens" in once.output
    missing = CliRunner().invoke(main, ["watch", str(tmp_path / "none"), "--once"])
    assert (missing.exit_code, "has no run.json" in missing.output) == (2, True)


def test_compressed_files_are_followed(run: Path, tmp_path: Path) -> None:
    part = going_on(run, tmp_path / "part", 0.0)
    contents = {name: (run / f"{name}.jsonl").read_bytes() for name in ("iterations", "requests")}
    for name in contents:
        (part / f"{name}.jsonl").unlink()
    follower = Follower(part, json.loads((part / "run.json").read_text()))
    assert follower.snapshot() is None
    writers = {name: open_to_write(part / f"{name}.jsonl.gz") for name in contents}
    for share in (0.3, 0.6, 1.0):
        for name, content in contents.items():
            end = content.rfind(b"\n", 0, int(len(content) * share)) + 1
            writers[name].write(content[:end])
            contents[name] = content[end:]
            writers[name].flush()
        now = follower.snapshot()
        assert now is not None
    assert now is not None
    for writer in writers.values():
        writer.close()
    summary = json.loads((run / "summary.json").read_text())
    assert (now.completed, now.tokens, now.iteration) == (40, now.planned_tokens, summary["iterations"] - 1)


def test_watch_shows_a_compressed_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [*RUN.split(), str(tmp_path / "run"), "--recording_format", "jsonl.gz"])
    assert done.exit_code == 0
    shown = CliRunner().invoke(main, ["watch", str(tmp_path / "run"), "--once"])
    assert "40 of 40" in shown.output


def test_a_terminal_shows_the_run_below_its_progress(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    primary, secondary = pty.openpty()
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(secondary, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with run_progress("run", quiet=False) as (progress, follow):
            assert follow is not None
            follow(run)
            progress.stage("replaying")
            progress.update(10, 40, "3 active")
        shown = b""
        while b"tokens/s" not in shown:
            shown += os.read(primary, 100_000)
    os.close(primary)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "run: replaying  10/40" in plain
    assert "KV blocks" in plain
    assert "output tokens/s" in plain
