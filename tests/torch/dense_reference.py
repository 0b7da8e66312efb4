"""The decoder once more, slow and plain: one sequence, float64, no cache, a mask for each layer written out."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.models.config import ModelConfig
from ifbbench.torch.model.weights import ModelWeights, random_weights


def mask_of(length: int, size: int, sink: int) -> Tensor:
    """[queries, keys]: the keys that an attention window of `size` tokens, `sink` of them sink tokens, shows."""
    keys = torch.arange(length)
    distances = keys[:, None] - keys
    return (distances >= 0) & ((keys < sink) | (distances < size - sink))


@cache
def _weights(config: ModelConfig, seed: int) -> ModelWeights:
    return random_weights(config, seed, torch.device("cpu"), torch.float64)


def dense_logits(config: ModelConfig, seed: int, tokens: list[int], windows: list[tuple[int, int]]) -> Tensor:
    """Logits [tokens, vocabulary] of the decoder with random weights of `seed`. windows: size and sink of each."""
    weights = _weights(config, seed)
    hidden = weights.embedding[torch.tensor(tokens)]
    length, size = len(tokens), config.head_dim

    def norm(rows: Tensor, weight: Tensor) -> Tensor:
        return weight * rows / (rows.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    frequencies = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = torch.polar(torch.ones(length, size // 2).double(), torch.outer(torch.arange(length), frequencies))

    def turned(heads: Tensor) -> Tensor:
        pairs = torch.complex(heads[..., : size // 2], heads[..., size // 2 :]) * turns
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    for layer, window in zip(weights.layers, windows, strict=True):
        fused = layer.query_key_value(norm(hidden, layer.attention_norm))
        heads = fused.view(length, -1, size).transpose(0, 1)
        queries, keys, values = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
        repeats = config.num_heads // config.num_kv_heads
        keys, values = (part.repeat_interleave(repeats, dim=0) for part in (turned(keys), values))
        scores = turned(queries) @ keys.transpose(1, 2) / size**0.5
        scores = scores.masked_fill(~mask_of(length, *window), -torch.inf)
        attention = (scores.softmax(-1) @ values).transpose(0, 1).reshape(length, -1)
        hidden = hidden + layer.attention_output(attention)
        gate, up = layer.gate_up(norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        hidden = hidden + layer.down(functional.silu(gate) * up)
    return weights.lm_head(norm(hidden, weights.final_norm))
