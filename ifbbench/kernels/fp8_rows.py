"""Rows of numbers as eight-bit floats with a scale each, in plain torch: all who need no Triton can make weights so.

With a = max |x| of a row, its scale is s = a / 448, where 448 is the largest number of e4m3 (Micikevicius et al., FP8
formats for deep learning, arXiv:2209.05433), and each value is stored as round(x / s): three bits behind the point, so
an error of at most 2⁻⁴ of the value, down to 2⁻⁶ · s.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# A row of nothing but zeros has a scale all the same.
SMALLEST_MAXIMUM = 1e-12


def fp8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [rows, size] as e4m3 and the scales, float32 [rows, 1]: each row is about its values times its scale."""
    values = rows.float()
    scales = values.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST_MAXIMUM) / LARGEST
    return (values / scales).clamp(-LARGEST, LARGEST).to(FP8), scales
