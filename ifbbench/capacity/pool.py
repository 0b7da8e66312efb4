"""The KV cache that a run would have: bytes, blocks and tokens."""

from dataclasses import dataclass

from ifbbench.api.cache_layout import cache_layout, kv_value_bytes
from ifbbench.capacity.device import Device
from ifbbench.config import RunConfig
from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.kv_cache.sizing import CacheLayout, WindowLayout, blocks_of_memory
from ifbbench.errors import InputError
from ifbbench.model.config import ModelConfig
from ifbbench.simulation.hardware import load_hardware
from ifbbench.simulation.memory import kv_bytes_of_all_devices, kv_memory_bytes, shard_of


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """The blocks of the layers that share an attention window.

    layout: as a run has it. bytes_per_token: in all of these layers. num_blocks: what there is room for, of which a run
    takes no more than a full batch can fill.
    """

    layout: WindowLayout
    bytes_per_token: int
    num_blocks: int

    @property
    def attention_window(self) -> AttentionWindow:
        return self.layout.attention_window

    @property
    def blocks_of_run(self) -> int:
        return self.layout.num_blocks

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.attention_window.tokens_per_block

    @property
    def kv_bytes(self) -> int:
        return self.bytes_per_block * self.num_blocks


@dataclass(frozen=True, slots=True)
class Pool:
    """windows: one, or one for each size of attention window. budget_bytes: the memory that the KV cache may take, None
    where the settings alone size it. weight_bytes: of the model, in each device's memory."""

    windows: tuple[PoolWindow, ...]
    weight_bytes: int
    budget_bytes: int | None = None
    is_contiguous: bool = False

    @property
    def layout(self) -> CacheLayout:
        """The cache of a run."""
        return CacheLayout(tuple(window.layout for window in self.windows), self.is_contiguous)

    @property
    def bytes_per_token(self) -> int:
        """In all layers."""
        return sum(window.bytes_per_token for window in self.windows)

    @property
    def kv_bytes(self) -> int:
        """Of all blocks."""
        return sum(window.kv_bytes for window in self.windows)


def make_pool(config: RunConfig, model: ModelConfig, device: Device) -> Pool:
    """The KV cache that `config` (limits resolved) gets on `device`, the weights of `model` taken off its memory.

    Raises InputError if the weights, or a single block beside them, do not fit."""
    weight_bytes, budget = _memory(config, model, device)
    layout = cache_layout(config, model, budget)
    per_layer = model.kv_bytes_per_token(kv_value_bytes(config)) // model.num_layers
    sizes = {window.attention_window.size: len(window.layers) * per_layer for window in layout.windows}
    numbers = {window.attention_window.size: window.num_blocks for window in layout.windows}
    if budget is not None and config.max_tokens_in_paged_kvcache is None:
        numbers = {window: blocks.primary for window, blocks
                   in blocks_of_memory(budget, sizes, config.tokens_per_block).items()}  # fmt: skip
    windows = (
        PoolWindow(window, sizes[window.attention_window.size], numbers[window.attention_window.size])
        for window in layout.windows
    )
    return Pool(tuple(windows), weight_bytes, budget, layout.is_contiguous)


def _memory(config: RunConfig, model: ModelConfig, device: Device) -> tuple[int, int | None]:
    """Bytes of the weights on each device, and for keys and values on all devices together.

    A simulated device's are those of a run on it. Elsewhere the weights are taken off measured memory too, for they are
    not loaded yet."""
    shard = shard_of(model, config)
    weight_bytes = shard.parameter_bytes
    if config.hardware is not None and device.name == config.device:
        return weight_bytes, kv_memory_bytes(model, load_hardware(config.hardware), config)
    if device.free_bytes is None:
        return weight_bytes, None
    left = device.free_bytes - weight_bytes
    if left <= 0:
        on_each = " on each device" if config.tp_size * config.pp_size > 1 else ""
        raise InputError(
            f"the weights of model {config.model} take {weight_bytes:,} bytes in {config.dtype}{on_each}, "
            f"{device.name} has {device.free_bytes:,} free; choose a smaller --dtype or model, or give more memory."
        )
    budget = int(config.kv_cache_free_gpu_mem_fraction * left)
    if device.max_kv_bytes is not None:
        budget = min(budget, device.max_kv_bytes)
    return weight_bytes, kv_bytes_of_all_devices(shard, budget)
