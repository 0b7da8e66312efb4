"""The tokens of prompts: ids, and symbols where no ids are recorded."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.errors import InputError
from ifbbench.workload.prompts import MAX_PREFIX_ID, output_symbol, prompt_tokens, symbolic_runs, with_prefix
from ifbbench.workload.trace import PREFIX_BLOCK, TraceRequest

# Token ids.


def request(request_id=3, prompt_len=500, **others):
    return TraceRequest(request_id, others.pop("arrival_s", 0.0), prompt_len, 8, others.pop("output_len", 8), **others)


def test_drawn_ids_fill_the_vocabulary():
    tokens = prompt_tokens(request(), vocab_size=10, seed=1)
    assert tokens.dtype == np.int32
    assert tokens.shape == (500,)
    assert set(tokens.tolist()) == set(range(10))


def test_only_seed_id_and_length_matter():
    tokens = prompt_tokens(request(), 1000, seed=1)
    assert (prompt_tokens(request(arrival_s=9.0, output_len=2, priority=1.0), 1000, seed=1) == tokens).all()
    assert (prompt_tokens(request(), 1000, seed=2) != tokens).any()
    assert (prompt_tokens(request(request_id=4), 1000, seed=1) != tokens).any()


def test_recorded_ids_come_back_as_they_are():
    recorded = request(prompt_len=3, prompt_tokens=(9, 0, 9))
    tokens = prompt_tokens(recorded, vocab_size=10, seed=1)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [9, 0, 9]


def test_recorded_id_beyond_the_vocabulary():
    recorded = request(prompt_len=3, prompt_tokens=(1, 10, 2))
    with pytest.raises(InputError, match=r"request 3: prompt_tokens\[1\] is 10; expected ids below .* 10"):
        prompt_tokens(recorded, vocab_size=10, seed=1)


def test_equal_ids_are_equal_tokens_wherever_they_stand():
    first = prompt_tokens(request(1, 1300, prefix_ids=(7, 8, 9)), 1000, seed=1)
    second = prompt_tokens(request(2, 1200, prefix_ids=(9, 7), prefix_lens=(300, 512)), 1000, seed=1)
    assert (first.shape, second.shape) == ((1300,), (1200,))
    assert (second[:276] == first[1024:]).all()
    assert (second[300:812] == first[:512]).all()
    assert (first[:512] != first[512:1024]).any()
    assert first.dtype == second.dtype == np.int32


def test_tokens_of_an_id_follow_seed_and_vocabulary_and_stay_the_same():
    recorded = request(1, 512, prefix_ids=(7,))
    tokens = prompt_tokens(recorded, 1000, seed=1)
    tokens[:] = -1  # must not reach what other requests get
    again = prompt_tokens(recorded, 1000, seed=1)
    assert again[:4].tolist() == [806, 203, 590, 153]
    assert (prompt_tokens(recorded, 1000, seed=2) != again).any()
    assert prompt_tokens(recorded, 10, seed=1).max() == 9


def test_what_ids_do_not_name_is_the_request_s_own():
    first, second = (prompt_tokens(request(index, 900, prefix_ids=(7,)), 1000, seed=1) for index in (1, 2))
    assert (first[:512] == second[:512]).all()
    assert (first[512:] != second[512:]).any()


# Symbols.

INT64 = range(-(2**63), 2**63)


def request_of(prompt_len, runs=()):
    plain = TraceRequest(0, 0.0, prompt_len, 1, 1)
    return with_prefix(plain, runs) if runs else plain


def test_blocks_then_the_request_s_own():
    runs = symbolic_runs(request_of(800, [(3, 512), (4, 88)]), index=5)
    assert runs[:2] == [(3 * 512, 512), (4 * 512, 88)]
    assert [length for _, length in runs] == [512, 88, 200]
    assert runs[2] == (symbolic_runs(request_of(200), index=5)[0][0], 200)
    assert runs[2][0] < 0


def test_nothing_of_its_own():
    assert symbolic_runs(request_of(600, [(3, 512), (4, 88)]), index=0) == [(1536, 512), (2048, 88)]


def test_prompt_with_token_ids_has_no_runs():
    with pytest.raises(ValueError, match="request 0 has token ids"):
        symbolic_runs(TraceRequest(0, 0.0, 2, 1, 1, prompt_tokens=(1, 2)), index=0)


@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=2, unique=True), st.integers(0, 2**40))
def test_what_belongs_to_one_request_meets_nothing_else(indices, prefix_id):
    length = 2**24
    ranges = [(prefix_id * PREFIX_BLOCK, PREFIX_BLOCK)]
    for index in indices:
        ranges += symbolic_runs(request_of(length), index)
        assert output_symbol(index, length - 1) == output_symbol(index, 0) + length - 1
        ranges.append((output_symbol(index, 0), length))
    ranges.sort()
    for (first, length), (following, _) in pairwise(ranges):
        assert first + length <= following
    assert ranges[0][0] in INT64


def test_64_bits_are_enough():
    runs = symbolic_runs(request_of(512, [(MAX_PREFIX_ID, 512)]), index=0)
    assert sum(runs[0]) in INT64
    assert symbolic_runs(request_of(2**31 - 1), index=2**31 - 2)[0][0] in INT64
