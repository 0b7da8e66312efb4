"""The engine's limits, all resolved, as `ifbbench.api.resolve` or a script sets them."""

from dataclasses import dataclass
from enum import StrEnum

from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.kv_cache.contiguous import ContiguousCache
from ifbbench.engine.kv_cache.interface import NO_REUSE, KvCache
from ifbbench.engine.kv_cache.manager import KvCacheManager
from ifbbench.engine.kv_cache.sequence import ReuseRules
from ifbbench.engine.kv_cache.sizing import WindowLayout
from ifbbench.engine.kv_cache.variable_window import VariableWindowCache

MICRO_BATCHES_WITH_OVERLAP = 2
# Requests fetched beyond the free batch slots, so that one of higher priority is found behind others that wait.
LOOK_AHEAD = 8
V1_POLICY = "guaranteed_no_evict"
CONTIGUOUS_POLICY = "max_requests"


class BatchingType(StrEnum):
    """The three batching types (TensorRT-LLM's `TrtGptModelType`).

    V1: static batches, which run until the last member is complete. INFLIGHT: requests join and leave in every
    iteration; context and generation run in one pass each. INFLIGHT_FUSED: the same in one packed pass, which
    TensorRT-LLM calls `inflight` today.
    """

    V1 = "v1"
    INFLIGHT = "inflight_unfused"
    INFLIGHT_FUSED = "inflight_fused"


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """Limits of tokens, requests and blocks. ValueError for settings that contradict each other.

    chunk_unit: None means no chunked context. vocab_size, hidden_size: token ids and arrays of requests are checked
    against them; None without a model. max_queue_size: requests that may wait; None means all.
    enable_overlap: an iteration is scheduled and submitted before the tokens of the previous one are collected.
    windows: attention windows and their blocks, if some layer does not see all tokens; else there is one window of
    num_blocks and num_host_blocks. is_contiguous: a cache without blocks. tunes_batch_size, tunes_num_tokens,
    tuning_window: see DynamicLimits.
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
    hidden_size: int | None = None
    max_queue_size: int | None = None
    reuse: ReuseRules = NO_REUSE
    num_host_blocks: int = 0
    windows: tuple[WindowLayout, ...] = ()
    is_contiguous: bool = False
    tunes_batch_size: bool = False
    tunes_num_tokens: bool = False
    tuning_window: int = 128

    def __post_init__(self) -> None:
        if self.enable_overlap and self.max_beam_width > 1:
            raise ValueError("overlap works with beam width 1 only")
        if self.reuse.enabled and (len(self.windows) > 1 or self.is_contiguous):
            raise ValueError("blocks are reused in a paged cache with one attention window only")
        if self.enable_overlap and self.batching_type is BatchingType.V1:
            raise ValueError("static batches (V1) do not overlap")

    @property
    def effective_policy(self) -> str:
        """The capacity scheduler policy that is used: V1 and a cache without blocks allow one only."""
        if self.is_contiguous:
            return CONTIGUOUS_POLICY
        return V1_POLICY if self.batching_type is BatchingType.V1 else self.policy

    @property
    def has_dynamic_limits(self) -> bool:
        """Whether batch size or token budget change during a run."""
        return self.tunes_batch_size or self.tunes_num_tokens

    @property
    def num_micro_batches(self) -> int:
        """Maximum number of iterations in flight."""
        return MICRO_BATCHES_WITH_OVERLAP if self.enable_overlap else 1

    @property
    def num_slots(self) -> int:
        """Sequence slots: a full batch and, with a paged cache, what requests of higher priority may add to it."""
        return self.max_batch_size + (0 if self.is_contiguous else LOOK_AHEAD)

    @property
    def attention_window(self) -> AttentionWindow:
        """The first attention window, or the only one."""
        if self.windows:
            return self.windows[0].attention_window
        return AttentionWindow(
            self.tokens_per_block, self.max_seq_len, self.max_seq_len, max_beam_width=self.max_beam_width
        )

    @property
    def pools(self) -> tuple[tuple[AttentionWindow, int], ...]:
        """Each attention window and its number of blocks; empty for a cache without blocks."""
        if self.is_contiguous:
            return ()
        if self.windows:
            return tuple((window.attention_window, window.num_blocks) for window in self.windows)
        return ((self.attention_window, self.num_blocks),)

    def make_cache(self) -> KvCache:
        if self.is_contiguous:
            return ContiguousCache(self.attention_window, self.num_slots)
        if len(self.windows) > 1:
            return VariableWindowCache(self.windows, self.num_slots)
        num_blocks, num_host_blocks = self.num_blocks, self.num_host_blocks
        if self.windows:
            num_blocks, num_host_blocks = self.windows[0].num_blocks, self.windows[0].num_host_blocks
        return KvCacheManager(self.attention_window, num_blocks, self.num_slots, num_host_blocks, self.reuse)
