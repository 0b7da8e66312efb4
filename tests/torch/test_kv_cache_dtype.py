"""Keys and values stored in another data type than the model's."""

import pytest
import torch

from ifbbench.engine.batch import BlockCopy, CopyKind
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout, WindowLayout
from ifbbench.settings.config import RunConfig
from ifbbench.torch import build
from ifbbench.torch.build import KV_CACHE_DTYPES
from ifbbench.torch.cache_windows import one_window_layout
from ifbbench.torch.model.kv_cache import ContiguousKvCache, PagedKvCache
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.weights import random_weights
from tests.torch.driving import CPU, layout_driver
from tests.torch.test_attention_windows import SMALL, asking_requests

# Largest relative error of a stored value: half a unit in the last place.
PRECISIONS = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float8_e4m3fn: 2**-4}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_values_are_cast_on_the_way_in_and_out(dtype: torch.dtype, is_contiguous: bool) -> None:
    make = ContiguousKvCache if is_contiguous else PagedKvCache
    cache = make(SMALL, 2, 8, CPU, torch.float32, kv_cache_dtype=dtype)
    keys = torch.randn(8, 2, 8) + 3
    keys[3, 1, 2] = 1e30
    cache.write(1, torch.arange(8), keys, -keys)
    cache.copy_rows(torch.arange(8), torch.arange(8, 16))
    for found, negative in (cache.gather(1, torch.tensor([[1]]), 8), cache.gather_rows(1, torch.arange(8, 16)[None])):
        assert found.dtype == torch.float32
        assert torch.equal(found, -negative)
        expected = keys.transpose(0, 1)[None].clamp(max=torch.finfo(dtype).max)
        torch.testing.assert_close(found, expected, rtol=PRECISIONS[dtype], atol=2e-2 * PRECISIONS[dtype])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float8_e4m3fn, 1.0)])
@pytest.mark.parametrize(("window", "is_contiguous"), [(80, False), (80, True), (14, False)])
def test_logits_are_near_those_of_a_full_cache(
    dtype: torch.dtype, tolerance: float, window: int, is_contiguous: bool
) -> None:
    model = LlamaModel(SMALL, random_weights(SMALL, 3, CPU, torch.float32))
    logits = []
    for stored in (None, dtype):
        layout = CacheLayout((WindowLayout((0, 1, 2), AttentionWindow(4, window, 80), 60),), is_contiguous)
        requests = asking_requests([(37, 2), (50, 2)])
        layout_driver(model, layout, 3, kv_cache_dtype=stored).run(requests, largest_chunk=9)
        found = [torch.from_numpy(request.numbers.context_logits) for request in requests]
        logits.append(torch.cat(found))
    assert not torch.equal(*logits)
    assert (logits[0] - logits[1]).abs().max() < tolerance


def test_host_blocks_hold_what_the_device_holds() -> None:
    model = LlamaModel(SMALL, random_weights(SMALL, 3, CPU, torch.float32))
    layout = CacheLayout((WindowLayout((0, 1, 2), AttentionWindow(4, 80, 80), 60, num_host_blocks=2),))
    driver = layout_driver(model, layout, 3, kv_cache_dtype=torch.float8_e4m3fn)
    (request,) = asking_requests([(4, 1)])
    request.slot = 0
    driver.step([(request, 4)], [])
    (window,) = driver.executor._cache.windows
    block, other = int(driver.tables[0, 0, 0]), int(driver.tables[1, 0, 0])
    driver.copies = (BlockCopy(CopyKind.OFFLOAD, block, 1, 4), BlockCopy(CopyKind.ONBOARD, 1, other, 4))
    driver.step([], [])
    keys, _ = window.cache.gather(0, torch.tensor([[block], [other]]), 4)
    assert keys.any()
    assert torch.equal(keys[0], keys[1])


@pytest.mark.parametrize("name", [None, *KV_CACHE_DTYPES])
def test_executors_by_the_names_of_data_types(name: str | None) -> None:
    loaded = build.load_model(RunConfig(dtype="float32", device="cpu"))
    executor = build.make_executor(loaded, 2, 64, layout=one_window_layout(loaded.config, 4, 16), kv_cache_dtype=name)
    (window,) = executor._cache.windows
    keys, _ = window.cache.gather(0, torch.zeros(1, 1, dtype=torch.int64), 16)
    assert (keys.shape, keys.dtype) == ((1, 4, 16, 32), torch.float32)
    executor.close()
