"""The time that LoRA adapters add to an iteration: their products, and the copies of those that were not on the device.

The products of all adapters of a batch are grouped, as in Punica (Chen et al., arXiv:2310.18547) and S-LoRA (Sheng et
al., arXiv:2311.03285): for each product of a layer one kernel for all A and one for all B.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ifbbench.clock import NANOSECONDS
from ifbbench.engine.batch import NO_ADAPTER, AdapterLoad, AdapterUse, Batch
from ifbbench.engine.plan import ContextChunk
from ifbbench.kv.adapters import LoraConfig
from ifbbench.models.lora_modules import LayerProduct, lora_modules
from ifbbench.simulated.cost_model import HOST_LINK_SHARE, CostModel

KERNELS_PER_PRODUCT = 2
# Bytes per second at which files of adapters are read: an SSD on PCIe 4.
STORAGE_BYTES_PER_S = 5e9


class LoraCost:
    """The time of adapters beside that of the base model, on each device.

    - The products of an adapter with V values take 2·V FLOP for each token, and each adapter in the batch is read once,
      however many requests share it. Compute and memory overlap as in the products of the model.
    - Input and output of the products are moved as far as they do not fit the cache.
    - Each kernel takes a fixed time to start. Batches with adapters run without a CUDA graph, so that an iteration
      takes at least as long as the host needs to launch all kernels.
    - A missing adapter is copied over the host link before the batch, after it was read from storage if it is not in
      host memory.
    """

    def __init__(self, cost_model: CostModel, lora: LoraConfig) -> None:
        shard, hardware = cost_model.shard, cost_model.hardware
        self._lora = lora
        self._stages = shard.pp_size
        self._layers = shard.model.num_layers
        self._flops_per_s = hardware.matmul_flops_per_s(shard.compute_dtype)
        self._bytes_per_s = hardware.constants.memory * hardware.memory_bandwidth
        self._cache_bytes = hardware.cache_bytes
        modules = lora_modules(shard.model, shard.tp_size)
        inputs = {module.product: module.inputs for module in modules}
        # An output is read and written again.
        moved = sum(inputs.values()) + 2 * sum(module.outputs for module in modules)
        self._token_bytes = moved * shard.compute_bytes
        kernels = self._layers * len(LayerProduct) * KERNELS_PER_PRODUCT
        self._start_s = kernels * hardware.constants.kernel_s
        self._launch_ns = cost_model.launch_ns + kernels * hardware.constants.launch_s * NANOSECONDS
        self._host_link_bytes_per_s = HOST_LINK_SHARE * hardware.host_link_bandwidth

    def batch_ns(self, batch: Batch, use: AdapterUse, base_ns: int) -> int:
        """Nanoseconds of a batch that takes the base model `base_ns`."""
        tasks, lengths = np.repeat(use.tasks, batch.beam_width), [chunk.length for chunk in batch.context]
        if batch.padded and lengths:
            lengths = [max(lengths)] * len(lengths)
        times = self.repeated_ns(use._replace(tasks=tasks), batch.context, lengths, np.array([base_ns], np.int64))
        return int(times[0])

    def repeated_ns(
        self, use: AdapterUse, context: Sequence[ContextChunk], lengths: Sequence[int], base_ns: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Nanoseconds of iterations that take the base model `base_ns`, [iterations]: of a token of each request in
        `use`, and chunks of these lengths. The copies are made before the first."""
        tokens = Counter[int](use.tasks.tolist())
        for chunk, length in zip(context, lengths, strict=True):
            if chunk.request.lora_task_id is not None:
                tokens[chunk.request.lora_task_id] += length
        times = self._with_adapters(base_ns, tokens)
        if use.loads:
            times = times.copy()
            times[0] += round(self.load_s(use.loads) * NANOSECONDS)
        return times

    def products_s(self, tokens: Mapping[int, int]) -> float:
        """Seconds of the products. tokens: task id to its tokens in the batch."""
        sizes = [(count, size.values) for task_id, count in tokens.items() if (size := self._lora.source.size(task_id))]
        if not sizes:
            return 0.0
        flops = 2.0 * sum(count * values for count, values in sizes) * self._stages
        beyond_cache = max(0.0, sum(count for count, _ in sizes) * self._token_bytes - self._cache_bytes)
        weights = sum(values for _, values in sizes) * self._lora.value_bytes * self._stages
        moved = weights + self._layers * beyond_cache
        return math.hypot(flops / self._flops_per_s, moved / self._bytes_per_s) + self._start_s

    def load_s(self, loads: Iterable[AdapterLoad]) -> float:
        """Seconds of the copies."""
        seconds = 0.0
        for load in loads:
            size = self._lora.source.size(load.task_id)
            assert size is not None
            copied = size.values * self._lora.value_bytes
            seconds += copied / self._host_link_bytes_per_s
            seconds += 0.0 if load.from_host else copied / STORAGE_BYTES_PER_S
        return seconds

    def _with_adapters(self, base_ns: NDArray[np.int64], tokens: Counter[int]) -> NDArray[np.int64]:
        del tokens[NO_ADAPTER]
        if not tokens:
            return base_ns
        times = np.maximum(base_ns + self.products_s(tokens) * NANOSECONDS, self._launch_ns)
        rounded: NDArray[np.int64] = np.rint(times).astype(np.int64)
        return rounded
