"""Rotary position embedding."""

import math

import torch
from torch import Tensor

from ifbbench.model.config import ModelConfig
from ifbbench.model.rope_scaling import LinearRopeScaling, Llama3RopeScaling, RopeFactors, YarnRopeScaling


class RotaryEmbedding:
    """Turns pairs of query and key values by an angle that grows with the position.

    Su et al., RoFormer (arXiv:2104.09864), with the pairs of Hugging Face's convention: value i of a head's first half
    and value i of its second half. cos, sin: float32 [positions, head size / 2], for every position of the model.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
        angles = torch.outer(positions, _frequencies(config).to(device))
        scaling = config.rope_scaling
        factor = scaling.attention_factor if isinstance(scaling, YarnRopeScaling) else 1.0
        self.cos = angles.cos() * factor
        self.sin = angles.sin() * factor

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [tokens, 1, head size], of `positions` [tokens]; shared by all layers.

        Both halves have the same cosines; the sines of the first have the other sign, as `rotate` needs them.
        """
        cos = self.cos.index_select(0, positions).to(dtype)
        sin = self.sin.index_select(0, positions).to(dtype)
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` [tokens, heads, head size] turned by the angles of `RotaryEmbedding.angles`.

    Three passes over memory: (first, second) · cos + (second, first) · sin.
    """
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def _frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair, [head size / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor):
            return frequencies / factor
        case RopeFactors(factors):
            return frequencies / torch.tensor(factors)
        case Llama3RopeScaling() as llama3:
            return _llama3_frequencies(frequencies, llama3)
        case YarnRopeScaling() as yarn:
            return _yarn_frequencies(frequencies, config, yarn)


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's context extension: fast pairs stay, slow ones are divided by `factor`, a smooth change between.

    The rule is that of `apply_scaling` in Meta's llama-models; fast and slow are told apart by how often a pair turns
    within the context length of the first training.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    share_kept = ((turns - scaling.low_freq_factor) / spread).clamp(0.0, 1.0)
    return share_kept * frequencies + (1.0 - share_kept) * frequencies / scaling.factor


def _yarn_frequencies(frequencies: Tensor, config: ModelConfig, scaling: YarnRopeScaling) -> Tensor:
    """YaRN (Peng et al., arXiv:2309.00071, section 3.2): as Llama 3's, but the change from fast to slow is smooth in
    the pair's number, between whole numbers, not in its frequency."""

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * times)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), config.head_dim - 1)
    numbers = torch.arange(len(frequencies), dtype=torch.float32)
    share_slowed = ((numbers - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return (1.0 - share_slowed) * frequencies + share_slowed * frequencies / scaling.factor
