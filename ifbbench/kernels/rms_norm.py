"""Root mean square norm (Zhang and Sennrich, arXiv:1910.07467), with the residual sum before it in the same pass.

hidden ← hidden + added; normed = hidden / √(mean(hidden²) + ε) · weight, with sum, mean and product in float32. A
program has one token, whose values it holds in registers: two reads and two writes a value instead of five and two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.kernels.launch import launching


@triton.jit
def _rms_norm_kernel(
    normed: tl.tensor, hidden: tl.tensor, added: tl.tensor, weight: tl.tensor, normed_stride: tl.tensor,
    hidden_stride: tl.tensor, added_stride: tl.tensor, epsilon: tl.tensor, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    exists = columns < SIZE
    row = hidden + token * hidden_stride + columns
    values = tl.load(row, mask=exists, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(added + token * added_stride + columns, mask=exists, other=0.0).to(tl.float32)
        tl.store(row, values.to(hidden.dtype.element_ty), mask=exists)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    scaled = values * inverse * tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(normed + token * normed_stride + columns, scaled.to(normed.dtype.element_ty), mask=exists)


def add_rms_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """The norm of `hidden` + `added`, [tokens, size], a new tensor; `hidden` becomes the sum.

    hidden, added: [tokens, size], the values of a token contiguous; without `added`, `hidden` stays as it is. weight:
    [size]. KernelError if it cannot run.
    """
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    num_tokens, size = hidden.shape
    if num_tokens == 0:
        return normed
    other = hidden if added is None else added
    width = triton.next_power_of_2(size)
    with launching("add_rms_norm", hidden=hidden, weight=weight):
        _rms_norm_kernel[(num_tokens,)](
            normed, hidden, other, weight, normed.stride(0), hidden.stride(0), other.stride(0), epsilon, SIZE=size,
            WIDTH=width, ADDS=added is not None, num_warps=_warps(width),
        )  # fmt: skip
    return normed


def _warps(width: int) -> int:
    """Enough that a thread has 16 values or fewer."""
    return max(1, min(16, width // 512))


def add_rms_norm_twin(hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """The same in plain torch."""
    values = hidden.float()
    if added is not None:
        values = values + added.float()
        hidden.copy_(values)
    scale = (values.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    return (values * scale * weight.float()).to(hidden.dtype)
