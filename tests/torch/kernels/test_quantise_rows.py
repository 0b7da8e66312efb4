"""Rows as eight-bit floats with a scale each, by the kernel and by PyTorch, against float64."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from ifbbench.torch.kernels import rows
from ifbbench.torch.model.linear import FP8, FP8_LIMIT, FP8_SMALLEST_MAXIMUM, fp8_rows

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]
quantise_rows = partial(rows.quantise_rows, dtype=FP8, smallest_maximum=FP8_SMALLEST_MAXIMUM)
BOTH = pytest.mark.parametrize("quantise", [quantise_rows, fp8_rows], ids=["kernel", "PyTorch"])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 33), (5, 1500)])
def test_values_are_kept_to_three_bits(
    quantise: Quantise, dtype: torch.dtype, num_rows: int, size: int, device: torch.device
) -> None:
    """Rows a thousand times larger than others have the same relative error."""
    drawn = torch.randn((num_rows, size), generator=torch.Generator().manual_seed(size))
    rows = (drawn * torch.logspace(-2, 2, num_rows).unsqueeze(1)).to(device, dtype)
    quantised, scales = quantise(rows)
    assert (quantised.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (num_rows, 1))
    wide, found = rows.double(), quantised.double() * scales.double()
    largest = wide.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(scales.double(), largest / FP8_LIMIT, rtol=1e-6, atol=0)
    # Half a unit of three bits; and below 2⁻⁶ scales, half of the smallest number, 2⁻⁹.
    allowed = torch.maximum(wide.abs() * 2**-4, scales.double() * 2**-10) * (1 + 1e-5)
    is_near = (found - wide).abs() <= allowed
    if quantise is quantise_rows and device.type == "cpu":
        is_near |= rounds_up_to_a_power_of_two(wide / scales.double())
    assert is_near.all()


def rounds_up_to_a_power_of_two(values: Tensor) -> Tensor:
    """Where Triton's interpreter (3.7) halves a value, because it drops the carry into the exponent."""
    rounded = values.abs().float().to(FP8).double()
    return (rounded >= values.abs()) & (rounded.frexp().mantissa == 0.5)


@BOTH
def test_rows_between_others_and_rows_of_zeros(quantise: Quantise, device: torch.device) -> None:
    wide = torch.full((4, 100), torch.nan, device=device)
    wide[:, :70] = torch.arange(70.0, device=device)
    wide[2, :70] = 0.0
    quantised, scales = quantise(wide[:, :70])
    assert quantised.shape == (4, 70)
    assert not quantised[2].float().any()
    assert quantised.float().isfinite().all()
    assert (quantised[[0, 1, 3], 69].float() == FP8_LIMIT).all()
    assert (scales > 0).all()


@BOTH
def test_no_rows(quantise: Quantise, device: torch.device) -> None:
    quantised, scales = quantise(torch.empty((0, 64), device=device))
    assert (quantised.shape, scales.shape) == ((0, 64), (0, 1))
