"""Copies of rows in all layers: whole blocks, parts of blocks, beams, and to and from host memory."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ifbbench.torch.kernels import rows
from ifbbench.torch.kernels.rows import addresses, copy_rows, copy_rows_buffered, row_bytes
from tests.torch.kernels.references import copy_rows_reference

ROWS = 40


def pools_of(device: torch.device, dtype: torch.dtype = torch.float32, heads: int = 2, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn((ROWS, heads, size), generator=generator).to(device, dtype) for _ in range(3)]


def expected_after(pools: list[Tensor], moves: list[tuple[int, int, int]]) -> list[Tensor]:
    results = [pool.clone() for pool in pools]
    for source, destination, count in moves:
        for pool, result in zip(pools, results, strict=True):
            result[destination : destination + count] = pool[source : source + count]
    return results


def check(copy, pools: list[Tensor], moves: list[tuple[int, int, int]]) -> None:
    device = pools[0].device
    expected = expected_after(pools, moves)
    places = addresses(pools, device)
    max_rows = max(count for _, _, count in moves)
    copy(places, places, torch.tensor(moves, device=device), row_bytes(pools[0]), max_rows)
    for pool, result in zip(pools, expected, strict=True):
        assert torch.equal(pool.view(torch.uint8), result.view(torch.uint8))


@pytest.mark.parametrize("copy", [copy_rows, copy_rows_buffered])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 8), (torch.bfloat16, 5), (torch.float8_e4m3fn, 6)])
def test_blocks_and_parts_of_blocks(copy, dtype: torch.dtype, size: int, device: torch.device) -> None:
    check(copy, pools_of(device, dtype, size=size), [(0, 8, 8), (16, 24, 5), (3, 39, 1), (4, 30, 0)])


@pytest.mark.parametrize("copy", [copy_rows, copy_rows_buffered])
def test_rows_larger_than_a_piece(copy, device: torch.device) -> None:
    check(copy, pools_of(device, heads=4, size=300), [(0, 8, 8), (16, 24, 5)])


def test_places_that_are_read_and_written(device: torch.device) -> None:
    """Beams that swap: every source is read before any destination is written."""
    check(copy_rows_buffered, pools_of(device), [(0, 8, 8), (8, 0, 8), (16, 17, 6), (24, 16, 1)])


def test_many_random_swaps(device: torch.device) -> None:
    order = np.random.default_rng(2).permutation(ROWS)
    check(copy_rows_buffered, pools_of(device), [(int(source), row, 1) for row, source in enumerate(order)])


@pytest.mark.parametrize("pools_at_once", [1, 2])
def test_a_small_buffer_takes_some_pools_at_a_time(
    pools_at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BUFFER_BYTES", pools_at_once * 2 * 8 * row_bytes(pools_of(device)[0]))
    check(copy_rows_buffered, pools_of(device), [(0, 8, 8), (8, 0, 8)])


def test_more_moves_than_the_shorter_axes_of_a_grid_have(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, int, int]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(rows, "_copy_kernel", Kernel())
    places = torch.zeros(2, dtype=torch.int64, device=device)
    copy_rows(places, places, torch.zeros((100_000, 3), dtype=torch.int64, device=device), 4096, 32)
    assert grids == [(100_000, 16, 2)]


def test_the_reference_reads_before_it_writes(device: torch.device) -> None:
    pools = pools_of(device)
    moves = [(0, 8, 8), (8, 0, 8)]
    expected = expected_after(pools, moves)
    copy_rows_reference(pools, pools, torch.tensor(moves))
    assert all(torch.equal(pool, result) for pool, result in zip(pools, expected, strict=True))


def test_a_round_trip_through_host_memory(device: torch.device) -> None:
    pools = pools_of(device)
    kept = [pool.clone() for pool in pools]
    host = [torch.full((16, 2, 8), torch.nan, pin_memory=device.type == "cuda") for _ in pools]
    here, there = addresses(pools, device), addresses(host, device)
    away = torch.tensor([[8, 0, 8], [32, 8, 6]], device=device)
    back = torch.tensor([[0, 24, 8], [8, 0, 6]], device=device)
    copy_rows(here, there, away, row_bytes(pools[0]), 8)
    for pool in pools:
        pool[8:16] = torch.nan
    copy_rows(there, here, back, row_bytes(pools[0]), 8)
    for pool, before in zip(pools, kept, strict=True):
        assert torch.equal(pool[24:32], before[8:16])
        assert torch.equal(pool[:6], before[32:38])
        assert torch.equal(pool[6:8], before[6:8])


def test_no_moves(device: torch.device) -> None:
    pools = pools_of(device)
    places = addresses(pools, device)
    nothing = torch.empty((0, 3), dtype=torch.int64, device=device)
    copy_rows(places, places, nothing, row_bytes(pools[0]), 8)
    copy_rows_buffered(places, places, nothing, row_bytes(pools[0]), 8)


def test_rows_that_are_no_multiple_of_a_word_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="rows of 6 bytes"):
        row_bytes(torch.zeros((4, 1, 3), dtype=torch.float16, device=device))
