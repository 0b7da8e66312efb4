"""Kill -9, and a full disk, at each change of a file: every line is valid but the last, every finished request is
reported, and report, plot and the run of the directory answer."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.compressed import read_pieces
from ifbbench.report.charts import CHARTS
from ifbbench.report.figures import figures
from ifbbench.report.load import load_run
from tests.attack.file_layer import KILLED, command, in_fork

REQUESTS = 12
RUN = ("run", "default", "--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--max_batch_size", "2",
       "--max_num_samples", str(REQUESTS), "--quiet", "--output")  # fmt: skip


def run_in(place: Path) -> Sequence[str]:
    return (*RUN, str(place / "run"))


def flush_often() -> None:
    """Files are written in small pieces, and flushed as often as requests end."""
    from ifbbench import compressed
    from ifbbench.recording import lines, recorder

    compressed.BUFFER_BYTES = 512
    lines.LINES_AT_ONCE = 4
    recorder.FLUSH_INTERVAL_S = 0.0


def attacked(arguments: Sequence[str], directory: Path, stop_at: int, is_full: bool = False) -> tuple[int, str]:
    """The exit status of a command that is stopped at this change, and what it printed."""
    printed = directory / "printed.txt"
    status = in_fork(command(arguments, stop_at, is_full, flush_often), printed)
    return status, printed.read_text(errors="replace")


def each_change(
    arguments: Callable[[Path], Sequence[str]], directory: Path, step: int = 1, is_full: bool = False,
    before: Callable[[Path], None] = lambda place: None,
) -> Iterator[tuple[Path, int, int, str]]:  # fmt: skip
    """Run a command again and again, and stop it at each change, or at each `step`-th one, until it ends. Yields its
    directory, the number of the change, the exit status and what was printed. before: makes the directory ready."""
    stop_at, ends = 1, 0
    while not ends:
        place = directory / str(stop_at)
        place.mkdir()
        before(place)
        status, printed = attacked(arguments(place), place, stop_at, is_full)
        count = int(printed.rpartition("changes ")[2] or 0) if "changes " in printed else stop_at
        ends = count < stop_at
        assert "Traceback" not in printed, printed
        assert status in ((0, 1) if is_full or ends else (KILLED,)), (stop_at, status, printed)
        yield place, stop_at, status, printed
        stop_at += step
    assert stop_at > 10, "the command was meant to change more files"


def check_lines(directory: Path) -> int:
    """Check that each line of the files of a run directory is valid but the last; returns the finished requests."""
    finished = 0
    for path in directory.glob("*.jsonl*"):
        content = b""
        try:
            for piece in read_pieces(path):
                content += piece
        except EOFError:
            pass
        for line in content.split(b"\n")[:-1]:
            row = json.loads(line)
            finished += path.name.startswith("requests") and row["outcome"] == "completed"
    return finished


def check_run(directory: Path, chart: str = "") -> None:
    """Check what was left of a run: nothing, or a directory that report, plot and run read. chart: all if empty."""
    if not directory.exists():
        return
    finished = check_lines(directory)
    run = load_run(directory)
    assert figures(run)["requests"]["completed"] == finished
    assert run.partial == (run.summary is None or bool(run.run["partial"]))
    answers = CliRunner().invoke(main, ["report", str(directory)])
    assert answers.exit_code == 0, answers.output
    again = ["run", str(directory), "--device", "null", "--time_scale", "0", "--quiet", "--json", "--output",
             str(directory.with_name("again"))]  # fmt: skip
    answers = CliRunner().invoke(main, again)
    assert answers.exit_code == 0, answers.output
    assert json.loads(answers.stdout)["requests"]["completed"] == REQUESTS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        only = ["--only", chart] if chart else []
        drawn = CliRunner().invoke(main, ["plot", str(directory), "--format", "svg", *only])
    assert drawn.exit_code == 0, drawn.output


CHART_NAMES = tuple(CHARTS)


@pytest.mark.parametrize("step", [41, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_full", [False, True], ids=["killed", "full"])
def test_a_run_that_is_stopped_at_each_change_of_a_file(is_full: bool, step: int, tmp_path: Path) -> None:
    tries = 0
    for place, number, status, printed in each_change(run_in, tmp_path, step, is_full):
        check_run(place / "run", CHART_NAMES[number % len(CHART_NAMES)])
        assert status != 1 or "No space left on device" in printed
        tries += 1
    print(f"{tries} tries")
