"""Reading a model's shape."""

import json
from pathlib import Path

import pytest

from ifbbench.errors import InputError
from ifbbench.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig, YarnRopeScaling
from ifbbench.models.named_models import load_model_config

FIELDS = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}


def config_of(directory: Path, **changes: object) -> ModelConfig:
    """The config read from FIELDS with changes; a change to ... leaves the field out."""
    fields = {name: value for name, value in (FIELDS | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(fields))
    return load_model_config(directory)


def test_tiny_is_built_in_and_small() -> None:
    tiny = load_model_config("tiny")
    assert tiny == ModelConfig.tiny()
    assert 4_500_000 < tiny.num_parameters < 5_500_000
    assert tiny.kv_bytes_per_token(4) == 4096


def test_defaults_of_missing_fields(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_key_value_heads=...)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10_000.0)
    assert config.eos_token_ids == ()
    assert config.rope_scaling is None


def test_rope_of_old_and_new_transformers(tmp_path: Path) -> None:
    old = config_of(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    new = config_of(tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3})
    assert old == new
    assert old.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 64)


def test_linear_and_yarn_rope(tmp_path: Path) -> None:
    linear = config_of(tmp_path, rope_scaling={"type": "linear", "factor": 2})
    assert linear.rope_scaling == LinearRopeScaling(2.0)
    yarn = config_of(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4, "beta_fast": 16})
    assert isinstance(yarn.rope_scaling, YarnRopeScaling)
    assert (yarn.rope_scaling.original_max_position_embeddings, yarn.rope_scaling.beta_fast) == (128, 16.0)
    assert yarn.rope_scaling.attention_factor == pytest.approx(1.1386, abs=1e-4)


def test_families_have_their_own_biases_norms_and_names(tmp_path: Path) -> None:
    llama = config_of(tmp_path, attention_bias=True)
    assert (llama.attention_bias, llama.attention_output_bias, llama.query_key_norm) == (True, True, False)
    qwen2 = config_of(tmp_path, model_type="qwen2")
    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.query_key_norm) == (True, False, False)
    qwen3 = config_of(tmp_path, model_type="qwen3")
    assert (qwen3.attention_bias, qwen3.query_key_norm, qwen3.head_dim) == (False, True, 128)
    gpt2 = config_of(tmp_path, model_type="gpt2", **GPT2, intermediate_size=..., hidden_size=...)
    assert (gpt2.architecture, gpt2.hidden_size, gpt2.intermediate_size, gpt2.activation) == (
        "gpt2",
        64,
        256,
        "gelu_new",
    )
    assert gpt2.tie_word_embeddings
    assert gpt2.attention_bias


def test_end_tokens(tmp_path: Path) -> None:
    assert config_of(tmp_path, eos_token_id=2).eos_token_ids == (2,)
    assert config_of(tmp_path, eos_token_id=[2, 5]).eos_token_ids == (2, 5)


def test_sliding_windows_of_mistral(tmp_path: Path) -> None:
    assert config_of(tmp_path, model_type="mistral", sliding_window=None).sliding_window is None
    assert config_of(tmp_path, model_type="mistral", sliding_window=128).sliding_window is None
    assert config_of(tmp_path, model_type="mistral", sliding_window=127).sliding_window == 127
    assert config_of(tmp_path, model_type="llama", sliding_window=127).sliding_window is None
    with pytest.raises(InputError, match="sliding_window is 0; expected an integer of at least 1"):
        config_of(tmp_path, model_type="mistral", sliding_window=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'; expected one of llama, mistral, qwen2, qwen3, gpt2"),
        ({"model_type": "gpt2"}, "n_embd is missing; expected an integer of at least 1"),
        ({"model_type": "gpt2", **GPT2, "activation_function": "relu"}, "activation_function is 'relu'; expected one"),
        ({"model_type": "gpt2", **GPT2, "scale_attn_weights": False}, "scale_attn_weights is False; expected True"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is True; expected False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"model_type": ...}, "model_type is missing; expected one of llama"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected one of silu"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"attention_bias": 1}, "attention_bias is 1; expected true or false"),
        ({"eos_token_id": [1, -2]}, r"eos_token_id\[1\] is -2; expected an integer of at least 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected an integer of at least 1"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_key_value_heads": 3}, "divisor of num_attention_heads"),
        ({"head_dim": 15}, "even number"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling is 'longrope'; expected rope_type default, linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 1.0}}, r"rope_scaling\.mscale is 1.0; expected"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing; expected a finite number above 0"),
        ({"rope_scaling": [8.0]}, "rope_scaling is .*; expected keys and values"),
    ],
)
def test_unsupported_fields_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_of(tmp_path, **changes)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a directory nor a built-in model"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="expected a JSON object"):
        load_model_config(tmp_path)
