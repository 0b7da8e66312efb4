"""How the token budget is split into context chunks (TensorRT-LLM's `MicroBatchScheduler::setCtxRequestsChunkSize`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ifbbench.engine.request import Request


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """unit: chunks are multiples of this many tokens, but for the end of a prompt.
    max_context_length: most tokens of one chunk; None is no limit."""

    unit: int
    max_context_length: int | None = None


def first_come_first_served(requests: Sequence[Request], capacity: int | None, limits: ChunkLimits) -> None:
    """Give each request in turn as much as is left. One that gets nothing does not block those behind it: a short end
    of a prompt may use what is left over."""
    longest = limits.max_context_length
    left = capacity
    for request in requests:
        size = remaining = request.prompt_len - request.position
        if left is not None and size > left:
            size = left
        if longest is not None and size > longest:
            size = longest
        if size < remaining:
            size -= size % limits.unit
        request.chunk = size
        if left is not None:
            left -= size


def equal_progress(requests: Sequence[Request], capacity: int | None, limits: ChunkLimits) -> None:
    """Raise all chunks by one unit in turn, round after round, while the budget lasts."""
    for request in requests:
        request.set_chunk(0)
    total, progress = 0, True
    while progress and (capacity is None or total < capacity):
        progress = False
        for request in requests:
            increment = min(limits.unit, request.remaining_context - request.chunk)
            too_long = limits.max_context_length is not None and request.chunk + increment > limits.max_context_length
            if increment == 0 or too_long or (capacity is not None and total + increment > capacity):
                continue
            request.set_chunk(request.chunk + increment)
            total += increment
            progress = True


CHUNKING: dict[str, Callable[[Sequence[Request], int | None, ChunkLimits], None]] = {
    "first_come_first_served": first_come_first_served,
    "equal_progress": equal_progress,
}


def fit_draft_tokens(requests: Sequence[Request], capacity: int | None, limits: ChunkLimits) -> None:
    """Cut the draft tokens of requests on their last chunk to the room that the chunk leaves in its unit, so that
    drafts never open a new block. A chunk that fills its unit leaves no room."""
    if not any(request.num_draft_tokens for request in requests):
        return
    used = sum(request.chunk for request in requests)
    for request in requests:
        if not request.is_last_chunk or request.num_draft_tokens == 0:
            continue
        room = -request.chunk % limits.unit
        if limits.max_context_length is not None:
            room = min(room, limits.max_context_length - request.chunk)
        if capacity is not None:
            room = min(room, capacity - used)
            used += room
        if request.num_draft_tokens > room:
            request.set_draft_tokens(room)


def size_chunks(requests: Sequence[Request], policy: str, capacity: int | None, limits: ChunkLimits) -> None:
    """Set the chunk of each request, in order, to what it gets of `capacity` tokens (None is no limit)."""
    CHUNKING[policy](requests, capacity, limits)
    fit_draft_tokens(requests, capacity, limits)
