"""The choice of next tokens from logits (greedy, or by temperature, top-k and top-p), and log-probabilities of tokens.

A program of the choice processes one row. It finds the largest logit m, which is the result of a greedy row. In other
rows each token has a distance y = (m − logit) / temperature ≥ 0 and a weight e^−y. Top-k and top-p keep the tokens up
to some distance, which is found without sorting:

- top-k: the k-th smallest distance, which is the largest d such that fewer than k tokens are nearer than d. Tokens as
  near as the k-th are also kept.
- top-p: in the order of distance, a token is kept if those before it weigh less than p · (weight of the k nearest): the
  largest d such that the tokens nearer than d weigh less than that.

Both use the same search: non-negative floats have the order of their bits, so the bits of d are found in eight rounds
of four bits, each comparing all tokens with 16 limits.

The token is the first one, in the order of ids, at which the running sum of the kept weights exceeds uniform · total.
Weights are float32, that sum is float64; top-p sums in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.torch.kernels.launch import launching

# Tokens per step of a pass over the row: few steps, each with many loads in flight. Steps of the search are smaller,
# because it compares each token with 16 limits.
TOKENS_AT_ONCE = 4096
TOKENS_AT_ONCE_IN_SEARCH = 1024
# Tiles of logits that are loaded or processed at the same time. Each pass reads them again, from the L2 cache.
STAGES = tl.constexpr(3)


@triton.jit
def _distances(
    row: tl.tensor, ids: tl.tensor, size: tl.tensor, highest: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """Distance of the tokens `ids`, infinite beyond the vocabulary."""
    logits = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    return (highest - logits) / temperature


@triton.jit
def _reach(
    row: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    target: tl.tensor,
    IS_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Bits (uint32) of the largest distance d such that the tokens nearer than d number, or weigh, less than
    `target`."""
    reach = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1 << 28, tl.uint32)
    for _ in range(8):
        limits = reach + tl.arange(0, 16).to(tl.uint32) * unit
        sums = tl.zeros([16], tl.float32)
        for first in tl.range(0, size, WIDTH, num_stages=STAGES):
            distances = _distances(row, first + tl.arange(0, WIDTH), size, highest, temperature)
            weights = tl.exp(-distances) if IS_WEIGHT else tl.full([WIDTH], 1.0, tl.float32)
            is_nearer = distances.to(tl.uint32, bitcast=True)[None, :] < limits[:, None]
            sums += tl.sum(tl.where(is_nearer, weights[None, :], 0.0), 1)
        digit = tl.maximum(tl.sum((sums < target).to(tl.int32), 0) - 1, 0)
        reach += digit.to(tl.uint32) * unit
        unit = unit >> 4
    return reach


