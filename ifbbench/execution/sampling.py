"""How the next token is chosen from logits, for all rows of a batch at once.

A sampled token depends on (request seed, output position) and its logits alone, which a repetition penalty may have
changed by the tokens before. The uniform number behind it is a hash of seed and position, so neither the batch around a
request nor a pause changes what it says.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.sampling_params import SamplingParams
from ifbbench.model.tensors import to_device

Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]

# Rows are sampled a few at a time, so that the sorted copies of a wide vocabulary stay small.
MAX_VALUES_AT_ONCE = 16_000_000


class Sampler:
    """Sampling parameters of the request in each slot, and the choice of tokens by them."""

    def __init__(self, num_slots: int) -> None:
        self._temperatures = np.zeros(num_slots)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._prompt_lengths = np.zeros(num_slots, dtype=np.int64)

    def assign(self, slot: int, params: SamplingParams, original_prompt_len: int) -> None:
        """From now on `slot` belongs to a request with these parameters and this many prompt tokens."""
        self._temperatures[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._seeds[slot] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._prompt_lengths[slot] = original_prompt_len

    def choose(self, logits: Tensor, slots: Int64Array, positions: Int64Array) -> Tensor:
        """Token ids, int64 [rows], from logits [rows, vocabulary].

        slots: [rows], whose logits they are. positions: [rows], where each new token stands in its sequence.
        """
        greedy = most_likely(logits)
        (sampled,) = np.nonzero(self._temperatures[slots] > 0)
        if len(sampled) == 0:
            return greedy
        step = max(1, MAX_VALUES_AT_ONCE // logits.shape[1])
        for first in range(0, len(sampled), step):
            rows = sampled[first : first + step]
            index = to_device(rows, logits.device)
            tokens = self._sample(logits.index_select(0, index), slots[rows], positions[rows])
            greedy.index_copy_(0, index, tokens)
        return greedy

    def _sample(self, logits: Tensor, slots: Int64Array, positions: Int64Array) -> Tensor:
        def column(values: FloatArray | Int64Array) -> Tensor:
            return to_device(values, logits.device).unsqueeze(1)

        # The largest logit becomes 0 before division, and the temperature stays above 0 in float32, so that none,
        # however small, makes a NaN.
        temperatures = np.maximum(self._temperatures[slots], np.finfo(np.float32).tiny)
        logits = logits.float()
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / column(temperatures).float()
        top_k, top_p = self._top_k[slots], self._top_p[slots]
        if top_k.any() or (top_p < 1.0).any():
            logits = keep_most_likely(logits, column(top_k), column(top_p))
        uniforms = uniform_numbers(self._seeds[slots], positions - self._prompt_lengths[slots])
        # In the order of token ids, not of probability: rounding may swap neighbours there, and then the token.
        cumulative = logits.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
        targets = column(uniforms) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


def most_likely(logits: Tensor) -> Tensor:
    """The id of the largest logit of each row, int64 [rows]; the first one of equals."""
    if logits.device.type == "cpu":
        # NumPy's search is vectorised: ten times as fast as torch's.
        return torch.from_numpy(logits.float().numpy().argmax(axis=1))
    return logits.argmax(dim=-1)


def keep_most_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`logits` [rows, vocabulary] with all but the most likely tokens at minus infinity.

    top_k: int64 [rows, 1], how many to keep, 0 for all. top_p: [rows, 1], the probability that the kept ones must reach
    together, counted after top_k; 1 keeps all. Tokens as likely as the last kept one are kept too.
    """
    vocabulary = logits.shape[1]
    ordered = logits.sort(dim=-1, descending=True).values
    limits = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    ordered = ordered.masked_fill(torch.arange(vocabulary, device=logits.device) >= limits, -torch.inf)
    probabilities = ordered.softmax(dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = ((before < top_p) | (top_p >= 1.0)).sum(dim=-1, keepdim=True).clamp(min=1)
    least = ordered.gather(1, torch.minimum(kept, limits) - 1)
    return logits.masked_fill(logits < least, -torch.inf)


def uniform_numbers(seeds: NDArray[np.uint64], counters: Int64Array) -> FloatArray:
    """One number of [0, 1) for each (seed, counter), [rows]; equal pairs give equal numbers.

    The counters' place in the stream of a SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014) that starts at the
    mixed seed, with 53 bits kept.
    """
    gamma = np.uint64(0x9E37_79B9_7F4A_7C15)
    state = _mix(seeds + gamma) + (counters.astype(np.uint64) + np.uint64(1)) * gamma
    numbers: FloatArray = np.ldexp((_mix(state) >> np.uint64(11)).astype(np.float64), -53)
    return numbers


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))
