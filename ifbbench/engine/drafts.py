"""Draft tokens (speculative decoding): guesses of a request's next tokens, which one step of the model verifies.

A step with D draft tokens runs D + 1 tokens of a request and yields 1 to D + 1: the accepted drafts, up to the first
that the model rejects, and one token of the model's own. Keys and values of rejected drafts are removed again.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ifbbench.engine.arrays import FloatArray, Int64Array, IntArray, Rows
from ifbbench.engine.request import Request, RequestTable
from ifbbench.engine.sampling_params import uniform_numbers

# An odd number, so that no two requests have the same random numbers.
SEED_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
# In the place of a draft token that the executor's draft model proposes, or that stays symbolic.
UNKNOWN_TOKEN = -1


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Which drafts generation steps get, beside those that clients bring for a request's first tokens.

    max_len: maximum number of draft tokens of a step; 0 for none.
    max_ngram: maximum number of tokens to match in prompt look-up; 0 if the executor proposes the drafts.
    acceptance: probability that a draft is accepted if all before it were, by its position in the step, for executors
        that return no tokens; the last one holds for all further positions.
    """

    max_len: int = 0
    max_ngram: int = 0
    acceptance: tuple[float, ...] = (0.0,)
    seed: int = 0


NO_DRAFTS = DraftSettings()


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The draft tokens of a batch.

    counts: [outputs], number of drafts of each last chunk in batch order, then of each generation request. The drafts
        follow the chunk, or the request's newest token.
    tokens: [sum of counts], UNKNOWN_TOKEN where a draft model is to propose them.
    logits: index of an output -> [its drafts, vocabulary], from which the client drew them, where known.
    """

    counts: IntArray
    tokens: IntArray
    logits: dict[int, FloatArray] = field(default_factory=dict)

    def split(self, first: int) -> tuple["DraftInputs | None", "DraftInputs | None"]:
        """The drafts of the first `first` outputs, and of the others (generation requests, without logits); None
        without drafts."""
        border = int(self.counts[:first].sum())
        return (
            DraftInputs(self.counts[:first], self.tokens[:border], self.logits) if border else None,
            DraftInputs(self.counts[first:], self.tokens[border:]) if border < len(self.tokens) else None,
        )


class DraftVerifier(Protocol):
    """What confirms the outputs of an iteration with draft tokens."""

    def accepted(self, rows: Rows, counts: IntArray) -> IntArray:
        """[requests], how many of the `counts` drafts of each of `rows` are accepted, where the executor does not
        know."""
        ...

    def settle(self, rows: Rows) -> None:
        """Remove the rejected drafts of `rows` from the KV cache, once the step's tokens are confirmed."""
        ...


@dataclass(slots=True)
class DraftCounts:
    """The draft tokens of one iteration.

    drafted: number of tokens verified.
    accepted: number of those that became output.
    requests: number of requests with drafts.
    extra: each request that got several tokens, and how many more than one.
    draft_s: device time of the draft model, in seconds.
    """

    drafted: int = 0
    accepted: int = 0
    requests: int = 0
    extra: list[tuple[Request, int]] = field(default_factory=list)
    draft_s: float = 0.0

    def add(self, drafted: IntArray, accepted: Int64Array, requests: list[Request], draft_s: float) -> None:
        """Take in one pass. drafted, accepted: [requests]."""
        self.drafted += int(drafted.sum())
        self.accepted += int(accepted.sum())
        self.requests += int(np.count_nonzero(drafted))
        self.draft_s += draft_s
        for request, count, taken in zip(requests, drafted.tolist(), accepted.tolist(), strict=True):
            request.num_drafted += count
            request.accepted_drafts += taken
            if taken:
                self.extra.append((request, taken))

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step with drafts yields on average."""
        return (self.accepted + self.requests) / self.requests if self.requests else 0.0


def draw_accepted(settings: DraftSettings, table: RequestTable, rows: Rows, counts: IntArray) -> IntArray:
    """How many of `counts` drafts of each of `rows` are accepted, at the rates of `settings`: drawn from the seed, the
    request and the position of each draft in its output, so that neither a pause nor the batch changes them."""
    width = int(counts.max(initial=0))
    ids = np.array([table.requests[row].request_id for row in rows.tolist()], np.uint64)
    indices = np.arange(width)
    seeds = ids * SEED_STEP + np.uint64(settings.seed & 0xFFFF_FFFF_FFFF_FFFF)
    positions = (table.joined[rows] + table.confirmed[rows])[:, None] + indices
    rates = settings.acceptance
    acceptance = np.array([rates[min(index, len(rates) - 1)] for index in range(width)])
    is_accepted = uniform_numbers(seeds[:, None], positions) < acceptance
    is_accepted &= indices < counts[:, None]
    found: IntArray = np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1).astype(np.int32)
    return found


def continuation(sequence: IntArray, max_ngram: int, count: int) -> IntArray:
    """Prompt look-up: at most `count` tokens that followed the latest tokens of `sequence` where they occurred before.

    The longest match counts, of at most `max_ngram` tokens, and of several the first (as in `transformers` and vLLM);
    it may overlap the end, but has at least one token behind it. Empty if the last token did not occur before."""
    last = len(sequence) - 1
    indices = np.flatnonzero(sequence[:last] == sequence[last])
    for distance in range(1, max_ngram):
        longer = indices[indices >= distance]
        longer = longer[sequence[longer - distance] == sequence[last - distance]] if distance <= last else longer[:0]
        if not len(longer):
            break
        indices = longer
    return sequence[indices[0] + 1 :][:count] if len(indices) else sequence[:0]
