"""RMS norm with the residual sum, and the gated product, against float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.torch.kernels.rows import add_rms_norm, swiglu
from tests.torch.kernels.comparing import DTYPES, assert_close
from tests.torch.kernels.references import add_rms_norm_reference, swiglu_reference

EPSILON = 1e-5
SIZES = [1, 33, 64, 1500]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norm_reference(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(hidden.double(), (hidden.shape[1],), weight.double(), EPSILON)


@pytest.mark.parametrize("norm", [add_rms_norm, add_rms_norm_reference])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_norm_of_the_sum(norm, dtype: torch.dtype, size: int, num_tokens: int, device: torch.device) -> None:
    hidden, added = (drawn((num_tokens, size), dtype, device, seed) for seed in (1, 2))
    weight = drawn((size,), dtype, device, 3)
    total = hidden.double() + added.double()
    normed = norm(hidden, added, weight, EPSILON)
    assert_close(normed, norm_reference(total, weight), dtype)
    assert_close(hidden, total, dtype)
    assert normed.dtype == dtype


@pytest.mark.parametrize("norm", [add_rms_norm, add_rms_norm_reference])
def test_norm_alone_does_not_change_its_input(norm, device: torch.device) -> None:
    hidden, weight = drawn((3, 70), torch.float32, device), drawn((70,), torch.float32, device, 3)
    before = hidden.clone()
    assert_close(norm(hidden, None, weight, EPSILON), norm_reference(before, weight), torch.float32)
    assert torch.equal(hidden, before)


def test_norm_of_rows_with_others_between(device: torch.device) -> None:
    """As in a slice of a wider tensor, where other columns must not change."""
    wide = drawn((4, 100), torch.float32, device)
    wide[:, 70:] = torch.nan
    weight, added = (drawn(shape, torch.float32, device, 3) for shape in ((70,), (4, 70)))
    total = wide[:, :70].double() + added.double()
    assert_close(add_rms_norm(wide[:, :70], added, weight, EPSILON), norm_reference(total, weight), torch.float32)
    assert wide[:, 70:].isnan().all()


@pytest.mark.parametrize("product", [swiglu, swiglu_reference])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_gated_product(product, dtype: torch.dtype, size: int, device: torch.device) -> None:
    gate_up = drawn((3, 2 * size), dtype, device)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(product(gate_up), functional.silu(gate) * up, dtype)


def test_gated_product_of_large_numbers(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=device)
    assert swiglu(gate_up).tolist() == [[0.0, 200.0]]


def test_no_rows(device: torch.device) -> None:
    nothing = torch.empty((0, 64), device=device)
    assert add_rms_norm(nothing, nothing, torch.ones(64, device=device), EPSILON).shape == (0, 64)
    assert swiglu(nothing).shape == (0, 32)
