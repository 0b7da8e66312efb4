"""Each family of decoders says what transformers says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.torch.driving import RecordingModel, driver_of, requests_of
from tests.torch.test_equality_with_transformers import LLAMA3, assert_greedy
from tests.torch.transformers_reference import family_checkpoint, reference_logits

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
QWEN = {"num_key_value_heads": 3, "rms_norm_eps": 1e-6}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {"num_key_value_heads": 6}),
    "llama 3": ("Llama", {"rope_theta": 50_000.0, "rope_scaling": LLAMA3}),
    "llama, linear rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen 2.5": ("Qwen2", QWEN),
    "qwen 2.5, yarn": ("Qwen2", {"rope_scaling": YARN}),
    "qwen 3": ("Qwen3", {"head_dim": 128, "tie_word_embeddings": True, **QWEN}),
    "gpt-2": ("GPT2", {}),
    "gpt-2, erf": ("GPT2", {"activation_function": "gelu", "n_inner": 80, "tie_word_embeddings": False}),
}
each_family = pytest.mark.parametrize(("family", "changes"), FAMILIES.values(), ids=FAMILIES.keys())


def logits_of(model: RecordingModel) -> tuple[list[int], torch.Tensor]:
    """A prompt of 100 tokens, and the logits [16, vocabulary] of its last one and of those that follow."""
    (request,) = requests_of([(100, 16)], model.config.vocab_size)
    driver = driver_of(model, num_slots=1, tokens_per_block=16, longest=128)
    request.slot = 0
    seen = []
    for length in (61, 39, *([0] * 15)):
        driver.step([(request, length)] if length else [], [] if length else [request])
        seen += list(model.last_logits)
    return [*request.prompt.tolist(), *request.outputs], torch.stack(seen)


@each_family
def test_logits(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model, reference = family_checkpoint(tmp_path, family, **changes)
    tokens, logits = logits_of(model)
    torch.testing.assert_close(logits, reference_logits(reference, tokens)[99:-1], atol=1e-4, rtol=0)


@each_family
def test_bf16(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """By relative norm; transformers computes with the same weights in float32 (in bf16 it is as far away)."""
    model, reference = family_checkpoint(tmp_path, family, torch.bfloat16, initializer_range=0.08, **changes)
    tokens, logits = logits_of(model)
    expected = reference_logits(reference, tokens)[99:-1]
    assert float((logits.float() - expected).norm() / expected.norm()) < 1e-2


@each_family
def test_greedy_tokens_of_64_requests_in_mixed_batches(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model, reference = family_checkpoint(tmp_path, family, **changes)
    random = np.random.default_rng(1)
    lengths = [(int(prompt), int(output)) for prompt, output in random.integers(1, (90, 20), (64, 2))]
    requests = requests_of(lengths, model.config.vocab_size)
    driver_of(model, 12, 8, 128).run(requests, largest_chunk=40)
    for request in requests:
        assert len(request.outputs) == request.output_len
        assert_greedy(reference, request)
