"""The engine's limits, as `ifbbench.api.resolve` or a researcher's script sets them."""

from dataclasses import dataclass

from ifbbench.engine.batching_type import BatchingType
from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.kv_cache.contiguous import ContiguousCache
from ifbbench.engine.kv_cache.interface import NO_REUSE, KvCache
from ifbbench.engine.kv_cache.manager import KvCacheManager
from ifbbench.engine.kv_cache.sequence import ReuseRules
from ifbbench.engine.kv_cache.sizing import WindowLayout
from ifbbench.engine.kv_cache.variable_window import VariableWindowCache

MICRO_BATCHES_WITH_OVERLAP = 2
# Fetched beyond the free places, so that a request of higher priority that waits behind others is seen.
LOOK_AHEAD = 8
# Static batches leave no choice.
V1_POLICY = "guaranteed_no_evict"
# In a cache without blocks only the number of requests counts.
CONTIGUOUS_POLICY = "max_requests"


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """The engine's limits, all resolved: tokens, requests and blocks. `chunk_unit` None means no chunked context.

    vocab_size: token ids are checked against it; None where there is no model. enable_overlap: an iteration is
    scheduled and submitted before the tokens of the one before are there. windows: attention windows with their blocks,
    where some layer does not see all tokens; else there is one window of num_blocks and num_host_blocks.
    is_contiguous: a cache without blocks.
    """

    policy: str
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_input_len: int
    tokens_per_block: int
    num_blocks: int
    chunk_unit: int | None = None
    chunking_policy: str = "first_come_first_served"
    batching_type: BatchingType = BatchingType.INFLIGHT_FUSED
    max_beam_width: int = 1
    enable_overlap: bool = False
    vocab_size: int | None = None
    reuse: ReuseRules = NO_REUSE
    num_host_blocks: int = 0
    windows: tuple[WindowLayout, ...] = ()
    is_contiguous: bool = False

    def __post_init__(self) -> None:
        if self.enable_overlap and self.max_beam_width > 1:
            raise ValueError("overlap works with beam width 1 only")
        if self.reuse.enabled and (len(self.windows) > 1 or self.is_contiguous):
            raise ValueError("blocks are reused in a paged cache with one attention window only")
        if self.enable_overlap and self.batching_type is BatchingType.V1:
            raise ValueError("static batches (V1) do not overlap")

    @property
    def num_slots(self) -> int:
        """Sequence slots that an executor needs: a full batch and, where slots cost nothing, what higher priority may
        add to it."""
        return self.max_batch_size + (0 if self.is_contiguous else LOOK_AHEAD)

    @property
    def attention_window(self) -> AttentionWindow:
        """Of the first attention window."""
        if self.windows:
            return self.windows[0].attention_window
        return AttentionWindow(
            self.tokens_per_block, self.max_seq_len, self.max_seq_len, max_beam_width=self.max_beam_width
        )

    @property
    def effective_policy(self) -> str:
        """The capacity scheduler policy that schedules, whatever was asked for."""
        if self.is_contiguous:
            return CONTIGUOUS_POLICY
        return V1_POLICY if self.batching_type is BatchingType.V1 else self.policy

    @property
    def pools(self) -> tuple[tuple[AttentionWindow, int], ...]:
        """Geometry and number of blocks of each window; none in a cache without blocks."""
        if self.is_contiguous:
            return ()
        if self.windows:
            return tuple((window.attention_window, window.num_blocks) for window in self.windows)
        return ((self.attention_window, self.num_blocks),)

    def make_cache(self) -> KvCache:
        """An empty KV cache of this kind and size."""
        if self.is_contiguous:
            return ContiguousCache(self.attention_window, self.num_slots)
        if len(self.windows) > 1:
            return VariableWindowCache(self.windows, self.num_slots)
        num_blocks, num_host_blocks = self.num_blocks, self.num_host_blocks
        if self.windows:
            num_blocks, num_host_blocks = self.windows[0].num_blocks, self.windows[0].num_host_blocks
        return KvCacheManager(self.attention_window, num_blocks, self.num_slots, num_host_blocks, self.reuse)

    @property
    def num_micro_batches(self) -> int:
        """Iterations that may be under way at once."""
        return MICRO_BATCHES_WITH_OVERLAP if self.enable_overlap else 1
