"""The executor's KV cache where kernels read it."""

import torch

from ifbbench.engine.batch import Batch
from ifbbench.engine.kv_cache.sizing import CacheLayout
from ifbbench.execution.cache_windows import CacheWindows, cache_rows
from ifbbench.execution.packing import PackedBatch, table_rows
from ifbbench.model.attention import LayerInputs
from ifbbench.model.config import ModelConfig
from ifbbench.model.kernel_cache import KernelPagedCache
from ifbbench.model.paged_batch import KernelShapes, plan_paged_batch


class KernelCacheWindows(CacheWindows):
    """`CacheWindows` that plans batches for kernels instead of calls to PyTorch's attention."""

    paged_cache = KernelPagedCache

    def __init__(
        self, config: ModelConfig, layout: CacheLayout, num_slots: int, device: torch.device, dtype: torch.dtype,
        kv_cache_dtype: torch.dtype | None = None, *, attends_in_place: bool = False,
    ) -> None:
        super().__init__(config, layout, num_slots, device, dtype, kv_cache_dtype, attends_in_place=attends_in_place)
        self._shapes = KernelShapes.of(config, device, dtype)

    def layer_inputs(self, batch: Batch, packed: PackedBatch) -> tuple[LayerInputs, ...]:
        """What each layer needs; planned once a window. Reads the block tables before it returns."""
        inputs: dict[int, LayerInputs] = {}
        for index, window in enumerate(self.windows):
            tables = table_rows(window.tables_of(batch, index))
            rows = cache_rows(packed, tables, window)
            paged = plan_paged_batch(packed.spans, len(batch.context), tables, rows, window.rule, self._shapes,
                                     self._device)  # fmt: skip
            shared = LayerInputs(window.cache, paged.cache_rows, (), paged=paged)
            inputs.update(dict.fromkeys(window.layers, shared))
        return tuple(inputs[layer] for layer in range(self._num_layers))
