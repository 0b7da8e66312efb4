"""Kill -9, and a full disk, at each change of a file: every line is valid but the last, every finished request is
reported, and every command reads the directory, and runs it again."""

import asyncio
import gzip
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.compressed import read_pieces
from ifbbench.files import is_part
from ifbbench.progress import Progress
from ifbbench.report.style import STYLE
from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import load_run
from ifbbench.rundir.run_directory import REPEATS_FILE
from ifbbench.serving import server
from ifbbench.serving.config import ServerConfig
from ifbbench.settings.config import RunConfig
from ifbbench.settings.groups.recording import REPORT_FILES
from tests.attack.file_layer import KILLED, command, in_fork, status_of
from tests.attack.readers import read_by_every_command
from tests.endpoint.fake_endpoint import STREAM, Received, Writer, fake_endpoint, token, usage

REQUESTS = 12
SIMULATED = ("--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--quiet", "--max_num_samples", str(REQUESTS))
RUN = ("run", "default", *SIMULATED, "--max_batch_size", "2", "--output")


def run_in(place: Path) -> Sequence[str]:
    return (*RUN, str(place / "run"))


def flush_often() -> None:
    """Files are written in small pieces, and flushed as often as requests end. Charts are not laid out, which takes
    more than half of the time and changes no file, and are small."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from ifbbench import compressed
    from ifbbench.rundir import lines, recorder

    compressed.BUFFER_BYTES = 512
    lines.BYTES_AT_ONCE = 512
    recorder.FLUSH_INTERVAL_S = 0.0
    patch.object(ConstrainedLayoutEngine, "execute").start()
    patch.dict(STYLE, {"savefig.dpi": 40}).start()


def attacked(arguments: Sequence[str], directory: Path, stop_at: int, is_full: bool = False) -> tuple[int, str]:
    """The exit status of a command that is stopped at this change, and what it printed."""
    printed = directory / "printed.txt"
    run = with_requests if arguments[0] == "serve" else with_endpoint if ENDPOINT in arguments else status_of
    status = in_fork(command(arguments, stop_at, is_full, flush_often, run), printed)
    return status, printed.read_text(errors="replace")


def each_change(
    arguments: Callable[[Path], Sequence[str]],
    directory: Path,
    step: int = 1,
    is_full: bool = False,
    before: Callable[[Path], None] = lambda place: None,
) -> Iterator[tuple[Path, int, int, str]]:
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


def check_run(directory: Path, number: int) -> None:
    """Check what was left of a run: nothing, or a directory that every command reads, and runs again. number: of the
    try, which decides what is drawn."""
    if not directory.exists():
        return
    finished = check_lines(directory)
    run = load_run(directory)
    assert figures(run)["requests"]["completed"] == finished
    assert run.partial == (run.summary is None or bool(run.run["partial"]))
    again = [
        "run",
        str(directory),
        "--device",
        "null",
        "--time_scale",
        "0",
        "--max_tokens_in_paged_kvcache",  # the blocks of the default take as long to make as the rest of the run
        "65536",
        "--quiet",
        "--json",
        "--output",
        str(directory.with_name("again")),
    ]
    answers = CliRunner().invoke(main, again)
    assert answers.exit_code == 0, answers.output
    assert json.loads(answers.stdout)["requests"]["completed"] == REQUESTS
    charts = int(number % CHARTED == 0)
    read_by_every_command(directory, directory.with_name("again"), random.Random(number), charts)


CHARTED = 4  # of so many tries, one has a chart drawn
ENDPOINT = "http://endpoint"
# Commands that take seconds, and write few files.
SLOW = ("real", "tune")
# The commands with more changes write whole files one after the other, in the same way.
EACH = 160


def with_requests(arguments: Sequence[str]) -> int:
    """The exit status of a server that gets requests, and is then ended."""
    serve = server.serve

    def run(config: RunConfig, settings: ServerConfig, progress: Progress, report: Callable[[str], None]) -> Any:
        def started(url: str) -> None:
            report(url)
            loop = asyncio.get_running_loop()

            def end() -> None:
                # A server whose disk is full ends by itself, and then has no handler any more.
                if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                    signal.raise_signal(signal.SIGTERM)

            def send() -> None:
                try:
                    with httpx.Client(timeout=300) as client, suppress(httpx.HTTPError):
                        for number in range(3):
                            client.post(f"{url}/v1/completions", json={"prompt": [number, 7], "max_tokens": 2})
                finally:
                    with suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(end)

            threading.Thread(target=send).start()

        return serve(config, settings, progress, started)

    with patch.object(server, "serve", run):
        return status_of(arguments)


def with_endpoint(arguments: Sequence[str]) -> int:
    """The exit status of a command, with a server at ENDPOINT."""

    async def answer(_: Received, writer: Writer) -> None:
        await writer.raw(STREAM)
        for text in " a", " b":
            await writer.event(token(text))
        await writer.event(usage(2))
        await writer.event("[DONE]")
        await writer.end()

    with fake_endpoint(answer, metrics=(200, "running 1\n")) as endpoint:
        return status_of([endpoint.url if word == ENDPOINT else word for word in arguments])


@pytest.mark.usefixtures("without_layout")
@pytest.mark.parametrize("step", [251, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_full", [False, True], ids=["killed", "full"])
def test_a_run_that_is_stopped_at_each_change_of_a_file(
    is_full: bool, step: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    tries = 0
    for place, number, status, printed in each_change(run_in, tmp_path, step, is_full):
        check_run(place / "run", number)
        assert status != 1 or "No space left on device" in printed
        tries += 1
    record_property("tries", f"a run on a {'full disk' if is_full else 'file layer that kills'}: {tries} tries")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a sweep."""
    directory = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda engine, figure: None)
        patched.setitem(STYLE, "savefig.dpi", 40)
        for arguments in (run_in(directory), sweep_in(directory)):
            assert CliRunner().invoke(main, list(arguments)).exit_code == 0
    check_files(directory)
    return directory


