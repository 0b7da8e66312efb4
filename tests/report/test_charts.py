"""The charts draw what was recorded, the same every time."""

import re
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from ifbbench.analysis.token_times import IterationClock, TokenGaps, span_ends
from ifbbench.errors import InputError
from ifbbench.report import charts, style
from ifbbench.report.cells import timeline_cells
from ifbbench.report.chart_files import Output
from ifbbench.report.charts import CHARTS, NOT_OF_A_RUN, draw_kv_cache, plot_run
from ifbbench.report.colours import PHASE_COLOURS
from ifbbench.report.lanes import draw_lanes
from ifbbench.report.latency_charts import draw_itl
from ifbbench.report.style import MAX_BINS, TimeBins, styled
from ifbbench.report.timeline import draw_timeline
from ifbbench.rundir.reader import load_run
from tests.report.example_runs import (
    DOCUMENTATION,
    PHASES,
    finish,
    timeline,
    write_documentation_run,
    write_large_run,
    write_run,
)

NAMES = sorted(set(CHARTS) - NOT_OF_A_RUN)
SMALL = Output(formats=("png",), dpi=40)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_cells_are_the_spans(tmp_path: Path) -> None:
    cells = timeline_cells(load_run(write_documentation_run(tmp_path / "docs")))
    drawn = {(row.request_id, row.iteration): (row.label, row.phase) for row in cells.itertuples()}
    written = {
        (request, iteration): ("" if cell in "ws" else cell, PHASES[cell[0]])
        for request, row in DOCUMENTATION.items()
        for iteration, cell in enumerate(row)
        if cell != "."
    }
    assert drawn == written
    assert list(cells["request_id"].unique()) == list(DOCUMENTATION)


def test_small_timeline_draws_a_patch_and_a_letter_a_cell(tmp_path: Path) -> None:
    run = load_run(write_documentation_run(tmp_path / "docs"))
    with styled():
        figure, cells = draw_timeline(run), timeline_cells(run)
    assert len(figure.axes[0].patches) == len(cells)
    assert [text for text in texts(figure) if text] == [*cells["label"][cells["label"] != ""], subtitle(run.partial)]
    assert figure.axes[0].get_title(loc="left") == "Scheduler timeline: example"
    assert [axes.get_ylabel() for axes in figure.axes] == ["request", "tokens\nin the batch", "KV blocks\nused"]
    heights = np.sum([[bar.get_height() for bar in bars] for bars in figure.axes[1].containers], axis=0)
    assert heights.tolist() == run.iterations["budget_used"].tolist()


def subtitle(partial: bool) -> str:
    return "max_utilization · max_batch_size 4 · max_num_tokens 12 · chunked context" + " · partial run" * partial


