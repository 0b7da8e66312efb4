"""What schedulers and the loop ask of a KV cache, of whatever kind it is."""

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.kv_cache.blocks import BlockCounters
from ifbbench.engine.kv_cache.copies import BlockCopy
from ifbbench.engine.kv_cache.sequence import KnownTokens, ReuseRules
from ifbbench.engine.kv_cache.steps_ahead import StepsAhead
from ifbbench.engine.request_table import IntArray

if TYPE_CHECKING:
    from ifbbench.engine.request import Request

Rows: TypeAlias = NDArray[np.int64]
# An integer, or `BlockCounts` where layers differ in attention window. Both add, subtract and compare: one amount is
# more than another if it is in any window.
BlockCount: TypeAlias = Any


class ReleasePlanning(Protocol):
    """What would be free if some sequences were removed."""

    @property
    def free_blocks(self) -> BlockCount: ...

    def release(self, slot: int) -> None:
        """Plan the removal of the sequence in `slot`."""
        ...


class KvCache(Protocol):
    """A KV cache. The first part is for schedulers, which change nothing; the second for the loop."""

    reuse: ReuseRules

    @property
    def attention_window(self) -> AttentionWindow: ...

    @property
    def free_blocks(self) -> BlockCount:
        """Blocks of the device that nobody holds, whether or not they hold what could be reused."""
        ...

    def first_chunk_need(self, request: "Request") -> BlockCount:
        """Blocks that `request` takes in its next context chunk: all of its prompt's, or none past the first chunk."""
        ...

    def step_needs(self, rows: Rows, draft_tokens: Rows | int = 0) -> Rows:
        """Blocks that each of the generation requests in `rows` takes in its next step: [requests], or [requests,
        windows]. `counted` makes a BlockCount of a row or of a sum over rows."""
        ...

    def counted(self, blocks: Rows) -> BlockCount: ...

    def blocks_to_completion(self, request: "Request") -> BlockCount:
        """Blocks that a context request may still take until all its reserved tokens are made."""
        ...

    def reserved_blocks(self, rows: Rows) -> BlockCount:
        """Blocks that the generation requests in `rows` together may still take."""
        ...

    def plan_release(self) -> ReleasePlanning: ...

    def missing_block(self, request: "Request") -> Any:
        """The first full block of the prompt that no one has computed yet, equal for two requests if and only if they
        lack the same one; None where there is none, or nothing is reused."""
        ...

    @property
    def registered(self) -> Rows: ...

    @property
    def block_tables(self) -> IntArray: ...

    @property
    def window_tables(self) -> tuple[IntArray, ...]: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_used(self) -> int: ...

    @property
    def counters(self) -> BlockCounters:
        """Sums since the start, up to now: they go on counting."""
        ...

    def holds(self, slot: int) -> bool:
        """Whether `slot` has a sequence."""
        ...

    def add_request(self, request: "Request", now_s: float = 0.0) -> int: ...

    def add_tokens(self, rows: Rows) -> None: ...

    def steps_ahead(self, rows: Rows) -> "StepsAhead | None":
        """The next steps of the generation requests in `rows`; None where they are not known beforehand."""
        ...

    def store_context(self, slot: int) -> None: ...

    def store_generated(self, slot: int, num_tokens: int) -> None: ...

    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None: ...

    def forget_sequence(self, slot: int) -> None: ...

    def truncate(self, known: KnownTokens, length: int, keep: int) -> None:
        """Forget what is known of a conversation of `length` tokens beyond its first `keep`."""
        ...

    def take_copies(self) -> tuple[BlockCopy, ...]: ...

    @property
    def places(self) -> int:
        """Tokens that the whole cache has room for on the device."""
        ...

    @property
    def held_places(self) -> int:
        """Those that requests hold, whether or not there is a token in them."""
        ...

    @property
    def filled_places(self) -> int: ...

    def check_consistency(self) -> None: ...
