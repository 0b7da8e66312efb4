"""Storage of the KV cache: which block belongs to whom is decided elsewhere."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ifbbench.model.config import ModelConfig
from ifbbench.model.host_pool import HostPool
from ifbbench.model.huge_pages import zeros
from ifbbench.model.kv_values import StoredValues


class KvStorage(Protocol):
    """Keys and values of some layers. A token's place is its cache row, block id · tokens per block + place in block.

    spare_row: a row that no sequence has, for keys and values that nobody is to read; None where those may stay in the
    rows of their own sequence.
    """

    @property
    def spare_row(self) -> int | None: ...

    @property
    def is_readable_in_place(self) -> bool:
        """Whether `blocks` are whole pieces of memory, and of the model's data type."""
        ...

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [tokens, KV heads, head size] at the cache rows `rows` [tokens].

        Where a row comes several times, one of the values wins.
        """
        ...

    def copy_rows(self, sources: Tensor, destinations: Tensor) -> None:
        """Give the cache rows `destinations` [tokens] the keys and values of `sources` [tokens], in all layers.

        All sources are read before any is written. No row may be among the destinations twice.
        """
        ...

    def gather(self, layer: int, block_ids: Tensor | slice, num_keys: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `num_keys` places of sequences with the blocks `block_ids` [sequences, blocks].

        Each is [sequences, KV heads, keys, head size]. A slice: one block a sequence.
        """
        ...

    def gather_rows(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the cache rows `rows` [sequences, keys], each [sequences, KV heads, keys, head size]."""
        ...

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as views [blocks, tokens per block, KV heads, head size], in the data type in memory."""
        ...


class PagedKvCache:
    """A cache in blocks of `tokens_per_block` tokens, of the layers `layers`: all, if not told.

    One pair of tensors a layer, each [blocks · tokens per block, KV heads, head size], changed in place: one tensor
    over all layers would be copied whole by torch.compile at each layer. `spare_row` lies in a block more, which no
    sequence has. kv_cache_dtype: the data type in memory, `dtype` if not told. `num_host_blocks` more are host memory.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, tokens_per_block: int, device: torch.device, dtype: torch.dtype,
        *, kv_cache_dtype: torch.dtype | None = None, layers: Sequence[int] | None = None, num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.spare_row = num_blocks * tokens_per_block
        self._heads = (config.num_kv_heads, config.head_dim)
        self._stored = StoredValues(dtype, kv_cache_dtype)
        shape = ((num_blocks + 1) * tokens_per_block, *self._heads)

        def storages() -> dict[int, Tensor]:
            # Zeros, not empty: padding reads rows that were never written, and masking does not undo a NaN.
            return {layer: zeros(shape, device, self._stored.storage_dtype)
                    for layer in (range(config.num_layers) if layers is None else layers)}

        self._keys, self._values = storages(), storages()
        self._host = HostPool.beside(self._all(), num_host_blocks, tokens_per_block) if num_host_blocks else None

    @property
    def is_readable_in_place(self) -> bool:
        """Whether what is stored is the model's data type."""
        return self._stored.is_same

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [tokens, KV heads, head size] at the cache rows `rows` [tokens]."""
        self._keys[layer].index_copy_(0, rows, self._stored.packed(keys))
        self._values[layer].index_copy_(0, rows, self._stored.packed(values))

    def copy_rows(self, sources: Tensor, destinations: Tensor) -> None:
        """Give the cache rows `destinations` [tokens] the keys and values of `sources` [tokens], in all layers."""
        for storage in self._all():
            storage.index_copy_(0, destinations, storage.index_select(0, sources))

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Give the blocks `destinations` [blocks] the keys and values of the blocks `sources`, in all layers.

        All sources are read before any is written. No block may be among the destinations twice.
        """
        for storage in self._all():
            blocks = self._as_blocks(storage)
            blocks.index_copy_(0, destinations, blocks.index_select(0, sources))

    def offload(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Give each of `host_blocks`, all different, the keys and values of one of `blocks`, in all layers."""
        self._host_pool().store([self._as_blocks(storage) for storage in self._all()], blocks, host_blocks)

    def onboard(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Give each of `blocks`, all different, the keys and values of one of `host_blocks`, in all layers."""
        self._host_pool().load([self._as_blocks(storage) for storage in self._all()], host_blocks, blocks)

    def gather(self, layer: int, block_ids: Tensor | slice, num_keys: int = -1) -> tuple[Tensor, Tensor]:
        """Keys and values of sequences with the blocks `block_ids` [sequences, blocks], always those of whole blocks.

        Each is [sequences, KV heads, blocks · tokens per block, head size], a transposed view of a fresh copy.
        """
        if isinstance(block_ids, slice):
            block_ids = torch.arange(block_ids.start, block_ids.stop, device=self._keys[layer].device).view(-1, 1)
        return self._gather(self._keys[layer], block_ids), self._gather(self._values[layer], block_ids)

    def gather_rows(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the cache rows `rows` [sequences, keys], each [sequences, KV heads, keys, head size]."""
        return self._gather_rows(self._keys[layer], rows), self._gather_rows(self._values[layer], rows)

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as views [blocks, tokens per block, KV heads, head size], in the data type in memory."""
        keys, values = (storage[layer].view(self._stored.dtype).view(-1, self.tokens_per_block, *self._heads)
                        for storage in (self._keys, self._values))  # fmt: skip
        return keys, values

    def _gather(self, storage: Tensor, block_ids: Tensor) -> Tensor:
        # Whole blocks as flat rows: index_select copies each in one piece (advanced indexing is six times slower).
        blocks = storage.view(self.num_blocks + 1, -1).index_select(0, block_ids.flatten())
        return self._stored.unpacked(blocks).view(block_ids.shape[0], -1, *self._heads).transpose(1, 2)

    def _gather_rows(self, storage: Tensor, rows: Tensor) -> Tensor:
        chosen = self._stored.unpacked(storage.index_select(0, rows.flatten()))
        return chosen.view(*rows.shape, *self._heads).transpose(1, 2)

    def _all(self) -> list[Tensor]:
        return [*self._keys.values(), *self._values.values()]

    def _as_blocks(self, storage: Tensor) -> Tensor:
        return storage.view(self.num_blocks + 1, -1)

    def _host_pool(self) -> HostPool:
        if self._host is None:
            raise ValueError("a copy from or to host memory, but the cache has no host blocks")
        return self._host
