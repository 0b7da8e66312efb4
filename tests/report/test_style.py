"""What all charts and pages share: a colour means one thing, texts of ticks do not touch, equal lines are all seen."""

from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ifbbench.report import colours
from ifbbench.report.cells import draw_cells
from ifbbench.report.charts import CHARTS, NOT_OF_A_RUN
from ifbbench.report.overlay import draw_overlay, draw_schedules
from ifbbench.report.style import WIDTH, line_styles, round_ticks, styled
from ifbbench.report.sweep_charts import draw_sweep
from ifbbench.report.sweep_maps import draw_heat_maps, draw_limits, draw_pareto
from ifbbench.rundir.reader import RunData, load_run
from tests.report.example_runs import write_documentation_run, write_large_run

Row = dict[str, Any]


def renderer_of(figure: Figure) -> Any:
    """The renderer with which the figure was drawn, after its layout."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def labels_that_touch(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of tick labels of one axis of which the boxes overlap."""
    renderer, found = renderer_of(figure), []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in shown_labels(axis) if label.get_text()]
            boxes = [label.get_window_extent(renderer) for label in labels]
            for (one, box), (other, next_box) in pairwise(zip(labels, boxes, strict=True)):
                if box.overlaps(next_box):
                    found.append((one.get_text(), other.get_text()))
    return found


def shown_labels(axis: Axis) -> Iterator[Any]:
    low, high = sorted(axis.get_view_interval())
    for tick in axis.get_major_ticks(len(axis.get_majorticklocs())):
        if low <= tick.get_loc() <= high and tick.label1.get_visible():
            yield tick.label1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return load_run(write_large_run(tmp_path_factory.mktemp("large") / "run"))


def test_every_colour_means_one_thing() -> None:
    phases = {name: colour for name, colour in colours.PHASE_COLOURS.items() if name != "paused"}
    groups = {
        "limits": colours.LIMIT_COLOURS.values(),
        "others": colours.OTHER_LIMITS,
        "phases": phases.values(),
        "series": colours.SERIES,
        "p50": colours.PERCENTILES[:1],
        "marks": (colours.LIMIT, colours.PAUSE),
        "text": (colours.INK, colours.MUTED, colours.GRID, colours.FAINT),
    }
    roles = [(role, to_hex(colour)) for role, group in groups.items() for colour in group]
    assert [(one, other) for one, other in combinations(roles, 2) if one[1] == other[1]] == []
    # A paused request has one colour, as a phase and as a cause of waiting.
    assert colours.PHASE_COLOURS["paused"] == colours.LIMIT_COLOURS["paused"]


def test_lines_of_runs_and_settings_have_no_colour_of_a_limit(run: RunData) -> None:
    limits = {to_hex(colour) for colour in (*colours.LIMIT_COLOURS.values(), *colours.OTHER_LIMITS)}
    with styled():
        figures = [draw_overlay([run, run]), draw_sweep(sweep_rows(), "batch", ["batch", "policy"])]
    items: list[Any] = [item for figure in figures for axes in figure.axes for item in (*axes.lines, *axes.patches)]
    drawn = {to_hex(item.get_color() if hasattr(item, "get_color") else item.get_edgecolor()) for item in items}
    assert drawn & limits == set()


def test_recomputation_has_one_colour_in_all_charts(tmp_path: Path) -> None:
    documented = load_run(write_documentation_run(tmp_path / "docs"))
    recompute = to_hex(colours.PHASE_COLOURS["recompute"])
    with styled():
        lanes, timeline = CHARTS["lanes"].draw(documented), draw_schedules([documented, documented])
    for figure in (lanes, timeline):
        bars: list[Any] = [one for axes in figure.axes for one in axes.collections]
        faces = {to_hex(face) for one in bars for face in one.get_facecolor()}
        assert recompute in faces
        keys = [legend for legend in (figure.axes[0].get_legend(), *figure.legends) if legend is not None]
        (key,) = [
            handle
            for legend in keys
            for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
            if text.get_text().startswith("recompute")
        ]
        assert to_hex(key.get_facecolor()) == recompute  # type: ignore[union-attr]


def test_marks_of_pauses_are_in_the_legend(run: RunData) -> None:
    with styled():
        axes = CHARTS["timeline"].draw(run).axes[0]
        schedules = draw_schedules([run, run])
    legend = axes.get_legend()
    assert legend is not None
    for texts in (legend.get_texts(), schedules.legends[0].get_texts()):
        assert [text.get_text() for text in texts][-1] == "pause"


@pytest.mark.parametrize("name", sorted(set(CHARTS) - NOT_OF_A_RUN))
def test_the_texts_of_ticks_do_not_touch_in_charts_of_runs(name: str, run: RunData) -> None:
    with styled():
        figure = CHARTS[name].draw(run)
    assert labels_that_touch(figure) == []
    assert figure.get_figwidth() == WIDTH


