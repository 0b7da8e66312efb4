"""What passes between engine and executor: batches, their outputs, and the builder of batches."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.engine.active import NO_ROWS, ActiveRequests, FloatArray, Int64Array, IntArray, Rows
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.config import BatchingType
from ifbbench.engine.drafts import DraftInputs, Drafts
from ifbbench.engine.request import Request
from ifbbench.kv.adapters import AdapterCache, AdapterUse, distinct_tasks
from ifbbench.kv.blocks import BlockCopy
from ifbbench.kv.interface import KvCache


class Positions:
    """The positions of the next tokens of generation requests. count: of how many. total: their sum."""

    def __init__(self, kv_cache: KvCache, rows: Rows, num_registered: int, registered: Rows | None = None) -> None:
        """num_registered: tokens in the sequences of `rows`, the bubbles included. registered: of each, if known."""
        self.count = len(rows)
        self.total = num_registered - self.count * kv_cache.attention_window.bubble
        self._kv_cache, self._rows, self._registered = kv_cache, rows, registered

    def of_each(self) -> Int64Array:
        """[requests]."""
        if self._registered is None:
            return self._kv_cache.cached_tokens(self._rows)
        return self._registered - self._kv_cache.attention_window.bubble


class ContextChunk:
    """A part of one prompt to compute: positions `start` to `start + length - 1` of `request`."""

    def __init__(self, request: Request, start: int, length: int) -> None:
        self.request, self.start, self.length = request, start, length

    @property
    def is_last(self) -> bool:
        """Whether the chunk completes the prompt, so that it yields a token."""
        return self.start + self.length == self.request.prompt_len

    def tokens(self) -> IntArray:
        """Token ids of the chunk, [length]. ValueError if the prompt is symbolic."""
        return self.request.tokens_between(self.start, self.start + self.length)


@dataclass(frozen=True, slots=True)
class BeamInputs:
    """Decisions of beam search after the previous step, for the generation requests of a batch.

    tokens: [requests, beams], newest token of each beam.
    parents: [requests, beams], the beam of the previous step that each one continues. Before its step, the executor
        gives each beam its parent's keys and values at the beam's own positions. All are 0 after the context phase.
    scores: [requests, beams], float32, cumulative log-probability of each beam.
    private_from: [requests], a position before which beams share all blocks. They may share some after it, too.
    """

    tokens: IntArray
    parents: IntArray
    scores: FloatArray
    private_from: IntArray


class Batch(NamedTuple):
    """One pass through the model, packed: context chunks first, then one token of each generation request and beam.

    slots: [generation requests], the sequence slot of each.
    positions: [generation requests], position of each one's newest token (the number of tokens cached before it).
    block_tables: [slots, beams, blocks per sequence], a live view of the block ids of every slot; to be read before
        `submit` returns. Entries beyond a sequence's length are meaningless.
    beam_width: of all requests of the batch. `beams` is None if that is 1 or there is no generation request.
    num_candidates: with beams, how many continuations of each request the search needs.
    padded: every prompt runs as long as the longest of the batch (static batching).
    copies: block copies to make before the batch runs, in this order.
    window_tables: block tables of the attention windows after the first, if layers differ in attention window.
    micro_batch: the number of the micro batch, with overlap or pipeline stages; else 0.
    adapters: LoRA adapters, None if no active request has one.
    drafts: draft tokens to verify; None if no request has any.
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
    micro_batch: int = 0
    adapters: AdapterUse | None = None
    drafts: DraftInputs | None = None

    @property
    def num_last_chunks(self) -> int:
        """Context chunks that complete their prompts. Each yields an output, before those of generation."""
        return sum(chunk.is_last for chunk in self.context)

    @property
    def num_outputs(self) -> int:
        """Requests that get tokens."""
        return self.num_last_chunks + len(self.slots)

    @property
    def num_context_tokens(self) -> int:
        return sum(chunk.length for chunk in self.context)

    @property
    def num_tokens(self) -> int:
        num_drafts = 0 if self.drafts is None else len(self.drafts.tokens)
        return self.num_context_tokens + len(self.slots) * self.beam_width + num_drafts


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The best continuations of each request over all its beams, best first. Arrays are [outputs, num_candidates].

    tokens: the token to append. beams: the beam to append it to. scores: float32, cumulative log-probability.
    """

    tokens: IntArray
    beams: IntArray
    scores: FloatArray


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Outputs of a batch: one for each last chunk, in batch order, then one for each generation request.

    tokens: [outputs], the chosen tokens; None with beams, and from executors without a model (tokens stay symbolic).
    candidates: of beam search, else None.
    log_probs: [outputs], log-probability of each chosen token; None if no request asked.
    context_logits: index of a context chunk -> [length, vocabulary], for requests that asked.
    generation_logits: index of an output -> [beams, vocabulary], the logits from which its token was chosen, for
        requests that asked. Of a last chunk: [1, vocabulary].
    accepted: [outputs], how many of its draft tokens were accepted; None without drafts, and from executors without a
        model, where the engine draws it.
        Of a batch with drafts, `tokens` and `log_probs` are [outputs, 1 + maximum of drafts], of which the first
        1 + accepted of each row are valid, and generation logits [1 + accepted, vocabulary].
    draft_s: seconds of the device that the draft model took.
    """

    tokens: IntArray | None = None
    candidates: BeamCandidates | None = None
    log_probs: FloatArray | None = None
    context_logits: dict[int, FloatArray] = field(default_factory=dict)
    generation_logits: dict[int, FloatArray] = field(default_factory=dict)
    accepted: IntArray | None = None
    draft_s: float = 0.0


