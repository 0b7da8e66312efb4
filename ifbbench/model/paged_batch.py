"""A batch as the attention kernels take it, made once an attention window and then used by each of its layers."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.kernels.context_attention import TILE_FIELDS, plan_tiles
from ifbbench.kernels.launch import multiprocessors
from ifbbench.kernels.tiles import AttentionTiles, choose_num_splits, context_tiles, generation_tiles
from ifbbench.model.attention_plan import Int64Array, QuerySpans
from ifbbench.model.config import ModelConfig

Int32Array = NDArray[np.int32]
# A cache row that is none: nothing is stored.
NOWHERE = -1
# Each array begins at 16 bytes, for Triton compiles another kernel for one that does not.
ALIGNED = 4
# What kernels are shaped for where no GPU says what it is.
HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """Sizes that the attention kernels of a model have on a device."""

    context: AttentionTiles
    generation: AttentionTiles
    group: int
    num_kv_heads: int
    num_multiprocessors: int

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> "KernelShapes":
        """The shapes for `config` on `device`. Smaller types in the cache share those of `dtype`."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER
        group = config.num_heads // config.num_kv_heads
        return cls(
            context_tiles(config.head_dim, dtype.itemsize, capability),
            generation_tiles(config.head_dim, group, dtype.itemsize),
            group, config.num_kv_heads, multiprocessors(device),
        )  # fmt: skip

    @property
    def queries_per_tile(self) -> int:
        """Queries of a chunk that a program of the context kernel has. ValueError if none fits."""
        if self.group > self.context.rows:
            raise ValueError(f"{self.group} query heads share a KV head; the kernels take {self.context.rows} at most")
        return self.context.rows // self.group

    def num_splits(self, lengths: Int64Array) -> int:
        """Into how many parts the keys of sequences of `lengths` keys are cut."""
        if len(lengths) == 0:
            return 1
        return choose_num_splits(
            self.num_kv_heads, int(lengths.max()), int(lengths.sum()), self.num_multiprocessors
        )


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """What the kernels need beside queries, keys and values. All tensors are int32 and on the device.

    num_context_rows: packed rows of the chunks; those of the generation tokens follow. tiles: [tiles, 5], of the chunks
    (see `plan_tiles`). block_tables: [sequences, blocks]. table_rows, lengths: [generation tokens], row of the tables,
    and keys with the token's own. cache_rows: [tokens], where keys and values are stored before attention, below 0:
    nowhere. late_rows: [context rows], the same for after the chunks' attention, where they are written over what the
    chunks still see; None if nothing waits.
    """

    window: AttentionWindow
    num_context_rows: int
    tiles: Tensor
    block_tables: Tensor
    table_rows: Tensor
    lengths: Tensor
    cache_rows: Tensor
    late_rows: Tensor | None
    num_splits: int


def plan_paged_batch(
    spans: QuerySpans, num_chunks: int, block_tables: Int32Array, cache_rows: Int64Array, rule: AttentionWindow,
    shapes: KernelShapes, device: torch.device,
) -> PagedBatch:
    """What the kernels need of `spans`, the first `num_chunks` of which are context chunks. block_tables: [rows, blocks
    of a sequence], read before this returns. cache_rows: [tokens], where keys and values go."""
    chunks, steps = spans.select(np.arange(num_chunks)), spans.select(np.arange(num_chunks, len(spans.lengths)))
    num_context_rows = int(chunks.lengths.sum())
    rows, late_rows = cache_rows.astype(np.int32), None
    if rule.wraps and (chunks.ends > rule.size).any():
        late_rows = rows[:num_context_rows].copy()
        rows[:num_context_rows] = NOWHERE
    # Tables are as wide as the longest sequence that is allowed, which may be a hundred times as long as these.
    tables = block_tables[:, : rule.blocks_used(int(spans.ends.max(initial=0)))][spans.table_rows]
    tiles = plan_tiles(chunks.first_rows, chunks.lengths, chunks.starts, np.arange(num_chunks), shapes.queries_per_tile)
    step_rows = np.arange(num_chunks, len(spans.lengths))
    arrays: list[NDArray[np.integer]] = [tiles.ravel(), tables.ravel(), step_rows, steps.ends, rows]
    if late_rows is not None:
        arrays.append(late_rows)
    parts = on_device_together(arrays, device)
    return PagedBatch(
        rule, num_context_rows, parts[0].view(-1, TILE_FIELDS), parts[1].view(tables.shape), parts[2],
        parts[3], parts[4], parts[5] if late_rows is not None else None,
        shapes.num_splits(np.minimum(steps.ends, rule.size)),
    )  # fmt: skip


def on_device_together(arrays: list[NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Flat arrays as int32 tensors on `device`, brought there with one copy."""
    together = host_numbers(arrays, device).to(device, non_blocking=True)
    return parts_of(together, [len(array) for array in arrays])


def host_numbers(arrays: list[NDArray[np.integer]], device: torch.device) -> Tensor:
    """Flat arrays as one int32 tensor in host memory: pinned if `device` is a GPU, for a copy that nobody waits for."""
    sizes = [aligned(len(array)) for array in arrays]
    host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for array, piece in zip(arrays, torch.split(host, sizes), strict=True):
        piece.numpy()[: len(array)] = array
    return host


def parts_of(together: Tensor, lengths: list[int]) -> list[Tensor]:
    """The arrays of `lengths` that `host_numbers` put together, as views."""
    pieces = torch.split(together, [aligned(length) for length in lengths])
    return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]


def aligned(length: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-length // ALIGNED) * ALIGNED
