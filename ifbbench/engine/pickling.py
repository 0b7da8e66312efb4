"""Pickling of requests, outputs and parts of batches, which processes send each other. Compiled classes have no state
that pickle finds: they are sent as the arguments that make them."""

import copyreg
from dataclasses import fields
from functools import partial
from pickle import dumps, loads
from typing import Any

from ifbbench.engine.batch import BeamCandidates, BeamInputs, BlockCopy, StepOutputs
from ifbbench.engine.drafts import DraftInputs
from ifbbench.engine.request import Request, ReuseIdentity
from ifbbench.engine.retention import Retention, RetentionRange

__all__ = ["dumps", "loads"]


def _reduce_request(request: Request) -> tuple[Any, ...]:
    """The request as it was made: it is sent before it runs."""
    make = partial(
        Request,
        output_len=request.output_len,
        prompt_tokens=request.prompt_tokens,
        index=request.index,
        priority=request.priority,
        beam_width=request.beam_width,
        lora_task_id=request.lora_task_id,
        num_draft_tokens=request.num_draft_tokens,
        sampling=request.sampling,
        options=request.options,
        stop=request.stop,
        reuse=request.reuse,
        retention=request.retention,
    )
    return make, (request.request_id, request.original_prompt_len, request.max_new_tokens)


def _reduce_dataclass(value: Any) -> tuple[Any, ...]:
    return type(value), tuple(getattr(value, field.name) for field in fields(value))


copyreg.pickle(Request, _reduce_request)
for _class in (
    StepOutputs,
    BeamCandidates,
    BeamInputs,
    BlockCopy,
    DraftInputs,
    ReuseIdentity,
    Retention,
    RetentionRange,
):
    copyreg.pickle(_class, _reduce_dataclass)
