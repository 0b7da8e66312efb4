"""What a perfect prefix cache could save: how much of each prompt some earlier one began with as well."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from ifbbench.workload.prefix import PrefixRun, prefix_runs
from ifbbench.workload.trace import TraceRequest

Prompt = TypeVar("Prompt", bytes, list[PrefixRun])


def tokens_seen_before(requests: Iterable[TraceRequest]) -> int | None:
    """Prompt tokens that an earlier request began with too, added up; None if the trace tells nothing of its tokens.

    To the token, with nothing ever forgotten: no block size and no cache finds more.
    """
    recorded: list[bytes] = []
    named: list[list[PrefixRun]] = []
    for request in requests:
        if request.prompt_tokens is not None:
            recorded.append(np.asarray(request.prompt_tokens, dtype=">i4").tobytes())
        elif request.prefix_ids is not None:
            named.append(prefix_runs(request))
    if not recorded and not named:
        return None
    return _seen_before(recorded, _common_tokens) + _seen_before(named, _common_runs)


def _seen_before(prompts: Sequence[Prompt], num_common: Callable[[Prompt, Prompt], int]) -> int:
    """Sorted, the prompts most alike stand side by side.

    Taken out from the latest on, each leaves only earlier ones behind; the longest beginning it has in common with any
    of them is that with one of its neighbours then.
    """
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
