"""Attention of context chunks: whole prompts, or later chunks of prompts that start in the paged KV cache.

Earlier keys are read from the cache, the chunk's own from the batch. The cache may therefore be written after the
attention, as is necessary where the window wraps and overwrites keys that the chunk's first queries see.

A program computes `rows` rows of one chunk for one KV head: rows // group queries with all `group` query heads that
share the KV head, so that each key is loaded once for all of them. It processes the keys tile by tile with the online
softmax of `launch.softmax_step`; of the chunk's own keys, only tiles on the diagonal need a mask. Programs
start in order, so the longest tiles come first: a long one at the end would leave other multiprocessors idle.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.torch.kernels.launch import (
    NOT_SPECIALISED,
    AttentionTiles,
    as_operand,
    cache_offsets,
    in_window,
    launching,
    load_keys_and_values,
    padded_size,
    softmax_step,
    upcasts,
)

# The fields of a tile: packed row of the first query, number of queries, its position, position of the chunk's
# first token (equal to the number of cached tokens), row of the block tables.
TILE_FIELDS = 5


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _context_kernel(
    output: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    tiles: tl.tensor,
    scale: tl.tensor,
    output_stride: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    output_head_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_head_stride: tl.tensor,
    block_stride: tl.tensor,
    position_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    table_stride: tl.tensor,
    entry_stride: tl.tensor,
    window_size: tl.tensor,
    sink: tl.tensor,
    bubble: tl.tensor,
    capacity: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    IS_CYCLIC: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
    CACHED_STAGES: tl.constexpr,
) -> None:
    kv_head, tile = tl.program_id(0), tiles + tl.program_id(1) * 5
    first_row, num_queries = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    first_position, num_cached_positions, table_row = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)

    # Row r of the tile is query r // GROUP with head r % GROUP of those that share the KV head.
    rows = tl.arange(0, ROWS)
    steps, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, WIDTH)
    is_query = (steps < num_queries)[:, None] & (dims < HEAD_SIZE)[None, :]
    query_offsets = (first_row + steps) * query_stride + heads * query_head_stride
    query_tile = tl.load(queries + query_offsets[:, None] + dims[None, :], mask=is_query, other=0.0)
    query_tile = as_operand(query_tile, queries.dtype.element_ty, UPCAST)
    query_positions = first_position + steps

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)

    end = first_position + num_queries
    shift = tl.maximum(first_position + 1 - window_size, 0) if HAS_WINDOW else 0
    num_visible = end - shift
    num_cached = num_cached_positions
    if HAS_WINDOW:
        num_cached = tl.maximum(tl.minimum(sink, num_cached), num_cached - shift)

    # Keys in the cache. All are earlier than the queries.
    table = block_tables + table_row.to(tl.int64) * table_stride
    key_cache += kv_head * cache_head_stride
    value_cache += kv_head * cache_head_stride
    for first in tl.range(0, num_cached, KEYS, num_stages=CACHED_STAGES):
        numbers = first + tl.arange(0, KEYS)
        is_real = numbers < num_cached
        positions = numbers + tl.where(numbers < sink, 0, shift)
        offsets = cache_offsets(
            positions,
            is_real,
            table,
            entry_stride,
            block_stride,
            position_stride,
            sink,
            bubble,
            capacity,
            TOKENS_PER_BLOCK,
            IS_CYCLIC,
        )
        key_tile, value_tile = load_keys_and_values(
            key_cache, value_cache, offsets, is_real, queries.dtype.element_ty, HEAD_SIZE, WIDTH, UPCAST
        )
        visible = is_real[None, :]
        if HAS_WINDOW:
            visible = visible & in_window(positions, query_positions, window_size, sink)
        maximum, total, result = softmax_step(
            query_tile, key_tile, value_tile, visible, scale, maximum, total, result, IS_MASKED=True
        )

    # The chunk's own keys. Without a window, those at or before the first query are seen by all.
    own = (first_row - (first_position - num_cached_positions)) * key_stride + kv_head * key_head_stride
    keys += own
    values += own
    first_masked = num_cached
    if not HAS_WINDOW:
        first_masked = num_cached + (first_position + 1 - num_cached) // KEYS * KEYS
    for first in range(num_cached, first_masked, KEYS):
        numbers = first + tl.arange(0, KEYS)
        offsets = (numbers - num_cached).to(tl.int64) * key_stride
        key_tile, value_tile = load_keys_and_values(
            keys, values, offsets, numbers >= 0, queries.dtype.element_ty, HEAD_SIZE, WIDTH, UPCAST
        )
        maximum, total, result = softmax_step(
            query_tile, key_tile, value_tile, None, scale, maximum, total, result, IS_MASKED=False
        )
    for first in range(first_masked, num_visible, KEYS):
        numbers = first + tl.arange(0, KEYS)
        is_real = numbers < num_visible
        positions = numbers + tl.where(numbers < sink, 0, shift)
        offsets = (positions - num_cached_positions).to(tl.int64) * key_stride
        key_tile, value_tile = load_keys_and_values(
            keys, values, offsets, is_real, queries.dtype.element_ty, HEAD_SIZE, WIDTH, UPCAST
        )
        visible = is_real[None, :] & (positions[None, :] <= query_positions[:, None])
        if HAS_WINDOW:
            visible = visible & in_window(positions, query_positions, window_size, sink)
        maximum, total, result = softmax_step(
            query_tile, key_tile, value_tile, visible, scale, maximum, total, result, IS_MASKED=True
        )

    result = result / tl.where(total > 0.0, total, 1.0)[:, None]
    output_offsets = (first_row + steps) * output_stride + heads * output_head_stride
    tl.store(output + output_offsets[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=is_query)


def context_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    output: Tensor,
    shape: AttentionTiles,
    window: AttentionWindow,
) -> None:
    """Write the attention of the context chunks in `tiles` to their rows of `output`; other rows are not changed.

    queries, output: [tokens, heads, head size].
    keys, values: [tokens, KV heads, head size], those of the batch, with the same strides.
    key_cache, value_cache: [blocks, tokens per block, KV heads, head size], with the same strides, of the queries' type
        or a narrower one. In all of these the values of a head are contiguous.
    block_tables: int32 [sequences, blocks]; entries beyond the cached tokens are not read.
    tiles: int32 [tiles, 5] (see TILE_FIELDS), of at most `shape.rows` // (heads / KV heads) queries, longest first.

    KernelError if it cannot be run.
    """
    if len(tiles) == 0:
        return
    num_heads, head_size = queries.shape[1:]
    num_kv_heads = keys.shape[1]
    with launching("context_attention", queries=queries, keys=keys, cache=key_cache, tiles=tiles):
        _context_kernel[(num_kv_heads, len(tiles))](
            output,
            queries,
            keys,
            values,
            key_cache,
            value_cache,
            block_tables,
            tiles,
            math.log2(math.e) / math.sqrt(head_size),
            output.stride(0),
            queries.stride(0),
            keys.stride(0),
            output.stride(1),
            queries.stride(1),
            keys.stride(1),
            *key_cache.stride()[:3],
            *block_tables.stride(),
            *window.numbers,
            HAS_WINDOW=window.is_limited,
            IS_CYCLIC=window.wraps,
            TOKENS_PER_BLOCK=key_cache.shape[1],
            GROUP=num_heads // num_kv_heads,
            HEAD_SIZE=head_size,
            WIDTH=padded_size(head_size),
            ROWS=shape.rows,
            KEYS=shape.keys,
            UPCAST=upcasts(queries, key_cache),
            num_warps=shape.warps,
            num_stages=shape.stages,
            CACHED_STAGES=shape.cached_stages,
        )
