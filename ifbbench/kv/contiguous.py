"""A KV cache without blocks: each sequence has contiguous memory for the longest sequence, from start to end."""

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.records import CacheState
from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.blocks import BlockCounters
from ifbbench.kv.interface import KvCache


class ContiguousCache(KvCache):
    """The baseline for paging. Only the number of requests limits a schedule (policy MAX_REQUESTS), and every number of
    blocks is 0. With `max_beam_width`, each beam has memory of its own."""

    free_blocks = num_used = 0
    counters = BlockCounters()  # always 0

    def __init__(self, attention_window: AttentionWindow, slots: int) -> None:
        self.attention_window, self.num_blocks = attention_window, 0
        self.registered = np.zeros(slots, np.int64)
        self.block_tables = np.zeros((slots, attention_window.max_beam_width, 1), np.int32)
        self.num_positions = slots * attention_window.max_beam_width * attention_window.max_seq_len
        self._beams: dict[int, int] = {}

    def first_chunk_need(self, request: Request) -> int:
        return 0

    def step_needs(self, rows: Rows, draft_tokens: Rows | int = 0) -> Rows:
        return np.zeros(len(rows), np.int64)

    def blocks_to_completion(self, request: Request) -> int:
        return 0

    def reserved_blocks(self, rows: Rows) -> int:
        return 0

    def plan_release(self) -> "ContiguousCache":
        """Blocks are never short, so there is nothing to plan."""
        return self

    def release(self, slot: int) -> None:
        """No blocks are released."""

    def holds(self, slot: int) -> bool:
        return slot in self._beams

    def add_request(self, request: Request, now_s: float = 0.0) -> int:
        self._beams[request.slot] = request.beam_width
        self.registered[request.slot] = request.prompt_len + self.attention_window.bubble
        return 0

    def add_tokens(self, rows: Rows) -> Rows:
        registered = self.registered[rows]
        self.registered[rows] = registered + 1
        return registered

    def rewind(self, rows: Rows, registered: Rows) -> None:
        self.registered[rows] = registered

    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None:
        del self._beams[slot]
        self.registered[slot] = 0

    def state(self) -> CacheState:
        held, filled = sum(self._beams.values()) * self.attention_window.max_seq_len, int(self.registered.sum())
        return CacheState(None, None, None, None, None, None, self.num_positions, held, filled)

    def check_consistency(self) -> None:
        """Raise AssertionError if a slot without a request has tokens."""
        holding = set(np.flatnonzero(self.registered).tolist())
        assert holding <= set(self._beams), "a slot without a sequence has tokens"
