"""Kernels bound by memory: the steps of a layer between its matrix products, and writes and copies in the KV cache.

A row is a token's values, or its keys or values in one layer of the cache.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.torch.kernels.launch import launching, warps_per_row

COLUMNS_PER_PROGRAM = 1024
# 16 heads of 128 values are a tile of 16 × 64 pairs: 8 pairs for each of 128 threads.
HEADS_PER_PROGRAM = 16
# LIMIT of data types that need no clamping. A cast to an eight-bit type gives NaN for values beyond its range.
NO_LIMIT = 0.0
# Bytes that a program copies: 16 for each of 128 threads, four times.
PIECE = 8192
WORD = 4
# Size of the buffer of `copy_rows_buffered`; larger copies process some pools at a time.
BUFFER_BYTES = 1 << 28


@triton.jit
def _rms_norm_kernel(
    normed: tl.tensor,
    hidden: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    normed_stride: tl.tensor,
    hidden_stride: tl.tensor,
    added_stride: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    exists = columns < SIZE
    row = hidden + token * hidden_stride + columns
    values = tl.load(row, mask=exists, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(added + token * added_stride + columns, mask=exists, other=0.0).to(tl.float32)
        tl.store(row, values.to(hidden.dtype.element_ty), mask=exists)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    scaled = values * inverse * tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(normed + token * normed_stride + columns, scaled.to(normed.dtype.element_ty), mask=exists)


def add_rms_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm (Zhang and Sennrich, arXiv:1910.07467) of `hidden` + `added`, a new tensor; `hidden` becomes the sum.

    hidden ← hidden + added; normed = hidden / √(mean(hidden²) + ε) · weight, computed in float32. A program holds one
    token in registers: two reads and two writes per value instead of five and two.

    hidden, added: [tokens, size], the values of a token contiguous; without `added`, `hidden` is not changed.
    weight: [size].

    KernelError if it cannot be run.
    """
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    num_tokens, size = hidden.shape
    if num_tokens == 0:
        return normed
    other = hidden if added is None else added
    width = triton.next_power_of_2(size)
    with launching("add_rms_norm", hidden=hidden, weight=weight):
        _rms_norm_kernel[(num_tokens,)](
            normed,
            hidden,
            other,
            weight,
            normed.stride(0),
            hidden.stride(0),
            other.stride(0),
            epsilon,
            SIZE=size,
            WIDTH=width,
            ADDS=added is not None,
            num_warps=warps_per_row(width),
        )
    return normed


@triton.jit
def _swiglu_kernel(
    output: tl.tensor,
    gate_up: tl.tensor,
    output_stride: tl.tensor,
    gate_up_stride: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = columns < size
    gate = tl.load(gate_up + token * gate_up_stride + columns, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * gate_up_stride + size + columns, mask=exists, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + token * output_stride + columns, product.to(output.dtype.element_ty), mask=exists)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer, arXiv:2002.05202), [tokens, size], from gate and up side by side, [tokens, 2 · size].

    silu(x) = x / (1 + e^−x), in float32; the result is rounded once. The values of a token must be contiguous.
    KernelError if it cannot be run.
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((num_tokens, size))
    if num_tokens == 0:
        return output
    width = min(COLUMNS_PER_PROGRAM, triton.next_power_of_2(size))
    with launching("swiglu", gate_up=gate_up):
        _swiglu_kernel[(num_tokens, triton.cdiv(size, width))](
            output, gate_up, output.stride(0), gate_up.stride(0), size, WIDTH=width
        )
    return output


@triton.jit
def _quantise_kernel(
    quantised: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    exists = columns < SIZE
    values = tl.load(rows + row * row_stride + columns, mask=exists, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), SMALLEST) / LARGEST_VALUE
    scaled = tl.minimum(tl.maximum(values / scale, -LARGEST_VALUE), LARGEST_VALUE)
    tl.store(quantised + row * SIZE + columns, scaled.to(quantised.dtype.element_ty), mask=exists)
    tl.store(scales + row, scale)


