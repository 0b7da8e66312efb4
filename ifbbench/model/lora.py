"""LoRA in the forward pass: the products of low-rank adapters, each added to the rows of its own requests.

LoRA (Hu et al., arXiv:2106.09685): an adapted product is y = W·x + s·B·(A·x), with A [rank, inputs] and B [outputs,
rank]. The scale s is a part of B here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ifbbench.model.lora_modules import MODULES_OF_PRODUCT, LayerProduct, LoraModule


class BatchAdapters(Protocol):
    """The adapters of a packed batch. `LlamaModel` calls it behind each product of a layer."""

    @property
    def of_outputs(self) -> "BatchAdapters":
        """The same for the rows `ForwardInputs.output_rows`, which alone are left after the last attention."""
        ...

    def add(self, layer: int, product: LayerProduct, rows: Tensor, output: Tensor) -> None:
        """Add the adapters' products of `rows` [rows, inputs] to `output` [rows, outputs] in place.

        With tensor parallelism both are the shares of a rank, and `output` has not been summed over ranks yet."""
        ...


def adapted(
    multiply: Callable[[Tensor], Tensor], rows: Tensor, adapters: BatchAdapters | None, layer: int,
    product: LayerProduct,
) -> Tensor:
    """The product `multiply(rows)` with the adapters' products added."""
    output = multiply(rows)
    if adapters is not None:
        adapters.add(layer, product, rows, output)
    return output


# [layers][modules], A and B of an adapter for each module; None for a module that it leaves as it is.
Matrices = list[list[tuple[Tensor, Tensor] | None]]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive packed rows of one adapter: `first` to `end - 1`."""

    first: int
    end: int
    matrices: Matrices


class TorchAdapters:
    """`BatchAdapters` by PyTorch: two matrix products for each segment and module."""

    def __init__(self, modules: tuple[LoraModule, ...], segments: list[Segment], of_outputs: list[Segment]) -> None:
        self._modules = modules
        self._segments = segments
        self._of_outputs = of_outputs

    @property
    def of_outputs(self) -> "TorchAdapters":
        return TorchAdapters(self._modules, self._of_outputs, self._of_outputs)

    def add(self, layer: int, product: LayerProduct, rows: Tensor, output: Tensor) -> None:
        for segment in self._segments:
            own_rows, own_output = rows[segment.first : segment.end], output[segment.first : segment.end]
            for index in MODULES_OF_PRODUCT[product]:
                if (pair := segment.matrices[layer][index]) is not None:
                    module, (lora_a, lora_b) = self._modules[index], pair
                    columns = own_output[:, module.offset : module.offset + module.outputs]
                    columns.addmm_(torch.mm(own_rows, lora_a.t()), lora_b.t())
