"""The weights of a decoder: made from a seed, or read from files under Hugging Face's names."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ifbbench.errors import InputError
from ifbbench.model.config import ModelConfig
from ifbbench.model.families import GPT2
from ifbbench.model.gguf_file import GgufFile
from ifbbench.model.linear import MakeProduct, Product, make_linear
from ifbbench.model.model_files import GPT2_PREFIX, ModelFiles, SafetensorsFiles
from ifbbench.model.model_path import GGUF_SUFFIX
from ifbbench.model.random_values import normal_values

NORMS = ("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "wpe.weight")

# Gives the tensor of a name in the shape asked for, on its final device and in its final data type.
TensorSource = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Query, key and value are one product, and so are gate and up (GPT-2 has no gate: up alone).

    query_norm, key_norm: [head size], where heads are normalised. The biases of norms are GPT-2's.
    """

    attention_norm: Tensor
    query_key_value: Product
    attention_output: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attention_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder. embedding: [vocabulary, hidden]; norms: [hidden].

    position_embedding: [positions, hidden], GPT-2's.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Product
    final_norm_bias: Tensor | None = None
    position_embedding: Tensor | None = None


def random_weights(
    config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype, make_product: MakeProduct = make_linear
) -> ModelWeights:
    """Weights drawn from `seed`, the same on every device. make_product: of the layers' weights.

    Each product keeps the size of what goes in (standard deviation 1/√inputs), so that attention and MLP move the
    hidden state as much as the token's own embedding does. With the usual 0.02 they would hardly count, and greedy
    output would fall into a loop of a few tokens.
    """

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(".bias"):
            tensor = torch.zeros(shape)
        elif name.endswith(NORMS):
            tensor = torch.ones(shape)
        else:
            inputs = shape[0] if name.startswith(GPT2_PREFIX) else shape[-1]
            scale = 1.0 if name.endswith(EMBEDDINGS) else 1.0 / math.sqrt(inputs)
            tensor = normal_values(shape, seed, name).mul_(scale)
        return tensor.to(device=device, dtype=dtype)

    return _assemble(config, draw, make_product)


def load_weights(
    config: ModelConfig, path: str | Path, device: torch.device, dtype: torch.dtype,
    make_product: MakeProduct = make_linear,
) -> ModelWeights:
    """The weights at `path`: a GGUF file, or a directory with one model.safetensors, or shards listed in
    model.safetensors.index.json. make_product: of the layers' weights.

    Raises InputError if a file or a tensor is missing or a tensor has another shape than the model's.
    """
    path = Path(path)
    files: ModelFiles = GgufFile(path) if path.suffix == GGUF_SUFFIX else SafetensorsFiles(path)

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor, file = files.read(name)
        if tuple(tensor.shape) != shape:
            raise InputError(f"{file}: {name} has the shape {list(tensor.shape)}; config.json asks for {list(shape)}. "
                             "Use the config.json that belongs to these weights.")
        return tensor.to(device=device, dtype=dtype)

    return _assemble(config, read, make_product)


def _assemble(config: ModelConfig, source: TensorSource, make_product: MakeProduct) -> ModelWeights:
    """Embeddings, norms and output layer as they are, and products of the layers' matrices."""
    make = _gpt2 if config.architecture == GPT2 else _llama
    return make(config, source, make_product)


def _llama(config: ModelConfig, source: TensorSource, make_product: MakeProduct) -> ModelWeights:
    hidden = config.hidden_size
    embedding = source("model.embed_tokens.weight", (config.vocab_size, hidden))
    layers = tuple(
        _layer(config, source, make_product, f"model.layers.{index}") for index in range(config.num_layers)
    )
    final_norm = source("model.norm.weight", (hidden,))
    head = embedding if config.tie_word_embeddings else source("lm_head.weight", (config.vocab_size, hidden))
    return ModelWeights(embedding, layers, final_norm, make_linear(head))


def _layer(config: ModelConfig, source: TensorSource, make_product: MakeProduct, prefix: str) -> LayerWeights:
    def fused(block: str, outputs: dict[str, int], inputs: int, has_bias: bool) -> Product:
        names = {f"{prefix}.{block}.{part}_proj": size for part, size in outputs.items()}
        weight = torch.cat([source(f"{name}.weight", (size, inputs)) for name, size in names.items()])
        if not has_bias:
            return make_product(weight, None)
        return make_product(weight, torch.cat([source(f"{name}.bias", (size,)) for name, size in names.items()]))

    def head_norm(part: str) -> Tensor | None:
        return source(f"{prefix}.self_attn.{part}_norm.weight", (config.head_dim,)) if config.query_key_norm else None

    hidden, ffn, kv = config.hidden_size, config.intermediate_size, config.kv_size
    return LayerWeights(
        attention_norm=source(f"{prefix}.input_layernorm.weight", (hidden,)),
        query_key_value=fused("self_attn", {"q": config.query_size, "k": kv, "v": kv}, hidden, config.attention_bias),
        attention_output=fused("self_attn", {"o": hidden}, config.query_size, config.attention_output_bias),
        mlp_norm=source(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=fused("mlp", {"gate": ffn, "up": ffn}, hidden, config.mlp_bias),
        down=fused("mlp", {"down": hidden}, ffn, config.mlp_bias),
        query_norm=head_norm("q"),
        key_norm=head_norm("k"),
    )


def _gpt2(config: ModelConfig, source: TensorSource, make_product: MakeProduct) -> ModelWeights:
    hidden, ffn = config.hidden_size, config.intermediate_size

    def vector(name: str, size: int = hidden) -> Tensor:
        return source(f"{GPT2_PREFIX}{name}", (size,))

    def linear(name: str, inputs: int, outputs: int) -> Product:
        """Its weights are stored as [inputs, outputs]."""
        weight = source(f"{GPT2_PREFIX}{name}.weight", (inputs, outputs))
        return make_product(weight.t().contiguous(), vector(f"{name}.bias", outputs))

    def layer(prefix: str) -> LayerWeights:
        return LayerWeights(
            attention_norm=vector(f"{prefix}.ln_1.weight"),
            attention_norm_bias=vector(f"{prefix}.ln_1.bias"),
            query_key_value=linear(f"{prefix}.attn.c_attn", hidden, 3 * hidden),
            attention_output=linear(f"{prefix}.attn.c_proj", hidden, hidden),
            mlp_norm=vector(f"{prefix}.ln_2.weight"),
            mlp_norm_bias=vector(f"{prefix}.ln_2.bias"),
            gate_up=linear(f"{prefix}.mlp.c_fc", hidden, ffn),
            down=linear(f"{prefix}.mlp.c_proj", ffn, hidden),
        )

    embedding = source(f"{GPT2_PREFIX}wte.weight", (config.vocab_size, hidden))
    head = embedding if config.tie_word_embeddings else source("lm_head.weight", (config.vocab_size, hidden))
    return ModelWeights(
        embedding=embedding,
        position_embedding=source(f"{GPT2_PREFIX}wpe.weight", (config.max_position_embeddings, hidden)),
        layers=tuple(layer(f"h.{index}") for index in range(config.num_layers)),
        final_norm=vector("ln_f.weight"),
        final_norm_bias=vector("ln_f.bias"),
        lm_head=make_linear(head),
    )
