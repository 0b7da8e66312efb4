"""A run that breaks off in the middle keeps what it had done, says so, and can be reported."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ifbbench.batching.batch import Batch
from ifbbench.cli.main import main
from ifbbench.execution.null import NullExecutor

ARGUMENTS = ["run", "--device", "null", "--time_scale", "0", "--max_batch_size", "8", "--quiet", "--output"]


@pytest.fixture
def broken_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Path, Result]:
    """The bundled trace on an executor that raises `request.param` in iteration 300."""

    def submit(self: NullExecutor, batch: Batch) -> None:
        if batch.iteration == 300:
            raise request.param

    monkeypatch.setattr(NullExecutor, "submit", submit)
    return tmp_path / "run", CliRunner().invoke(main, [*ARGUMENTS, str(tmp_path / "run")])


@pytest.mark.parametrize("broken_run", [RuntimeError("device lost")], indirect=True)
def test_a_failing_executor_ends_the_run_with_status_1(broken_run: tuple[Path, Result]) -> None:
    directory, result = broken_run
    assert result.exit_code == 1
    assert "iteration 300: device lost" in result.output
    # The one that failed is there too, with what it was to run.
    check_partial(directory, result, iterations=301)
    failed = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]
    errors = {row["error"] for row in failed if row["outcome"] == "failed"}
    assert errors == {"the executor failed: device lost"}


@pytest.mark.parametrize("broken_run", [KeyboardInterrupt()], indirect=True)
def test_an_interrupt_keeps_the_results(broken_run: tuple[Path, Result]) -> None:
    directory, result = broken_run
    assert result.exit_code == 130
    check_partial(directory, result, iterations=300)


def check_partial(directory: Path, result: Result, iterations: int) -> None:
    assert str(directory) in result.output
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["partial"] is True
    assert json.loads((directory / "run.json").read_text())["partial"] is True
    assert 0 < summary["requests"]["completed"] < summary["requests"]["total"]
    assert len((directory / "iterations.jsonl").read_text().splitlines()) == summary["iterations"] == iterations
    report = CliRunner().invoke(main, ["report", str(directory)])
    assert report.exit_code == 0
    assert "partial" in report.output.lower()
