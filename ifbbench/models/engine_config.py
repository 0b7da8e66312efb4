"""config.json of a TensorRT-LLM engine: the shape of its model, and the limits that it was built with.

Its two parts are `pretrained_config`, the checkpoint that was built, and `build_config`, the options of trtllm-build
(TensorRT-LLM 0.9 and later). An engine holds no weights that can be read, so its model has random ones.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.config import LIMIT_SETTINGS
from ifbbench.settings.fields import choice, located, table

_log = logging.getLogger("ifbbench")

# A config.json is that of an engine if it has one of these.
ENGINE_KEYS = {"pretrained_config", "builder_config"}
# By `architecture`: `model_type` of the same model in Hugging Face's config.json.
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "QWenForCausalLM": "qwen2",
    "GPTForCausalLM": "gpt2",
}
# Hugging Face's name of each field, where it has another one.
_NAMES = {
    "head_size": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rotary_scaling": "rope_scaling",
    "share_embedding_table": "tie_word_embeddings",
    "attn_bias": "attention_bias",
}
_EQUAL_NAMES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "hidden_act",
    "sliding_window",
    "eos_token_id",
)
_ACTIVATIONS = {"swiglu": "silu"}
_DTYPES = {"float32": "float32", "float16": "fp16", "bfloat16": "bf16"}
_QUANTIZATIONS = {
    "FP8": "fp8", "FP8_BLOCK_SCALES": "fp8_block", "NVFP4": "nvfp4", "W4A16": "int4", "W4A16_AWQ": "int4",
    "W4A16_GPTQ": "int4", "W4A8_AWQ": "int4",
}  # fmt: skip


def hugging_face_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of an engine's model as the fields of a Hugging Face config.json of a Llama model, with its
    `model_type`. InputError if the model is not supported."""
    if "pretrained_config" not in config:
        raise InputError(
            "builder_config is that of TensorRT-LLM 0.8 or earlier, which does not describe the whole "
            "model; expected pretrained_config."
        )
    pretrained = table(config["pretrained_config"], "pretrained_config")
    model_type = _MODEL_TYPES[choice(pretrained.get("architecture"), "architecture", _MODEL_TYPES)]
    if model_type == "qwen2" and str(pretrained.get("qwen_type")).startswith("qwen3"):
        model_type = "qwen3"
    fields = {name: pretrained.get(name) for name in _EQUAL_NAMES}
    fields |= {to: pretrained.get(name) for name, to in _NAMES.items()}
    fields["hidden_act"] = _ACTIVATIONS.get(str(fields["hidden_act"]), fields["hidden_act"])
    return fields | {"model_type": model_type}


def engine_settings(directory: Path, is_simulated: bool) -> dict[str, Any]:
    """The settings that the engine in `directory` was built with, by name; none if it holds another kind of model.

    is_simulated: adds the data types and the parallelism, which are settings of simulated devices.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # reported when the model is loaded
    if not isinstance(config, dict) or "pretrained_config" not in config:
        return {}
    with located(str(directory / "config.json")):
        return _built_with(config, is_simulated)


def _built_with(config: Mapping[str, Any], is_simulated: bool) -> dict[str, Any]:
    pretrained, build = table(config["pretrained_config"], "pretrained_config"), _part(config, "build_config")
    settings = {name: build.get(name) for name in LIMIT_SETTINGS}
    settings["tokens_per_block"] = _part(build, "plugin_config").get("tokens_per_block")
    if is_simulated:
        mapping, quantization = _part(pretrained, "mapping"), _part(pretrained, "quantization")
        settings |= {name: mapping.get(name) for name in ("tp_size", "pp_size")}
        settings["dtype"] = _DTYPES.get(str(pretrained.get("dtype")))
        for name, key in (("dtype", "quant_algo"), ("kv_cache_dtype", "kv_cache_quant_algo")):
            algorithm = quantization.get(key)
            if str(algorithm) in _QUANTIZATIONS:
                settings[name] = _QUANTIZATIONS[str(algorithm)]
            elif algorithm is not None:
                _log.warning(
                    "%s of the engine is %s, which is not simulated; it is left out. Give --%s.", key, algorithm, name
                )
    return {name: value for name, value in settings.items() if value is not None}


def _part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table in a config.json; an empty one if it is missing."""
    return table(values.get(name) or {}, name)
