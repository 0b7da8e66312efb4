"""The interface of a KV cache: what schedulers ask, and what the token generation loop changes."""

from abc import ABC, abstractmethod
from math import inf
from typing import Any, Final, TypeAlias

from mypy_extensions import mypyc_attr

from ifbbench.engine.arrays import IntArray, Rows
from ifbbench.engine.batch import BlockCopy
from ifbbench.engine.records import CacheState
from ifbbench.engine.request import Request
from ifbbench.engine.tokens import KnownTokens
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.blocks import BlockCounters
from ifbbench.kv.sequence import ReuseRules

# An integer, or `BlockCounts` where layers differ in attention window. Both add, subtract and compare: one amount is
# more than another if it is in any window.
BlockCount: TypeAlias = Any

NO_REUSE: Final = ReuseRules()


@mypyc_attr(allow_interpreted_subclasses=True)
class KvCache(ABC):
    """Base class of KV caches. Methods that are not abstract do what a cache without reuse does.

    attention_window: where layers differ, that of the first; block size and sink tokens are equal in all.
    registered: [slots], tokens in each sequence, the sink bubble included.
    block_tables: [slots, beams, blocks per sequence], indices in device memory, of the first attention window.
    window_tables: the same for each further attention window.
    num_blocks: device blocks.
    num_positions: tokens that the device memory has room for.
    looks_ahead: whether `step_needs` counts two steps, the second of which another micro batch would have to leave room
        for (`twoStepsLookAhead` of TensorRT-LLM's `getNeededBlocksOneStep`).
    """

    attention_window: AttentionWindow
    registered: Rows
    block_tables: IntArray
    window_tables: tuple[IntArray, ...] = ()
    num_blocks: int
    num_positions: int
    reuse: ReuseRules = NO_REUSE
    looks_ahead: bool = False

    # For schedulers.

    @property
    @abstractmethod
    def free_blocks(self) -> BlockCount:
        """Device blocks without references, whether or not their content can be reused."""

    @abstractmethod
    def first_chunk_need(self, request: Request) -> BlockCount:
        """Blocks that `request` takes in its next context chunk: those of its whole prompt, or none past the first
        chunk."""

    @abstractmethod
    def step_needs(self, rows: Rows, draft_tokens: Rows | int = 0) -> Rows:
        """Blocks that each of the generation requests in `rows` takes in its next step, or two (`looks_ahead`):
        [requests], or [requests, windows]. `counted` converts a row, or a sum of rows, to a BlockCount."""

    def has_blocks_for(self, count: int) -> bool:
        """Whether so many generation requests of one beam certainly have a free block each for their next step, or two
        (`looks_ahead`). False where that is not known."""
        return False

    def look_ahead(self) -> None:
        """Let `step_needs` count two steps."""
        self.looks_ahead = True

    def counted(self, blocks: Rows) -> BlockCount:
        return int(blocks)

    @abstractmethod
    def blocks_to_completion(self, request: Request) -> BlockCount:
        """Blocks that a context request may still take until all its reserved tokens are generated."""

    @abstractmethod
    def reserved_blocks(self, rows: Rows) -> BlockCount:
        """Blocks that the generation requests in `rows` together may still take."""

    @abstractmethod
    def plan_release(self) -> Any:
        """A plan of removals: `release(slot)` adds one, `free_blocks` is the number of free blocks after them."""

    @property
    def num_reuse_changes(self) -> int:
        """How often it has changed what requests can reuse, or could have in use together. 0 where no sequence had
        known tokens yet."""
        return 0

    def missing_block(self, request: Request) -> Any:
        """The first full block of the prompt that is not stored, equal for two requests if and only if they lack the
        same one; None where there is none, or nothing is reused."""
        return None

    # For the loop.

    def of_windows(self) -> "tuple[KvCache, ...]":
        """The paged cache of each attention window; none of a cache without blocks."""
        return ()

    @abstractmethod
    def holds(self, slot: int) -> bool:
        """Whether `slot` has a sequence."""

    @abstractmethod
    def add_request(self, request: Request, now_s: float = 0.0) -> int:
        """Take the blocks of the request's whole prompt; returns how many of its tokens they hold already."""

    def begin_generation(self, slot: int, micro_batch: int = 0) -> None:
        """The prompt is computed: from the next step on, the sequence takes its steps together with the others of this
        micro batch. Without this call it takes them alone."""
        return None

    def end_generation(self, slot: int) -> None:
        """The sequence takes no further steps together with others, unless its generation begins again."""
        return None

    def join(self, rows: Rows, micro_batch: int) -> None:
        """The sequences in `rows`, which are in generation, are in this micro batch from now on."""
        return None

    def cached_tokens(self, rows: Rows) -> Rows:
        """Tokens of each sequence, [sequences]."""
        return self.registered[rows] - self.attention_window.bubble

    @abstractmethod
    def add_tokens(self, rows: Rows) -> Rows:
        """Register one more token in each of `rows`, and take the blocks that these tokens start; returns how many
        tokens were registered before."""

    def add_draft_tokens(self, rows: Rows, counts: Rows) -> None:
        """Register `counts` more tokens in each of `rows`, as `add_tokens` does one."""
        for step in range(int(counts.max(initial=0))):
            self.add_tokens(rows[counts > step])

    def rewind(self, rows: Rows, registered: Rows) -> None:
        """Remove the newest tokens of `rows` (rejected drafts), so that `registered` of each remain. A block that this
        empties is the next that is taken. For sequences that have not wrapped."""
        raise NotImplementedError(f"{type(self).__name__} is not used with draft tokens")

    def store_context(self, slot: int) -> None:
        """Make the full blocks of a computed prompt findable. Its last token is left out, because a request with the
        same prompt must compute at least one token."""
        return None

    def store_generated(self, slot: int, num_tokens: int) -> None:
        """Make the full blocks of the sequence's first `num_tokens` tokens findable, output included."""
        return None

    @abstractmethod
    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None:
        """Release all blocks of the sequence. store: its first tokens that remain findable, also in a partial block."""

    def store_known(self, request: Request, num_tokens: int) -> None:
        """`store_generated` of a generation request, as far as it has one beam and its tokens are known."""
        if request.beam_width == 1:
            self.store_generated(request.slot, min(num_tokens, request.num_known_tokens))

    def forget_sequence(self, slot: int) -> None:
        """Make the sequence's blocks unfindable: their content was never computed."""
        return None

    def truncate(self, known: KnownTokens, length: int, keep: int) -> None:
        """Make the stored blocks of a conversation of `length` tokens unfindable beyond its first `keep`."""
        return None

    def refresh(self, now_s: float) -> None:
        """Give free blocks with a retention priority that has expired the default priority. To be called in each
        iteration, once all blocks for it have been taken."""
        return None

    @property
    def next_expiry_s(self) -> float:
        """When `refresh` may change something for the first time."""
        return inf

    def retention_figures(self) -> dict[str, int]:
        """Since the start, blocks that became free with a priority above the default one, returned to it while they
        were free, and were taken for others before; and all that were taken while what they held could be found."""
        return {}

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """What the executor must copy before its next batch; each copy is returned once."""
        return ()

    # For records and tests.

    @property
    @abstractmethod
    def num_used(self) -> int:
        """Device blocks with references."""

    @property
    @abstractmethod
    def counters(self) -> BlockCounters:
        """Sums since the start; they continue to change."""

    @abstractmethod
    def state(self) -> CacheState:
        """The cache now, as records hold it."""

    @abstractmethod
    def check_consistency(self) -> None:
        """Raise AssertionError if the parts of the cache disagree."""
