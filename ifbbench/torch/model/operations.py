"""The steps of a decoder between its matrix products, by PyTorch on any device or by the C kernels on a CPU."""

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig, RopeFactors, YarnRopeScaling
from ifbbench.torch.model.compiled import KINDS, load_cpu_kernels

# The arguments of `rotate` for a batch's positions; each class of operations has its own.
Angles = tuple[Tensor, ...]


class RotaryEmbedding:
    """Cosines and sines that rotate pairs of query and key values by an angle proportional to the position.

    Su et al., RoFormer (arXiv:2104.09864), with the pairs of Hugging Face's convention: value i of a head's first half
    and value i of its second half.

    cos, sin: float32 [positions, head size / 2], for all positions of the model.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
        angles = torch.outer(positions, _frequencies(config).to(device))
        scaling = config.rope_scaling
        factor = scaling.attention_factor if isinstance(scaling, YarnRopeScaling) else 1.0
        self.cos = angles.cos() * factor
        self.sin = angles.sin() * factor


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
    """High frequencies are kept, low ones divided by `factor`, with a linear transition (`apply_scaling` of Meta's
    llama-models). A frequency counts as high or low by its number of turns within the original context length."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    share_kept = ((turns - scaling.low_freq_factor) / spread).clamp(0.0, 1.0)
    return share_kept * frequencies + (1.0 - share_kept) * frequencies / scaling.factor


def _yarn_frequencies(frequencies: Tensor, config: ModelConfig, scaling: YarnRopeScaling) -> Tensor:
    """As `_llama3_frequencies`, with a transition that is linear in the index of the pair, between integers (YaRN,
    section 3.2)."""

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * times)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), config.head_dim - 1)
    indices = torch.arange(len(frequencies), dtype=torch.float32)
    share_scaled = ((indices - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return (1.0 - share_scaled) * frequencies + share_scaled * frequencies / scaling.factor


@dataclass(frozen=True, slots=True)
class SpansInPlace:
    """Spans of queries whose keys are read in the cache, without a copy. All tensors are int64 in host memory.

    rows, counts, lengths: [spans], packed row of the first query, number of queries, and number of keys that the last
        query sees.
    block_ids: [spans, blocks]; entries beyond a span's keys are not read.
    """

    rows: Tensor
    counts: Tensor
    lengths: Tensor
    block_ids: Tensor


class Operations:
    """The steps by PyTorch. Rows are packed tokens."""

    # Whether keys and values in the cache are accessed without a copy, by `CpuOperations.write` and `attend`.
    attends_in_place = False

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (Zhang and Sennrich, arXiv:1910.07467) of `rows` [..., size]."""
        return functional.rms_norm(rows, weight.shape, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up, [rows, size], from gate and up side by side, [rows, 2 · size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def angles(self, rotary: RotaryEmbedding, positions: Tensor, like: Tensor) -> Angles:
        """The arguments of `rotate` for `positions` [tokens] and heads of the data type of `like`; all layers share
        them."""
        cos = rotary.cos.index_select(0, positions).to(like.dtype)
        sin = rotary.sin.index_select(0, positions).to(like.dtype)
        # Both halves of a head have the same cosines; the sines of the first half have the opposite sign.
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)

    def rotate(self, heads: Tensor, angles: Angles) -> Tensor:
        """`heads` [tokens, heads, head size] rotated; they may be changed in place."""
        cos, sin = angles
        # (first, second) · cos + (second, first) · sin, in three passes over memory.
        return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


class CpuOperations(Operations):
    """The steps by the C kernels in csrc/, for one data type. The values of a row must be contiguous."""

    attends_in_place = True

    def __init__(self, kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
        names = ("rms_norm", "swiglu", "rotate", "write", "attend")
        self._norm, self._swiglu, self._rotate, self._write, self._attend = (
            getattr(kernels, f"{name}_{KINDS[dtype][0]}") for name in names
        )

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = rows.contiguous()
        result = torch.empty_like(rows)
        size = rows.shape[-1]
        self._norm(rows.data_ptr(), weight.data_ptr(), result.data_ptr(), rows.numel() // size, size, eps)
        return result

    def swiglu(self, gate_up: Tensor) -> Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        result = gate_up.new_empty((num_rows, size))
        self._swiglu(gate_up.data_ptr(), result.data_ptr(), num_rows, size)
        return result

    def angles(self, rotary: RotaryEmbedding, positions: Tensor, like: Tensor) -> Angles:
        return positions, rotary.cos, rotary.sin

    def rotate(self, heads: Tensor, angles: Angles) -> Tensor:
        """`heads`, rotated in place."""
        positions, cos, sin = angles
        tokens, count, size = heads.shape
        self._rotate(
            heads.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, count, heads.stride(0), size
        )
        return heads

    def write(
        self, keys: Tensor, values: Tensor, keys_in_cache: Tensor, values_in_cache: Tensor, cache_rows: Tensor
    ) -> None:
        """Store keys and values [tokens, KV heads, head size] in the rows `cache_rows` [tokens] of the cache, which is
        [blocks, tokens per block, KV heads, head size]. The rows of a batch differ, except for the spare row."""
        tokens, kv_heads, size = keys.shape
        if keys.stride() != values.stride() or keys.stride()[1:] != (size, 1):
            keys, values = keys.contiguous(), values.contiguous()
        self._write(
            keys.data_ptr(),
            values.data_ptr(),
            keys_in_cache.data_ptr(),
            values_in_cache.data_ptr(),
            cache_rows.data_ptr(),
            tokens,
            keys.stride(0),
            kv_heads * size,
        )

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, spans: SpansInPlace, output: Tensor) -> None:
        """Causal attention of `spans` into their rows of `output` [rows, heads, head size].

        queries: [tokens, heads, head size].
        keys, values: the cache, [blocks, tokens per block, KV heads, head size].

        MemoryError if there is not enough memory for scores.
        """
        num_spans, width = spans.block_ids.shape
        _, tokens_per_block, kv_heads, size = keys.shape
        failed = self._attend(
            queries.data_ptr(),
            output.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            spans.rows.data_ptr(),
            spans.counts.data_ptr(),
            spans.lengths.data_ptr(),
            spans.block_ids.data_ptr(),
            num_spans,
            width,
            queries.stride(0),
            kv_heads,
            queries.shape[1] // kv_heads,
            size,
            tokens_per_block,
        )
        if failed:
            raise MemoryError(f"no memory for attention over {int(spans.lengths.max()):,} keys")


def operations_for(device: torch.device, dtype: torch.dtype) -> Operations:
    """The fastest operations for weights of `dtype` on `device`."""
    kernels = load_cpu_kernels() if device.type == "cpu" and dtype in KINDS else None
    return Operations() if kernels is None else CpuOperations(kernels, dtype)
