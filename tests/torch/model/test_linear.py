"""Matrix products with a fixed weight against float64, in every implementation."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ifbbench.torch.model import compiled, linear
from ifbbench.torch.model.compiled import load_cpu_kernels
from ifbbench.torch.model.linear import CpuLinear, Linear, OneDnnLinear, make_linear

DTYPES = {"float32": (torch.float32, 1e-6), "bf16": (torch.bfloat16, 4e-3)}
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.values(), ids=DTYPES.keys())


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_products(make: linear.MakeProduct, dtype: torch.dtype, tolerance: float) -> None:
    """Products of sizes around those of a tile, a panel and a group of tiles, with inputs that are no multiple of a
    step, and rows that are not contiguous."""
    for outputs, inputs in ((1, 1), (31, 7), (32, 64), (100, 129), (250, 48)):
        weight, bias = random(outputs, inputs, dtype=dtype, seed=1), random(outputs, dtype=dtype, seed=2)
        for given in (None, bias):
            product = make(weight, given)
            for num_rows in (0, 1, 2, 5, 6, 7, 13, 14, 15, 16, 29, 113, 260):
                rows = random(num_rows, inputs + 1, dtype=dtype)[:, 1:]
                expected = rows.double() @ weight.double().t() + (0 if given is None else given.double())
                found = product(rows)
                assert found.shape == expected.shape
                assert found.dtype == dtype
                error = float((found.double() - expected).norm())
                assert error <= tolerance * (1.0 + float(expected.norm())), (outputs, inputs, num_rows)


@each_dtype
def test_own_kernels(kernels: ctypes.CDLL, dtype: torch.dtype, tolerance: float) -> None:
    assert_products(lambda weight, bias: CpuLinear(kernels, weight, bias), dtype, tolerance)


@each_dtype
def test_onednn(dtype: torch.dtype, tolerance: float) -> None:
    if not linear._onednn_packs(dtype):
        pytest.skip("no packed products for this data type in this build of PyTorch, or on this processor")
    assert_products(OneDnnLinear, dtype, tolerance)


def test_plain_weights() -> None:
    assert_products(Linear, torch.float32, 1e-6)


def test_rows_do_not_depend_on_each_other(kernels: ctypes.CDLL) -> None:
    """Not even a NaN in another row changes a row."""
    product = CpuLinear(kernels, random(40, 33, dtype=torch.float32), None)
    rows = random(30, 33, dtype=torch.float32)
    alone = product(rows)
    rows[7] = torch.nan
    beside = product(rows)
    assert beside[7].isnan().all()
    others = torch.arange(30) != 7
    assert torch.equal(alone[others], beside[others])


@pytest.mark.parametrize(
    ("compiled", "packs", "has_matrix_units", "expected"),
    [
        (True, True, False, CpuLinear),
        (True, False, True, CpuLinear),
        (True, True, True, OneDnnLinear),
        (False, True, False, OneDnnLinear),
        (False, False, False, Linear),
    ],
)
def test_each_machine_gets_its_fastest_product(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, packs: bool, has_matrix_units: bool, expected: type
) -> None:
    kernels = load_cpu_kernels()
    if compiled and kernels is None:
        pytest.skip("no C compiler on this machine")
    if packs and not linear._onednn_packs(torch.float32):
        pytest.skip("no packed products in this build of PyTorch")
    monkeypatch.setattr(linear, "load_cpu_kernels", lambda: kernels if compiled else None)
    monkeypatch.setattr(linear, "_onednn_packs", lambda dtype: packs)
    monkeypatch.setattr(linear, "_has_matrix_units", lambda dtype: has_matrix_units)
    assert type(make_linear(torch.ones(2, 3))) is expected


def test_a_data_type_without_kernels() -> None:
    assert type(make_linear(torch.ones(2, 3, dtype=torch.float64))) is Linear


def test_no_memory_for_packed_rows() -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no C compiler on this machine")
    product = make_linear(torch.ones(2, 3))
    assert isinstance(product, CpuLinear)
    product._multiply = lambda *_: 1
    with pytest.raises(MemoryError, match="6 values"):
        product(torch.ones(2, 3))


def test_a_changed_source_is_recompiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = compiled._fingerprint("cc")
    for source in compiled.SOURCES.iterdir():
        (tmp_path / source.name).write_text(source.read_text())
    monkeypatch.setattr(compiled, "SOURCES", tmp_path)
    assert compiled._fingerprint("cc") == before
    with (tmp_path / "values.h").open("a") as file:
        file.write("/* changed */")
    assert compiled._fingerprint("cc") != before
