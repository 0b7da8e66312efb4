"""What a query sees of its sequence, and where the sequence's positions lie in its blocks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.kv_cache.geometry import CacheGeometry

Int64Array = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNLIMITED = 2**40


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The rule of one attention window. All numbers are in tokens.

    The query at position p sees position k if k ≤ p, and k < `sink` or k > p − (`size` − `sink`): the sink tokens and
    the last `size` − `sink` positions up to its own, `size` keys at most. Keys keep the rotary angles of their own
    positions. (StreamingLLM, Xiao et al., arXiv:2309.17453, counts positions anew within the window; TensorRT-LLM does
    not, nor do models with a sliding window, which are the case `sink` = 0.)

    Position p is registered as c = p if p < `sink`, else p + `bubble`, and lies at place c of the sequence's blocks if
    that is below `capacity`, else at S + (c − S) mod (`capacity` − S) with S = `sink` + `bubble`: there it is written
    over what lay at that place before. With `capacity` None each position has a place of its own (linear mode).

    ValueError if sink tokens leave no room for a query's own position, or the places are fewer than what it sees.
    """

    tokens_per_block: int
    size: int = UNLIMITED
    sink: int = 0
    bubble: int = 0
    capacity: int | None = None

    def __post_init__(self) -> None:
        if self.size <= self.sink:
            raise ValueError(f"an attention window of {self.size} tokens has no room beside {self.sink} sink tokens")
        if self.capacity is not None and self.capacity < self.size + self.bubble:
            raise ValueError(f"{self.capacity} places for an attention window of {self.size} tokens")

    @classmethod
    def of(cls, geometry: CacheGeometry) -> "AttentionWindow":
        """The rule that `geometry` describes: without limit where no sequence is longer than the window."""
        size, sink, bubble = geometry.tokens_per_block, geometry.sink_token_length, geometry.bubble
        if geometry.attention_window >= geometry.max_seq_len:
            return cls(size, sink=sink, bubble=bubble)
        capacity = geometry.capacity if geometry.is_cyclic else None
        return cls(size, geometry.attention_window, sink, bubble, capacity)

    def is_straight(self, lengths: Int64Array) -> Bools:
        """Whether sequences of `lengths` lie in order, position p at place p, and are seen whole."""
        return (lengths <= self.size) & (self.bubble == 0)

    def sees(self, positions: Int64Array, query_positions: Int64Array | np.int64) -> Bools:
        """Whether a query sees an earlier position, or its own."""
        return (positions < self.sink) | (positions > query_positions - (self.size - self.sink))

    def places(self, positions: Int64Array) -> Int64Array:
        """The place of each position."""
        if self.bubble == 0 and self.capacity is None:
            return positions
        registered = positions + self.bubble * (positions >= self.sink)
        if self.capacity is None:
            return registered
        first = self.sink + self.bubble
        return np.where(registered < self.capacity, registered, first + (registered - first) % (self.capacity - first))

    def outlives(self, positions: Int64Array, ends: Int64Array | np.int64) -> Bools:
        """Whether no later position before `ends` is written over each position."""
        if self.capacity is None:
            return np.ones(positions.shape, dtype=np.bool_)
        return (positions < self.sink) | (positions >= ends - (self.capacity - self.sink - self.bubble))

    def cache_rows(self, tables: NDArray[np.int32], table_rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Where keys and values of `positions` are stored: block id · tokens per block + position in block.

        tables: [sequences, blocks]. table_rows: which of the sequences, of a shape that broadcasts to the positions'.
        """
        places = self.places(positions)
        blocks = tables[table_rows, places // self.tokens_per_block].astype(np.int64)
        return blocks * self.tokens_per_block + places % self.tokens_per_block
