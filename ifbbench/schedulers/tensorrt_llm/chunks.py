"""Sizes of context chunks: how the tokens of an iteration that generation leaves are divided among prompts.

(TensorRT-LLM's `MicroBatchScheduler::setCtxRequestsChunkSize`.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import UNLIMITED


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """unit: chunks are multiples of this many tokens, except the last chunk of a prompt, and the first one after reused
        tokens (see `Request.set_prepopulated`).
    max_context_length: maximum tokens of one chunk."""

    unit: int
    max_context_length: int = UNLIMITED


def fit_chunks(
    requests: list[Request], policy: str, capacity: int, limits: ChunkLimits
) -> tuple[list[Request], Request | None]:
    """Set the chunk of each request to all its remaining tokens if these fit together, else as `size_chunks` does.
    Returns the requests that get a chunk, and the first one that gets none, or not all of its tokens in it."""
    if _take_whole(requests, capacity, limits):
        return requests, None
    selected = size_chunks(requests, policy, capacity, limits)
    for request, chosen in zip_longest(requests, selected):
        if request is not chosen or not request.is_last_chunk:
            return selected, request
    return selected, None


def _take_whole(requests: Sequence[Request], capacity: int, limits: ChunkLimits) -> bool:
    """Give each request all its remaining tokens, if these fit."""
    total, longest = 0, limits.max_context_length
    for request in requests:
        request.chunk = request.prompt_len - request.position
        cost = request.chunk + request.num_draft_tokens
        total += cost
        if cost > longest or total > capacity:
            return False
    return True


def first_come_first_served(requests: Sequence[Request], capacity: int, limits: ChunkLimits) -> list[Request]:
    """Give each request in turn as much as is left. One that gets nothing does not block those behind it: the short
    rest of a prompt may use what is left over."""
    left, longest = capacity, limits.max_context_length
    largest, selected = min(left, longest), list[Request]()
    in_units = largest - largest % limits.unit
    for request in requests:
        remaining = request.prompt_len - request.position
        request.chunk = size = remaining if remaining <= largest else in_units
        if size:
            selected.append(request)
            left -= size
            largest = min(left, longest)
            in_units = largest - largest % limits.unit
    return selected


def equal_progress(requests: Sequence[Request], capacity: int, limits: ChunkLimits) -> list[Request]:
    """Raise all chunks by one unit in turn, round after round, while the budget lasts."""
    for request in requests:
        request.set_chunk(0)
    total, progress = 0, True
    while progress and total < capacity:
        progress = False
        for request in requests:
            increment = min(limits.unit, request.remaining_context - request.chunk)
            too_long = request.chunk + increment > limits.max_context_length
            if increment == 0 or too_long or total + increment > capacity:
                continue
            request.set_chunk(request.chunk + increment)
            total += increment
            progress = True
    return [request for request in requests if request.chunk]


def size_chunks(requests: Sequence[Request], policy: str, capacity: int, limits: ChunkLimits) -> list[Request]:
    """Set the chunk of each request, in order, to its share of `capacity` tokens; returns those that get one."""
    size = equal_progress if policy == "equal_progress" else first_come_first_served
    selected = size(requests, capacity, limits)
    if any(request.num_draft_tokens for request in selected):
        _fit_draft_tokens(selected, capacity, limits)
    return selected


def _fit_draft_tokens(requests: Sequence[Request], capacity: int, limits: ChunkLimits) -> None:
    """Reduce the draft tokens of requests on their last chunk to the room that the chunk leaves in its unit, so that
    drafts never start a new block. A chunk that fills its unit leaves no room."""
    used = sum(request.chunk for request in requests)
    for request in requests:
        if not request.is_last_chunk or request.num_draft_tokens == 0:
            continue
        room = min(-request.chunk % limits.unit, limits.max_context_length - request.chunk, capacity - used)
        used += room
        if request.num_draft_tokens > room:
            request.set_draft_tokens(room)
