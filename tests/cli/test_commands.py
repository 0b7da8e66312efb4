"""`run`, `sweep` and `plot` with pretended runs: what is called, printed and returned."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.progress import NO_PROGRESS
from ifbbench.studies.sweep import KEEP

FIGURES = {"ttft_s": {"p50": 0.1, "p99": 0.2}, "output_throughput_tokens_per_s": 10.0}


@dataclass
class Result:
    directory: Path
    summary: dict[str, Any]
    failed: int = 0
    description: dict[str, Any] = field(default_factory=dict)


def pretend_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


class Loaded(PosixPath):
    """A run in the place of the one in this directory."""

    lacks_requests = False


@pytest.fixture
def runs(monkeypatch):
    """Replaces running, loading and reporting; `failed` requests fail in every run, `calls` are the runs made."""
    pretended = SimpleNamespace(failed=0, calls=[], csv=[])

    def run_trace(source, config, progress, *, owns_process, on_recording, on_recorded):
        pretended.calls.append((source, config, progress))
        on_recorded(Path(config.output))
        return Result(Path(config.output), FIGURES, pretended.failed)

    def run_point(trace, config, progress):
        pretended.calls.append((trace, config, progress))
        return {**FIGURES, "requests": {"failed": pretended.failed}}, None

    monkeypatch.setitem(KEEP, "run", run_point)
    pretend_module(monkeypatch, "ifbbench.replay.run", run_trace=run_trace, RunResult=Result)
    monkeypatch.setattr("ifbbench.rundir.reader.load_run", lambda directory, without=(): Loaded(directory))
    monkeypatch.setattr("ifbbench.rundir.run_directory.is_lost", lambda directory: False)
    monkeypatch.setattr("ifbbench.report.tables.print_report", lambda run, console, known: console.print("the report"))
    monkeypatch.setattr(
        "ifbbench.report.compat.gpt_manager_benchmark.benchmark_lines", lambda run: ["[BENCHMARK] num_samples 1"]
    )
    monkeypatch.setattr("ifbbench.rundir.figures.figures", lambda run: FIGURES)
    monkeypatch.setattr(
        "ifbbench.report.outputs.write_outputs", lambda run, config: pretended.csv.append((run, config.output_csv))
    )
    return pretended


def invoke(*arguments: str):
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_reports_have_the_width_of_other_commands_in_a_pipe(runs, monkeypatch):
    """A pipe has no width of its own; rich would wrap at 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("ifbbench.report.tables.print_report", lambda run, console, known: console.print("x" * 159))
    assert "x" * 159 in invoke("report", "out").stdout.splitlines()
    assert "x" * 159 in invoke("run", "trace.jsonl", "--output", "out").stdout.splitlines()


def test_a_terminal_breaks_lines_between_words_and_a_pipe_has_one_line_for_a_sentence(runs, monkeypatch):
    sentence = " ".join(["scheduler"] * 20)
    monkeypatch.setattr(
        "ifbbench.report.tables.print_report", lambda run, console, known: console.print(sentence, soft_wrap=True)
    )
    assert sentence in invoke("report", "out").stdout.splitlines()
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, a terminal
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.split() for line in invoke("report", "out").stdout.splitlines() if "sched" in line]
    assert [len(words) for words in lines] == [8, 8, 4]


def test_run_reports_and_says_where_results_are(runs):
    done = invoke("run", "trace.jsonl", "--output", "out")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "the report",
        "[BENCHMARK] num_samples 1",
        "Results are in out; `ifbbench plot out` draws them.",
    ]
    assert [(source, config.output) for source, config, _ in runs.calls] == [("trace.jsonl", "out")]


def test_quiet_silences_progress_and_not_tables(runs):
    options = ["--output", "out", "--output_csv", "figures.csv"]
    loud, quiet = invoke("run", *options), invoke("run", *options, "--quiet")
    assert [progress is NO_PROGRESS for _, _, progress in runs.calls] == [False, True]
    assert loud.stdout == quiet.stdout
    assert "the report" in quiet.stdout
    assert runs.csv == [(Path("out"), "figures.csv")] * 2


