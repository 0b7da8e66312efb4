"""Requests and outputs that ranks send each other arrive as they were, compiled or not."""

import numpy as np

from ifbbench.engine.batch import StepOutputs
from ifbbench.engine.pickling import dumps, loads
from ifbbench.engine.request import Request, ReuseIdentity
from ifbbench.engine.retention import Retention, RetentionRange
from ifbbench.engine.sampling_params import OutputOptions, SamplingParams, StopConditions


def test_a_request() -> None:
    request = Request(
        7,
        3,
        5,
        output_len=4,
        prompt_tokens=np.array([3, 1, 2], np.int32),
        index=6,
        priority=0.75,
        beam_width=2,
        lora_task_id=9,
        num_draft_tokens=0,
        sampling=SamplingParams(temperature=0.5, top_k=3),
        options=OutputOptions(streaming=True, pad_id=4),
        stop=StopConditions((2,)),
        reuse=ReuseIdentity(np.array([1, 0, 1]), "salt", [(1, 3)], 11),
        retention=Retention([RetentionRange(0, 2, 90, 1.5)], 20),
    )
    received = loads(dumps(request))
    names = (
        "request_id",
        "prompt_len",
        "original_prompt_len",
        "max_new_tokens",
        "output_len",
        "index",
        "priority",
        "beam_width",
        "lora_task_id",
        "num_draft_tokens",
        "sampling",
        "options",
        "stop",
        "retention",
        "state",
        "order",
    )
    assert [getattr(received, name) for name in names] == [getattr(request, name) for name in names]
    assert received.prompt_tokens.tolist() == [3, 1, 2]
    sent, identity = request.reuse, received.reuse
    assert identity.extra_ids.tolist() == [1, 0, 1]
    assert (identity.cache_salt, identity.runs, identity.output_symbol) == (
        sent.cache_salt,
        sent.runs,
        sent.output_symbol,
    )


def test_outputs() -> None:
    received = loads(dumps(StepOutputs(np.array([5, 6]), log_probs=np.array([0.5, 0.25]), draft_s=0.125)))
    assert received.tokens.tolist() == [5, 6]
    assert received.log_probs.tolist() == [0.5, 0.25]
    assert (received.candidates, received.context_logits, received.draft_s) == (None, {}, 0.125)
