"""The commands that read a run directory, and what a kill leaves of one.

A command reads a directory if it ends with status 0 or, where there is nothing to show, with an error that says so."""

import json
import random
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.compressed import read_pieces
from ifbbench.report.charts import CHARTS, SUMMARY_CHARTS
from ifbbench.settings.groups.recording import REPORT_FILES

CHART_NAMES = tuple(name for name in CHARTS if name != "server")  # which is of runs against an endpoint
# What a command may say of a run without iterations or requests, of one that has no record of them, and of a single
# iteration.
NOTHING = ("no iteration is recorded", "nothing to draw")
EMPTY_TRACE = ("holds no request",)
ONLY_SUMMARY = ("recorded with --recording summary",)
NOT_RECORDED = ("had no such iteration", "statistics were thinned")


def whole_lines(directory: Path, name: str) -> list[bytes]:
    """The lines of a file of lines in a run directory, without one that was cut off."""
    content = b""
    for path in directory.glob(f"{name}.jsonl*"):
        try:
            for piece in read_pieces(path):
                content += piece
        except EOFError:
            pass
    return content.split(b"\n")[:-1]


def readers(directory: Path, other: Path, draw: random.Random, charts: int, tries: bool) -> Iterator[Sequence[str]]:
    """The command lines that read a run directory. other: another one, to be compared with. charts: how many charts
    are drawn; the page, if any are; and both runs together, if several are. tries: `why` tries other settings."""
    run, aside = str(directory), str(directory.with_name(f"{directory.name}-aside"))
    described = json.loads((directory / "run.json").read_text())
    is_summary, is_of_client = described["config"].get("recording") == "summary", "endpoint" in described
    ids = [str(json.loads(line)["request_id"]) for line in whole_lines(directory, "trace")]
    last = max(len(whole_lines(directory, name)) for name in ("iterations", "steps"))
    yield "report", run
    yield "report", run, "--json"
    yield "report", run, f"--{draw.choice(REPORT_FILES)}", aside, "--overwrite"
    if not is_summary:
        yield "report", run, "--json", "--steady-state"
    yield "why", run, "--budget", "0"
    yield "why", run, "--json", "--budget", "0"
    if not is_of_client:
        # Trials of other settings simulate the run, in processes of their own.
        yield "why", run, "--pauses-csv", aside, "--overwrite", *([] if tries else ["--budget", "0"])
        yield "why", run, "--iteration", str(draw.randrange(last or 1))
        yield "watch", run, "--once"
    if ids:
        yield "why", run, "--request", draw.choice(ids), *draw.choice(([], ["--json"]))
    yield "compare", run, str(other)
    yield "compare", str(other), run, "--json", "--all"
    yield "config", "show", run, *draw.choice(([], ["--json"], ["--changed"]))
    yield "dataset", "info", run
    yield "export", run, "--format", draw.choice(("csv", "perfetto"))
    if charts:
        known = SUMMARY_CHARTS if is_summary else CHART_NAMES
        yield "plot", run, "--format", "svg", "--only", ",".join(draw.sample(known, min(charts, len(known))))
        yield "plot", run, "--html"
    if charts > 1 and run != str(other):
        yield "plot", run, str(other), "--overlay", "--format", "svg"


def read_by_every_command(
    directory: Path, other: Path, draw: random.Random, charts: int = 0, tries: bool | None = None
) -> None:
    """Check that each of `readers` reads the run directory. Other settings are tried where there are charts, if
    `tries` does not say it."""
    # Of static batches, steps are the iterations of the loop.
    has_iterations = bool(whole_lines(directory, "steps" if [*directory.glob("steps*")] else "iterations"))
    for words in readers(directory, other, draw, charts, bool(charts) if tries is None else tries):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            done = CliRunner().invoke(main, list(words))
        expected = ONLY_SUMMARY + NOTHING * (not has_iterations) + NOT_RECORDED * ("--iteration" in words)
        expected += EMPTY_TRACE * (words[0] == "dataset")
        is_refused = done.exit_code == 2 and any(text in done.output for text in expected)
        assert done.exit_code == 0 or is_refused, f"ifbbench {' '.join(words)}: {done.exit_code}\n{done.output}"
        assert "Traceback" not in done.output, done.output


def cut_off(directory: Path, draw: random.Random) -> None:
    """Cut the files of lines as a kill between two flushes does: each has come as far as its own buffer. The trace is
    whole before a run begins."""
    for path in sorted(directory.glob("*.jsonl*")):
        how = draw.random()
        if path.name.startswith("trace"):
            continue
        if path.name.startswith("open_spans"):  # in one piece
            if how < 0.5:
                path.unlink()
        elif how < 0.1:
            path.unlink()
        elif how < 0.8:
            content = path.read_bytes()
            path.write_bytes(content[: 0 if how < 0.3 else draw.randrange(len(content) + 1)])


def copied(directory: Path, to: Path) -> Path:
    """A copy of a run directory, without charts and exports."""
    shutil.copytree(directory, to, ignore=shutil.ignore_patterns("charts", "export"))
    return to
