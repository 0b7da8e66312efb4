"""The executor's KV cache: storage for each attention window, and what the model's layers need of it in a batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ifbbench.engine.batch import Batch
from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.kv_cache.blocks import BlockCopy
from ifbbench.engine.kv_cache.sizing import CacheLayout, WindowLayout
from ifbbench.engine.request_table import IntArray
from ifbbench.errors import InputError
from ifbbench.execution.beams import rows_to_copy
from ifbbench.execution.block_copies import run_copies
from ifbbench.execution.packing import Int64Array, PackedBatch, table_rows
from ifbbench.model.attention import LayerInputs
from ifbbench.model.config import ModelConfig
from ifbbench.model.contiguous_cache import ContiguousKvCache
from ifbbench.model.kv_cache import KvStorage, PagedKvCache
from ifbbench.model.to_device import to_device
from ifbbench.model.window_plan import plan_window


def one_window_layout(
    config: ModelConfig, num_blocks: int, tokens_per_block: int, max_seq_len: int | None = None
) -> CacheLayout:
    """A layout with one window for all layers: the model's sliding window, or as long as the longest sequence.

    Each position has a place of its own (linear mode). max_seq_len: as many positions as the model has, if not told.
    """
    longest = max_seq_len or config.max_position_embeddings
    window = min(config.sliding_window or longest, longest)
    attention_window = AttentionWindow(tokens_per_block, window, longest, is_cyclic=False)
    return CacheLayout((WindowLayout(tuple(range(config.num_layers)), attention_window, num_blocks),))


def check_layout(layout: CacheLayout, config: ModelConfig) -> None:
    """ValueError if a layer is in no window or in several, or a contiguous cache is to have windows with places that
    are written over or host memory; InputError if layers would see more than the model's sliding window."""
    layers = sorted(layer for window in layout.windows for layer in window.layers)
    if layers != list(range(config.num_layers)):
        raise ValueError(f"a cache layout of the layers {layers} for a model of {config.num_layers} layers")
    if layout.is_contiguous and any(window.num_host_blocks for window in layout.windows):
        raise ValueError("a contiguous cache has no host blocks")
    for window in layout.windows:
        size = min(window.attention_window.size, window.attention_window.max_seq_len)
        if config.sliding_window is not None and size > config.sliding_window:
            raise InputError(f"--max_attention_window: {size} is more than the model's sliding window; expected at "
                             f"most {config.sliding_window} (tokens). Lower it or leave it out.")


@dataclass(frozen=True, slots=True)
class CacheWindow:
    """The cache of the layers that share an attention window. tables: block tables to use instead of the batch's."""

    layers: tuple[int, ...]
    rule: AttentionWindow
    cache: KvStorage
    tables: IntArray | None = None

    def tables_of(self, batch: Batch, index: int) -> IntArray:
        """Block tables [slots, beams, blocks per sequence] of this window, number `index` of the batch's."""
        if self.tables is not None:
            return self.tables
        return batch.window_tables[index - 1] if index else batch.block_tables


@dataclass(frozen=True, slots=True)
class RowCopy:
    """The cache rows `destinations` get the keys and values of `sources`, both int64 [tokens]."""

    cache: KvStorage
    sources: Tensor
    destinations: Tensor

    def run(self) -> None:
        """Do it, if there is anything to do."""
        if len(self.sources):
            self.cache.copy_rows(self.sources, self.destinations)


@dataclass(frozen=True, slots=True)
class CacheMoves:
    """What is to be moved around a batch. copies: of blocks, before it. before, after: rows that beams have to get."""

    copies: tuple[BlockCopy, ...]
    before: tuple[RowCopy, ...] = ()
    after: tuple[RowCopy, ...] = ()


