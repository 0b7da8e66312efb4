"""Requests whose prompts another engine computes, which sends their keys and values with the first token."""

from ifbbench.engine.request import Request


def awaits_prompt(request: Request) -> bool:
    """Whether nothing has come of the prompt that another engine computes. What was paused is computed here."""
    return request.remote_len > 0 and request.in_context and not request.pauses


def continue_generation(request: Request) -> None:
    """The prompt's keys and values have come, with the first token."""
    assert request.table is not None
    request.position, request.chunk = request.prompt_len, 0
    request.start_generation()
    request.table.confirmed[request.slot] = 1
