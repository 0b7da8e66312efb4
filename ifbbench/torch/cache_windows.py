"""The executor's KV cache: storage for each attention window, copies within it, and its part of a batch's inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import Batch, BlockCopy, CopyKind
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout, WindowLayout
from ifbbench.models.config import ModelConfig
from ifbbench.torch.model.attention_plan import plan_window
from ifbbench.torch.model.kv_cache import ContiguousKvCache, PagedKvCache
from ifbbench.torch.model.llama import LayerInputs, LlamaModel
from ifbbench.torch.model.tensors import to_device
from ifbbench.torch.packing import Int64Array, PackedBatch, beam_inputs, table_rows

KvCacheStorage = PagedKvCache | ContiguousKvCache
# The cache rows `destinations` receive the keys and values of `sources`, both int64 [tokens]: cache, sources,
# destinations.
RowCopy = tuple[KvCacheStorage, Tensor, Tensor]


def one_window_layout(config: ModelConfig, num_blocks: int, tokens_per_block: int) -> CacheLayout:
    """A layout with one linear window for all layers: the model's sliding window, or all its positions."""
    longest = config.max_position_embeddings
    size = min(config.sliding_window or longest, longest)
    attention = AttentionWindow(tokens_per_block, size, longest, is_cyclic=False)
    return CacheLayout((WindowLayout(tuple(range(config.num_layers)), attention, num_blocks),))


@dataclass(frozen=True, slots=True)
class CacheWindow:
    """The cache of the layers that share an attention window.

    index: index of the window in the layout and in batches.
    tables: block tables that replace those of batches.
    """

    index: int
    layers: tuple[int, ...]
    attention: AttentionWindow
    cache: KvCacheStorage
    tables: IntArray | None = None

    def tables_of(self, batch: Batch) -> IntArray:
        """Block tables [slots, beams, blocks per sequence] of this window."""
        if self.tables is not None:
            return self.tables
        return batch.window_tables[self.index - 1] if self.index else batch.block_tables


@dataclass(frozen=True, slots=True)
class CacheMoves:
    """Copies that a batch needs.

    blocks, before: blocks and rows, before it runs.
    after: rows, after it has run.
    """

    blocks: tuple[BlockCopy, ...]
    before: tuple[RowCopy, ...] = ()
    after: tuple[RowCopy, ...] = ()


