"""Copies of the cache by kernels give the same content as by PyTorch."""

from collections.abc import Callable

import pytest
import torch

from ifbbench.models.config import ModelConfig
from ifbbench.torch.model.kernel_llama import KernelPagedCache
from ifbbench.torch.model.kv_cache import PagedKvCache

CONFIG = ModelConfig(
    vocab_size=1,
    hidden_size=1,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=1,
    max_position_embeddings=1,
)
BLOCKS, TOKENS_PER_BLOCK, HOST_BLOCKS = 6, 8, 4


def after(
    cache_class: type[PagedKvCache],
    device: torch.device,
    work: Callable[[PagedKvCache], None],
    kv_cache_dtype: torch.dtype | None = None,
) -> list[list[list[float]]]:
    """Content of a cache of random values after `work`, layer by layer."""
    cache = cache_class(
        CONFIG,
        BLOCKS,
        TOKENS_PER_BLOCK,
        device,
        torch.float32,
        kv_cache_dtype=kv_cache_dtype,
        num_host_blocks=HOST_BLOCKS,
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(BLOCKS * TOKENS_PER_BLOCK, device=device)
    for layer in range(CONFIG.num_layers):
        keys, values = (torch.randn((len(rows), 2, 8), generator=generator).to(device) for _ in range(2))
        cache.write(layer, rows, keys, values)
    work(cache)
    return [part.float().flatten().tolist() for layer in range(CONFIG.num_layers) for part in cache.blocks(layer)]


def swapped_blocks(cache: PagedKvCache) -> None:
    places = [torch.tensor(blocks, device=cache.blocks(0)[0].device) for blocks in ([0, 3, 5], [3, 0, 1])]
    cache.copy_blocks(*places)


def swapped_rows(cache: PagedKvCache) -> None:
    places = [torch.tensor(rows, device=cache.blocks(0)[0].device) for rows in ([0, 17, 40, 41], [17, 0, 41, 2])]
    cache.copy_rows(*places)


def round_trip(cache: PagedKvCache) -> None:
    cache.offload([2, 0, 5], [3, 1, 0])
    swapped_blocks(cache)
    cache.onboard([1, 1, 3], [4, 5, 0])


@pytest.mark.parametrize("work", [swapped_blocks, swapped_rows, round_trip])
@pytest.mark.parametrize("kv_cache_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_copies(work, kv_cache_dtype: torch.dtype | None, device: torch.device) -> None:
    by_torch, by_kernels = (
        after(cache_class, device, work, kv_cache_dtype) for cache_class in (PagedKvCache, KernelPagedCache)
    )
    assert by_kernels == by_torch
    assert by_kernels != after(PagedKvCache, device, lambda cache: None, kv_cache_dtype)


def test_without_host_blocks_there_is_no_round_trip(device: torch.device) -> None:
    cache = KernelPagedCache(CONFIG, BLOCKS, TOKENS_PER_BLOCK, device, torch.float32)
    with pytest.raises(ValueError, match="no host blocks"):
        cache.offload([0], [0])
