"""The token ids of a request's prompt."""

import numpy as np
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.workload.streams import Stream, generator
from ifbbench.workload.trace import Trace, TraceRequest


def prompt_tokens(request: TraceRequest, vocab_size: int, seed: int) -> NDArray[np.int32]:
    """The recorded token ids, or uniform ones drawn from (seed, request id, length); shape [prompt_len].

    InputError if a recorded id is not below `vocab_size`.
    """
    if request.prompt_tokens is None:
        draws = generator(seed, Stream.TOKENS, request.request_id)
        return draws.integers(0, vocab_size, size=request.prompt_len, dtype=np.int32)
    return _recorded_tokens(request, vocab_size)


def check_vocabulary(trace: Trace, vocab_size: int) -> None:
    """InputError if a recorded token id of the trace is not below `vocab_size`: better before a run than within."""
    for request in trace:
        if request.prompt_tokens is not None:
            _recorded_tokens(request, vocab_size)


def _recorded_tokens(request: TraceRequest, vocab_size: int) -> NDArray[np.int32]:
    tokens = np.asarray(request.prompt_tokens, dtype=np.int32)
    position = int(tokens.argmax())
    if tokens[position] >= vocab_size:
        raise InputError(
            f"request {request.request_id}: prompt_tokens[{position}] is {tokens[position]}; expected ids below the "
            f"model's vocabulary size {vocab_size}. Replay with the model that the trace was tokenized for, or with "
            "a trace of lengths only."
        )
    return tokens
