"""Errors of reading safetensors, and random weights. Correct files are tested against transformers elsewhere."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ifbbench.errors import InputError
from ifbbench.models.config import ModelConfig
from ifbbench.torch.model import weights
from ifbbench.torch.model.weights import load_weights, normal_values, random_weights

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=12,
    max_position_embeddings=16,
)


def load(directory: Path) -> None:
    load_weights(CONFIG, directory, CPU, torch.float32)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


def test_not_safetensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load(tmp_path)


def test_missing_tensor(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(10, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"'model\.layers\.0\.input_layernorm\.weight' is missing"):
        load(tmp_path)


def test_wrong_shape(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(11, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"shape \[11, 8\]; config.json asks for \[10, 8\]"):
        load(tmp_path)


def test_index_with_wrong_entries(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(InputError, match="weight_map"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "model-1.safetensors"}}))
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(InputError, match="lists it in this file"):
        load(tmp_path)


def test_random_weights_come_from_the_seed() -> None:
    first, same, other = (random_weights(CONFIG, seed, CPU, torch.float32) for seed in (1, 1, 2))
    assert torch.equal(first.embedding, same.embedding)
    assert not torch.equal(first.embedding, other.embedding)


def test_random_weights_of_gpt2_and_with_normalised_heads() -> None:
    gpt2 = replace(
        CONFIG,
        architecture="gpt2",
        num_kv_heads=2,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        activation="gelu_new",
    )
    assert random_weights(gpt2, 1, CPU, torch.float32).position_embedding is not None
    normed = random_weights(replace(CONFIG, query_key_norm=True), 1, CPU, torch.float32)
    assert normed.layers[0].query_norm is not None


@pytest.mark.parametrize("size", [1, 99, 100, 101, 1030])
def test_random_values_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(weights, "PIECE", 100)
    drawn = []
    for threads in (1, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        drawn.append(normal_values((size,), 7, "name"))
    assert torch.equal(*drawn)


def test_random_values_depend_on_seed_and_name() -> None:
    first = normal_values((3, 50), 7, "name")
    assert torch.equal(first, normal_values((3, 50), 7, "name"))
    assert not torch.equal(first, normal_values((3, 50), 8, "name"))
    assert not torch.equal(first, normal_values((3, 50), 7, "other"))


def test_pieces_differ_and_are_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE", 1000)
    values = normal_values((100, 1000), 0, "name")
    assert len(values.unique()) > 99_000
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 1) < 0.01


def test_random_values_in_inference_mode() -> None:
    with torch.inference_mode():
        within = normal_values((10,), 0, "name")
    assert torch.equal(within, normal_values((10,), 0, "name"))
