"""The engine's limits, all resolved, as `ifbbench.build.resolve` or a script sets them."""

from dataclasses import dataclass

from ifbbench.engine.drafts import NO_DRAFTS, DraftSettings
from ifbbench.kv.adapters import LoraConfig
from ifbbench.kv.attention_window import AttentionWindow, ceil_div
from ifbbench.kv.contiguous import ContiguousCache
from ifbbench.kv.counted import CountedCache
from ifbbench.kv.interface import NO_REUSE, KvCache
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules
from ifbbench.kv.sizing import WindowLayout
from ifbbench.kv.variable_window import VariableWindowCache
from ifbbench.schedulers.vllm.rules import VllmRules
from ifbbench.settings.config import ENGINES
from ifbbench.settings.modes import BatchingType, Overlap

UNLIMITED = 2**62
OVERLAPPING = 2  # micro batches with overlap partitioned, iterations in flight with overlap async
# Requests fetched beyond the free batch slots, so that one of higher priority is found behind others that wait.
LOOK_AHEAD = 8
# Slots that vLLM's scheduler has at least, for requests that were pre-empted.
MIN_SLOTS = 64
BLOCK_ID_BYTES = 4
V1_POLICY = "guaranteed_no_evict"
CONTIGUOUS_POLICY = "max_requests"


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """Limits of tokens, requests and blocks. ValueError for settings that contradict each other.

    chunk_unit: None means no chunked context. vocab_size, hidden_size: token ids and arrays of requests are checked
    against them; None without a model. max_num_tokens: None is no limit. max_queue_size: requests that may wait; None
    means all. overlap: None is none, and pp_size above 1 leaves it without effect: a pipeline of so many stages has as
    many micro batches in flight.
    windows: attention windows and their blocks, if some layer does not see all tokens; else there is one window of
    num_blocks and num_host_blocks. is_contiguous: a cache without blocks. tunes_batch_size, tunes_num_tokens,
    tuning_window: see DynamicLimits. lora: the adapters; None if requests with LoRA tasks run the base model.
    engine: whose scheduler decides, by name. vllm: the rules of vLLM's.
    """

    policy: str
    max_batch_size: int
    max_num_tokens: int | None
    max_seq_len: int
    max_input_len: int
    tokens_per_block: int
    num_blocks: int
    chunk_unit: int | None = None
    chunking_policy: str = "first_come_first_served"
    batching_type: BatchingType = BatchingType.INFLIGHT_FUSED
    max_beam_width: int = 1
    overlap: Overlap | None = None
    pp_size: int = 1
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
    lora: LoraConfig | None = None
    drafts: DraftSettings = NO_DRAFTS
    engine: str = ENGINES[0]
    vllm: VllmRules | None = None

    def __post_init__(self) -> None:
        if self.overlap is not None and self.max_beam_width > 1:
            raise ValueError("overlap works with beam width 1 only")
        if self.reuse.enabled and (len(self.windows) > 1 or self.is_contiguous):
            raise ValueError("blocks are reused in a paged cache with one attention window only")
        if self.overlap is not None and self.batching_type is BatchingType.V1:
            raise ValueError("static batches (V1) do not overlap")
        if self.drafts.max_len and (self.refuses_drafts or self.max_beam_width > 1):
            raise ValueError(f"draft tokens do not work with {self.refuses_drafts or 'beam widths above 1'}")

    @property
    def effective_policy(self) -> str:
        """The capacity scheduler policy that is used: V1 and a cache without blocks allow one only."""
        if self.is_contiguous:
            return CONTIGUOUS_POLICY
        return V1_POLICY if self.batching_type is BatchingType.V1 else self.policy

    @property
    def refuses_drafts(self) -> str | None:
        """What keeps requests from having draft tokens, or None."""
        if self.batching_type is BatchingType.V1:
            return "static batches (V1)"
        if self.pp_size > 1:
            return "pipeline stages"
        if self.overlap is not None:
            return "overlap"
        if any(window.wraps for window, _ in self.pools):
            return "an attention window whose blocks are overwritten"
        return None

    @property
    def has_dynamic_limits(self) -> bool:
        """Whether batch size or token budget change during a run."""
        return self.tunes_batch_size or self.tunes_num_tokens

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens in an iteration; larger than any batch without a limit."""
        return UNLIMITED if self.max_num_tokens is None else self.max_num_tokens

    @property
    def is_async(self) -> bool:
        """Whether requests are scheduled again before their newest tokens are known."""
        return self.overlap == Overlap.ASYNC and self.pp_size == 1

    @property
    def num_micro_batches(self) -> int:
        """Parts that the active requests are divided into. They run in turn, each while the others are in flight.
        Static batches (V1) are not divided, and pass through a pipeline alone."""
        if self.batching_type is BatchingType.V1:
            return 1
        if self.pp_size > 1:
            return self.pp_size
        return OVERLAPPING if self.overlap == Overlap.PARTITIONED else 1

    @property
    def max_in_flight(self) -> int:
        """Maximum number of iterations in flight."""
        return OVERLAPPING if self.is_async else self.num_micro_batches

    @property
    def max_active(self) -> int:
        """Maximum number of active requests: a full batch for each pipeline stage."""
        return self.max_batch_size * (self.num_micro_batches if self.pp_size > 1 else 1)

    @property
    def micro_batch_size(self) -> int:
        """Maximum number of requests in one micro batch."""
        return ceil_div(self.max_active, self.num_micro_batches)

    @property
    def num_slots(self) -> int:
        """Sequence slots: all active requests and, with a paged cache, what those of higher priority may add; under
        vLLM also requests that were pre-empted."""
        if self.vllm is not None:
            return max(2 * self.max_active, MIN_SLOTS)
        return self.max_active + (0 if self.is_contiguous else LOOK_AHEAD)

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

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables of blocks, of all slots."""
        blocks = sum(window.max_blocks_per_sequence for window, _ in self.pools)
        return self.num_slots * self.max_beam_width * blocks * BLOCK_ID_BYTES

    def make_cache(self, is_counted: bool = False) -> KvCache:
        """is_counted: no block table is read, so that blocks need no ids where nothing else does."""
        cache = self._make_cache(is_counted)
        if self.num_micro_batches > 1:
            cache.look_ahead()
        return cache

    def _make_cache(self, is_counted: bool) -> KvCache:
        if self.is_contiguous:
            return ContiguousCache(self.attention_window, self.num_slots)
        if len(self.windows) > 1:
            return VariableWindowCache(self.windows, self.num_slots, self.num_micro_batches if is_counted else 0)
        num_blocks, num_host_blocks = self.num_blocks, self.num_host_blocks
        if self.windows:
            num_blocks, num_host_blocks = self.windows[0].num_blocks, self.windows[0].num_host_blocks
        if is_counted and not self.reuse.enabled:  # see Repetition.works_with
            return CountedCache(self.attention_window, num_blocks, self.num_slots, self.num_micro_batches)
        return KvCacheManager(self.attention_window, num_blocks, self.num_slots, num_host_blocks, self.reuse)
