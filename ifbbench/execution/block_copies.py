"""Runs the copies of blocks that a batch asks for, few kernels at a time."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ifbbench.engine.kv_cache.blocks import BlockCopy, CopyKind
from ifbbench.model.kv_cache import PagedKvCache
from ifbbench.model.to_device import to_device


def run_copies(copies: Sequence[BlockCopy], caches: Sequence[PagedKvCache], device: torch.device) -> None:
    """Do `copies` as if one by one, in their order. caches: that of each attention window.

    Whole blocks are copied, also where fewer of their tokens are wanted: what lies behind these is not read before it
    is written.
    """
    for together in independent_runs(copies):
        cache, kind = caches[together[0].window], together[0].kind
        sources = [copy.source for copy in together]
        destinations = [copy.destination for copy in together]
        if kind is CopyKind.DEVICE:
            cache.copy_blocks(*(to_device(np.array(blocks, np.int64), device) for blocks in (sources, destinations)))
        elif kind is CopyKind.OFFLOAD:
            cache.offload(sources, destinations)
        else:
            cache.onboard(sources, destinations)


def independent_runs(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Consecutive copies of one kind and window that may read all their sources before they write.

    A run ends where a copy reads what one of the run has written, or writes there again. (That it writes where one of
    the run has read does no harm.)
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
