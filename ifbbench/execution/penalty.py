"""Repetition penalty: tokens that a sequence has already become less likely (Keskar et al., arXiv:1909.05858)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.request_table import IntArray
from ifbbench.model.tensors import to_device

Int64Array = NDArray[np.int64]


class RepetitionPenalty:
    """Which ids the request in each slot has in prompt and output, and the penalty on them.

    The ids stay on the device, so a step need not wait until the host has seen the tokens of the step before. They take
    no memory before a request with a penalty comes.
    """

    def __init__(self, num_slots: int, vocabulary: int, device: torch.device) -> None:
        self._penalties = np.ones(num_slots, dtype=np.float32)
        self._shape = (num_slots, vocabulary)
        self._device = device
        self._seen: Tensor | None = None

    def assign(self, slot: int, penalty: float, prompt: IntArray | None) -> None:
        """From now on `slot` belongs to a request with this penalty. prompt: its ids, with what a pause has joined to
        it and what was found in the cache; None before it is complete."""
        self._penalties[slot] = penalty
        if penalty == 1.0 or prompt is None:
            return
        if self._seen is None:
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        ids = to_device(prompt.astype(np.int64), self._device)
        self._seen[slot].zero_().index_fill_(0, ids, True)

    def apply(self, logits: Tensor, slots: Int64Array) -> Tensor:
        """`logits` [rows, vocabulary] of the requests in `slots` [rows], penalised: in float32 if any row is.

        Each id that occurs, however often, has its logit divided by the penalty if positive and multiplied if negative.
        `logits` itself does not change.
        """
        if self._seen is None:
            return logits
        rows = self._penalised(slots)
        if len(rows) == 0:
            return logits
        index = to_device(rows, self._device)
        penalties = to_device(self._penalties[slots[rows]], self._device).unsqueeze(1)
        plain = logits.index_select(0, index).float()
        lowered = torch.where(plain < 0, plain * penalties, plain / penalties)
        seen = self._seen.index_select(0, to_device(slots[rows], self._device))
        return logits.float().index_copy(0, index, torch.where(seen, lowered, plain))

    def note(self, tokens: Tensor, slots: Int64Array) -> None:
        """The requests in `slots` [rows] have got `tokens`, int64 [rows] on the device."""
        if self._seen is None:
            return
        rows = self._penalised(slots)
        if len(rows):
            chosen = tokens.index_select(0, to_device(rows, self._device))
            firsts = to_device(slots[rows] * self._shape[1], self._device)
            self._seen.view(-1).index_fill_(0, firsts + chosen, True)

    def _penalised(self, slots: Int64Array) -> NDArray[np.intp]:
        return np.flatnonzero(self._penalties[slots] != 1.0)
