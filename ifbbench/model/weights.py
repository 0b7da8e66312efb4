"""The weights of a decoder: made from a seed, or read from safetensors files under Hugging Face's names."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ifbbench.errors import InputError
from ifbbench.model.config import ModelConfig
from ifbbench.model.linear import Linear

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# Gives the tensor of a name in the shape asked for, on its final device and in its final data type.
TensorSource = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Query, key and value are one product, and so are gate and up."""

    attention_norm: Tensor
    query_key_value: Linear
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder. embedding: [vocabulary, hidden]; norms: [hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


def random_weights(config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Weights drawn from `seed`, the same on every device.

    Each product keeps the size of what goes in (standard deviation 1/√inputs), so that attention and MLP move the
    hidden state as much as the token's own embedding does. With the usual 0.02 they would hardly count, and greedy
    output would fall into a loop of a few tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            tensor = torch.ones(shape)
        elif name.endswith(".bias"):
            tensor = torch.zeros(shape)
        else:
            scale = 1.0 if name.endswith("embed_tokens.weight") else 1.0 / math.sqrt(shape[-1])
            tensor = torch.randn(shape, generator=generator) * scale
        return tensor.to(device=device, dtype=dtype)

    return _assemble(config, draw)


def load_weights(
    config: ModelConfig, directory: str | Path, device: torch.device, dtype: torch.dtype
) -> ModelWeights:
    """The weights in `directory`: one model.safetensors, or shards listed in model.safetensors.index.json.

    Raises InputError if a file or a tensor is missing or a tensor has another shape than config.json says.
    """
    directory = Path(directory)
    shards = _shards(directory)

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in shards:
            raise InputError(f"{directory}: the tensor {name!r} is missing from the safetensors files. Expected the "
                             "weights of a Llama-family model; download the model again.")
        tensor = _read_tensor(directory / shards[name], name)
        if tuple(tensor.shape) != shape:
            raise InputError(f"{directory / shards[name]}: {name} has the shape {list(tensor.shape)}; config.json "
                             f"asks for {list(shape)}. Use the config.json that belongs to these weights.")
        return tensor.to(device=device, dtype=dtype)

    return _assemble(config, read)


def _assemble(config: ModelConfig, source: TensorSource) -> ModelWeights:
    hidden = config.hidden_size
    embedding = source("model.embed_tokens.weight", (config.vocab_size, hidden))
    layers = tuple(_layer(config, source, f"model.layers.{index}") for index in range(config.num_layers))
    final_norm = source("model.norm.weight", (hidden,))
    head = embedding if config.tie_word_embeddings else source("lm_head.weight", (config.vocab_size, hidden))
    return ModelWeights(embedding, layers, final_norm, Linear(head))


def _layer(config: ModelConfig, source: TensorSource, prefix: str) -> LayerWeights:
    def fused(block: str, outputs: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        names = {f"{prefix}.{block}.{part}_proj": size for part, size in outputs.items()}
        weight = torch.cat([source(f"{name}.weight", (size, inputs)) for name, size in names.items()])
        if not has_bias:
            return Linear(weight)
        return Linear(weight, torch.cat([source(f"{name}.bias", (size,)) for name, size in names.items()]))

    hidden, ffn, kv = config.hidden_size, config.intermediate_size, config.kv_size
    return LayerWeights(
        attention_norm=source(f"{prefix}.input_layernorm.weight", (hidden,)),
        query_key_value=fused("self_attn", {"q": config.query_size, "k": kv, "v": kv}, hidden, config.attention_bias),
        attention_output=fused("self_attn", {"o": hidden}, config.query_size, config.attention_bias),
        mlp_norm=source(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=fused("mlp", {"gate": ffn, "up": ffn}, hidden, config.mlp_bias),
        down=fused("mlp", {"down": hidden}, ffn, config.mlp_bias),
    )


def _shards(directory: Path) -> dict[str, str]:
    """Tensor name to file name."""
    index = directory / INDEX_FILE
    if index.exists():
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{index}: cannot be read as a weight index ({error!r}). Expected a JSON object with "
                             "weight_map; download the file again.") from error
    single = directory / SINGLE_FILE
    if not single.exists():
        raise InputError(f"--model: {directory} has neither {SINGLE_FILE} nor {INDEX_FILE}. Expected safetensors "
                         "weights beside config.json; download or convert them.")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _read_tensor(path: Path, name: str) -> Tensor:
    with _open(path) as file:
        if name not in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            raise InputError(f"{path}: the tensor {name!r} is missing, though {INDEX_FILE} places it here. Download "
                             "the model again.")
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error}). Download the file again.") from error
