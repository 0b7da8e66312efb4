"""The decision for one iteration of vLLM's scheduler while it is made."""

import numpy as np

from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.plan import LeftOut, Pause
from ifbbench.engine.request import Request

NO_MAXIMUM = 2**62


class Step:
    """What one iteration runs, and what is left of its budgets.

    tokens: what is left of the token budget.
    inputs: what is left of the input budget.
    cap: maximum number of tokens of a request, 0 for no maximum.
    num_tokens: number of tokens that it runs.
    chunks: prompt tokens of each request, in order.
    entered, paused, blocked: as in a Plan.
    receiving, awaits_stores: as in a Plan.
    has_ended: whether the walk over the running requests ended before the last of them.
    has_running: whether requests that ran before are scheduled.
    has_running_chunks: whether some of these run a chunk of their prompts.
    repeats: nothing but the tokens of generation requests and blocks can make the next decision another one.
    slack: blocks that may be taken before it is another one.
    """

    def __init__(self, tokens: int, inputs: int, cap: int) -> None:
        self.tokens, self.inputs, self.cap = tokens, inputs, cap
        self.num_tokens = 0
        self.chunks: dict[Request, int] = {}
        self.entered: list[Request] = []
        self.receiving: list[Request] = []
        self.paused: list[Pause] = []
        self.blocked: list[LeftOut] = []
        self.has_ended = self.has_running = self.has_running_chunks = False
        self.repeats, self.slack = True, NO_MAXIMUM
        self.awaits_stores = False
        # Generation requests, and all requests, in the order of scheduling.
        self._rows: list[Rows] = []
        self._order: list[Rows] = []
        self._dropped: list[int] = []

    @property
    def available(self) -> int:
        """Tokens that are left."""
        return min(self.tokens, self.inputs)

    @property
    def rows(self) -> Rows:
        """[generation requests], in the order of scheduling."""
        return self._kept(self._rows)

    @property
    def order(self) -> Rows:
        """[scheduled], rows of all requests in the order of scheduling."""
        return self._kept(self._order)

    def add_rows(self, rows: Rows, tokens: int) -> None:
        """So many tokens for these generation requests."""
        self._use(tokens)
        self._rows.append(rows)
        self._order.append(rows)

    def add_chunk(self, request: Request, tokens: int, num_drafts: int = 0) -> None:
        """A chunk of a prompt, and drafts behind it."""
        self._use(tokens + num_drafts)
        self.chunks[request] = tokens
        self._order.append(np.array([request.slot], np.int64))

    def drop(self, request: Request) -> bool:
        """`request` is pre-empted: if it was scheduled in this iteration, its tokens return to the budgets. Returns
        whether it was."""
        row = request.slot
        if request in self.chunks:
            tokens = self.chunks.pop(request)
        elif any(bool((rows == row).any()) for rows in self._rows) and row not in self._dropped:
            tokens = request.step_tokens
        else:
            return False
        self._dropped.append(row)
        self._use(-tokens)
        return True

    def _use(self, tokens: int) -> None:
        self.tokens, self.inputs = self.tokens - tokens, self.inputs - tokens
        self.num_tokens += tokens

    def _kept(self, parts: list[Rows]) -> Rows:
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NO_ROWS
        return rows[~np.isin(rows, self._dropped)] if self._dropped else rows
