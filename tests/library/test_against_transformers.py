"""Beams, logits and log-probabilities of the batch manager, held against `transformers` on a small random model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ifbbench import BatchManager, InferenceRequest, SamplingParams
from ifbbench.engine.sampling_params import EarlyStopping
from ifbbench.serving.library.client import Tensors

VOCABULARY = 61
END_ID = 2
PAD_ID = 60
TOLERANCE = 1e-4
# What `transformers` calls the three.
EARLY_STOPPING = {EarlyStopping.ALWAYS: True, EarlyStopping.HEURISTIC: False, EarlyStopping.NEVER: "never"}

SCHEDULES: dict[str, dict[str, Any]] = {
    "whole prompts": {"max_num_tokens": 200, "tokens_per_block": 4},
    "chunks": {"enable_chunked_context": True, "max_num_tokens": 24, "context_chunk_unit": 8, "tokens_per_block": 4},
    "pauses": {"max_num_tokens": 200, "tokens_per_block": 4, "kv_cache_config": {"max_tokens": 128}},
    "pauses and chunks": {
        "enable_chunked_context": True,
        "max_num_tokens": 24,
        "context_chunk_unit": 1,
        "tokens_per_block": 1,
        "kv_cache_config": {"max_tokens": 110},
    },
    "reuse": {
        "max_num_tokens": 200,
        "tokens_per_block": 4,
        "max_batch_size": 4,
        "kv_cache_config": {"enable_block_reuse": True},
    },
    "reuse and chunks": {
        "enable_chunked_context": True,
        "max_num_tokens": 24,
        "context_chunk_unit": 1,
        "tokens_per_block": 1,
        "max_batch_size": 3,
        "kv_cache_config": {"enable_block_reuse": True},
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    directory = tmp_path_factory.mktemp("checkpoint")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Lengths on both sides of the borders of blocks of 4 and 16 tokens."""
    draw = np.random.default_rng(1)
    return [draw.integers(3, VOCABULARY, length).tolist() for length in (1, 3, 4, 5, 15, 16, 17, 33)]


def answers(
    checkpoint: Path, requests: list[InferenceRequest], policy: str, model_type: str = "IFB", **optional_params: Any
) -> tuple[dict[int, Tensors], int]:
    """Final tensors by request id, and the number of pauses, from a manager that has all requests at once."""
    waiting: Iterator[InferenceRequest] = iter(requests)
    found: dict[int, Tensors] = {}
    pauses = 0

    def get(count: int) -> list[InferenceRequest]:
        return [request for _, request in zip(range(count), waiting, strict=False)]

    def send(request_id: int, tensors: Tensors, is_final: bool, error: str) -> None:
        assert (is_final, error) == (True, "")
        found[request_id] = tensors

    def count_pauses(statistics: str) -> None:
        nonlocal pauses
        pauses += json.loads(statistics).get("Paused Requests", 0)

    width = max(request.beam_width for request in requests)
    manager = BatchManager(
        str(checkpoint),
        model_type,
        width,
        policy,
        get,
        send,
        None,
        count_pauses,
        optional_params={"device": "cpu", **optional_params},
        start=False,
    )
    manager.close()
    manager.kv_cache.check_consistency()
    assert manager.kv_cache.free_blocks == manager.config.num_blocks
    return found, pauses


@pytest.mark.parametrize("model_type", ["V1", "InflightBatching", "InflightFusedBatching"])
@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
def test_beams_equal_those_of_transformers(
    model_type: str, early_stopping: EarlyStopping, checkpoint: Path, reference: Any, prompts: list[list[int]]
) -> None:
    sampling = SamplingParams(length_penalty=0.6, early_stopping=early_stopping)
    requests = [
        InferenceRequest(
            index, prompt, 12, end_id=END_ID, pad_id=PAD_ID, beam_width=3, sampling=sampling, return_log_probs=True
        )
        for index, prompt in enumerate(prompts)
    ]
    found, _ = answers(checkpoint, requests, "guaranteed_no_evict", model_type, tokens_per_block=4, max_num_tokens=200)
    for request in requests:
        check_beams(request, found[request.request_id], reference)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_beams_do_not_depend_on_the_schedule(
    schedule: str, checkpoint: Path, reference: Any, prompts: list[list[int]]
) -> None:
    requests = [
        InferenceRequest(index, prompt, 10, end_id=END_ID, pad_id=PAD_ID, beam_width=4, return_log_probs=True)
        # All prompts twice, so that there is something to reuse.
        for index, prompt in enumerate(prompts * 2)
    ]
    found, pauses = answers(checkpoint, requests, "max_utilization", **SCHEDULES[schedule])
    assert (pauses > 0) == ("pauses" in schedule)
    for request in requests:
        check_beams(request, found[request.request_id], reference)


