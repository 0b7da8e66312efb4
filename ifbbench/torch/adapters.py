"""LoRA adapters on an executor's device: their pages, the copies that fill them, and the adapters of a batch's rows."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.batch import NO_ADAPTER, AdapterLoad, Batch
from ifbbench.kv.adapters import LoraConfig
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.lora import AdapterProducts, AdapterRows, BatchAdapters, TorchProducts
from ifbbench.torch.model.lora_store import AdapterStore
from ifbbench.torch.packing import Int64Array, PackedBatch

# Source and destination.
Copy = tuple[Tensor, Tensor]


class PlannedAdapters:
    """The adapters of a batch, and the copies to be made before it runs."""

    def __init__(self, copies: Sequence[Copy], adapters: BatchAdapters | None) -> None:
        """adapters: None if no row of the batch has one."""
        self._copies = copies
        self._adapters = adapters

    def ready(self) -> BatchAdapters | None:
        """Enqueue the copies, behind the batches that use what they overwrite; returns the adapters of the rows."""
        for source, destination in self._copies:
            destination.copy_(source, non_blocking=True)
        return self._adapters


class AdapterPool:
    """The pages of adapters on the device."""

    def __init__(self, model: LlamaModel, lora: LoraConfig) -> None:
        assert isinstance(lora.source, AdapterStore), "an executor computes with weights"
        self._store = lora.source
        self._layout = lora.source.layout
        shape = (lora.device_pages, self._layout.page_values)
        self._pool = torch.empty(shape, dtype=model.dtype, device=model.device)
        products: type[AdapterProducts] = TorchProducts
        if model.uses_kernels:
            from ifbbench.torch.model.kernel_lora import (
                KernelProducts,  # imports Triton, which is not installed everywhere
            )

            products = KernelProducts
        self._products = products(self._layout, self._pool)

    def plan(self, batch: Batch, packed: PackedBatch, output_rows: Int64Array) -> PlannedAdapters | None:
        """What the adapters of `batch` need; None if nothing. output_rows: packed rows that logits are wanted of."""
        assert batch.adapters is not None
        copies = [copy for load in batch.adapters.loads for copy in self._plan_load(load)]
        of_chunks = [NO_ADAPTER if (task := chunk.request.lora_task_id) is None else task for chunk in batch.context]
        of_generation = np.repeat(batch.adapters.tasks, batch.beam_width)
        tasks = np.concatenate([np.array(of_chunks, np.int64), of_generation])[packed.owners]
        if (tasks == NO_ADAPTER).all():
            return PlannedAdapters(copies, None) if copies else None
        return PlannedAdapters(copies, self._products.of_rows(rows_of(tasks), rows_of(tasks[output_rows])))

    def _plan_load(self, load: AdapterLoad) -> list[Copy]:
        store = self._store
        source, placement = store.pages(load.task_id), store.placement(load.task_id)
        if not load.is_kept:
            store.drop(load.task_id)
        counts = [slots * self._layout.width for slots in placement.used]
        copies = [
            (source[index, :count], self._pool[page, :count])
            for index, (page, count) in enumerate(zip(load.pages, counts, strict=True))
        ]
        return copies + self._products.place(load.task_id, placement, load.pages)


def rows_of(tasks: NDArray[np.int64]) -> list[AdapterRows]:
    """The consecutive rows of each adapter. tasks: [rows], LoRA task ids."""
    borders = [0, *(np.flatnonzero(np.diff(tasks)) + 1).tolist(), len(tasks)]
    return [
        AdapterRows(first, end, int(tasks[first]))
        for first, end in pairwise(borders)
        if first < end and tasks[first] != NO_ADAPTER
    ]
