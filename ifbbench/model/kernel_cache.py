"""The paged KV cache with copies by a kernel: one or two launches for all layers."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ifbbench.kernels.row_copy import addresses, copy_rows, copy_rows_through, row_bytes
from ifbbench.model.config import ModelConfig
from ifbbench.model.kv_cache import PagedKvCache
from ifbbench.model.to_device import to_device


class KernelPagedCache(PagedKvCache):
    """`PagedKvCache` on a GPU. Blocks in host memory are read and written where they lie."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, tokens_per_block: int, device: torch.device, dtype: torch.dtype,
        *, kv_cache_dtype: torch.dtype | None = None, layers: Sequence[int] | None = None, num_host_blocks: int = 0,
    ) -> None:
        super().__init__(config, num_blocks, tokens_per_block, device, dtype, kv_cache_dtype=kv_cache_dtype,
                         layers=layers, num_host_blocks=num_host_blocks)  # fmt: skip
        pools = self._all()
        self._device = device
        self._row_bytes = row_bytes(pools[0])
        self._here = addresses(pools, device)
        self._there = addresses(self._host.pools, device) if self._host is not None else None

    def copy_rows(self, sources: Tensor, destinations: Tensor) -> None:
        """Give the cache rows `destinations` [tokens] the keys and values of `sources` [tokens], in all layers."""
        moves = torch.stack([sources, destinations, torch.ones_like(sources)], dim=1)
        copy_rows_through(self._here, self._here, moves, self._row_bytes, most_rows=1)

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Give the blocks `destinations` [blocks] the keys and values of the blocks `sources`, in all layers."""
        size = self.tokens_per_block
        moves = torch.stack([sources * size, destinations * size, torch.full_like(sources, size)], dim=1)
        copy_rows_through(self._here, self._here, moves, self._row_bytes, size)

    def offload(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Give each of `host_blocks`, all different, the keys and values of one of `blocks`, in all layers."""
        copy_rows(self._here, self._host_addresses(), self._moves(blocks, host_blocks), self._row_bytes,
                  self.tokens_per_block)  # fmt: skip

    def onboard(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Give each of `blocks`, all different, the keys and values of one of `host_blocks`, in all layers."""
        copy_rows(self._host_addresses(), self._here, self._moves(host_blocks, blocks), self._row_bytes,
                  self.tokens_per_block)  # fmt: skip

    def _host_addresses(self) -> Tensor:
        self._host_pool()  # ValueError if there is none
        assert self._there is not None
        return self._there

    def _moves(self, sources: Sequence[int], destinations: Sequence[int]) -> Tensor:
        size = self.tokens_per_block
        rows = [np.asarray(blocks, dtype=np.int64) * size for blocks in (sources, destinations)]
        moves = np.stack([*rows, np.full(len(rows[0]), size)], axis=1)
        return to_device(moves, self._device)
