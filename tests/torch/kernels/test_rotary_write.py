"""Rotary embedding in place and the write to a paged cache that is NaN elsewhere."""

import math

import pytest
import torch
from torch import Tensor

from ifbbench.torch.kernels.rows import rotate_and_write
from tests.torch.kernels.comparing import DTYPES, assert_close
from tests.torch.kernels.references import rotate_and_write_reference

BLOCKS, TOKENS_PER_BLOCK, POSITIONS = 5, 8, 12
BOTH = pytest.mark.parametrize("write", [rotate_and_write, rotate_and_write_reference])


def rotated(heads: Tensor, positions: Tensor, step: float) -> Tensor:
    """Each pair as a complex number, times e^(i · angle)."""
    first, second = heads.double().chunk(2, dim=-1)
    pairs = first.shape[-1]
    angles = positions.double()[:, None, None] * step / (1 + torch.arange(pairs, device=heads.device))
    result = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([result.real, result.imag], dim=-1)


class Case:
    """Tokens to rotate and store; `step` is the angle between positions of the fastest pair."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        num_tokens: int = 5,
        num_heads: int = 2,
        num_kv_heads: int = 1,
        size: int = 16,
        cache_dtype: torch.dtype | None = None,
        step: float = 0.3,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (num_tokens, num_heads + 2 * num_kv_heads, size)
        self.heads = torch.randn(shape, generator=generator).to(cache_dtype or dtype).to(device, dtype)
        angles = torch.arange(POSITIONS)[:, None] * step / (1 + torch.arange(size // 2))
        self.tables = angles.double().cos().float().to(device), angles.double().sin().float().to(device)
        self.positions = torch.randint(0, POSITIONS, (num_tokens,), generator=generator).to(device)
        self.rows = torch.randperm(BLOCKS * TOKENS_PER_BLOCK, generator=generator)[:num_tokens].to(device)
        cache_shape = (BLOCKS, TOKENS_PER_BLOCK, num_kv_heads, size)
        self.caches = [torch.full(cache_shape, torch.nan, device=device).to(cache_dtype or dtype) for _ in range(2)]
        self.before = self.heads.clone()
        self.parts = [num_heads, num_kv_heads, num_kv_heads]
        self.step = step

    def run(self, write, rotates: bool = True) -> None:
        write(self.heads, *self.tables, self.positions, self.rows, *self.caches, rotates=rotates)

    def check(self, dtype: torch.dtype, rotates: bool = True) -> None:
        queries, keys, values = self.before.split(self.parts, dim=1)
        if rotates:
            queries, keys = (rotated(part, self.positions, self.step) for part in (queries, keys))
        assert_close(self.heads, torch.cat([queries.double(), keys.double(), values.double()], dim=1), dtype)
        stored = self.rows >= 0
        for cache, expected in zip(self.caches, (keys, values), strict=True):
            flat = cache.flatten(0, 1).double()
            assert_close(flat[self.rows[stored]], expected[stored], dtype)
            others = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
            others[self.rows[stored]] = False
            assert flat[others].isnan().all()


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 16, 80, 96, 128])
def test_head_sizes_and_types(write, dtype: torch.dtype, size: int, device: torch.device) -> None:
    case = Case(device, dtype, size=size)
    case.run(write)
    case.check(dtype)


@BOTH
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (20, 4), (7, 7)])
def test_numbers_of_heads(write, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
    case = Case(device, num_heads=num_heads, num_kv_heads=num_kv_heads)
    case.run(write)
    case.check(torch.float32)


@BOTH
def test_tokens_without_a_place_are_rotated_but_not_stored(write, device: torch.device) -> None:
    case = Case(device)
    case.rows[1::2] = -1
    case.run(write)
    case.check(torch.float32)


@BOTH
def test_rotated_heads_are_only_stored(write, device: torch.device) -> None:
    case = Case(device)
    case.run(write, rotates=False)
    case.check(torch.float32, rotates=False)


@BOTH
def test_a_cache_in_another_order_of_dimensions(write, device: torch.device) -> None:
    """As in a contiguous cache, where the heads of a token are not adjacent."""
    case = Case(device, num_heads=4, num_kv_heads=2)
    case.caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in case.caches]
    case.run(write)
    case.check(torch.float32)


@BOTH
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bits(write, cache_dtype: torch.dtype, device: torch.device) -> None:
    """Quarter turns keep values that eight bits represent; values beyond the range become its limits."""
    case = Case(device, cache_dtype=cache_dtype, step=math.pi / 2, size=2)
    case.tables = (case.tables[0].round(), case.tables[1].round())
    case.run(write)
    case.check(torch.float32)
    case = Case(device, cache_dtype=cache_dtype, num_tokens=2)
    case.heads[:, -1, 0] = torch.tensor([1e6, -1e6])
    case.run(write, rotates=False)
    largest = torch.finfo(cache_dtype).max
    assert case.caches[1].flatten(0, 1).float()[case.rows, 0, 0].tolist() == [largest, -largest]


@BOTH
def test_no_tokens(write, device: torch.device) -> None:
    case = Case(device, num_tokens=0)
    case.run(write)
    assert all(cache.isnan().all() for cache in case.caches)