def sweep_in(place: Path) -> Sequence[str]:
    return (
        "sweep",
        "default",
        *SIMULATED,
        "--over",
        "max_batch_size=1,2",
        "--processes",
        "1",
        "--output",
        str(place / "sweep"),
    )


REPORT_OPTIONS = tuple(word for name in REPORT_FILES for word in (f"--{name}", f"{name}.txt"))
# Commands that write files, given the directory of a run and a sweep that they may change.
WRITING: dict[str, Callable[[Path], Sequence[str]]] = {
    "run": lambda place: (*run_in(place), *(word if word.startswith("--") else str(place / word)
                                            for word in REPORT_OPTIONS), "--overwrite", "--result_format", "vllm"),
    "steady state": lambda place: (*run_in(place), "--overwrite", "--enable_steady_state"),
    "summary only": lambda place: (*run_in(place), "--overwrite", "--recording", "summary"),
    "compressed": lambda place: (*run_in(place), "--overwrite", "--recording_format", "jsonl.gz"),
    "sweep": lambda place: (*sweep_in(place), "--overwrite"),
    "repeat": lambda place: ("run", "default", *SIMULATED, "--repeat", "2", "--output", str(place / "repeats")),
    "report": lambda place: ("report", str(place / "run"), *(word if word.startswith("--") else str(place / word)
                                                             for word in REPORT_OPTIONS)),
    "plot": lambda place: ("plot", str(place / "run"), "--only", "ttft,bound"),
    "plot --html": lambda place: ("plot", str(place / "sweep"), "--html"),
    "export": lambda place: ("export", str(place / "run")),
    "perfetto": lambda place: ("export", str(place / "run"), "--format", "perfetto"),
    "why": lambda place: ("why", str(place / "run"), "--budget", "0", "--pauses-csv", str(place / "pauses.csv")),
    "dataset": lambda place: ("dataset", "convert", "default", "--to", "gpt-manager", "-o", str(place / "trace.json")),
    "dataset .gz": lambda place: ("dataset", "sample", "default", "-o", str(place / "trace.jsonl.gz")),
    "dataset info": lambda place: ("dataset", "info", "default", "--plot", str(place / "charts")),
    "serve": lambda place: ("serve", "--device", "null", "--max_tokens_in_paged_kvcache", "4096", "--port", "0",
                            "--record", str(place / "traffic"), "--quiet"),
    "endpoint": lambda place: ("run", "default", "--quiet", "--max_num_samples", "4", "--time_scale", "0",
                               "--poll_metrics", "--endpoint", ENDPOINT, "--output", str(place / "endpoint")),
    "calibrate": lambda place: ("calibrate", "--from", str(place / "run"), "--gpu", "h100-sxm", "--model",
                                "llama-3.1-8b", "--output", str(place / "ours.toml"), "--quiet"),
    "synth": lambda place: ("dataset", "synth", "fixed", "--input-len", "5", "--output-len", "5", "--num-requests",
                            "200", "-o", str(place / "trace.jsonl")),
    "triton": lambda place: ("triton", "--model_repository", str(place / "models"), "--device", "null"),
    "real": lambda place: ("run", "default", "--device", "cpu", "--max_prompt_len", "8", "--max_num_samples", "2",
                           "--time_scale", "0", "--quiet", "--profile", "--responses_json", str(place / "tokens.json"),
                           "--max_seq_len", "64", "--reserve", "fixed:2", "--output", str(place / "real")),
    "tune": lambda place: ("tune", "default", *SIMULATED[:-2], "--max_num_samples", "4", "--output",
                           str(place / "tune")),
}  # fmt: skip


