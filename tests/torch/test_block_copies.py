"""Copies of blocks: as if one by one in their order, in few pieces, and what they carry serves other sequences."""

import numpy as np
import pytest
import torch

from ifbbench.engine.batch import BlockCopy, CopyKind
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout, WindowLayout
from ifbbench.torch.cache_windows import copy_blocks, independent_copies
from ifbbench.torch.model.kv_cache import PagedKvCache
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.weights import random_weights
from tests.torch.driving import CPU, Driver, FakeRequest, layout_driver, requests_of
from tests.torch.test_attention_windows import SMALL

DEVICE, OFFLOAD, ONBOARD = CopyKind.DEVICE, CopyKind.OFFLOAD, CopyKind.ONBOARD
SIZE = 4


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return LlamaModel(SMALL, random_weights(SMALL, 3, CPU, torch.float32))


def numbered_cache(num_blocks: int, num_host_blocks: int, layers: tuple[int, ...]) -> PagedKvCache:
    """Each key is the number of its block plus 100 · its layer."""
    cache = PagedKvCache(SMALL, num_blocks, SIZE, CPU, torch.float32, layers=layers, num_host_blocks=num_host_blocks)
    for layer in layers:
        numbers = torch.arange(num_blocks).repeat_interleave(SIZE).view(-1, 1, 1).expand(-1, 2, 8) + 100.0 * layer
        cache.write(layer, torch.arange(num_blocks * SIZE), numbers, -numbers)
    return cache


@pytest.mark.parametrize("seed", range(8))
def test_copies_are_as_if_one_by_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    caches = [numbered_cache(6, 5, (0, 2)), numbered_cache(4, 3, (1,))]
    device = [np.arange(6), np.arange(4)]
    host = [np.zeros(5, int), np.zeros(3, int)]
    stored = [set[int](), set[int]()]
    copies = []
    for _ in range(60):
        window, kind = int(random.integers(2)), [DEVICE, OFFLOAD, ONBOARD][random.integers(3)]
        if kind is ONBOARD and not stored[window]:
            continue
        near, far = device[window], host[window]
        source = int(random.choice(sorted(stored[window])) if kind is ONBOARD else random.integers(len(near)))
        destination = int(random.integers(len(far) if kind is OFFLOAD else len(near)))
        (far if kind is OFFLOAD else near)[destination] = (far if kind is ONBOARD else near)[source]
        if kind is OFFLOAD:
            stored[window].add(destination)
        copies.append(BlockCopy(kind, source, destination, SIZE, window))
    copy_blocks(copies, caches, CPU)
    for window, layers in enumerate(((0, 2), (1,))):
        expected = torch.from_numpy(device[window]).repeat_interleave(SIZE).float()
        for layer in layers:
            keys, values = caches[window].gather(layer, torch.arange(len(device[window])).view(1, -1))
            assert torch.equal(keys[0, 1, :, 3], expected + 100 * layer)
            assert torch.equal(keys, -values)


def test_independent_copies_go_together() -> None:
    def lengths(*pairs: tuple[CopyKind, int, int]) -> list[int]:
        return [len(run) for run in independent_copies([BlockCopy(*pair, SIZE) for pair in pairs])]

    assert lengths() == []
    assert lengths((DEVICE, 0, 1), (DEVICE, 2, 3), (DEVICE, 4, 0)) == [3]
    assert lengths((DEVICE, 0, 1), (DEVICE, 1, 2), (DEVICE, 5, 4)) == [1, 2]
    assert lengths((DEVICE, 0, 1), (DEVICE, 2, 1)) == [1, 1]
    assert lengths((OFFLOAD, 7, 2), (OFFLOAD, 2, 3), (ONBOARD, 3, 7), (ONBOARD, 2, 3)) == [2, 2]


def test_host_copies_need_host_blocks() -> None:
    with pytest.raises(ValueError, match="no host blocks"):
        copy_blocks([BlockCopy(OFFLOAD, 0, 0, SIZE)], [numbered_cache(2, 0, (0,))], CPU)


def driver_with_host(model: LlamaModel) -> Driver:
    """Two windows, of layers 0 and 2 and of layer 1; slots of ten blocks and a host pool in each."""
    attention_window = AttentionWindow(SIZE, 40, 40)
    windows = (WindowLayout((0, 2), attention_window, 30, 10), WindowLayout((1,), attention_window, 30, 10))
    return layout_driver(model, CacheLayout(windows), 3)


def two_with_a_common_prefix(common: int) -> tuple[FakeRequest, FakeRequest]:
    first, second = requests_of([(23, 4), (20, 6)], SMALL.vocab_size)
    second.prompt[:common] = first.prompt[:common]
    first.slot, second.slot = 0, 1
    return first, second


@pytest.mark.parametrize("common", [1, 3, 4, 10, 12, 19])
@pytest.mark.parametrize("last_chunk", [None, 1])
def test_prompts_start_behind_what_was_copied(model: LlamaModel, common: int, last_chunk: int | None) -> None:
    alone = two_with_a_common_prefix(common)[1]
    driver_with_host(model).run([alone])

    driver = driver_with_host(model)
    first, second = two_with_a_common_prefix(common)
    driver.step([(first, 23)], [])
    full, rest = divmod(common, SIZE)
    copies = []
    for window, tables in enumerate((driver.own_blocks[:, 0], driver.window_tables[0][:, 0])):
        tables[1, :full] = tables[0, :full]  # shared; a partial block is copied
        if rest:
            copies.append(BlockCopy(DEVICE, int(tables[0, full]), int(tables[1, full]), rest, window))
    driver.copies = tuple(copies)
    second.computed = common
    if last_chunk:
        driver.step([(second, 19 - common)] if common < 19 else [], [first])
    driver.step([(second, second.prompt_len - second.computed)], [first])
    while not second.is_done:
        driver.step([], [second])
    assert second.outputs == alone.outputs


def test_blocks_come_back_from_the_host(model: LlamaModel) -> None:
    alone = two_with_a_common_prefix(16)[1]
    driver_with_host(model).run([alone])

    driver = driver_with_host(model)
    first, second = two_with_a_common_prefix(16)
    all_tables = (driver.own_blocks[:, 0], driver.window_tables[0][:, 0])
    driver.step([(first, 23)], [])
    host = [7, 2, 3, 9]
    driver.copies = tuple(
        BlockCopy(OFFLOAD, int(block), host[index], SIZE, window)
        for window, tables in enumerate(all_tables)
        for index, block in enumerate(tables[0, :4])
    )
    driver.step([], [])  # copies are done also where there is nothing to compute
    (third,) = requests_of([(30, 2)], SMALL.vocab_size, seed=9)
    third.slot = 0
    driver.step([(third, 30)], [])
    driver.copies = tuple(
        BlockCopy(ONBOARD, host[index], int(block), SIZE, window)
        for window, tables in enumerate(all_tables)
        for index, block in enumerate(tables[1, :4])
    )
    second.computed = 16
    driver.step([(second, 4)], [third])
    while not second.is_done:
        driver.step([], [second])
    assert second.outputs == alone.outputs
