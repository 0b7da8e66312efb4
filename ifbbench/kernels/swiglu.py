"""The gated product between the two halves of an MLP: silu(gate) · up (Shazeer, arXiv:2002.05202).

silu(x) = x / (1 + e^−x), in float32; the result is rounded once. A program has one stretch of one token.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ifbbench.kernels.launch import launching

COLUMNS_PER_PROGRAM = 1024


@triton.jit
def _swiglu_kernel(
    output: tl.tensor, gate_up: tl.tensor, output_stride: tl.tensor, gate_up_stride: tl.tensor, size: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = columns < size
    gate = tl.load(gate_up + token * gate_up_stride + columns, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * gate_up_stride + size + columns, mask=exists, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + token * output_stride + columns, product.to(output.dtype.element_ty), mask=exists)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, [tokens, size], of gate and up side by side, [tokens, 2 · size], those of a token contiguous.

    KernelError if it cannot run.
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((num_tokens, size))
    if num_tokens == 0:
        return output
    width = min(COLUMNS_PER_PROGRAM, triton.next_power_of_2(size))
    with launching("swiglu", gate_up=gate_up):
        _swiglu_kernel[(num_tokens, triton.cdiv(size, width))](
            output, gate_up, output.stride(0), gate_up.stride(0), size, WIDTH=width
        )
    return output


def swiglu_twin(gate_up: Tensor) -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)
