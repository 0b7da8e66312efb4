"""The choice of tiles and splits, and the resources of kernels compiled for GPUs that are not present."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.torch.kernels.launch import MAX_SPLITS, SMALLEST_DOT, choose_num_splits, context_tiles, generation_tiles

REPOSITORY = Path(__file__).resolve().parents[3]
H100 = 132
# Shared memory of a program, in bytes, by compute capability.
MAX_SHARED = {90: 227 * 1024, 80: 163 * 1024, 86: 99 * 1024, 100: 227 * 1024, 120: 99 * 1024}
WITH_GROUP_PRODUCTS = (90, 100)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("value_bytes", [1, 2, 4])
@pytest.mark.parametrize("head_size", [8, 32, 64, 80, 96, 128, 256])
def test_tiles_are_powers_of_two_of_at_least_the_smallest_dot(
    head_size: int, value_bytes: int, capability: tuple[int, int]
) -> None:
    shapes = [generation_tiles(head_size, group, value_bytes) for group in (1, 3, 8, 16, 32)]
    shapes.append(context_tiles(head_size, max(2, value_bytes), capability))
    for shape in shapes:
        assert all(size >= SMALLEST_DOT and size & (size - 1) == 0 for size in (shape.rows, shape.keys))
    assert shapes[4].rows == 32


def test_splits_follow_the_work() -> None:
    assert choose_num_splits(8, 4096, 64 * 4096, H100) == 1
    assert choose_num_splits(8, 4096, 4096, H100) == 16
    assert choose_num_splits(8, 100, 100, H100) == 1
    assert choose_num_splits(8, 100_000, 100_000 + 200 * 500, H100) > 8
    assert choose_num_splits(1, 1_000_000, 1_000_000, H100) == MAX_SPLITS


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=50), st.integers(1, 32), st.integers(1, 200))
def test_splits_stay_in_bounds(lengths: list[int], num_kv_heads: int, num_multiprocessors: int) -> None:
    splits = choose_num_splits(num_kv_heads, max(lengths), sum(lengths), num_multiprocessors)
    assert 1 <= splits <= MAX_SPLITS


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


def compiled(cache: Path, gpus: list[int], head_sizes: list[int]) -> list[dict[str, object]]:
    """The output of `compile_only` in a process where Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "TRITON_CACHE_DIR": str(cache)}
    arguments = ["--gpus", *map(str, gpus), "--head_sizes", *map(str, head_sizes)]
    result = subprocess.run(
        [sys.executable, "-m", "tests.torch.kernels.compile_only", *arguments],
        cwd=REPOSITORY,
        text=True,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows: list[dict[str, object]] = json.loads(result.stdout)["results"]
    return rows


def check(rows: list[dict[str, object]]) -> None:
    """Each kernel fits into shared memory, and none in 16 bits spills registers. On Hopper and sm_100, products are
    those of groups of warps."""
    for row in rows:
        assert isinstance(row["shared"], int)
        assert isinstance(row["gpu"], int)
        assert row["shared"] <= MAX_SHARED[row["gpu"]], row
        is_16_bit = "float32" not in str(row["case"])
        assert row["stack"] == 0 or not is_16_bit, row
        if row["kernel"] == "_context_kernel" and is_16_bit:
            assert bool(row["group_products"]) == (row["gpu"] in WITH_GROUP_PRODUCTS), row


def test_every_kernel_fits_on_hopper_and_attention_on_blackwell(cache: Path) -> None:
    rows = compiled(cache, [90, 100, 120], [])
    for kernel in ("_context_kernel", "_generation_kernel", "_join_kernel"):
        assert {row["gpu"] for row in rows if row["kernel"] == kernel} == {90, 100, 120}
    assert {row["kernel"] for row in rows} == {
        "_context_kernel",
        "_generation_kernel",
        "_join_kernel",
        "_rotary_kernel",
        "_rms_norm_kernel",
        "_swiglu_kernel",
        "_choice_kernel",
        "_log_probs_kernel",
        "_copy_kernel",
        "_quantise_kernel",
    }
    check(rows)


@pytest.mark.slow
def test_every_head_size_fits_on_every_gpu(cache: Path) -> None:
    rows = compiled(cache, [*MAX_SHARED], [32, 64, 80, 96, 128, 256])
    assert {row["gpu"] for row in rows} == set(MAX_SHARED)
    check(rows)
