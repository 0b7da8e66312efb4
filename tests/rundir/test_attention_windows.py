"""Blocks of several attention windows: recorded for each, and the fullest one is the one that reports show."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.analysis.explain import iteration_facts
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.cli.main import main
from ifbbench.report.charts import draw_kv_cache
from ifbbench.report.pages.live import Follower
from ifbbench.report.pages.page_data import page_data
from ifbbench.report.style import styled
from ifbbench.rundir.figures import recorded_figures
from ifbbench.rundir.reader import load_run
from tests.report.test_schema import check

# The window of 4,096 tokens is full, and that of 256 is a quarter full: 63 % of all blocks are in use at most.
RUN = (
    "run chat --max_num_samples 60 --device sim:h100-sxm --model llama-3.1-8b --max_attention_window 256,4096 "
    "--time_scale 0 --max_tokens_in_paged_kvcache 20000 --policy max_utilization --max_seq_len 8000 --quiet"
)
STATISTICS = "kv_cache_iteration_stats"


def _run(directory: Path, *words: str) -> Path:
    done = CliRunner().invoke(main, [*RUN.split(), *words, "--output", str(directory)])
    assert done.exit_code == 0, done.output
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(tmp_path_factory.mktemp("windows") / "run")


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "iterations.jsonl").read_text().splitlines()]


def test_the_blocks_of_the_windows_add_up_to_those_of_the_cache(run: Path) -> None:
    lines = _lines(run)
    assert len(lines) > 1000
    for line in lines:
        windows = line["ifbbench"][STATISTICS]
        assert list(windows) == ["4096", "256"]
        for which in ("Max", "Free", "Used"):
            parts = [window[f"primary{which}NumBlocks"] for window in windows.values()]
            assert sum(parts) == line[f"{which} KV cache blocks"]
            assert min(parts) >= 0


def test_the_lines_of_stretches_are_those_of_single_iterations(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Every state of the cache in a stretch is the one that the cache had: here each iteration is one of its own."""
    monkeypatch.setattr("ifbbench.engine.predicted_loop.MAX_ITERATIONS_AT_ONCE", 1)
    again = _run(tmp_path / "single")
    assert (again / "iterations.jsonl").read_bytes() == (run / "iterations.jsonl").read_bytes()


def test_summary_and_killed_runs_have_the_peak_of_each_window(run: Path, tmp_path: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    windows = summary["kv_blocks"]["per_window_size"]
    for size in ("4096", "256"):
        recorded = [line["ifbbench"][STATISTICS][size] for line in _lines(run)]
        peak = max(window["primaryUsedNumBlocks"] for window in recorded)
        assert windows[size] == {"max": recorded[0]["primaryMaxNumBlocks"], "peak_used": peak}
    assert summary["kv_blocks"]["max"] == sum(window["max"] for window in windows.values())
    assert recorded_figures(load_run(run))["kv_blocks"] == summary["kv_blocks"]
    assert "iterations.jsonl" in check(run)


def test_reports_show_the_fullest_window(run: Path) -> None:
    blocks = json.loads((run / "summary.json").read_text())["kv_blocks"]
    fullest, other = blocks["per_window_size"]["4096"], blocks["per_window_size"]["256"]
    assert fullest["peak_used"] == fullest["max"] == 625
    assert blocks["peak_used"] < 0.7 * blocks["max"]
    text = CliRunner().invoke(main, ["report", str(run)]).output
    assert "625 of 625 (100 %), window 4,096" in text
    assert "The KV cache (625 blocks, window 4,096)" in text
    now = Follower(run, json.loads((run / "run.json").read_text())).snapshot()
    assert now is not None
    assert (now.window, now.blocks) == ("4096", 625)
    recorded = RecordedRun.load(run)
    bound = next(line for line in _lines(run) if line["ifbbench"]["bound_by"] == "kv_blocks")
    facts = iteration_facts(recorded, bound["Iteration Counter"])
    assert facts.used["kv_blocks"] == bound["ifbbench"][STATISTICS]["4096"]["primaryUsedNumBlocks"]
    assert (facts.available["kv_blocks"], facts.window) == (625, "4096")
    page = page_data(recorded)
    assert page["kv_peak"] == (625, 625, ", window 4,096")
    assert page["windows"] == {"4096": fullest["max"], "256": other["max"]}
    compared = CliRunner().invoke(main, ["compare", str(run), str(run.parent / "run"), "--json"]).output
    assert json.loads(compared)["figures"]["kv_blocks.per_window_size.4096.peak_used"]["a"] == 625


def test_the_chart_has_a_line_for_each_window(run: Path) -> None:
    with styled():
        axes = draw_kv_cache(load_run(run)).axes[0]
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["window of 4,096 tokens: 625 blocks", "window of 256 tokens: 625 blocks"]
    highest = [float(patch.get_data().values.max()) for patch in axes.patches]  # type: ignore[attr-defined]
    assert highest[0] == 1.0
    assert highest[1] < 0.5
    assert len({patch.get_linestyle() for patch in axes.patches}) == 2


@pytest.mark.parametrize("words", [("--iteration_stats_format", "trtllm"), ("--iteration_stats_every", "7")])
def test_other_forms_of_recording_have_the_same_blocks(run: Path, tmp_path: Path, words: tuple[str, str]) -> None:
    other = _run(tmp_path / "other", *words)
    one, another = load_run(run), load_run(other)
    recorded = [int(line["iter"] if "iter" in line else line["Iteration Counter"]) for line in _lines(other)]
    for size in ("4096", "256"):
        (used, pool), (again, same_pool) = one.window_blocks(size), another.window_blocks(size)
        assert pool == same_pool
        assert used[recorded].tolist() == again[recorded].tolist()
    if words[1] == "trtllm":
        assert all(line["kvCacheIterationStats"] == line["ifbbench"][STATISTICS] for line in _lines(other))


def test_one_window_is_recorded_as_before(tmp_path: Path) -> None:
    directory = _run(tmp_path / "one", "--max_attention_window", "512")
    assert all(STATISTICS not in line["ifbbench"] for line in _lines(directory))
    summary = json.loads((directory / "summary.json").read_text())
    assert list(summary["kv_blocks"]) == ["max", "peak_used", "tokens_per_block"]
