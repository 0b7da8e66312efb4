"""A matrix product with a fixed weight, in the layout that is fastest where it runs."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

# The batch size that oneDNN is told to expect when it packs a weight: a generation batch on a CPU.
EXPECTED_ROWS = 16
# [rows, inputs] to [rows, outputs]; and what makes one of a weight [outputs, inputs] and its bias.
Product = Callable[[Tensor], Tensor]
MakeProduct = Callable[[Tensor, Tensor | None], Product]


class Linear:
    """y = x · weightᵀ + bias, with x of [rows, inputs] and weight of [outputs, inputs].

    A weight on a CPU is packed once for oneDNN: from four rows on, products then take a third to two thirds of the time
    that they take with a plain weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS) if self._packed else weight

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] to [rows, outputs]."""
        if self._packed:
            product: Tensor = _packed_product()(rows, self._weight, self._bias, "none", [], "")
            return product
        return functional.linear(rows, self._weight, self._bias)


@cache
def _packed_product() -> Callable[..., Tensor]:
    """The operation itself: found by name, it would take some microseconds more at each call."""
    product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return product


@cache
def _can_pack(dtype: torch.dtype) -> bool:
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
