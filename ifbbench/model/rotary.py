"""Rotary position embedding."""

import math

import torch
from torch import Tensor

from ifbbench.model.config import Llama3RopeScaling, ModelConfig


class RotaryEmbedding:
    """Turns pairs of query and key values by an angle that grows with the position.

    Su et al., RoFormer (arXiv:2104.09864), with the pairs of Hugging Face's convention: value i of a head's first half
    and value i of its second half. Angles are tabled in float32 for every position of the model.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
        angles = torch.outer(positions, _frequencies(config).to(device))
        self._cos = angles.cos()
        self._sin = angles.sin()

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, each float32 [positions, head size / 2]."""
        return self._cos, self._sin

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [tokens, 1, head size / 2], of `positions` [tokens]; shared by all layers."""
        cos = self._cos.index_select(0, positions).to(dtype)
        sin = self._sin.index_select(0, positions).to(dtype)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` [tokens, heads, head size] turned by the angles of `RotaryEmbedding.angles`."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair, [head size / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _llama3_frequencies(frequencies, config.rope_scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's context extension: fast pairs stay, slow ones are divided by `factor`, a smooth change between.

    The rule is that of `apply_scaling` in Meta's llama-models; fast and slow are told apart by how often a pair turns
    within the context length of the first training.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    share_kept = ((turns - scaling.low_freq_factor) / spread).clamp(0.0, 1.0)
    return share_kept * frequencies + (1.0 - share_kept) * frequencies / scaling.factor
