"""Pools and requests to fit into them."""

from ifbbench.capacity.pool import Pool, PoolWindow
from ifbbench.engine.batching_config import BatchingConfig
from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.kv_cache.sizing import WindowLayout
from ifbbench.workload.trace import TraceRequest


def request(prompt_len: int, output_len: int, reserved: int | None = None, beam_width: int = 1) -> TraceRequest:
    """A request that reserves its output length, if not told otherwise."""
    return TraceRequest(0, 0.0, prompt_len, reserved or output_len, output_len, beam_width=beam_width)


def pool_of(limits: BatchingConfig, bytes_per_token: int = 100) -> Pool:
    """The pool of the engine that `limits` describe."""
    return Pool((window_of(limits.attention_window, limits.num_blocks, bytes_per_token),), weight_bytes=0)


def window_of(attention_window: AttentionWindow, num_blocks: int, bytes_per_token: int = 100) -> PoolWindow:
    """One layer with so many blocks, all of which a run takes."""
    return PoolWindow(WindowLayout((0,), attention_window, num_blocks), bytes_per_token, num_blocks)
