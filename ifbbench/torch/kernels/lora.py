"""Products of LoRA adapters, grouped: each row of a batch with the matrices of its own adapter, in two launches.

A tile is some consecutive rows of one adapter. A program of the first kernel computes rows · Aᵀ of one tile and module,
or of a part of the inputs, because a batch of generation tokens has few tiles (as Punica's SGMV does; Chen et al.,
arXiv:2310.18547). The second adds the parts, multiplies them by Bᵀ for some of the outputs, and adds to these.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.torch.kernels.launch import as_operand, launching, padded_size, upcasts

# First row, number of rows, and adapter of a tile.
TILE_FIELDS = 3
# Slot and rank of an adapter in a module of a layer.
PAIR_FIELDS = 2
# Outputs, and their offset in those of the product, of a module.
MODULE_FIELDS = 2
# Rows of a tile: of generation tokens, and of context chunks.
FEW_ROWS, MANY_ROWS = 16, 64
# Inputs of a program's step and outputs of a program: 128 bytes of 16-bit values, and twice as many.
INPUTS_PER_STEP, OUTPUTS = 64, 128
# From so many tiles on, the inputs are not split; a part has at least so many inputs.
MANY_TILES = 64
SMALLEST_SPLIT, MAX_SPLITS = 512, 8


@triton.jit(do_not_specialize=["num_rows", "layer", "num_layers"])
def _inner_kernel(
    inner: tl.tensor,
    rows: tl.tensor,
    pool: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    inputs: tl.tensor,
    inputs_per_split: tl.tensor,
    num_rows: tl.tensor,
    layer: tl.tensor,
    num_layers: tl.tensor,
    FIRST_MODULE: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    tile, module, split = tiles + tl.program_id(0) * 3, tl.program_id(1), tl.program_id(2)
    first, count, adapter = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    pair = pairs + ((adapter * num_layers + layer) * NUM_MODULES + FIRST_MODULE + module) * 2
    slot, rank = tl.load(pair).to(tl.int64), tl.load(pair + 1)
    if rank == 0:
        return
    row, column, ranks = tl.arange(0, ROWS), tl.arange(0, STEP), tl.arange(0, RANKS)
    lora_a = pool + slot * width + ranks[None, :] * inputs
    values = rows + (first + row)[:, None] * row_stride
    result = tl.zeros([ROWS, RANKS], dtype=tl.float32)
    begin = split * inputs_per_split
    for at in range(begin, tl.minimum(begin + inputs_per_split, inputs), STEP):
        columns = at + column
        exists = columns < inputs
        x = tl.load(values + columns[None, :], mask=(row < count)[:, None] & exists[None, :], other=0.0)
        a = tl.load(lora_a + columns[:, None], mask=(ranks < rank)[None, :] & exists[:, None], other=0.0)
        x, a = as_operand(x, pool.dtype.element_ty, UPCAST), as_operand(a, pool.dtype.element_ty, UPCAST)
        result = tl.dot(x, a, result, input_precision="ieee")
    result_row = (split * tl.num_programs(1) + module).to(tl.int64) * num_rows + first + row
    tl.store(inner + result_row[:, None] * RANKS + ranks[None, :], result, mask=(row < count)[:, None])


@triton.jit(do_not_specialize=["num_rows", "layer", "num_layers"])
def _outer_kernel(
    output: tl.tensor,
    inner: tl.tensor,
    pool: tl.tensor,
    pairs: tl.tensor,
    modules: tl.tensor,
    tiles: tl.tensor,
    output_stride: tl.tensor,
    width: tl.tensor,
    inputs: tl.tensor,
    num_rows: tl.tensor,
    layer: tl.tensor,
    num_layers: tl.tensor,
    FIRST_MODULE: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    tile, module = tiles + tl.program_id(0) * 3, tl.program_id(1)
    outputs = tl.load(modules + (FIRST_MODULE + module) * 2)
    offset = tl.load(modules + (FIRST_MODULE + module) * 2 + 1)
    first, count, adapter = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    pair = pairs + ((adapter * num_layers + layer) * NUM_MODULES + FIRST_MODULE + module) * 2
    slot, rank = tl.load(pair).to(tl.int64), tl.load(pair + 1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if (rank == 0) | (tl.program_id(2) * COLUMNS >= outputs):
        return
    row, ranks = tl.arange(0, ROWS), tl.arange(0, RANKS)
    has_row, exists = (row < count)[:, None], (columns < outputs)[None, :]
    sums = tl.zeros([ROWS, RANKS], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        result_row = (split * tl.num_programs(1) + module).to(tl.int64) * num_rows + first + row
        sums += tl.load(inner + result_row[:, None] * RANKS + ranks[None, :], mask=has_row, other=0.0)
    lora_b = pool + slot * width + rank * inputs + columns[None, :].to(tl.int64) * rank
    b = tl.load(lora_b + ranks[:, None], mask=(ranks < rank)[:, None] & exists, other=0.0)
    sums, b = as_operand(sums, pool.dtype.element_ty, UPCAST), as_operand(b, pool.dtype.element_ty, UPCAST)
    added = tl.dot(sums, b, input_precision="ieee")
    target = output + (first + row)[:, None] * output_stride + offset + columns[None, :]
    total = tl.load(target, mask=has_row & exists, other=0.0).to(tl.float32) + added
    tl.store(target, total.to(output.dtype.element_ty), mask=has_row & exists)


def add_adapters(
    rows: Tensor,
    output: Tensor,
    pool: Tensor,
    width: int,
    pairs: Tensor,
    modules: Tensor,
    tiles: Tensor,
    rows_per_tile: int,
    max_rank: int,
    layer: int,
    first_module: int,
    num_modules: int,
    max_outputs: int,
) -> None:
    """Add B·(A·x) of each row's adapter to `output` in place, for the modules of one product of a layer.

    rows: [rows, inputs] and output: [rows, outputs of all modules], those of a row contiguous.
    pool: pages of adapters, contiguous, in slots of `width` values: A [rank, inputs] and behind it B [outputs, rank].
    pairs: int32 [adapters, layers, modules, PAIR_FIELDS], slot in the pool and rank; rank 0: nothing is added.
    modules: int32 [modules, MODULE_FIELDS].
    tiles: int32 [tiles, TILE_FIELDS], rows of no two of them overlap; of at most `rows_per_tile`, a power of two of at
        least 16.
    max_rank: maximum rank of any pair.
    max_outputs: maximum number of outputs of the modules `first_module` and the `num_modules` − 1 behind it.

    KernelError if it cannot be run.
    """
    num_tiles, (num_rows, inputs) = len(tiles), rows.shape
    if num_tiles == 0 or num_rows == 0:
        return
    ranks, all_modules = padded_size(max_rank), len(modules)
    splits = 1 if num_tiles >= MANY_TILES else max(1, min(MAX_SPLITS, inputs // SMALLEST_SPLIT))
    inputs_per_split = triton.cdiv(triton.cdiv(inputs, splits), INPUTS_PER_STEP) * INPUTS_PER_STEP
    inner = torch.empty((splits, num_modules, num_rows, ranks), dtype=torch.float32, device=rows.device)
    is_upcast = upcasts(rows, pool)
    with launching("add_adapters", rows=rows, output=output, pool=pool, tiles=tiles):
        _inner_kernel[(num_tiles, num_modules, splits)](
            inner,
            rows,
            pool,
            pairs,
            tiles,
            rows.stride(0),
            width,
            inputs,
            inputs_per_split,
            num_rows,
            layer,
            pairs.shape[1],
            FIRST_MODULE=first_module,
            NUM_MODULES=all_modules,
            ROWS=rows_per_tile,
            RANKS=ranks,
            STEP=INPUTS_PER_STEP,
            UPCAST=is_upcast,
        )
        _outer_kernel[(num_tiles, num_modules, triton.cdiv(max_outputs, OUTPUTS))](
            output,
            inner,
            pool,
            pairs,
            modules,
            tiles,
            output.stride(0),
            width,
            inputs,
            num_rows,
            layer,
            pairs.shape[1],
            FIRST_MODULE=first_module,
            NUM_MODULES=all_modules,
            SPLITS=splits,
            ROWS=rows_per_tile,
            RANKS=ranks,
            COLUMNS=OUTPUTS,
            UPCAST=is_upcast,
        )
