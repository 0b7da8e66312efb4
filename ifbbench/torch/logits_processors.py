"""Changes of logits before a token is chosen: embedding bias, penalties, bad words, and the minimum length.

They are those of `transformers`, in its order and in float32; presence and frequency penalty, which it lacks, are those
of TensorRT-LLM. In beam search they change log-probabilities, as in `transformers`.

What they need of each sequence stays on the device, so that a step need not wait for the tokens of the one before.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import BeamInputs
from ifbbench.engine.sampling_params import SamplingParams
from ifbbench.torch.model.tensors import to_device
from ifbbench.torch.packing import Int64Array

# In the prefixes of bad words: matches any token. In a history: before the sequence begins; matches no token.
ANY_TOKEN, NO_TOKEN = -1, -2


@dataclass(slots=True)
class _BadWords:
    """The bad words of several tokens of one request.

    prefixes: [words, longest], all tokens but the last, preceded by ANY_TOKEN.
    last: [words].
    history: [beams, longest], the newest tokens of each beam.
    """

    prefixes: Tensor
    last: Tensor
    history: Tensor

    @classmethod
    def of(cls, words: list[tuple[int, ...]], num_beams: int, device: torch.device) -> "_BadWords":
        longest = max(map(len, words)) - 1
        prefixes = np.full((len(words), longest), ANY_TOKEN, np.int64)
        for row, word in zip(prefixes, words, strict=True):
            row[longest + 1 - len(word) :] = word[:-1]
        last = np.array([word[-1] for word in words], np.int64)
        history = torch.full((num_beams, longest), NO_TOKEN, dtype=torch.int64, device=device)
        return cls(to_device(prefixes, device), to_device(last, device), history)

    def start(self, sequence: Int64Array) -> None:
        """Begin after these tokens; only beam 0 has any then."""
        longest = self.history.shape[1]
        newest = np.full(longest, NO_TOKEN, np.int64)
        tail = sequence[-longest:]
        newest[longest - len(tail) :] = tail
        self.history[0].copy_(to_device(newest, self.history.device))

    def append(self, tokens: Tensor, parents: Tensor | None = None) -> None:
        """Add a token, [beams], to each beam's parent, [beams]."""
        before = self.history if parents is None else self.history.index_select(0, parents)
        self.history = torch.cat([before[: len(tokens), 1:], tokens.unsqueeze(1)], dim=1)

    def exclude(self, scores: Tensor, beam: int) -> None:
        """Set the scores, [vocabulary], of tokens that would complete a word to minus infinity."""
        matches = ((self.prefixes == self.history[beam]) | (self.prefixes == ANY_TOKEN)).all(dim=1)
        scores.index_add_(0, self.last, torch.where(matches, -torch.inf, 0.0))


