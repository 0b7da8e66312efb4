"""Log-probabilities and logits that requests ask for are those of transformers, whatever the batches were."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ifbbench.engine.batch import StepOutputs
from ifbbench.engine.sampling_params import OutputOptions, SamplingParams
from tests.torch.driving import FakeRequest, driver_of, requests_of
from tests.torch.transformers_reference import Reference, checkpoint, reference_logits

LENGTHS = [(5, 9), (70, 12), (1, 6), (33, 1), (130, 10), (16, 16)]
ASKING = [
    OutputOptions(),
    OutputOptions(return_log_probs=True),
    OutputOptions(return_context_logits=True),
    OutputOptions(return_generation_logits=True),
    OutputOptions(False, True, True, True),
    OutputOptions(),
]
NOT_PLAIN = SamplingParams(temperature=1.5, top_k=30, top_p=0.9, seed=5, repetition_penalty=1.4)


def assert_numbers(reference: Reference, request: FakeRequest) -> None:
    """Each number the request asked for is the reference's for its tokens, and there are no others."""
    prompt = request.prompt[: request.original_prompt_len].tolist()
    logits = reference_logits(reference, prompt + request.outputs)
    by_outputs = logits[len(prompt) - 1 : -1]
    log_probs = by_outputs.log_softmax(-1).gather(1, torch.tensor(request.outputs)[:, None])[:, 0]
    numbers, options = request.numbers, request.options
    if options.return_log_probs:
        np.testing.assert_allclose(numbers.log_probs(), log_probs, atol=1e-4)
    for found, expected, asked in (
        (numbers.context_logits, logits[: len(prompt)], options.return_context_logits),
        (numbers.generation_logits(), by_outputs, options.return_generation_logits),
    ):
        assert (found is not None) == asked
        if found is not None:
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("slots", "largest_chunk", "pauses", "sampling"),
    [(6, None, 0, NOT_PLAIN), (3, 20, 0, SamplingParams()), (4, 7, 5, NOT_PLAIN)],
)
def test_numbers_in_mixed_batches(
    tmp_path: Path, slots: int, largest_chunk: int | None, pauses: int, sampling: SamplingParams
) -> None:
    model, reference = checkpoint(tmp_path)
    requests = requests_of(LENGTHS, model.config.vocab_size, sampling=sampling)
    for request, options in zip(requests, ASKING, strict=True):
        request.options = options
    driver_of(model, slots, 16, 160, seed=slots).run(requests, largest_chunk, pauses)
    for request in requests:
        assert_numbers(reference, request)
    plain = requests_of(LENGTHS, model.config.vocab_size, sampling=sampling)
    driver_of(model, 2, 16, 160).run(plain)
    assert [request.outputs for request in requests] == [request.outputs for request in plain]


def test_who_does_not_ask_gets_nothing_and_computes_nothing(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    plain, asking = requests_of([(9, 4), (6, 4)], model.config.vocab_size)
    plain.slot, asking.slot = 0, 1
    asking.options = OutputOptions(False, True, True, True)
    driver = driver_of(model, 2, 4, 16)
    alone = driver.step([(plain, 9)], [])
    assert alone == StepOutputs(tokens=alone.tokens)
    assert model.last_logits.shape[0] == 1
    first_chunk = driver.step([(asking, 4)], [])
    assert (first_chunk.log_probs, list(first_chunk.context_logits)) == (None, [0])
    both = driver.step([(asking, 2)], [plain])
    assert model.last_logits.shape[0] == 2 + 2
    assert (list(both.context_logits), list(both.generation_logits)) == ([0], [0])
    assert both.log_probs is not None
    assert both.log_probs[0] < 0
    assert both.log_probs[1] == 0
    next_step = driver.step([], [plain, asking])
    assert list(next_step.generation_logits) == [1]
    assert next_step.generation_logits[1].shape == (1, model.config.vocab_size)


def test_a_new_owner_of_a_slot_has_its_own_wishes(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    requests = requests_of([(9, 4), (6, 4)], model.config.vocab_size)
    requests[0].options = OutputOptions(False, True, True, True)
    driver_of(model, 1, 4, 16).run(requests)
    assert len(requests[0].numbers.log_probs()) == 4
    assert len(requests[1].numbers.log_probs()) == 0
    assert requests[1].numbers.generation_logits() is None
