"""A checkpoint of random weights for a built-in shape, which every engine loads: drawn on the device, in seconds."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from ifbbench.models.config import ModelConfig
from ifbbench.models.named_models import config_path, load_model_config
from ifbbench.torch.model.weights import INDEX_FILE

Shapes = dict[str, tuple[int, ...]]


def write_checkpoint(shape: str, directory: Path, device: torch.device) -> None:
    """The Llama `shape`, a built-in model or a config.json, in bfloat16; a file for each layer and one for the rest."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(config_path(shape), directory / "config.json")
    generator = torch.Generator(device).manual_seed(0)
    places: dict[str, str] = {}
    for number, shapes in enumerate(_files(load_model_config(shape))):
        file = f"model-{number:05}.safetensors"
        drawn = {name: _drawn(name, size, generator) for name, size in shapes.items()}
        save_file(drawn, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(drawn, file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A tensor with the standard deviation of `ifbbench.torch.model.weights.random_weights`."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = 1.0 if "embed" in name else 1 / math.sqrt(shape[1])
    return (torch.randn(shape, generator=generator, device=generator.device) * scale).to("cpu", torch.bfloat16)


def _files(config: ModelConfig) -> Iterator[Shapes]:
    hidden, ffn, query, kv = config.hidden_size, config.intermediate_size, config.query_size, config.kv_size
    yield {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_layers):
        parts: Shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        yield {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
