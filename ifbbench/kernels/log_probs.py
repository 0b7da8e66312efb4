"""Log-probabilities of chosen tokens, without the table of all of them.

log p(token) = logit − m − log Σ e^(logit' − m), m the largest logit, in float32. A program has one row, which it reads
once: a new maximum m' rescales the sum so far by e^(m − m') (Milakov and Gimelshein, arXiv:1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.kernels.launch import launching

TOKENS_AT_ONCE = 4096
# Tiles of logits that are loaded or looked at at once.
STAGES = tl.constexpr(3)


@triton.jit
def _log_probs_kernel(
    log_probs: tl.tensor, logits: tl.tensor, tokens: tl.tensor, logits_stride: tl.tensor, size: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * logits_stride
    # The first tile of a row is never empty, so the maximum is a number when it is subtracted from itself.
    highest = tl.full([], -3.4e38, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for first in tl.range(0, size, WIDTH, num_stages=STAGES):
        ids = first + tl.arange(0, WIDTH)
        values = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(values, 0))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(values - new_highest), 0)
        highest = new_highest
    chosen = tl.load(row + tl.load(tokens + number)).to(tl.float32)
    tl.store(log_probs + number, chosen - highest - tl.log(total))


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each row's token, float32 [rows].

    logits: [rows, vocabulary], those of a row contiguous. tokens: int64 [rows]. KernelError if it cannot run.
    """
    num_rows, size = logits.shape
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return log_probs
    with launching("log_probs_of", logits=logits, tokens=tokens):
        _log_probs_kernel[(num_rows,)](
            log_probs, logits, tokens, logits.stride(0), size,
            WIDTH=min(TOKENS_AT_ONCE, triton.next_power_of_2(size)), num_warps=8,
        )  # fmt: skip
    return log_probs


def log_probs_twin(logits: Tensor, tokens: Tensor) -> Tensor:
    """The same in plain torch."""
    return logits.float().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
