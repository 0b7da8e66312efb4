"""From logits to a batch's outputs: greedy and sampled tokens, candidates of beam search, and the log-probabilities and
logits that requests ask for.

A sampled token depends only on the request's seed, the output position and the logits. Its uniform number is a hash of
seed and position, so that neither the rest of the batch nor a pause changes the token.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.sampling_params import OutputOptions, SamplingParams, uniform_numbers
from ifbbench.torch.model.tensors import to_device, to_device_together
from ifbbench.torch.packing import Int64Array, PackedBatch

FloatArray = NDArray[np.float64]
# From logits [rows, vocabulary] and tokens, int64 [rows], to the tokens' log-probabilities, float32 [rows].
LogProbsOf = Callable[[Tensor, Tensor], Tensor]

# Limits the memory of the sorted copies of wide vocabularies: rows are sampled in groups of so many logits.
MAX_VALUES_AT_ONCE = 16_000_000
TINY_TEMPERATURE = np.finfo(np.float32).tiny
# Added to the scores of a prompt's surplus candidates if the vocabulary has fewer tokens than beam search asks for.
STAND_IN_SCORE = -1e9


class Sampler:
    """Sampling parameters of each slot's request, and the choice of tokens by them."""

    def __init__(self, num_slots: int) -> None:
        self._temperatures = np.zeros(num_slots)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._prompt_lengths = np.zeros(num_slots, dtype=np.int64)

    def assign(self, slot: int, params: SamplingParams, original_prompt_len: int) -> None:
        """Set the parameters of the request that now has `slot`."""
        self._temperatures[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._seeds[slot] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._prompt_lengths[slot] = original_prompt_len

    def choose(self, logits: Tensor, slots: Int64Array, positions: Int64Array) -> Tensor:
        """Token ids, int64 [rows], from logits [rows, vocabulary].

        slots: [rows], the slot of each row.
        positions: [rows], the position of each new token in its sequence.
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
        # Cumulated in the order of token ids: in the order of probability, rounding may swap neighbours.
        cumulative = self.probabilities(logits, slots).cumsum(dim=-1)
        targets = _column(self.uniforms(slots, positions), logits) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)

    def is_sampled(self, slots: Int64Array) -> NDArray[np.bool_]:
        """Which of the requests in `slots` take tokens at random."""
        is_sampled: NDArray[np.bool_] = self._temperatures[slots] > 0
        return is_sampled

    def probabilities(self, logits: Tensor, slots: Int64Array) -> Tensor:
        """The distribution, float64 [rows, vocabulary], from which requests that sample take their tokens.

        logits: [rows, vocabulary].
        slots: [rows], the slot of each row.
        """
        return self.kept(logits, slots).softmax(dim=-1, dtype=torch.float64)

    def kept(self, logits: Tensor, slots: Int64Array) -> Tensor:
        """Logits, float32 [rows, vocabulary], of the distributions that tokens are chosen from: divided by the
        temperature, and minus infinity for tokens that top-k and top-p exclude. A greedy row keeps the most likely."""
        # The largest logit becomes 0 before the division, and the temperature is above 0 in float32: no NaN.
        temperatures = np.maximum(self._temperatures[slots], TINY_TEMPERATURE)
        logits = logits.float()
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / _column(temperatures, logits).float()
        top_k, top_p = self._top_k[slots], self._top_p[slots]
        if top_k.any() or (top_p < 1.0).any():
            logits = keep_most_likely(logits, _column(top_k, logits), _column(top_p, logits))
        return logits

    def beam_log_probs(self, logits: Tensor, slots: Int64Array) -> Tensor:
        """Log-probabilities of beam search, float32 [rows, vocabulary]. A temperature of 0 is 1."""
        temperatures, logits = self._temperatures[slots], logits.float()
        if temperatures.any():
            divisors = np.where(temperatures > 0, np.maximum(temperatures, TINY_TEMPERATURE), 1.0)
            logits = (logits - logits.amax(dim=-1, keepdim=True)) / _column(divisors, logits).float()
        return logits.log_softmax(dim=-1)

    def uniforms(self, slots: Int64Array, positions: Int64Array, stream: int = 0) -> FloatArray:
        """One number in [0, 1) for each row. Those of another `stream` are independent."""
        return uniform_numbers(self._seeds[slots] ^ np.uint64(stream), positions - self._prompt_lengths[slots])


class KernelSampler(Sampler):
    """`Sampler` with one copy to the GPU and one Triton kernel for all rows: the host never waits for logits."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        # Triton is not installed everywhere.
        from ifbbench.torch.kernels.token_choice import choose_tokens

        self._choose_tokens = choose_tokens

    def choose(self, logits: Tensor, slots: Int64Array, positions: Int64Array) -> Tensor:
        """See `Sampler.choose`."""
        temperatures = self._temperatures[slots]
        # A positive temperature below float32's range must not become 0, which means greedy.
        temperatures = np.where(temperatures > 0, np.maximum(temperatures, TINY_TEMPERATURE), 0.0)
        narrow = temperatures.astype(np.float32), self._top_p[slots].astype(np.float32)
        # Sent as int32: one element for a number of four bytes, two for eight.
        columns = [values.view(np.int32) for values in (self.uniforms(slots, positions), *narrow)]
        uniform, temperature, top_p, top_k = to_device_together([*columns, self._top_k[slots]], logits.device)
        return self._choose_tokens(
            logits, temperature.view(torch.float32), top_k, top_p.view(torch.float32), uniform.view(torch.float64)
        )


def _column(values: FloatArray | Int64Array, like: Tensor) -> Tensor:
    """[rows, 1], on the device of `like`."""
    return to_device(values, like.device).unsqueeze(1)


def most_likely(logits: Tensor) -> Tensor:
    """The id of the largest logit of each row, int64 [rows]; the smallest of several."""
    if logits.device.type == "cpu":
        # NumPy's argmax is vectorised: ten times as fast as torch's.
        return torch.from_numpy(logits.float().numpy().argmax(axis=1))
    return logits.argmax(dim=-1)


def keep_most_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`logits` [rows, vocabulary] with all but the most likely tokens set to minus infinity.

    top_k: int64 [rows, 1], how many to keep, 0 for all.
    top_p: [rows, 1], the probability that the kept tokens must reach together after top_k; 1 keeps all. Tokens as
        likely as the last kept one are kept too.
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


def best_candidates(
    log_probs: Tensor, scores: Tensor, num_last_chunks: int, num_candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, beams and scores of the best continuations, each [outputs, candidates], best first.

    log_probs: float32 [last chunks + requests · beams, vocabulary].
    scores: float32 [requests, beams], of the beams so far. There are `num_candidates` candidates, or beams · vocabulary
        if that is less. Equal scores are ordered by beam and token. Candidates of a last chunk continue beam 0; if the
        vocabulary has too few tokens, they repeat with STAND_IN_SCORE added, as those of beams that do not exist yet.
    """
    vocabulary = log_probs.shape[1]
    num_requests, num_beams = scores.shape
    count = min(num_candidates, num_beams * vocabulary)
    first_scores, first_tokens = _best(log_probs[:num_last_chunks], min(count, vocabulary))
    indices = torch.arange(count, device=log_probs.device)
    first_scores = first_scores[:, indices % vocabulary] + (indices >= vocabulary) * STAND_IN_SCORE
    first_tokens = first_tokens[:, indices % vocabulary]

    totals = log_probs[num_last_chunks:].view(num_requests, num_beams, vocabulary) + scores.unsqueeze(2)
    next_scores, indices = _best(totals.flatten(1), count)
    return (
        torch.cat([first_tokens, indices % vocabulary]),
        torch.cat([torch.zeros_like(first_tokens), indices // vocabulary]),
        torch.cat([first_scores, next_scores]),
    )


def _best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row and their indices, both [rows, count]; equal values by ascending index."""
    largest = values.topk(count, dim=-1)
    # topk defines neither which of several equal values are last in the result, nor the order of equal values.
    least = largest.values[:, -1:]
    all_positions = torch.arange(values.shape[1], device=values.device)
    ties = torch.where(values == least, all_positions, len(all_positions) - 1).topk(count, dim=-1, largest=False).values
    num_above = (largest.values > least).sum(dim=-1, keepdim=True)
    ranks = torch.arange(count, device=values.device)
    nth_tie = ties.gather(1, (ranks - num_above).clamp(min=0))
    indices = torch.where(ranks < num_above, largest.indices, nth_tie).sort(dim=-1).values
    ordered, order = values.gather(1, indices).sort(dim=-1, descending=True, stable=True)
    return ordered, indices.gather(1, order)


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each row's token, on any device."""
    return logits.float().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


class OptionalOutputs:
    """The log-probabilities and generation logits that the request in each slot asks for."""

    def __init__(
        self, num_slots: int, log_probs_of: LogProbsOf = log_probs_of, normalised_by: Sampler | None = None
    ) -> None:
        """normalised_by: log-probabilities are those of the tokens that it chooses from (--normalize_log_probs)."""
        self._log_probs_of = log_probs_of
        self._normalised_by = normalised_by
        self._log_probs = np.zeros(num_slots, dtype=np.bool_)
        self._generation_logits = np.zeros(num_slots, dtype=np.bool_)
        self._asking: set[int] = set()  # slots; usually empty, which saves the look-ups below

    def assign(self, slot: int, options: OutputOptions) -> None:
        """Set what the request that now has `slot` asks for."""
        self._log_probs[slot] = options.return_log_probs
        self._generation_logits[slot] = options.return_generation_logits
        if options.return_log_probs or options.return_generation_logits:
            self._asking.add(slot)
        else:
            self._asking.discard(slot)

    def log_probs(self, logits: Tensor, processed: Tensor, tokens: Tensor, packed: PackedBatch) -> Tensor | None:
        """Log-probabilities, float32 [outputs], of `tokens` [outputs] by unmodified `logits` [outputs, vocabulary], or,
        normalised, by the distribution that they were chosen from, that of `processed` logits.

        0 for requests that did not ask; None if none did.
        """
        if not self._asking:
            return None
        slots = packed.output_slots
        rows = np.flatnonzero(self._log_probs[slots])
        if len(rows) == 0:
            return None
        if len(rows) == len(tokens) and self._normalised_by is None:
            return self._log_probs_of(logits, tokens)
        index = to_device(rows, logits.device)
        if self._normalised_by is None:
            wanted = logits.index_select(0, index)
        else:
            wanted = self._normalised_by.kept(processed.index_select(0, index), slots[rows])
        chosen = self._log_probs_of(wanted, tokens.index_select(0, index))
        return torch.zeros(len(tokens), device=logits.device).index_copy_(0, index, chosen)

    def generation_logits(self, logits: Tensor, packed: PackedBatch, beam_width: int) -> dict[int, Tensor]:
        """Index of an output -> its rows of `logits` [output rows, vocabulary], for the requests that asked.

        One row of a last chunk, `beam_width` rows of a generation request.
        """
        if not self._asking:
            return {}
        wanted = {}
        for output in np.flatnonzero(self._generation_logits[packed.output_slots]).tolist():
            request = output - packed.num_last_chunks
            first, count = (output, 1) if request < 0 else (packed.num_last_chunks + request * beam_width, beam_width)
            wanted[output] = logits[first : first + count]
        return wanted
