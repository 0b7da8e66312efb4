"""Storage of keys and values, in blocks or as one piece of memory per sequence. The engine assigns blocks to sequences.

A token's cache row is block id · tokens per block + position in the block.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ifbbench.models.config import ModelConfig
from ifbbench.torch.model.tensors import to_device, zeros


class StoredValues:
    """Conversion between the model's data type and a narrower one in the cache, such as fp8 e4m3.

    Values beyond the narrow type's range become its limits: an infinity in the cache would give NaNs even where it is
    masked.
    """

    def __init__(self, model_dtype: torch.dtype, stored_dtype: torch.dtype | None = None) -> None:
        self.dtype = stored_dtype or model_dtype
        self._model_dtype = model_dtype
        self.is_same = self.dtype == model_dtype
        self._limits = torch.finfo(self.dtype)
        # Stored as bytes, because PyTorch's index_copy_ on a CPU does not support eight-bit floats.
        is_bytes = self.dtype.itemsize == 1
        self.storage_dtype = torch.uint8 if is_bytes else self.dtype
        # The value of each byte. On a CPU a look-up is six times faster than a cast.
        self._table = torch.arange(256, dtype=torch.uint8).view(self.dtype).to(model_dtype) if is_bytes else None

    def packed(self, values: Tensor) -> Tensor:
        """`values` in the stored data type."""
        if self.is_same:
            return values
        if self._limits.max < torch.finfo(values.dtype).max:
            values = values.clamp(self._limits.min, self._limits.max)
        return values.to(self.dtype).view(self.storage_dtype)

    def unpacked(self, stored: Tensor) -> Tensor:
        """Stored values in the model's data type."""
        if self.is_same:
            return stored
        if self._table is not None and stored.device.type == "cpu":
            return self._table.index_select(0, stored.flatten().int()).view(stored.shape)
        return stored.view(self.dtype).to(self._model_dtype)


def _in_host_order(
    host_blocks: Sequence[int], blocks: Sequence[int], device: torch.device
) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """`blocks` on `device`, in the order of their `host_blocks`, and the runs of consecutive host blocks in that order,
    as (first index, end index, first host block)."""
    order = np.argsort(host_blocks, kind="stable")
    ascending = np.asarray(host_blocks, dtype=np.int64)[order]
    cuts = [0, *(np.flatnonzero(np.diff(ascending) != 1) + 1).tolist(), len(ascending)]
    runs = [(first, last, int(ascending[first])) for first, last in pairwise(cuts)]
    return to_device(np.asarray(blocks, dtype=np.int64)[order], device), runs


