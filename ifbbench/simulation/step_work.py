"""What one iteration asks of a device, in the few sums that its time depends on."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ifbbench.engine.batch import Batch


class StepWork(NamedTuple):
    """The work of one batch, summed over its requests; what it costs is linear or flat in each of these.

    context_tokens, context_requests: of all context chunks.
    attention_pairs: query-key pairs of context attention. A chunk of n tokens that starts at position s has
        n·s + n·(n + 1) / 2 of them: every token sees all before it, and itself.
    context_kv_tokens: keys that the chunks read, the sum of start plus length.
    generation_tokens: requests in generation, times their beams.
    generation_kv_tokens: keys that these read, each one's KV length with the new token in it.
    outputs: rows that get logits: generation tokens, and one for each chunk that ends its prompt.
    """

    context_tokens: int = 0
    context_requests: int = 0
    attention_pairs: int = 0
    context_kv_tokens: int = 0
    generation_tokens: int = 0
    generation_kv_tokens: int = 0
    outputs: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the layers."""
        return self.context_tokens + self.generation_tokens

    @classmethod
    def of_lengths(
        cls,
        context: Iterable[tuple[int, int, bool]] = (),
        kv_lengths: Iterable[int] = (),
        window: int | None = None,
    ) -> "StepWork":
        """The work of chunks and generation requests given by their lengths, in tokens.

        context: start, length and whether it is the prompt's last, of each chunk. kv_lengths: of each generation
        request, its new token included. window: how many positions up to its own a query sees; None if all.
        """
        lengths = [length if window is None else min(length, window) for length in kv_lengths]
        return cls._sum(context, len(lengths), sum(lengths), window)

    @classmethod
    def of_batch(cls, batch: Batch, window: int | None = None) -> "StepWork":
        """The work of `batch`, whose layers all see `window` positions. Padded prompts are as long as the longest."""
        chunks = [(chunk.start, chunk.length, chunk.is_last) for chunk in batch.context]
        if batch.padded and chunks:
            longest = max(length for _, length, _ in chunks)
            chunks = [(start, longest, is_last) for start, _, is_last in chunks]
        cached = batch.positions if window is None else np.minimum(batch.positions, window - 1)
        tokens = len(batch.slots) * batch.beam_width
        return cls._sum(chunks, tokens, int(np.add.reduce(cached, dtype=np.int64)) * batch.beam_width + tokens, window)

    @classmethod
    def of_windows(cls, batch: Batch, windows: Sequence[tuple[int | None, float]]) -> "StepWork":
        """The work of `batch` in a mean layer. windows: as `of_batch` has them, and the share of layers with each."""
        return cls.mean([(cls.of_batch(batch, window), share) for window, share in windows])

    @classmethod
    def mean(cls, works: Sequence[tuple["StepWork", float]]) -> "StepWork":
        """The work of a mean layer, from that of some kinds of layers and the share of each. Their attention differs,
        the rest is the same in all."""
        if len(works) == 1:
            return works[0][0]
        return works[0][0]._replace(
            attention_pairs=round(sum(work.attention_pairs * share for work, share in works)),
            context_kv_tokens=round(sum(work.context_kv_tokens * share for work, share in works)),
            generation_kv_tokens=round(sum(work.generation_kv_tokens * share for work, share in works)),
        )

    def part(self, count: int) -> "StepWork":
        """The largest of `count` parts of about the same size."""
        return StepWork(*(-(-value // count) for value in self))

    @classmethod
    def _sum(
        cls,
        chunks: Iterable[tuple[int, int, bool]],
        generation_tokens: int,
        generation_kv_tokens: int,
        window: int | None,
    ) -> "StepWork":
        tokens = count = pairs = kv_tokens = num_last = 0
        for start, length, is_last in chunks:
            tokens += length
            count += 1
            pairs += _pairs(start, length, window)
            kv_tokens += _keys_read(start, length, window)
            num_last += is_last
        return cls(
            tokens, count, pairs, kv_tokens, generation_tokens, generation_kv_tokens, generation_tokens + num_last
        )


def _keys_read(start: int, length: int, window: int | None) -> int:
    """The keys that a chunk's queries see between them: with a window, the first query's reach back and no further."""
    return start + length if window is None else min(start, window - 1) + length


def _pairs(start: int, length: int, window: int | None) -> int:
    """Queries at positions start … start + length − 1, each with its own position and those before it."""
    if window is None:
        return length * start + length * (length + 1) // 2
    growing = min(max(window - start, 0), length)
    return growing * start + growing * (growing + 1) // 2 + (length - growing) * window
