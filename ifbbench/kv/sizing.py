"""The layout of a KV cache: its attention windows, how many blocks memory has for each, and how many a request needs.

The functions follow TensorRT-LLM's `KVCacheManager` (kvCacheManager.cpp, v1.0): `calculateWindowSizeToShare`,
`calculateMaxNumBlocks`, `calculateMaxBlockRequirements`, `calculateMaxBlockRequirementsPerBeam` and
`calculateMaxAttentionWindow`. What a request of a running engine may still take is in `attention_window`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ifbbench.kv.attention_window import AttentionWindow, ceil_div


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """The layers (indices in the model) that share an attention window, and their blocks in device and host memory."""

    layers: tuple[int, ...]
    attention_window: AttentionWindow
    num_blocks: int
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The whole cache: one window, or one for each group of layers.

    is_contiguous: each slot has contiguous memory for its longest sequence instead of blocks, and block tables are
        meaningless.
    shares_blocks: all windows take their blocks from one pool. A block holds tokens of one of them, and has room for
        as many layers as the largest has.
    """

    windows: tuple[WindowLayout, ...]
    is_contiguous: bool = False
    shares_blocks: bool = False


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """The blocks of one attention window in device memory (primary) and in host memory (secondary)."""

    primary: int
    secondary: int = 0


def window_shares(bytes_per_token_of_window: Mapping[int, float]) -> dict[int, float]:
    """The share of the memory (0 to 1) that the layers of each attention window get: in proportion to what one full
    window of them takes, so that all windows hold the same number of sequences.

    bytes_per_token_of_window: bytes of one token's keys and values in all layers with a window, by window (tokens).
    Raises ValueError if there is no window, or one without tokens or bytes."""
    _check_windows(bytes_per_token_of_window)
    total = _bytes_of_full_windows(bytes_per_token_of_window)
    return {window: window * size / total for window, size in bytes_per_token_of_window.items()}


def blocks_of_memory(
    memory_bytes: int,
    bytes_per_token_of_window: Mapping[int, float],
    tokens_per_block: int,
    max_tokens: int | None = None,
    host_bytes: int = 0,
) -> dict[int, WindowBlocks]:
    """The blocks of each attention window, from the bytes that all windows share.

    memory_bytes, host_bytes: device and host memory for keys and values.
    max_tokens: maximum number of tokens of each window in device memory; None for no limit. The last primary block is
        counted even if memory ends within it (upstream's `ceilDiv`), the last secondary one is not.

    Raises ValueError like `window_shares`, and for negative memory.
    """
    _check_windows(bytes_per_token_of_window)
    if memory_bytes < 0 or host_bytes < 0:
        raise ValueError(f"memory of {memory_bytes} and {host_bytes} bytes; expected at least 0")
    blocks = {}
    for window in bytes_per_token_of_window:
        tokens = _tokens(memory_bytes, window, bytes_per_token_of_window)
        if max_tokens is not None:
            tokens = min(tokens, max_tokens)
        secondary = _tokens(host_bytes, window, bytes_per_token_of_window) // tokens_per_block
        blocks[window] = WindowBlocks(ceil_div(tokens, tokens_per_block), secondary)
    return blocks


def max_blocks(
    input_length: int, output_length: int, sink: int, window: int, beam_width: int, tokens_per_block: int
) -> int:
    """Maximum number of blocks of a request in the best case: its beams share every full block of the prompt, and none
    of the output. All lengths are in tokens; `output_length` is that of one beam. Sink tokens fill whole blocks."""
    bubble = -sink % tokens_per_block
    if beam_width == 1:
        return ceil_div(min(input_length + output_length, window) + bubble, tokens_per_block)
    if window <= output_length:
        return beam_width * ceil_div(window + bubble, tokens_per_block)
    prompt = min(window, input_length + output_length) - output_length
    shared = (prompt + bubble) // tokens_per_block
    return shared + beam_width * ceil_div(output_length + prompt - shared * tokens_per_block, tokens_per_block)


def max_attention_window(
    input_length: int, output_length: int, sink: int, block_capacity: int, beam_width: int, tokens_per_block: int
) -> int:
    """The longest attention window (tokens) with which one such request fits into `block_capacity` blocks."""
    for_output = max_blocks(0, output_length, sink, output_length, beam_width, tokens_per_block)
    if for_output > block_capacity:
        return block_capacity // beam_width * tokens_per_block
    left = block_capacity - for_output
    return min(output_length + left * tokens_per_block, input_length + output_length)


def _tokens(memory_bytes: int, window: int, bytes_per_token_of_window: Mapping[int, float]) -> int:
    """memory · share / bytes of a token, where the bytes of a token cancel out. That is exact for whole numbers, while
    a rounded share could lose a token."""
    return math.floor(memory_bytes * window // _bytes_of_full_windows(bytes_per_token_of_window))


def _bytes_of_full_windows(bytes_per_token_of_window: Mapping[int, float]) -> float:
    return sum(window * size for window, size in bytes_per_token_of_window.items())


def _check_windows(bytes_per_token_of_window: Mapping[int, float]) -> None:
    if not bytes_per_token_of_window:
        raise ValueError("no attention window to share memory among")
    for window, size in bytes_per_token_of_window.items():
        if window < 1 or not size > 0:
            raise ValueError(f"an attention window of {window} tokens with {size} bytes a token; expected both above 0")
