"""The attention window of some layers: what a query sees, where positions are stored, how many blocks that takes."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Int64Array: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
Positions = TypeVar("Positions", Int64Array, np.int64)

UNLIMITED = 2**40


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True)
class AttentionWindow:
    """The rules of one attention window, for the cache manager, the attention planner and the kernels.

    All numbers are in tokens. The defaults describe a window that limits nothing.

    Visibility. The query at position p sees position k if k <= p, and k < `sink` or k > p - (`size` - `sink`): the sink
    tokens and the last `size` - `sink` positions up to its own, at most `size` keys. Keys keep the rotary angles of
    their own positions. (StreamingLLM, Xiao et al., arXiv:2309.17453, counts positions anew within the window;
    TensorRT-LLM does not, nor do models with a sliding window, which are the case `sink` = 0.)

    Storage. Sink tokens fill whole blocks: `bubble` unused cache positions follow them. Position p is registered as
    number c = p if p < `sink`, else p + `bubble`. It is stored at cache position c of the sequence's blocks if
    c < `capacity`, else at S + (c - S) mod (`capacity` - S) with S = `sink` + `bubble`, where it overwrites an older
    position. A window that is not cyclic (the linear mode of later versions of TensorRT-LLM) has a cache position for
    each position of the longest sequence, and limits only what queries see.

    max_seq_len: length of the longest sequence, in tokens.
    max_beam_width: with several beams a cyclic window has one spare block, so that a block is overwritten only when no
        query sees any of it.
    temporary: cache positions beyond the capacity that prompts may use.
    pads_sink: whether sink tokens fill whole blocks.

    Raises ValueError if the sink tokens fill the window.
    """

    tokens_per_block: int
    size: int = UNLIMITED
    max_seq_len: int = UNLIMITED
    sink: int = 0
    max_beam_width: int = 1
    temporary: int = 0
    is_cyclic: bool = True
    pads_sink: bool = True

    def __post_init__(self) -> None:
        if self.size <= self.sink:
            raise ValueError(f"an attention window of {self.size} tokens has no room beside {self.sink} sink tokens")

    def contiguous(self) -> "AttentionWindow":
        """The same window where each sequence has one block, as long as the longest sequence, and no bubble."""
        return replace(self, tokens_per_block=self.max_seq_len, is_cyclic=False, pads_sink=False)

    @cached_property
    def bubble(self) -> int:
        """Unused cache positions between the sink tokens and the next block."""
        return -self.sink % self.tokens_per_block if self.pads_sink else 0

    @cached_property
    def is_limited(self) -> bool:
        """Whether queries of the longest sequences do not see all earlier positions."""
        return self.size < self.max_seq_len

    @cached_property
    def wraps(self) -> bool:
        """Whether positions may be overwritten."""
        return self.is_cyclic and self.is_limited

    @cached_property
    def kept_tokens(self) -> int:
        """Tokens of a sequence that have a cache position of their own for certain."""
        return self.size if self.is_cyclic else max(self.size, self.max_seq_len)

    @cached_property
    def capacity(self) -> int:
        """Cache positions of a sequence, bubble included."""
        spare = self.tokens_per_block if self.max_seq_len > self.kept_tokens and self.max_beam_width > 1 else 0
        return self.kept_tokens + self.bubble + spare

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Size, sink, bubble and capacity as kernels take them: size 0 for no limit, capacity 0 if nothing wraps."""
        return self.size if self.is_limited else 0, self.sink, self.bubble, self.capacity if self.wraps else 0

    # What queries see.

    def sees(self, positions: Int64Array, query_positions: Int64Array | np.int64) -> Bools:
        """Whether a query sees an earlier position, or its own."""
        return (positions < self.sink) | (positions > query_positions - (self.size - self.sink))

    def is_straight(self, lengths: Int64Array) -> Bools:
        """Whether sequences of `lengths` are seen whole and stored in order, position p at cache position p."""
        return (lengths <= self.size) & (self.bubble == 0)

    # Where positions are stored.

    def wrapped(self, registered: Positions) -> Positions:
        """The cache positions of registered tokens, the bubble counted.

        This is the only definition of the wrap in Python. The Triton kernels restate it in
        `torch.kernels.launch.cache_offsets`, because they cannot call Python."""
        first = self.sink + self.bubble
        return np.where(  # type: ignore[return-value]
            registered < self.capacity, registered, first + (registered - first) % (self.capacity - first)
        )

    def cache_positions(self, positions: Int64Array) -> Int64Array:
        """The cache position of each position in its sequence's blocks."""
        registered = positions + self.bubble * (positions >= self.sink) if self.bubble else positions
        return self.wrapped(registered) if self.wraps else registered

    def cache_rows(self, tables: NDArray[np.int32], table_rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Where keys and values of `positions` are stored: block id * tokens per block + position in the block.

        tables: [sequences, blocks].
        table_rows: rows of `tables`, of a shape that broadcasts to that of `positions`.
        """
        stored = self.cache_positions(positions)
        blocks = tables[table_rows, stored // self.tokens_per_block].astype(np.int64)
        return blocks * self.tokens_per_block + stored % self.tokens_per_block

    def outlives(self, positions: Int64Array, ends: Int64Array | np.int64) -> Bools:
        """Whether no later position before `ends` overwrites each position."""
        if not self.wraps:
            return np.ones(positions.shape, dtype=np.bool_)
        return (positions < self.sink) | (positions >= ends - (self.capacity - self.sink - self.bubble))

    # How many blocks sequences take (TensorRT-LLM's `KVCacheManager`, v1.0).

    def blocks_used(self, longest: int) -> int:
        """Blocks of one beam of a sequence of `longest` tokens."""
        return ceil_div(min(longest + self.bubble, self.capacity), self.tokens_per_block)

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks of one beam of the longest sequence."""
        return self.prompt_blocks(self.max_seq_len)

    def prompt_blocks(self, prompt_len: int) -> int:
        """Blocks of one beam of a whole prompt."""
        return ceil_div(min(prompt_len + self.bubble, self.capacity + self.temporary), self.tokens_per_block)

    def private_blocks(self, prompt_len: int) -> range:
        """Indices of a prompt's blocks that each of several beams has for itself, because its next tokens are stored
        there: the block with the prompt's last token, unless that fills it. Others are shared until the window wraps.
        """
        if prompt_len < self.sink:
            # The next positions are sink positions, which are stored before the bubble.
            return range(prompt_len // self.tokens_per_block, self.prompt_blocks(prompt_len))
        last = int(self.wrapped(np.int64(prompt_len + self.bubble - 1)))
        block, is_full = last // self.tokens_per_block, (last + 1) % self.tokens_per_block == 0
        return range(block, block if is_full else block + 1)

    def blocks_of_beams(self, prompt_len: int, new_tokens: int, beam_width: int) -> int:
        """Distinct blocks of all beams after `new_tokens` generated tokens: blocks that generation has written to are
        each beam's own, the others are shared."""
        size, first_wrapped = self.tokens_per_block, self.sink + self.bubble
        registered = prompt_len + self.bubble
        count = max(self.prompt_blocks(prompt_len), self.blocks_used(prompt_len + new_tokens))
        own = set(self.private_blocks(prompt_len))
        if new_tokens >= self.capacity - first_wrapped:
            own.update(range(min(registered, first_wrapped) // size, count))
        elif new_tokens:
            first, last = (
                int(position) for position in self.wrapped(np.array([registered, registered + new_tokens - 1]))
            )
            own.update(range(first // size, count if last < first else last // size + 1))
            if last < first:
                own.update(range(first_wrapped // size, last // size + 1))
        return count + len(own) * (beam_width - 1)

    def more_for_beams(self, prompt_len: int, beam_width: int) -> int:
        """Blocks that a prompt takes in addition to all estimates where blocks are reused: then its last block is each
        beam's own even if it is full."""
        return beam_width - 1 if (prompt_len + self.bubble) % self.tokens_per_block == 0 else 0

    def first_chunk_need(self, prompt_len: int, max_new_tokens: int, draft_tokens: int = 0, beam_width: int = 1) -> int:
        """Blocks that a request takes in the iteration of its first context chunk: those of its whole prompt."""
        tokens = prompt_len + min(draft_tokens, max_new_tokens)
        if beam_width > 1:
            return self.blocks_of_beams(tokens, 0, beam_width)
        return self.blocks_used(tokens)

    def step_needs(
        self,
        registered: Int64Array,
        limit: Int64Array,
        draft_tokens: Int64Array | int = 0,
        beam_width: Int64Array | int = 1,
        steps: int = 1,
    ) -> Int64Array:
        """New blocks that each generation request takes in its next `steps` steps: none beyond the capacity.

        registered: [requests], tokens in each sequence, the bubble included.
        limit: [requests], the maximum that it may register, the bubble included.
        """
        size = self.tokens_per_block
        after = registered + np.minimum(steps * np.add(draft_tokens, 1), limit - registered)
        need: Int64Array = (-(-after // size) - -(-registered // size)) * beam_width
        need[after > self.capacity] = 0
        return need

    def blocks_to_completion(self, prompt_len: int, max_new_tokens: int, held: int = 0, beam_width: int = 1) -> int:
        """Blocks that a request in its context phase, which holds `held` blocks a beam, may still take until all its
        tokens are generated.

        Where several beams are allowed this differs from TensorRT-LLM, which counts neither the spare block nor the
        blocks that beams take when the window wraps: the capacity scheduler must be able to rely on it."""
        if beam_width > 1:
            # The blocks held are those of the prompt.
            now = self.blocks_of_beams(prompt_len, 0, beam_width) if held else 0
            return self.blocks_of_beams(prompt_len, max_new_tokens, beam_width) - now
        return self.prompt_blocks(prompt_len + max_new_tokens) - held
