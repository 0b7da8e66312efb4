"""A batch that is ready to run: all that the executor reads of requests and block tables, which go on changing."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ifbbench.engine.batch import BeamInputs, ContextChunk
from ifbbench.engine.request_table import IntArray
from ifbbench.engine.sampling_params import OutputOptions, SamplingParams
from ifbbench.execution.cache_windows import CacheMoves
from ifbbench.execution.numbers import ContextRows
from ifbbench.execution.packing import PackedBatch

# A pass through the model: from the newest token of each generation request and beam, int64 [rows], to logits [output
# rows + context logits' rows, vocabulary].
ModelPass = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """What is to be remembered of the request in a slot. prompt: its ids once it is complete, if a penalty asks."""

    slot: int
    original_prompt_len: int
    sampling: SamplingParams
    options: OutputOptions
    prompt: IntArray | None

    @classmethod
    def of(cls, chunk: ContextChunk) -> "SlotOwner":
        """The request of `chunk`, as it is now."""
        request = chunk.request
        is_penalised = chunk.is_last and request.sampling.repetition_penalty != 1.0
        prompt = request.tokens_between(0, request.prompt_len).copy() if is_penalised else None
        return cls(request.slot, request.original_prompt_len, request.sampling, request.options, prompt)


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What a batch with beams has more. num_candidates: continuations wanted of each request."""

    width: int
    inputs: BeamInputs
    num_candidates: int


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch with its tensors on the device. owners: of its chunks' slots. slots: int64 [generation requests].

    beams: None with one beam a request. context_rows: None if nobody wants context logits.
    """

    iteration: int
    owners: tuple[SlotOwner, ...]
    packed: PackedBatch
    slots: Tensor
    beams: BeamStep | None
    context_rows: ContextRows | None
    moves: CacheMoves
    forward: ModelPass