NO_OUTPUTS = StepOutputs()


def check_outputs(outputs: StepOutputs, batch: Batch) -> None:
    """TypeError or ValueError if `outputs`, which an executor returned, do not have the types and shapes of those of
    `batch`."""
    if outputs is NO_OUTPUTS:
        return
    if not isinstance(outputs, StepOutputs):
        raise TypeError(f"it returned {type(outputs).__name__}; expected StepOutputs")
    count, drafts = batch.num_outputs, batch.drafts
    shape: tuple[int, ...] = (count,) if drafts is None else (count, 1 + int(drafts.counts.max(initial=0)))
    if outputs.tokens is not None:
        _check_array("tokens", outputs.tokens, shape, "iu")
    if outputs.log_probs is not None:
        _check_array("log_probs", outputs.log_probs, shape, "f")
    if drafts is not None and outputs.accepted is not None:
        _check_array("accepted", outputs.accepted, (count,), "iu")
        if ((outputs.accepted < 0) | (outputs.accepted > drafts.counts)).any():
            raise ValueError("its accepted has other numbers of draft tokens than the batch")
    if (candidates := outputs.candidates) is not None:
        shape = count, batch.num_candidates
        _check_array("candidates.tokens", candidates.tokens, shape, "iu")
        _check_array("candidates.beams", candidates.beams, shape, "iu")
        _check_array("candidates.scores", candidates.scores, shape, "f")
        if ((candidates.beams < 0) | (candidates.beams >= batch.beam_width)).any():
            raise ValueError(f"its candidates.beams has other beams than 0 to {batch.beam_width - 1}")
    for index, logits in outputs.context_logits.items():
        if not 0 <= index < len(batch.context):
            raise ValueError(f"its context_logits has chunk {index}, and the batch has {len(batch.context)}")
        _check_array(f"context_logits[{index}]", logits, (batch.context[index].length, None), "f")
    for index, logits in outputs.generation_logits.items():
        if not 0 <= index < count:
            raise ValueError(f"its generation_logits has output {index}, and the batch has {count}")
        _check_array(f"generation_logits[{index}]", logits, (None, None), "f")


def _check_array(name: str, array: object, shape: tuple[int | None, ...], kinds: str) -> None:
    """ValueError if `array` is no array of this shape, where None is any size, and of one of these kinds of types."""
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.kind not in kinds
        or array.ndim != len(shape)
        or any(size not in (None, found) for size, found in zip(shape, array.shape, strict=True))
    ):
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"its {name} is {found}; expected {'floats' if kinds == 'f' else 'integers'} of [{sizes}]")


