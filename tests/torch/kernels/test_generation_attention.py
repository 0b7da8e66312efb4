"""Attention of generation tokens against float64, with NaN everywhere that must not be read."""

import pytest
import torch

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.torch.kernels.generation_attention import generation_attention
from ifbbench.torch.kernels.launch import SMALLEST_DOT, AttentionTiles
from tests.torch.kernels.comparing import DTYPES, assert_close
from tests.torch.kernels.references import generation_attention_reference
from tests.torch.kernels.scenes import Heads, Scene
from tests.torch.kernels.test_context_attention import ALL, WINDOWS

SMALL = AttentionTiles(rows=SMALLEST_DOT, keys=SMALLEST_DOT, warps=4, stages=1)


def scene_of(
    cached: list[int],
    heads: Heads,
    rule: AttentionWindow,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
) -> Scene:
    return Scene(cached, [1] * len(cached), heads, rule, dtype, device, is_written=True, cache_dtype=cache_dtype)


def check(scene: Scene, num_splits: int = 1, shape: AttentionTiles = SMALL) -> None:
    """Kernel and reference give the expected output. Table rows are in another order than sequences."""
    order = torch.arange(len(scene.cached) - 1, -1, -1)
    lengths = (torch.tensor(scene.cached) + 1).int()[order].to(scene.device)
    table_rows = order.int().to(scene.device)
    queries = scene.queries[:-1][order.to(scene.device)]
    inputs = (queries, scene.key_cache, scene.value_cache, scene.block_tables, table_rows, lengths)
    by_kernel, by_reference = (scene.poisoned_output()[:-1] for _ in range(2))
    generation_attention(*inputs, by_kernel, shape, num_splits, window=scene.rule)
    generation_attention_reference(*inputs, by_reference, window=scene.rule)
    for output in (by_kernel, by_reference):
        assert_close(output, scene.expected[order], scene.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_head_sizes_and_types(size: int, dtype: torch.dtype, num_splits: int, device: torch.device) -> None:
    check(scene_of([37, 0], Heads(2, 1, size), ALL, dtype, device), num_splits)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (7, 1), (8, 1)], ids=str)
def test_grouped_queries(heads: tuple[int, int], device: torch.device) -> None:
    check(scene_of([20, 3, 15], Heads(*heads, 32), ALL, torch.float32, device), num_splits=2)


def test_more_query_heads_than_the_smallest_tile_has_rows(device: torch.device) -> None:
    check(scene_of([20], Heads(20, 1, 32), ALL, torch.float32, device), shape=AttentionTiles(32, 16, 4, 1))


@pytest.mark.parametrize("tokens_per_block", [8, 16, 32, 64, 128])
def test_block_sizes(tokens_per_block: int, device: torch.device) -> None:
    rule = AttentionWindow(tokens_per_block)
    check(scene_of([35, 130], Heads(), rule, torch.float32, device), 2, AttentionTiles(16, 32, 4, 1))


@pytest.mark.parametrize("rule", WINDOWS.values(), ids=list(WINDOWS))
@pytest.mark.parametrize("num_splits", [1, 4])
def test_windows(rule: AttentionWindow, num_splits: int, device: torch.device) -> None:
    check(scene_of([0, 2, 9, 12, 33, 17], Heads(), rule, torch.float32, device), num_splits)


@pytest.mark.parametrize("num_splits", [2, 5, 16])
def test_parts_without_keys_are_not_read(num_splits: int, device: torch.device) -> None:
    check(scene_of([70, 0, 16, 31], Heads(), ALL, torch.float32, device), num_splits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_in_eight_bits(dtype: torch.dtype, device: torch.device) -> None:
    check(scene_of([20, 3], Heads(), ALL, dtype, device, cache_dtype=torch.float8_e4m3fn))


def test_padding_of_length_zero_gives_zeros(device: torch.device) -> None:
    scene = scene_of([20, 3], Heads(), ALL, torch.float32, device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    for num_splits in (1, 3):
        output = scene.poisoned_output()[:-1]
        generation_attention(
            scene.queries[:-1],
            scene.key_cache,
            scene.value_cache,
            scene.block_tables,
            lengths,
            lengths,
            output,
            SMALL,
            num_splits,
            ALL,
        )
        assert not output.any()


def test_an_empty_batch(device: torch.device) -> None:
    scene = scene_of([], Heads(), ALL, torch.float32, device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    output = scene.poisoned_output()
    generation_attention(
        scene.queries[:0],
        scene.key_cache,
        scene.value_cache,
        scene.block_tables,
        nothing,
        nothing,
        output[:0],
        SMALL,
        1,
        ALL,
    )
    assert output.isnan().all()
