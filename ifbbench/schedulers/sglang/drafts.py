"""Draft tokens of decode batches (EAGLE with one branch, as multi-token prediction uses it, SGLang 0.5.23)."""

import numpy as np

from ifbbench.engine.arrays import IntArray, Rows
from ifbbench.engine.drafts import UNKNOWN_TOKEN, DraftInputs, DraftSettings, draw_accepted
from ifbbench.engine.request import RequestTable


class Drafts:
    """Every running request has as many draft tokens in each decode batch, which the device proposes."""

    def __init__(self, settings: DraftSettings, table: RequestTable) -> None:
        self._settings, self._table = settings, table

    def inputs(self, num_first: int, rows: Rows) -> DraftInputs | None:
        """The drafts of an iteration, None without decode requests. num_first: prompts that end, which have none."""
        if not len(rows):
            return None
        counts = np.full(len(rows), self._settings.max_len)
        self._table.set_draft_tokens(rows, counts)
        counts = np.concatenate([np.zeros(num_first, np.int64), counts]).astype(np.int32)
        return DraftInputs(counts, np.full(int(counts.sum()), UNKNOWN_TOKEN, np.int32))

    def accepted(self, rows: Rows, counts: IntArray) -> IntArray:
        """How many drafts of each of `rows` are accepted."""
        return draw_accepted(self._settings, self._table, rows, counts)

    def settle(self, rows: Rows) -> None:
        """The drafts of `rows` were verified. Pages that were taken for rejected ones stay with their requests."""
        self._table.set_draft_tokens(rows, np.zeros(len(rows), np.int64))
