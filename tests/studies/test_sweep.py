"""Sweeps: directories, table, failing points and resumption, with pretended and with simulated runs."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from click.testing import CliRunner

import ifbbench.studies.sweep as sweep_module
from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.progress import Progress
from ifbbench.replay.run import summarise_run
from ifbbench.settings.config import RunConfig
from ifbbench.studies.grid import grid, parse_axes
from ifbbench.studies.point_table import read_sweep
from ifbbench.studies.sweep import MAX_KEPT_RUNS, LocalProcesses, remove_runs, run_sweep
from ifbbench.workload.load import read_source
from ifbbench.workload.trace import Trace
from tests.processes import check_ended, children_of
from tests.studies.held_policy import ENDED, POINTS


@cache
def whole_summary() -> dict[str, Any]:
    return summarise_run(None, RunConfig(device="null", time_scale=0))


@dataclass
class PretendedRuns:
    """Writes the files of a run and records the points. errors, failed: the batch sizes at which runs fail."""

    errors: dict[int, BaseException] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    configs: list[RunConfig] = field(default_factory=list)

    def __call__(self, trace: Trace, config: RunConfig, progress: Progress) -> tuple[dict[str, Any], None]:
        self.configs.append(config)
        size = config.max_batch_size or 0
        if size in self.errors:
            raise self.errors[size]
        directory = Path(str(config.output))
        remove_runs([directory])
        directory.mkdir(parents=True)
        (directory / "run.json").write_text("{}")
        (directory / "summary.json").write_text("{}")
        whole = whole_summary()
        ttft_s, counts = whole["ttft_s"] | {"p99": size / 10}, whole["requests"] | {"failed": self.failed.get(size, 0)}
        return whole | {"ttft_s": ttft_s, "requests": counts}, None


@pytest.fixture
def runs(monkeypatch):
    pretended = PretendedRuns()
    monkeypatch.setitem(sweep_module.KEEP, "run", pretended)
    return pretended


def sweep(directory: Path, *over: str, **values: Any):
    calls: list[tuple[int, int, str, str]] = []
    base = RunConfig(output=str(directory), **values)
    result = run_sweep(None, base, grid(parse_axes(over)), lambda *point: calls.append(point))
    return result, calls


def test_each_point_has_a_directory_and_a_row(tmp_path, runs):
    result, calls = sweep(tmp_path / "s", "max_batch_size=8,16", "seed=1,2", max_num_tokens=64)
    table = read_sweep(result.directory)
    assert table.over == ["max_batch_size", "seed"]
    assert [(row["max_batch_size"], row["seed"], row["ttft_s.p99"]) for row in table.rows] == [
        (8, 1, 0.8),
        (8, 2, 0.8),
        (16, 1, 1.6),
        (16, 2, 1.6),
    ]
    first = table.rows[0]
    assert (first["error"], first["max_num_tokens"], first["partial"]) == (None, 64, False)
    assert (tmp_path / "s" / "max_batch_size=8,seed=1" / "run.json").is_file()
    assert (len(result.rows), result.failed, result.resumed) == (4, 0, 0)
    assert calls[-1] == (4, 4, "max_batch_size=16,seed=2", "")


@pytest.mark.parametrize("error", [InputError("too small\nfor a block"), RuntimeError("too small for a block")])
def test_a_failing_point_is_kept_and_the_sweep_goes_on(tmp_path, error, runs):
    runs.errors = {8: error}
    result, _ = sweep(tmp_path / "s", "max_batch_size=8,16")
    table = read_sweep(result.directory)
    assert [row["error"] for row in table.rows] == ["too small for a block", None]
    assert [row["ttft_s.p99"] for row in table.rows] == [None, 1.6]
    assert table.finished == table.rows[1:]
    assert result.failed == 1


def test_failed_requests_fail_the_point_but_keep_its_figures(tmp_path, runs):
    runs.failed = {8: 3}
    result, _ = sweep(tmp_path / "s", "max_batch_size=8")
    assert result.failed == 1
    assert read_sweep(result.directory).rows[0]["ttft_s.p99"] == 0.8


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), TypeError("a mistake in the code")])
def test_what_was_done_before_a_stop_is_kept(tmp_path, stop, runs):
    runs.errors = {16: stop}
    with pytest.raises(type(stop)):
        sweep(tmp_path / "s", "max_batch_size=8,16,32")
    assert [row["max_batch_size"] for row in read_sweep(tmp_path / "s").rows] == [8]


def test_an_interrupt_says_what_is_kept(tmp_path, runs):
    runs.errors = {16: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt) as stopped:
        sweep(tmp_path / "s", "max_batch_size=8,16")
    assert stopped.value.__notes__ == [f"1 of 2 runs are kept in {tmp_path / 's'}; the same command goes on there."]


def test_an_existing_sweep_is_refused_and_left_alone(tmp_path, runs):
    sweep(tmp_path / "s", "max_batch_size=8")
    runs.configs.clear()
    with pytest.raises(InputError, match="--overwrite"):
        sweep(tmp_path / "s", "max_batch_size=16")
    assert runs.configs == []
    assert read_sweep(tmp_path / "s").rows[0]["max_batch_size"] == 8


def test_overwrite_replaces_runs_and_nothing_else(tmp_path, runs):
    sweep(tmp_path / "s", "max_batch_size=8")
    (tmp_path / "s" / "notes").mkdir()
    sweep(tmp_path / "s", "max_batch_size=16", overwrite=True)
    names = sorted(item.name for item in (tmp_path / "s").iterdir())
    assert names == ["max_batch_size=16", "notes", "points.jsonl", "sweep.csv", "sweep.json"]


def test_overwrite_deletes_only_the_runs_that_the_table_names(tmp_path, runs):
    """A directory of results may hold other runs: of `run`, of another sweep, and one named like a point."""
    directory = tmp_path / "results"
    sweep(directory, "max_batch_size=8,16")
    others = [directory / name for name in ("chat", "seed=1", "max_batch_size=32")]
    for other in others:
        other.mkdir()
        (other / "run.json").write_text("{}")
    sweep(directory, "max_batch_size=16", overwrite=True)
    assert all((other / "run.json").is_file() for other in others)
    assert sorted(item.name for item in directory.iterdir()) == sorted(
        ["max_batch_size=16", "points.jsonl", "sweep.csv", "sweep.json", *(other.name for other in others)]
    )


def test_overwrite_deletes_nothing_outside_of_the_sweep_directory(tmp_path, runs):
    directory = tmp_path / "s"
    for name in ("s", "elsewhere", "elsewhere=1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    rows = ["..", str(tmp_path / "elsewhere"), "../elsewhere=1", str(directory), "", "notes=1"]
    (directory / "sweep.csv").write_text("seed,error,output\n" + "".join(f"1,,{row}\n" for row in rows))
    (directory / "notes=1").write_text("a file")
    sweep(directory, "seed=2", overwrite=True)
    assert (tmp_path / "elsewhere" / "run.json").is_file()
    assert (tmp_path / "elsewhere=1" / "run.json").is_file()
    assert (directory / "notes=1").read_text() == "a file"


def test_overwrite_refuses_a_table_that_is_no_sweep(tmp_path, runs):
    (tmp_path / "sweep.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no column `error`"):
        sweep(tmp_path, "seed=2", overwrite=True)
    assert (tmp_path / "sweep.csv").read_text() == "a,b\n1,2\n"


def test_overwrite_replaces_a_sweep_whose_table_is_damaged(tmp_path, runs):
    sweep(tmp_path, "max_batch_size=8,16")
    (tmp_path / "sweep.csv").write_bytes(b"\xff\x00")
    sweep(tmp_path, "max_batch_size=8", overwrite=True)
    assert [row["max_batch_size"] for row in read_sweep(tmp_path).rows] == [8]
    assert not (tmp_path / "max_batch_size=16").exists()


@pytest.mark.parametrize("values", [{"policy": "none.such:Policy"}, {"model": "none"}, {"device": "sim:none"}])
def test_overwrite_removes_nothing_for_settings_that_no_point_can_have(tmp_path, runs, values):
    sweep(tmp_path, "max_batch_size=8,16")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError):
        sweep(tmp_path, "max_batch_size=8,16", overwrite=True, **({"device": "null"} | values))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"key": 1}, "Expected `str`, got `int` - at `$.key`"),
        ({"warnings": None}, "Expected `array`, got `null`"),
        ({"summary": {}}, "missing required field `requests`"),
        ({"summary": []}, "Expected `object`, got `array`"),
    ],
)
def test_a_damaged_line_of_an_ended_run_is_named(tmp_path, runs, change, expected):
    runs.errors = {16: InputError("too small")}
    sweep(tmp_path, "max_batch_size=8,16")
    path = tmp_path / "points.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | change)}\n")
    with pytest.raises(InputError) as raised:
        sweep(tmp_path, "max_batch_size=8,16")
    assert "points.jsonl, line 2: " in str(raised.value)
    assert expected in str(raised.value)
    sweep(tmp_path, "max_batch_size=8,16", overwrite=True)


@pytest.mark.parametrize("values", [{"output_csv": "a.csv"}, {"responses_json": "a.json"}, {"report_json": "b.json"}])
def test_one_file_for_all_points_is_refused(tmp_path, values, runs):
    with pytest.raises(InputError, match="names one file"):
        sweep(tmp_path / "s", "seed=1,2", **values)


def test_a_missing_trace_is_refused_before_anything_is_made(tmp_path, runs):
    base = RunConfig(output=str(tmp_path / "s"))
    with pytest.raises(InputError, match=r"none\.jsonl"):
        run_sweep(str(tmp_path / "none.jsonl"), base, grid(parse_axes(["seed=1"])))
    assert not (tmp_path / "s").exists()


def test_a_table_that_is_no_sweep_is_refused(tmp_path, runs):
    (tmp_path / "sweep.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no column `error`"):
        read_sweep(tmp_path)


def test_settings_that_no_point_can_have_are_refused_before_anything_is_made(tmp_path, runs):
    with pytest.raises(InputError, match="enable_exp_delays"):
        sweep(tmp_path / "s", "seed=1,2", enable_exp_delays=True)
    assert not (tmp_path / "s").exists()
    sweep(tmp_path / "s", "request_rate=1,2", enable_exp_delays=True)
    assert [config.request_rate for config in runs.configs] == [1.0, 2.0]


def test_what_changes_the_same_excludes_each_other(tmp_path, runs):
    points = [{"seed": 1}, {"seed": 2}]
    with pytest.raises(InputError, match="--over seed and --repeat exclude each other"):
        run_sweep(None, RunConfig(output=str(tmp_path / "s")), points, repeats=2)
    with pytest.raises(InputError, match=r"--over trace and TRACE \(chat\) exclude each other"):
        run_sweep("chat", RunConfig(output=str(tmp_path / "s")), [{"trace": "code"}])


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path, runs):
    """With the failed points again, and without what the line of a point that was cut off says."""
    runs.errors = {16: InputError("too small"), 64: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "s", "max_batch_size=8,16,32,64,128")
    with (tmp_path / "s" / "points.jsonl").open("a") as file:
        file.write('{"key": "half a li')
    runs.errors = {}
    (tmp_path / "s" / "max_batch_size=64").mkdir()
    (tmp_path / "s" / "max_batch_size=64" / "run.json").touch()
    runs.configs.clear()
    result, calls = sweep(tmp_path / "s", "max_batch_size=8,16,32,64,128")
    assert [config.max_batch_size for config in runs.configs] == [16, 64, 128]
    assert (result.resumed, [call[:2] for call in calls]) == (2, [(3, 5), (4, 5), (5, 5)])
    runs.configs.clear()
    again, _ = sweep(tmp_path / "s", "max_batch_size=8,16,32,64,128")
    assert (again.resumed, runs.configs, again.rows) == (5, [], result.rows)
    whole, _ = sweep(tmp_path / "t", "max_batch_size=8,16,32,64,128")
    assert without_output(whole.rows) == without_output(result.rows)


def without_output(rows):
    return [{name: value for name, value in row.items() if name != "output"} for row in rows]


def test_a_point_without_its_run_directory_runs_again(tmp_path, runs):
    sweep(tmp_path / "s", "max_batch_size=8,16")
    remove_runs([tmp_path / "s" / "max_batch_size=8"])
    runs.configs.clear()
    sweep(tmp_path / "s", "max_batch_size=8,16")
    assert [config.max_batch_size for config in runs.configs] == [8]


def test_another_trace_or_setting_or_version_is_another_sweep(tmp_path, runs, monkeypatch):
    sweep(tmp_path / "s", "seed=1")
    for values in ({"max_num_samples": 5}, {"max_batch_size": 3}):
        with pytest.raises(InputError, match="already holds results"):
            sweep(tmp_path / "s", "seed=1", **values)
    monkeypatch.setattr(sweep_module, "__version__", "0.0.1")
    with pytest.raises(InputError, match="already holds results"):
        sweep(tmp_path / "s", "seed=1")


def test_a_sweep_without_output_counts_up_unless_it_is_the_same(tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points = grid(parse_axes(["seed=1,2"]))
    directories = [run_sweep(None, RunConfig(max_num_samples=count), points).directory for count in (4, 5, 4, 6, 5)]
    assert [str(directory) for directory in directories] == [
        f"results/sweep-seed{number}" for number in ("", "-2", "", "-3", "-2")
    ]


SIMULATED = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", max_num_samples=40, request_rate=40.0)


def table_of(directory: Path) -> list[bytes]:
    return [(directory / name).read_bytes() for name in ("sweep.csv", "sweep.json")]


def test_tables_of_processes_and_of_summaries_are_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points = grid(parse_axes(["max_num_tokens=512..2048:x2", "policy=guaranteed_no_evict,max_utilization"]))
    for name, processes, keep in (("a", 1, "summary"), ("b", 3, "summary"), ("c", 2, "run")):
        base = SIMULATED.with_values(output=name, enable_chunked_context=True)
        result = run_sweep("chat", base, points, keep=keep, executor=LocalProcesses(processes))
        assert result.failed == 0
    assert table_of(tmp_path / "a") == table_of(tmp_path / "b")
    a, c = read_sweep(tmp_path / "a"), read_sweep(tmp_path / "c")
    assert without_output(a.rows) == without_output(c.rows)
    assert {row["output"] for row in a.rows} == {None}
    assert all((tmp_path / row["output"] / "iterations.jsonl").is_file() for row in c.rows)
    assert not [path for path in (tmp_path / "a").iterdir() if path.is_dir()]
    recorded = json.loads((tmp_path / c.rows[0]["output"] / "summary.json").read_text())
    assert recorded["ttft_s"]["p99"] == a.rows[0]["ttft_s.p99"]
    assert [row["ttft_s.p99"] for row in json.loads((tmp_path / "a" / "sweep.json").read_text())] == [
        row["ttft_s.p99"] for row in a.rows
    ]


def test_only_summaries_of_many_points_are_kept(tmp_path):
    points = grid(parse_axes([f"max_num_tokens=512..{512 + MAX_KEPT_RUNS}"]))
    base = SIMULATED.with_values(output=str(tmp_path / "s"), max_num_samples=2)
    assert {row["output"] for row in run_sweep("chat", base, points).rows} == {None}
    assert None not in {row["output"] for row in run_sweep("chat", base.with_values(overwrite=True), points[:2]).rows}


def test_repeats_have_means_and_intervals(tmp_path):
    base = SIMULATED.with_values(output=str(tmp_path / "s"), burstiness=0.5, seed=3)
    result = run_sweep("chat", base, grid(parse_axes(["max_num_tokens=512,2048"])), repeats=3)
    rates = []
    for number in (1, 2, 3):
        directory = tmp_path / "s" / "max_num_tokens=512" / f"repeat-{number}"
        assert json.loads((directory / "run.json").read_text())["seed"] == 2 + number
        rates.append(json.loads((directory / "summary.json").read_text())["request_throughput_per_s"])
    row = result.rows[0]
    assert len(set(rates)) == 3
    assert row["request_throughput_per_s"] == pytest.approx(sum(rates) / 3)
    low, high = (row[f"confidence_interval_95.request_throughput_per_s.{end}"] for end in ("low", "high"))
    assert low < row["request_throughput_per_s"] < high
    assert (row["repeats.completed"], row["output"]) == (3, str(tmp_path / "s" / "max_num_tokens=512"))


def test_traces_are_swept_and_each_is_read_once(tmp_path, monkeypatch):
    read = []

    def counted(source, config, progress):
        read.append(source)
        return read_source(source, config, progress)

    monkeypatch.setattr(sweep_module, "read_source", counted)
    points = grid(parse_axes(["trace=chat,code,default", "max_num_tokens=2048,4096"]))
    result = run_sweep(None, SIMULATED.with_values(output=str(tmp_path / "s")), points)
    assert read == ["chat", "code", "default"]
    assert [row["trace"] for row in result.rows] == ["chat", "chat", "code", "code", "default", "default"]
    assert len({row["schedule_digest"] for row in result.rows}) > 2


def test_a_warning_says_why_requests_of_a_point_fail(tmp_path):
    base = SIMULATED.with_values(output=str(tmp_path / "s"))
    result = run_sweep("chat", base, grid(parse_axes(["max_seq_len=100,8192"])))
    assert result.failed == 1
    assert list(result.warnings) == ["max_seq_len=100"]
    assert "requests will be refused" in result.warnings["max_seq_len=100"][0]


@pytest.mark.usefixtures("undrawn_sweeps")
def test_a_killed_sweep_gives_the_same_table_when_it_is_started_again(tmp_path):
    """Killed with SIGKILL, once some of its points have ended."""
    arguments = [
        "sweep",
        "chat",
        "--device",
        "sim:h100-sxm",
        "--model",
        "llama-3.1-8b",
        "--max_num_samples",
        "8",
        "--enable_chunked_context",
        "--policy",
        "tests.studies.held_policy:Held",
        "--over",
        "max_num_tokens=512..1612:+100",
        "--keep",
        "summary",
        "--quiet",
        "--output",
    ]
    assert CliRunner().invoke(main, [*arguments, str(tmp_path / "whole")]).exit_code == 0
    command = [sys.executable, "-m", "ifbbench", *arguments, str(tmp_path / "killed"), "--processes", "2"]
    lines = tmp_path / "killed" / "points.jsonl"
    killed = subprocess.Popen(command, env=os.environ | {POINTS: str(lines)})
    while not (lines.exists() and lines.read_bytes().count(b"\n") > ENDED):
        assert killed.poll() is None
        sleep(0.01)
    workers = children_of(killed.pid)
    killed.kill()
    killed.wait()
    check_ended(workers)  # they end with it, and have the lock of the directory until then
    ended = lines.read_bytes().count(b"\n") - 1
    assert ENDED <= ended < 12
    again = CliRunner().invoke(main, [*arguments, str(tmp_path / "killed")])
    assert again.exit_code == 0, again.output
    assert table_of(tmp_path / "killed") == table_of(tmp_path / "whole")
    labels = [json.loads(line)["run"] for line in lines.read_text().splitlines()[1:]]
    assert len(labels) == len(set(labels)) == 12
