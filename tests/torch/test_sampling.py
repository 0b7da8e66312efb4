"""Sampling: what may be drawn, how often, and that nothing but seed and output position decides it."""

import numpy as np
import pytest
import torch

from ifbbench.engine.sampling_params import SamplingParams, uniform_numbers
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.weights import random_weights
from ifbbench.torch.sampling import Sampler, keep_most_likely
from tests.torch.driving import CPU, SMALL, driver_of, requests_of

PROBABILITIES = torch.tensor([0.1, 0.4, 0.2, 0.3])


def draws(params: SamplingParams, count: int) -> np.ndarray:
    """Tokens at `count` output positions of one request, all from the same logits."""
    sampler = Sampler(1)
    sampler.assign(0, params, original_prompt_len=5)
    rows = np.zeros(count, np.int64)
    return sampler.choose(PROBABILITIES.log().expand(count, -1), rows, np.arange(count) + 5).numpy()


def test_temperature_zero_takes_the_best() -> None:
    assert set(draws(SamplingParams(), 20)) == {1}


def test_frequencies_follow_the_probabilities() -> None:
    shares = np.bincount(draws(SamplingParams(temperature=1.0, seed=7), 20_000), minlength=4) / 20_000
    np.testing.assert_allclose(shares, PROBABILITIES, atol=0.015)


def test_temperature_sharpens() -> None:
    shares = np.bincount(draws(SamplingParams(temperature=0.5), 20_000), minlength=4) / 20_000
    np.testing.assert_allclose(shares, PROBABILITIES**2 / (PROBABILITIES**2).sum(), atol=0.015)


@pytest.mark.parametrize("temperature", [1e-30, 1e-310])
def test_smallest_temperatures_are_greedy(temperature: float) -> None:
    assert set(draws(SamplingParams(temperature=temperature), 50)) == {1}


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, {0, 1, 2, 3}),
        (1, 1.0, {1}),
        (2, 1.0, {1, 3}),
        (9, 1.0, {0, 1, 2, 3}),
        (0, 0.4, {1}),
        (0, 0.41, {1, 3}),
        (0, 0.89, {1, 2, 3}),
        (0, 1e-9, {1}),
        (2, 0.6, {1, 3}),
        (2, 0.5, {1}),
    ],
)
def test_top_k_then_top_p(top_k: int, top_p: float, kept: set[int]) -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p), 400)) == kept


def test_rows_with_different_limits_do_not_mix() -> None:
    logits = PROBABILITIES.log().expand(3, -1)
    kept = keep_most_likely(logits, torch.tensor([[1], [0], [3]]), torch.tensor([[1.0], [0.5], [1.0]])).isfinite()
    assert [row.nonzero().flatten().tolist() for row in kept] == [[1], [1, 3], [1, 2, 3]]


def test_uniform_numbers_are_even_and_belong_to_seed_and_counter() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 200)
    counters = np.tile(np.arange(200), 100)
    numbers = uniform_numbers(seeds, counters)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == len(numbers)
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    shuffled = np.random.default_rng(0).permutation(len(numbers))
    np.testing.assert_array_equal(uniform_numbers(seeds[shuffled], counters[shuffled]), numbers[shuffled])


def test_sampled_tokens_do_not_depend_on_the_batch_or_on_pauses() -> None:
    model = LlamaModel(SMALL, random_weights(SMALL, 0, CPU, torch.float32))
    lengths = [(9, 12), (20, 7), (30, 9), (6, 15), (77, 8)]
    outputs = []
    for slots, chunk, pauses in ((1, None, 0), (3, None, 0), (5, 8, 0), (2, 20, 3)):
        requests = requests_of(lengths, SMALL.vocab_size)
        for request in requests:
            top_k, top_p = (20, 0.9) if request.request_id % 2 else (0, 1.0)
            request.sampling = SamplingParams(1.3, top_k, top_p, seed=request.request_id)
        driver_of(model, slots, 16, 100).run(requests, chunk, pauses)
        outputs.append([request.outputs for request in requests])
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    greedy = requests_of(lengths, SMALL.vocab_size)
    driver_of(model, 5, 16, 100).run(greedy)
    assert [request.outputs for request in greedy] != outputs[0]
