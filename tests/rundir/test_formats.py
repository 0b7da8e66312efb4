"""Compressed, thinned and killed runs are read like others."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from ifbbench.errors import InputError
from ifbbench.files import replace_file
from ifbbench.replay.run import run_trace
from ifbbench.report.charts import plot_run
from ifbbench.report.tables import print_report
from ifbbench.rundir import run_directory
from ifbbench.rundir.figures import figures
from ifbbench.rundir.lines import JsonLinesWriter
from ifbbench.rundir.reader import RunData, load_run
from ifbbench.rundir.rows import read_lines
from ifbbench.settings.config import RunConfig
from ifbbench.workload.trace import Trace, TraceRequest
from tests.rundir.virtual_run import Interrupted, limits, lines, run, trace_of

# More than there is memory for: requests are paused, skipped and computed again.
ROWS = [(0.01 * number, 4 + number % 7, 3 + number % 19) for number in range(60)]
LINE_FILES = ("iterations", "spans", "requests")


def recorded(directory: Path, **options: Any) -> RunData:
    run(trace_of(ROWS), limits(num_blocks=16), directory, **options)
    return load_run(directory)


def test_compressed_files_hold_the_same_lines(tmp_path: Path) -> None:
    recorded(tmp_path / "plain")
    for name in ("one", "two"):
        recorded(tmp_path / name, recording_format="jsonl.gz")
    for file in LINE_FILES:
        packed = (tmp_path / "one" / f"{file}.jsonl.gz").read_bytes()
        assert gzip.decompress(packed) == (tmp_path / "plain" / f"{file}.jsonl").read_bytes()
        assert packed == (tmp_path / "two" / f"{file}.jsonl.gz").read_bytes()
        assert not (tmp_path / "one" / f"{file}.jsonl").exists()


def test_compressed_runs_are_read_like_others(tmp_path: Path) -> None:
    plain, packed = recorded(tmp_path / "plain"), recorded(tmp_path / "packed", recording_format="jsonl.gz")
    for table in LINE_FILES:
        pd.testing.assert_frame_equal(getattr(plain, table), getattr(packed, table))
    assert figures(plain) == figures(packed)


def test_a_compressed_run_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    recorded(tmp_path / "run", recording_format="jsonl.gz")
    whole = {table: len(getattr(load_run(tmp_path / "run"), table)) for table in LINE_FILES}
    (tmp_path / "run" / "summary.json").unlink()
    for file in LINE_FILES:
        path = tmp_path / "run" / f"{file}.jsonl.gz"
        path.write_bytes(path.read_bytes()[:-40])
    cut = load_run(tmp_path / "run")
    assert cut.partial
    for table in LINE_FILES:
        assert 0 < len(getattr(cut, table)) < whole[table]
    assert 0 < figures(cut)["requests"]["completed"] < len(ROWS)


def test_a_file_that_is_not_compressed_though_it_is_called_so(tmp_path: Path) -> None:
    recorded(tmp_path / "run").path.joinpath("spans.jsonl").rename(tmp_path / "run" / "spans.jsonl.gz")
    with pytest.raises(InputError, match=r"spans\.jsonl\.gz: not a gzip file"):
        _ = load_run(tmp_path / "run").spans


def test_overwriting_leaves_nothing_of_the_other_format(tmp_path: Path) -> None:
    recorded(tmp_path / "run", recording_format="jsonl.gz")

    def write_start(directory: Path, name: str) -> None:
        replace_file(directory / "trace.jsonl", "")
        run_directory.write_begun(directory, {"name": name})

    with run_directory.begun([tmp_path / "run"], True, write_start):
        assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.json", "trace.jsonl"}
        assert run_directory.find_lines(tmp_path / "run", "spans").name == "spans.jsonl"


def test_flushed_lines_can_be_read_while_the_file_is_open(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "some.jsonl.gz")
    writer.write([b'{"number":1}'])
    writer.write([b'{"number":2}', b'{"number":3}'])
    writer.flush()
    writer.write([b'{"number":4}'])
    flushed = gzip.GzipFile(tmp_path / "some.jsonl.gz").read1()
    writer.close()
    assert flushed == b'{"number":1}\n{"number":2}\n{"number":3}\n'
    assert gzip.decompress((tmp_path / "some.jsonl.gz").read_bytes()).endswith(b'{"number":4}\n')


def test_a_killed_run_is_readable_with_its_open_spans(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    # Killed in the middle, as if the process were gone: nothing is closed.
    rows = [(0.0, 40, 20)] * 40
    with pytest.raises(Interrupted):
        run(trace_of(rows), limits("guaranteed_no_evict"), directory, kill_after=700)
    data = load_run(directory)
    assert data.partial
    assert data.summary is None
    last_flushed = int(data.iterations["iteration_counter"].max())
    assert 300 < last_flushed < 700
    # The requests that were running then are in the spans up to that iteration.
    running = data.spans[data.spans["last_iteration"] == last_flushed]
    scheduled = int(data.iterations["scheduled_requests"].iloc[-1])
    assert int(running["phase"].isin(["context", "generation", "recompute"]).sum()) == scheduled
    assert not data.spans.duplicated(["request_id", "first_iteration"]).any()


def test_many_lines_do_not_wait_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    writer = JsonLinesWriter(path)
    for _ in range(50_000):
        writer.write([b'{"number":1}'])
    on_disk = path.stat().st_size
    writer.close()
    assert path.stat().st_size - on_disk < 2**20 < on_disk * 5


def test_lines_of_failed_and_completed_requests_have_the_same_fields(tmp_path: Path) -> None:
    run(trace_of([(0.0, 9, 4), (0.0, 200, 4)]), limits(), tmp_path / "run")
    completed, failed = sorted(lines(tmp_path / "run", "requests.jsonl"), key=lambda line: str(line["outcome"]))
    assert (completed["outcome"], failed["outcome"]) == ("completed", "failed")
    assert list(completed) == list(failed)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return recorded(tmp_path_factory.mktemp("full") / "run")


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return recorded(tmp_path_factory.mktemp("thinned") / "run", iteration_stats_every=10)


def test_thinned_statistics_change_no_figure_and_no_other_file(full: RunData, thinned: RunData) -> None:
    assert thinned.summary == full.summary
    assert full.summary is not None
    assert full.summary["pauses"] > 0
    for file in ("spans.jsonl", "requests.jsonl"):
        assert (thinned.path / file).read_bytes() == (full.path / file).read_bytes()
    kept = lines(thinned.path, "iterations.jsonl")
    assert len(kept) < full.summary["iterations"] / 2
    assert [line for line in lines(full.path, "iterations.jsonl") if line in kept] == kept


@pytest.mark.parametrize("settings", [{}, {"recording_format": "jsonl.gz"}, {"type": "v1"}])
def test_thinned_statistics_change_no_figure_of_the_steady_state(settings: dict[str, Any], tmp_path: Path) -> None:
    """Those of classes included; and the lines are those of a run that thins them as it writes."""

    def steady(name: str, every: int, **more: Any) -> RunData:
        rows = [
            TraceRequest(index, 0.004 * index, 30, 20 + index % 9, 20 + index % 9, request_class="ab"[index % 2])
            for index in range(300)
        ]
        config = RunConfig(
            device="sim:h100-sxm",
            model="llama-3.1-8b",
            max_batch_size=40,
            max_num_tokens=256,
            max_tokens_in_paged_kvcache=640,
            policy="max_utilization",
            output=str(tmp_path / name),
            iteration_stats_every=every,
            **more,
            **settings,
        )
        run_trace(Trace("steady", rows, "0" * 64, "test"), config)
        return load_run(tmp_path / name)

    whole, thin = (steady(str(every), every, enable_steady_state=True) for every in (1, 10))
    assert whole.summary is not None
    assert whole.summary["steady_state"] is not None
    assert len(whole.summary["by_class"]) == 2
    assert thin.summary == whole.summary
    files = [run_directory.find_iterations(run.path) for run in (thin, steady("plain", 10), whole)]
    written = [list(read_lines(path, ())) for path in files]
    assert written[0] == written[1]
    assert len(written[0]) < len(written[2]) / 2


def test_what_thinned_statistics_left_out_is_filled_in(full: RunData, thinned: RunData) -> None:
    exact = [
        "iteration_counter",
        "context_requests",
        "total_context_tokens",
        "generation_requests",
        "budget_used",
        "scheduled_requests",
        "pauses",
        "bound_by",
    ]
    pd.testing.assert_frame_equal(thinned.iterations[exact], full.iterations[exact], check_dtype=False)
    recorded_rows = [line["Iteration Counter"] for line in lines(thinned.path, "iterations.jsonl")]
    for column in ("start_s", "latency_ms", "used_kv_cache_blocks"):
        known, filled_in = full.iterations[column], thinned.iterations[column]
        assert filled_in[recorded_rows].tolist() == pytest.approx(known[recorded_rows].tolist())
    assert np.abs(thinned.iterations["start_s"] - full.iterations["start_s"]).max() < 1.0


def test_figures_of_a_killed_thinned_run_are_those_that_are_known(full: RunData, thinned: RunData) -> None:
    killed, complete = RunData(thinned.path, thinned.run, None), RunData(full.path, full.run, None)
    left_out = {"itl_s", "empty_generation_slots", "padding_waste", "kv_blocks", "kv_tokens", "bound_by_time"}
    thin, whole = figures(killed), figures(complete)
    assert {name: value for name, value in thin.items() if name not in left_out} == {
        name: value for name, value in whole.items() if name not in left_out
    }
    assert thin["itl_s"]["p50"] is None
    assert thin["padding_waste"] is None


@pytest.mark.usefixtures("without_layout")
def test_reports_and_charts_say_that_statistics_are_thinned(thinned: RunData, tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    print_report(thinned, console)
    assert "one of 10 iterations has its statistics recorded. The figures are of all." in console.export_text()
    console = Console(record=True, width=200)
    print_report(RunData(thinned.path, thinned.run, None), console)
    assert "ITL and padding of this partial run are unknown" in console.export_text()
    charts = plot_run(thinned, tmp_path / "charts", only=("latency", "itl", "timeline", "queue"))
    assert len(charts) == 8
    latency = (tmp_path / "charts" / "latency.svg").read_text()
    for chart in charts:
        assert chart.suffix == ".png" or "one of 10 iterations recorded" in chart.read_text()
    assert "not drawn: only one of 10" in latency
