"""Token times follow from spans, through pauses and chunks; gptManagerBenchmark's figures are computed by hand."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from ifbbench.analysis.token_times import IterationClock, inter_token_gaps, output_tokens, token_iterations
from ifbbench.report.compat.gpt_manager_benchmark import benchmark_figures, benchmark_lines, write_benchmark_csv
from ifbbench.report.latency_charts import Pool
from ifbbench.rundir.reader import RunData, load_run
from tests.report.example_runs import timeline, write_documentation_run, write_large_run, write_run

# The columns as gptManagerBenchmark writes them.
COLUMNS = [
    "num_samples",
    "num_error_samples",
    "total_latency(ms)",
    "seq_throughput(seq/sec)",
    "token_throughput(token/sec)",
    "avg_sequence_latency(ms)",
    "max_sequence_latency(ms)",
    "min_sequence_latency(ms)",
    "p99_sequence_latency(ms)",
    "p90_sequence_latency(ms)",
    "p50_sequence_latency(ms)",
    "avg_acceptance_rate(tokens/decoding steps)",
    "avg_time_to_first_token(ms)",
    "max_time_to_first_token(ms)",
    "min_time_to_first_token(ms)",
    "p99_time_to_first_token(ms)",
    "p90_time_to_first_token(ms)",
    "p50_time_to_first_token(ms)",
    "avg_inter_token_latency(ms)",
    "max_inter_token_latency(ms)",
    "min_inter_token_latency(ms)",
    "p99_inter_token_latency(ms)",
    "p90_inter_token_latency(ms)",
    "p50_inter_token_latency(ms)",
    "avg_user_tokens_per_second(tokens/sec/user)",
    "max_user_tokens_per_second(tokens/sec/user)",
    "min_user_tokens_per_second(tokens/sec/user)",
    "p99_user_tokens_per_second(tokens/sec/user)",
    "p90_user_tokens_per_second(tokens/sec/user)",
    "p50_user_tokens_per_second(tokens/sec/user)",
]


NOT_STREAMING = 12  # so many of them when not streaming


def test_context_recompute_and_generation_make_tokens(tmp_path: Path) -> None:
    produced = token_iterations(load_run(write_documentation_run(tmp_path / "docs")))
    assert produced["0"].tolist() == [0, 1, 2, 3]
    assert produced["1"].tolist() == [0, 1, 2, 5, 6, 7]
    assert produced["2"].tolist() == list(range(2, 10))
    assert produced["4"].tolist() == [4, *range(6, 12)]


def test_context_cut_short_by_a_pause_makes_no_token(tmp_path: Path) -> None:
    rows = timeline("cut C4 P R4 R2 G1", "whole C6 P R7 G2 .")
    directory = write_run(tmp_path / "run", rows, {}, max_blocks=9)
    lines = (directory / "requests.jsonl").read_text()
    # The writer takes every context for a finished one; the request that was cut has a token less.
    (directory / "requests.jsonl").write_text(lines.replace('"output_len": 3', '"output_len": 2', 1))
    produced = token_iterations(load_run(directory))
    assert produced["cut"].tolist() == [3, 4]
    assert produced["whole"].tolist() == [0, 2, 3]


def test_large_run_agrees_with_its_requests(tmp_path: Path) -> None:
    run = load_run(write_large_run(tmp_path / "large", requests=40, iterations=300))
    clock, produced = IterationClock.of(run), token_iterations(run)
    for row in run.requests.itertuples():
        times = clock.ends(produced[str(row.request_id)])
        assert len(times) == row.output_len
        assert (times[0], times[-1]) == pytest.approx((row.first_token_s, row.end_s))
    assert len(inter_token_gaps(run)) == run.requests["output_len"].sum() - 40
    assert output_tokens(run).sum() == run.requests["output_len"].sum()


def test_thinned_iterations_are_interpolated() -> None:
    clock = IterationClock(np.array([0.0, 2.0]), np.array([0.0, 2.0]), np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    assert clock.starts([0, 1, 2]).tolist() == [0, 1, 2]
    assert clock.ends([1]).tolist() == [2]
    assert clock.tokens([1]).tolist() == [3]


def run_of_four(directory: Path, streaming: bool = True) -> RunData:
    """Four requests with latencies of 1, 2, 3 and 4 s from arrivals at 0, 0, 1 and 1 s; a fifth failed."""
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps({"name": "four", "config": {"streaming": streaming}}))
    sizes = [(1, None), (11, 0.15), (26, 0.1), (12, 0.25)]
    rows: list[dict[str, object]] = [
        {
            "request_id": str(number),
            "index": number,
            "arrival_s": float(number // 2),
            "prompt_len": 10,
            "output_len": length,
            "ttft_s": 0.5,
            "tpot_s": tpot,
            "e2e_s": number + 1.0,
            "end_s": number // 2 + number + 1.0,
            "outcome": "completed",
        }
        for number, (length, tpot) in enumerate(sizes)
    ]
    rows.append({"request_id": "4", "index": 4, "arrival_s": 0.0, "outcome": "failed", "error": "too long"})
    (directory / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_run(directory)


def test_figures_by_hand(tmp_path: Path) -> None:
    known = benchmark_figures(run_of_four(tmp_path / "four"))
    assert list(known) == COLUMNS
    values = list(known.values())
    assert values[:5] == [4, 1, 5000.0, 0.8, 10.0]
    # Nearest rank of 4 values: p50 is the 2nd, not 2500 as interpolation would have it.
    assert values[5:12] == [2500.0, 4000.0, 1000.0, 4000.0, 4000.0, 2000.0, 1.0]
    assert values[12:18] == [500.0] * 6
    # The request with one token has no gap.
    assert [round(value, 9) for value in values[18:24]] == [round(500 / 3, 9), 250, 100, 250, 250, 150]
    assert [round(value, 9) for value in values[25:]] == [10.0, 4.0, 10.0, 10.0, round(1000 / 150, 9)]


def test_figures_of_tokens_are_given_for_streaming_runs_only(tmp_path: Path) -> None:
    assert list(benchmark_figures(run_of_four(tmp_path / "four", streaming=False))) == COLUMNS[:NOT_STREAMING]


def test_lines_have_two_decimals(tmp_path: Path) -> None:
    lines = benchmark_lines(run_of_four(tmp_path / "four"))
    assert lines[:3] == [
        "[BENCHMARK] num_samples 4",
        "[BENCHMARK] num_error_samples 1",
        "[BENCHMARK] total_latency(ms) 5000.00",
    ]
    assert "[BENCHMARK] avg_inter_token_latency(ms) 166.67" in lines


def test_csv_is_a_header_and_a_row(tmp_path: Path) -> None:
    write_benchmark_csv(run_of_four(tmp_path / "four"), tmp_path / "new" / "figures.csv")
    with (tmp_path / "new" / "figures.csv").open(newline="") as file:
        header, row = csv.reader(file)
    assert header == COLUMNS
    assert row[:4] == ["4", "1", "5000.0", "0.8"]


def test_nothing_completed(tmp_path: Path) -> None:
    run = run_of_four(tmp_path / "four")
    (run.path / "requests.jsonl").unlink()
    lines = benchmark_lines(load_run(run.path))
    assert lines[0] == "[BENCHMARK] num_samples 0"
    assert "[BENCHMARK] p99_sequence_latency(ms) nan" in lines


def test_a_pool_has_the_percentiles_of_all_its_values() -> None:
    random = np.random.default_rng(3)
    values, counts = random.exponential(size=200).round(2), random.integers(1, 9, 200)
    pool, every = Pool.of(values, counts), np.sort(np.repeat(values, counts))
    assert len(pool) == len(every)
    np.testing.assert_allclose(pool.percentiles([0, 37.5, 50, 99, 100]), np.percentile(every, [0, 37.5, 50, 99, 100]))
    np.testing.assert_array_equal(pool.at(np.arange(len(every))), every)
    limits = np.array([-1.0, 0.5, values[0], 100.0])
    np.testing.assert_array_equal(pool.below(limits), np.searchsorted(every, limits))
