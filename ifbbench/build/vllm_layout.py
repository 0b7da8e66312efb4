"""The KV cache of a run under vLLM's scheduler: groups of layers, and the blocks that they share (`get_kv_cache_groups`
and `get_kv_cache_config_from_groups` of vLLM 0.32)."""

from collections.abc import Mapping, Sequence

from ifbbench.kv.attention_window import AttentionWindow, ceil_div
from ifbbench.kv.sizing import CacheLayout, WindowLayout

# With less than so many times the layers of the smallest kind in the largest, groups have the largest's number.
PADDING_RATIO = 1.5


def layer_groups(layers_of_window: Mapping[int, Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Window and layers of each group: as many layers in each, so that blocks of all groups have the same bytes.

    layers_of_window: layers by attention window (tokens, UNLIMITED for none).
    """
    kinds = sorted(layers_of_window.items(), key=lambda kind: min(kind[1]))
    counts = [len(layers) for _, layers in kinds]
    size = max(counts) if max(counts) < min(counts) * PADDING_RATIO else min(counts)
    groups = []
    for window, layers in kinds:
        of_kind = ceil_div(len(layers), size)
        groups += [(window, list(layers[index::of_kind])) for index in range(of_kind)]
    return groups


def bytes_per_block(groups: Sequence[tuple[int, Sequence[int]]], layer_bytes: int, tokens_per_block: int) -> int:
    """Bytes of one block, which holds `tokens_per_block` tokens of any group. layer_bytes: of a token in one layer."""
    return max(len(layers) for _, layers in groups) * layer_bytes * tokens_per_block


def vllm_layout(
    groups: Sequence[tuple[int, list[int]]], max_seq_len: int, tokens_per_block: int, num_blocks: int
) -> CacheLayout:
    """The layout of groups of layers that share `num_blocks` blocks."""
    return CacheLayout(
        tuple(
            WindowLayout(
                tuple(layers), AttentionWindow(tokens_per_block, window, max_seq_len, is_cyclic=False), num_blocks
            )
            for window, layers in groups
        ),
        shares_blocks=True,
    )
