"""Gaps that are counted come to the same figures as gaps that are written out."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.rundir.metrics import PERCENTILES, TokenGaps, counted_distribution, distribution
from tests.rundir.virtual_run import limits, run, trace_of

SECONDS = st.floats(0.0, 1e6, allow_subnormal=False)
# A request as (iterations until the stretch, its length): 0 iterations between stretches make one gap of one iteration.
STRETCHES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=4)


def stretches_of(request):
    found, end = [], 0
    for wait, length in request:
        found.append((end + wait, end + wait + length - 1))
        end += wait + length
    return found


@given(requests=st.lists(STRETCHES, max_size=8), durations=st.lists(SECONDS, min_size=40, max_size=40))
def test_every_gap_is_counted(requests, durations):
    ends = np.cumsum(durations).tolist()
    gaps, written_out = TokenGaps(), []
    for request in requests:
        stretches = stretches_of(request)
        gaps.add(stretches)
        times = [ends[iteration] for first, last in stretches for iteration in range(first, last + 1)]
        written_out += [later - earlier for earlier, later in pairwise(times)]
    values, counts = gaps.counted(ends)
    assert sorted(np.repeat(values, counts).tolist()) == sorted(written_out)
    assert (counts > 0).all()
    assert (np.diff(values) >= 0).all()


@given(counted=st.lists(st.tuples(SECONDS, st.integers(1, 50)), min_size=1, max_size=30))
def test_figures_are_those_of_the_values_written_out(counted):
    counted.sort()
    values, counts = np.array([value for value, _ in counted]), np.array([count for _, count in counted])
    written_out = np.repeat(values, counts)
    found, expected = counted_distribution(values, counts), distribution(written_out)
    assert found.pop("mean") == pytest.approx(expected["mean"], rel=1e-12)
    assert expected.pop("mean") == written_out.mean()
    assert found == expected  # to the last bit
    percentiles = np.percentile(written_out, list(PERCENTILES.values()))
    assert list(expected.values()) == [values.min(), *percentiles, values.max()]


def test_nothing_counted():
    assert counted_distribution(*TokenGaps().counted([])) == distribution([])


def test_a_request_of_one_token_has_no_gap():
    gaps = TokenGaps()
    gaps.add([(3, 3)])
    values, counts = gaps.counted([0.0, 1.0, 2.0, 3.0])
    assert values.size == counts.size == 0


def test_one_stall_inside_a_long_answer(tmp_path: Path) -> None:
    """1,000 tokens, a millisecond each but for one stall of 2 s: every gap counts in ITL, while TPOT is a mean."""
    run(trace_of([(0.0, 1, 1_000)]), limits(max_seq_len=2_048, num_blocks=300), tmp_path / "run", stalls={500: 2.0})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    gaps = [0.001] * 998 + [2.001]
    assert summary["itl_s"]["max"] == pytest.approx(2.001)
    assert summary["itl_s"]["p99_9"] == pytest.approx(np.percentile(gaps, 99.9))
    assert summary["itl_s"]["p99_9"] > 0.004
    assert summary["itl_s"]["p99"] == pytest.approx(0.001)
    assert summary["tpot_s"]["mean"] == summary["tpot_s"]["max"] == pytest.approx(2.999 / 999)
