"""Names of full blocks by what they hold and what comes before it: equal for equal prefixes, whatever the request."""

from ifbbench.engine.request import Request
from ifbbench.engine.tokens import KnownTokens


def block_names(known: KnownTokens, first: int, end: int, size: int, before: int | None, owner: int = 0) -> list[int]:
    """The names of the blocks `first` to `end` - 1 of `size` tokens, or fewer where tokens are not known.

    before: the name of the block before the first; None if that is the first of all.
    owner: makes names of blocks with symbols of one request alone differ between engines, which may use the same
        symbols; 0 for one engine.

    A block that goes on with the next symbols of the block before has the next number.
    """
    names = list[int]()
    runs = known.tokens.block_runs(first - (before is not None), min(end, len(known.tokens) // size), size)
    if before is not None and runs:  # the run of the block before may go on
        names += range(before + 1, before + runs.pop(0)[1])
    for key, length in runs:
        last = names[-1] if names else hash(known.identity) if before is None else before
        is_own = owner > 0 and not isinstance(key, bytes) and min(key[::2]) < 0
        following = hash((last, key, owner)) if is_own else hash((last, key))
        names += range(following, following + length)
    return names


class BlockNames:
    """The names of the blocks of requests, which are made once."""

    def __init__(self, tokens_per_block: int) -> None:
        self._size = tokens_per_block
        self._names: dict[Request, list[int]] = {}

    def of(self, request: Request, count: int) -> list[int]:
        """Names of the first full blocks: of `count` or more of them, or fewer where tokens are not known."""
        names = self._names.get(request)
        if names is None:
            names = self._names[request] = []
        if len(names) < count and (known := request.known_tokens()) is not None:
            names += block_names(known, len(names), count, self._size, names[-1] if names else None)
        return names

    def shared(self, request: Request, first: int, end: int) -> list[int]:
        """Names of the full blocks `first` to `end` - 1 of a request, as far as other requests can look for them."""
        num_shared = request.reuse.num_shared
        end = end if num_shared is None else min(end, num_shared // self._size)
        return self.of(request, end)[first:end] if end > first else []

    def forget(self, request: Request) -> None:
        """`request` has left."""
        self._names.pop(request, None)
