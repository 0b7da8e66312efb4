"""A sequence in the cache: its blocks, and what is known of its tokens."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from ifbbench.engine.kv_cache.retention import NO_RETENTION, Retention
from ifbbench.engine.kv_cache.token_keys import SymbolicTokens, TokenIds


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The tokens of a sequence, for those who look for them: `identity` must be equal for blocks to be shared."""

    tokens: TokenIds | SymbolicTokens
    identity: Hashable = None


@dataclass(slots=True)
class Sequence:
    """The blocks of one sequence, in order, a list a beam. Beams share all context blocks but a last partial one.

    stored: how many of its blocks the tree knows, themselves or equal ones; the last is `node`, in its state `stamp`.
    """

    beams: list[list[int]]
    known: KnownTokens | None = None
    retention: Retention = NO_RETENTION
    is_cyclic: bool = False
    stored: int = 0
    node: int = 0
    stamp: int = 0

    def references(self) -> Counter[int]:
        """How often the sequence holds each of its blocks."""
        return Counter(block for beam in self.beams for block in beam)


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """partial: also blocks of which only a beginning matches. copy_partial: those in use by others are copied, not left
    alone."""

    enabled: bool = False
    partial: bool = True
    copy_partial: bool = True
