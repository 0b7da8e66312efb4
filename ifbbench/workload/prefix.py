"""Prompts whose tokens have names: blocks that may be shared, in a row from the prompt's first token on.

A prefix id names PREFIX_BLOCK tokens, the same wherever it stands. A prompt takes the first tokens of each of its
blocks: a run (id, length). Tokens after the last run are the request's own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from ifbbench.workload.fields import MAX_ID
from ifbbench.workload.trace import TraceRequest

PREFIX_BLOCK = 512
MAX_PREFIX_ID = MAX_ID // PREFIX_BLOCK - 1

PrefixRun: TypeAlias = tuple[int, int]


def num_blocks(num_tokens: int) -> int:
    """Blocks that hold so many tokens, the last perhaps in part."""
    return -(-num_tokens // PREFIX_BLOCK)


def runs_of(ids: Sequence[int], num_tokens: int) -> list[PrefixRun]:
    """The first `num_tokens` tokens of a text whose blocks have the names `ids`."""
    whole, rest = divmod(num_tokens, PREFIX_BLOCK)
    runs = [(prefix_id, PREFIX_BLOCK) for prefix_id in ids[:whole]]
    return [*runs, (ids[whole], rest)] if rest else runs


def prefix_runs(request: TraceRequest) -> list[PrefixRun]:
    """The named tokens of a prompt, from its first token on; none if the trace names none."""
    ids, lens = request.prefix_ids or (), request.prefix_lens
    if lens is not None:
        return list(zip(ids, lens, strict=True))
    runs = [(prefix_id, PREFIX_BLOCK) for prefix_id in ids]
    excess = len(ids) * PREFIX_BLOCK - request.prompt_len
    if excess > 0:
        runs[-1] = (ids[-1], PREFIX_BLOCK - excess)
    return runs


def with_prefix(request: TraceRequest, runs: Iterable[PrefixRun]) -> TraceRequest:
    """`request` with a prompt that begins with `runs`, which it must be long enough for."""
    ids, lens = zip(*runs, strict=True)
    whole = replace(request, prefix_ids=ids)
    return whole if tuple(length for _, length in prefix_runs(whole)) == lens else replace(whole, prefix_lens=lens)


def shortened(request: TraceRequest, max_prompt_len: int) -> TraceRequest:
    """With the first `max_prompt_len` tokens of its prompt at most: shared prefixes stay shared."""
    if request.prompt_len <= max_prompt_len:
        return request
    tokens, ids, lens = request.prompt_tokens, request.prefix_ids, request.prefix_lens
    if lens is not None:
        lens = _first_lens(lens, max_prompt_len)
    if ids is not None:
        ids = ids[: num_blocks(max_prompt_len) if lens is None else len(lens)]
    return replace(
        request,
        prompt_len=max_prompt_len,
        prompt_tokens=None if tokens is None else tokens[:max_prompt_len],
        prefix_ids=ids,
        prefix_lens=lens,
    )


def _first_lens(lens: Iterable[int], num_tokens: int) -> tuple[int, ...]:
    """The lengths of runs, cut off after `num_tokens`."""
    first: list[int] = []
    for length in lens:
        if num_tokens <= 0:
            break
        first.append(min(length, num_tokens))
        num_tokens -= length
    return tuple(first)
