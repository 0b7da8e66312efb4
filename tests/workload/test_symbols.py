"""Numbers for tokens that nobody has spelt out: equal where the trace says so, and nowhere else."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.workload.prompts import MAX_PREFIX_ID, output_symbol, symbolic_runs, with_prefix
from ifbbench.workload.trace import PREFIX_BLOCK, TraceRequest

INT64 = range(-(2**63), 2**63)


def request(prompt_len, runs=()):
    plain = TraceRequest(0, 0.0, prompt_len, 1, 1)
    return with_prefix(plain, runs) if runs else plain


def test_blocks_then_the_request_s_own():
    runs = symbolic_runs(request(800, [(3, 512), (4, 88)]), index=5)
    assert runs[:2] == [(3 * 512, 512), (4 * 512, 88)]
    assert [length for _, length in runs] == [512, 88, 200]
    assert runs[2] == (symbolic_runs(request(200), index=5)[0][0], 200)
    assert runs[2][0] < 0


def test_nothing_of_its_own():
    assert symbolic_runs(request(600, [(3, 512), (4, 88)]), index=0) == [(1536, 512), (2048, 88)]


def test_prompt_with_token_ids_has_no_runs():
    with pytest.raises(ValueError, match="request 0 has token ids"):
        symbolic_runs(TraceRequest(0, 0.0, 2, 1, 1, prompt_tokens=(1, 2)), index=0)


@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=2, unique=True), st.integers(0, 2**40))
def test_what_belongs_to_one_request_meets_nothing_else(indices, prefix_id):
    length = 2**24
    ranges = [(prefix_id * PREFIX_BLOCK, PREFIX_BLOCK)]
    for index in indices:
        ranges += symbolic_runs(request(length), index)
        assert output_symbol(index, length - 1) == output_symbol(index, 0) + length - 1
        ranges.append((output_symbol(index, 0), length))
    ranges.sort()
    for (first, length), (following, _) in pairwise(ranges):
        assert first + length <= following
    assert ranges[0][0] in INT64


def test_64_bits_are_enough():
    runs = symbolic_runs(request(512, [(MAX_PREFIX_ID, 512)]), index=0)
    assert sum(runs[0]) in INT64
    assert symbolic_runs(request(2**31 - 1), index=2**31 - 2)[0][0] in INT64
