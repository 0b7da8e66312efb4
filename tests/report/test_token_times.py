"""Token times are worked out from spans, through pauses and chunks."""

from pathlib import Path

import numpy as np
import pytest

from ifbbench.report.figures import IterationClock, inter_token_gaps, output_tokens, token_iterations
from ifbbench.report.load import load_run
from tests.report.example_runs import timeline, write_documentation_run, write_large_run, write_run


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
    clock = IterationClock(np.array([0.0, 2.0]), np.array([0.0, 2.0]), np.array([1.0, 3.0]))
    assert clock.starts([0, 1, 2]).tolist() == [0, 1, 2]
    assert clock.ends([1]).tolist() == [2]