class CacheWindows:
    """The KV cache of all layers."""

    def __init__(
        self, model: LlamaModel, layout: CacheLayout, num_slots: int, kv_cache_dtype: torch.dtype | None = None
    ) -> None:
        """kv_cache_dtype: in memory; the model's data type if None. ValueError if `layout` does not fit the model."""
        config, device, dtype = model.config, model.device, model.dtype
        layers = sorted(layer for window in layout.windows for layer in window.layers)
        if layers != list(range(config.num_layers)):
            raise ValueError(f"a cache layout of the layers {layers} for a model of {config.num_layers} layers")
        if layout.is_contiguous and any(window.num_host_blocks for window in layout.windows):
            raise ValueError("a contiguous cache has no host blocks")
        self.tokens_per_block = layout.windows[0].attention_window.tokens_per_block
        self._device = device
        self._num_layers = config.num_layers
        self._is_contiguous = layout.is_contiguous
        self._attends_in_place = model.operations.attends_in_place
        self._shapes = None
        paged_cache = PagedKvCache
        if model.uses_kernels:  # these import Triton, which is not installed everywhere
            from ifbbench.torch.model.kernel_llama import KernelPagedCache, KernelShapes, plan_paged_batch

            paged_cache = KernelPagedCache
            self._shapes, self._plan_paged_batch = KernelShapes.of(config, device, dtype), plan_paged_batch

        def paged_storage(window: WindowLayout) -> PagedKvCache:
            return paged_cache(
                config,
                window.num_blocks,
                window.attention_window.tokens_per_block,
                device,
                dtype,
                kv_cache_dtype=kv_cache_dtype,
                layers=window.layers,
                num_host_blocks=window.num_host_blocks,
            )

        pool = None
        if layout.shares_blocks:
            pool = paged_storage(max(layout.windows, key=lambda window: len(window.layers)))

        def window_of(index: int, window: WindowLayout) -> CacheWindow:
            attention = window.attention_window
            if not layout.is_contiguous:
                paged = paged_storage(window) if pool is None else pool.of_layers(window.layers)
                return CacheWindow(index, window.layers, attention, paged)
            # One block a sequence, as long as the longest sequence.
            beams = attention.max_beam_width
            storage = ContiguousKvCache(
                config,
                num_slots * beams,
                attention.max_seq_len,
                device,
                dtype,
                kv_cache_dtype=kv_cache_dtype,
                layers=window.layers,
            )
            tables = np.arange(num_slots * beams, dtype=np.int32).reshape(num_slots, beams, 1)
            return CacheWindow(index, window.layers, attention.contiguous(), storage, tables)

        self.windows = tuple([window_of(index, window) for index, window in enumerate(layout.windows)])

    def max_beams(self, batch: Batch) -> int:
        """Rows that each slot has in the block tables of every window."""
        return int(self.windows[0].tables_of(batch).shape[1])

    def warm_up(self) -> None:
        """Compile the kernels that copy blocks and rows: copies one onto itself."""
        first = self._tensor(np.zeros(1, np.int64))
        for window in self.windows:
            if isinstance(window.cache, PagedKvCache):
                window.cache.copy_blocks(first, first)
                window.cache.copy_rows(first, first)

    def plan_moves(self, batch: Batch, packed: PackedBatch) -> CacheMoves:
        """The copies that `batch` needs. Reads the block tables before it returns."""
        if batch.beam_width == 1:
            return CacheMoves(batch.copies)
        before = tuple(
            [
                self._row_copy(window, *rows_to_copy(batch, window.tables_of(batch), window.attention))
                for window in self.windows
            ]
        )
        return CacheMoves(batch.copies, before, self._shared_prompts(batch, packed))

    def move_before(self, moves: CacheMoves) -> None:
        """Copy blocks, then the keys and values of beams that continue others."""
        if moves.blocks:
            caches = [window.cache for window in self.windows if isinstance(window.cache, PagedKvCache)]
            copy_blocks(moves.blocks, caches, self._device)
        copy_rows(moves.before)

    def layer_inputs(self, batch: Batch, packed: PackedBatch) -> tuple[LayerInputs, ...]:
        """The inputs of each layer; attention is planned once a window. Reads the block tables before it returns."""
        inputs: dict[int, LayerInputs] = {}
        for window in self.windows:
            tables = table_rows(window.tables_of(batch))
            rows = cache_rows(packed, tables, window)
            if self._shapes is not None:
                # The kernel of generation takes one token a sequence; spans with drafts are chunks for it.
                chunks = len(batch.context) if batch.drafts is None else len(packed.spans.lengths)
                paged = self._plan_paged_batch(
                    packed.spans, chunks, tables, rows, window.attention, self._shapes, self._device
                )
                layer = LayerInputs(window.cache, paged.cache_rows, paged)
            else:
                in_place = self._attends_in_place and window.cache.is_readable_in_place
                # Padding has no keys in the cache, so it cannot be read in place.
                plan = plan_window(
                    packed.real_spans if in_place else packed.spans,
                    tables,
                    window.attention,
                    self._device,
                    num_rows=len(packed.positions),
                    is_contiguous=self._is_contiguous,
                    in_place=in_place,
                )
                layer = LayerInputs(window.cache, self._tensor(rows), plan)
            inputs.update(dict.fromkeys(window.layers, layer))
        return tuple(inputs[layer] for layer in range(self._num_layers))

    def rows_of(self, tables: Sequence[IntArray], start: int, end: int) -> Iterator[tuple[PagedKvCache, Tensor]]:
        """The cache rows of positions `start` to `end` - 1 of a sequence with one beam, in the storage of each window.
        tables: [blocks] of the sequence, of each window, none of which is overwritten."""
        positions = np.arange(start, end)
        for window, table in zip(self.windows, tables, strict=True):
            assert isinstance(window.cache, PagedKvCache)
            rows = window.attention.cache_rows(table[None], np.zeros_like(positions), positions)
            yield window.cache, self._tensor(rows)

    def _shared_prompts(self, batch: Batch, packed: PackedBatch) -> tuple[RowCopy, ...]:
        """Copies of the chunks' keys and values to the other beams of their requests; a paged cache shares blocks."""
        if not self._is_contiguous or not batch.context:
            return ()
        copies = []
        for window in self.windows:
            rows = cache_rows(packed, table_rows(window.tables_of(batch)), window)
            rows = rows[: len(packed.context_tokens)]
            beams = np.arange(1, batch.beam_width)[:, None] * window.attention.tokens_per_block
            copies.append(self._row_copy(window, np.tile(rows, batch.beam_width - 1), (rows + beams).ravel()))
        return tuple(copies)

    def _row_copy(self, window: CacheWindow, sources: Int64Array, destinations: Int64Array) -> RowCopy:
        return window.cache, self._tensor(sources), self._tensor(destinations)

    def _tensor(self, array: Int64Array) -> Tensor:
        return to_device(array, self._device)


