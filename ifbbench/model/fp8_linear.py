"""A matrix product with a fixed weight in eight-bit floats, for GPUs that multiply them."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ifbbench.kernels.fp8_rows import fp8_rows

# What both sides of a weight must be a multiple of, for matrix units take 16 eight-bit values at once.
FP8_MULTIPLE = 16


class Fp8Linear:
    """y = x · weightᵀ + bias as `Linear`, multiplied in e4m3; x and y are bfloat16.

    Each output has a scale for its weights, chosen once. Each token has one for its values, chosen as it comes: a scale
    for the whole batch would make what a request says depend on who runs beside it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [outputs, inputs], both multiples of FP8_MULTIPLE on a GPU."""
        quantised, scales = fp8_rows(weight)
        self._weight = quantised.t()
        self._scales = scales.t()
        self._bias = bias
        self._quantise = _quantiser(weight.device.type)

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] to [rows, outputs]."""
        if len(rows) == 0:
            return rows.new_empty((0, self._weight.shape[1]))
        quantised, scales = self._quantise(rows)
        product = torch._scaled_mm(
            quantised, self._weight, scale_a=scales, scale_b=self._scales, out_dtype=torch.bfloat16,
            # Hopper's matrix units keep sums to 14 bits or so: far finer than the factors, and without it slower.
            use_fast_accum=True,
        )  # fmt: skip
        return product if self._bias is None else product.add_(self._bias)


@cache
def _quantiser(device_type: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """How rows become eight-bit floats: by a kernel on a GPU, where Triton is installed."""
    if device_type != "cuda" or find_spec("triton") is None:
        return fp8_rows
    from ifbbench.kernels.quantise_rows import quantise_rows

    return quantise_rows
