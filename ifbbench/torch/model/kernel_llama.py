"""The Llama decoder and its paged KV cache on the Triton kernels of `ifbbench.torch.kernels`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.models.config import ModelConfig
from ifbbench.models.lora_modules import LayerProduct
from ifbbench.torch.kernels.context_attention import TILE_FIELDS, context_attention
from ifbbench.torch.kernels.generation_attention import generation_attention
from ifbbench.torch.kernels.launch import (
    AttentionTiles,
    choose_num_splits,
    context_tiles,
    generation_tiles,
    multiprocessors,
)
from ifbbench.torch.kernels.rows import (
    add_rms_norm,
    addresses,
    copy_rows,
    copy_rows_buffered,
    rotate_and_write,
    row_bytes,
    swiglu,
)
from ifbbench.torch.model.attention_plan import Int64Array, QuerySpans, tiles
from ifbbench.torch.model.kv_cache import PagedKvCache
from ifbbench.torch.model.layer_weights import LayerWeights
from ifbbench.torch.model.llama import ForwardInputs, LlamaModel, PagedBatch
from ifbbench.torch.model.lora import adapted
from ifbbench.torch.model.tensors import to_device, to_device_together
from ifbbench.torch.model.weights import ModelWeights

# A cache row of tokens that are not stored.
NOWHERE = -1
# Compute capability that kernels are shaped for where there is no GPU.
HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """Tile sizes of the attention kernels for a model on a device."""

    context: AttentionTiles
    generation: AttentionTiles
    group: int
    num_kv_heads: int
    num_multiprocessors: int

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> "KernelShapes":
        """The shapes for `config` on `device`. Narrower types in the cache use those of `dtype`."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER
        group = config.num_heads // config.num_kv_heads
        context = context_tiles(config.head_dim, dtype.itemsize, capability)
        generation = generation_tiles(config.head_dim, group, dtype.itemsize)
        return cls(context, generation, group, config.num_kv_heads, multiprocessors(device))

    @property
    def queries_per_tile(self) -> int:
        """Queries of a chunk per program of the context kernel. ValueError if too many heads share a KV head."""
        if self.group > self.context.rows:
            raise ValueError(f"{self.group} query heads share a KV head; the kernels take {self.context.rows} at most")
        return self.context.rows // self.group

    def num_splits(self, lengths: Int64Array) -> int:
        """Number of parts that the keys of sequences of `lengths` keys are split into."""
        longest, total = int(lengths.max(initial=0)), int(lengths.sum())
        return choose_num_splits(self.num_kv_heads, longest, total, self.num_multiprocessors)


def plan_tiles(chunks: QuerySpans, queries_per_tile: int) -> NDArray[np.int32]:
    """Tiles of at most `queries_per_tile` queries for the context kernel, int32 [tiles, TILE_FIELDS], longest first."""
    pieces, owners = tiles(chunks, queries_per_tile)
    fields = pieces.first_rows, pieces.lengths, pieces.starts, chunks.starts[owners], pieces.table_rows
    return np.stack(fields, axis=1)[np.argsort(-pieces.ends, kind="stable")].astype(np.int32)


def plan_paged_batch(
    spans: QuerySpans,
    num_chunks: int,
    block_tables: NDArray[np.int32],
    cache_rows: Int64Array,
    window: AttentionWindow,
    shapes: KernelShapes,
    device: torch.device,
) -> PagedBatch:
    """The kernels' inputs for `spans`, of which the first `num_chunks` are context chunks.

    block_tables: [rows, blocks of a sequence], read before this returns.
    cache_rows: [tokens], where keys and values are stored.
    """
    # Tables have the columns of the longest sequence allowed, which may be a hundred times as many as are used here.
    tables = block_tables[:, : window.blocks_used(int(spans.ends.max(initial=0)))][spans.table_rows]
    own_tables = np.arange(len(spans.lengths))
    spans = replace(spans, table_rows=own_tables)
    chunks, steps = spans.select(own_tables[:num_chunks]), spans.select(own_tables[num_chunks:])
    num_context_rows = int(chunks.lengths.sum())
    rows, late_rows = cache_rows.astype(np.int32), []
    if window.wraps and (chunks.ends > window.size).any():
        late_rows = [rows[:num_context_rows].copy()]
        rows[:num_context_rows] = NOWHERE
    flat_tiles = plan_tiles(chunks, shapes.queries_per_tile).ravel()
    tile_fields, entries, table_rows, lengths, stored_rows, *late = to_device_together(
        [flat_tiles, tables.ravel(), steps.table_rows, steps.ends, rows, *late_rows], device
    )
    return PagedBatch(
        window,
        num_context_rows,
        tile_fields.view(-1, TILE_FIELDS),
        entries.view(tables.shape),
        table_rows,
        lengths,
        stored_rows,
        late[0] if late else None,
        shapes.num_splits(np.minimum(steps.ends, window.size)),
    )