@triton.jit
def _weigh(
    row: tl.tensor, size: tl.tensor, highest: tl.tensor, temperature: tl.tensor, limit: tl.tensor, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Number and weight (float64) of the tokens whose distance has bits below `limit`."""
    count = tl.full([], 0, tl.int32)
    weight = tl.full([], 0.0, tl.float64)
    for first in tl.range(0, size, WIDTH, num_stages=STAGES):
        ids = first + tl.arange(0, WIDTH)
        distances = _distances(row, ids, size, highest, temperature)
        is_nearer = (distances.to(tl.uint32, bitcast=True) < limit) & (ids < size)
        count += tl.sum(is_nearer.to(tl.int32), 0)
        weight += tl.sum(tl.where(is_nearer, tl.exp(-distances), 0.0).to(tl.float64), 0)
    return count, weight


@triton.jit
def _kept_reach(
    row: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    WIDTH: tl.constexpr,
    SEARCH_WIDTH: tl.constexpr,
) -> tl.tensor:
    """Bits of the distance of the last tokens that top-k and top-p keep."""
    reach = tl.full([], 0x7F800000, tl.uint32)  # infinity
    has_top_k = (top_k > 0) & (top_k < size)
    if has_top_k:
        reach = _reach(row, size, highest, temperature, top_k.to(tl.float32), False, SEARCH_WIDTH)
    if top_p < 1.0:
        count, weight = _weigh(row, size, highest, temperature, reach, WIDTH)
        if has_top_k:
            # Tokens as far as the k-th count only until there are k of them.
            last = tl.exp(-reach.to(tl.float32, bitcast=True)).to(tl.float64)
            weight += (top_k - count).to(tl.float64) * last
        target = (weight * top_p).to(tl.float32)
        reach = tl.minimum(reach, _reach(row, size, highest, temperature, target, True, SEARCH_WIDTH))
    return reach


@triton.jit
def _sample(
    row: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    reach: tl.tensor,
    uniform: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """The first token at which the running sum of kept weights exceeds `uniform` of their total."""
    _, total = _weigh(row, size, highest, temperature, reach + 1, WIDTH)
    target = uniform * total
    token = size
    last_kept = tl.full([], 0, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    for first in tl.range(0, size, WIDTH, num_stages=STAGES):
        ids = first + tl.arange(0, WIDTH)
        distances = _distances(row, ids, size, highest, temperature)
        is_kept = (distances.to(tl.uint32, bitcast=True) <= reach) & (ids < size)
        weights = tl.where(is_kept, tl.exp(-distances), 0.0).to(tl.float64)
        # A parallel sum may fall from token to token through rounding; tokens without weight must not be chosen.
        passes = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
        token = tl.minimum(token, tl.min(tl.where(passes, ids, size), 0))
        last_kept = tl.maximum(last_kept, tl.max(tl.where(weights > 0.0, ids, 0), 0))
        before += tl.sum(weights, 0)
    # Rounding may leave the last sum below the target.
    return tl.minimum(token, last_kept)


@triton.jit
def _choice_kernel(
    tokens: tl.tensor,
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    uniforms: tl.tensor,
    logits_stride: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
    SEARCH_WIDTH: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * logits_stride
    highest = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for first in tl.range(0, size, WIDTH, num_stages=STAGES):
        ids = first + tl.arange(0, WIDTH)
        values = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        best = tl.max(values, 0)
        if best > highest:
            highest = best
            token = tl.min(tl.where(values == best, ids, size), 0)
    temperature = tl.load(temperatures + number)
    if temperature > 0.0:
        top_k, top_p = tl.load(top_ks + number), tl.load(top_ps + number)
        # At least the smallest normal number, because smaller ones are flushed to zero.
        temperature = tl.maximum(temperature, 1.1754943508222875e-38)
        reach = _kept_reach(row, size, highest, temperature, top_k, top_p, WIDTH, SEARCH_WIDTH)
        token = _sample(row, size, highest, temperature, reach, tl.load(uniforms + number), WIDTH)
    tl.store(tokens + number, token.to(tl.int64))


def choose_tokens(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """The next token of each row, int64 [rows].

    logits: [rows, vocabulary], those of a row contiguous.
    temperatures: float32 [rows], 0 for the most likely token (of equal ones the first).
    top_k: int32 [rows], 0 for all.
    top_p: float32 [rows], above 0; 1 for all.
    uniforms: float64 [rows], in [0, 1).

    KernelError if it cannot be run.
    """
    num_rows, size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    with launching("choose_tokens", logits=logits):
        _choice_kernel[(num_rows,)](
            tokens,
            logits,
            temperatures,
            top_k,
            top_p,
            uniforms,
            logits.stride(0),
            size,
            WIDTH=min(TOKENS_AT_ONCE, triton.next_power_of_2(size)),
            SEARCH_WIDTH=min(TOKENS_AT_ONCE_IN_SEARCH, triton.next_power_of_2(size)),
            num_warps=8,
        )
    return tokens


@triton.jit
def _log_probs_kernel(
    log_probs: tl.tensor,
    logits: tl.tensor,
    tokens: tl.tensor,
    logits_stride: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * logits_stride
    # Finite, so that the difference of two maxima is never NaN.
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
    """Log-probability of each row's token, float32 [rows], without the log-probabilities of all tokens.

    log p(token) = logit − m − log Σ e^(logit' − m), with m the largest logit, in float32. A program reads one row once:
    a new maximum m' rescales the sum so far by e^(m − m') (Milakov and Gimelshein, arXiv:1805.02867).

    logits: [rows, vocabulary], those of a row contiguous.
    tokens: int64 [rows].

    KernelError if it cannot be run.
    """
    num_rows, size = logits.shape
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return log_probs
    with launching("log_probs_of", logits=logits, tokens=tokens):
        _log_probs_kernel[(num_rows,)](
            log_probs,
            logits,
            tokens,
            logits.stride(0),
            size,
            WIDTH=min(TOKENS_AT_ONCE, triton.next_power_of_2(size)),
            num_warps=8,
        )
    return log_probs
