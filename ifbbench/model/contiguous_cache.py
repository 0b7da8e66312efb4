"""The KV cache without blocks: one piece of memory for each sequence, as long as the longest may be."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ifbbench.model.config import ModelConfig
from ifbbench.model.kv_values import StoredValues


class ContiguousKvCache:
    """Keys and values of `num_sequences` sequences of up to `max_seq_len` tokens, as `kv_cache.KvStorage` asks.

    One tensor a layer, [sequences, 2, KV heads, positions, head size], the 2 being keys and values. To all else it
    looks like a paged cache with one block a sequence, of `max_seq_len` tokens: a token's cache row is sequence ·
    `max_seq_len` + position. It has no spare row: keys and values of padding lie behind their prompt's own, where
    nobody reads before the sequence's next tokens are written over them.
    """

    spare_row: int | None = None
    is_readable_in_place = False

    def __init__(
        self, config: ModelConfig, num_sequences: int, max_seq_len: int, device: torch.device, dtype: torch.dtype,
        *, kv_cache_dtype: torch.dtype | None = None, layers: Sequence[int] | None = None,
    ) -> None:
        self._max_seq_len = max_seq_len
        self._stored = StoredValues(dtype, kv_cache_dtype)
        shape = (num_sequences, 2, config.num_kv_heads, max_seq_len, config.head_dim)
        self.storage = {layer: torch.zeros(shape, device=device, dtype=self._stored.storage_dtype)
                        for layer in (range(config.num_layers) if layers is None else layers)}  # fmt: skip

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [tokens, KV heads, head size] at the cache rows `rows` [tokens]."""
        places = self._places(rows)
        self._by_place(layer, 0).index_put_(places, self._stored.packed(keys))
        self._by_place(layer, 1).index_put_(places, self._stored.packed(values))

    def copy_rows(self, sources: Tensor, destinations: Tensor) -> None:
        """Give the cache rows `destinations` [tokens] the keys and values of `sources` [tokens], in all layers."""
        read, written = self._places(sources), self._places(destinations)
        for layer in self.storage:
            for part in (0, 1):
                storage = self._by_place(layer, part)
                storage.index_put_(written, storage[read])

    def gather(self, layer: int, block_ids: Tensor | slice, num_keys: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `num_keys` positions of the sequences `block_ids` [sequences, 1], or a slice.

        Each is [sequences, KV heads, keys, head size]; of a slice, a view of the cache itself.
        """
        stored = self.storage[layer].narrow(3, 0, num_keys)
        chosen = stored[block_ids] if isinstance(block_ids, slice) else stored.index_select(0, block_ids.flatten())
        keys, values = self._stored.unpacked(chosen).unbind(1)
        return keys, values

    def gather_rows(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the cache rows `rows` [sequences, keys], each [sequences, KV heads, keys, head size]."""
        places = self._places(rows)
        keys, values = (self._stored.unpacked(self._by_place(layer, part)[places]) for part in (0, 1))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as views [sequences, positions, KV heads, head size], in the data type in memory."""
        keys, values = (self._by_place(layer, part).view(self._stored.dtype) for part in (0, 1))
        return keys, values

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sequence and position of cache rows."""
        return rows // self._max_seq_len, rows % self._max_seq_len

    def _by_place(self, layer: int, part: int) -> Tensor:
        """Keys or values as a view [sequences, positions, KV heads, head size]."""
        return self.storage[layer][:, part].transpose(1, 2)
