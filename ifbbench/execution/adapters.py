"""LoRA adapters on an executor's device: their pages, the copies that fill them, and the adapters of a batch's rows."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.batch import Batch
from ifbbench.engine.lora import NO_ADAPTER, AdapterLoad, LoraConfig
from ifbbench.execution.packing import Int64Array, PackedBatch
from ifbbench.model.llama import LlamaModel
from ifbbench.model.lora import BatchAdapters, Matrices, Segment, TorchAdapters
from ifbbench.model.lora_modules import Placement
from ifbbench.model.lora_store import AdapterStore

# An adapter's pages in host memory, the ids of its pages on the device, and the slots used of each.
PageCopy = tuple[Tensor, tuple[int, ...], tuple[int, ...]]


class PlannedAdapters:
    """The adapters of a batch, and the copies to be made before it runs."""

    def __init__(self, pool: Tensor, width: int, copies: Sequence[PageCopy], adapters: BatchAdapters | None) -> None:
        """pool: [pages, values of a page]. width: values of a slot. adapters: None if no row of the batch has one."""
        self._pool, self._width = pool, width
        self._copies = copies
        self._adapters = adapters

    def ready(self) -> BatchAdapters | None:
        """Enqueue the copies, behind the batches that use what they overwrite; returns the adapters of the rows."""
        for source, pages, used in self._copies:
            for index, (page, slots) in enumerate(zip(pages, used, strict=True)):
                count = slots * self._width
                self._pool[page, :count].copy_(source[index, :count], non_blocking=True)
        return self._adapters


class AdapterPool:
    """The pages of adapters on the device."""

    def __init__(self, model: LlamaModel, lora: LoraConfig) -> None:
        assert isinstance(lora.source, AdapterStore), "an executor computes with weights"
        self._store = lora.source
        self._layout = lora.source.layout
        shape = (lora.device_pages, self._layout.page_values)
        self._pool = torch.empty(shape, dtype=model.dtype, device=model.device)
        self._resident: dict[int, Matrices] = {}

    def plan(self, batch: Batch, packed: PackedBatch, output_rows: Int64Array) -> PlannedAdapters | None:
        """What the adapters of `batch` need; None if nothing. output_rows: packed rows that logits are wanted of."""
        assert batch.adapters is not None
        copies = [self._plan_load(load) for load in batch.adapters.loads]
        of_chunks = [NO_ADAPTER if (task := chunk.request.lora_task_id) is None else task for chunk in batch.context]
        of_generation = np.repeat(batch.adapters.tasks, batch.beam_width)
        tasks = np.concatenate([np.array(of_chunks, np.int64), of_generation])[packed.owners]
        if (tasks == NO_ADAPTER).all():
            return PlannedAdapters(self._pool, self._layout.width, copies, None) if copies else None
        adapters = TorchAdapters(self._layout.modules, self._segments(tasks), self._segments(tasks[output_rows]))
        return PlannedAdapters(self._pool, self._layout.width, copies, adapters)

    def _plan_load(self, load: AdapterLoad) -> PageCopy:
        store = self._store
        source, placement = store.pages(load.task_id), store.placement(load.task_id)
        if not load.is_kept:
            store.drop(load.task_id)
        self._resident[load.task_id] = self._matrices(placement, load.pages)
        return source, load.pages, placement.used

    def _matrices(self, placement: Placement, pages: tuple[int, ...]) -> Matrices:
        def pair(layer: int, index: int) -> tuple[Tensor, Tensor] | None:
            rank, module = int(placement.ranks[layer, index]), self._layout.modules[index]
            if not rank:
                return None
            first, border = int(placement.slot[layer, index]) * self._layout.width, rank * module.inputs
            values = self._pool[pages[int(placement.page[layer, index])]][first:]
            end = rank * module.values_of_rank
            return values[:border].view(rank, module.inputs), values[border:end].view(module.outputs, rank)

        modules = range(len(self._layout.modules))
        return [[pair(layer, index) for index in modules] for layer in range(self._layout.num_layers)]

    def _segments(self, tasks: NDArray[np.int64]) -> list[Segment]:
        """Consecutive rows with the same adapter. tasks: [rows]."""
        borders = [0, *(np.flatnonzero(np.diff(tasks)) + 1).tolist(), len(tasks)]
        return [
            Segment(first, end, self._resident[int(tasks[first])])
            for first, end in pairwise(borders) if first < end and tasks[first] != NO_ADAPTER
        ]  # fmt: skip
