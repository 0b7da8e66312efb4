"""Storage of the paged KV cache: which block belongs to whom is decided elsewhere."""

import torch
from torch import Tensor

from ifbbench.model.config import ModelConfig


class PagedKvCache:
    """Keys and values of all layers in blocks of `tokens_per_block` tokens.

    One pair of tensors a layer, each [blocks · tokens per block, KV heads, head size], changed in place: one tensor
    over all layers would be copied whole by torch.compile at each layer. A token's row in it is its cache row,
    block id · tokens per block + position in block. `spare_row` lies in a block more, which no sequence has: the place
    for keys and values that nobody is to read.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, tokens_per_block: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.spare_row = num_blocks * tokens_per_block
        self._heads = (config.num_kv_heads, config.head_dim)
        shape = ((num_blocks + 1) * tokens_per_block, *self._heads)
        # Zeros, not empty: padding reads rows that were never written, and masking does not undo a NaN.
        self._keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]
        self._values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [tokens, KV heads, head size] at the cache rows `rows` [tokens]."""
        self._keys[layer].index_copy_(0, rows, keys)
        self._values[layer].index_copy_(0, rows, values)

    def copy_rows(self, sources: Tensor, destinations: Tensor) -> None:
        """Give the cache rows `destinations` [tokens] the keys and values of `sources` [tokens], in all layers.

        All sources are read before any is written. No row may be among the destinations twice.
        """
        for storage in (*self._keys, *self._values):
            storage.index_copy_(0, destinations, storage.index_select(0, sources))

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of sequences with the blocks `block_ids` [sequences, blocks].

        Each is [sequences, KV heads, blocks · tokens per block, head size], a transposed view of a fresh copy.
        """
        return self._gather(self._keys[layer], block_ids), self._gather(self._values[layer], block_ids)

    def _gather(self, storage: Tensor, block_ids: Tensor) -> Tensor:
        # Whole blocks as flat rows: index_select copies each in one piece (advanced indexing is six times slower).
        blocks = storage.view(self.num_blocks + 1, -1).index_select(0, block_ids.flatten())
        return blocks.view(block_ids.shape[0], -1, *self._heads).transpose(1, 2)
