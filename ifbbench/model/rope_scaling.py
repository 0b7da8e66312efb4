"""Ways to stretch rotary embeddings beyond the context length of a model's training."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies (`rope_type` llama3): slow ones are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """All frequencies are divided by `factor` (`rope_type` linear)."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """YaRN (Peng et al., arXiv:2309.00071; `rope_type` yarn): pairs that turn fewer than `beta_slow` times within the
    original positions are slowed down by `factor`, those that turn more than `beta_fast` times stay.

    attention_factor: cosines and sines are multiplied by it.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeFactors:
    """Each frequency has a factor of its own that it is divided by, as in GGUF files; [head size / 2]."""

    factors: tuple[float, ...]


RopeScaling = Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | RopeFactors
