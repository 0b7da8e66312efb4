"""The steps of a decoder on a CPU, by kernels of this project (see csrc)."""

import ctypes

import torch
from torch import Tensor

from ifbbench.model.attention_plan import SpansInPlace
from ifbbench.model.cpu_kernels import KINDS, load_cpu_kernels
from ifbbench.model.operations import Angles, Operations
from ifbbench.model.rotary import RotaryEmbedding


def operations_for(device: torch.device, dtype: torch.dtype) -> Operations:
    """The fastest operations for weights of `dtype` on `device`."""
    kernels = load_cpu_kernels() if device.type == "cpu" and dtype in KINDS else None
    return Operations() if kernels is None else CpuOperations(kernels, dtype)


class CpuOperations(Operations):
    """For one data type. Tensors come with their rows next to each other, as the model makes them."""

    attends_in_place = True

    def __init__(self, kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
        kind, _ = KINDS[dtype]
        self._norm = getattr(kernels, f"rms_norm_{kind}")
        self._swiglu = getattr(kernels, f"swiglu_{kind}")
        self._rotate = getattr(kernels, f"rotate_{kind}")
        self._write = getattr(kernels, f"write_{kind}")
        self._attend = getattr(kernels, f"attend_{kind}")

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of `rows` [..., size]."""
        rows = rows.contiguous()
        result = torch.empty_like(rows)
        size = rows.shape[-1]
        self._norm(rows.data_ptr(), weight.data_ptr(), result.data_ptr(), rows.numel() // size, size, eps)
        return result

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up, [rows, size]."""
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        result = gate_up.new_empty((num_rows, size))
        self._swiglu(gate_up.data_ptr(), result.data_ptr(), num_rows, size)
        return result

    def angles(self, rotary: RotaryEmbedding, positions: Tensor, like: Tensor) -> Angles:
        """The positions, and the tables of all positions."""
        return positions, rotary.cos, rotary.sin

    def rotate(self, heads: Tensor, angles: Angles) -> Tensor:
        """`heads` [tokens, heads, head size], turned in place."""
        positions, cos, sin = angles
        tokens, count, size = heads.shape
        self._rotate(heads.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, count,
                     heads.stride(0), size)  # fmt: skip
        return heads

    def write(
        self, keys: Tensor, values: Tensor, keys_in_cache: Tensor, values_in_cache: Tensor, cache_rows: Tensor
    ) -> None:
        """Keys and values to their rows of the cache."""
        tokens, kv_heads, size = keys.shape
        if keys.stride() != values.stride() or keys.stride()[1:] != (size, 1):
            keys, values = keys.contiguous(), values.contiguous()
        self._write(
            keys.data_ptr(), values.data_ptr(), keys_in_cache.data_ptr(), values_in_cache.data_ptr(),
            cache_rows.data_ptr(), tokens, keys.stride(0), kv_heads * size,
        )  # fmt: skip

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, spans: SpansInPlace, output: Tensor) -> None:
        """Causal attention of `spans`. MemoryError if there is none to work in."""
        num_spans, width = spans.block_ids.shape
        _, tokens_per_block, kv_heads, size = keys.shape
        failed = self._attend(
            queries.data_ptr(), output.data_ptr(), keys.data_ptr(), values.data_ptr(), spans.rows.data_ptr(),
            spans.counts.data_ptr(), spans.lengths.data_ptr(), spans.block_ids.data_ptr(), num_spans, width,
            queries.stride(0), kv_heads, queries.shape[1] // kv_heads, size, tokens_per_block,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for attention over {int(spans.lengths.max()):,} keys")
