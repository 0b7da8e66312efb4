"""How keys and values lie in memory: what an executor has to know of the KV cache beside the block tables."""

from dataclasses import dataclass

from ifbbench.engine.kv_cache.attention_window import AttentionWindow


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """The layers that share an attention window, and their blocks.

    layers: their indices in the model. attention_window: block size, window, sink tokens and where positions lie.
    num_blocks, num_host_blocks: blocks in device and host memory.
    """

    layers: tuple[int, ...]
    attention_window: AttentionWindow
    num_blocks: int
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The whole cache: one window, or one for each group of layers.

    is_contiguous: each slot has one piece of memory for its longest sequence instead of blocks; block tables then say
        nothing.
    """

    windows: tuple[WindowLayout, ...]
    is_contiguous: bool = False
