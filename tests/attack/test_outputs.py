"""Paths that cannot be written, full devices, signals, and several runs into the same directory."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ifbbench.cli import console
from ifbbench.cli import run as run_command
from ifbbench.cli.console import LineProgress
from ifbbench.cli.main import main
from ifbbench.cli.watch import Dashboard, _details
from ifbbench.engine.batch import Batch
from ifbbench.engine.passes import NullExecutor
from ifbbench.errors import InputError
from ifbbench.files import check_new_directory, check_new_file
from ifbbench.rundir import run_directory
from ifbbench.rundir.reader import load_run
from ifbbench.rundir.recorder import Recorder
from ifbbench.rundir.run_directory import OPEN_SPANS, REPEATS_FILE, SWEEP_CONFIG
from ifbbench.settings.groups.recording import SIDE_OUTPUTS
from ifbbench.studies import sweep as sweep_module
from ifbbench.studies.point_table import SWEEP_FILE, SWEEP_JSON, read_sweep
from ifbbench.studies.sweep import POINTS_FILE
from ifbbench.studies.tune import Tuner
from ifbbench.studies.tune_files import ANSWER, SERVER_FILES
from tests.attack.file_layer import ended, forked, in_fork, status_of
from tests.attack.readers import read_by_every_command

pytestmark = pytest.mark.usefixtures("small_model")

# With few blocks, because those of the default take longer to make than the rest of the run.
NULL = ("--device", "null", "--time_scale", "0", "--max_tokens_in_paged_kvcache", "4096", "--quiet")
RUN = ("run", "documentation", *NULL)
# Runs of a model, which have tokens to write.
REAL = (
    "run",
    "documentation",
    "--device",
    "cpu",
    "--time_scale",
    "0",
    "--max_num_samples",
    "1",
    "--max_prompt_len",
    "8",
    "--max_tokens_in_paged_kvcache",
    "4096",
    "--quiet",
)
SYNTH = ("dataset", "synth", "fixed", "--num-requests", "3", "--input-len", "5", "--output-len", "5", "-o")
IFBBENCH = (sys.executable, "-m", "ifbbench")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run and a sweep."""
    directory = tmp_path_factory.mktemp("finished")
    for arguments in (
        (*RUN, "--output", str(directory / "run")),
        (
            "sweep",
            "documentation",
            *NULL,
            "--over",
            "max_batch_size=2,4",
            "--processes",
            "1",
            "--output",
            str(directory / "sweep"),
        ),
    ):
        assert CliRunner().invoke(main, arguments).exit_code == 0
    return directory


def bad_paths(directory: Path) -> dict[str, str]:
    """What cannot be written, by what is wrong with it."""
    (directory / "file").write_text("kept")
    (directory / "folder").mkdir()
    (directory / "folder" / "kept").write_text("kept")
    (directory / "loop").symlink_to(directory / "loop")
    return {
        "directory": str(directory / "folder"),
        "below a file": str(directory / "file" / "x" / "y"),
        "too long": str(directory / ("x" * 300)),
        "loop": str(directory / "loop"),
        "kernel": "/proc/none/x",
        "exists": str(directory / "file"),
    }


def invoke(*arguments: str) -> Result:
    """Run a command, which must end with a status and without a traceback."""
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    assert "Traceback" not in done.output
    return done


