"""The decoder with latent attention and experts says what transformers' DeepseekV3ForCausalLM says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config
from ifbbench.torch.model.deepseek import DeepseekModel
from ifbbench.torch.model.kv_cache import PagedKvCache
from ifbbench.torch.model.operations import Operations, operations_for
from ifbbench.torch.model.weights import load_weights
from tests.replay.ranked_runs import run as run_trace_of
from tests.replay.ranked_runs import simulated_digest, write_trace
from tests.torch.driving import CPU, RecordingModel, driver_of, requests_of
from tests.torch.ranks_in_threads import Ranks
from tests.torch.test_equality_with_transformers import LENGTHS, LONGEST, assert_greedy
from tests.torch.test_parts import part_of, run, whole
from tests.torch.transformers_reference import Reference, reference_logits

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.8,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 64,
}


class RecordingDeepseek(RecordingModel, DeepseekModel):
    """A model that keeps the inputs and logits of its last pass."""


def save(directory: Path, **changes: Any) -> Reference:
    """A random small checkpoint, and the model of transformers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    reference = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SHAPE | changes)).float().eval()
    for name, values in [*reference.named_parameters(), *reference.named_buffers()]:
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(values, std=0.2)
        elif name.endswith("gate.weight"):
            torch.nn.init.normal_(values, std=0.3)
        elif name.endswith("norm.weight"):
            torch.nn.init.normal_(values, mean=1.0, std=0.1)
    reference.save_pretrained(directory)
    return reference


def load(directory: Path, operations: Operations | None = None) -> RecordingDeepseek:
    config = load_model_config(directory)
    return RecordingDeepseek(config, load_weights(config, directory, CPU, torch.float32), operations)


VARIANTS = {
    "compressed queries": {},
    "whole queries": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "weights not normalised": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "dense layers only": {"first_k_dense_replace": 3},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_of_every_position(tmp_path: Path, changes: dict[str, object]) -> None:
    reference = save(tmp_path, **changes)
    for operations in (None, operations_for(CPU, torch.float32)):
        model = load(tmp_path, operations)
        (request,) = requests_of([(200, 40)], model.config.vocab_size)
        driver = driver_of(model, num_slots=1, tokens_per_block=16, longest=240)
        request.slot = 0
        seen = []
        for length in (150, 7, 43, *([0] * 39)):
            driver.step([(request, length)] if length else [], [] if length else [request])
            seen += list(model.last_logits)
        expected = reference_logits(reference, request.prompt.tolist() + request.outputs)[199:-1]
        torch.testing.assert_close(torch.stack(seen), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("largest_chunk", "tokens_per_block"), [(None, 16), (7, 1), (90, 64)])
def test_greedy_tokens_in_mixed_batches(tmp_path: Path, tokens_per_block: int, largest_chunk: int | None) -> None:
    reference = save(tmp_path)
    model = load(tmp_path, operations_for(CPU, torch.float32))
    requests = requests_of(LENGTHS, model.config.vocab_size)
    driver_of(model, 3, tokens_per_block, LONGEST, seed=tokens_per_block).run(requests, largest_chunk, pauses=4)
    for request in requests:
        assert len(request.outputs) == request.output_len
        assert_greedy(reference, request)


@pytest.mark.parametrize(("tp_size", "pp_size", "ep_size"), [(2, 1, 1), (2, 1, 2), (4, 1, 2), (1, 3, 1), (2, 2, 2)])
def test_ranks_compute_the_tokens_of_the_whole_model(tp_size: int, pp_size: int, ep_size: int) -> None:
    config = load_model_config("tiny-mla")
    expected = [request.outputs for request in run(whole(config))]

    assert len({token for tokens in expected for token in tokens}) > 8
    for outputs in Ranks(tp_size, pp_size).run(config, lambda part: run(part_of(part)), ep_size):
        assert [request.outputs for request in outputs] == expected


def test_experts_of_two_processes(tmp_path: Path) -> None:
    """Ranks over gloo have the tokens and the schedule of one process, and of a simulated device."""
    trace = write_trace(tmp_path / "trace.jsonl")
    settings = {"model": "tiny-mla", "max_num_samples": 12}
    one, expected = run_trace_of(trace, tmp_path / "one", **settings)
    two, tokens = run_trace_of(trace, tmp_path / "two", tp_size=2, ep_size=2, **settings)

    assert tokens == expected
    digests = {one.summary["schedule_digest"], two.summary["schedule_digest"]}
    assert digests == {simulated_digest(trace, tmp_path, tp_size=2, ep_size=2, **settings)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_loras": 2}, "--lora_dir: is not built"),
        ({"kv_cache_type": "contiguous", "enable_chunked_context": False}, "--kv_cache_type: is not built"),
        ({"model": "tiny", "ep_size": 2, "tp_size": 2}, "--ep_size: 2 parts of the experts, but the model has none"),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    with pytest.raises(InputError, match=message):
        run_trace_of(trace, tmp_path / "run", **{"model": "tiny-mla"} | settings)


def test_the_cache_has_one_latent_vector_a_token(tmp_path: Path) -> None:
    save(tmp_path)
    config = load_model_config(tmp_path)
    cache = PagedKvCache(config, 3, 4, CPU, torch.float32, num_host_blocks=2)
    vectors = torch.randn(2, 1, 32)
    cache.write(1, torch.tensor([0, 5]), vectors, vectors)
    cache.copy_blocks(torch.tensor([1]), torch.tensor([2]))
    cache.offload([2], [1])
    cache.copy_blocks(torch.tensor([0]), torch.tensor([2]))
    cache.onboard([1], [0])

    assert config.kv_bytes_per_token(4) == 3 * (24 + 8) * 4
    assert [storage.shape for storage in cache._all()] == [torch.Size([16, 1, 32])] * 3
    keys, values = cache.gather(1, torch.tensor([[0, 2]]))
    torch.testing.assert_close(keys[0, :, 1], vectors[1])
    torch.testing.assert_close(values[0, :, 4], vectors[0])