class CacheWindows:
    """All of the cache, of the model `config` on `device`. kv_cache_dtype: the data type in memory, `dtype` if None."""

    paged_cache: type[PagedKvCache] = PagedKvCache

    def __init__(
        self, config: ModelConfig, layout: CacheLayout, num_slots: int, device: torch.device, dtype: torch.dtype,
        kv_cache_dtype: torch.dtype | None = None, *, attends_in_place: bool = False,
    ) -> None:
        """attends_in_place: whether the model's operations read keys and values where they lie."""
        check_layout(layout, config)
        self._device = device
        self._num_layers = config.num_layers
        self._is_contiguous = layout.is_contiguous
        self._attends_in_place = attends_in_place
        make = self._contiguous if layout.is_contiguous else self._paged
        self.windows = tuple(make(config, window, num_slots, dtype, kv_cache_dtype) for window in layout.windows)

    def _paged(
        self, config: ModelConfig, window: WindowLayout, _num_slots: int, dtype: torch.dtype,
        kv_cache_dtype: torch.dtype | None,
    ) -> CacheWindow:
        cache = self.paged_cache(
            config, window.num_blocks, window.attention_window.tokens_per_block, self._device, dtype,
            kv_cache_dtype=kv_cache_dtype, layers=window.layers, num_host_blocks=window.num_host_blocks,
        )  # fmt: skip
        return CacheWindow(window.layers, window.attention_window, cache)

    def _contiguous(
        self, config: ModelConfig, window: WindowLayout, num_slots: int, dtype: torch.dtype,
        kv_cache_dtype: torch.dtype | None,
    ) -> CacheWindow:
        """One block a sequence, as long as the longest sequence: places for all positions, with nothing between."""
        longest, beams = window.attention_window.max_seq_len, window.attention_window.max_beam_width
        cache = ContiguousKvCache(config, num_slots * beams, longest, self._device, dtype,
                                  kv_cache_dtype=kv_cache_dtype, layers=window.layers)  # fmt: skip
        tables = np.arange(num_slots * beams, dtype=np.int32).reshape(num_slots, beams, 1)
        return CacheWindow(window.layers, window.attention_window.contiguous(), cache, tables)

    def max_beams(self, batch: Batch) -> int:
        """Rows of a block table that each slot has, in every window."""
        return int(self.windows[0].tables_of(batch, 0).shape[1])

    def warm_up(self) -> None:
        """Compile what copies blocks and rows, where it is compiled: each is copied onto itself."""
        first = self._tensor(np.zeros(1, np.int64))
        for window in self.windows:
            if isinstance(window.cache, PagedKvCache):
                window.cache.copy_blocks(first, first)
                window.cache.copy_rows(first, first)

    def plan_moves(self, batch: Batch, packed: PackedBatch) -> CacheMoves:
        """What `batch` wants moved. Reads the block tables before it returns. ValueError for copies of blocks where
        there are none."""
        if batch.copies and self._is_contiguous:
            raise ValueError("copies of blocks for a contiguous cache, which has none")
        if batch.beam_width == 1:
            return CacheMoves(batch.copies)
        before = [
            self._row_copy(window, rows_to_copy(batch, window.tables_of(batch, index), window.rule))
            for index, window in enumerate(self.windows)
        ]
        return CacheMoves(batch.copies, tuple(before), self._shared_prompts(batch, packed))

    def move_before(self, moves: CacheMoves) -> None:
        """Copy blocks, then the keys and values of beams that go on from others."""
        if moves.copies:
            caches = [window.cache for window in self.windows if isinstance(window.cache, PagedKvCache)]
            run_copies(moves.copies, caches, self._device)
        for rows in moves.before:
            rows.run()

    def move_after(self, moves: CacheMoves) -> None:
        """Copy what beams are to share but have no blocks in common for."""
        for rows in moves.after:
            rows.run()

    def layer_inputs(self, batch: Batch, packed: PackedBatch) -> tuple[LayerInputs, ...]:
        """What each layer needs; attention is planned once a window. Reads the block tables before it returns."""
        inputs: dict[int, LayerInputs] = {}
        for index, window in enumerate(self.windows):
            tables = table_rows(window.tables_of(batch, index))
            in_place = self._attends_in_place and window.cache.is_readable_in_place
            # Padding has no keys in the cache, so in place there is nothing for it to see.
            plan = plan_window(
                packed.real_spans if in_place else packed.spans, tables, window.rule, self._device,
                num_rows=len(packed.positions), is_contiguous=self._is_contiguous, in_place=in_place,
            )  # fmt: skip
            rows = self._tensor(cache_rows(packed, tables, window))
            layer = LayerInputs(window.cache, rows, plan.after, plan.before, plan.in_place)
            inputs.update(dict.fromkeys(window.layers, layer))
        return tuple(inputs[layer] for layer in range(self._num_layers))

    def _shared_prompts(self, batch: Batch, packed: PackedBatch) -> tuple[RowCopy, ...]:
        """Keys and values of the batch's chunks for their other beams, where those have no blocks in common."""
        if not self._is_contiguous or not batch.context:
            return ()
        copies = []
        for index, window in enumerate(self.windows):
            rows = cache_rows(packed, table_rows(window.tables_of(batch, index)), window)
            rows = rows[: len(packed.context_tokens)]
            beams = np.arange(1, batch.beam_width)[:, None] * window.rule.tokens_per_block
            copies.append(self._row_copy(window, (np.tile(rows, batch.beam_width - 1), (rows + beams).ravel())))
        return tuple(copies)

    def _row_copy(self, window: CacheWindow, rows: tuple[Int64Array, Int64Array]) -> RowCopy:
        sources, destinations = rows
        return RowCopy(window.cache, self._tensor(sources), self._tensor(destinations))

    def _tensor(self, array: Int64Array) -> Tensor:
        return to_device(array, self._device)


def cache_rows(packed: PackedBatch, tables: IntArray, window: CacheWindow) -> Int64Array:
    """Where keys and values of each packed row go, [rows].

    Padding, and what a later token of the same chunk is to be written over, go to the spare row if there is one: which
    of several values for a row wins is not defined.
    """
    owners, spans = packed.owners, packed.spans
    rows = window.rule.cache_rows(tables, spans.table_rows[owners], packed.positions)
    spare_row = window.cache.spare_row
    if spare_row is None:
        return rows
    if packed.is_padded:
        rows[packed.positions >= packed.ends[owners]] = spare_row
    if window.rule.wraps:
        rows[~window.rule.outlives(packed.positions, packed.ends[owners])] = spare_row
    return rows
