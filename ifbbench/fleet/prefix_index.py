"""The prompt tokens that a replica is expected to hold: those of the requests that were sent to it."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TypeAlias

from ifbbench.workload.reuse import pieces_of
from ifbbench.workload.trace import TraceRequest

Pieces: TypeAlias = Sequence[tuple[Hashable, int]]
"""The pieces of a prompt from its first token: keys that depend on all tokens before, and their lengths."""


class PrefixIndex:
    """Pieces of prompts, as many as fit `capacity` tokens; the ones used least recently are dropped.

    A router sees prompts only, so that outputs take no place here. Of a prompt, later pieces are dropped first."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._held = capacity, 0
        self._lengths: OrderedDict[Hashable, int] = OrderedDict()

    def expected_hit(self, pieces: Pieces) -> int:
        """Tokens that `pieces` begin with and that are held."""
        found, lengths = 0, self._lengths
        for key, length in pieces:
            if (held := lengths.get(key)) is None:
                break
            found += min(held, length)
            if held < length:
                break
        return found

    def add(self, pieces: Pieces) -> None:
        """A prompt of `pieces` was sent to the replica."""
        lengths = self._lengths
        for key, length in reversed(pieces):
            self._held += length - lengths.pop(key, 0)
            lengths[key] = length
        self._drop()

    def resize(self, capacity: int) -> None:
        """It holds so many tokens from now on."""
        self._capacity = capacity
        self._drop()

    def _drop(self) -> None:
        while self._held > self._capacity:
            _, length = self._lengths.popitem(last=False)
            self._held -= length

    def clear(self) -> None:
        """The replica has lost its KV cache."""
        self._lengths.clear()
        self._held = 0


def prompt_pieces(request: TraceRequest, beginnings: dict[object, int]) -> Pieces:
    """The pieces of a prompt; what it shares with none is one of them. beginnings: see `pieces_of`."""
    pieces = list(pieces_of(request, beginnings))
    own = request.prompt_len - sum(length for _, length in pieces)
    return [*pieces, (("own", request.request_id), own)] if own > 0 else pieces
