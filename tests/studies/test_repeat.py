"""Repeats of a run: seeds, directories, means, confidence intervals, and a repeat that fails."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.analysis.confidence import student_t, summary_of
from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.replay.single import RunResult
from ifbbench.settings.config import RunConfig
from ifbbench.studies.point_table import read_sweep
from ifbbench.studies.repeat import run_repeats


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (30, 2.0423), (1000, 1.9623)],
)
def test_quantiles_of_students_t(degrees: int, expected: float) -> None:
    assert student_t(0.95, degrees) == pytest.approx(expected, abs=6e-5)


def test_means_and_intervals_of_every_figure() -> None:
    summaries: list[dict[str, Any]] = [
        {"pauses": 1, "ttft_s": {"p99": 1.0, "max": None}, "partial": False, "schedule_digest": "a", "new": 1.0},
        {"pauses": 3, "ttft_s": {"p99": 2.0, "max": None}, "partial": False, "schedule_digest": "b"},
        {"pauses": 2, "ttft_s": {"p99": 3.0, "max": 4.0}, "partial": False, "schedule_digest": "a"},
    ]
    summary = summary_of(summaries, 4)
    intervals = summary.pop("confidence_interval_95")
    assert summary == {
        "repeats": {"total": 4, "completed": 3},
        "pauses": 2.0,
        "ttft_s": {"p99": 2.0, "max": 4.0},
        "partial": False,
        "schedule_digest": None,
        "new": 1.0,
    }
    half_width = 4.30265 / 3**0.5
    assert intervals["ttft_s"]["p99"] == pytest.approx([2 - half_width, 2 + half_width], rel=1e-5)
    assert intervals["pauses"] == intervals["ttft_s"]["p99"]
    assert (intervals["ttft_s"]["max"], intervals["new"]) == (None, None), "of one value"
    assert "partial" not in intervals


class PretendedRuns:
    """Writes the files of a run. errors: by seed."""

    def __init__(self, **errors: BaseException) -> None:
        self.errors = errors
        self.configs: list[RunConfig] = []

    def __call__(self, source: str | None, config: RunConfig) -> RunResult:
        self.configs.append(config)
        if error := self.errors.get(f"seed{config.seed}"):
            raise error
        directory = Path(str(config.output))
        directory.mkdir()
        (directory / "run.json").write_text("{}")
        return RunResult(directory, {"ttft_s": {"p99": config.seed / 10}}, 0)


def repeat(runs: PretendedRuns, directory: Path, count: int = 3, **settings: Any) -> tuple[RunResult, list[str]]:
    said: list[str] = []
    base = RunConfig(output=str(directory), seed=4, **settings)
    result = run_repeats(None, base, count, runs, lambda ended, points, label, error: said.append(f"{label}: {error}"))
    return result, said


def columns(directory: Path, *names: str) -> list[Any]:
    with (directory / "repeats.csv").open(newline="") as file:
        return [tuple(row[name] for name in names) for row in csv.DictReader(file)]


def test_each_repeat_has_a_seed_and_a_directory(tmp_path: Path) -> None:
    runs = PretendedRuns()
    result, said = repeat(runs, tmp_path / "r")
    assert [config.seed for config in runs.configs] == [4, 5, 6]
    assert [Path(str(config.output)).name for config in runs.configs] == ["repeat-1", "repeat-2", "repeat-3"]
    assert columns(tmp_path / "r", "seed", "ttft_s.p99") == [("4", "0.4"), ("5", "0.5"), ("6", "0.6")]
    assert result.summary == json.loads((tmp_path / "r" / "summary.json").read_text())
    assert result.summary["ttft_s"]["p99"] == pytest.approx(0.5)
    assert (result.failed, said[-1]) == (0, "repeat-3: ")


@pytest.mark.parametrize("error", [InputError("too small"), RuntimeError("too small")])
def test_a_repeat_that_fails_does_not_lose_the_others(tmp_path: Path, error: Exception) -> None:
    result, said = repeat(PretendedRuns(seed5=error), tmp_path / "r")
    assert columns(tmp_path / "r", "seed", "error") == [("4", ""), ("5", "too small"), ("6", "")]
    assert result.failed == 1
    assert result.summary["repeats"] == {"total": 3, "completed": 2}
    assert said[1] == "repeat-2: too small"


def test_bad_settings_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too small"):
        repeat(PretendedRuns(seed4=InputError("too small")), tmp_path / "r")
    assert not (tmp_path / "r").exists()
    with pytest.raises(InputError, match="--output_csv names one file, but --repeat makes many runs"):
        repeat(PretendedRuns(), tmp_path / "r", output_csv="figures.csv")


def test_an_interrupt_keeps_the_repeats_that_ended(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        repeat(PretendedRuns(seed6=KeyboardInterrupt()), tmp_path / "r")
    assert "2 of 3 repeats are kept" in caught.value.__notes__[0]
    assert len(columns(tmp_path / "r", "seed")) == 2


def test_existing_results_are_replaced_only_with_overwrite(tmp_path: Path) -> None:
    repeat(PretendedRuns(), tmp_path / "r", 3)
    with pytest.raises(InputError, match="--overwrite"):
        repeat(PretendedRuns(), tmp_path / "r", 2)
    (tmp_path / "r" / "notes.txt").write_text("kept")
    repeat(PretendedRuns(), tmp_path / "r", 2, overwrite=True)
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "notes.txt",
        "repeat-1",
        "repeat-2",
        "repeats.csv",
        "summary.json",
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(InputError, match="is a run"):
        repeat(PretendedRuns(), tmp_path / "run", 2, overwrite=True)


def test_the_command_and_its_report(tmp_path: Path) -> None:
    directory = tmp_path / "r"
    options = ["--device", "sim:h100-sxm", "--model", "tiny", "--request_rate", "30", "--burstiness", "0.5"]
    options += ["--max_num_samples", "20"]
    done = CliRunner().invoke(main, ["run", "default", *options, "--repeat", "3", "--output", str(directory)])
    assert done.exit_code == 0, done.output
    runs = [json.loads((directory / f"repeat-{number}" / "summary.json").read_text()) for number in (1, 2, 3)]
    rates = [run["request_throughput_per_s"] for run in runs]
    assert len(set(rates)) == 3, "each has its own seed"
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["request_throughput_per_s"] == pytest.approx(sum(rates) / 3)
    low, high = summary["confidence_interval_95"]["request_throughput_per_s"]
    assert low < summary["request_throughput_per_s"] < high
    reported = CliRunner().invoke(main, ["report", str(directory)])
    assert reported.exit_code == 0
    for output in (done.output, reported.output):
        assert "3 of 3 repeats completed" in output
        assert "±" in output
    assert CliRunner().invoke(main, ["report", str(directory / "repeat-2")]).exit_code == 0
    refused = CliRunner().invoke(main, ["report", str(directory), "--output_csv", str(tmp_path / "figures.csv")])
    assert (refused.exit_code, "--output_csv: is for one run" in refused.output) == (2, True)


def test_a_repeat_with_failed_requests_fails_the_command(tmp_path: Path) -> None:
    options = ["--device", "sim:h100-sxm", "--model", "tiny", "--max_seq_len", "300", "--quiet"]
    options += ["--output", str(tmp_path / "r")]
    done = CliRunner().invoke(main, ["run", "default", "--repeat", "2", *options])
    assert done.exit_code == 1
    assert "2 of 2 repeats failed or had failed requests." in done.output


def test_the_table_of_repeats_is_that_of_a_sweep_over_seeds(tmp_path: Path) -> None:
    repeat(PretendedRuns(), tmp_path / "r")
    (tmp_path / "r" / "repeats.csv").rename(tmp_path / "r" / "sweep.csv")
    assert read_sweep(tmp_path / "r").over == ["seed"]
