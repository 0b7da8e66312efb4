"""The token ids of a request's prompt."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.workload.columns import columns_of
from ifbbench.workload.prefix import PREFIX_BLOCK, prefix_runs
from ifbbench.workload.streams import Stream, generator
from ifbbench.workload.trace import Trace, TraceRequest

CACHED_BLOCKS = 8192  # 16 MiB of tokens


def prompt_tokens(request: TraceRequest, vocab_size: int, seed: int) -> NDArray[np.int32]:
    """The recorded token ids, or uniform ones; shape [prompt_len].

    Those of a prefix id are drawn from (seed, id) and so are the same in every request; the others from (seed, request
    id, how many they are). InputError if a recorded id is not below `vocab_size`.
    """
    if request.prompt_tokens is not None:
        return _recorded_tokens(request, vocab_size)
    parts = [_block(prefix_id, vocab_size, seed)[:length] for prefix_id, length in prefix_runs(request)]
    draws = generator(seed, Stream.TOKENS, request.request_id)
    own = draws.integers(0, vocab_size, size=request.prompt_len - sum(map(len, parts)), dtype=np.int32)
    return np.concatenate((*parts, own)) if parts else own


def check_vocabulary(trace: Trace, vocab_size: int) -> None:
    """InputError if a recorded token id of the trace is not below `vocab_size`: better before a run than within."""
    if columns_of(trace.requests).largest_token < vocab_size:
        return
    for request in trace:
        if request.prompt_tokens is not None:
            _recorded_tokens(request, vocab_size)


@lru_cache(CACHED_BLOCKS)
def _block(prefix_id: int, vocab_size: int, seed: int) -> NDArray[np.int32]:
    """The tokens of a prefix id; shape [PREFIX_BLOCK]. To be read only: requests share it."""
    draws = generator(seed, Stream.PREFIX, prefix_id)
    return draws.integers(0, vocab_size, size=PREFIX_BLOCK, dtype=np.int32)


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