def check_beams(request: InferenceRequest, tensors: Tensors, reference: Any) -> None:
    width, prompt = request.beam_width, list(request.input_ids)
    with torch.inference_mode():
        expected = reference.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
            output_scores=True,
            return_dict_in_generate=True,
            length_penalty=request.sampling.length_penalty,
            early_stopping=EARLY_STOPPING[request.sampling.early_stopping],
        )
    lengths = tensors["sequence_length"][0]
    for beam, sequence in enumerate(expected.sequences.tolist()):
        ours = tensors["output_ids"][0, beam, : lengths[beam]].tolist()
        assert ours == sequence[: len(ours)]
        assert set(sequence[len(ours) :]) <= {PAD_ID}
        outputs = len(ours) - len(prompt)
        cumulative = float(tensors["cum_log_probs"][0, beam])
        score = cumulative / outputs**request.sampling.length_penalty
        assert score == pytest.approx(float(expected.sequences_scores[beam]), abs=TOLERANCE)
        assert tensors["output_log_probs"][0, beam, :outputs].sum() == pytest.approx(cumulative, abs=TOLERANCE)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logits_and_log_probs_equal_those_of_transformers(
    schedule: str, checkpoint: Path, reference: Any, prompts: list[list[int]]
) -> None:
    requests = [
        InferenceRequest(
            index,
            prompt,
            20,
            return_log_probs=True,
            return_context_logits=index % 3 != 1,
            return_generation_logits=index % 3 != 2,
        )
        for index, prompt in enumerate(prompts)
    ]
    found, pauses = answers(checkpoint, requests, "max_utilization", **SCHEDULES[schedule])
    assert (pauses > 0) == ("pauses" in schedule)
    for request in requests:
        tensors, prompt_len = found[request.request_id], len(request.input_ids)
        tokens = torch.from_numpy(tensors["output_ids"][0].astype(np.int64))
        with torch.inference_mode():
            logits = reference(tokens).logits[0]
        expected = logits[prompt_len - 1 : -1].log_softmax(-1).gather(1, tokens[0, prompt_len:, None])[:, 0]
        check_close(tensors["output_log_probs"][0, 0], expected)
        check_close(tensors["cum_log_probs"][0], expected.sum()[None])
        if request.return_context_logits:
            check_close(tensors["context_logits"][0], logits[:prompt_len])
        else:
            assert tensors["context_logits"].shape == (1, 1, 1)
        if request.return_generation_logits:
            check_close(tensors["generation_logits"][0, 0], logits[prompt_len - 1 : -1])
        else:
            assert tensors["generation_logits"].shape == (1, 1, 1, 1)


def test_generation_logits_of_a_beam_are_those_of_its_own_past(checkpoint: Path, reference: Any) -> None:
    request = InferenceRequest(7, [5, 9, 30, 41, 22], 9, beam_width=3, return_generation_logits=True)
    found, _ = answers(checkpoint, [request], "guaranteed_no_evict", tokens_per_block=4)
    for beam in range(3):
        tokens = torch.from_numpy(found[7]["output_ids"][0, beam : beam + 1].astype(np.int64))
        with torch.inference_mode():
            logits = reference(tokens).logits[0]
        check_close(found[7]["generation_logits"][0, beam], logits[4:-1])


def check_close(ours: np.ndarray, theirs: torch.Tensor) -> None:
    assert ours.shape == tuple(theirs.shape)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=TOLERANCE, rtol=TOLERANCE)
