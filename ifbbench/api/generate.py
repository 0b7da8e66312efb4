"""Outputs of prompts, for those who want no trace and no recording."""

from collections.abc import Sequence

import numpy as np

from ifbbench.api.engine import Engine
from ifbbench.clock import WallClock
from ifbbench.engine.in_flight import Response
from ifbbench.engine.manager import TokenGenerationLoop
from ifbbench.engine.request import Request
from ifbbench.engine.request_table import IntArray
from ifbbench.engine.sampling_params import SamplingParams, StopConditions
from ifbbench.errors import InputError


def generate(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[IntArray]:
    """The output tokens of each of `prompts` (token ids), in their order; all run in flight together.

    An output ends with the model's end token, or after `max_new_tokens`. InputError if a prompt cannot be run.
    """
    waiting = [_request(engine, index, tokens, max_new_tokens) for index, tokens in enumerate(prompts)]
    outputs: dict[int, IntArray] = {}

    def get_requests(count: int) -> list[Request]:
        taken = waiting[:count]
        del waiting[:count]
        return taken

    def send_response(response: Response) -> None:
        if response.error is not None:
            raise InputError(f"prompt {response.request.request_id + 1}: {response.error}")
        assert response.output_tokens is not None
        outputs[response.request.request_id] = response.output_tokens

    manager = TokenGenerationLoop(engine.limits, engine.executor, WallClock(), get_requests, send_response)
    while manager.step():
        pass
    return [outputs[index] for index in range(len(prompts))]


def _request(engine: Engine, index: int, tokens: Sequence[int], max_new_tokens: int) -> Request:
    config = engine.config
    return Request(
        index, len(tokens), max_new_tokens, index=index, prompt_tokens=np.array(tokens, dtype=np.int32),
        sampling=SamplingParams(config.temperature, config.top_k, config.top_p, config.seed + index,
                                config.repetition_penalty),
        stop=StopConditions(engine.model.eos_token_ids),
    )  # fmt: skip
