"""A matrix product with a fixed weight, in the layout that is fastest where it runs."""

import torch
from torch import Tensor
from torch.nn import functional

# The batch size that oneDNN is told to expect when it packs a weight: a generation batch on a CPU.
EXPECTED_ROWS = 16


class Linear:
    """y = x · weightᵀ + bias, with x of [rows, inputs] and weight of [outputs, inputs].

    A float32 weight on a CPU is packed once for oneDNN: from four rows on, products then take about half the time that
    they take with a plain weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and _has_onednn()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS) if self._packed else weight

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] to [rows, outputs]."""
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
            return product
        return functional.linear(rows, self._weight, self._bias)


def _has_onednn() -> bool:
    """Whether this build of PyTorch brings oneDNN's packed products."""
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