def commands_that_write(finished: Path) -> dict[str, Sequence[str]]:
    """Commands that end in an option, or an argument, whose value is a file or a directory to write."""
    run, sweep = str(finished / "run"), str(finished / "sweep")
    reports = {f"report --{name}": ("report", run, f"--{name}") for name in SIDE_OUTPUTS if name != "responses_json"}
    return {
        **reports,
        "run --output": (*RUN, "--output"),
        "why --pauses-csv": ("why", run, "--pauses-csv"),
        "sweep --output": ("sweep", "documentation", *NULL, "--over", "max_batch_size=2", "--output"),
        "run --repeat --output": (*RUN, "--repeat", "2", "--output"),
        "dataset synth -o": SYNTH,
        "dataset convert -o": ("dataset", "convert", "documentation", "--to", "gpt-manager", "-o"),
        "dataset sample -o": ("dataset", "sample", "documentation", "--num-requests", "2", "-o"),
        "dataset info --plot": ("dataset", "info", "documentation", "--plot"),
        "plot --output": ("plot", run, "--only", "ttft", "--format", "svg", "--output"),
        "plot --html --output": ("plot", run, "--html", "--output"),
        "plot --html of a sweep": ("plot", sweep, "--html", "--output"),
        "tune --output": ("tune", "documentation", "--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--output"),
        "calibrate --output": ("calibrate", "--device", "cpu", "--quick", "--output"),
        "calibrate --from --output": ("calibrate", "--from", run, "--gpu", "h100-sxm", "--output"),
        "serve --record": (
            "serve",
            "--device",
            "null",
            "--max_tokens_in_paged_kvcache",
            "4096",
            "--port",
            "0",
            "--record",
        ),
        "run --endpoint --output": ("run", "documentation", "--endpoint", "http://127.0.0.1:1", "--output"),
    }


def test_paths_that_cannot_be_written(finished: Path, tmp_path: Path) -> None:
    paths, tries = bad_paths(tmp_path), 0
    for name, command in commands_that_write(finished).items():
        for problem, path in paths.items():
            if problem == "directory" and name.startswith(("plot", "dataset info")):
                continue  # charts go into any directory
            done = invoke(*command, path)
            assert done.exit_code == 2, (name, problem, done.output)
            assert done.stderr.count("\n") < 8, (name, problem, done.output)
            tries += 1
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "kept").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "loop"]
    print(f"{tries} tries")


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_no_file_has(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--output_csv"):
        check_new_file(tmp_path / name, "--output_csv", overwrite=True)


@pytest.mark.parametrize("name", SIDE_OUTPUTS)
def test_outputs_of_a_run_are_checked_before_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ifbbench.replay.single.engine_for", None)  # it is not called
    command = REAL if name == "responses_json" else RUN
    paths = bad_paths(tmp_path) | {"missing": str(tmp_path / "missing" / "x"), "same": str(tmp_path / "same")}
    other = "report_json" if name != "report_json" else "output_csv"
    for problem, path in paths.items():
        same = [f"--{other}", path] if problem == "same" else []
        done = invoke(*command, f"--{name}", path, *same, "--output", str(tmp_path / "run"))
        assert done.exit_code == 2, (problem, done.output)
        assert name in done.output.replace("-", "_") or other in done.output
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (
            ("sweep", "documentation", *NULL, "--over", "max_batch_size=2"),
            (SWEEP_FILE, SWEEP_JSON, POINTS_FILE, SWEEP_CONFIG),
        ),
        ((*RUN, "--repeat", "2"), (REPEATS_FILE, "summary.json")),
        (
            ("tune", "documentation", "--device", "sim:h100-sxm", "--model", "llama-3.1-8b"),
            (ANSWER, *SERVER_FILES, "pareto.png"),
        ),
    ],
)
def test_tables_are_checked_before_the_first_run(
    command: tuple[str, ...], names: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ifbbench.replay.single.engine_for", None)  # it is not called
    for name in names:
        (tmp_path / name / name).mkdir(parents=True)
        done = invoke(*command, "--output", str(tmp_path / name), "--overwrite", "--quiet")
        assert (done.exit_code, list((tmp_path / name).iterdir())) == (2, [tmp_path / name / name])
        assert f"--output {tmp_path / name / name}: cannot be written (is a directory)" in done.stderr


def test_a_search_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "_search", lambda self: signal.raise_signal(signal.SIGINT))
    done = invoke(
        "tune",
        "documentation",
        "--device",
        "sim:h100-sxm",
        "--model",
        "llama-3.1-8b",
        "--quiet",
        "--output",
        str(tmp_path / "tune"),
    )
    assert (done.exit_code, done.stderr, list(tmp_path.iterdir())) == (130, "Interrupted.\n", [])


