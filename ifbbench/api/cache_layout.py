"""The KV cache of a run: which layers share an attention window, and how many blocks each window gets."""

import logging
import re
from collections.abc import Mapping

from ifbbench.config import DTYPE_BYTES, RunConfig
from ifbbench.engine.kv_cache.attention_window import AttentionWindow, ceil_div
from ifbbench.engine.kv_cache.sizing import CacheLayout, WindowBlocks, WindowLayout, blocks_of_memory
from ifbbench.errors import InputError
from ifbbench.model.config import ModelConfig

_log = logging.getLogger("ifbbench")


def cache_layout(config: RunConfig, model: ModelConfig, memory_bytes: int | None) -> CacheLayout:
    """The cache of a `config` whose limits are resolved.

    memory_bytes: what keys and values may take on the device, None where they take none. Where the user gave no size,
    the cache is no larger than a full batch of the longest sequences could fill; else it is what was asked for, as far
    as memory has it. InputError if not a single block fits."""
    layers = _layers_of_window(config, model)
    per_layer = model.kv_bytes_per_token(kv_value_bytes(config)) // model.num_layers
    sizes = {window: float(len(members) * per_layer) for window, members in layers.items()}
    attention_windows = {window: _attention_window(config, window) for window in layers}
    blocks = _blocks(config, sizes, attention_windows, memory_bytes)
    windows = tuple(
        WindowLayout(tuple(members), attention_windows[window], blocks[window].primary, blocks[window].secondary)
        for window, members in layers.items()
    )
    if min(window.num_blocks for window in windows) < 1:
        raise InputError(
            f"no memory for a single KV cache block of {config.tokens_per_block} tokens; raise "
            "--kv_cache_free_gpu_mem_fraction, free memory, or choose a smaller model."
        )
    return CacheLayout(windows, is_contiguous=config.kv_cache_type == "contiguous")


def windows_of_layers(layout: CacheLayout, model: ModelConfig) -> list[tuple[int | None, float]]:
    """How many positions up to its own a query sees, None if all, and the share of the layers in which it does."""
    return [
        (size if (size := window.attention_window.size) < window.attention_window.max_seq_len else None,
         len(window.layers) / model.num_layers)
        for window in layout.windows
    ]  # fmt: skip


def kv_value_bytes(config: RunConfig) -> int:
    """Bytes of one value in the KV cache."""
    return int(DTYPE_BYTES[config.kv_cache_dtype or config.weight_dtype])


def _blocks(
    config: RunConfig, sizes: Mapping[int, float], attention_windows: Mapping[int, AttentionWindow],
    memory_bytes: int | None,
) -> dict[int, WindowBlocks]:
    most = config.max_tokens_in_paged_kvcache
    host = blocks_of_memory(0, sizes, config.tokens_per_block, host_bytes=config.kv_host_cache_bytes)
    full_batch = (config.max_batch_size or 1) * (config.max_beam_width or 1)
    room = None if memory_bytes is None else blocks_of_memory(memory_bytes, sizes, config.tokens_per_block)
    blocks = {}
    for window, attention_window in attention_windows.items():
        wanted = full_batch * attention_window.max_blocks_per_sequence
        if most is not None:
            wanted = ceil_div(most, config.tokens_per_block)
        primary = wanted if room is None else min(wanted, room[window].primary)
        if most is not None and primary < wanted:
            _log.warning("--max_tokens_in_paged_kvcache %d: memory has room for %d blocks of %d tokens only.", most,
                         primary, config.tokens_per_block)  # fmt: skip
        blocks[window] = WindowBlocks(primary, host[window].secondary)
    return blocks


def _layers_of_window(config: RunConfig, model: ModelConfig) -> dict[int, list[int]]:
    """The layers of each attention window (tokens), longest first. Windows longer than a sequence are all one."""
    longest = config.max_seq_len or model.max_position_embeddings
    asked = parse_windows(config.max_attention_window) or (model.sliding_window or longest,)
    if model.sliding_window is not None and max(asked) > model.sliding_window:
        raise InputError(
            f"--max_attention_window: {max(asked)} is more than the sliding window of model {config.model}; expected "
            f"at most {model.sliding_window} (tokens). Lower it or leave it out."
        )
    layers: dict[int, list[int]] = {}
    for layer in range(model.num_layers):
        layers.setdefault(min(asked[layer % len(asked)], longest), []).append(layer)
    for window in layers:
        if config.sink_token_len >= window:
            raise InputError(
                f"--sink_token_len: {config.sink_token_len} first tokens fill the attention window of {window}; "
                "expected fewer than its tokens. Lower it, or raise --max_attention_window."
            )
    return dict(sorted(layers.items(), reverse=True))


def parse_windows(text: str | None) -> tuple[int, ...]:
    """The windows of `--max_attention_window`, tokens each; none for None."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.strip("[]() ").split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part) and int(part) > 0 for part in parts):
        raise InputError(
            f"--max_attention_window: {text!r} is not valid; expected a number of tokens, or several with commas "
            "between that go round the layers, each at least 1."
        )
    return tuple(map(int, parts))


def _attention_window(config: RunConfig, window: int) -> AttentionWindow:
    longest, beams = config.max_seq_len or window, config.max_beam_width or 1
    is_limited = window < longest
    return AttentionWindow(
        config.tokens_per_block, window, longest, config.sink_token_len if is_limited else 0, beams,
        is_cyclic=config.window_mode == "cyclic" or not is_limited,
    )  # fmt: skip
