"""The repetition penalty is that of transformers, alone, in mixed batches, after pauses and with batches ahead."""

from pathlib import Path

import pytest
import torch

from ifbbench.engine.sampling_params import SamplingParams
from tests.torch.driving import FakeRequest, RecordingModel, driver_of, requests_of
from tests.torch.transformers_reference import Reference, checkpoint

LENGTHS = [(5, 19), (70, 22), (1, 26), (33, 8), (64, 15)]


def generated(reference: Reference, request: FakeRequest) -> list[int]:
    """The greedy tokens of transformers' `generate` with the request's penalty."""
    prompt = torch.tensor([request.prompt[: request.original_prompt_len].tolist()])
    tokens = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=request.output_len,
        repetition_penalty=request.sampling.repetition_penalty,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(tokens[0, prompt.shape[1] :].tolist())


def some_penalised(model: RecordingModel, temperature: float = 0.0) -> list[FakeRequest]:
    requests = requests_of(LENGTHS, model.config.vocab_size)
    for request, penalty in zip(requests, (1.0, 1.3, 2.0, 5.0, 0.7), strict=True):
        request.sampling = SamplingParams(temperature, repetition_penalty=penalty, seed=request.request_id)
    return requests


@pytest.mark.parametrize(("slots", "largest_chunk", "pauses"), [(1, None, 0), (5, None, 0), (2, 9, 4)])
def test_greedy_tokens(tmp_path: Path, slots: int, largest_chunk: int | None, pauses: int) -> None:
    model, reference = checkpoint(tmp_path)
    requests = some_penalised(model)
    driver_of(model, slots, 16, 100, seed=slots).run(requests, largest_chunk, pauses)
    for request in requests:
        assert request.outputs == generated(reference, request)
    plain = requests_of(LENGTHS, model.config.vocab_size)
    driver_of(model, 5, 16, 100).run(plain)
    assert [a.outputs == b.outputs for a, b in zip(plain, requests, strict=True)] == [True, False, False, False, False]


def test_sampled_tokens_do_not_depend_on_the_batch_or_on_pauses(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    outputs = []
    for slots, chunk, pauses in ((1, None, 0), (5, 8, 0), (2, 20, 4)):
        requests = some_penalised(model, temperature=1.2)
        driver_of(model, slots, 16, 100).run(requests, chunk, pauses)
        outputs.append([request.outputs for request in requests])
    assert outputs[0] == outputs[1] == outputs[2]


def test_tokens_count_before_the_host_has_seen_them(tmp_path: Path) -> None:
    model, reference = checkpoint(tmp_path)
    (request,) = requests_of([(8, 12)], model.config.vocab_size, sampling=SamplingParams(repetition_penalty=1.8))
    request.slot = 0
    driver = driver_of(model, 1, 4, 24)
    driver.submit([(request, 8)], [])
    for _ in range(11):
        driver.submit([], [request])
    for _ in range(12):
        driver.collect()
    assert request.outputs == generated(reference, request)


def test_no_memory_without_a_penalty(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    driver = driver_of(model, 2, 4, 24)
    driver.run(requests_of([(8, 3), (4, 4)], model.config.vocab_size))
    assert driver.executor._processors._counts is None