def quantise_rows(rows: Tensor, dtype: torch.dtype, smallest_maximum: float) -> tuple[Tensor, Tensor]:
    """`rows` [rows, size] in the eight-bit type `dtype`, and the scales float32 [rows, 1] that multiply them.

    The scale of a row is its largest absolute value, at least `smallest_maximum`, over the largest number of `dtype`. A
    program holds one row in registers between finding the maximum and storing: it reads two bytes and writes one per
    value, where PyTorch's operations move four times as much in five launches. The values of a row must be contiguous.
    KernelError if it cannot be run.
    """
    num_rows, size = rows.shape
    quantised = torch.empty((num_rows, size), dtype=dtype, device=rows.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=rows.device)
    if num_rows:
        width = triton.next_power_of_2(size)
        with launching("quantise_rows", rows=rows):
            _quantise_kernel[(num_rows,)](
                quantised,
                scales,
                rows,
                rows.stride(0),
                SIZE=size,
                WIDTH=width,
                LARGEST_VALUE=torch.finfo(dtype).max,
                SMALLEST=smallest_maximum,
                num_warps=warps_per_row(width),
            )
    return quantised, scales


@triton.jit
def _store(cache: tl.tensor, offsets: tl.tensor, numbers: tl.tensor, is_value: tl.tensor, LIMIT: tl.constexpr) -> None:
    """Store float32 `numbers` in the cache's type, clamped to ±LIMIT if it is not NO_LIMIT."""
    if LIMIT > 0:
        numbers = tl.minimum(tl.maximum(numbers, -LIMIT), LIMIT)
    tl.store(cache + offsets, numbers.to(cache.dtype.element_ty), mask=is_value)


