"""The numbers beside its tokens that a request may ask for: log-probabilities and logits."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.batch import Batch
from ifbbench.engine.sampling_params import OutputOptions
from ifbbench.execution.packing import Int64Array, PackedBatch
from ifbbench.model.tensors import to_device

# From logits [rows, vocabulary] and tokens, int64 [rows], to the tokens' log-probabilities, float32 [rows].
LogProbsOf = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ContextRows:
    """The packed rows whose logits are context logits.

    rows: [rows], of all chunks that asked, in order. chunks: index of each in its batch. lengths: rows of each.
    """

    rows: Int64Array
    chunks: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, packed: PackedBatch) -> "ContextRows | None":
        """All rows, without padding, of the chunks whose requests want context logits; None if no request does."""
        chunks = tuple(
            index for index, chunk in enumerate(batch.context) if chunk.request.options.return_context_logits
        )
        if not chunks:
            return None
        lengths = tuple(batch.context[index].length for index in chunks)
        rows = [packed.spans.first_rows[index] + np.arange(batch.context[index].length) for index in chunks]
        return cls(np.concatenate(rows), chunks, lengths)

    def split(self, logits: Tensor) -> dict[int, Tensor]:
        """Index of a chunk -> its part [length, vocabulary] of `logits` [rows, vocabulary]."""
        ends = np.cumsum(self.lengths).tolist()
        return {chunk: logits[end - length : end]
                for chunk, length, end in zip(self.chunks, self.lengths, ends, strict=True)}


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each row's token, as PyTorch computes it on any device."""
    return logits.float().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


class WantedNumbers:
    """What the request in each slot wants beside its tokens. log_probs_of: how log-probabilities are computed."""

    def __init__(self, num_slots: int, log_probs_of: LogProbsOf = log_probs_of) -> None:
        self._log_probs_of = log_probs_of
        self._log_probs = np.zeros(num_slots, dtype=np.bool_)
        self._generation_logits = np.zeros(num_slots, dtype=np.bool_)
        self._asking: set[int] = set()  # most often empty, and then there is nothing to look up

    def assign(self, slot: int, options: OutputOptions) -> None:
        """From now on `slot` belongs to a request with these options."""
        self._log_probs[slot] = options.return_log_probs
        self._generation_logits[slot] = options.return_generation_logits
        if options.return_log_probs or options.return_generation_logits:
            self._asking.add(slot)
        else:
            self._asking.discard(slot)

    def log_probs(self, logits: Tensor, tokens: Tensor, packed: PackedBatch) -> Tensor | None:
        """Log-probabilities float32 [outputs] of `tokens` [outputs] by plain `logits` [outputs, vocabulary].

        0 where the request did not ask; None if none did.
        """
        if not self._asking:
            return None
        rows = np.flatnonzero(self._log_probs[packed.output_slots])
        if len(rows) == 0:
            return None
        if len(rows) == len(tokens):
            return self._log_probs_of(logits, tokens)
        index = to_device(rows, logits.device)
        chosen = self._log_probs_of(logits.index_select(0, index), tokens.index_select(0, index))
        return torch.zeros(len(tokens), device=logits.device).index_copy_(0, index, chosen)

    def generation_logits(self, logits: Tensor, packed: PackedBatch, beam_width: int) -> dict[int, Tensor]:
        """Index of an output -> its rows of `logits` [output rows, vocabulary], for the requests that asked.

        One row of a last chunk, `beam_width` rows of a generation request.
        """
        if not self._asking:
            return {}
        outputs: NDArray[np.intp] = np.flatnonzero(self._generation_logits[packed.output_slots])
        wanted = {}
        for output in outputs.tolist():
            behind = output - packed.num_last_chunks
            first, count = (output, 1) if behind < 0 else (packed.num_last_chunks + behind * beam_width, beam_width)
            wanted[output] = logits[first : first + count]
        return wanted
