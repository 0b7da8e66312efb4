"""Rows of activations as eight-bit floats with a scale each, as `fp8_rows` says, in one pass.

A program has one row, whose values it holds in registers between finding the largest and storing them: one read of two
bytes and one write of one byte a value, where PyTorch's operations read and write four times as much in five launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.kernels.fp8_rows import FP8, LARGEST, SMALLEST_MAXIMUM
from ifbbench.kernels.launch import launching


@triton.jit
def _quantise_kernel(
    quantised: tl.tensor, scales: tl.tensor, rows: tl.tensor, row_stride: tl.tensor, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, LARGEST_VALUE: tl.constexpr, SMALLEST: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    exists = columns < SIZE
    values = tl.load(rows + row * row_stride + columns, mask=exists, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), SMALLEST) / LARGEST_VALUE
    scaled = tl.minimum(tl.maximum(values / scale, -LARGEST_VALUE), LARGEST_VALUE)
    tl.store(quantised + row * SIZE + columns, scaled.to(quantised.dtype.element_ty), mask=exists)
    tl.store(scales + row, scale)


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [rows, size], the values of a row contiguous, as e4m3 and the scales, float32 [rows, 1].

    KernelError if it cannot run.
    """
    num_rows, size = rows.shape
    quantised = torch.empty((num_rows, size), dtype=FP8, device=rows.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=rows.device)
    if num_rows:
        width = triton.next_power_of_2(size)
        with launching("quantise_rows", rows=rows):
            _quantise_kernel[(num_rows,)](
                quantised, scales, rows, rows.stride(0), SIZE=size, WIDTH=width, LARGEST_VALUE=LARGEST,
                SMALLEST=SMALLEST_MAXIMUM, num_warps=_warps(width),
            )  # fmt: skip
    return quantised, scales


def _warps(width: int) -> int:
    """Enough that a thread has 32 values or fewer, up to rows of 16,384."""
    return max(1, min(16, width // 512))
