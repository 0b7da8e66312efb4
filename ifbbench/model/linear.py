"""A matrix product with a fixed weight, in the layout that is fastest where it runs."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.model.cpu_kernels import KINDS, load_cpu_kernels, processor_features
from ifbbench.model.huge_pages import zeros

# The batch size that oneDNN is told to expect when it packs a weight: a generation batch on a CPU.
EXPECTED_ROWS = 16
# [rows, inputs] to [rows, outputs]; and what makes one of a weight [outputs, inputs] and its bias.
Product = Callable[[Tensor], Tensor]
MakeProduct = Callable[[Tensor, Tensor | None], Product]


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Product:
    """y = x · weightᵀ + bias, with x of [rows, inputs] and weight of [outputs, inputs].

    On a CPU the weight is packed once: by this project's own kernel; for oneDNN where that was not compiled, or where
    the processor has matrix units, which the kernel does not use.
    """
    if weight.device.type != "cpu":
        return Linear(weight, bias)
    kernels, onednn_packs = load_cpu_kernels(), _onednn_packs(weight.dtype)
    if onednn_packs and _has_matrix_units(weight.dtype):
        return OneDnnLinear(weight, bias)
    if kernels is not None and weight.dtype in KINDS:
        return CpuLinear(kernels, weight, bias)
    return OneDnnLinear(weight, bias) if onednn_packs else Linear(weight, bias)


class Linear:
    """`make_linear` with the weight as it comes."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] to [rows, outputs]."""
        return functional.linear(rows, self._weight, self._bias)


class OneDnnLinear:
    """`make_linear` by oneDNN: from four rows on, it takes a third to two thirds of the time of a plain weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        self._bias = bias
        # The operation itself: found by name, it would take some microseconds more at each call.
        self._product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] to [rows, outputs]."""
        return self._product(rows, self._weight, self._bias, "none", [], "")


class CpuLinear:
    """`make_linear` by the kernel in csrc/products.c: with 16 rows 1.5 times as fast as oneDNN, with hundreds equal,
    and for bfloat16 on processors that have no instruction for it, two to three times as fast."""

    def __init__(self, kernels: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None) -> None:
        kind, _ = KINDS[weight.dtype]
        self._shape, self._bias = tuple(weight.shape), bias
        words = getattr(kernels, f"packed_words_{kind}")(*self._shape)
        self._packed = zeros((words,), weight.device, torch.int32)
        getattr(kernels, f"pack_{kind}")(weight.contiguous().data_ptr(), self._packed.data_ptr(), *self._shape)
        self._multiply = getattr(kernels, f"multiply_{kind}")
        self._pointers = self._packed.data_ptr(), None if bias is None else bias.data_ptr()

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] to [rows, outputs]. MemoryError if there is none for the packed rows."""
        rows = rows.contiguous()
        result = rows.new_empty((rows.shape[0], self._shape[0]))
        if self._multiply(rows.data_ptr(), *self._pointers, result.data_ptr(), rows.shape[0], *self._shape):
            raise MemoryError(f"no memory to pack {rows.numel():,} values for a matrix product")
        return result


@cache
def _has_matrix_units(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies matrices of `dtype` in units of their own (AMX)."""
    return dtype == torch.bfloat16 and "amx_bf16" in processor_features().split()


@cache
def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch brings oneDNN's packed products, and this CPU what they need for `dtype`."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
