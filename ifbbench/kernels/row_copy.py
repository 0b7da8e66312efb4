"""Copies of cached tokens from rows to rows, in all layers with one launch.

Whole blocks, the beginning of a block, the places of a beam's parent, and blocks to and from host memory are all the
same: `count` rows of every pool, from row `source` on, become those from row `destination` on. A pool has the keys or
the values of one layer. Pinned host memory has an address that a GPU reads and writes too, so a pool may lie there.

A program copies a piece of one move in one pool. Programs run in any order, so where a move's source may be another's
destination, all is read into a buffer first (`copy_rows_through`).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.kernels.launch import launching

# Bytes of a piece: 16 for each of 128 threads, four times over.
PIECE = 8192
WORD = 4
# Of the buffer that rows go through: with more to copy, it is some pools at a time.
BUFFER_BYTES = 1 << 28


# Some pools at a time may begin anywhere in the list of addresses; that is no reason for another kernel.
@triton.jit(do_not_specialize_on_alignment=["sources", "destinations"])
def _copy_kernel(
    sources: tl.tensor, destinations: tl.tensor, moves: tl.tensor, row_words: tl.tensor, WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:  # fmt: skip
    move, piece, pool = moves + tl.program_id(0) * 3, tl.program_id(1), tl.program_id(2)
    source_row, destination_row, num_rows = tl.load(move), tl.load(move + 1), tl.load(move + 2)
    source = tl.load(sources + pool).to(tl.pointer_type(tl.int32)) + source_row * row_words
    destination = tl.load(destinations + pool).to(tl.pointer_type(tl.int32)) + destination_row * row_words
    # Rows of whole 16 bytes let a thread move 16 bytes at once.
    source, destination = tl.multiple_of(source, VECTOR), tl.multiple_of(destination, VECTOR)
    words = piece * WORDS + tl.arange(0, WORDS)
    exists = words < num_rows * row_words
    tl.store(destination + words, tl.load(source + words, mask=exists), mask=exists)


def addresses(pools: Sequence[Tensor], device: torch.device) -> Tensor:
    """Where the pools begin, int64 [pools] on `device`. They must stay where they are as long as this is used."""
    return torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64).to(device, non_blocking=True)


def row_bytes(pool: Tensor) -> int:
    """Bytes of a row of `pool` [rows, …], contiguous. ValueError if they are not whole words of four."""
    size = pool[0].numel() * pool.element_size()
    if size % WORD or not pool.is_contiguous():
        raise ValueError(f"rows of {size} bytes, contiguous: {pool.is_contiguous()}; expected contiguous rows of a "
                         f"multiple of {WORD} bytes")
    return size


def copy_rows(sources: Tensor, destinations: Tensor, moves: Tensor, bytes_per_row: int, most_rows: int) -> None:
    """Do `moves` in all pools, in any order: no destination may be another move's source or destination.

    sources, destinations: int64 [pools], addresses of pools alike in their rows, on the device of `moves` or in pinned
    host memory. moves: int64 [moves, 3], source row, destination row, number of rows, at most `most_rows`.
    bytes_per_row: a multiple of 4. KernelError if it cannot run.
    """
    if len(moves) == 0 or most_rows == 0:
        return
    words = min(PIECE // WORD, triton.next_power_of_2(most_rows * bytes_per_row // WORD))
    pieces = triton.cdiv(most_rows * bytes_per_row // WORD, words)
    with launching("copy_rows", moves=moves, pools=sources):
        # Moves first: there may be more of them than the 65,535 that the other two axes can have.
        _copy_kernel[(len(moves), pieces, len(sources))](
            sources, destinations, moves, bytes_per_row // WORD, WORDS=words,
            VECTOR=16 if bytes_per_row % 16 == 0 else WORD,
        )  # fmt: skip


def copy_rows_through(
    sources: Tensor, destinations: Tensor, moves: Tensor, bytes_per_row: int, most_rows: int
) -> None:
    """Do `moves` as `copy_rows` does, but read all sources in a pool before any destination in it is written."""
    pool_bytes = len(moves) * most_rows * bytes_per_row
    if pool_bytes == 0:
        return
    device, at_once = moves.device, min(len(sources), max(1, BUFFER_BYTES // pool_bytes))
    buffer = torch.empty((at_once, pool_bytes), dtype=torch.uint8, device=device)
    between = buffer.data_ptr() + torch.arange(at_once, device=device) * pool_bytes
    places = torch.arange(len(moves), device=device) * most_rows
    reads = torch.stack([moves[:, 0], places, moves[:, 2]], 1)
    writes = torch.stack([places, moves[:, 1], moves[:, 2]], 1)
    for read, written in zip(torch.split(sources, at_once), torch.split(destinations, at_once), strict=True):
        copy_rows(read, between[: len(read)], reads, bytes_per_row, most_rows)
        copy_rows(between[: len(read)], written, writes, bytes_per_row, most_rows)


def copy_rows_twin(sources: Sequence[Tensor], destinations: Sequence[Tensor], moves: Tensor) -> None:
    """The same in plain torch, between the pools themselves: all sources are read before any destination is written."""
    for source, destination in zip(sources, destinations, strict=True):
        pieces = [source[first : first + count].clone() for first, _, count in moves.tolist()]
        for piece, (_, first, count) in zip(pieces, moves.tolist(), strict=True):
            destination[first : first + count] = piece
