"""The steps of a decoder between its matrix products, as PyTorch does them on any device."""

from torch import Tensor
from torch.nn import functional

from ifbbench.model.attention_plan import SpansInPlace
from ifbbench.model.rotary import RotaryEmbedding, rotate

# What `rotate` needs of a batch's positions; each kind of operations makes its own.
Angles = tuple[Tensor, ...]


class Operations:
    """What a backend may replace. Rows are packed tokens."""

    # Whether `write` and `attend` are there: they use keys and values where they lie in the cache.
    attends_in_place = False

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (Zhang and Sennrich, arXiv:1910.07467) of `rows` [..., size]."""
        return functional.rms_norm(rows, weight.shape, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up, [rows, size], of gate and up side by side, [rows, 2 · size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def angles(self, rotary: RotaryEmbedding, positions: Tensor, like: Tensor) -> Angles:
        """What `rotate` needs of `positions` [tokens] for heads of the data type of `like`; shared by all layers."""
        return rotary.angles(positions, like.dtype)

    def rotate(self, heads: Tensor, angles: Angles) -> Tensor:
        """`heads` [tokens, heads, head size] turned; they may be changed in place."""
        cos, sin = angles
        return rotate(heads, cos, sin)

    def write(
        self, keys: Tensor, values: Tensor, keys_in_cache: Tensor, values_in_cache: Tensor, cache_rows: Tensor
    ) -> None:
        """Keys and values [tokens, KV heads, head size] to the rows `cache_rows` [tokens] of the cache, which is
        [blocks, tokens per block, KV heads, head size]. Rows in a batch differ, but for those that nobody reads."""
        raise NotImplementedError

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, spans: SpansInPlace, output: Tensor) -> None:
        """Causal attention of `spans` into their rows of `output` [rows, heads, head size].

        queries: [tokens, heads, head size]. keys, values: [blocks, tokens per block, KV heads, head size], the cache.
        """
        raise NotImplementedError
