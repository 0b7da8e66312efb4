"""Numbers for tokens that nobody has spelt out: equal numbers exactly where a trace says that tokens are equal.

Token `offset` of prefix id `h` is number h * PREFIX_BLOCK + offset, the same in every request. Tokens that belong to
one request alone, its own prompt tokens and its output, are negative: each request has a range of 2**32 numbers.
"""

from ifbbench.workload.prefix import PREFIX_BLOCK, prefix_runs
from ifbbench.workload.trace import TraceRequest

# Above any length, so that nothing overlaps; 2**31 requests of it still fit in 64 bits.
_LONGEST = 2**31
_NUMBERS_OF_A_REQUEST = 2 * _LONGEST


def symbolic_runs(request: TraceRequest, index: int) -> list[tuple[int, int]]:
    """The prompt as runs of consecutive numbers, (first number, length) each; `index` is the request's own.

    For prompts without recorded token ids: ValueError if the request has them, for they say more than numbers do.
    """
    if request.prompt_tokens is not None:
        raise ValueError(f"request {request.request_id} has token ids; use them as they are")
    named = prefix_runs(request)
    runs = [(prefix_id * PREFIX_BLOCK, length) for prefix_id, length in named]
    own = request.prompt_len - sum(length for _, length in named)
    if own > 0:
        runs.append((_first_number(index), own))
    return runs


def output_symbol(index: int, position: int) -> int:
    """The number of output token `position` of request `index`; those of later positions follow it."""
    return _first_number(index) + _LONGEST + position


def _first_number(index: int) -> int:
    return -(index + 1) * _NUMBERS_OF_A_REQUEST
