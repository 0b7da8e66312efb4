"""How far a kernel's numbers may be from those of a float64 reference."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Largest relative norm of the difference. A bfloat16 has 8 bits; the interpreter cuts off where a GPU rounds.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """`actual` is as near to `expected` as results in `dtype` can be. A NaN is near to nothing."""
    assert actual.shape == expected.shape
    assert expected.numel() > 0
    difference = (actual.double().cpu() - expected.double().cpu()).norm() / expected.double().norm().cpu()
    assert difference <= TOLERANCES[dtype], f"relative difference {difference:.2e}"
