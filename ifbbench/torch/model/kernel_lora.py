"""LoRA in the forward pass on a GPU: the grouped products of `ifbbench.torch.kernels.lora`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.models.lora_modules import MODULES_OF_PRODUCT, LayerProduct, PageLayout, Placement
from ifbbench.torch.kernels.lora import FEW_ROWS, MANY_ROWS, TILE_FIELDS, add_adapters
from ifbbench.torch.model.lora import AdapterRows
from ifbbench.torch.model.tensors import to_device


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of rows that have the same adapter.

    fields: see `add_adapters`.
    rows: maximum number of rows of a tile.
    """

    fields: Tensor
    rows: int


class KernelProducts:
    """`AdapterProducts` by kernels, which find the adapters in tables by the first page of each.

    pairs: int32 [pages, layers, modules, 2], modules: int32 [modules, 2], as `add_adapters` takes them.
    """

    def __init__(self, layout: PageLayout, pool: Tensor) -> None:
        self.layout, self.pool = layout, pool
        shape = (len(pool), layout.num_layers, len(layout.modules), 2)
        self.pairs = torch.zeros(shape, dtype=torch.int32, device=pool.device)
        fields = [[module.outputs, module.offset] for module in layout.modules]
        self.modules = torch.tensor(fields, dtype=torch.int32).to(pool.device)
        # Task id to the number in the tables and the largest rank.
        self._numbers: dict[int, tuple[int, int]] = {}

    def place(self, task_id: int, placement: Placement, pages: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        slots = np.array(pages)[placement.page] * self.layout.slots + placement.slot
        entry = np.stack([slots, placement.ranks], axis=-1).astype(np.int32)
        self._numbers[task_id] = pages[0], int(placement.ranks.max())
        return [(to_device(entry, self.pool.device), self.pairs[pages[0]])]

    def of_rows(self, rows: list[AdapterRows], of_outputs: list[AdapterRows]) -> "KernelAdapters":
        max_rank = max(self._numbers[one.task_id][1] for one in rows)
        return KernelAdapters(self, self._tiles(rows), self._tiles(of_outputs), max_rank)

    def _tiles(self, rows: list[AdapterRows]) -> Tiles:
        size = FEW_ROWS if max((one.end - one.first for one in rows), default=0) <= FEW_ROWS else MANY_ROWS
        fields = [
            (start, min(size, end - start), self._numbers[task_id][0])
            for first, end, task_id in rows
            for start in range(first, end, size)
        ]
        array: NDArray[np.int32] = np.array(fields, np.int32).reshape(-1, TILE_FIELDS)
        return Tiles(to_device(array, self.pool.device), size)


class KernelAdapters:
    """`BatchAdapters` by kernels: two launches for each product of a layer."""

    def __init__(self, products: KernelProducts, tiles: Tiles, of_outputs: Tiles, max_rank: int) -> None:
        self._products = products
        self._tiles = tiles
        self._of_outputs = of_outputs
        self._max_rank = max_rank

    @property
    def of_outputs(self) -> "KernelAdapters":
        return KernelAdapters(self._products, self._of_outputs, self._of_outputs, self._max_rank)

    def add(self, layer: int, product: LayerProduct, rows: Tensor, output: Tensor) -> None:
        products, indices = self._products, MODULES_OF_PRODUCT[product]
        layout = products.layout
        add_adapters(
            rows,
            output,
            products.pool,
            layout.width,
            products.pairs,
            products.modules,
            self._tiles.fields,
            self._tiles.rows,
            self._max_rank,
            layer,
            indices[0],
            len(indices),
            max(layout.modules[index].outputs for index in indices),
        )