@triton.jit
def _rotary_kernel(
    heads_in: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    positions: tl.tensor,
    cache_rows: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    token_stride: tl.tensor,
    block_stride: tl.tensor,
    position_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    ROTATES: tl.constexpr,
) -> None:
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
        is_rotated = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
        cosine = tl.where(is_rotated, tl.load(cosines + angle, mask=is_pair, other=1.0)[None, :], 1.0)
        sine = tl.where(is_rotated, tl.load(sines + angle, mask=is_pair, other=0.0)[None, :], 0.0)
        first, second = first * cosine - second * sine, second * cosine + first * sine
        rotated = exists & is_rotated
        tl.store(heads_in + offsets, first.to(heads_in.dtype.element_ty), mask=rotated)
        tl.store(heads_in + offsets + HALF, second.to(heads_in.dtype.element_ty), mask=rotated)

    row = tl.load(cache_rows + token).to(tl.int64)
    stored_at = (row // TOKENS_PER_BLOCK) * block_stride + (row % TOKENS_PER_BLOCK) * position_stride
    key_offsets = stored_at + (heads - NUM_HEADS)[:, None] * cache_head_stride + pairs[None, :]
    is_stored = exists & is_key[:, None] & (row >= 0)
    _store(key_cache, key_offsets, first, is_stored, LIMIT)
    _store(key_cache, key_offsets + HALF, second, is_stored, LIMIT)
    value_offsets = stored_at + (heads - NUM_HEADS - NUM_KV_HEADS)[:, None] * cache_head_stride + pairs[None, :]
    is_stored = exists & is_cached_value[:, None] & (row >= 0)
    _store(value_cache, value_offsets, first, is_stored, LIMIT)
    _store(value_cache, value_offsets + HALF, second, is_stored, LIMIT)


def rotate_and_write(
    heads: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    rotates: bool = True,
) -> None:
    """Rotate the queries and keys of `heads` in place, and store its keys and values in the cache.

    With c and s the cosine and sine of the token's position for pair i of a head, (a, b) = (value i of the head's first
    half, value i of its second) becomes (a·c − b·s, b·c + a·s), in float32 (Su et al., RoFormer, arXiv:2104.09864, with
    the pairs of Hugging Face). A program processes some heads of one token. Keys are written to `heads` too, because
    the attention of chunks reads them from the batch.

    heads: [tokens, heads + 2 · KV heads, head size], queries, keys, values; those of a token are contiguous.
    cosines, sines: float32 [positions, head size / 2], contiguous.
    positions: int64 or int32 [tokens].
    cache_rows: int64 or int32 [tokens], block id · tokens per block + position in the block, all different;
        negative for tokens that are not stored.
    key_cache, value_cache: [blocks, tokens per block, KV heads, head size], with the same strides, the values of a head
        contiguous; of any type: values beyond an eight-bit type's range become its limits.
    rotates: if false, heads that are already rotated are only stored.

    KernelError if it cannot be run.
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
            heads,
            cosines,
            sines,
            positions,
            cache_rows,
            key_cache,
            value_cache,
            heads.stride(0),
            *key_cache.stride()[:3],
            NUM_HEADS=num_parts - 2 * num_kv_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=half,
            HALF_WIDTH=triton.next_power_of_2(half),
            HEADS=heads_per_program,
            TOKENS_PER_BLOCK=key_cache.shape[1],
            LIMIT=torch.finfo(key_cache.dtype).max if is_narrow else NO_LIMIT,
            ROTATES=rotates,
        )


# With some pools at a time the lists of addresses are not aligned, which must not compile another kernel.
@triton.jit(do_not_specialize_on_alignment=["sources", "destinations"])
def _copy_kernel(
    sources: tl.tensor,
    destinations: tl.tensor,
    moves: tl.tensor,
    row_words: tl.tensor,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    move, piece, pool = moves + tl.program_id(0) * 3, tl.program_id(1), tl.program_id(2)
    source_row, destination_row, num_rows = tl.load(move), tl.load(move + 1), tl.load(move + 2)
    source = tl.load(sources + pool).to(tl.pointer_type(tl.int32)) + source_row * row_words
    destination = tl.load(destinations + pool).to(tl.pointer_type(tl.int32)) + destination_row * row_words
    # Rows of a multiple of 16 bytes let a thread copy 16 bytes at once.
    source, destination = tl.multiple_of(source, VECTOR), tl.multiple_of(destination, VECTOR)
    words = piece * WORDS + tl.arange(0, WORDS)
    exists = words < num_rows * row_words
    tl.store(destination + words, tl.load(source + words, mask=exists), mask=exists)


def addresses(pools: Sequence[Tensor], device: torch.device) -> Tensor:
    """Addresses of the pools, int64 [pools] on `device`. The pools must not be freed while these are used."""
    return torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64).to(device, non_blocking=True)


def row_bytes(pool: Tensor) -> int:
    """Bytes of a row of the contiguous `pool` [rows, …]. ValueError if they are not a multiple of WORD."""
    size = pool[0].numel() * pool.element_size()
    if size % WORD or not pool.is_contiguous():
        raise ValueError(
            f"rows of {size} bytes, contiguous: {pool.is_contiguous()}; expected contiguous rows of a "
            f"multiple of {WORD} bytes"
        )
    return size


def copy_rows(sources: Tensor, destinations: Tensor, moves: Tensor, bytes_per_row: int, max_rows: int) -> None:
    """Copy rows between pools, with one launch for all pools. A pool holds the keys or the values of one layer.

    Moves are done in any order: no destination may be another move's source or destination.

    sources, destinations: int64 [pools], addresses of pools with rows of the same size, on the device of `moves` or in
        pinned host memory.
    moves: int64 [moves, 3], source row, destination row, number of rows, at most `max_rows`.
    bytes_per_row: a multiple of WORD.

    KernelError if it cannot be run.
    """
    if len(moves) == 0 or max_rows == 0:
        return
    words = min(PIECE // WORD, triton.next_power_of_2(max_rows * bytes_per_row // WORD))
    pieces = triton.cdiv(max_rows * bytes_per_row // WORD, words)
    with launching("copy_rows", moves=moves, pools=sources):
        # Moves on the first axis: there may be more than 65,535, the limit of the other two.
        _copy_kernel[(len(moves), pieces, len(sources))](
            sources,
            destinations,
            moves,
            bytes_per_row // WORD,
            WORDS=words,
            VECTOR=16 if bytes_per_row % 16 == 0 else WORD,
        )


def copy_rows_buffered(sources: Tensor, destinations: Tensor, moves: Tensor, bytes_per_row: int, max_rows: int) -> None:
    """As `copy_rows`, but all sources in a pool are read into a buffer before any destination in it is written."""
    pool_bytes = len(moves) * max_rows * bytes_per_row
    if pool_bytes == 0:
        return
    device, at_once = moves.device, min(len(sources), max(1, BUFFER_BYTES // pool_bytes))
    buffer = torch.empty((at_once, pool_bytes), dtype=torch.uint8, device=device)
    buffers = buffer.data_ptr() + torch.arange(at_once, device=device) * pool_bytes
    buffered = torch.arange(len(moves), device=device) * max_rows
    reads = torch.stack([moves[:, 0], buffered, moves[:, 2]], 1)
    writes = torch.stack([buffered, moves[:, 1], moves[:, 2]], 1)
    for read, written in zip(torch.split(sources, at_once), torch.split(destinations, at_once), strict=True):
        copy_rows(read, buffers[: len(read)], reads, bytes_per_row, max_rows)
        copy_rows(buffers[: len(read)], written, writes, bytes_per_row, max_rows)
