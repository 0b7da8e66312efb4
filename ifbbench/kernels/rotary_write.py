"""Rotary embedding of queries and keys, and the write of keys and values into the paged KV cache, in one pass.

With c and s the cosine and sine of the token's position for pair i of a head, (a, b) = (value i of the head's first
half, value i of its second) becomes (a·c − b·s, b·c + a·s), in float32 (Su et al., RoFormer, arXiv:2104.09864; pairs as
Hugging Face has them). Each query, key and value is read once and written once, keys and values twice: a chunk's
attention reads its own keys from the batch.

A program has one token and some of its heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.kernels.launch import launching

# 16 heads of 128 values are a tile of 16 × 64 pairs: 8 pairs for each of 128 threads.
HEADS_PER_PROGRAM = 16
# Stored as bytes, an eight-bit float's values beyond its range must become its largest; a cast alone makes NaN.
NO_LIMIT = 0.0


@triton.jit
def _store(
    cache: tl.tensor, offsets: tl.tensor, numbers: tl.tensor, is_value: tl.tensor, LIMIT: tl.constexpr
) -> None:
    """Store float32 `numbers` in the cache's type, at most ±LIMIT if there is one."""
    if LIMIT > 0:
        numbers = tl.minimum(tl.maximum(numbers, -LIMIT), LIMIT)
    tl.store(cache + offsets, numbers.to(cache.dtype.element_ty), mask=is_value)


@triton.jit
def _rotary_kernel(
    heads_in: tl.tensor, cosines: tl.tensor, sines: tl.tensor, positions: tl.tensor, cache_rows: tl.tensor,
    key_cache: tl.tensor, value_cache: tl.tensor, token_stride: tl.tensor, block_stride: tl.tensor,
    place_stride: tl.tensor, cache_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_WIDTH: tl.constexpr,
    HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, LIMIT: tl.constexpr, ROTATES: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, HALF_WIDTH)
    is_pair = pairs < HALF
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_cached_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    exists = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_pair[None, :]

    offsets = token * token_stride + heads[:, None] * (2 * HALF) + pairs[None, :]
    first = tl.load(heads_in + offsets, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(heads_in + offsets + HALF, mask=exists, other=0.0).to(tl.float32)
    if ROTATES:
        angle = tl.load(positions + token).to(tl.int64) * HALF + pairs
        is_turned = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
        cosine = tl.where(is_turned, tl.load(cosines + angle, mask=is_pair, other=1.0)[None, :], 1.0)
        sine = tl.where(is_turned, tl.load(sines + angle, mask=is_pair, other=0.0)[None, :], 0.0)
        first, second = first * cosine - second * sine, second * cosine + first * sine
        turned = exists & is_turned
        tl.store(heads_in + offsets, first.to(heads_in.dtype.element_ty), mask=turned)
        tl.store(heads_in + offsets + HALF, second.to(heads_in.dtype.element_ty), mask=turned)

    row = tl.load(cache_rows + token).to(tl.int64)
    place = (row // TOKENS_PER_BLOCK) * block_stride + (row % TOKENS_PER_BLOCK) * place_stride
    key_offsets = place + (heads - NUM_HEADS)[:, None] * cache_head_stride + pairs[None, :]
    is_stored = exists & is_key[:, None] & (row >= 0)
    _store(key_cache, key_offsets, first, is_stored, LIMIT)
    _store(key_cache, key_offsets + HALF, second, is_stored, LIMIT)
    value_offsets = place + (heads - NUM_HEADS - NUM_KV_HEADS)[:, None] * cache_head_stride + pairs[None, :]
    is_stored = exists & is_cached_value[:, None] & (row >= 0)
    _store(value_cache, value_offsets, first, is_stored, LIMIT)
    _store(value_cache, value_offsets + HALF, second, is_stored, LIMIT)


def rotate_and_write(
    heads: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor, cache_rows: Tensor, key_cache: Tensor,
    value_cache: Tensor, *, rotates: bool = True,
) -> None:  # fmt: skip
    """Turn the queries and keys of `heads` in place, and store its keys and values in the cache.

    heads: [tokens, heads + 2 · KV heads, head size], queries, then keys, then values; each token's are contiguous.
    cosines, sines: float32 [positions, head size / 2], contiguous. positions: int64 or int32 [tokens]. cache_rows:
    int64 or int32 [tokens], block id · tokens per block + place in block; below 0: the token is not stored. No row
    may come twice. key_cache, value_cache: [blocks, tokens per block, KV heads, head size], alike in their strides,
    the values of a head contiguous; of any type: numbers beyond an eight-bit type's range become its largest.
    rotates: without it, what was turned before is only stored. KernelError if it cannot run.
    """
    num_tokens, num_parts, head_size = heads.shape
    if num_tokens == 0:
        return
    num_kv_heads = key_cache.shape[2]
    half = head_size // 2
    is_narrow = key_cache.dtype.itemsize == 1
    heads_per_program = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_parts))
    with launching("rotate_and_write", heads=heads, positions=positions, cache=key_cache):
        _rotary_kernel[(num_tokens, triton.cdiv(num_parts, heads_per_program))](
            heads, cosines, sines, positions, cache_rows, key_cache, value_cache, heads.stride(0),
            *key_cache.stride()[:3], NUM_HEADS=num_parts - 2 * num_kv_heads, NUM_KV_HEADS=num_kv_heads, HALF=half,
            HALF_WIDTH=triton.next_power_of_2(half), HEADS=heads_per_program, TOKENS_PER_BLOCK=key_cache.shape[1],
            LIMIT=torch.finfo(key_cache.dtype).max if is_narrow else NO_LIMIT, ROTATES=rotates,
        )  # fmt: skip


def rotate_and_write_twin(
    heads: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor, cache_rows: Tensor, key_cache: Tensor,
    value_cache: Tensor, *, rotates: bool = True,
) -> None:  # fmt: skip
    """The same in plain torch."""
    num_kv_heads = key_cache.shape[2]
    turned = heads[:, : heads.shape[1] - num_kv_heads]
    if rotates:
        cosine, sine = (table[positions.long()].unsqueeze(1) for table in (cosines, sines))
        first, second = turned.float().chunk(2, dim=-1)
        turned.copy_(torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1))
    stored = cache_rows >= 0
    blocks, places = cache_rows[stored] // key_cache.shape[1], cache_rows[stored] % key_cache.shape[1]
    limits = torch.finfo(key_cache.dtype)
    for cache, part in ((key_cache, turned[:, -num_kv_heads:]), (value_cache, heads[:, -num_kv_heads:])):
        chosen = part[stored]
        if cache.dtype.itemsize == 1:
            chosen = chosen.float().clamp(limits.min, limits.max)
        cache[blocks.long(), places.long()] = chosen.to(cache.dtype)