LINE = "[BENCHMARK] num_samples 1"


@pytest.mark.parametrize(
    ("words", "is_terminal", "are_printed"),
    [
        ("run t.jsonl --output out", False, True),
        ("run t.jsonl --output out", True, False),
        ("run t.jsonl --output out --benchmark_lines", True, True),
        ("run t.jsonl --output out --no-benchmark-lines", False, False),
        ("run --dataset t.jsonl --output out", True, True),
        ("run t.jsonl --multi_block_mode true --output out", True, True),
        ("run --dataset t.jsonl --no_benchmark_lines --output out", True, False),
        ("report out", False, True),
        ("report out", True, False),
        ("report out --benchmark_lines", True, True),
    ],
)
def test_lines_of_gpt_manager_benchmark_are_for_pipes_and_for_those_that_ask(
    runs, monkeypatch, words, is_terminal, are_printed
):
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda stream: is_terminal, raising=False)
    printed = invoke(*words.split()).stdout
    assert (LINE in printed.splitlines()) == are_printed
    assert "the report" in printed


def test_json_is_all_that_is_on_standard_output(runs, tmp_path):
    assert json.loads(invoke("run", "--output", "out", "--json").stdout) == FIGURES
    assert json.loads(invoke("report", "out", "--json").stdout) == FIGURES
    rows = json.loads(invoke("sweep", "--over", "seed=1,2", "--output", str(tmp_path / "s"), "--json").stdout)
    assert [(row["seed"], row["ttft_s.p99"]) for row in rows] == [(1, 0.2), (2, 0.2)]


def test_failed_requests_are_exit_status_1(runs):
    runs.failed = 2
    done = invoke("run", "--output", "out", "--quiet")
    assert done.exit_code == 1
    assert done.stderr.startswith("2 requests failed; ")


def test_sweep_runs_each_point_and_draws(runs, tmp_path):
    done = invoke("sweep", "--over", "max_batch_size=8,16", "--over", "seed=1,2", "--output", str(tmp_path / "s"))
    assert done.exit_code == 0, done.output
    assert [(config.max_batch_size, config.seed) for _, config, _ in runs.calls] == [(8, 1), (8, 2), (16, 1), (16, 2)]
    assert ["max_batch_size", "seed"] in [line.split()[:2] for line in done.stdout.splitlines()]
    assert list((tmp_path / "s").rglob("*.png"))


def test_sweep_with_failed_requests_is_exit_status_1(runs, tmp_path):
    runs.failed = 1
    done = invoke("sweep", "--over", "seed=1,2", "--output", str(tmp_path / "s"), "--quiet")
    assert done.exit_code == 1
    assert done.stderr == "2 of 2 points failed or had failed requests.\n"


def test_sweep_checks_every_value_before_the_first_run(runs, tmp_path):
    done = invoke("sweep", "--over", "max_batch_size=8,0", "--output", str(tmp_path / "s"))
    assert done.exit_code == 2
    assert runs.calls == []
    assert not (tmp_path / "s").exists()


@pytest.mark.usefixtures("without_layout")
def test_plot_draws_each_run_and_the_sweep_and_lists_files(runs, tmp_path, monkeypatch):
    invoke("sweep", "--over", "seed=1,2", "--output", str(tmp_path), "--quiet")
    for name in ("seed=1", "seed=2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    monkeypatch.setattr("ifbbench.report.charts.plot_run", lambda run, **_: [run / "charts" / "timeline.png"])
    done = invoke("plot", str(tmp_path))
    assert done.exit_code == 0, done.output
    written = [str(Path(line).relative_to(tmp_path)) for line in done.stdout.splitlines()]
    assert written[-2:] == ["seed=1/charts/timeline.png", "seed=2/charts/timeline.png"]
    assert any("sweep" in name for name in written[:-2])


def test_plot_of_nothing_is_exit_status_2(tmp_path):
    done = invoke("plot", str(tmp_path / "none"))
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: ")