def copy_rows(copies: tuple[RowCopy, ...]) -> None:
    """Do `copies`, one by one."""
    for cache, sources, destinations in copies:
        if len(sources):
            cache.copy_rows(sources, destinations)


def cache_rows(packed: PackedBatch, tables: IntArray, window: CacheWindow) -> Int64Array:
    """The cache row of the keys and values of each packed row, [rows].

    Rows that must not be stored get the spare row, if there is one: padding, and tokens that a later token of the same
    chunk overwrites (of several values for one row it is not defined which is stored).
    """
    owners, spans = packed.owners, packed.spans
    rows = window.attention.cache_rows(tables, spans.table_rows[owners], packed.positions)
    spare_row = window.cache.spare_row
    if spare_row is None:
        return rows
    if packed.is_padded:
        rows[packed.positions >= packed.ends[owners]] = spare_row
    if window.attention.wraps:
        rows[~window.attention.outlives(packed.positions, packed.ends[owners])] = spare_row
    return rows


def rows_to_copy(batch: Batch, block_tables: IntArray, window: AttentionWindow) -> tuple[Int64Array, Int64Array]:
    """Cache rows to read and to write, each [copied tokens], before a batch with beams runs.

    They copy to every beam that continues another one the keys and values of that parent, at the positions that the two
    do not share and the batch sees. All must be read before any is written, because parents repeat and permute.

    block_tables: [slots, beams, blocks per sequence], those of the layers with `window`. `private_from` may be too
        early for them: where parent and child have the same block, nothing is copied.
    """
    beams = beam_inputs(batch)
    requests, children = np.nonzero(beams.parents != np.arange(batch.beam_width))
    # A bubble shifts the first private position of a block towards the start of the sequence.
    firsts = np.maximum(beams.private_from.astype(np.int64)[requests] - window.bubble, 0)
    cached = batch.positions.astype(np.int64)[requests]
    counts = np.maximum(cached - firsts, 0)
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(owners)) - (np.cumsum(counts) - counts - firsts)[owners]
    seen = window.sees(positions, cached[owners])
    owners, positions = owners[seen], positions[seen]
    tables = table_rows(block_tables)
    first_rows = batch.slots.astype(np.int64)[requests] * block_tables.shape[1]

    def rows_of(of_beams: NDArray[np.integer]) -> Int64Array:
        return window.cache_rows(tables, (first_rows + of_beams)[owners], positions)

    sources, destinations = rows_of(beams.parents[requests, children]), rows_of(children)
    own = sources != destinations
    return sources[own], destinations[own]


def copy_blocks(copies: Sequence[BlockCopy], caches: Sequence[PagedKvCache], device: torch.device) -> None:
    """Do `copies`, with the result of one by one in their order. caches: of each attention window.

    Whole blocks are copied even if fewer tokens are wanted: the rest is written before it is read.
    """
    for together in independent_copies(copies):
        cache, kind = caches[together[0].window], together[0].kind
        sources = [copy.source for copy in together]
        destinations = [copy.destination for copy in together]
        if kind is CopyKind.DEVICE:
            cache.copy_blocks(*(to_device(np.array(blocks, np.int64), device) for blocks in (sources, destinations)))
        elif kind is CopyKind.OFFLOAD:
            cache.offload(sources, destinations)
        else:
            cache.onboard(sources, destinations)


def independent_copies(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Runs of consecutive copies of one kind and window whose sources can all be read before any is written.

    A run ends at a copy that reads, or writes again, a block that the run has written.
    """
    run: list[BlockCopy] = []
    written: set[int] = set()
    for copy in copies:
        reads_written = copy.kind is CopyKind.DEVICE and copy.source in written
        same = not run or (copy.kind, copy.window) == (run[0].kind, run[0].window)
        if run and (not same or reads_written or copy.destination in written):
            yield run
            run, written = [], set()
        run.append(copy)
        written.add(copy.destination)
    if run:
        yield run
