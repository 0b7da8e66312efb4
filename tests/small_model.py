"""A model smaller than the built-in one, with its vocabulary and positions: see the fixture `small_model`."""

import dataclasses

from ifbbench.models.config import ModelConfig

# Three layers, so that tests can give each an attention window of its own.
SMALL_MODEL = dataclasses.replace(
    ModelConfig.tiny(),
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
)
# Keys and values of a position in float32.
CACHE_BYTES_PER_TOKEN = 2 * SMALL_MODEL.num_layers * SMALL_MODEL.kv_size * 4
