"""What passes between engine and executor: batches and their outputs."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from ifbbench.engine.arrays import FloatArray, Int64Array, IntArray, Rows
from ifbbench.engine.drafts import DraftInputs
from ifbbench.engine.plan import ContextChunk

# The adapter of a request without one, in `AdapterUse.tasks`.
NO_ADAPTER = -1


class CopyKind(StrEnum):
    """Between which memories a block is copied."""

    DEVICE = "device"
    OFFLOAD = "offload"
    ONBOARD = "onboard"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Keys and values that an executor copies before its batch runs, in the order of the list.

    source, destination: indices in device memory; in host memory the source of ONBOARD and the destination of OFFLOAD.
    num_tokens: how many of the block's first cache positions are needed.
    window: index of the attention window.
    """

    kind: CopyKind
    source: int
    destination: int
    num_tokens: int
    window: int = 0


class AdapterLoad(NamedTuple):
    """An adapter to copy to these pages of the device before a batch runs.

    from_host: whether it is in host memory; otherwise it is read from where it is stored, and stays in host memory if
        `is_kept`.
    """

    task_id: int
    pages: tuple[int, ...]
    from_host: bool = True
    is_kept: bool = True


class AdapterUse(NamedTuple):
    """The adapters of a batch.

    tasks: [generation requests], task id of each or NO_ADAPTER; a context chunk has its request's `lora_task_id`.
    loads: loads to do before the batch runs, in this order.
    """

    tasks: Int64Array
    loads: tuple[AdapterLoad, ...] = ()


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
    beam_width: beam width of all requests of the batch. `beams` is None if that is 1 or there is no generation request.
    num_candidates: with beams, how many continuations of each request the search needs.
    padded: every prompt runs as long as the longest of the batch (static batching).
    copies: block copies to make before the batch runs, in this order.
    window_tables: block tables of the attention windows after the first, if layers differ in attention window.
    micro_batch: the number of the micro batch, with overlap or pipeline stages; else 0.
    adapters: LoRA adapters, None if no active request has one.
    drafts: draft tokens to verify; None if no request has any.
    loaded_tokens: tokens of which keys and values are copied from host memory, layer after layer while the batch runs.
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
    loaded_tokens: int = 0

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

    tokens: the token to append.
    beams: the beam to append it to.
    scores: float32, cumulative log-probability.
    """

    tokens: IntArray
    beams: IntArray
    scores: FloatArray


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Outputs of a batch: one for each last chunk, in batch order, then one for each generation request.

    tokens: [outputs], the chosen tokens; None with beams, and from executors without a model (tokens stay symbolic).
    candidates: candidates of beam search, else None.
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


class StepInputs(NamedTuple):
    """What a scheduler has taken for one iteration, beside the decision itself.

    positions: [rows and idle rows of the plan], position of each one's newest token. The others: see `Batch`.
    """

    positions: Rows
    copies: tuple[BlockCopy, ...] = ()
    adapters: AdapterUse | None = None
    drafts: DraftInputs | None = None
    loaded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """What all batches of a scheduler have in common.

    block_tables: block tables of each attention window, live views; see `Batch`.
    num_micro_batches: number of parts that the requests are divided into, which run in turn.
    has_separate_passes: whether context and generation run in one pass each.
    is_padded: see `Batch.padded`.
    """

    block_tables: tuple[IntArray, ...]
    tokens_per_block: int
    num_micro_batches: int = 1
    has_separate_passes: bool = False
    is_padded: bool = False