@pytest.mark.parametrize("name", SIDE_OUTPUTS)
def test_a_full_device_keeps_everything_else(name: str, tmp_path: Path) -> None:
    command = REAL if name == "responses_json" else RUN
    others = {
        other: tmp_path / f"{other}.txt"
        for other in SIDE_OUTPUTS
        if other != name and (other != "responses_json" or command is REAL)
    }
    options = [word for other, path in others.items() for word in (f"--{other}", str(path))]
    done = invoke(*command, f"--{name}", "/dev/full", *options, "--output", str(tmp_path / "run"))
    assert done.exit_code == 1
    assert "/dev/full: cannot be written (No space left on device)" in done.stderr
    assert load_run(tmp_path / "run").summary is not None
    assert all(path.stat().st_size for path in others.values())


def test_a_run_that_fails_and_a_full_device_are_both_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(self: NullExecutor, batch: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(NullExecutor, "submit", submit)
    done = invoke(*RUN, "--output_csv", "/dev/full", "--output", str(tmp_path / "run"))
    assert done.exit_code == 1
    first, second = done.stderr.splitlines()
    assert "device lost" in first
    assert "/dev/full" in second


@pytest.mark.parametrize(
    "arguments",
    [
        ("report",),
        ("report", "--json"),
        ("why",),
        ("why", "--json"),
        ("compare",),
        ("export",),
        ("watch", "--once"),
        ("plot", "--only", "ttft"),
        ("schema",),
        ("config", "show"),
        ("dataset", "info"),
        ("--help",),
        (*SYNTH, "-"),
    ],
)
def test_standard_output_on_a_full_device(finished: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    runs = {"compare": 2, "schema": 0, "config": 0, "--help": 0}.get(arguments[0], 0 if "-" in arguments else 1)
    words = [*arguments, *[str(finished / "run")] * runs]
    status = in_fork(partial(status_of, words), tmp_path / "errors.txt", "/dev/full")
    errors = (tmp_path / "errors.txt").read_text()
    assert status == 1, errors
    assert "No space left on device" in errors
    assert errors.count("\n") <= 2, errors


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_standard_streams_that_are_closed(closed: tuple[int, ...], tmp_path: Path) -> None:
    for words, status in (
        (["run", "documentation", *NULL[:-1], "--output", "run"], 0),
        (["run", "-", *NULL], 2),
        (["report", "nothing"], 2),
        (["--version"], 0),
    ):
        done = subprocess.run(
            [*IFBBENCH, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            preexec_fn=lambda: list(map(os.close, closed)),
        )
        assert (done.returncode, "Traceback" in done.stderr) == (status, False), (words, done.stderr)
        assert 2 in closed or (done.stderr.startswith("Error: ") == (status == 2))
    assert load_run(tmp_path / "run").summary is not None


def test_a_report_replaces_a_file_only_if_asked_to(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.csv"
    path.write_text("mine")
    done = invoke("report", str(finished / "run"), "--output-csv", str(path))
    assert (done.exit_code, path.read_text()) == (2, "mine")
    assert "--overwrite" in done.output
    assert invoke("report", str(finished / "run"), "--output-csv", str(path), "--overwrite").exit_code == 0
    assert path.read_text().startswith("num_samples,")


def test_files_that_are_no_files_are_written_to_directly(finished: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link.csv", tmp_path / "target.csv"
    target.write_text("old")
    link.symlink_to(target)
    for path in ("/dev/null", str(link)):
        arguments = ["report", str(finished / "run"), "--output_csv", path]
        assert invoke(*arguments, *(["--overwrite"] if path == str(link) else [])).exit_code == 0
    assert link.is_symlink()
    assert target.read_text().startswith("num_samples,")


@pytest.mark.parametrize(
    "wrong",
    [
        ("--policy", "nothing.such:Policy"),
        ("--max_num_tokens", "0"),
        ("--model", "none"),
        ("--responses_json", "x"),
        ("--output_csv", "/none/x"),
        ("--device", "sim:none"),
    ],
)
def test_a_bad_setting_does_not_empty_the_results_to_be_replaced(wrong: tuple[str, str], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert invoke(*RUN, "--output", str(directory)).exit_code == 0
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    done = invoke(*RUN, *wrong, "--output", str(directory), "--overwrite")
    assert done.exit_code == 2, done.output
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_a_run_that_is_replaced_keeps_files_that_are_not_of_runs(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert invoke(*RUN, "--output", str(directory), "--recording_format", "jsonl.gz").exit_code == 0
    (directory / "notes.txt").write_text("mine")
    (directory / ".dead.part").write_text("left by a kill")
    assert invoke(*RUN, "--output", str(directory), "--overwrite").exit_code == 0
    names = sorted(path.name for path in directory.iterdir())
    assert names == [
        "iterations.jsonl",
        "notes.txt",
        "requests.jsonl",
        "run.json",
        "spans.jsonl",
        "summary.json",
        "trace.jsonl",
    ]


@pytest.mark.parametrize("recording_format", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("what", ["directory", "files"])
def test_results_that_are_removed_during_the_run_are_written_again(
    what: str, recording_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, submit, batches = tmp_path / "run", NullExecutor.submit, count()

    def remove_once(self: NullExecutor, batch: Batch) -> None:
        if next(batches) == 2:
            for path in list(directory.iterdir()):
                path.unlink()
            if what == "directory":
                directory.rmdir()
        submit(self, batch)

    command = (*RUN, "--recording_format", recording_format, "--output")
    assert invoke(*command, str(tmp_path / "whole")).exit_code == 0
    monkeypatch.setattr(NullExecutor, "submit", remove_once)
    done = invoke(*command, str(directory), "--output_csv", str(tmp_path / "figures.csv"))
    assert done.exit_code == 1
    assert f"{directory}: was removed, or files in it" in done.stderr
    assert (tmp_path / "figures.csv").exists()
    run, whole = load_run(directory), load_run(tmp_path / "whole")
    assert not run.partial
    assert run.run["schedule_digest"] == whole.run["schedule_digest"]
    for name in ("iterations", "spans", "requests"):
        assert len(getattr(run, name)) == len(getattr(whole, name))
    read_by_every_command(directory, tmp_path / "whole", Random(0))


@pytest.mark.parametrize("when", ["before the end", "after the end"])
@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ((*RUN, "--output_csv", "figures.csv"), "Latency"),
        ((*RUN, "--json"), '"requests"'),
        ((*RUN, "--enable_steady_state"), "Latency"),
        ((*RUN, "--repeat", "2"), "2 of 2 repeats completed"),
        ((*RUN, "--repeat", "2", "--json"), '"repeats"'),
    ],
    ids=["tables", "json", "steady", "repeats", "repeats as json"],
)
def test_a_run_that_is_removed_when_its_results_are_complete_is_printed_and_said_to_be_lost(
    command: tuple[str, ...], printed: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place, name = (Recorder, "close") if when == "before the end" else (run_command, "replay")
    function = getattr(place, name)

    def remove_after(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        shutil.rmtree("results")
        return result

    monkeypatch.setattr(place, name, remove_after)
    done = invoke(*command)
    assert done.exit_code == 1, done.output
    if when == "after the end" or "--enable_steady_state" not in command:
        assert printed in done.stdout
    assert "was removed, or files in it, after the run had ended" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bench_that_is_removed_when_its_results_are_complete_has_the_figures_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replay = run_command.replay

    def remove_after(*args: Any) -> Any:
        result = replay(*args)
        shutil.rmtree("results")
        return result

    monkeypatch.setattr(run_command, "replay", remove_after)
    simulated = ("--device", "sim:h100-sxm", "--max_num_samples", "4", "--quiet")
    done = invoke("bench", "--model", "llama-3.1-8b", "throughput", "documentation", *simulated)
    assert done.exit_code == 1
    assert "Issue Rate" not in done.stdout
    assert "Latency" in done.stdout
    assert "was removed, or files in it, after the run had ended" in done.stderr


@pytest.mark.parametrize("keep", ["run", "summary"])
def test_a_sweep_that_is_removed_ends_with_its_tables_and_one_error(
    keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, execute = tmp_path / "sweep", sweep_module.LocalProcesses.execute

    def remove_once(self: Any, *arguments: Any) -> Iterator[Any]:
        for number, found in enumerate(execute(self, *arguments)):
            if number == 1:
                shutil.rmtree(directory)
            yield found

    monkeypatch.setattr("ifbbench.report.sweep_charts.plot_sweep", lambda *_: [])
    monkeypatch.setattr(sweep_module.LocalProcesses, "execute", remove_once)
    points = ("--over", "max_batch_size=1,2,3", "--keep", keep, "--output", str(directory))
    done = invoke("sweep", "documentation", *NULL, *points)
    assert done.exit_code == 1
    assert done.stderr.count(f"{directory}: was removed, or files in it, during the sweep") == 1
    assert "Traceback" not in done.stderr
    assert f"Results are in {directory}" in done.stdout
    assert [row["max_batch_size"] for row in read_sweep(directory).finished] == [1, 2, 3]
    monkeypatch.setattr(sweep_module.LocalProcesses, "execute", execute)
    again = invoke("sweep", "documentation", *NULL, *points)
    assert again.exit_code == 0, again.output
    assert f"{1 if keep == 'run' else 3} runs had ended before" in again.stdout


def test_a_run_in_the_place_of_a_removed_one_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, other, submit, batches = tmp_path / "run", tmp_path / "other", NullExecutor.submit, count()

    def replace_once(self: NullExecutor, batch: Batch) -> None:
        if next(batches) == 2:
            directory.rename(tmp_path / "moved")
            other.rename(directory)
        submit(self, batch)

    assert invoke(*RUN, "--output", str(other)).exit_code == 0
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    monkeypatch.setattr(NullExecutor, "submit", replace_once)
    done = invoke(*RUN, "--output", str(directory))
    assert done.exit_code == 1
    assert "another file has taken its place" in done.stderr
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert load_run(tmp_path / "moved").partial


def test_progress_goes_on_without_the_run_directory(tmp_path: Path) -> None:
    assert _details(tmp_path / "removed")() == ""
    dashboard = Dashboard("run")
    dashboard.follow(tmp_path / "removed")
    assert dashboard.__rich__()


def test_the_thread_of_progress_lines_ends_with_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    printed, failures = Event(), list[object]()

    class Closed(LineProgress):
        def print(self) -> None:
            printed.set()
            raise BrokenPipeError

    monkeypatch.setattr(console, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(threading, "excepthook", failures.append)
    lines = Closed("run")
    assert printed.wait(60)
    lines.close()
    assert not failures


@pytest.mark.parametrize("exists", [False, True])
def test_runs_at_the_same_time_into_one_directory(exists: bool, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    if exists:
        directory.mkdir()
    statuses, printed = started_together([*RUN, "--output", str(directory)], 6, tmp_path)
    assert sorted(statuses) == [0, 2, 2, 2, 2, 2]
    errors = [text for text in printed if "Results are in" not in text]  # the one that ran prints its report
    assert len(errors) == 5
    for error in errors:
        assert "already holds results" in error or "another" in error, error
    assert load_run(directory).summary is not None
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_directory_that_appears_during_its_check_is_no_file(tmp_path: Path) -> None:
    directories = [tmp_path / str(number) for number in range(2000)]

    def make_all() -> None:
        for directory in directories:
            directory.mkdir()

    other_run = Thread(target=make_all)
    other_run.start()
    for directory in directories:
        while not directory.is_dir():
            check_new_directory(directory, "--output")
    other_run.join()


def test_runs_at_the_same_time_with_the_default_name(tmp_path: Path) -> None:
    statuses, errors = started_together(RUN, 6, tmp_path)
    assert statuses == [0] * 6, errors
    names = {f"documentation{number}" for number in ("", "-2", "-3", "-4", "-5", "-6")}
    assert {path.name for path in (tmp_path / "results").iterdir()} == names
    for name in names:
        run = load_run(tmp_path / "results" / name)
        assert run.run["name"] == name
        assert run.summary is not None


def test_a_default_name_that_is_taken_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of(RUN) == 0

    def numbered(path: Path) -> Iterator[Path]:
        yield path  # it was free, and another run has ended there since
        yield path.with_name("free")

    monkeypatch.setattr(run_directory, "numbered", numbered)
    assert status_of(RUN) == 0
    assert load_run(tmp_path / "results" / "free").summary is not None


def started_together(arguments: Sequence[str], count: int, directory: Path) -> tuple[list[int], list[str]]:
    """Exit statuses and errors of processes that begin their runs at the same time, in `directory`."""
    go = directory.with_name(f"{directory.name}-go")

    def run() -> int:
        os.chdir(directory)
        while not go.exists():
            time.sleep(0.001)
        return status_of(arguments)

    outputs = [directory.with_name(f"{directory.name}-{number}.txt") for number in range(count)]
    processes = [forked(run, output) for output in outputs]
    time.sleep(0.1)  # most have started; those that have not begin late
    go.touch()
    statuses = [ended(process) for process in processes]
    return statuses, [text for output in outputs if (text := output.read_text())]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_run_with_its_results(number: int, tmp_path: Path) -> None:
    # Python handles a signal that comes right before it sleeps after that sleep: until the next request.
    words = ["run", "documentation", "--device", "null", "--request_rate", "0.05", "--output", "run"]
    running = subprocess.Popen([*IFBBENCH, *words, "--quiet"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "run" / OPEN_SPANS)
    running.send_signal(number)
    error = running.communicate(timeout=300)[1]
    assert running.returncode == 130
    assert error.startswith("Interrupted. ")
    assert "results are kept in run." in error
    assert error.count("\n") == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["partial"] is True


def wait_for_handlers(running: subprocess.Popen[str]) -> None:
    """Until the command handles signals, of which Python itself handles no SIGALRM."""
    handled = 0
    while not handled >> signal.SIGALRM - 1 & 1 and running.poll() is None:
        time.sleep(0.001)
        handled = int(Path(f"/proc/{running.pid}/status").read_text().partition("SigCgt:")[2].split()[0], 16)


def wait_for(path: Path) -> None:
    for _ in range(30_000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} is not there")


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As of the background jobs of a shell script."""
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"os.execv({sys.executable!r}, {[*IFBBENCH, *RUN, '--output', 'run']!r})"
    )
    running = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    while running.poll() is None:
        time.sleep(0.005)
        if (tmp_path / "run").exists():
            running.send_signal(signal.SIGINT)
    assert running.returncode == 0


@pytest.mark.parametrize(("device", "tries"), [("null", 3), pytest.param("cpu", 100, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_time_prints_no_traceback(device: str, tries: int, tmp_path: Path) -> None:
    words = ["run", "documentation", "--device", device, "--max_num_samples", "1", "--quiet", "--time_scale", "0"]
    began = time.monotonic()
    subprocess.run([*IFBBENCH, *words, "--output", "whole"], cwd=tmp_path, check=True)
    whole_s = time.monotonic() - began
    statuses = set()
    for number in range(tries):
        running = subprocess.Popen(
            [*IFBBENCH, *words, "--output", f"run-{number}"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        wait_for_handlers(running)
        time.sleep(whole_s * number / tries)
        running.send_signal(signal.SIGINT)
        error = running.communicate(timeout=300)[1]
        assert "Traceback" not in error, error
        assert running.returncode in (0, 130), error
        statuses.add(running.returncode)
        if (tmp_path / f"run-{number}").exists():
            assert invoke("report", str(tmp_path / f"run-{number}")).exit_code == 0
    assert 130 in statuses
