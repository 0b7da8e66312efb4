"""Sweeps: the values of `--over`, and directories, table and failing points with a fake run function."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.planning.sweep import grid, parse_axes, parse_axis, point_label, read_sweep, run_sweep
from ifbbench.replay.run import RunResult


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("max_batch_size=8,16", ("max_batch_size", [8, 16])),
        ("max-batch-size = 8, 16", ("max_batch_size", [8, 16])),
        ("scheduler_policy=max_utilization", ("policy", ["max_utilization"])),
        ("enable_chunked_context=true,false", ("enable_chunked_context", [True, False])),
        ("time_scale=0,0.5", ("time_scale", [0.0, 0.5])),
    ],
)
def test_an_axis(text, axis):
    assert parse_axis(text) == axis


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_batch_size", "KEY=V1,V2"),
        ("=8", "KEY=V1,V2"),
        ("max_batch_size=", "KEY=V1,V2"),
        ("max_batch_size=8,,16", "a value is empty"),
        ("max_batch_size=8,08", "08 is there twice"),
        ("max_batch_size=8,0", "at least 1"),
        ("policy=max_utilization,best", "'best'"),
        ("enable_chunked_context=perhaps", "true or false"),
        ("batch_size=8", "max_batch_size"),
        ("output=a,b", "output says where results go"),
    ],
)
def test_a_bad_axis_names_what_was_expected(text, words):
    with pytest.raises(InputError) as error:
        parse_axis(text)
    assert words in str(error.value)


def test_a_setting_has_one_axis():
    with pytest.raises(InputError, match="--over policy is given 2 times"):
        parse_axes(["policy=max_utilization", "scheduler_policy=guaranteed_no_evict"])


def test_a_sweep_needs_an_axis():
    done = CliRunner().invoke(main, ["sweep"])
    assert done.exit_code == 2
    assert "Missing option '--over'" in done.output


def test_several_axes_make_a_grid():
    points = grid({"seed": [1, 2], "time_scale": [0.0, 1.0]})
    assert [tuple(point.values()) for point in points] == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]


def test_labels_are_file_names_and_differ():
    assert point_label({"seed": 8, "skip_bad_rows": True}) == "seed=8,skip_bad_rows=true"
    labels = {point_label({"model": model}) for model in ("a/b", "a-b", "a,b", "a%2Fb")}
    assert len(labels) == 4
    assert not any("/" in label for label in labels)


@dataclass
class PretendedRuns:
    """Writes the files of a run and records the points. errors, failed: the batch sizes at which runs fail."""

    errors: dict[int, BaseException] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    configs: list[RunConfig] = field(default_factory=list)

    def __call__(self, source: str | None, config: RunConfig) -> RunResult:
        self.configs.append(config)
        size = config.max_batch_size or 0
        if size in self.errors:
            raise self.errors[size]
        directory = Path(str(config.output))
        directory.mkdir()
        (directory / "run.json").write_text("{}")
        return RunResult(directory, {"ttft_s": {"p99": size / 10}, "partial": False}, self.failed.get(size, 0))


def sweep(runs: PretendedRuns, directory: Path, *over: str, **values: Any):
    calls: list[tuple[int, int, str, str]] = []
    base = RunConfig(output=str(directory), **values)
    result = run_sweep(None, base, parse_axes(over), runs, lambda *point: calls.append(point))
    return result, calls


def test_each_point_has_a_directory_and_a_row(tmp_path):
    result, calls = sweep(PretendedRuns(), tmp_path / "s", "max_batch_size=8,16", "seed=1,2", max_num_tokens=64)
    table = read_sweep(result.directory)
    assert table.over == ["max_batch_size", "seed"]
    assert [(row["max_batch_size"], row["seed"], row["ttft_s.p99"]) for row in table.rows] == [
        (8, 1, 0.8), (8, 2, 0.8), (16, 1, 1.6), (16, 2, 1.6),
    ]  # fmt: skip
    first = table.rows[0]
    assert (first["error"], first["max_num_tokens"], first["partial"]) == (None, 64, False)
    assert (tmp_path / "s" / "max_batch_size=8,seed=1" / "run.json").is_file()
    assert (result.points, result.failed) == (4, 0)
    assert calls[-1] == (4, 4, "max_batch_size=16,seed=2", "")


@pytest.mark.parametrize("error", [InputError("too small\nfor a block"), RuntimeError("too small for a block")])
def test_a_failing_point_is_kept_and_the_sweep_goes_on(tmp_path, error):
    result, _ = sweep(PretendedRuns(errors={8: error}), tmp_path / "s", "max_batch_size=8,16")
    table = read_sweep(result.directory)
    assert [row["error"] for row in table.rows] == ["too small for a block", None]
    assert [row["ttft_s.p99"] for row in table.rows] == [None, 1.6]
    assert table.finished == table.rows[1:]
    assert result.failed == 1


def test_failed_requests_fail_the_point_but_keep_its_figures(tmp_path):
    result, _ = sweep(PretendedRuns(failed={8: 3}), tmp_path / "s", "max_batch_size=8")
    assert result.failed == 1
    assert read_sweep(result.directory).rows[0]["ttft_s.p99"] == 0.8


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), TypeError("a mistake in the code")])
def test_what_was_done_before_a_stop_is_kept(tmp_path, stop):
    with pytest.raises(type(stop)):
        sweep(PretendedRuns(errors={16: stop}), tmp_path / "s", "max_batch_size=8,16,32")
    assert [row["max_batch_size"] for row in read_sweep(tmp_path / "s").rows] == [8]


def test_an_interrupt_says_what_is_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt) as stopped:
        sweep(PretendedRuns(errors={16: KeyboardInterrupt()}), tmp_path / "s", "max_batch_size=8,16")
    assert stopped.value.__notes__ == [f"1 of 2 points are kept in {tmp_path / 's'}."]


def test_an_existing_sweep_is_refused_and_left_alone(tmp_path):
    sweep(PretendedRuns(), tmp_path / "s", "max_batch_size=8")
    runs = PretendedRuns()
    with pytest.raises(InputError, match="--overwrite"):
        sweep(runs, tmp_path / "s", "max_batch_size=16")
    assert runs.configs == []
    assert read_sweep(tmp_path / "s").rows[0]["max_batch_size"] == 8


def test_overwrite_replaces_runs_and_nothing_else(tmp_path):
    sweep(PretendedRuns(), tmp_path / "s", "max_batch_size=8")
    (tmp_path / "s" / "notes").mkdir()
    sweep(PretendedRuns(), tmp_path / "s", "max_batch_size=16", overwrite=True)
    names = sorted(item.name for item in (tmp_path / "s").iterdir())
    assert names == ["max_batch_size=16", "notes", "sweep.csv"]


def test_overwrite_deletes_only_the_runs_that_the_table_names(tmp_path):
    """A directory of results may hold other runs: of `run`, of another sweep, and one named like a point."""
    directory = tmp_path / "results"
    sweep(PretendedRuns(), directory, "max_batch_size=8,16")
    others = [directory / name for name in ("chat", "seed=1", "max_batch_size=32")]
    for other in others:
        other.mkdir()
        (other / "run.json").write_text("{}")
    sweep(PretendedRuns(), directory, "max_batch_size=16", overwrite=True)
    assert all((other / "run.json").is_file() for other in others)
    assert sorted(item.name for item in directory.iterdir()) == sorted(
        ["max_batch_size=16", "sweep.csv", *(other.name for other in others)]
    )


def test_overwrite_deletes_nothing_outside_of_the_sweep_directory(tmp_path):
    directory = tmp_path / "s"
    for name in ("s", "elsewhere", "elsewhere=1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    rows = ["..", str(tmp_path / "elsewhere"), "../elsewhere=1", str(directory), "", "notes=1"]
    (directory / "sweep.csv").write_text("seed,error,output\n" + "".join(f"1,,{row}\n" for row in rows))
    (directory / "notes=1").write_text("a file")
    sweep(PretendedRuns(), directory, "seed=2", overwrite=True)
    assert (tmp_path / "elsewhere" / "run.json").is_file()
    assert (tmp_path / "elsewhere=1" / "run.json").is_file()
    assert (directory / "notes=1").read_text() == "a file"


def test_overwrite_refuses_a_table_that_is_no_sweep(tmp_path):
    (tmp_path / "sweep.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no column `error`"):
        sweep(PretendedRuns(), tmp_path, "seed=2", overwrite=True)
    assert (tmp_path / "sweep.csv").read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("values", [{"output_csv": "a.csv"}, {"responses_json": "a.json"}, {"report_json": "b.json"}])
def test_one_file_for_all_points_is_refused(tmp_path, values):
    with pytest.raises(InputError, match="names one file"):
        sweep(PretendedRuns(), tmp_path / "s", "seed=1,2", **values)


def test_a_missing_trace_is_refused_before_anything_is_made(tmp_path):
    base = RunConfig(output=str(tmp_path / "s"))
    with pytest.raises(InputError, match=r"none\.jsonl"):
        run_sweep(str(tmp_path / "none.jsonl"), base, parse_axes(["seed=1"]), PretendedRuns(), lambda *_: None)
    assert not (tmp_path / "s").exists()


def test_the_axes_of_a_grid_are_joined_in_one_column(tmp_path):
    result, _ = sweep(PretendedRuns(), tmp_path / "s", "max_batch_size=8", "seed=1,2")
    table, axis = read_sweep(result.directory).with_one_axis()
    assert axis == "max_batch_size, seed"
    assert [row[axis] for row in table.rows] == ["8, 1", "8, 2"]


def test_a_table_that_is_no_sweep_is_refused(tmp_path):
    (tmp_path / "sweep.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no column `error`"):
        read_sweep(tmp_path)
