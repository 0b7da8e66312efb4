"""Figures from the files of a run: equal to its summary, and restricted to the steady state."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from ifbbench.analysis.token_times import inter_token_gaps
from ifbbench.cli.main import main
from ifbbench.replay.run import run_trace
from ifbbench.report.compat.vllm_bench import result
from ifbbench.rundir.figures import recorded_figures, steady_figures
from ifbbench.rundir.reader import RunData, load_run
from ifbbench.settings.config import RunConfig
from tests.report.test_tables import printed

SETTINGS: dict[str, Any] = {
    "device": "sim:h100-sxm",
    "model": "llama-3.1-8b",
    "max_batch_size": 8,
    "max_num_tokens": 256,
    "enable_chunked_context": True,
    "max_seq_len": 2048,
    "slo": "ttft=300ms,e2e.p50=1s",
}


def recorded(tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> RunData:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"request_id": index, **row}) + "\n" for index, row in enumerate(rows)))
    return load_run(run_trace(str(trace), RunConfig(**SETTINGS | changes, output=str(tmp_path / "run"))).directory)


def closed_loop(count: int) -> list[dict[str, Any]]:
    """Requests of two classes, the first eight of which ramp up and the last eight drain."""
    draw = np.random.default_rng(1)
    return [
        {
            "arrival_s": 0.0,
            "prompt_len": int(draw.integers(50, 400)),
            "output_len": int(draw.integers(20, 80)),
            "class": draw.choice(["chat", "code"]),
        }
        for _ in range(count)
    ]


def equal(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for name, value in expected.items():
            equal(found[name], value, f"{where}.{name}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9), where
    else:
        assert found == expected, where


@pytest.mark.parametrize(
    "changes",
    [{}, {"engine_overhead": "vllm"}, {"draft_ngram": 2, "acceptance_rate": "0.7"}],
    ids=["alone", "behind a serving process", "with draft tokens"],
)
def test_figures_from_files_are_those_of_the_summary(changes: dict[str, Any], tmp_path: Path) -> None:
    rows = closed_loop(60)
    for index, row in enumerate(rows):
        row |= {"arrival_s": index * 0.01, "priority": [0.5, 0.9][index % 2]}
    rows[7]["prompt_len"] = 9_999
    run = recorded(tmp_path, rows, max_tokens_in_paged_kvcache=3_000, policy="max_utilization", **changes)
    assert run.summary is not None
    assert run.summary["pauses"]
    # What a simulated device draws is not in the files of lines.
    equal(recorded_figures(run), {name: value for name, value in run.summary.items() if name != "energy"})


def test_gaps_between_tokens_are_those_that_clients_see(tmp_path: Path) -> None:
    """A serving process delivers tokens later than their iteration ends: charts, and the results of other benchmarks,
    have the same gaps as the summary."""
    run = recorded(tmp_path, closed_loop(40), engine_overhead="vllm", concurrency=8)
    assert run.summary is not None
    assert (run.iterations["delivery_ms"] > 0).any()
    gaps_s = inter_token_gaps(run)
    assert [gaps_s.mean(), gaps_s.max()] == pytest.approx([run.summary["itl_s"][name] for name in ("mean", "max")])
    assert result(run)["mean_itl_ms"] == pytest.approx(run.summary["itl_s"]["mean"] * 1000)


def test_classes_of_which_no_request_completes_have_no_fairness(tmp_path: Path) -> None:
    rows = [{"arrival_s": 0.0, "prompt_len": 9_999, "output_len": 5, "class": name} for name in "ab"]
    run = recorded(tmp_path, rows)
    assert run.summary is not None
    assert run.summary["requests"] == {"total": 2, "completed": 0, "failed": 2}
    assert run.summary["fairness_index"] is None
    for words in (["report"], ["report", "--json"], ["why", "--budget", "0"], ["compare", str(run.path)]):
        assert CliRunner().invoke(main, [words[0], str(run.path), *words[1:]]).exit_code == 0


def test_the_steady_state_covers_what_ended_in_its_window(tmp_path: Path) -> None:
    run = recorded(tmp_path, closed_loop(120), concurrency=8, enable_steady_state=True)
    summary = run.summary
    assert summary is not None
    start_s, end_s = summary["steady_state"]["start_s"], summary["steady_state"]["end_s"]
    requests, iterations = run.requests, run.iterations
    inside = requests[(requests["end_s"] >= start_s) & (requests["end_s"] <= end_s)]
    assert 10 < len(inside) < len(requests)  # without those that drain
    assert summary["requests"] == {"total": len(inside), "completed": len(inside), "failed": 0}
    assert summary["duration_s"] == pytest.approx(end_s - start_s)
    assert summary["request_throughput_per_s"] == pytest.approx(len(inside) / (end_s - start_s))
    assert summary["ttft_s"]["p99"] == pytest.approx(inside["ttft_s"].quantile(0.99))
    ends = iterations["start_s"] + iterations["latency_ms"] / 1000
    of_window = iterations[(ends >= start_s) & (ends <= end_s)]
    assert summary["iterations"] == len(of_window)
    assert summary["bound_by"]["num_tokens"] == pytest.approx((of_window["bound_by"] == "num_tokens").mean())
    assert summary["itl_s"]["mean"] == pytest.approx(gaps_of(run, ends, start_s, end_s, inside).mean())
    assert sum(group["requests"]["total"] for group in summary["by_class"].values()) == len(inside)
    equal(steady_figures(run), summary)
    assert "Steady state: the figures cover" in printed(run.path)


def gaps_of(run: RunData, ends: pd.Series, start_s: float, end_s: float, inside: pd.DataFrame) -> Any:
    """Gaps between tokens that end in the window, of the requests that do."""
    gaps = []
    for request in inside["request_id"]:
        times: list[float] = []
        for span in run.spans[run.spans["request_id"] == request].itertuples():
            if span.produced == span.produced:
                times += ends[span.last_iteration - int(span.produced) + 1 : span.last_iteration + 1].tolist()
        gaps += [after - before for before, after in pairwise(times) if start_s <= after <= end_s]
    return np.array(gaps)


def test_without_a_steady_state_the_figures_are_of_the_whole_run(tmp_path: Path) -> None:
    run = recorded(tmp_path, closed_loop(5), enable_steady_state=True)
    assert run.summary is not None
    assert run.summary["steady_state"] is None
    assert run.summary["requests"]["total"] == 5
    assert "No steady state was found" in printed(run.path)


def test_an_overloaded_run_says_so(tmp_path: Path) -> None:
    rows = [row | {"arrival_s": index * 0.005} for index, row in enumerate(closed_loop(200))]
    run = recorded(tmp_path, rows, max_batch_size=4)
    assert run.summary is not None
    assert run.summary["overloaded"]
    assert 100 < run.summary["queue_growth_requests_per_s"] < 200  # 200 requests/s arrive
    assert "Overloaded: the queue grew by" in printed(run.path)


def test_the_report_is_readable_at_100_columns(tmp_path: Path) -> None:
    run = recorded(tmp_path, closed_loop(60))
    tables = [line for line in printed(run.path).splitlines()[2:] if line and not line.rstrip().endswith(".")]
    assert max(len(line.rstrip()) for line in tables) <= 100