@pytest.mark.usefixtures("without_layout")
@pytest.mark.parametrize("name", [one for one in WRITING if one not in (*SLOW, "dataset info", "steady state")])
def test_commands_that_are_stopped_leave_whole_files(name: str, finished: Path, tmp_path: Path) -> None:
    """Every second command is killed, the others find a full disk."""
    check_command(name, [*WRITING].index(name) % 2 == 1, finished, tmp_path, tries=1)


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True], ids=["killed", "full"])
@pytest.mark.parametrize("name", WRITING)
def test_commands_that_are_stopped_anywhere_leave_whole_files(
    name: str, is_full: bool, finished: Path, tmp_path: Path
) -> None:
    """At each change of a command with up to EACH of them, at as many of the others."""
    check_command(name, is_full, finished, tmp_path, tries=EACH)


def check_command(name: str, is_full: bool, finished: Path, directory: Path, tries: int) -> None:
    """Stop a command at up to so many of its changes; then run it to its end in the same place."""
    changes = changes_of(name, finished, directory / "whole")
    draw = random.Random(name)
    for stop_at in sorted(draw.sample(range(1, changes + 1), min(tries, changes))):
        place = directory / str(stop_at)
        shutil.copytree(finished, place)
        status, printed = attacked(WRITING[name](place), place, stop_at, is_full)
        assert "Traceback" not in printed, printed
        # A server flushes its files when it has nothing to do: how often depends on when its requests come. One that
        # has ended by itself had fewer changes than the one that they were counted of, and was not stopped.
        is_over = name == "serve" and status == 0 and int(printed.rpartition("changes ")[2]) < stop_at
        assert is_over or status in ((0, 1) if is_full else (KILLED,)), (stop_at, status, printed)
        check_files(place, finished)
        if name in (
            "sweep",
            "repeat",
            "dataset info",
            "plot",
            "plot --html",
            "export",
            "run",
            "compressed",
            "summary only",
            "tune",
        ):
            again = (*WRITING[name](place), *(["--overwrite"] if name in ("repeat", "tune") else []))
            done = CliRunner().invoke(main, list(again))
            assert done.exit_code == 0, (stop_at, done.output)
        shutil.rmtree(place)


def changes_of(name: str, finished: Path, place: Path) -> int:
    """The number of changes of files of a command, which is run once."""
    if name not in COUNTED:
        shutil.copytree(finished, place)
        status, printed = attacked(WRITING[name](place), place, stop_at=0)
        assert status == 0, printed
        COUNTED[name] = int(printed.rpartition("changes ")[2])
    return COUNTED[name]


COUNTED: dict[str, int] = {}
ENDS = {".png": b"IEND\xaeB`\x82", ".svg": b"</svg>", ".html": b"</html>"}


def contents(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def check_files(directory: Path, before: Path | None = None) -> None:
    """Check that each file is whole, but for those of lines and those that are named as parts; and that every command
    reads each run, but for those that are as in `before`, which is checked."""
    for path in directory.rglob("*"):
        if any(map(is_part, (path, *path.parents))) or not path.is_file() or path.name == "printed.txt":
            continue
        content = path.read_bytes()
        if path.suffix == ".json":
            json.loads(content)
        elif path.suffix in ENDS:
            assert content.rstrip().endswith(ENDS[path.suffix])
        elif path.suffix == ".gz" and path.parent == directory:
            gzip.decompress(content)
        elif path.suffix in (".csv", ".yaml", ".txt", ".perfetto-trace"):
            assert content or path.name == "pauses.csv"
    for run in {path.parent for path in directory.rglob("run.json")}:
        is_new = before is None or contents(run) != contents(before / run.relative_to(directory))
        if not is_part(run) and is_new:
            check_lines(run)
            read_by_every_command(run, run, random.Random(0))
    for table in directory.rglob(REPEATS_FILE):
        for words in (["report"], ["report", "--json"]):
            done = CliRunner().invoke(main, [words[0], str(table.parent), *words[1:]])
            assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "tries", [1, pytest.param(100, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.slow)]
)
def test_kill_9_of_a_process_at_any_time(
    tries: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    words = [sys.executable, "-m", "ifbbench", *RUN]
    began = time.monotonic()
    subprocess.run([*words, str(tmp_path / "whole")], check=True)
    whole_s, left = time.monotonic() - began, 0
    draw = random.Random(tries)
    for number in range(tries):
        place = tmp_path / str(number)
        place.mkdir()
        running = subprocess.Popen([*words, str(place / "run")])
        with suppress(subprocess.TimeoutExpired):
            running.wait(whole_s * draw.uniform(0.3, 1.05))
        running.kill()
        running.wait()
        left += (place / "run").exists()
        check_run(place / "run", number)
        shutil.rmtree(place)
    record_property("tries", f"kill -9 of a process: {tries} kills, {left} left a directory, which is whole")
