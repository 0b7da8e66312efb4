"""Matrix products with a fixed weight, each in the layout that is fastest on its device."""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.torch.model.compiled import KINDS, load_cpu_kernels, processor_features
from ifbbench.torch.model.tensors import zeros

# [rows, inputs] to [rows, outputs].
Product = Callable[[Tensor], Tensor]
# From a weight [outputs, inputs] and its bias.
MakeProduct = Callable[[Tensor, Tensor | None], Product]
# Batch size that oneDNN packs a weight for: a generation batch on a CPU.
EXPECTED_ROWS = 16

FP8 = torch.float8_e4m3fn
FP8_LIMIT = torch.finfo(FP8).max
# Both sizes of an fp8 weight must be a multiple of it: matrix units read 16 eight-bit values at once.
FP8_MULTIPLE = 16
# Smallest maximum that a row is scaled by, so that a row of zeros has a scale above 0.
FP8_SMALLEST_MAXIMUM = 1e-12
# Errors of cuBLAS for sizes that it has no kernel for.
NO_KERNEL = ("CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE")


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Product:
    """y = x · weightᵀ + bias, with x of [rows, inputs] and weight of [outputs, inputs].

    On a CPU the weight is packed once: by this project's kernel, or by oneDNN where that is not compiled or the
    processor has matrix units, which it does not use.
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
    """`make_linear` with the weight unchanged."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._weight, self._bias)


class OneDnnLinear:
    """`make_linear` by oneDNN; from four rows on it takes a third to two thirds of the time of `Linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        self._bias = bias
        # The overload itself: its look-up by name would take some microseconds per call.
        self._product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: Tensor) -> Tensor:
        return self._product(rows, self._weight, self._bias, "none", [], "")


class CpuLinear:
    """`make_linear` by csrc/products.c: 1.5 times as fast as oneDNN with 16 rows, equal with hundreds, and two to three
    times as fast for bfloat16 on processors without an instruction for it."""

    def __init__(self, kernels: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None) -> None:
        kind, _ = KINDS[weight.dtype]
        weight = weight.contiguous()
        self._shape, self._bias = tuple(weight.shape), bias
        words = getattr(kernels, f"packed_words_{kind}")(*self._shape)
        self._packed = zeros((words,), weight.device, torch.int32)
        getattr(kernels, f"pack_{kind}")(weight.data_ptr(), self._packed.data_ptr(), *self._shape)
        self._multiply = getattr(kernels, f"multiply_{kind}")
        self._pointers = self._packed.data_ptr(), None if bias is None else bias.data_ptr()

    def __call__(self, rows: Tensor) -> Tensor:
        """MemoryError if there is not enough memory for the packed rows."""
        rows = rows.contiguous()
        result = rows.new_empty((rows.shape[0], self._shape[0]))
        if self._multiply(rows.data_ptr(), *self._pointers, result.data_ptr(), rows.shape[0], *self._shape):
            raise MemoryError(f"no memory to pack {rows.numel():,} values for a matrix product")
        return result


class Fp8Linear:
    """y = x · weightᵀ + bias, multiplied in e4m3; x and y are bfloat16.

    The weights of each output have one scale, and so have the values of each token: a scale for the whole batch would
    make a request's output depend on the other requests in it.

    On Hopper, cuBLAS has no product with such scales for few rows with many inputs, such as 256 rows of 9,216 inputs
    (https://github.com/pytorch/ao/issues/4582). There the factors are multiplied without scales, which are applied to
    the result.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [outputs, inputs], both multiples of FP8_MULTIPLE on a GPU."""
        quantised, scales = fp8_rows(weight)
        self._weight = quantised.t()
        self._scales = scales.t()
        self._bias = bias
        self._quantise: Callable[[Tensor], tuple[Tensor, Tensor]] = fp8_rows
        if weight.device.type == "cuda" and find_spec("triton") is not None:
            from ifbbench.torch.kernels.rows import quantise_rows

            self._quantise = partial(quantise_rows, dtype=FP8, smallest_maximum=FP8_SMALLEST_MAXIMUM)
        self._one = torch.ones((), device=weight.device)
        # Numbers of rows without a product with scales.
        self._unsupported: set[int] = set()

    def __call__(self, rows: Tensor) -> Tensor:
        if len(rows) == 0:
            return rows.new_empty((0, self._weight.shape[1]))
        product = self._product(*self._quantise(rows))
        return product if self._bias is None else product.add_(self._bias)

    def _product(self, rows: Tensor, scales: Tensor) -> Tensor:
        if len(rows) not in self._unsupported:
            try:
                return self._multiply(rows, scales, self._scales, torch.bfloat16)
            except RuntimeError as error:  # raised before anything is launched
                if not any(sign in str(error) for sign in NO_KERNEL):
                    raise
                # Remembered: the run before the recording of a CUDA graph raises the error, the recording must not.
                self._unsupported.add(len(rows))
        plain = self._multiply(rows, self._one, self._one, torch.float32)
        return torch.mul(plain.mul_(scales), self._scales, out=plain.new_empty(plain.shape, dtype=torch.bfloat16))

    def _multiply(self, rows: Tensor, row_scales: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        # Hopper's fast accumulation keeps about 14 bits of a sum: far more than the factors have, and it is faster.
        return torch._scaled_mm(
            rows, self._weight, scale_a=row_scales, scale_b=scales, out_dtype=dtype, use_fast_accum=True
        )


def fp8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [rows, size] as e4m3, and the scales float32 [rows, 1]: each row is about its values times its scale.

    The scale of a row is s = max |x| / 448, where 448 is the largest number of e4m3 (Micikevicius et al., FP8 formats
    for deep learning, arXiv:2209.05433). A value is stored as round(x / s) with three bits of mantissa, with an error
    of at most 2⁻⁴ of the value, down to 2⁻⁶ · s.
    """
    values = rows.float()
    scales = values.abs().amax(dim=1, keepdim=True).clamp(min=FP8_SMALLEST_MAXIMUM) / FP8_LIMIT
    return (values / scales).clamp(-FP8_LIMIT, FP8_LIMIT).to(FP8), scales


@cache
def _has_matrix_units(dtype: torch.dtype) -> bool:
    """Whether the processor has instructions for products of matrices of `dtype` (AMX)."""
    return dtype == torch.bfloat16 and "amx_bf16" in processor_features().split()


@cache
def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch has oneDNN's packed products and this processor supports them for `dtype`."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype == torch.float32 or (dtype in checks and bool(getattr(torch.ops.mkldnn, checks[dtype])()))
