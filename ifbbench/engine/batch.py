"""What an executor is given and must answer: the border between scheduling and execution."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.kv_cache.blocks import BlockCopy
from ifbbench.engine.request import Request
from ifbbench.engine.request_table import IntArray

FloatArray = NDArray[np.float32]
IntArray64 = NDArray[np.int64]


class ContextChunk(NamedTuple):
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
class BeamInputs:
    """What beam search decided after the step before, for the generation requests of a batch, all of one beam width.

    tokens: [requests, beams], newest token of each beam.
    parents: [requests, beams], which beam of the step before each one goes on from. Before its step, the executor makes
        the keys and values of each beam's own positions those of its parent. After the context phase all go on from 0.
    scores: [requests, beams], float32, log-probability of each beam's tokens together.
    private_from: [requests], a position before which beams share all blocks. Behind it they may still share some.
    """

    tokens: IntArray
    parents: IntArray
    scores: FloatArray
    private_from: IntArray


class Batch(NamedTuple):
    """One pass through the model, packed: context chunks first, then one token of each generation request and beam.

    slots: [generation requests], the sequence slot of each.
    positions: [generation requests], where each one's newest token goes in its sequence (tokens cached before it).
    block_tables: [slots, beams, blocks per sequence], a live view of the block ids of every slot; to be read before
        `submit` returns. Entries beyond a sequence's length are meaningless.
    beam_width: of all requests of the batch. `beams` is None where that is 1 or there is no generation request.
    num_candidates: with beams, how many continuations of each request the search needs.
    padded: every prompt is to be run as long as the longest of the batch, as static batching does.
    copies: what to move between blocks before the batch runs, in this order.
    window_tables: block tables like `block_tables` of the attention windows after the first, where layers differ in it.
    """

    iteration: int
    context: tuple[ContextChunk, ...]
    slots: IntArray
    positions: IntArray
    block_tables: IntArray
    beam_width: int = 1
    beams: BeamInputs | None = None
    num_candidates: int = 0
    padded: bool = False
    copies: tuple[BlockCopy, ...] = ()
    window_tables: tuple[IntArray, ...] = ()

    @property
    def num_context_tokens(self) -> int:
        return sum(chunk.length for chunk in self.context)

    @property
    def num_tokens(self) -> int:
        return self.num_context_tokens + len(self.slots) * self.beam_width


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The best continuations of each request over all its beams, best first. All are [outputs, num_candidates].

    tokens: the token to add. beams: the beam to add it to. scores: float32, log-probability of the whole then.
    """

    tokens: IntArray
    beams: IntArray
    scores: FloatArray

    def joined_with(self, other: "BeamCandidates") -> "BeamCandidates":
        """These outputs, then those of `other`."""
        return BeamCandidates(
            np.concatenate([self.tokens, other.tokens]), np.concatenate([self.beams, other.beams]),
            np.concatenate([self.scores, other.scores]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a batch yields. Its outputs are its last chunks, in batch order, then its generation requests.

    tokens: [outputs], the chosen token of each; None with beams, and from executors that make no tokens (the requests'
        tokens then stay symbolic).
    candidates: of beam search, None elsewhere.
    log_probs: [outputs], the log-probability that the model gives each chosen token; None if no request asked.
    context_logits: index of a context chunk -> [length, vocabulary], for requests that asked.
    generation_logits: index of an output -> [beams, vocabulary], the logits that its token was chosen by, for requests
        that asked. Of a last chunk: [1, vocabulary].
    """

    tokens: IntArray | None = None
    candidates: BeamCandidates | None = None
    log_probs: FloatArray | None = None
    context_logits: dict[int, FloatArray] = field(default_factory=dict)
    generation_logits: dict[int, FloatArray] = field(default_factory=dict)

    def joined_with(self, other: "StepOutputs", offset: int) -> "StepOutputs":
        """These outputs, `offset` in number, then those of `other`, a pass without context."""
        generation_logits = {offset + index: logits for index, logits in other.generation_logits.items()}
        return StepOutputs(
            tokens=None if self.tokens is None or other.tokens is None else np.append(self.tokens, other.tokens),
            candidates=self._candidates_with(other),
            log_probs=self._log_probs_with(other, offset),
            context_logits=self.context_logits,
            generation_logits=self.generation_logits | generation_logits,
        )

    def _candidates_with(self, other: "StepOutputs") -> BeamCandidates | None:
        if self.candidates is None or other.candidates is None:
            return self.candidates or other.candidates
        return self.candidates.joined_with(other.candidates)

    def _log_probs_with(self, other: "StepOutputs", offset: int) -> FloatArray | None:
        """Zeros stand for a pass in which nobody asked."""
        if other.log_probs is not None:
            mine = np.zeros(offset, np.float32) if self.log_probs is None else self.log_probs
            return np.concatenate([mine, other.log_probs])
        if self.log_probs is not None and other.tokens is not None:
            return np.concatenate([self.log_probs, np.zeros(len(other.tokens), np.float32)])
        return None


NO_OUTPUTS = StepOutputs()


@runtime_checkable
class PredictableExecutor(Protocol):
    """An executor on a virtual clock that can say beforehand how long iterations will take, and makes no tokens."""

    def generation_times(self, positions: IntArray64, steps: int) -> tuple[int, IntArray64]:
        """Of the next `steps` iterations of nothing but these generation requests: the host's time in each, and the
        device's, [steps]; both in nanoseconds. positions: [requests], where each one's next token goes."""
        ...


class Executor(Protocol):
    """Runs batches in the order of their submission. It never decides what runs.

    An executor remembers the newest token of each slot, so generation requests are named by slot alone; a first chunk
    (or the first after a resume) in a slot says that the slot has a new owner. Several batches may be under way.
    """

    def submit(self, batch: Batch) -> None:
        """Start one batch, to run after those submitted before. One that raises has started nothing."""
        ...

    def collect(self) -> StepOutputs:
        """Wait for the oldest batch under way, and return what it yields. One that raises has lost that batch."""
        ...

    def close(self) -> None:
        """Give back memory and threads."""
        ...


@runtime_checkable
class WarmingExecutor(Protocol):
    """An executor that can do beforehand what would else be done when it is first needed."""

    def warm_up(self, hear: Callable[[int, int], None]) -> None:
        """Do it. Some batches have run, and none is under way. hear: is told how much is done, of how much."""
        ...