class BatchBuilder:
    """Builds the passes of an iteration, and takes the KV blocks that they write to."""

    def __init__(
        self,
        batching_type: BatchingType,
        active: ActiveRequests,
        kv_cache: KvCache,
        drafts: Drafts,
        max_in_flight: int = 1,
        adapters: AdapterCache | None = None,
    ) -> None:
        self._max_in_flight = max_in_flight
        self._adapters = adapters
        self._separate_passes = batching_type is BatchingType.INFLIGHT
        self._padded = batching_type is BatchingType.V1
        self._active = active
        self._kv_cache = kv_cache
        self._drafts = drafts
        # The latest rows, and the same as slots of a batch.
        self._rows, self._slots = NO_ROWS, NO_ROWS.astype(np.int32)

    def build(
        self, iteration: int, context: list[Request], rows: Rows, idle: Rows = NO_ROWS, now_s: float = 0.0
    ) -> tuple[Batch, ...]:
        """The passes that run the chunks of `context` and one step of the generation requests in `rows`: one, or one
        for each phase (INFLIGHT).

        idle: rows of complete requests that stay in a static batch; they overwrite their last position. There is no
        pass for them alone. Raises OutOfBlocks, or OutOfAdapterPages, if the requests do not fit."""
        for request in context:
            if request.is_first_chunk:
                reused = self._kv_cache.add_request(request, now_s)
                request.set_prepopulated(reused, self._kv_cache.attention_window.tokens_per_block)
                if request.num_draft_tokens:
                    self._kv_cache.add_draft_tokens(np.array([request.slot]), np.array([request.num_draft_tokens]))
        chunks = tuple([ContextChunk(request, request.position, request.chunk) for request in context])
        positions = self._kv_cache.add_tokens(rows)
        drafts = None
        if self._active.table.max_draft_tokens:
            drafts = self._drafts.take([chunk.request for chunk in chunks if chunk.is_last], rows)
        if not chunks and not len(rows):
            return ()
        if len(idle):
            positions = np.concatenate([positions, self._kv_cache.registered[idle] - 1])
            rows = np.concatenate([rows, idle])
        if bubble := self._kv_cache.attention_window.bubble:
            positions -= bubble
        copies, adapters = self._kv_cache.take_copies(), None
        if self._adapters is not None and self._active.num_with_lora:
            adapters = self._use_adapters(self._adapters, chunks, rows)
        if chunks and len(rows) and self._separate_passes:
            num_last_chunks = sum(chunk.is_last for chunk in chunks)
            drafts_of_context, drafts_of_generation = (None, None) if drafts is None else drafts.split(num_last_chunks)
            of_context = adapters and adapters._replace(tasks=NO_ROWS)
            of_generation = adapters and adapters._replace(loads=())
            return (
                self._pass(iteration, chunks, NO_ROWS, NO_ROWS, copies, of_context, drafts_of_context),
                self._pass(iteration, (), rows, positions, (), of_generation, drafts_of_generation),
            )
        return (self._pass(iteration, chunks, rows, positions, copies, adapters, drafts),)

    def _use_adapters(self, cache: AdapterCache, chunks: tuple[ContextChunk, ...], rows: Rows) -> AdapterUse:
        """The adapters of these chunks and of the generation requests in `rows`, which are now on the device."""
        tasks = self._active.table.lora_tasks[rows]
        of_chunks = [chunk.request.lora_task_id for chunk in chunks if chunk.request.lora_task_id is not None]
        return AdapterUse(tasks, cache.use(distinct_tasks(tasks, of_chunks)))

    def _pass(
        self,
        iteration: int,
        chunks: tuple[ContextChunk, ...],
        rows: Rows,
        positions: Rows,
        copies: tuple[BlockCopy, ...] = (),
        adapters: AdapterUse | None = None,
        drafts: DraftInputs | None = None,
    ) -> Batch:
        cache = self._kv_cache
        if rows is not self._rows:  # a plan that stands has the same rows again
            self._rows, self._slots = rows, rows.astype(np.int32)
        tables, width, beams, num_candidates = cache.block_tables, 1, None, 0
        if tables.shape[1] > 1:
            requests = [self._active.by_slot[row] for row in rows.tolist()]
            width = (requests[0] if requests else chunks[0].request).beam_width
            beams = self._beams(requests) if width > 1 else None
            num_candidates = max(
                BeamSearch.num_candidates(request.beam_width, request.stop) for request in self._active.by_slot.values()
            )
        return Batch(
            iteration,
            chunks,
            self._slots,
            positions.astype(np.int32),
            tables,
            width,
            beams,
            num_candidates,
            self._padded,
            copies,
            cache.window_tables,
            iteration % self._max_in_flight,
            adapters,
            drafts,
        )

    def _beams(self, requests: list[Request]) -> BeamInputs | None:
        """Decisions of the searches of `requests`; None without any, as with executors that return no tokens."""
        searches = [request.search for request in requests if request.search is not None]
        if not searches:
            return None
        size = self._kv_cache.attention_window.tokens_per_block
        return BeamInputs(
            tokens=np.stack([search.tokens for search in searches]),
            parents=np.stack([search.parents for search in searches]),
            scores=np.stack([search.scores for search in searches]),
            # The prompt's last block may be private to each beam even if it is full.
            private_from=np.array([max(request.prompt_len - size, 0) for request in requests], np.int32),
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class NullExecutor:
    """An Executor that makes no tokens: those of requests stay symbolic."""

    def submit(self, batch: Batch) -> None:
        pass

    def collect(self) -> StepOutputs:
        return NO_OUTPUTS

    def close(self) -> None:
        pass
