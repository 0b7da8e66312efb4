"""The tokens of prompts: recorded or drawn ids, symbols for runs without a model, and beginnings that prompts share.

A prompt may begin with named tokens, in runs (prefix id, length): the first `length` of the PREFIX_BLOCK tokens that
the id names. Tokens after the last run belong to the request alone.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.workload.trace import MAX_ID, PREFIX_BLOCK, PrefixRun, Trace, TraceRequest, columns_of

MAX_PREFIX_ID = MAX_ID // PREFIX_BLOCK - 1
CACHED_BLOCKS = 8192  # 16 MiB of tokens


def runs_of(ids: Sequence[int], num_tokens: int) -> list[PrefixRun]:
    """The first `num_tokens` tokens of a text of the blocks `ids`."""
    whole, rest = divmod(num_tokens, PREFIX_BLOCK)
    runs = [(prefix_id, PREFIX_BLOCK) for prefix_id in ids[:whole]]
    return [*runs, (ids[whole], rest)] if rest else runs


def with_prefix(request: TraceRequest, runs: Iterable[PrefixRun]) -> TraceRequest:
    """`request` with a prompt that begins with `runs`, which must not be longer than the prompt."""
    ids, lens = zip(*runs, strict=True)
    whole = replace(request, prefix_ids=ids)
    return whole if tuple(length for _, length in whole.prefix_runs()) == lens else replace(whole, prefix_lens=lens)


# Token ids.


def prompt_tokens(request: TraceRequest, vocab_size: int, seed: int) -> NDArray[np.int32]:
    """The recorded token ids, or uniform ones; shape [prompt_len].

    Those of a prefix id are drawn from (seed, id), so they are the same in every request; the others from (seed,
    request id, their number). InputError if a recorded id is not below `vocab_size`.
    """
    if request.prompt_tokens is not None:
        return _recorded_tokens(request, vocab_size)
    parts = [_block(prefix_id, vocab_size, seed)[:length] for prefix_id, length in request.prefix_runs()]
    from ifbbench.workload.distributions import Stream, generator

    draws = generator(seed, Stream.TOKENS, request.request_id)
    own = draws.integers(0, vocab_size, size=request.prompt_len - sum(map(len, parts)), dtype=np.int32)
    return np.concatenate((*parts, own)) if parts else own


def check_vocabulary(trace: Trace, vocab_size: int) -> None:
    """InputError if a recorded token id of the trace is not below `vocab_size`. To be called before a run."""
    if columns_of(trace.requests).max_token < vocab_size:
        return
    for request in trace:
        if request.prompt_tokens is not None:
            _recorded_tokens(request, vocab_size)


@lru_cache(CACHED_BLOCKS)
def _block(prefix_id: int, vocab_size: int, seed: int) -> NDArray[np.int32]:
    """The tokens of a prefix id; shape [PREFIX_BLOCK]. Read-only: requests share the array."""
    from ifbbench.workload.distributions import Stream, generator

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


# Symbols: numbers for tokens without ids, equal exactly where the trace says that tokens are equal. Token `offset` of
# prefix id `h` is h * PREFIX_BLOCK + offset in every request. Tokens of one request alone are negative: a range of
# 2**32 numbers for each request, the first half for its prompt and the second for its output.

_MAX_TOKENS = 2**31  # above any length; the ranges of 2**31 requests fit in 64 bits
_SYMBOLS_PER_REQUEST = 2 * _MAX_TOKENS


def symbolic_runs(request: TraceRequest, index: int) -> list[tuple[int, int]]:
    """The prompt as runs of consecutive symbols, (first symbol, length); `index` is the request's own in the trace.

    ValueError if the prompt has recorded token ids, which must be used instead.
    """
    if request.prompt_tokens is not None:
        raise ValueError(f"request {request.request_id} has token ids; use them as they are")
    named = request.prefix_runs()
    runs = [(prefix_id * PREFIX_BLOCK, length) for prefix_id, length in named]
    own = request.prompt_len - sum([length for _, length in named])
    if own > 0:
        runs.append((-(index + 1) * _SYMBOLS_PER_REQUEST, own))
    return runs


def output_runs(request: TraceRequest) -> list[tuple[int, int]]:
    """The named tokens of the output as runs of symbols, (first symbol, length)."""
    return [(prefix_id * PREFIX_BLOCK + offset, length) for prefix_id, offset, length in request.output_runs()]


def output_symbol(index: int, position: int) -> int:
    """The symbol of output token `position` of request `index`; later positions have the symbols after it."""
    return -(index + 1) * _SYMBOLS_PER_REQUEST + _MAX_TOKENS + position
