"""Draft tokens of generation steps: proposed before an iteration, verified with it, and removed where rejected."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ifbbench.engine.arrays import IntArray, Rows
from ifbbench.engine.drafts import UNKNOWN_TOKEN, DraftInputs, DraftSettings, continuation, draw_accepted
from ifbbench.engine.request import Request
from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests


@dataclass(slots=True)
class Drafts:
    """Proposes draft tokens, takes their places in the KV cache, and returns those of rejected ones."""

    settings: DraftSettings
    active: ActiveRequests
    kv_cache: KvCache
    # Ids proposed by look-up, by row.
    _tokens: dict[int, IntArray] = field(default_factory=dict)

    def propose(self) -> None:
        """Set the draft tokens of the next step of each generation request: at most as many as it can still use beside
        the model's own token. To be called before each iteration is scheduled."""
        rows, table = self.active.generation_rows, self.active.table
        counts = np.clip(table.reserved[rows] - table.generated[rows] - 1, 0, self.settings.max_len)
        if self.settings.max_ngram:
            self._tokens.clear()
            for index, row in enumerate(rows.tolist()):
                self._tokens[row] = tokens = self._look_up(self.active.by_slot[row], int(counts[index]))
                counts[index] = len(tokens)
        table.set_draft_tokens(rows, counts)

    def _look_up(self, request: Request, count: int) -> IntArray:
        if not count:
            return np.zeros(0, np.int32)
        sequence = request.tokens_between(0, request.original_prompt_len + request.num_outputs)
        return continuation(sequence, self.settings.max_ngram, count)

    def take(self, completing: Sequence[Request], rows: Rows) -> DraftInputs | None:
        """The drafts of an iteration, once the blocks of its prompts and of each one's next token were taken; those of
        generation take places here, and those of prompts did with the first chunk. None if there are none.

        completing: requests on their last chunk.
        rows: table rows of the generation requests.
        """
        cache, table = self.kv_cache, self.active.table
        for request in completing:  # the scheduler may have cut the drafts since their places were taken
            needed = request.prompt_len + request.num_draft_tokens + cache.attention_window.bubble
            if cache.registered[request.slot] > needed:
                cache.rewind(np.array([request.slot]), np.array([needed]))
        of_rows = table.draft_tokens[rows]
        cache.add_draft_tokens(rows, of_rows)
        of_prompts = [request.num_draft_tokens for request in completing]
        counts = np.concatenate([np.array(of_prompts, np.int64), of_rows]).astype(np.int32)
        if not counts.any():
            return None
        return self._inputs(completing, rows, counts)

    def _inputs(self, completing: Sequence[Request], rows: Rows, counts: IntArray) -> DraftInputs:
        tokens = np.full(int(counts.sum()), UNKNOWN_TOKEN, np.int32)
        firsts, logits = (counts.cumsum() - counts).tolist(), {}
        for index, request in enumerate(completing):
            count, options = request.num_draft_tokens, request.options
            if count and options.draft_input_ids is not None:
                tokens[firsts[index] : firsts[index] + count] = options.draft_input_ids[:count]
                if options.draft_logits is not None:
                    logits[index] = options.draft_logits[:count]
        if self.settings.max_ngram:
            for index, row in enumerate(rows.tolist(), start=len(completing)):
                tokens[firsts[index] : firsts[index] + counts[index]] = self._tokens[row][: counts[index]]
        return DraftInputs(counts, tokens, logits)

    def accepted(self, rows: Rows, counts: IntArray) -> IntArray:
        """How many drafts of each of `rows` are accepted, where the executor does not know."""
        return draw_accepted(self.settings, self.active.table, rows, counts)

    def settle(self, rows: Rows) -> None:
        """Remove the rejected drafts of `rows` from the KV cache, once the step's tokens are confirmed."""
        table = self.active.table
        cached = table.original_prompt_len[rows] + table.joined[rows] + table.confirmed[rows] - 1
        self.kv_cache.rewind(rows, cached + self.kv_cache.attention_window.bubble)
        for row in rows.tolist():
            request = self.active.by_slot[row]
            if request.num_draft_tokens:
                request.set_draft_tokens(0)
