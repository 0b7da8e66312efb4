"""Paged KV caches of one attention window: what schedulers ask, in blocks."""

from abc import abstractmethod
from collections.abc import Iterable

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.engine.arrays import Rows
from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.interface import NO_REUSE, KvCache
from ifbbench.kv.sequence import ReuseRules


@mypyc_attr(allow_interpreted_subclasses=True)
class PagedCache(KvCache):
    """Base class of paged caches for up to `slots` sequences: the blocks that requests need.

    The blocks of a whole prompt are taken with its first chunk; generation takes a block whenever a token starts one.
    """

    def __init__(
        self, attention_window: AttentionWindow, num_blocks: int, slots: int, reuse: ReuseRules = NO_REUSE
    ) -> None:
        self.attention_window = attention_window
        self.reuse = reuse
        self.num_blocks = num_blocks
        self.num_positions = num_blocks * attention_window.tokens_per_block
        self.registered = np.zeros(slots, np.int64)
        # The maximum number of tokens that the request in each slot may register.
        self._limit = np.zeros(slots, np.int64)
        self._beam_width = np.ones(slots, np.int64)
        self._filled = 0
        # By slot, the blocks to completion of requests that have no sequence yet. A request that is stopped leaves its
        # slot to another one.
        self._of_waiting: dict[int, tuple[Request, int]] = {}

    # For schedulers.

    def first_chunk_need(self, request: Request) -> int:
        if not request.is_first_chunk:
            return 0
        need = self.attention_window.first_chunk_need(
            request.prompt_len, request.max_new_tokens, request.num_draft_tokens, request.beam_width
        )
        return need + self._more_for_beams(request)

    def has_blocks_for(self, count: int) -> bool:
        return count * (1 + self.looks_ahead) <= int(self.free_blocks)

    def step_needs(self, rows: Rows, draft_tokens: Rows | int = 0) -> Rows:
        window, registered, limit = self.attention_window, self.registered[rows], self._limit[rows]
        if window.max_beam_width == 1 and isinstance(draft_tokens, int) and draft_tokens == 0:
            size, may_register = window.tokens_per_block, np.minimum(limit, window.capacity)
            needs: Rows = ((self._positions_in_block(registered) == 0) & (registered < may_register)).astype(np.int64)
            if self.looks_ahead:
                needs += ((registered + 1) % size == 0) & (registered + 1 < may_register)
            return needs
        needs = window.step_needs(registered, limit, draft_tokens, self._beam_width[rows])
        if self.looks_ahead:
            ahead = window.step_needs(registered, limit, draft_tokens, self._beam_width[rows], steps=2)
            needs = np.maximum(needs, ahead)  # of two steps, the second may be beyond the capacity
        for number in np.flatnonzero((registered >= window.capacity) & (registered < limit)).tolist():
            needs[number] = self._overwrite_need(int(rows[number]))
        return needs

    def blocks_to_completion(self, request: Request) -> int:
        if self.holds(request.slot):
            return self._blocks_to_come(request.slot)
        owner, blocks = self._of_waiting.get(request.slot, (None, 0))
        if owner is not request:
            length, reserved, beams = request.prompt_len, request.max_new_tokens, request.beam_width
            blocks = self.attention_window.blocks_to_completion(length, reserved, 0, beams)
            blocks += self._more_for_beams(request)
            self._of_waiting[request.slot] = request, blocks
        return blocks

    def fitting(self, requests: Iterable[Request], available: int) -> tuple[int, int]:
        window, count, taken = self.attention_window, 0, 0
        size, bubble, kept = window.tokens_per_block, window.bubble, window.kept_tokens
        for request in requests:
            tokens = request.prompt_len + request.max_new_tokens
            if tokens > kept or request.beam_width > 1 or not request.is_first_chunk:
                needed = self.blocks_to_completion(request)
            else:  # the usual case, and needed for every waiting request
                needed = -(-(tokens + bubble) // size)
            if taken + needed > available:
                break
            count, taken = count + 1, taken + needed
        return count, taken

    # For the loop.

    def of_windows(self) -> "tuple[PagedCache, ...]":
        return (self,)

    def _positions_in_block(self, registered: Rows) -> Rows:
        size = self.attention_window.tokens_per_block
        # A remainder of integers takes several times as long.
        return registered & (size - 1) if size & (size - 1) == 0 else registered % size

    def _more_for_beams(self, request: Request) -> int:
        if not self.reuse.enabled:
            return 0
        return self.attention_window.more_for_beams(request.prompt_len, request.beam_width)

    def _overwrite_need(self, slot: int) -> int:
        """Blocks that a sequence beyond its capacity takes for its next token."""
        return 0

    @abstractmethod
    def _blocks_to_come(self, slot: int) -> int:
        """Blocks that the sequence in `slot` may still take."""
