"""Prompt token ids."""

import numpy as np
import pytest

from ifbbench.errors import InputError
from ifbbench.workload.prompts import prompt_tokens
from ifbbench.workload.trace import TraceRequest


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
