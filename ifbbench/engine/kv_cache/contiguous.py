"""A KV cache without blocks: each request has a piece of memory as long as the longest sequence, from start to end."""

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.kv_cache.blocks import BlockCounters
from ifbbench.engine.kv_cache.copies import BlockCopy
from ifbbench.engine.kv_cache.manager import NO_REUSE
from ifbbench.engine.kv_cache.sequence import KnownTokens
from ifbbench.engine.request import Request
from ifbbench.engine.request_table import IntArray

Rows = NDArray[np.int64]


class ContiguousCache:
    """What paging is measured against. There is nothing to schedule by but the number of requests: the policy is
    MAX_REQUESTS, and every number of blocks is 0.

    max_beam_width: each beam has memory of its own.
    """

    def __init__(self, attention_window: AttentionWindow, slots: int) -> None:
        self.attention_window = attention_window
        self.reuse = NO_REUSE
        self.registered: Rows = np.zeros(slots, np.int64)
        self.block_tables: IntArray = np.zeros((slots, attention_window.max_beam_width, 1), np.int32)
        self.window_tables: tuple[IntArray, ...] = ()
        self.counters = BlockCounters()
        self.free_blocks = self.num_used = self.num_blocks = 0
        self._beams: dict[int, int] = {}
        self._slots = slots

    @property
    def places(self) -> int:
        """Tokens that the whole cache has room for."""
        return self._slots * self.attention_window.max_beam_width * self.attention_window.max_seq_len

    @property
    def held_places(self) -> int:
        return sum(self._beams.values()) * self.attention_window.max_seq_len

    @property
    def filled_places(self) -> int:
        return int(self.registered.sum())

    def first_chunk_need(self, request: Request) -> int:
        return 0

    def step_needs(self, rows: Rows, draft_tokens: Rows | int = 0) -> Rows:
        return np.zeros(len(rows), np.int64)

    def counted(self, blocks: Rows) -> int:
        return int(blocks)

    def blocks_to_completion(self, request: Request) -> int:
        return 0

    def reserved_blocks(self, rows: Rows) -> int:
        return 0

    def plan_release(self) -> "ContiguousCache":
        """Nothing is ever short, so nothing is planned."""
        return self

    def release(self, slot: int) -> None:
        """No blocks return."""

    def missing_block(self, request: Request) -> None:
        """Nothing is reused."""

    def holds(self, slot: int) -> bool:
        return slot in self._beams

    def add_request(self, request: Request, now_s: float = 0.0) -> int:
        self._beams[request.slot] = request.beam_width
        self.registered[request.slot] = request.prompt_len + self.attention_window.bubble
        return 0

    def add_tokens(self, rows: Rows) -> None:
        self.registered[rows] += 1

    def steps_ahead(self, rows: Rows) -> None:
        """Not asked for: its policy is none that goes on by itself."""

    def store_context(self, slot: int) -> None:
        """Nothing is reused."""

    def store_generated(self, slot: int, num_tokens: int) -> None:
        """Nothing is reused."""

    def forget_sequence(self, slot: int) -> None:
        """Nothing is reused."""

    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None:
        del self._beams[slot]
        self.registered[slot] = 0

    def truncate(self, known: KnownTokens, length: int, keep: int) -> None:
        """Nothing is reused."""

    def take_copies(self) -> tuple[BlockCopy, ...]:
        return ()

    def check_consistency(self) -> None:
        """Raise AssertionError if a slot without a request has tokens."""
        holding = set(np.flatnonzero(self.registered).tolist())
        assert holding <= set(self._beams), "a slot holds tokens of nobody"
