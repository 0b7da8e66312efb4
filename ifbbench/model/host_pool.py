"""Blocks of the KV cache in host memory."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ifbbench.model.to_device import to_device


class HostPool:
    """For each of the device's tensors one in host memory, [host blocks · tokens per block, KV heads, head size].

    For a CUDA device it is pinned, and all copies are put in line on the device's current stream, behind and before
    the batches that write and read the blocks; the host itself never reads the memory, so nobody need wait.
    """

    def __init__(self, pools: Sequence[Tensor], num_blocks: int) -> None:
        self.pools = pools
        self._num_blocks = num_blocks

    @classmethod
    def beside(cls, storages: Sequence[Tensor], num_blocks: int, tokens_per_block: int) -> "HostPool":
        """A pool of `num_blocks` blocks for the tensors `storages` [rows, KV heads, head size]."""
        pinned = any(storage.device.type == "cuda" for storage in storages)
        rows = num_blocks * tokens_per_block
        return cls([torch.zeros((rows, *storage.shape[1:]), dtype=storage.dtype, pin_memory=pinned)
                    for storage in storages], num_blocks)  # fmt: skip

    def store(self, storages: Sequence[Tensor], blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy `blocks` of each of `storages` [device blocks, values of a block] to `host_blocks`, all different."""
        order = np.argsort(host_blocks)
        sources = to_device(np.asarray(blocks, dtype=np.int64)[order], storages[0].device)
        runs = _runs(np.asarray(host_blocks, dtype=np.int64)[order])
        for pool, storage in zip(self.pools, storages, strict=True):
            chosen = storage.index_select(0, sources)
            in_blocks = pool.view(self._num_blocks, -1)
            for first, last, host in runs:
                in_blocks[host : host + last - first].copy_(chosen[first:last], non_blocking=True)

    def load(self, storages: Sequence[Tensor], host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy `host_blocks` to `blocks`, all different, of each of `storages` [device blocks, values of a block]."""
        order = np.argsort(host_blocks, kind="stable")
        device = storages[0].device
        destinations = to_device(np.asarray(blocks, dtype=np.int64)[order], device)
        runs = _runs(np.asarray(host_blocks, dtype=np.int64)[order])
        for pool, storage in zip(self.pools, storages, strict=True):
            in_blocks = pool.view(self._num_blocks, -1)
            pieces = [in_blocks[host : host + last - first].to(device, non_blocking=True) for first, last, host in runs]
            storage.index_copy_(0, destinations, torch.cat(pieces))


def _runs(blocks: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int, int]]:
    """Consecutive numbers in the ascending `blocks`, as (first index, index behind the last, first number)."""
    cuts = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    return [(first, last, int(blocks[first])) for first, last in pairwise(cuts)]
