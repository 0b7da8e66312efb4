"""The prompt tokens that requests have in common: what a prefix cache can reuse, and how much it has to keep."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ifbbench.workload.trace import PrefixRun, TraceRequest

Prompt = TypeVar("Prompt", bytes, list[PrefixRun])
HASHED_TOKENS = 64


def blocks_seen_before_share(requests: Iterable[TraceRequest]) -> float | None:
    """The share of all `prefix_ids` that an earlier request has too; None if there are none."""
    seen: set[int] = set()
    total = repeated = 0
    for request in requests:
        ids = request.prefix_ids or ()
        total += len(ids)
        repeated += sum(prefix_id in seen for prefix_id in ids)
        seen.update(ids)
    return repeated / total if total else None


def reuse_distances(requests: Iterable[TraceRequest]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """How far back the earlier uses of reused tokens are.

    Returns, for each piece of a prompt that an earlier prompt begins with too, the tokens of all requests (prompts and
    outputs) since its last use, and its own number of tokens; and the number of all prompt tokens. A piece is a named
    block, or HASHED_TOKENS recorded tokens. A cache that keeps the KV entries of the last D tokens finds every piece
    of a distance up to D, or more, as it keeps shared ones once.
    """
    last_use: dict[object, tuple[int, int]] = {}
    beginnings: dict[object, int] = {}
    distances: list[int] = []
    lengths: list[int] = []
    position = prompt_tokens = 0
    for request in requests:
        is_known = True
        for key, length in pieces_of(request, beginnings):
            before = last_use.get(key)
            is_known = is_known and before is not None
            if is_known and before is not None:
                distances.append(position - before[0])
                lengths.append(min(length, before[1]))
            last_use[key] = position, length
        position += request.prompt_len + request.output_len
        prompt_tokens += request.prompt_len
    return np.array(distances, dtype=np.int64), np.array(lengths, dtype=np.int64), prompt_tokens


def pieces_of(request: TraceRequest, beginnings: dict[object, int]) -> Iterator[tuple[object, int]]:
    """The pieces of a prompt from its first token, each as a key that depends on all tokens before, and a length.

    beginnings: numbers of the beginnings of named blocks met so far; new ones are added.
    """
    if request.prompt_tokens is None:
        before = -1
        for prefix_id, length in request.prefix_runs():
            yield (before, prefix_id), length
            before = beginnings.setdefault((before, prefix_id, length), len(beginnings))
        return
    tokens = np.asarray(request.prompt_tokens, dtype=np.int32)
    key = b""
    for start in range(0, len(tokens) - HASHED_TOKENS + 1, HASHED_TOKENS):
        key = blake2b(key + tokens[start : start + HASHED_TOKENS].tobytes(), digest_size=16).digest()
        yield key, HASHED_TOKENS


def tokens_seen_before(requests: Iterable[TraceRequest]) -> int | None:
    """The sum over all prompts of the tokens that the prompt has in common with the beginning of an earlier one.

    Exact to the token, nothing evicted: no prefix cache finds more. None if the trace does not say which tokens are
    equal.
    """
    recorded: list[bytes] = []
    named: list[list[PrefixRun]] = []
    for request in requests:
        if request.prompt_tokens is not None:
            # In big-endian bytes, the order of texts is that of tokens.
            recorded.append(np.asarray(request.prompt_tokens, dtype=">i4").tobytes())
        elif request.prefix_ids is not None:
            named.append(request.prefix_runs())
    if not recorded and not named:
        return None
    return _seen_before(recorded, _common_tokens) + _seen_before(named, _common_runs)


def _seen_before(prompts: Sequence[Prompt], num_common: Callable[[Prompt, Prompt], int]) -> int:
    """In sorted order, neighbours have the longest common beginnings. The prompts are removed from the latest to the
    first: at its removal, a prompt has only earlier ones beside it, and the longest beginning that it shares with any
    of them is the one that it shares with a neighbour."""
    count = len(prompts)
    before, after = [count] * (count + 1), [count] * (count + 1)
    common_with_before = [0] * (count + 1)  # the last entry stands for no prompt, at either end
    for left, right in pairwise(sorted(range(count), key=prompts.__getitem__)):
        before[right], after[left] = left, right
        common_with_before[right] = num_common(prompts[left], prompts[right])
    total = 0
    for index in reversed(range(count)):
        left, right = before[index], after[index]
        total += max(common_with_before[index], common_with_before[right])
        common_with_before[right] = min(common_with_before[index], common_with_before[right])
        before[right], after[left] = left, right
    return total


def _common_tokens(some: bytes, others: bytes) -> int:
    length = min(len(some), len(others)) // 4
    equal = np.frombuffer(some, np.int32, length) == np.frombuffer(others, np.int32, length)
    return length if equal.all() else int(equal.argmin())


def _common_runs(some: list[PrefixRun], others: list[PrefixRun]) -> int:
    common = 0
    for (prefix_id, length), (other_id, other_length) in zip(some, others, strict=False):
        if prefix_id != other_id:
            break
        common += min(length, other_length)
        if length != other_length:
            break
    return common