class LogitsProcessors:
    """The processors of each slot's request, and what they need of its sequence.

    How often each token occurs is counted in a table [rows, vocabulary]. A slot takes rows, one for each beam, when the
    first request with a penalty comes, and keeps them.
    """

    def __init__(self, num_slots: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._is_active = np.zeros(num_slots, np.bool_)
        self._num_active = 0
        self._repetition = np.ones(num_slots, np.float32)
        self._presence = np.zeros(num_slots, np.float32)
        self._frequency = np.zeros(num_slots, np.float32)
        # Position in the sequence from which on an end token may be chosen.
        self._first_end = np.zeros(num_slots, np.int64)
        self._end_tokens: dict[int, Int64Array] = {}
        self._biases: dict[int, Tensor] = {}
        self._bad_words: dict[int, _BadWords] = {}
        self._counts: Tensor | None = None
        self._num_count_rows = 0
        # The rows of each slot in the table: the first one, and how many.
        self._first_row = np.zeros(num_slots, np.int64)
        self._num_rows = np.zeros(num_slots, np.int64)

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        end_tokens: tuple[int, ...],
        original_prompt_len: int,
        prompt: IntArray | None,
        beam_width: int = 1,
    ) -> None:
        """Set the processors of the request that now has `slot`.

        prompt: its ids, those that a pause has joined to it included; None before it is complete.
        """
        is_active = params.changes_logits
        if not (is_active or self._is_active[slot]):
            return
        self._biases.pop(slot, None)
        self._bad_words.pop(slot, None)
        self._num_active += is_active - int(self._is_active[slot])
        self._is_active[slot] = is_active
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._first_end[slot] = original_prompt_len + params.min_length if params.min_length else 0
        if prompt is None or not is_active:
            return
        if params.min_length:
            ids = np.array(end_tokens, np.int64)
            self._end_tokens[slot] = ids[(ids >= 0) & (ids < self._vocabulary)]
        words = [word for word in params.bad_words if len(word) > 1]
        single = [word[0] for word in params.bad_words if len(word) == 1 and word[0] not in end_tokens]
        if single or params.embedding_bias is not None:
            bias = np.zeros(self._vocabulary, np.float32) if params.embedding_bias is None else params.embedding_bias
            bias = bias.astype(np.float32)
            bias[single] = -np.inf
            self._biases[slot] = to_device(bias, self._device)
        sequence = prompt.astype(np.int64)
        if words:
            self._bad_words[slot] = _BadWords.of(words, beam_width, self._device)
            self._bad_words[slot].start(sequence)
        if params.has_penalties:
            # Virtual tokens are not counted.
            counts = np.bincount(sequence[sequence < self._vocabulary], minlength=self._vocabulary)
            self._row_of_prompt(slot, beam_width).copy_(to_device(counts.astype(np.int32), self._device))

    def apply(
        self, scores: Tensor, slots: Int64Array, positions: Int64Array, beams: Int64Array | None = None
    ) -> Tensor:
        """Processed copy of `scores` [rows, vocabulary] in float32; `scores` itself if no row has a processor.

        scores: logits, or log-probabilities of beam search.
        slots, beams: [rows], the slot and beam of each row; None for beam 0.
        positions: [rows], the position of each new token in its sequence.
        """
        if not self._num_active:
            return scores
        rows = np.flatnonzero(self._is_active[slots])
        if len(rows) == 0:
            return scores
        index = to_device(rows, self._device)
        slots, positions = slots[rows], positions[rows]
        beams = np.zeros_like(slots) if beams is None else beams[rows]
        own = scores.index_select(0, index).float()
        for row, slot in enumerate(slots.tolist()):
            if (bias := self._biases.get(slot)) is not None:
                own[row].add_(bias)
        own = self._penalised(own, slots, beams)
        for row, (slot, beam) in enumerate(zip(slots.tolist(), beams.tolist(), strict=True)):
            if (words := self._bad_words.get(slot)) is not None:
                words.exclude(own[row], beam)
        ends = [
            row * self._vocabulary + self._end_tokens[slot]
            for row, slot in enumerate(slots.tolist())
            if positions[row] < self._first_end[slot]
        ]
        if ends:
            own.view(-1).index_fill_(0, to_device(np.concatenate(ends), self._device), -torch.inf)
        return own if len(own) == len(scores) else scores.float().index_copy(0, index, own)

    def _penalised(self, scores: Tensor, slots: Int64Array, beams: Int64Array) -> Tensor:
        def column(values: NDArray[np.float32]) -> Tensor:
            return to_device(values[slots], self._device).unsqueeze(1)

        if self._counts is None or not len(self._counted(slots)):
            return scores
        # What has no penalty may get the counts of another: they change nothing.
        rows = np.minimum(self._first_row[slots] + beams, len(self._counts) - 1)
        counts = self._counts.index_select(0, to_device(rows, self._device))
        occurs, penalties = counts > 0, column(self._repetition)
        lowered = torch.where(scores < 0, scores * penalties, scores / penalties)
        scores = torch.where(occurs, lowered, scores)
        if self._presence[slots].any() or self._frequency[slots].any():
            scores = scores - counts * column(self._frequency) - occurs * column(self._presence)
        return scores

    def note(self, tokens: Tensor, slots: Int64Array) -> None:
        """Add `tokens`, int64 [rows] on the device, to the sequences of the requests in `slots` [rows]."""
        if not self._num_active:
            return
        counted = self._counted(slots)
        if len(counted):
            chosen = tokens.index_select(0, to_device(counted, self._device))
            self._count(self._first_row[slots[counted]], chosen)
        if self._bad_words:
            for row, slot in enumerate(slots.tolist()):
                if (words := self._bad_words.get(slot)) is not None:
                    words.append(tokens[row : row + 1])

    def follow(self, beams: BeamInputs, slots: Int64Array) -> None:
        """Continue the sequences of the requests in `slots` [requests] by the latest decisions of their searches."""
        if not self._num_active:
            return
        counted = self._counted(slots)
        if len(counted) and self._counts is not None:
            first = self._first_row[slots[counted]][:, None]
            rows = first + np.arange(beams.tokens.shape[1])
            parents = self._counts.index_select(0, to_device((first + beams.parents[counted]).ravel(), self._device))
            self._counts.index_copy_(0, to_device(rows.ravel(), self._device), parents)
            tokens = beams.tokens[counted].astype(np.int64).ravel()
            self._count(rows.ravel(), to_device(tokens, self._device))
        for row, slot in enumerate(slots.tolist()):
            if (words := self._bad_words.get(slot)) is not None:
                tokens, parents_of = beams.tokens[row].astype(np.int64), beams.parents[row].astype(np.int64)
                words.append(to_device(tokens, self._device), to_device(parents_of, self._device))

    def _counted(self, slots: Int64Array) -> NDArray[np.intp]:
        """Indices of the slots with a penalty."""
        has_penalty = (self._repetition[slots] != 1) | (self._presence[slots] != 0) | (self._frequency[slots] != 0)
        return np.flatnonzero(has_penalty & self._is_active[slots])

    def _count(self, rows: Int64Array, tokens: Tensor) -> None:
        """Add 1 to the count of each token, [rows], in its row of the table."""
        assert self._counts is not None
        indices = to_device(rows * self._vocabulary, self._device) + tokens
        self._counts.view(-1).index_add_(0, indices, torch.ones_like(indices, dtype=torch.int32))

    def _row_of_prompt(self, slot: int, beam_width: int) -> Tensor:
        """The row of beam 0 of `slot`, which takes rows of the table if it has fewer than beams."""
        if self._num_rows[slot] < beam_width:
            self._first_row[slot], self._num_rows[slot] = self._num_count_rows, beam_width
            self._num_count_rows += beam_width
            capacity = 0 if self._counts is None else len(self._counts)
            if self._num_count_rows > capacity:
                shape = max(2 * capacity, self._num_count_rows), self._vocabulary
                grown = torch.zeros(shape, dtype=torch.int32, device=self._device)
                if self._counts is not None:
                    grown[:capacity].copy_(self._counts)
                self._counts = grown
        assert self._counts is not None
        return self._counts[int(self._first_row[slot])]
