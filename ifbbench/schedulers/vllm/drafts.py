"""Draft tokens of vLLM's scheduler: proposed after an iteration, verified with the next one (n-gram proposer)."""

from collections.abc import Sequence

import numpy as np

from ifbbench.engine.arrays import IntArray, Rows
from ifbbench.engine.drafts import UNKNOWN_TOKEN, DraftInputs, DraftSettings, continuation, draw_accepted
from ifbbench.engine.request import Request, RequestTable

PAD_TOKEN = 0


class Drafts:
    """Proposes draft tokens, and gives those of an iteration. docs/engines.md, Draft tokens."""

    def __init__(self, settings: DraftSettings, table: RequestTable) -> None:
        self.settings = settings
        self._table = table
        # Ids proposed by look-up, by row.
        self._tokens: dict[int, IntArray] = {}

    def propose(self, rows: Rows) -> None:
        """Propose draft tokens for the generation requests in `rows`, which have just got a token. vLLM proposes as
        many as it can, also beyond the output that a request may still have."""
        counts = np.full(len(rows), self.settings.max_len)
        for index, row in enumerate(rows.tolist() if self.settings.max_ngram else []):
            request = self._table.requests[row]
            sequence = request.tokens_between(0, request.original_prompt_len + request.num_outputs)
            self._tokens[row] = tokens = continuation(sequence, self.settings.max_ngram, self.settings.max_len)
            counts[index] = len(tokens)
        self._table.set_draft_tokens(rows, counts)

    def inputs(self, completing: Sequence[Request], rows: Rows) -> DraftInputs | None:
        """The drafts of an iteration, None if there are none.

        completing: requests on their last chunk, whose drafts only pad their step.
        rows: table rows of the generation requests.
        """
        of_prompts = [request.num_draft_tokens for request in completing]
        counts = np.concatenate([np.array(of_prompts, np.int64), self._table.draft_tokens[rows]]).astype(np.int32)
        if not counts.any():
            return None
        tokens, first = np.full(int(counts.sum()), UNKNOWN_TOKEN, np.int32), sum(of_prompts)
        if self.settings.max_ngram:  # a model runs them
            tokens[:first] = PAD_TOKEN
        for row, count in zip(rows.tolist(), counts[len(completing) :].tolist(), strict=True):
            if self.settings.max_ngram:
                tokens[first : first + count] = self._tokens[row][:count]
            first += count
        return DraftInputs(counts, tokens, {})

    def accepted(self, rows: Rows, counts: IntArray) -> IntArray:
        """How many drafts of each of `rows` are accepted, where the executor does not know: none of those that only pad
        the step of a prompt."""
        pads = np.array([self._table.requests[row].num_draft_tokens > 0 for row in rows.tolist()], np.bool_)
        return np.where(pads, 0, draw_accepted(self.settings, self._table, rows, counts)).astype(np.int32)

    def settle(self, rows: Rows) -> None:
        """The drafts of `rows` were verified. Blocks that were taken for rejected ones stay with their requests."""
        for row in rows.tolist():
            self._table.requests[row].set_draft_tokens(0)
