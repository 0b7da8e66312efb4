"""The decoder says what transformers' LlamaForCausalLM says, however the scheduler cuts and places the work."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ifbbench.engine.sampling_params import OutputOptions, SamplingParams
from ifbbench.settings.config import RunConfig
from ifbbench.torch.build import load_model
from tests.torch.driving import FakeRequest, driver_of, requests_of
from tests.torch.transformers_reference import Reference, checkpoint, reference_logits

LENGTHS = [(5, 9), (70, 12), (1, 6), (33, 1), (130, 10), (16, 16), (64, 5), (2, 20), (301, 4)]
LONGEST = 320
NEAR_TIE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def assert_greedy(reference: Reference, request: FakeRequest) -> None:
    """Every output token is the reference's best given the tokens before; a near tie ends the comparison."""
    prompt = request.prompt[: request.original_prompt_len].tolist()
    logits = reference_logits(reference, prompt + request.outputs)[len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    for step, token in enumerate(request.outputs):
        if best[step] - second[step] < NEAR_TIE:
            return
        assert token == int(logits[step].argmax()), f"request {request.request_id}, output {step}"


VARIANTS = {
    "grouped queries": {},
    "tied embeddings": {"tie_word_embeddings": True},
    "llama3 rope": {"rope_theta": 50_000.0, "rope_scaling": LLAMA3},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own head size": {"head_dim": 16, "num_key_value_heads": 6},
    "sharded": {"max_shard_size": "60KB"},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_of_every_position(tmp_path: Path, changes: dict[str, object]) -> None:
    model, reference = checkpoint(tmp_path, **changes)
    (request,) = requests_of([(200, 40)], model.config.vocab_size)
    driver = driver_of(model, num_slots=1, tokens_per_block=16, longest=240)
    request.slot = 0
    seen = []
    for length in (150, 7, 43, *([0] * 39)):
        driver.step([(request, length)] if length else [], [] if length else [request])
        seen += list(model.last_logits)
    expected = reference_logits(reference, request.prompt.tolist() + request.outputs)[199:-1]
    torch.testing.assert_close(torch.stack(seen), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("largest_chunk", [None, 90, 7])
@pytest.mark.parametrize("tokens_per_block", [1, 16, 64])
def test_greedy_tokens_in_mixed_batches(tmp_path: Path, tokens_per_block: int, largest_chunk: int | None) -> None:
    model, reference = checkpoint(tmp_path)
    requests = requests_of(LENGTHS, model.config.vocab_size)
    driver_of(model, 3, tokens_per_block, LONGEST, seed=tokens_per_block).run(requests, largest_chunk, pauses=4)
    for request in requests:
        assert len(request.outputs) == request.output_len
        assert_greedy(reference, request)


def test_tiny_model_by_name_is_seeded_and_not_degenerate() -> None:
    outputs = []
    for seed in (1, 1, 2):
        loaded = load_model(RunConfig(device="cpu", seed=seed))
        requests = requests_of([(12, 24), (40, 24)], loaded.config.vocab_size)
        driver_of(loaded, 2, 32, 64).run(requests)
        outputs.append([request.outputs for request in requests])
    assert outputs[0] == outputs[1] != outputs[2]
    assert all(len(set(tokens)) > 12 for tokens in outputs[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_runs(dtype: str) -> None:
    loaded = load_model(RunConfig(device="cpu", dtype=dtype))
    requests = requests_of([(12, 4), (40, 4)], loaded.config.vocab_size)
    requests[0].sampling = SamplingParams(repetition_penalty=1.5)
    requests[0].options = OutputOptions(False, True, True, True)
    driver_of(loaded, 2, 16, 64).run(requests, largest_chunk=16)
    assert all(len(request.outputs) == 4 for request in requests)
    logits = requests[0].numbers.generation_logits()
    assert logits is not None
    assert logits.dtype == np.float32
    beams = requests_of([(12, 4), (40, 4)], loaded.config.vocab_size, beam_width=2)
    driver_of(loaded, 2, 16, 64, max_beams=2).run(beams, largest_chunk=16)
    assert all(len(request.search.final()) == 2 for request in beams)
