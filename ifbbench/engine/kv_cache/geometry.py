"""How many KV cache blocks a sequence takes: the arithmetic of TensorRT-LLM's `KVCacheManager` (v1.0)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True)
class CacheGeometry:
    """Block size and limits of one attention window, all in tokens.

    Sink tokens fill whole blocks: `bubble` empty places behind them, which count as registered tokens. `capacity` is
    how many tokens a sequence keeps before its blocks are used cyclically. With `is_cyclic` false (the linear mode of
    later versions) a sequence has places for all its tokens, and the window only limits what attention sees.
    """

    tokens_per_block: int
    attention_window: int
    max_seq_len: int
    sink_token_length: int = 0
    max_beam_width: int = 1
    temporary_window: int = 0
    is_cyclic: bool = True

    @cached_property
    def bubble(self) -> int:
        return -self.sink_token_length % self.tokens_per_block

    @cached_property
    def kept_tokens(self) -> int:
        """Tokens of a sequence that have a place of their own."""
        return self.attention_window if self.is_cyclic else max(self.attention_window, self.max_seq_len)

    @cached_property
    def capacity(self) -> int:
        spare = self.tokens_per_block if self.max_seq_len > self.kept_tokens and self.max_beam_width > 1 else 0
        return self.kept_tokens + self.bubble + spare

    def places(self, registered: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the token after so many registered ones lies in its sequence's blocks. Behind the sink, places are used
        in turn."""
        kept = self.sink_token_length + self.bubble
        return np.where(registered < self.capacity, registered, kept + (registered - kept) % (self.capacity - kept))

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks of one beam of the longest sequence."""
        longest = min(self.max_seq_len + self.bubble, self.capacity + self.temporary_window)
        return ceil_div(longest, self.tokens_per_block)

    def prompt_blocks(self, prompt_len: int) -> int:
        """Blocks of one beam that a whole prompt takes."""
        registered = prompt_len + self.bubble
        return ceil_div(min(registered, self.capacity + self.temporary_window), self.tokens_per_block)

    def private_blocks(self, prompt_len: int) -> range:
        """Which blocks of a prompt each of several beams has for itself, because its next tokens go there: the one with
        the prompt's last token, unless that fills it. The others are shared until the window wraps."""
        if prompt_len < self.sink_token_length:
            # The next positions are sink positions: they are stored before the bubble.
            return range(prompt_len // self.tokens_per_block, self.prompt_blocks(prompt_len))
        last = int(self.places(np.int64(prompt_len + self.bubble - 1)))
        block, is_full = last // self.tokens_per_block, (last + 1) % self.tokens_per_block == 0
        return range(block, block if is_full else block + 1)

    def blocks_of_beams(self, prompt_len: int, new_tokens: int, beam_width: int) -> int:
        """Different blocks of all beams once `new_tokens` have been generated: those that generation has written to
        are each beam's own, the others are shared."""
        size, first_in_turn = self.tokens_per_block, self.sink_token_length + self.bubble
        registered = prompt_len + self.bubble
        count = max(self.prompt_blocks(prompt_len), ceil_div(min(registered + new_tokens, self.capacity), size))
        own = set(self.private_blocks(prompt_len))
        if new_tokens >= self.capacity - first_in_turn:
            own.update(range(first_in_turn // size, count))
        elif new_tokens:
            first, last = (int(place) for place in self.places(np.array([registered, registered + new_tokens - 1])))
            own.update(range(first // size, count if last < first else last // size + 1))
            if last < first:
                own.update(range(first_in_turn // size, last // size + 1))
        return count + len(own) * (beam_width - 1)

    def more_for_beams(self, prompt_len: int, beam_width: int) -> int:
        """Blocks that a prompt takes beyond all estimates where blocks are reused: its last one is then each beam's own
        even if it is full."""
        return beam_width - 1 if (prompt_len + self.bubble) % self.tokens_per_block == 0 else 0

    def first_chunk_need(self, prompt_len: int, max_new_tokens: int, draft_tokens: int = 0, beam_width: int = 1) -> int:
        """Blocks that a request takes in the iteration of its first context chunk: those of its whole prompt."""
        tokens = prompt_len + min(draft_tokens, max_new_tokens)
        if beam_width > 1:
            return self.blocks_of_beams(tokens, 0, beam_width)
        tokens = min(tokens, self.kept_tokens) + self.bubble
        return ceil_div(tokens, self.tokens_per_block)

    def step_needs(
        self,
        registered: NDArray[np.int64],
        limit: NDArray[np.int64],
        draft_tokens: NDArray[np.int64] | int = 0,
        beam_width: NDArray[np.int64] | int = 1,
        steps: int = 1,
    ) -> NDArray[np.int64]:
        """Blocks that each generation request takes in its next `steps` steps.

        registered: [requests], tokens in each KV sequence, the bubble included.
        limit: [requests], the most tokens it may ever register, the bubble included.
        """
        size = self.tokens_per_block
        after = registered + np.minimum(steps * (draft_tokens + 1), limit - registered)
        need: NDArray[np.int64] = (-(-after // size) - -(-registered // size)) * beam_width
        need[after > self.capacity] = 0
        return need

    def total_blocks(self, prompt_len: int, max_new_tokens: int) -> int:
        """Blocks of a request of one beam when it is complete."""
        longest = self.kept_tokens + self.temporary_window
        return ceil_div(min(prompt_len + max_new_tokens, longest) + self.bubble, self.tokens_per_block)

    def blocks_to_completion(self, prompt_len: int, max_new_tokens: int, held: int = 0, beam_width: int = 1) -> int:
        """Blocks that a request in its context phase, which holds `held` blocks a beam, may still take until all its
        tokens are made.

        TensorRT-LLM counts beams as if a window kept the prompt's blocks shared; here those are counted that they take
        when the window wraps, for what is promised to a request must be there."""
        if beam_width > 1:
            # Those that it holds are its prompt's.
            now = self.blocks_of_beams(prompt_len, 0, beam_width) if held else 0
            return self.blocks_of_beams(prompt_len, max_new_tokens, beam_width) - now
        return self.total_blocks(prompt_len, max_new_tokens) - held
