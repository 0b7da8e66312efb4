"""Attention of generation tokens: one query per sequence, with all keys in the paged KV cache.

A program computes one sequence, one KV head with the `group` query heads that share it (padded to the 16 rows of a
matrix instruction, at no cost, because the kernel is bound by memory), and one part of the keys. The parts of a long
sequence run in parallel (flash decoding; Dao, Haziza, Massa and Sizov, 2023) and are joined by a second kernel: part i
has the result rᵢ and lᵢ = log₂ Σ 2^x over its scores x, and with L = max lᵢ the whole is
Σ 2^(lᵢ − L) rᵢ / Σ 2^(lᵢ − L).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.torch.kernels.launch import (
    MAX_SPLITS,
    NOT_SPECIALISED,
    AttentionTiles,
    as_operand,
    cache_offsets,
    launching,
    load_keys_and_values,
    padded_size,
    softmax_step,
    upcasts,
)


@triton.jit
def _keys_per_split(num_keys: tl.tensor, num_splits: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Keys of each part, in whole tiles; the last parts of short sequences have none."""
    return tl.cdiv(tl.cdiv(num_keys, num_splits), KEYS) * KEYS


@triton.jit(do_not_specialize=["num_splits", *NOT_SPECIALISED])
def _generation_kernel(
    output: tl.tensor,
    part_logs: tl.tensor,
    queries: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    table_rows: tl.tensor,
    lengths: tl.tensor,
    scale: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    output_split_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    block_stride: tl.tensor,
    position_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    table_stride: tl.tensor,
    entry_stride: tl.tensor,
    num_splits: tl.tensor,
    window_size: tl.tensor,
    sink: tl.tensor,
    bubble: tl.tensor,
    capacity: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    IS_CYCLIC: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + sequence)
    shift = tl.maximum(length - window_size, 0) if HAS_WINDOW else 0
    num_keys = length - shift
    keys_per_split = _keys_per_split(num_keys, num_splits, KEYS)
    first_key = split * keys_per_split
    if (split > 0) & (first_key >= num_keys):
        return

    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    heads = kv_head * GROUP + rows
    is_query = (rows < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    query_offsets = sequence * query_stride + heads * query_head_stride
    query_tile = tl.load(queries + query_offsets[:, None] + dims[None, :], mask=is_query, other=0.0)
    query_tile = as_operand(query_tile, queries.dtype.element_ty, UPCAST)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)

    table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride
    key_cache += kv_head * cache_head_stride
    value_cache += kv_head * cache_head_stride
    for first in range(first_key, tl.minimum(first_key + keys_per_split, num_keys), KEYS):
        numbers = first + tl.arange(0, KEYS)
        is_real = numbers < num_keys
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
        maximum, total, result = softmax_step(
            query_tile, key_tile, value_tile, is_real[None, :], scale, maximum, total, result, IS_MASKED=True
        )

    # A length of 0 (padding of a CUDA graph) gives zeros.
    result = result / tl.where(total > 0.0, total, 1.0)[:, None]
    output_offsets = sequence * output_stride + heads * output_head_stride + split * output_split_stride
    tl.store(output + output_offsets[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=is_query)
    if IS_SPLIT:
        num_heads = tl.num_programs(0) * GROUP
        logs = tl.where(total > 0.0, maximum + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(part_logs + (sequence * num_heads + heads) * num_splits + split, logs, mask=rows < GROUP)


@triton.jit(do_not_specialize=["num_splits", "window_size"])
def _join_kernel(
    output: tl.tensor,
    parts: tl.tensor,
    part_logs: tl.tensor,
    lengths: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    num_splits: tl.tensor,
    window_size: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_keys = tl.load(lengths + sequence)
    if HAS_WINDOW:
        num_keys = tl.minimum(num_keys, window_size)
    # Only these parts are written. A sequence of length 0 has one part, of zeros.
    num_parts = tl.maximum(tl.cdiv(num_keys, tl.maximum(_keys_per_split(num_keys, num_splits, KEYS), 1)), 1)
    first_part = (sequence * tl.num_programs(0) + head) * num_splits
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    logs = tl.load(part_logs + first_part + splits, mask=splits < num_parts, other=float("-inf"))
    highest = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(highest == float("-inf"), 0.0, highest))
    is_value = (splits < num_parts)[:, None] & (dims < HEAD_SIZE)[None, :]
    values = tl.load(parts + (first_part + splits)[:, None] * HEAD_SIZE + dims[None, :], mask=is_value, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(
        output + sequence * output_stride + head * output_head_stride + dims,
        result.to(output.dtype.element_ty),
        mask=dims < HEAD_SIZE,
    )


def generation_attention(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    lengths: Tensor,
    output: Tensor,
    shape: AttentionTiles,
    num_splits: int,
    window: AttentionWindow,
) -> None:
    """Write the attention of one query per sequence to `output`.

    queries, output: [sequences, heads, head size].
    key_cache, value_cache: [blocks, tokens per block, KV heads, head size], with the same strides, of the queries' type
        or a narrower one. In all of these the values of a head are contiguous.
    block_tables: int32 [rows, blocks]; entries beyond a length are not read.
    table_rows: int32 [sequences], row of the block tables.
    lengths: int32 [sequences], tokens in the cache including the query's own; 0 gives zeros.
    num_splits: parts of the keys that run in parallel, at most MAX_SPLITS (see `launch.choose_num_splits`).

    KernelError if it cannot be run.
    """
    num_sequences, num_heads, head_size = queries.shape
    if num_sequences == 0:
        return
    num_kv_heads = key_cache.shape[2]
    is_split, width = num_splits > 1, padded_size(head_size)
    parts, part_logs = output, output
    strides = (*output.stride()[:2], 0)
    if is_split:
        parts = queries.new_empty((num_sequences, num_heads, num_splits, head_size), dtype=torch.float32)
        part_logs = queries.new_empty((num_sequences, num_heads, num_splits), dtype=torch.float32)
        strides = parts.stride()[:3]
    with launching("generation_attention", queries=queries, cache=key_cache, block_tables=block_tables):
        _generation_kernel[(num_kv_heads, num_sequences, num_splits)](
            parts,
            part_logs,
            queries,
            key_cache,
            value_cache,
            block_tables,
            table_rows,
            lengths,
            math.log2(math.e) / math.sqrt(head_size),
            *strides,
            *queries.stride()[:2],
            *key_cache.stride()[:3],
            *block_tables.stride(),
            num_splits,
            *window.numbers,
            HAS_WINDOW=window.is_limited,
            IS_CYCLIC=window.wraps,
            IS_SPLIT=is_split,
            TOKENS_PER_BLOCK=key_cache.shape[1],
            GROUP=num_heads // num_kv_heads,
            HEAD_SIZE=head_size,
            WIDTH=width,
            ROWS=shape.rows,
            KEYS=shape.keys,
            UPCAST=upcasts(queries, key_cache),
            num_warps=shape.warps,
            num_stages=shape.cached_stages,
        )
        if is_split:
            _join_kernel[(num_heads, num_sequences)](
                output,
                parts,
                part_logs,
                lengths,
                *output.stride()[:2],
                num_splits,
                window.numbers[0],
                HAS_WINDOW=window.is_limited,
                HEAD_SIZE=head_size,
                WIDTH=width,
                KEYS=shape.keys,
                # The maximum, because each other number of parts would compile another kernel.
                SPLITS=MAX_SPLITS,
            )