class PagedKvCache:
    """A cache in blocks of `tokens_per_block` tokens for the layers `layers` (default: all).

    Each layer has a pair of tensors [blocks · tokens per block, KV heads, head size], with latent attention one tensor
    that is both. `spare_row` is in an additional block that no sequence has; it receives keys and values that must not
    be read.

    kv_cache_dtype: the data type in memory (default: `dtype`).

    num_host_blocks: further blocks in host memory. For a CUDA device it is pinned, and copies are queued on the
    device's current stream, ordered with the batches that write and read the blocks. The host never reads the memory,
    so it does not wait.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        tokens_per_block: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        kv_cache_dtype: torch.dtype | None = None,
        layers: Sequence[int] | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.spare_row = num_blocks * tokens_per_block
        self._device = device
        self._heads = config.cached_heads
        self._stored = StoredValues(dtype, kv_cache_dtype)
        shape = ((num_blocks + 1) * tokens_per_block, *self._heads)

        def storages() -> dict[int, Tensor]:
            # Zeros, not empty: padding reads rows that were never written, and masking does not remove a NaN.
            return {
                layer: zeros(shape, device, self._stored.storage_dtype)
                for layer in (range(config.num_layers) if layers is None else layers)
            }

        self._keys = storages()
        self._is_latent = config.latent is not None
        self._values = self._keys if self._is_latent else storages()
        self._host = (
            [
                torch.zeros((num_host_blocks, blocks.shape[1]), dtype=blocks.dtype, pin_memory=blocks.is_cuda)
                for blocks in self._all_in_blocks()
            ]
            if num_host_blocks
            else []
        )

    def of_layers(self, layers: Sequence[int]) -> Self:
        """The same blocks for `layers`, of which each uses the memory of one layer of this cache: a block holds tokens
        of one or the other."""
        other = copy(self)
        other._keys = dict(zip(layers, self._keys.values(), strict=False))
        other._values = other._keys if self._is_latent else dict(zip(layers, self._values.values(), strict=False))
        return other

    @property
    def is_readable_in_place(self) -> bool:
        """Whether keys and values are stored in the model's data type."""
        return self._stored.is_same

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [tokens, KV heads, head size] in the cache rows `rows` [tokens].

        If a row occurs several times, it is not defined which of the values is stored.
        """
        self._keys[layer].index_copy_(0, rows, self._stored.packed(keys))
        if not self._is_latent:
            self._values[layer].index_copy_(0, rows, self._stored.packed(values))

    def copy_rows(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy keys and values of the cache rows `sources` [tokens] to `destinations` [tokens], in all layers.

        All sources are read before any destination is written. Destinations must differ.
        """
        for storage in self._all():
            storage.index_copy_(0, destinations, storage.index_select(0, sources))

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy keys and values of the blocks `sources` [blocks] to `destinations` [blocks], as `copy_rows`."""
        for blocks in self._all_in_blocks():
            blocks.index_copy_(0, destinations, blocks.index_select(0, sources))

    def read_rows(self, rows: Tensor) -> Iterator[Tensor]:
        """Keys and values of the cache rows `rows` [tokens] as they are stored, of each layer: copies."""
        for storage in self._all():
            yield storage.index_select(0, rows)

    def write_rows(self, rows: Tensor, read: Callable[[Tensor], Tensor]) -> None:
        """Store in the cache rows `rows` [tokens] what `read_rows` of a cache of the same layers has yielded.
        read(like): what came next, in the form of such a tensor."""
        for storage in self._all():
            storage.index_copy_(0, rows, read(storage[: len(rows)]))

    def offload(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy keys and values of `blocks` to `host_blocks`, all different, in all layers."""
        self._check_host_blocks()
        sources, runs = _in_host_order(host_blocks, blocks, self._device)
        for pool, storage in zip(self._host, self._all_in_blocks(), strict=True):
            chosen = storage.index_select(0, sources)
            for first, last, host in runs:
                pool[host : host + last - first].copy_(chosen[first:last], non_blocking=True)

    def onboard(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy keys and values of `host_blocks` to `blocks`, all different, in all layers."""
        self._check_host_blocks()
        destinations, runs = _in_host_order(host_blocks, blocks, self._device)
        for pool, storage in zip(self._host, self._all_in_blocks(), strict=True):
            pieces = [
                pool[host : host + last - first].to(self._device, non_blocking=True) for first, last, host in runs
            ]
            storage.index_copy_(0, destinations, torch.cat(pieces))

    def gather(self, layer: int, block_ids: Tensor | slice, num_keys: int = -1) -> tuple[Tensor, Tensor]:
        """Keys and values of sequences with the blocks `block_ids` [sequences, blocks], all tokens of these blocks.

        Each is [sequences, KV heads, blocks · tokens per block, head size], a transposed view of a copy.
        """
        assert isinstance(block_ids, Tensor), "slices are planned for a contiguous cache only"
        # Whole blocks as flat rows: index_select copies each in one piece (advanced indexing is six times slower).
        return self._gathered(self._in_blocks(self._keys[layer]), self._in_blocks(self._values[layer]), block_ids)

    def gather_rows(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the cache rows `rows` [sequences, keys], each [sequences, KV heads, keys, head size]."""
        return self._gathered(self._keys[layer], self._values[layer], rows)

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as views [blocks, tokens per block, KV heads, head size], in the data type in memory."""
        keys, values = (
            storage[layer].view(self._stored.dtype).view(-1, self.tokens_per_block, *self._heads)
            for storage in (self._keys, self._values)
        )
        return keys, values

    def _gathered(self, keys: Tensor, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        chosen = (self._stored.unpacked(storage.index_select(0, indices.flatten())) for storage in (keys, values))
        keys, values = (part.view(indices.shape[0], -1, *self._heads).transpose(1, 2) for part in chosen)
        return keys, values

    def _all(self) -> list[Tensor]:
        return [*self._keys.values(), *(() if self._is_latent else self._values.values())]

    def _in_blocks(self, storage: Tensor) -> Tensor:
        return storage.view(self.num_blocks + 1, -1)

    def _all_in_blocks(self) -> list[Tensor]:
        return list(map(self._in_blocks, self._all()))

    def _check_host_blocks(self) -> None:
        if not self._host:
            raise ValueError("a copy from or to host memory, but the cache has no host blocks")


class ContiguousKvCache:
    """Keys and values of `num_sequences` sequences of up to `max_seq_len` tokens, with the methods of `PagedKvCache`.

    Each layer has a tensor [sequences, 2, KV heads, positions, head size], the 2 being keys and values. To callers it
    is a cache with one block of `max_seq_len` tokens per sequence: a token's cache row is sequence · `max_seq_len` +
    position. There is no spare row: keys and values of padding are stored behind their prompt's own, where they are
    not read before the sequence's next tokens overwrite them.
    """

    spare_row: int | None = None
    is_readable_in_place = False

    def __init__(
        self,
        config: ModelConfig,
        num_sequences: int,
        max_seq_len: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        kv_cache_dtype: torch.dtype | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        self._max_seq_len = max_seq_len
        self._stored = StoredValues(dtype, kv_cache_dtype)
        kv_heads, head_dim = config.cached_heads
        shape = (num_sequences, 2, kv_heads, max_seq_len, head_dim)
        self.storage = {
            layer: torch.zeros(shape, device=device, dtype=self._stored.storage_dtype)
            for layer in (range(config.num_layers) if layers is None else layers)
        }

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `PagedKvCache.write`."""
        indices = self._indices(rows)
        self._by_position(layer, 0).index_put_(indices, self._stored.packed(keys))
        self._by_position(layer, 1).index_put_(indices, self._stored.packed(values))

    def copy_rows(self, sources: Tensor, destinations: Tensor) -> None:
        """As `PagedKvCache.copy_rows`."""
        read, written = self._indices(sources), self._indices(destinations)
        for layer in self.storage:
            for part in (0, 1):
                storage = self._by_position(layer, part)
                storage.index_put_(written, storage[read])

    def gather(self, layer: int, block_ids: Tensor | slice, num_keys: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `num_keys` positions of the sequences `block_ids` [sequences, 1], or a slice.

        Each is [sequences, KV heads, keys, head size]; for a slice, a view of the cache itself.
        """
        stored = self.storage[layer].narrow(3, 0, num_keys)
        chosen = stored[block_ids] if isinstance(block_ids, slice) else stored.index_select(0, block_ids.flatten())
        keys, values = self._stored.unpacked(chosen).unbind(1)
        return keys, values

    def gather_rows(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As `PagedKvCache.gather_rows`."""
        indices = self._indices(rows)
        keys, values = (self._stored.unpacked(self._by_position(layer, part)[indices]) for part in (0, 1))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as views [sequences, positions, KV heads, head size], in the data type in memory."""
        keys, values = (self._by_position(layer, part).view(self._stored.dtype) for part in (0, 1))
        return keys, values

    def _indices(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sequences and positions of cache rows."""
        return rows // self._max_seq_len, rows % self._max_seq_len

    def _by_position(self, layer: int, part: int) -> Tensor:
        """Keys or values as a view [sequences, positions, KV heads, head size]."""
        return self.storage[layer][:, part].transpose(1, 2)


KvStorage = PagedKvCache | ContiguousKvCache
