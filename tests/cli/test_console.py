"""Progress: its stages and remaining time, on a terminal and elsewhere."""

import json
import os
import pty
import re
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli import console
from ifbbench.cli.console import LineProgress, progress_line
from ifbbench.cli.main import main
from ifbbench.progress import NO_PROGRESS
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from ifbbench.workload.reading import ROWS_BETWEEN_REPORTS, read_trace


class FakeClock:
    """Its time is what a test sets."""

    time_s = 0.0

    def now(self) -> float:
        return FakeClock.time_s


class Recorded:
    """Keeps what an operation reports."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.updates: list[tuple[str, int, int | None, str]] = []

    def stage(self, label: str) -> None:
        self.stages.append(label)

    def update(self, completed: int, total: int | None, text: str) -> None:
        self.updates.append((self.stages[-1], completed, total, text))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[FakeClock]:
    FakeClock.time_s = 0.0
    monkeypatch.setattr(console, "WallClock", FakeClock)
    return FakeClock


@pytest.fixture
def lines(clock: type[FakeClock]):
    """Progress that only the test prints: its thread waits for a time that does not come."""
    progress = LineProgress("run")
    progress._due_s = 1e6
    yield progress
    progress.close()


def test_a_line_has_the_stage_the_share_and_the_remaining_time(lines, clock, capsys) -> None:
    clock.time_s = 100.0
    lines.stage("replaying")
    clock.time_s = 160.0
    lines.update(1200, 6000, "3 active")
    lines.print()
    assert capsys.readouterr().err.splitlines() == [
        "run: replaying",
        "run: replaying, 1,200 of 6,000 (20 %), 0:04:00 left, 3 active",
    ]


def test_the_remaining_time_is_that_of_the_stage(lines, clock) -> None:
    lines.update(5, 10, "")
    clock.time_s = 10.0
    assert lines.remaining == "0:00:10 left"
    lines.stage("writing")
    assert lines.remaining == ""  # nothing is known yet
    lines.update(7, None, "7 rows")
    assert lines.remaining == ""
    clock.time_s = 12.0
    lines.update(1, 4, "")
    assert lines.remaining == "0:00:06 left"


def test_nothing_is_printed_in_the_first_seconds(clock, capsys) -> None:
    with progress_line("run", quiet=False) as progress:
        progress.stage("reading trace")
        progress.update(1, 2, "")
        clock.time_s = console.FIRST_LINE_S - 0.1
        progress.stage("replaying")
    assert capsys.readouterr().err == ""


def test_lines_come_in_intervals_without_updates(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.05)
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.05)
    printed = ""
    with progress_line("run", quiet=False) as progress:
        progress.stage("loading model")
        deadline = time.monotonic() + 300
        while printed.count("run: loading model\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            printed += capsys.readouterr().err
    assert printed.count("run: loading model\n") >= 2


def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.0)
    with progress_line("run", quiet=True) as progress:
        assert progress is NO_PROGRESS


def test_a_terminal_has_a_bar_with_the_remaining_time(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    primary, secondary = pty.openpty()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(secondary, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress_line("run", quiet=False) as progress:
            progress.stage("replaying [x]")
            clock.time_s = 30.0
            progress.update(250, 1000, "3 active")
            shown, deadline = "", time.monotonic() + 300
            while "3 active" not in shown and time.monotonic() < deadline:  # it is drawn a few times a second
                shown += os.read(primary, 100_000).decode()
    os.close(primary)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert re.search(r"run: replaying \[x\] .* 250/1,000 0:01:30 left 3 active", plain)


def test_a_run_reports_its_stages(tmp_path: Path) -> None:
    recorded = Recorded()
    run_trace("documentation", RunConfig(device="null", time_scale=0, output=str(tmp_path / "run")), recorded)
    stages = ["reading trace", "loading model", "writing trace", "replaying", "writing results"]
    assert recorded.stages == stages
    assert ("replaying", 0, 5) in [update[:3] for update in recorded.updates]


@pytest.mark.parametrize(("suffix", "limit"), [("jsonl", None), ("jsonl", 15_000), ("json", None)])
def test_reading_a_long_trace_reports_how_much_is_read(suffix: str, limit: int | None, tmp_path: Path) -> None:
    rows = 2 * ROWS_BETWEEN_REPORTS + 5
    path, recorded = tmp_path / f"trace.{suffix}", Recorded()
    row = {"prompt_len": 5, "max_new_tokens": 2, "output_len": 2, "arrival_s": 0.0}
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"request_id": index, **row}) + "\n" for index in range(rows)))
    else:
        path.write_text(json.dumps({"samples": [{"input_ids": [1], "output_len": 2, "task_id": -1}] * rows}))
    recorded.stage("reading trace")
    read_trace(path, limit, progress=recorded)
    if limit is None:
        shares = [completed / (total or 1) for _, completed, total, _ in recorded.updates]
        assert shares == pytest.approx([0.5, 1.0], abs=0.1)
        assert [text for *_, text in recorded.updates] == ["10,000 rows", "20,000 rows"]
    else:
        counts = [(completed, total, text) for _, completed, total, text in recorded.updates]
        assert counts == [(10_000, limit, "rows")]


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ("run documentation --device null --time_scale 0 --output run", ["reading trace", "replaying"]),
        ("report run", ["reading results"]),
        ("capacity tiny --trace default", ["reading trace", "calculating"]),
        ("dataset info chat", ["drawing requests", "describing trace"]),
        (
            "dataset synth token-unif-dist --num-requests 4 --input-min 3 --input-max 9 --output-min 1 --output-max 2 "
            "-o synth.jsonl",
            ["drawing requests", "writing trace"],
        ),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_long_commands_report_their_stages(
    words: str, stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if words == "report run":
        run = "run documentation --device null --time_scale 0 --output run --quiet"
        assert CliRunner().invoke(main, run.split()).exit_code == 0
    shown: list[str] = []
    stage = console.StageProgress.stage

    def noted(progress: console.StageProgress, label: str) -> None:
        shown.append(label)
        stage(progress, label)

    monkeypatch.setattr(console.StageProgress, "stage", noted)
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 0, done.output
    assert [label for label in shown if label in stages] == stages
