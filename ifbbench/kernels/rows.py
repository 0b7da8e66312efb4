"""Kernels that process a row per token: residual sum with RMS norm, SwiGLU, and conversion to eight-bit floats."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.kernels.launch import launching, warps_per_row

COLUMNS_PER_PROGRAM = 1024


@triton.jit
def _rms_norm_kernel(
    normed: tl.tensor, hidden: tl.tensor, added: tl.tensor, weight: tl.tensor, normed_stride: tl.tensor,
    hidden_stride: tl.tensor, added_stride: tl.tensor, epsilon: tl.tensor, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
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
    """RMS norm (Zhang and Sennrich, arXiv:1910.07467) of `hidden` + `added`, a new tensor; `hidden` becomes the sum.

    hidden ← hidden + added; normed = hidden / √(mean(hidden²) + ε) · weight, computed in float32. A program holds one
    token in registers: two reads and two writes per value instead of five and two.

    hidden, added: [tokens, size], the values of a token contiguous; without `added`, `hidden` is not changed. weight:
    [size]. KernelError if it cannot be run.
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
            WIDTH=width, ADDS=added is not None, num_warps=warps_per_row(width),
        )
    return normed


@triton.jit
def _swiglu_kernel(
    output: tl.tensor, gate_up: tl.tensor, output_stride: tl.tensor, gate_up_stride: tl.tensor, size: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = columns < size
    gate = tl.load(gate_up + token * gate_up_stride + columns, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * gate_up_stride + size + columns, mask=exists, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + token * output_stride + columns, product.to(output.dtype.element_ty), mask=exists)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer, arXiv:2002.05202), [tokens, size], from gate and up side by side, [tokens, 2 · size].

    silu(x) = x / (1 + e^−x), in float32; the result is rounded once. The values of a token must be contiguous.
    KernelError if it cannot be run.
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((num_tokens, size))
    if num_tokens == 0:
        return output
    width = min(COLUMNS_PER_PROGRAM, triton.next_power_of_2(size))
    with launching("swiglu", gate_up=gate_up):
        _swiglu_kernel[(num_tokens, triton.cdiv(size, width))](
            output, gate_up, output.stride(0), gate_up.stride(0), size, WIDTH=width
        )
    return output


@triton.jit
def _quantise_kernel(
    quantised: tl.tensor, scales: tl.tensor, rows: tl.tensor, row_stride: tl.tensor, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, LARGEST_VALUE: tl.constexpr, SMALLEST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    exists = columns < SIZE
    values = tl.load(rows + row * row_stride + columns, mask=exists, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), SMALLEST) / LARGEST_VALUE
    scaled = tl.minimum(tl.maximum(values / scale, -LARGEST_VALUE), LARGEST_VALUE)
    tl.store(quantised + row * SIZE + columns, scaled.to(quantised.dtype.element_ty), mask=exists)
    tl.store(scales + row, scale)


def quantise_rows(rows: Tensor, dtype: torch.dtype, smallest_maximum: float) -> tuple[Tensor, Tensor]:
    """`rows` [rows, size] in the eight-bit type `dtype`, and the scales float32 [rows, 1] that multiply them.

    The scale of a row is its largest absolute value, at least `smallest_maximum`, over the largest number of `dtype`. A
    program holds one row in registers between finding the maximum and storing: it reads two bytes and writes one per
    value, where PyTorch's operations move four times as much in five launches. The values of a row must be contiguous.
    KernelError if it cannot be run.
    """
    num_rows, size = rows.shape
    quantised = torch.empty((num_rows, size), dtype=dtype, device=rows.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=rows.device)
    if num_rows:
        width = triton.next_power_of_2(size)
        with launching("quantise_rows", rows=rows):
            _quantise_kernel[(num_rows,)](
                quantised, scales, rows, rows.stride(0), SIZE=size, WIDTH=width,
                LARGEST_VALUE=torch.finfo(dtype).max, SMALLEST=smallest_maximum, num_warps=warps_per_row(width),
            )
    return quantised, scales
