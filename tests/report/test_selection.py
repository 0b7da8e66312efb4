"""A window and some requests of a run, and charts of several runs."""

from pathlib import Path

import pytest

from ifbbench.errors import InputError
from ifbbench.report.cells import timeline_cells
from ifbbench.report.chart_files import Output
from ifbbench.report.overlay import OVERLAYS, draw_schedules, plot_overlay, run_labels
from ifbbench.report.selection import select
from ifbbench.rundir.reader import load_run
from tests.report.example_runs import DOCUMENTATION, write_documentation_run, write_large_run


def test_a_window_has_the_cells_of_its_iterations(tmp_path: Path) -> None:
    run = load_run(write_documentation_run(tmp_path / "docs"))
    part = select(run, "2", "5", "1,3-4")
    whole = timeline_cells(run)
    wanted = whole[whole["iteration"].between(2, 5) & whole["request_id"].isin(["1", "3", "4"])]
    assert timeline_cells(part).to_numpy().tolist() == wanted.to_numpy().tolist()
    assert part.iterations["iteration_counter"].tolist() == [2, 3, 4, 5]
    assert part.requests["request_id"].tolist() == ["1", "3", "4"]
    assert (
        part.spans["produced"].fillna(0).sum()
        == sum(cell[0] == "G" for request in "134" for cell in DOCUMENTATION[request][2:6]) + 2
    )  # the tokens at the ends of R7 and C1


def test_a_range_of_requests_takes_no_time_for_those_that_are_not(tmp_path: Path) -> None:
    run = load_run(write_documentation_run(tmp_path / "docs"))
    assert select(run, requests="3-999999999999999999").requests["request_id"].tolist() == ["3", "4"]
    for text in ("9" * 5000, f"1-{'9' * 5000}", "\u00b2-3"):
        with pytest.raises(InputError, match="is not a request of the run"):
            select(run, requests=text)
    with pytest.raises(InputError, match=r"--from 9+: not valid"):
        select(run, begin="9" * 5000)


def test_times_choose_the_iterations_that_they_are_in(tmp_path: Path) -> None:
    run = load_run(write_documentation_run(tmp_path / "docs"))
    starts = run.iterations["start_s"]
    part = select(run, f"{starts[3] + 0.001:.4f}s", f"{starts[6] * 1000 + 1:.1f}ms")
    assert part.iterations["iteration_counter"].tolist() == [3, 4, 5, 6]
    assert select(run) is run


@pytest.mark.parametrize(
    ("begin", "end", "requests", "problem"),
    [
        ("1.5", None, None, "--from 1.5: not valid"),
        ("x", None, None, "--from x: not valid"),
        ("99s", None, None, "--from 99s: outside of the run"),
        ("7", "3", None, "no iteration is between"),
        (None, None, "77", "'77' is not a request"),
        (None, None, "70-80", "no request of the run"),
    ],
)
def test_what_is_not_in_the_run_is_an_error(
    begin: str | None, end: str | None, requests: str | None, problem: str, tmp_path: Path
) -> None:
    run = load_run(write_documentation_run(tmp_path / "docs"))
    with pytest.raises(InputError, match=problem):
        select(run, begin, end, requests)


def test_runs_are_named_after_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [load_run(write_documentation_run(tmp_path / name, policy=name)) for name in ("max_utilization", "other")]
    assert run_labels(runs) == ["max_utilization", "other"]
    assert run_labels([runs[0], runs[0]]) == [str(runs[0].path)] * 2


@pytest.mark.usefixtures("without_layout")
def test_charts_of_several_runs(tmp_path: Path) -> None:
    sizes = {"a": 4, "b": 5}
    runs = [load_run(write_documentation_run(tmp_path / name, max_batch_size=size)) for name, size in sizes.items()]
    runs.append(load_run(write_large_run(tmp_path / "large", requests=80, iterations=500)))
    written = plot_overlay(runs, Output(tmp_path / "out", ("png",)))
    assert [path.stem for path in written] == list(OVERLAYS)
    figure = draw_schedules(runs[:2])
    assert len(figure.axes) == 4
    first, second = (axes.get_xlim() for axes in figure.axes[1::2])
    assert first == second