class KernelLlama(LlamaModel):
    """`LlamaModel` for a GPU, with kernels between matrix products. Its batches are planned by `plan_paged_batch`."""

    uses_kernels = True

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        super().__init__(config, weights)
        self.shapes = KernelShapes.of(config, self.device, self.dtype)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Logits [outputs, vocabulary] of `inputs.output_rows`. Stores the batch's keys and values in the cache."""
        weights, epsilon = self._weights, self.config.rms_norm_eps
        part, is_last = self.part, self.part is None or self.part.is_last
        hidden = self._embedded(inputs)
        normed = add_rms_norm(hidden, None, weights.layers[0].attention_norm, epsilon)
        adapters = inputs.adapters
        next_norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            attention = self._kernel_attention(index, layer, normed, inputs)
            if index == self.config.num_layers - 1 and is_last:
                # The cache is complete. From here on only the rows of wanted logits are needed.
                attention = attention.index_select(0, inputs.output_rows)
                hidden = hidden.index_select(0, inputs.output_rows)
                adapters = adapters and adapters.of_outputs
            output = adapted(layer.attention_output, attention, adapters, index, LayerProduct.ATTENTION_OUTPUT)
            normed = add_rms_norm(hidden, self._sum(output), layer.mlp_norm, epsilon)
            activated = swiglu(adapted(layer.gate_up, normed, adapters, index, LayerProduct.GATE_UP))
            output = adapted(layer.down, activated, adapters, index, LayerProduct.DOWN)
            normed = add_rms_norm(hidden, self._sum(output), next_norm, epsilon)
        if part is not None and not is_last:
            part.links.send(hidden)
            return hidden[:0]
        return weights.lm_head(normed)

    def _kernel_attention(self, index: int, layer: LayerWeights, normed: Tensor, inputs: ForwardInputs) -> Tensor:
        """Attention output [tokens, heads · head size]."""
        config, batch, positions = self.config, inputs.layers[index].plan, inputs.positions
        assert isinstance(batch, PagedBatch), "a batch planned for PyTorch's attention"
        fused = adapted(layer.query_key_value, normed, inputs.adapters, index, LayerProduct.QUERY_KEY_VALUE)
        heads = fused.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        queries, keys, values = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        cache = inputs.layers[index].cache.blocks(index)
        self._normalise(layer, queries, keys)
        angles = self._rotary.cos, self._rotary.sin
        rotate_and_write(heads, *angles, positions, batch.cache_rows, *cache)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        context_attention(
            queries, keys, values, *cache, batch.block_tables, batch.tiles, output, self.shapes.context, batch.window
        )
        first = batch.num_context_rows
        if batch.late_rows is not None:
            rotate_and_write(heads[:first], *angles, positions, batch.late_rows, *cache, rotates=False)
        generation_attention(
            queries[first:],
            *cache,
            batch.block_tables,
            batch.table_rows,
            batch.lengths,
            output[first:],
            self.shapes.generation,
            batch.num_splits,
            batch.window,
        )
        return output.flatten(1)


class KernelPagedCache(PagedKvCache):
    """`PagedKvCache` on a GPU, copied by a kernel for all layers at once, which also accesses host memory directly."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._row_bytes = row_bytes(self._all()[0])
        self._device_addresses = addresses(self._all(), self._device)
        self._host_addresses = addresses(self._host, self._device)

    def copy_rows(self, sources: Tensor, destinations: Tensor) -> None:
        moves = torch.stack([sources, destinations, torch.ones_like(sources)], dim=1)
        copy_rows_buffered(self._device_addresses, self._device_addresses, moves, self._row_bytes, max_rows=1)

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        size = self.tokens_per_block
        moves = torch.stack([sources * size, destinations * size, torch.full_like(sources, size)], dim=1)
        copy_rows_buffered(self._device_addresses, self._device_addresses, moves, self._row_bytes, size)

    def offload(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._copy_blocks(self._device_addresses, blocks, self._host_addresses, host_blocks)

    def onboard(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        self._copy_blocks(self._host_addresses, host_blocks, self._device_addresses, blocks)

    def _copy_blocks(
        self, source_pools: Tensor, sources: Sequence[int], destination_pools: Tensor, destinations: Sequence[int]
    ) -> None:
        self._check_host_blocks()
        size = self.tokens_per_block
        rows = [np.asarray(blocks, dtype=np.int64) * size for blocks in (sources, destinations)]
        moves = to_device(np.stack([*rows, np.full(len(rows[0]), size)], axis=1), self._device)
        copy_rows(source_pools, destination_pools, moves, self._row_bytes, size)
