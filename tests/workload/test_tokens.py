"""Prompt token ids."""

import numpy as np
import pytest

from ifbbench.errors import InputError
from ifbbench.workload.tokens import prompt_tokens
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
