"""A matrix product with a fixed weight in eight-bit floats, for GPUs that multiply them."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ifbbench.kernels.fp8_rows import fp8_rows

# What both sides of a weight must be a multiple of, for matrix units take 16 eight-bit values at once.
FP8_MULTIPLE = 16
# How cuBLAS says that it has no kernel for some sizes.
NO_KERNEL = ("CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE")


class Fp8Linear:
    """y = x · weightᵀ + bias as `Linear`, multiplied in e4m3; x and y are bfloat16.

    Each output has a scale for its weights, chosen once. Each token has one for its values, chosen as it comes: a scale
    for the whole batch would make what a request says depend on who runs beside it.

    On Hopper, cuBLAS has no such product of few rows with many inputs each (https://github.com/pytorch/ao/issues/4582:
    256 rows, 9,216 inputs). There the factors are multiplied as if without scales, and these come afterwards.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [outputs, inputs], both multiples of FP8_MULTIPLE on a GPU."""
        quantised, scales = fp8_rows(weight)
        self._weight = quantised.t()
        self._scales = scales.t()
        self._bias = bias
        self._quantise = _quantiser(weight.device.type)
        self._one = torch.ones((), device=weight.device)
        # Numbers of rows that there is no product with scales for.
        self._refused: set[int] = set()

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] to [rows, outputs]."""
        if len(rows) == 0:
            return rows.new_empty((0, self._weight.shape[1]))
        product = self._product(*self._quantise(rows))
        return product if self._bias is None else product.add_(self._bias)

    def _product(self, rows: Tensor, scales: Tensor) -> Tensor:
        if len(rows) not in self._refused:
            try:
                return self._multiply(rows, scales, self._scales, torch.bfloat16)
            except RuntimeError as error:  # raised before anything is launched
                if not any(sign in str(error) for sign in NO_KERNEL):
                    raise
                # Remembered: a CUDA graph is recorded after a run that is not, and must not meet the error.
                self._refused.add(len(rows))
        plain = self._multiply(rows, self._one, self._one, torch.float32)
        return torch.mul(plain.mul_(scales), self._scales, out=plain.new_empty(plain.shape, dtype=torch.bfloat16))

    def _multiply(self, rows: Tensor, row_scales: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        # Hopper's matrix units keep sums to 14 bits or so: far finer than the factors, and without it slower.
        return torch._scaled_mm(
            rows, self._weight, scale_a=row_scales, scale_b=scales, out_dtype=dtype, use_fast_accum=True
        )


@cache
def _quantiser(device_type: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """How rows become eight-bit floats: by a kernel on a GPU, where Triton is installed."""
    if device_type != "cuda" or find_spec("triton") is None:
        return fp8_rows
    from ifbbench.kernels.quantise_rows import quantise_rows

    return quantise_rows
