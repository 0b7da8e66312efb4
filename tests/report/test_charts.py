"""The charts draw what was recorded, the same every time."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from ifbbench.errors import InputError
from ifbbench.report.charts import plot_run
from ifbbench.report.load import load_run
from ifbbench.report.style import MAX_BINS, TimeBins, styled
from ifbbench.report.timeline import draw_timeline, timeline_cells
from tests.report.example_runs import DOCUMENTATION, PHASES, finish, write_documentation_run, write_large_run, write_run

NAMES = ["kv_cache", "latency", "throughput", "timeline"]


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
    assert figure.axes[0].get_title(loc="left") == "Scheduler timeline: docs"
    heights = np.sum([[bar.get_height() for bar in bars] for bars in figure.axes[1].containers], axis=0)
    assert heights.tolist() == run.iterations["budget_used"].tolist()


def subtitle(partial: bool) -> str:
    return "max_utilization · max_batch_size 4 · max_num_tokens 12 · chunked context" + " · partial run" * partial


def test_large_timeline_draws_a_bar_a_span(tmp_path: Path) -> None:
    run = load_run(write_large_run(tmp_path / "large"))
    collections = draw_timeline(run).axes[0].collections
    assert sum(len(collection.get_paths()) for collection in collections) == len(run.spans)
    assert len(collections) == run.spans["phase"].nunique()


def test_chunks_that_do_not_fit_their_span_are_an_error(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    spans = (directory / "spans.jsonl").read_text()
    (directory / "spans.jsonl").write_text(spans.replace("[2, 5, 4]", "[2, 9]"))
    with pytest.raises(InputError, match="request 2: 2 chunks for a context span of 3 iterations"):
        timeline_cells(load_run(directory))


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    run = load_run(finish(write_documentation_run(tmp_path / "docs")))
    first, second = plot_run(run), plot_run(run, tmp_path / "again")
    assert [path.name for path in first] == [f"{name}.{kind}" for name in NAMES for kind in ("png", "svg")]
    assert first[0].parent == run.path / "charts"
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert not re.search(r"<dc:date>|\d{4}-\d\d-\d\dT", first[1].read_text())


def test_large_and_killed_runs_are_drawn(tmp_path: Path) -> None:
    run = load_run(write_large_run(tmp_path / "large", requests=60, iterations=400))
    assert run.partial
    assert len(plot_run(run)) == 8


def test_run_whose_time_stands_still(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    lines = (directory / "iterations.jsonl").read_text()
    lines = re.sub(r'"start_s": [\d.e-]+, "latency_ms": [\d.]+', '"start_s": 0.0, "latency_ms": 0.0', lines)
    (directory / "iterations.jsonl").write_text(lines)
    assert len(plot_run(load_run(directory))) == 8


def test_contiguous_cache_has_no_chart_of_blocks(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", {"0": ["C5", "G1"]}, {}, max_blocks=9)
    lines = (directory / "iterations.jsonl").read_text()
    (directory / "iterations.jsonl").write_text(re.sub(r'("\w+ KV cache blocks"): \d+', r"\1: null", lines))
    assert not any("kv_cache" in path.name for path in plot_run(load_run(directory)))


def test_run_without_iterations_is_an_error(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    (directory / "iterations.jsonl").unlink()
    with pytest.raises(InputError, match="no iterations"):
        plot_run(load_run(directory))


def test_bins_keep_tokens_and_peaks(tmp_path: Path) -> None:
    run = load_run(write_large_run(tmp_path / "large", requests=60, iterations=400))
    bins = TimeBins.of(run)
    tokens = run.iterations["budget_used"].to_numpy(dtype=float)
    used = run.iterations["used_kv_cache_blocks"].to_numpy(dtype=float)
    assert len(bins.edges) == MAX_BINS + 1
    assert (bins.rates(tokens) * np.diff(bins.edges_s)).sum() == pytest.approx(tokens.sum())
    assert bins.peaks(used).max() == used.max()
