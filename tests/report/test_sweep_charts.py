"""The charts of a sweep: what is drawn of which rows, and the Pareto front."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.console import Console

from ifbbench.errors import InputError
from ifbbench.report.style import styled
from ifbbench.report.sweep_charts import draw_sweep, plot_sweep
from ifbbench.report.sweep_maps import draw_heat_maps, draw_pareto, pareto_front
from ifbbench.report.sweep_metrics import knee_of, subject_of
from ifbbench.report.sweep_table import meets_objectives, print_sweep


def test_sweep_over_numbers_and_texts(tmp_path: Path) -> None:
    figures = {"output_throughput_tokens_per_s": 90.0, "ttft_s.p50": 0.1, "ttft_s.p99": 0.4}
    numbers = [{"max_batch_size": size, **figures} for size in (16, 1, 4)] + [{"max_batch_size": 64}]
    names_of = [path.name for path in plot_sweep(numbers, ["max_batch_size"], tmp_path / "n")]
    assert names_of == ["sweep.png", "sweep.svg", "pareto.png", "pareto.svg"]
    names = [{"policy": policy, **figures} for policy in ("guaranteed_no_evict", "max_utilization")]
    assert len(plot_sweep(names, ["policy"], tmp_path / "t")) == 4
    with pytest.raises(InputError, match="'dtype'"):
        plot_sweep(names, ["dtype"], tmp_path)


def sweep_of_pools(hit_rates: dict[Any, float | None]) -> Figure:
    figures = {"output_throughput_tokens_per_s": 90.0, "ttft_s.p50": 0.1, "ttft_s.p99": 0.4}
    rows = [{"pool": size, "prefix_hit_rate": rate, **figures} for size, rate in hit_rates.items()]
    with styled():
        return draw_sweep(rows, "pool")


def test_sweep_shows_what_was_reused_in_a_panel_of_its_own() -> None:
    figure = sweep_of_pools({64_000_000: 0.651, 250_000: 0.0, 1_048_576: 0.1, 8_000_000: None})
    throughput, ttft, hit_rate = figure.axes
    (line,) = hit_rate.lines
    assert np.asarray(line.get_xdata()).tolist() == [250_000, 1_048_576, 8_000_000, 64_000_000]
    assert np.asarray(line.get_ydata()) == pytest.approx([0, 10, np.nan, 65.1], nan_ok=True)
    assert hit_rate.get_xscale() == "log"
    assert [label.get_text() for label in hit_rate.get_xticklabels()] == ["250k", "1.05M", "8M", "64M"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["output tokens/s", "TTFT (ms)", "prefix hit rate (%)"]
    assert [text.get_text() for text in hit_rate.texts] == ["65.1 %"]
    assert (throughput.get_xlabel(), ttft.get_xlabel(), hit_rate.get_xlabel()) == ("", "", "pool")


def test_sweep_marks_the_points_that_meet_the_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"output_throughput_tokens_per_s": 90.0, "ttft_s.p50": 0.1, "ttft_s.p99": 0.4, "error": ""}
    met = {8: (True, 0), 16: (False, 0), 32: (True, 1), 64: (None, 0)}  # None: repeats differ
    rows = [
        {"pool": size, "slo.ttft.met": one, "slo.e2e.p99.met": True, "requests.failed": failed, **figures}
        for size, (one, failed) in met.items()
    ]
    assert [meets_objectives(row) for row in rows] == [True, False, False, False]
    assert meets_objectives(figures) is None
    print_sweep(rows, ["pool"], Console(width=120))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    marks = {line[0]: line for line in lines if line and line[0] in map(str, met)}
    assert ["yes" in marks[str(size)] for size in met] == [True, False, False, False]
    with styled():
        figure = draw_sweep(rows, "pool")
    empty = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert [np.asarray(line.get_xdata()).tolist() for line in empty] == [[16, 32, 64]]


@pytest.mark.parametrize("hit_rates", [{8: 0.0, 16: 0.0}, {8: None, 16: 0.0}, {"a": None, "b": None}], ids=str)
def test_sweep_without_reuse_has_no_such_panel(hit_rates: dict[Any, float | None]) -> None:
    figure = sweep_of_pools(hit_rates)
    assert len(figure.axes) == 2
    assert figure.axes[1].get_xlabel() == "pool"


def rows_of_grid() -> list[dict[str, Any]]:
    return [
        {
            "batch": batch,
            "policy": policy,
            "output_throughput_tokens_per_s": 100.0 * batch + place,
            "ttft_s.p50": 0.1,
            "ttft_s.p99": 1 / batch,
            "tpot_s.p50": 0.01,
            "tpot_s.p99": 0.01 * batch,
            "requests.failed": 0,
            "bound_by_time.batch_size": 1 / batch,
            "bound_by_time.none": 1 - 1 / batch,
        }
        for batch in (8, 2, 4)
        for place, policy in enumerate(("a", "b"))
    ]


def test_two_settings_have_a_chart_each_heat_maps_and_limits(tmp_path: Path) -> None:
    files = plot_sweep(rows_of_grid(), ["batch", "policy"], tmp_path)
    assert [path.name for path in files if path.suffix == ".png"] == [
        "sweep-batch.png",
        "sweep-policy.png",
        "heat_map.png",
        "limits.png",
        "pareto.png",
    ]
    assert all(path.stat().st_size > 1000 for path in files)


def test_a_setting_with_one_value_is_not_drawn(tmp_path: Path) -> None:
    files = plot_sweep([row for row in rows_of_grid() if row["policy"] == "a"], ["batch", "policy"], tmp_path)
    assert [path.name for path in files if path.suffix == ".png"] == ["sweep.png", "pareto.png"]


def test_a_line_for_each_value_of_the_other_setting() -> None:
    with styled():
        figure = draw_sweep(rows_of_grid(), "batch", ["batch", "policy"])
    throughput, ttft, tpot = figure.axes
    assert [np.asarray(line.get_ydata()).tolist() for line in throughput.lines] == [[200, 400, 800], [201, 401, 801]]
    assert (ttft.get_ylabel(), tpot.get_ylabel()) == ("TTFT p99 (ms)", "TPOT p99 (ms)")


def test_many_lines_have_a_median() -> None:
    rows = [
        {"batch": batch, "seed": seed, "output_throughput_tokens_per_s": 10.0 * batch + seed}
        for batch in (1, 2)
        for seed in range(7)
    ]
    with styled():
        figure = draw_sweep(rows, "batch", ["batch", "seed"])
    lines = figure.axes[0].lines
    assert len(lines) == 8
    assert np.asarray(lines[-1].get_ydata()).tolist() == [13, 23]


def test_the_limits_of_each_point_are_in_the_chart_of_one_setting() -> None:
    with styled():
        figure = draw_sweep([row for row in rows_of_grid() if row["policy"] == "a"], "batch")
    limits = figure.axes[-1]
    assert limits.get_ylabel() == "bound by, of time"
    bars: list[Any] = [*limits.patches]
    assert sorted(bar.get_height() for bar in bars)[:3] == pytest.approx([0.125, 0.25, 0.5])


def test_heat_maps_have_a_cell_for_each_point_and_gaps_for_others() -> None:
    with styled():
        figure = draw_heat_maps(rows_of_grid()[1:], ["batch", "policy"])
    throughput, *_, limits = figure.axes
    assert [text.get_text() for text in throughput.texts] == ["201", "200", "401", "400", "801", "–"]
    assert [text.get_text() for text in limits.texts] == ["batch", "batch", "none", "none", "none", ""]


def test_the_pareto_front() -> None:
    points = [(3.0, 30.0), (1.0, 10.0), (2.0, 9.0), (2.0, 20.0), (4.0, 30.0), (1.0, 5.0)]
    assert [points[index] for index in pareto_front(points)] == [(1, 10), (2, 20), (3, 30)]


def test_points_with_failed_requests_are_not_on_the_front() -> None:
    rows = rows_of_grid()
    rows[0] |= {"requests.failed": 5, "output_throughput_tokens_per_s": 5000.0}
    with styled():
        figure = draw_pareto(rows, ["batch", "policy"])
    highest = [max(np.max(np.asarray(line.get_ydata(), dtype=float)) for line in axes.lines) for axes in figure.axes]
    assert highest == [801, 801]


def test_points_that_miss_an_objective_have_empty_marks() -> None:
    rows = rows_of_grid()
    for number, row in enumerate(rows):
        row["slo.ttft.met"] = number % 3 == 0
    with styled():
        figure = draw_pareto(rows, ["batch", "policy"])
    for axes in figure.axes:
        marks = [line for line in axes.lines if line.get_marker() == "o"]
        assert [line.get_markerfacecolor() != "white" for line in marks] == [row["slo.ttft.met"] for row in rows]
        assert all(line.get_markeredgecolor() != "white" for line in marks)
    assert "empty marks miss an objective" in "".join(text.get_text() for text in figure.axes[0].texts)


def test_a_label_is_nearest_to_its_own_point() -> None:
    rows = [
        {
            "trace": "t",
            "batch": batch,
            "requests.failed": 0,
            "ttft_s.p99": ttft_s,
            "tpot_s.p99": tpot_s,
            "output_throughput_tokens_per_s": tokens,
            "error": "",
        }
        for batch, ttft_s, tpot_s, tokens in (
            (1024, 0.112, 11.7, 1753),
            (256, 0.182, 9.04, 1754),
            (4, 35.2, 7.39, 590),
            (8, 12.0, 7.68, 1070),
        )
    ]
    with styled():
        figure = draw_pareto(rows, ["batch"])
        renderer = FigureCanvasAgg(figure).get_renderer()
    names, labels = [str(row["batch"]) for row in rows], 0
    for axes in figure.axes:
        marks = [np.asarray(line.get_xydata())[0] for line in axes.lines if line.get_marker() == "o"]
        places = dict(zip(names, axes.transData.transform(np.array(marks)), strict=True))
        for text in axes.texts:
            if text.get_text() in names:
                box = text.get_window_extent(renderer)
                away = {name: np.hypot(*(place - np.clip(place, box.min, box.max))) for name, place in places.items()}
                assert min(away, key=away.__getitem__) == text.get_text()
                labels += 1
    assert labels > 3


def test_throughput_is_drawn_for_each_gpu_where_points_have_different_numbers() -> None:
    def heights(gpus: tuple[int, int]) -> list[float]:
        rows = [
            {"replicas": 1 + index, "ttft_s.p99": 1.0, "tpot_s.p99": 1.0, "error": "", "fleet.gpus": number}
            | {"output_throughput_tokens_per_s": 120.0}
            for index, number in enumerate(gpus)
        ]
        with styled():
            axes = draw_pareto(rows, ["replicas"]).axes[0]
        return [float(np.asarray(line.get_ydata())[0]) for line in axes.lines if line.get_marker() == "o"]

    assert heights((2, 3)) == [60.0, 40.0]
    assert heights((2, 2)) == [120.0, 120.0]


@pytest.mark.parametrize(
    ("throughput", "knee"),
    [
        ({8: 2.0, 12: 3.0, 16: 4.0, 20: 4.8, 24: 4.9, 28: 4.95}, 20.0),  # rises, then flat
        ({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, None),  # a straight line
        ({1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}, None),  # falls
        ({1: 1.0, 2: 2.0, 3: 2.0}, None),  # too few points
        ({1: 1.0, 2: 2.0, 3: None, 4: 2.0}, None),  # a point without figures
        ({"a": 1.0, "b": 2.0, "c": 2.0, "d": 2.0}, None),
    ],
    ids=str,
)
def test_the_knee_is_where_throughput_stops_to_grow(throughput: dict[Any, float | None], knee: float | None) -> None:
    rows = [{"rate": rate, "output_throughput_tokens_per_s": value} for rate, value in throughput.items()]
    assert knee_of(rows, "rate") == knee
    with styled():
        texts = [text.get_text() for text in draw_sweep(rows, "rate").axes[0].texts]
    assert [text for text in texts if text.startswith("knee")] == ([] if knee is None else [f"knee: {knee:g}"])


def test_the_subject_is_what_all_points_have_in_common() -> None:
    row = {"trace": "/data/chat.csv", "model": "llama-3.1-8b", "device": "sim:h100-sxm"}
    assert subject_of([row, row]) == "chat, llama-3.1-8b on sim:h100-sxm"
    assert subject_of([row, {**row, "trace": "b.csv"}]) == "llama-3.1-8b on sim:h100-sxm"
    assert subject_of([{"x": 1}]) == ""


def test_heat_maps_frame_the_points_that_meet_the_objectives() -> None:
    figures = {"output_throughput_tokens_per_s": 90.0, "ttft_s.p50": 0.1, "ttft_s.p99": 0.4, "requests.failed": 0}
    rows = [{"x": x, "y": y, "slo.ttft.met": x == 2 and y == 1, "error": "", **figures} for x in (1, 2) for y in (1, 2)]
    with styled():
        figure = draw_heat_maps(rows, ["y", "x"])
        plain = draw_heat_maps([{**row, "slo.ttft.met": False} for row in rows], ["y", "x"])
    for axes in figure.axes:
        (frame,) = axes.patches
        assert isinstance(frame, Rectangle)
        assert frame.get_x() < 1 < frame.get_x() + frame.get_width()
        assert frame.get_y() < 0 < frame.get_y() + frame.get_height()
    assert "framed: meets every objective" in figure.get_suptitle()
    assert "framed" not in plain.get_suptitle()
    assert not any(axes.patches for axes in plain.axes)
