"""Gaps that are counted come to the same figures as gaps that are written out."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.recording.metrics import TokenGaps, counted_distribution, distribution

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


@given(counted=st.lists(st.tuples(SECONDS, st.integers(1, 50)), min_size=1, max_size=30))
def test_figures_are_those_of_the_values_written_out(counted):
    values, counts = np.array([value for value, _ in counted]), np.array([count for _, count in counted])
    found, expected = counted_distribution(values, counts), distribution(np.repeat(values, counts))
    assert found.pop("mean") == pytest.approx(expected.pop("mean"), rel=1e-12)
    assert found == expected  # to the last bit


def test_nothing_counted():
    assert counted_distribution(*TokenGaps().counted([])) == distribution([])


def test_a_request_of_one_token_has_no_gap():
    gaps = TokenGaps()
    gaps.add([(3, 3)])
    values, counts = gaps.counted([0.0, 1.0, 2.0, 3.0])
    assert values.size == counts.size == 0
