"""A batch as an executor runs it: its tensors on the device, and copies of what it reads of requests."""

from dataclasses import dataclass

from torch import Tensor

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import BeamInputs
from ifbbench.engine.drafts import DraftInputs
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.sampling_params import OutputOptions, SamplingParams
from ifbbench.torch.cache_windows import CacheMoves
from ifbbench.torch.draft_model import Propose
from ifbbench.torch.packing import ContextRows, Int64Array, ModelPass, PackedBatch


@dataclass(frozen=True, slots=True)
class PreparedDrafts:
    """What a batch with drafts needs beside other batches.

    inputs: draft tokens that the engine gives.
    num_last_chunks: how many of the outputs are of prompts.
    prompt_ends: int64 [last chunks], the last token of each prompt.
    propose: lets the draft model propose tokens; None without one.
    """

    inputs: DraftInputs
    num_last_chunks: int
    prompt_ends: Int64Array
    propose: Propose | None


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """A copy of the fields of a slot's request that the executor keeps; the request itself changes meanwhile.

    end_tokens: ids that end it.
    prompt: its ids once it is complete, if its logits are changed.
    """

    slot: int
    original_prompt_len: int
    sampling: SamplingParams
    options: OutputOptions
    end_tokens: tuple[int, ...]
    beam_width: int
    prompt: IntArray | None

    @classmethod
    def of(cls, chunk: ContextChunk) -> "SlotOwner":
        """The fields of the request of `chunk` as they are now."""
        request = chunk.request
        is_needed = chunk.is_last and request.sampling.changes_logits
        prompt = request.tokens_between(0, request.prompt_len).copy() if is_needed else None
        return cls(
            request.slot,
            request.original_prompt_len,
            request.sampling,
            request.options,
            request.stop.end_tokens,
            request.beam_width,
            prompt,
        )


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch with its tensors on the device and copies of all that it reads of requests and block tables.

    owners: owners of the slots of its chunks.
    slots: int64 [generation requests].
    beams: None if the beam width is 1.
    num_candidates: number of candidates of each request, with beams.
    context_rows: None if no request asks for context logits.
    drafts: None if there are none to verify.
    """

    iteration: int
    owners: tuple[SlotOwner, ...]
    packed: PackedBatch
    slots: Tensor
    beam_width: int
    beams: BeamInputs | None
    num_candidates: int
    context_rows: ContextRows | None
    moves: CacheMoves
    forward: ModelPass
    drafts: PreparedDrafts | None = None
