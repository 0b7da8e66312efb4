"""What an executor is given and must answer: the border between scheduling and execution."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ifbbench.batching.request import Request

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """A stretch of one prompt to compute: positions `start` to `start + length - 1` of `request`."""

    request: Request
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after this chunk, so that it yields a token."""
        return self.start + self.length == self.request.prompt_len

    def tokens(self) -> IntArray:
        """The chunk's token ids, [length]. Made on demand: executors without a model never ask."""
        return self.request.tokens_between(self.start, self.start + self.length)


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration's work, packed: context chunks first, then one token of each generation request.

    slots: [generation requests], the sequence slot of each.
    positions: [generation requests], where each one's newest token goes in its sequence (tokens cached before it).
    block_tables: [slots, blocks per sequence], a live view of the block ids of every slot. Entries beyond a
        sequence's length are meaningless. The rows of this batch do not change until it is collected.
    """

    iteration: int
    context: tuple[ContextChunk, ...]
    slots: IntArray
    positions: IntArray
    block_tables: IntArray

    @property
    def num_context_tokens(self) -> int:
        return sum(chunk.length for chunk in self.context)

    @property
    def num_tokens(self) -> int:
        return self.num_context_tokens + len(self.slots)


class Executor(Protocol):
    """Runs batches. It never decides what runs.

    An executor remembers the newest token of each slot, so generation requests are named by slot alone; a first chunk
    (or the first after a resume) in a slot says that the slot has a new owner.
    """

    def submit(self, batch: Batch) -> None:
        """Start one iteration. At most one is under way."""
        ...

    def collect(self) -> IntArray | None:
        """Wait for the submitted iteration: token ids of its last chunks, in batch order, then of its generation
        requests, in batch order. None from executors that make no tokens (the requests' tokens stay symbolic)."""
        ...

    def close(self) -> None:
        """Give back memory and threads."""
        ...
