"""LoRA in the forward pass: the products of low-rank adapters, each added to the rows of its own requests.

LoRA (Hu et al., arXiv:2106.09685): an adapted product is y = W·x + s·B·(A·x), with A [rank, inputs] and B [outputs,
rank]. The scale s is a part of B here.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ifbbench.models.lora_modules import MODULES_OF_PRODUCT, LayerProduct, PageLayout, Placement


class BatchAdapters(Protocol):
    """The adapters of a packed batch. `LlamaModel` calls it behind each product of a layer."""

    @property
    def of_outputs(self) -> "BatchAdapters":
        """The plan for the rows `ForwardInputs.output_rows`, which alone are left after the last attention."""
        ...

    def add(self, layer: int, product: LayerProduct, rows: Tensor, output: Tensor) -> None:
        """Add the adapters' products of `rows` [rows, inputs] to `output` [rows, outputs] in place.

        With tensor parallelism both are the shares of a rank, and `output` has not been summed over ranks yet."""
        ...


def adapted(
    multiply: Callable[[Tensor], Tensor],
    rows: Tensor,
    adapters: BatchAdapters | None,
    layer: int,
    product: LayerProduct,
) -> Tensor:
    """The product `multiply(rows)` with the adapters' products added."""
    output = multiply(rows)
    if adapters is not None:
        adapters.add(layer, product, rows, output)
    return output


class AdapterRows(NamedTuple):
    """Consecutive packed rows with the adapter of one LoRA task: `first` to `end - 1`."""

    first: int
    end: int
    task_id: int


class AdapterProducts(Protocol):
    """The products of adapters in pages on the device."""

    def __init__(self, layout: PageLayout, pool: Tensor) -> None:
        """pool: [pages, values of a page], contiguous."""
        ...

    def place(self, task_id: int, placement: Placement, pages: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """From the next batch on, an adapter is in these pages. Returns what is to be copied for it beside them:
        sources and destinations."""
        ...

    def of_rows(self, rows: list[AdapterRows], of_outputs: list[AdapterRows]) -> BatchAdapters:
        """The adapters of packed rows, and of those with outputs."""
        ...


# [layers][modules], A and B of an adapter for each module; None for a module that it leaves as it is.
Matrices = list[list[tuple[Tensor, Tensor] | None]]


class TorchProducts:
    """`AdapterProducts` by PyTorch."""

    def __init__(self, layout: PageLayout, pool: Tensor) -> None:
        self._layout = layout
        self._pool = pool
        self._matrices: dict[int, Matrices] = {}

    def place(self, task_id: int, placement: Placement, pages: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        modules = range(len(self._layout.modules))
        self._matrices[task_id] = [
            [self._pair(placement, pages, layer, index) for index in modules]
            for layer in range(self._layout.num_layers)
        ]
        return []

    def of_rows(self, rows: list[AdapterRows], of_outputs: list[AdapterRows]) -> "TorchAdapters":
        both = [(one, self._matrices[one.task_id]) for one in rows]
        return TorchAdapters(self._layout, both, [(one, self._matrices[one.task_id]) for one in of_outputs])

    def _pair(self, placement: Placement, pages: Sequence[int], layer: int, index: int) -> tuple[Tensor, Tensor] | None:
        rank, module = int(placement.ranks[layer, index]), self._layout.modules[index]
        if not rank:
            return None
        first, border = int(placement.slot[layer, index]) * self._layout.width, rank * module.inputs
        values = self._pool[pages[int(placement.page[layer, index])], first : first + rank * module.values_of_rank]
        return values[:border].view(rank, module.inputs), values[border:].view(module.outputs, rank)


class TorchAdapters:
    """`BatchAdapters` by PyTorch: two matrix products for each adapter and module."""

    def __init__(
        self,
        layout: PageLayout,
        rows: list[tuple[AdapterRows, Matrices]],
        of_outputs: list[tuple[AdapterRows, Matrices]],
    ) -> None:
        self._layout = layout
        self._rows = rows
        self._of_outputs = of_outputs

    @property
    def of_outputs(self) -> "TorchAdapters":
        return TorchAdapters(self._layout, self._of_outputs, self._of_outputs)

    def add(self, layer: int, product: LayerProduct, rows: Tensor, output: Tensor) -> None:
        for (first, end, _), matrices in self._rows:
            for index in MODULES_OF_PRODUCT[product]:
                if (pair := matrices[layer][index]) is not None:
                    module, (lora_a, lora_b) = self._layout.modules[index], pair
                    columns = output[first:end, module.offset : module.offset + module.outputs]
                    columns.addmm_(torch.mm(rows[first:end], lora_a.t()), lora_b.t())
