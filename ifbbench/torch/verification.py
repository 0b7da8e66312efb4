"""Verification of draft tokens: which of them the model accepts, and the token that follows the last accepted one.

A step's tokens are chosen one after the other as without drafts, from the logits behind the newest token and behind
each draft, until one differs from its draft. So all that acts on logits (penalties and other processors) sees the
tokens that are really before it, and greedy tokens are those of a run without drafts.

A sampled request takes a token at random and accepts a draft that equals it. That keeps the distribution, and where the
draft is a fixed guess (prompt look-up) no rule accepts more. A draft that was itself drawn from a known distribution q
is accepted with probability min(1, p / q), and a rejected one replaced by a token drawn from max(0, p - q) (Leviathan
et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.drafts import DraftInputs
from ifbbench.torch.model.tensors import to_device
from ifbbench.torch.packing import Int64Array

# From the logits [rows, vocabulary] of some outputs, their indices, the number of tokens that were chosen for each of
# them before, and the index of the draft that each token is compared with (-1 for none), to the tokens, int64 [rows].
Choose = Callable[[Tensor, Int64Array, int, Int64Array], Tensor]


class Proposals:
    """The draft tokens of a batch as they are verified.

    counts: [outputs], number of drafts of each output.
    tokens: int64 [sum of counts].
    firsts: [outputs], index of the first draft of each.
    client_logits: as in DraftInputs.
    probabilities: index of a draft -> the distribution that it was drawn from, [vocabulary]; fixed guesses have none.
    """

    def __init__(self, drafts: DraftInputs, num_last_chunks: int) -> None:
        self.counts = drafts.counts.astype(np.int64)
        self.tokens = drafts.tokens.astype(np.int64)
        self.firsts = self.counts.cumsum() - self.counts
        self.client_logits = drafts.logits
        self.probabilities: dict[int, Tensor] = {}
        self._num_last_chunks = num_last_chunks

    @property
    def of_generation(self) -> Int64Array:
        """[generation requests], number of drafts of each."""
        return self.counts[self._num_last_chunks :]

    def generation_tokens(self, newest: Tensor) -> Tensor:
        """The newest token of each generation request, each followed by its drafts; flat. newest: [requests]."""
        lengths = self.of_generation + 1
        firsts = lengths.cumsum() - lengths
        is_draft = np.ones(int(lengths.sum()), np.bool_)
        is_draft[firsts] = False
        tokens = newest.new_empty(len(is_draft))
        tokens[to_device(firsts, newest.device)] = newest
        known = self.tokens[int(self.counts[: self._num_last_chunks].sum()) :]
        tokens[to_device(np.flatnonzero(is_draft), newest.device)] = to_device(known, newest.device)
        return tokens


@dataclass(frozen=True, slots=True)
class Verified:
    """What verification of drafts has chosen.

    tokens: int64 [outputs, 1 + maximum of drafts].
    accepted: [outputs], number of drafts accepted; the tokens up to and including the one after them are valid.
    """

    tokens: Int64Array
    accepted: IntArray

    @property
    def newest(self) -> Int64Array:
        """[outputs], the last valid token of each."""
        return self.tokens[np.arange(len(self.tokens)), self.accepted]

    def valid_rows(self, counts: Int64Array) -> Int64Array:
        """The rows of the batch's logits from which the valid tokens were chosen, flat. counts: as in Proposals."""
        indices = np.arange(self.tokens.shape[1])
        firsts = (counts + 1).cumsum() - (counts + 1)
        rows: Int64Array = (firsts[:, None] + indices)[indices <= self.accepted[:, None]]
        return rows


def verify(logits: Tensor, proposals: Proposals, choose: Choose) -> Verified:
    """Choose tokens until each output has one that differs from its draft, or one behind its last draft.

    logits: [outputs + drafts, vocabulary], those of each output together. On a GPU the host waits for each step."""
    counts, num_outputs = proposals.counts, len(proposals.counts)
    firsts = (counts + 1).cumsum() - (counts + 1)
    tokens = np.zeros((num_outputs, int(counts.max(initial=0)) + 1), np.int64)
    accepted = np.zeros(num_outputs, np.int32)
    outputs = np.arange(num_outputs)
    for step in range(tokens.shape[1]):
        rows = to_device(firsts[outputs] + step, logits.device)
        # The index of the draft that each token is compared with; -1 behind the last.
        drafts = np.where(counts[outputs] > step, proposals.firsts[outputs] + step, -1)
        chosen = choose(logits.index_select(0, rows), outputs, step, drafts).cpu().numpy()
        tokens[outputs, step] = chosen
        is_accepted = drafts >= 0
        is_accepted[is_accepted] = chosen[is_accepted] == proposals.tokens[drafts[is_accepted]]
        outputs = outputs[is_accepted]
        accepted[outputs] += 1
        if not len(outputs):
            break
    return Verified(tokens, accepted)


def accept_or_replace(target: Tensor, proposed: Tensor, drafts: Tensor, accept_at: Tensor, draw_at: Tensor) -> Tensor:
    """The token of each row, int64 [rows]: its draft, or another one if that is rejected. It is distributed as `target`
    if the draft is as `proposed`.

    target, proposed: [rows, vocabulary], probabilities.
    drafts: int64 [rows].
    accept_at, draw_at: [rows], numbers in [0, 1), independent of each other and of the draft.
    """
    target, proposed = target.double(), proposed.double()
    column = drafts.unsqueeze(1)
    is_accepted = accept_at * proposed.gather(1, column).squeeze(1) < target.gather(1, column).squeeze(1)
    rest = (target - proposed).clamp(min=0.0)
    # Equal distributions leave no rest, but accept every draft too.
    return torch.where(is_accepted, drafts, draw(torch.where(rest.sum(1, keepdim=True) > 0, rest, target), draw_at))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row by its weight, int64 [rows].

    weights: [rows, vocabulary].
    uniform: [rows], numbers in [0, 1).
    """
    cumulative = weights.double().cumsum(dim=-1)
    targets = uniform.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
