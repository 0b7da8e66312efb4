"""Run directories are read as finished and as killed runs leave them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ifbbench.analysis.token_times import IterationClock, TokenGaps
from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.report.charts import NOT_DRAWN
from ifbbench.report.style import TimeBins
from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import find_runs, load_run
from ifbbench.settings.config import RunConfig
from tests.report.example_runs import DOCUMENTATION, finish, write_documentation_run


def cut_last_line(path: Path) -> None:
    text = path.read_bytes()
    path.write_bytes(text[: len(text.rstrip(b"\n")) - 7])


def test_finished_run_as_tables(tmp_path: Path) -> None:
    run = load_run(finish(write_documentation_run(tmp_path / "docs")))
    assert run.name == "docs"
    assert run.config["max_num_tokens"] == 12
    assert not run.partial
    assert list(run.iterations["iteration_counter"]) == list(range(12))
    assert list(run.iterations["budget_used"][:4]) == [12, 11, 7, 11]
    assert run.iterations["first_left_out_request"][0] == "4"
    assert run.iterations["pauses"].tolist()[3:5] == [1, 0]
    assert list(run.requests["request_id"]) == list(DOCUMENTATION)
    assert run.spans.query("request_id == '2' and phase == 'context'")["chunks"].tolist() == [[2, 5, 4]]


def test_killed_run_is_partial_and_still_has_figures(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    for name in ("iterations", "spans", "requests"):
        cut_last_line(directory / f"{name}.jsonl")
    run = load_run(directory)
    assert run.partial
    assert len(run.iterations) == 11
    assert len(run.requests) == 4
    known = figures(run)
    assert known["partial"]
    assert known["requests"] == {"total": 5, "completed": 4, "failed": 0}
    assert known["duration_s"] == pytest.approx(run.completed["end_s"].max())


def test_last_line_whole_but_for_its_line_end_is_read(tmp_path: Path) -> None:
    directory = finish(write_documentation_run(tmp_path / "docs"))
    spans = directory / "spans.jsonl"
    spans.write_text(spans.read_text().rstrip("\n"))
    assert not load_run(directory).partial


def test_run_killed_before_its_first_iteration(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    for name in ("iterations", "spans", "requests"):
        (directory / f"{name}.jsonl").unlink()
    known = figures(load_run(directory))
    assert known["iterations"] == 0
    assert known["ttft_s"]["p99"] is None
    assert known["kv_blocks"]["max"] is None


@pytest.mark.parametrize("options", [{}, {"iteration_stats_format": "trtllm"}, {"type": "v1", "max_batch_size": 4}])
def test_lines_with_fields_of_another_version_have_the_values_of_exact_ones(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Exact lines are decoded together, others one by one."""
    config = RunConfig(
        device="sim:h100-sxm", model="tiny", max_num_samples=8, output=str(tmp_path / "exact"), **options
    )
    run_trace("chat", config)
    shutil.copytree(tmp_path / "exact", tmp_path / "other")
    for name in ("iterations", "spans", "requests"):
        path = tmp_path / "other" / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | ({"added": 5} if row is rows[-1] else {})) + "\n" for row in rows))
    exact, other = load_run(tmp_path / "exact"), load_run(tmp_path / "other")
    for name in ("iterations", "spans", "requests"):
        table = getattr(other, name)
        pd.testing.assert_frame_equal(table[list(getattr(exact, name))], getattr(exact, name), check_exact=True)
    assert other.requests["added"].dropna().tolist() == [5.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "not valid JSON"), ("[1]", "not an object"), ('{"phase": "context"}', "'request_id' is missing")],
)
def test_bad_line_in_the_middle_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    spans = write_documentation_run(tmp_path / "docs") / "spans.jsonl"
    lines = spans.read_text().splitlines()
    spans.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(InputError, match=message) as caught:
        _ = load_run(spans.parent).spans
    assert f"{spans}, line 3" in str(caught.value)


def test_bad_last_line_with_a_line_end_was_not_cut(tmp_path: Path) -> None:
    spans = write_documentation_run(tmp_path / "docs") / "spans.jsonl"
    spans.write_text(spans.read_text() + "{\n")
    with pytest.raises(InputError, match="line 17"):
        _ = load_run(spans.parent).spans


def test_bad_run_json(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    (directory / "run.json").write_text('{"name"')
    with pytest.raises(InputError, match=r"run\.json: not valid JSON"):
        load_run(directory)


def test_find_runs(tmp_path: Path) -> None:
    paths = [write_documentation_run(tmp_path / "sweep" / name) for name in ("b", "a")]
    assert find_runs(paths[0]) == [paths[0]]
    assert find_runs(tmp_path) == sorted(paths)
    with pytest.raises(InputError, match="holds 2 runs"):
        load_run(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no run"):
        find_runs(tmp_path / "empty")
    with pytest.raises(InputError, match="is not a directory"):
        find_runs(tmp_path / "absent")


def test_columns_that_are_left_out_of_a_table_are_not_read(tmp_path: Path) -> None:
    """The lines are as this version writes them."""
    directory = tmp_path / "run"
    run_trace("documentation", RunConfig(device="null", output=str(directory)))
    whole, part = load_run(directory), load_run(directory, NOT_DRAWN)
    assert set(whole.iterations) - set(part.iterations) <= NOT_DRAWN
    assert not NOT_DRAWN & set(part.iterations)
    pd.testing.assert_frame_equal(part.iterations, whole.iterations[list(part.iterations)])
    path = directory / "iterations.jsonl"
    path.write_text(re.sub(r'"missed_blocks": ?\d+', '"missed_blocks":"many"', path.read_text(), count=1))
    pd.testing.assert_frame_equal(load_run(directory, NOT_DRAWN).iterations, part.iterations)
    with pytest.raises(InputError, match="missed_blocks"):
        _ = load_run(directory).iterations


def test_charts_of_a_run_share_its_clock_and_gaps(tmp_path: Path) -> None:
    run, other = (load_run(finish(write_documentation_run(tmp_path / name))) for name in ("docs", "other"))
    for kind in (IterationClock, TimeBins, TokenGaps):
        assert kind.of(run) is kind.of(run)
        assert kind.of(run) is not kind.of(other)