def test_cells_say_why_a_request_waits_and_for_whom_it_was_paused(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    spans = (directory / "spans.jsonl").read_text().splitlines()
    causes = {"waiting": '"num_tokens"', "paused": '"2"'}
    for number, line in enumerate(spans):
        for phase, cause in causes.items():
            if f'"phase": "{phase}"' in line:
                spans[number] = line.replace('"cause": null', f'"cause": {cause}')
    (directory / "spans.jsonl").write_text("\n".join(spans) + "\n")
    figure = draw_timeline(load_run(directory))
    assert texts(figure).count("tok") == 4
    assert texts(figure).count("P→2") == 2
    assert "tok: token budget" in figure.get_supxlabel()


def test_large_timeline_draws_a_bar_a_span(tmp_path: Path) -> None:
    run = load_run(write_large_run(tmp_path / "large"))
    collections = draw_timeline(run).axes[0].collections
    assert sum(len(collection.get_paths()) for collection in collections) == len(run.spans)
    assert len(collections) == run.spans["phase"].nunique()
    (marks,) = draw_timeline(run).axes[0].lines
    assert len(np.asarray(marks.get_xdata())) == (run.spans["phase"] == "paused").sum()


def test_many_requests_are_counted_by_phase_and_aligned_at_their_arrival(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("ifbbench.report.timeline.MAX_BARS", 100)
    run = load_run(write_large_run(tmp_path / "large", requests=200, iterations=2000))
    figure = draw_timeline(run)
    population, _, aligned = figure.axes
    bins = TimeBins.of(run)
    spans_s = bins.clock.ends(run.spans["last_iteration"]) - bins.clock.starts(run.spans["first_iteration"])
    heights = population.patches[-1].get_data()  # type: ignore[attr-defined]
    drawn_s = float((heights.values * np.diff(bins.edges_s)).sum())
    assert drawn_s == pytest.approx(float(spans_s.sum()), rel=1e-6)
    (image,) = aligned.images
    assert np.asarray(image.get_array()).shape[0] == 200


def test_lanes_hold_one_request_at_a_time(tmp_path: Path) -> None:
    run = load_run(write_large_run(tmp_path / "large", requests=60, iterations=400))
    bars = draw_lanes(run).axes[0].collections
    corners = [np.asarray(path.vertices, dtype=float) for phase in bars for path in phase.get_paths()]
    assert len(corners) == run.spans["phase"].isin(["context", "recompute", "generation", "skipped"]).sum()
    boxes = sorted((float(box[0, 1]), float(box[0, 0]), float(box[1, 0])) for box in corners)
    for (lane, _, end), (next_lane, start, _) in pairwise(boxes):
        assert lane != next_lane or start >= end - 1e-9


def test_lanes_of_hairlines_are_an_image_of_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(write_large_run(tmp_path / "large", requests=200, iterations=2000))
    monkeypatch.setattr("ifbbench.report.lanes.MAX_OUTLINES", 100)
    monkeypatch.setattr("ifbbench.report.lanes.HAIRLINE_SHARE", 1.0)
    axes = draw_lanes(run).axes[0]
    (image,) = axes.images
    assert not axes.collections
    # As much of the image is not white as requests run of the time of all lanes.
    red = np.asarray(image.get_array(), dtype=float)[..., 0]
    spans, clock = run.spans, TimeBins.of(run).clock
    covered_s = {}
    for phase in ("context", "recompute", "generation", "skipped"):
        of_phase = (spans["phase"] == phase).to_numpy()
        seconds = span_ends(run)[of_phase].to_numpy() - clock.starts(spans["first_iteration"][of_phase])
        covered_s[phase] = float(seconds.sum())
    missing = sum((1 - to_rgb(PHASE_COLOURS[phase])[0]) * seconds for phase, seconds in covered_s.items())
    whole_s = red.shape[0] * float(np.ptp(TimeBins.of(run).edges_s))
    assert (1 - red / 255).mean() == pytest.approx(missing / whole_s, abs=0.003)


def test_panels_without_anything_to_show_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(write_large_run(tmp_path / "large", requests=60, iterations=400))
    assert len(draw_kv_cache(run).axes) == 2
    run.iterations["pauses"] = 0
    figure = draw_kv_cache(run)
    assert "no request was paused" in texts(figure)
    assert len(figure.axes) == 1
    for ratio, panels in ((0.5, 2), (1e9, 1)):
        monkeypatch.setattr("ifbbench.report.latency_charts.STALL_RATIO", ratio)
        figure = draw_itl(run)
        assert len(figure.axes) == panels
        assert any("no gap exceeds" in text for text in texts(figure)) == (panels == 1)


def test_gaps_over_a_pause_are_known(tmp_path: Path) -> None:
    gaps = TokenGaps.of(load_run(write_documentation_run(tmp_path / "docs")))
    # Request 1 is paused after G2 and gets its next token when R7 has computed it again.
    assert gaps.over_pause.sum() == 1
    assert gaps.seconds[gaps.over_pause] == pytest.approx(gaps.seconds.max())


def test_formats_resolution_title_and_choice_of_charts(tmp_path: Path) -> None:
    run = load_run(write_documentation_run(tmp_path / "docs"))
    output = Output(tmp_path / "out", ("pdf", "png"), 40, "My title")
    written = plot_run(run, only=("timeline", "itl"), output=output)
    assert [path.name for path in written] == ["itl.pdf", "itl.png", "timeline.pdf", "timeline.png"]
    assert written[0].read_bytes().startswith(b"%PDF")
    first = written[1].stat().st_size
    assert plot_run(run, only=("itl",), output=Output(tmp_path / "out", ("png",), 200))[0].stat().st_size > first
    again = plot_run(run, only=("timeline",), output=Output(tmp_path / "svg", ("svg",), title="My title"))
    assert b"My title" in again[0].read_bytes()


def test_exact_refuses_what_no_picture_holds(tmp_path: Path) -> None:
    run = load_run(write_large_run(tmp_path / "large", requests=100, iterations=400))
    with pytest.raises(InputError, match=r"--exact: 100 requests in .* Choose a part with --from, --to and --requests"):
        plot_run(run, only=("timeline",), exact=True)


def test_chunks_that_do_not_fit_their_span_are_an_error(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    spans = (directory / "spans.jsonl").read_text()
    (directory / "spans.jsonl").write_text(spans.replace("[2, 5, 4]", "[2, 9]"))
    with pytest.raises(InputError, match="request 2: 2 chunks for a context span of 3 iterations"):
        timeline_cells(load_run(directory))


@pytest.mark.parametrize(
    "again", [("latency", "timeline"), pytest.param(NAMES, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_files_are_the_same_every_time(again: Collection[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time by two processes, as those of a long run."""
    monkeypatch.setitem(style.STYLE, "savefig.dpi", SMALL.dpi)
    run = load_run(finish(write_documentation_run(tmp_path / "docs")))
    first = plot_run(run, only=again)
    monkeypatch.setattr(charts, "MIN_SHARED", 1)
    monkeypatch.setattr(charts, "usable_cores", lambda: 2)
    second = plot_run(run, tmp_path / "again", only=again)
    assert [path.name for path in first] == [f"{name}.{kind}" for name in again for kind in ("png", "svg")]
    assert first[0].parent == run.path / "charts"
    assert len(second) == 2 * len(again)
    assert all(path.read_bytes() == (run.path / "charts" / path.name).read_bytes() for path in second)
    assert not re.search(r"<dc:date>|\d{4}-\d\d-\d\dT", first[1].read_text())


@pytest.mark.usefixtures("without_layout")
def test_large_and_killed_runs_are_drawn(tmp_path: Path) -> None:
    run = load_run(write_large_run(tmp_path / "large", requests=60, iterations=400))
    assert run.partial
    assert len(plot_run(run, output=SMALL)) == len(NAMES)


@pytest.mark.usefixtures("without_layout")
def test_run_whose_time_stands_still(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    lines = (directory / "iterations.jsonl").read_text()
    lines = re.sub(r'"start_s": [\d.e-]+, "latency_ms": [\d.]+', '"start_s": 0.0, "latency_ms": 0.0', lines)
    (directory / "iterations.jsonl").write_text(lines)
    assert len(plot_run(load_run(directory), output=SMALL)) == len(NAMES)


@pytest.mark.usefixtures("without_layout")
def test_run_without_completed_requests_and_of_one_request(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    (directory / "requests.jsonl").unlink()
    assert len(plot_run(load_run(directory), output=SMALL)) == len(NAMES)
    (directory / "spans.jsonl").unlink()
    assert len(plot_run(load_run(directory), output=SMALL)) == len(NAMES)
    one = write_run(tmp_path / "one", {"0": ["C5", "G1"]}, {}, max_blocks=9)
    assert len(plot_run(load_run(one), output=SMALL)) == len(NAMES)


def test_contiguous_cache_has_no_chart_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "save", lambda figure, directory, name, *how: [directory / name])
    directory = write_run(tmp_path / "run", {"0": ["C5", "G1"]}, {}, max_blocks=9)
    lines = (directory / "iterations.jsonl").read_text()
    (directory / "iterations.jsonl").write_text(re.sub(r'("\w+ KV cache blocks"): \d+', r"\1: null", lines))
    names = [path.stem for path in plot_run(load_run(directory), output=SMALL)]
    assert names == [name for name in NAMES if name != "kv_cache"]


def test_run_without_iterations_has_no_charts_and_is_an_error_if_complete(tmp_path: Path, caplog) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    (directory / "iterations.jsonl").unlink()
    assert plot_run(load_run(directory)) == []  # without a summary: it was killed
    assert "nothing to draw" in caplog.text
    complete = replace(load_run(directory), summary={})
    with pytest.raises(InputError, match="no iterations"):
        plot_run(complete)


def test_bins_keep_tokens_and_peaks(tmp_path: Path) -> None:
    run = load_run(write_large_run(tmp_path / "large", requests=60, iterations=400))
    bins = TimeBins.of(run)
    tokens = run.iterations["budget_used"].to_numpy(dtype=float)
    used = run.iterations["used_kv_cache_blocks"].to_numpy(dtype=float)
    assert len(bins.edges) == MAX_BINS + 1
    assert (bins.rates(tokens) * np.diff(bins.edges_s)).sum() == pytest.approx(tokens.sum())
    assert bins.peaks(used).max() == used.max()


def test_a_span_ends_with_its_last_iteration_where_the_engine_idles_after_it(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "idle", timeline("a C5 G1 . .", "b . . C4 G1"), {}, max_blocks=8))
    run.iterations.loc[run.iterations["iteration_counter"] >= 2, "start_s"] += 10.0
    bars = draw_lanes(run).axes[0].collections
    paths = [path for phase in bars for path in phase.get_paths()]
    right = sorted(float(np.asarray(path.vertices, dtype=float)[:, 0].max()) for path in paths)
    clock = TimeBins.of(run).clock
    assert right[:2] == pytest.approx([clock.start_s[1], clock.end_s[1]], abs=1e-9)
    assert right[2] > 10


def test_iterations_that_overlap_are_counted_once() -> None:
    end_s = np.array([1.0, 2.0, 3.0])
    clock = IterationClock(np.arange(3.0), np.array([0.0, 0.5, 1.5]), end_s, end_s)
    bins = TimeBins(clock, np.linspace(0.0, 4.0, 5))
    assert bins.means(np.array([2.0, 4.0, 6.0])) == pytest.approx([2, 4, 6, 0])
    assert bins.rates(np.array([10.0, 20.0, 30.0])) == pytest.approx([10, 20, 30, 0])
    assert bins.highest(np.array([2.0, 4.0, 6.0])) == pytest.approx([2, 4, 6, 0])
    wide = TimeBins(clock, np.array([0.0, 0.25, 2.5, 4.0]))
    assert wide.highest(np.array([5.0, 4.0, 6.0])) == pytest.approx([5, 6, 6])
