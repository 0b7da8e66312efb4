"""Draft tokens of vLLM's scheduler: proposed after an iteration, verified with the next one (n-gram proposer)."""

import numpy as np

from ifbbench.engine.arrays import IntArray, Rows
from ifbbench.engine.drafts import UNKNOWN_TOKEN, DraftInputs, DraftSettings, continuation, draw_accepted
from ifbbench.engine.request import RequestTable


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

    def inputs(self, num_last_chunks: int, rows: Rows) -> DraftInputs | None:
        """The drafts of an iteration, None if there are none. num_last_chunks: prompts that it completes, which have
        none: those that pad a step are not run. rows: of the generation requests."""
        of_prompts = np.zeros(num_last_chunks, np.int64)
        counts = np.concatenate([of_prompts, self._table.draft_tokens[rows]]).astype(np.int32)
        if not counts.any():
            return None
        tokens, first = np.full(int(counts.sum()), UNKNOWN_TOKEN, np.int32), 0
        for row, count in zip(rows.tolist(), counts[num_last_chunks:].tolist(), strict=True):
            if self.settings.max_ngram:
                tokens[first : first + count] = self._tokens[row][:count]
            first += count
        return DraftInputs(counts, tokens, {})

    def accepted(self, rows: Rows, counts: IntArray) -> IntArray:
        """How many drafts of each of `rows` are accepted, where the executor does not know."""
        return draw_accepted(self.settings, self._table, rows, counts)

    def settle(self, rows: Rows) -> None:
        """The drafts of `rows` were verified. Blocks that were taken for rejected ones stay with their requests."""
        for row in rows.tolist():
            self._table.requests[row].set_draft_tokens(0)