def test_the_texts_of_ticks_do_not_touch_in_other_charts(run: RunData, tmp_path: Path) -> None:
    with styled():
        figures = [
            draw_cells(load_run(write_documentation_run(tmp_path / "docs"))),
            draw_overlay([run, run]),
            draw_schedules([run, run]),
            draw_sweep(sweep_rows(), "rate"),
            draw_limits(sweep_rows(), ["rate"]),
            draw_pareto(sweep_rows(), ["rate"]),
            draw_heat_maps(sweep_rows(), ["batch", "policy"]),
        ]
    assert [labels_that_touch(figure) for figure in figures] == [[]] * len(figures)


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("size", [(1.2, 0.9), (3.0, 2.0), (11.0, 6.0)], ids=str)
@pytest.mark.parametrize(
    "ends", [(0.005, 0.012), (0.9, 1.1), (3, 160), (0.0002, 9), (1, 2_000_000), (6.194, 6.197)], ids=str
)
def test_ticks_are_round_and_have_room(ends: tuple[float, float], size: tuple[float, float], scale: Any) -> None:
    with styled():
        figure = Figure(figsize=size)
        axes = figure.subplots()
        axes.set(xscale=scale, yscale=scale, xlim=ends, ylim=ends)
        round_ticks(axes.xaxis)
        round_ticks(axes.yaxis)
        assert labels_that_touch(figure) == []
    for axis in (axes.xaxis, axes.yaxis):
        places = np.asarray(axis.get_majorticklocs(), dtype=float)
        assert 1 <= len(places) <= 12
        if scale == "linear" and len(places) > 1:
            step = float(np.diff(places)[0])
            assert step / 10 ** np.floor(np.log10(step) + 1e-9) == pytest.approx(1, abs=1e-3) or round(
                step / 10 ** np.floor(np.log10(step) + 1e-9)
            ) in (2, 5)


def test_ticks_of_counts_are_whole() -> None:
    with styled():
        for highest in (1, 3, 51, 153):
            axes = Figure(figsize=(4, 3)).subplots()
            axes.set_ylim(0, highest)
            round_ticks(axes.yaxis, whole=True)
            places = np.asarray(axes.yaxis.get_majorticklocs())
            steps = set(np.diff(places).round(6).tolist())
            assert len(steps) == 1
            assert steps <= {1, 2, 5, 10, 20, 50}


def sweep_rows() -> list[Row]:
    return [
        {
            "batch": batch,
            "policy": policy,
            "rate": rate,
            "output_throughput_tokens_per_s": 100.0 + 30 * batch,
            "ttft_s.p50": 0.1,
            "ttft_s.p99": 1 / batch,
            "tpot_s.p50": 0.01,
            "tpot_s.p99": 0.01 * batch,
            "requests.failed": 0,
            "bound_by_time.batch_size": 1 / batch,
            "bound_by_time.none": 1 - 1 / batch,
        }
        for batch, rate in ((1, 0.005), (2, 0.006), (4, 0.0065), (8, 0.01), (9, 0.5))
        for policy in ("a", "b")
    ]


def test_equal_lines_are_all_seen() -> None:
    for how in (line_styles(4), line_styles(8, dashed=False)):
        assert [one["linewidth"] >= other["linewidth"] for one, other in pairwise(how)] == [True] * (len(how) - 1)
        assert len({(one["color"], one["linestyle"]) for one in how}) == len(how)
    rows = [row | {"ttft_s.p99": row["ttft_s.p99"] + (row["policy"] == "b")} for row in sweep_rows()]
    with styled():
        throughput = draw_sweep(rows, "batch", ["batch", "policy"]).axes[0]
    below, above = throughput.lines
    assert np.asarray(below.get_ydata()).tolist() == np.asarray(above.get_ydata()).tolist()
    assert below.get_linewidth() > above.get_linewidth()
    assert below.get_markersize() > above.get_markersize()
    assert above.get_linestyle() != below.get_linestyle()


def test_lines_that_are_equal_in_everything_are_one_with_all_names() -> None:
    with styled():
        figure = draw_sweep(
            [*sweep_rows(), *[row | {"policy": "c", "ttft_s.p99": 9.0} for row in sweep_rows()[::2]]],
            "batch",
            ["batch", "policy"],
        )
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a and b (equal)", "c"]
    assert all(len(axes.lines) == 2 for axes in figure.axes)


@pytest.mark.parametrize("counts", [(2, 12, 24), pytest.param((2, 12, 40), marks=pytest.mark.slow)], ids=str)
def test_labels_of_points_cover_no_point_and_no_label(counts: tuple[int, ...]) -> None:
    generator = np.random.default_rng(5)
    for count in counts:
        latency = np.sort(generator.lognormal(0, 0.5, count))
        rows = [row for row, _ in zip(sweep_rows() * 10, latency, strict=False)]
        rows = [
            row | {"rate": place, "ttft_s.p99": value, "output_throughput_tokens_per_s": 1000 * value**0.3}
            for place, (row, value) in enumerate(zip(rows, latency.tolist(), strict=True))
        ]
        with styled():
            figure = draw_pareto(rows, ["rate"])
        renderer = renderer_of(figure)
        for axes in figure.axes:
            boxes = [text.get_window_extent(renderer) for text in labels_of(axes)]
            assert boxes
            points = axes.transData.transform(np.concatenate([line.get_xydata() for line in axes.lines]))
            assert [box for box in boxes if any(box.contains(x, y) for x, y in points)] == []
            assert [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])] == []
            inside = axes.get_window_extent()
            assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)


def labels_of(axes: Axes) -> list[Any]:
    """The labels of points, without the subtitle above the axes."""
    return [text for text in axes.texts if text.get_fontsize() == 7]
