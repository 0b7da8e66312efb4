"""The number of parameters of every simulated family against that of transformers' model, and patterns of layers."""

from typing import Any

import pytest

from ifbbench.errors import InputError
from ifbbench.models.layers import LayerKind, Mixer, Mlp
from ifbbench.models.named_models import load_model_config
from ifbbench.models.quantization import quantization_of
from ifbbench.models.unquantized import unquantized_parts, weights_of_scale

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {"num_hidden_layers": 5, "num_experts_per_tok": 6}),
    "whole queries": ("deepseek_v2", {"num_hidden_layers": 5, "num_experts_per_tok": 6, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 5}),
    "qwen3_next": ("qwen3_next", {"num_hidden_layers": 8}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 4, "head_dim": 128}),
    "dense layers": ("qwen3_moe", {"num_hidden_layers": 4, "head_dim": 128, "mlp_only_layers": [1]}),
    "glm4_moe": ("glm4_moe", {"num_hidden_layers": 4, "use_qk_norm": True, "attention_bias": True, "head_dim": 128}),
    "minimax_m2": ("minimax_m2", {"num_hidden_layers": 4}),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 4}),
    "llama4": ("llama4_text", {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "moe_layers": [1, 3]}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7}),
    "jamba": ("jamba", {}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
def test_parameters_are_those_of_transformers(tmp_path, kind, changes):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    config.save_pretrained(tmp_path)

    # Sinks of attention and biases of routers (gpt-oss) are left out.
    assert load_model_config(tmp_path).num_parameters == pytest.approx(expected, rel=1e-6 if kind == "gpt_oss" else 0)


def write(path, **fields):
    import json

    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return path


NEMOTRON = {
    "model_type": "nemotron_h",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
}


def test_a_pattern_of_letters(tmp_path):
    model = load_model_config(write(tmp_path, **NEMOTRON, num_hidden_layers=4, hybrid_override_pattern="M-*M"))

    assert model.layers == (
        LayerKind(Mixer.RECURRENT, Mlp.NONE),
        LayerKind(Mixer.NONE, Mlp.DENSE),
        LayerKind(Mixer.ATTENTION, Mlp.NONE),
        LayerKind(Mixer.RECURRENT, Mlp.NONE),
    )
    assert model.attention_layers == (2,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 4, "hybrid_override_pattern": "M-*"}, "num_hidden_layers is 4; expected the 3 layers"),
        ({"num_hidden_layers": 2, "hybrid_override_pattern": "M?"}, "hybrid_override_pattern is '\\?'"),
        ({"num_hidden_layers": 2}, "layers_block_type is missing"),
    ],
)
def test_patterns_that_are_refused(tmp_path, fields, message):
    with pytest.raises(InputError, match=message):
        load_model_config(write(tmp_path, **NEMOTRON, **fields))


def test_a_model_of_text_and_images_is_that_of_its_text(tmp_path):
    text = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 128}
    text |= {"vocab_size": 100, "max_position_embeddings": 512, "sliding_window": 32}
    model = load_model_config(write(tmp_path, model_type="gemma3", text_config=text))

    assert model.windows == ((32,) * 5 + (None,)) * 2
    assert model.hidden_size == 64


def test_qwen3_5_has_the_parameters_of_its_model_card(tmp_path):
    """As Qwen publishes it: 397 billion, 17 of them for a token."""
    text = {"hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 2}
    text |= {"head_dim": 256, "full_attention_interval": 4, "moe_intermediate_size": 1024, "num_experts": 512}
    text |= {"num_experts_per_tok": 10, "shared_expert_intermediate_size": 1024, "vocab_size": 248320}
    text |= {"linear_num_key_heads": 16, "linear_num_value_heads": 64, "linear_key_head_dim": 128}
    text |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144}
    model = load_model_config(write(tmp_path, model_type="qwen3_5_moe", text_config=text))

    assert model.num_parameters / 1e9 == pytest.approx(397, rel=0.01)
    assert model.active_parameters / 1e9 == pytest.approx(17, rel=0.03)


def test_qwen3_vl_has_the_decoder_of_qwen3(tmp_path):
    text = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    text |= {"intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 262144}
    model = load_model_config(write(tmp_path, model_type="qwen3_vl", text_config=text))

    assert model.num_parameters == load_model_config("qwen3-8b").num_parameters


def test_the_data_type_of_weights_may_stand_with_the_text(tmp_path):
    groups = {"group_0": {"weights": {"type": "int", "num_bits": 4}}}
    quantized = {"quant_method": "compressed-tensors", "config_groups": groups}
    path = write(tmp_path, model_type="kimi_k25", text_config={"quantization_config": quantized})

    found = quantization_of(path)
    assert found is not None
    assert found.dtype == "int4"


@pytest.mark.parametrize(
    ("quantization", "parts"),
    [
        ({"ignore": ["lm_head", "re:.*self_attn.*"]}, (Mixer.ATTENTION,)),
        ({"exclude_modules": ["*shared_experts*", "model.layers.0.*"]}, (Mlp.DENSE, Mlp.SHARED)),
        ({"modules_to_not_convert": ["self_attn", "gate"]}, (Mixer.ATTENTION,)),
        ({"ignore": ["language_model.model.layers.30.self_attn.o_proj", "model.layers.29.mlp"]}, (Mixer.ATTENTION,)),
        ({"ignore": None}, ()),
        (None, ()),
    ],
)
def test_parts_that_a_quantized_checkpoint_leaves_out_are_those_of_its_lists(quantization, parts):
    assert unquantized_parts({"quantization_config": quantization}, 61) == parts


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"ignore": "lm_head"}, "a list of names"),
        ({"ignore": ["re:("]}, "regular expressions"),
        ([1], "keys and values"),
    ],
)
def test_lists_of_modules_that_cannot_be_read_are_errors(quantization, message):
    with pytest.raises(InputError, match=message):
        unquantized_parts({"quantization_config": quantization}, 61)


def test_weights_that_share_a_scale_are_those_of_all_groups():
    group = {"weights": {"num_bits": 4, "group_size": 32}}
    assert weights_of_scale({"quantization_config": {"config_groups": {"a": group, "b": group}}}) == 32
    assert weights_of_scale({"quantization_config": {"bits": 4, "group_size": 128}}) == 128
    assert weights_of_scale({"quantization_config": {"group_size": -1}}) == 0
    assert weights_of_scale({}) == 0
