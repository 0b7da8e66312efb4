"""Attention of context chunks against float64, with NaN everywhere that must not be read."""

from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.torch.kernels.context_attention import context_attention
from ifbbench.torch.kernels.launch import SMALLEST_DOT, AttentionTiles, KernelError
from ifbbench.torch.model.attention_plan import QuerySpans
from ifbbench.torch.model.kernel_llama import plan_tiles
from tests.torch.kernels.comparing import DTYPES, assert_close
from tests.torch.kernels.references import context_attention_reference
from tests.torch.kernels.scenes import Heads, Scene

SMALL = AttentionTiles(rows=SMALLEST_DOT, keys=SMALLEST_DOT, warps=4, stages=1)
ALL = AttentionWindow(tokens_per_block=8)
Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
WINDOWS = {
    "linear": AttentionWindow(tokens_per_block=8, size=11, is_cyclic=False),
    "linear with sinks": AttentionWindow(tokens_per_block=8, size=12, sink=3, is_cyclic=False),
    "cyclic": AttentionWindow(tokens_per_block=8, size=11),
    "cyclic with sinks": AttentionWindow(tokens_per_block=8, size=13, sink=3),
    "sinks of whole blocks": AttentionWindow(tokens_per_block=8, size=20, sink=8, max_beam_width=2),
}


def inputs_of(scene: Scene, tiles: Tensor) -> Inputs:
    return scene.queries, scene.keys, scene.values, scene.key_cache, scene.value_cache, scene.block_tables, tiles


def check(scene: Scene, shape: AttentionTiles = SMALL) -> None:
    """Kernel and reference give the expected output and do not change other rows."""
    group = scene.heads.queries // scene.heads.keys
    tiles = torch.from_numpy(plan_tiles(scene.spans, shape.rows // group)).to(scene.device)
    inputs = inputs_of(scene, tiles)
    by_kernel, by_reference = scene.poisoned_output(), scene.poisoned_output()
    context_attention(*inputs, by_kernel, shape, window=scene.rule)
    context_attention_reference(*inputs, by_reference, window=scene.rule)
    for output in (by_kernel, by_reference):
        assert_close(output[:-1], scene.expected, scene.dtype)
        assert output[-1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
def test_head_sizes_and_types(size: int, dtype: torch.dtype, device: torch.device) -> None:
    check(Scene([0, 19], [9, 5], Heads(2, 1, size), ALL, dtype, device))


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (7, 1), (8, 1), (16, 1)], ids=str)
def test_grouped_queries(heads: tuple[int, int], device: torch.device) -> None:
    check(Scene([3, 0], [6, 1], Heads(*heads, 32), ALL, torch.float32, device))


@pytest.mark.parametrize("tokens_per_block", [8, 16, 32, 64, 128])
def test_block_sizes(tokens_per_block: int, device: torch.device) -> None:
    check(Scene([35, 130], [3, 7], Heads(), AttentionWindow(tokens_per_block), torch.float32, device))


@pytest.mark.parametrize("rule", WINDOWS.values(), ids=list(WINDOWS))
def test_windows(rule: AttentionWindow, device: torch.device) -> None:
    """Before, within and far beyond the window, also where the chunk will overwrite keys that it sees."""
    check(Scene([0, 2, 9, 33, 17], [30, 4, 6, 9, 1], Heads(), rule, torch.float32, device))


def test_larger_tiles_than_needed(device: torch.device) -> None:
    check(Scene([5, 0], [3, 40], Heads(4, 2, 32), ALL, torch.float32, device), AttentionTiles(64, 32, 4, 2))


def test_many_chunks_of_random_shape(device: torch.device) -> None:
    random = np.random.default_rng(3)
    cached, new = (random.integers(low, 20, 12).tolist() for low in (0, 1))
    check(Scene(cached, new, Heads(), ALL, torch.float32, device, seed=3))


def test_keys_in_eight_bits(device: torch.device) -> None:
    check(Scene([20, 0], [4, 9], Heads(), ALL, torch.float32, device, cache_dtype=torch.float8_e4m3fn))
    check(Scene([20, 0], [4, 9], Heads(), ALL, torch.bfloat16, device, cache_dtype=torch.float8_e4m3fn))


def test_a_batch_without_context(device: torch.device) -> None:
    scene = Scene([], [], Heads(), ALL, torch.float32, device)
    tiles = torch.from_numpy(plan_tiles(scene.spans, 8)).to(device)
    assert tiles.shape == (0, 5)
    output = scene.poisoned_output()
    context_attention(*inputs_of(scene, tiles), output, SMALL, ALL)
    assert output.isnan().all()


def test_large_numbers_stay_numbers(device: torch.device) -> None:
    scene = Scene([17], [5], Heads(), ALL, torch.float32, device)
    scene.queries.mul_(1e3)
    tiles = torch.from_numpy(plan_tiles(scene.spans, 8)).to(device)
    output = scene.poisoned_output()
    context_attention(*inputs_of(scene, tiles), output, SMALL, ALL)
    assert output[:-1].isfinite().all()


def test_tiles_cover_each_query_once_and_the_longest_come_first() -> None:
    spans = QuerySpans(*map(np.array, ([0, 7, 8], [7, 1, 9], [0, 30, 4], [5, 2, 0])))
    tiles = plan_tiles(spans, queries_per_tile=4)
    rows = np.concatenate([np.arange(row, row + count) for row, count, *_ in tiles.tolist()])
    assert sorted(rows.tolist()) == list(range(17))
    ends = tiles[:, 2] + tiles[:, 1]
    assert (np.diff(ends) <= 0).all()
    assert tiles[0].tolist() == [7, 1, 30, 30, 2]
    assert [8 + 8, 1, 12, 4, 0] in tiles.tolist()


def test_a_failure_names_kernel_and_shapes(device: torch.device) -> None:
    scene = Scene([0], [5], Heads(), ALL, torch.float32, device)
    tiles = torch.from_numpy(plan_tiles(scene.spans, 8)).to(device)
    with pytest.raises(KernelError, match=r"context_attention failed .*queries \[6, 2, 32\] float32"):
        context_attention(*inputs_of(scene, tiles), scene.poisoned_output(), AttentionTiles(16, 24, 4, 1), ALL)
