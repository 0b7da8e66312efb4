"""The engine's limits, all resolved, as `ifbbench.build.resolve` or a script sets them."""

from dataclasses import dataclass, replace

from ifbbench.engine.drafts import NO_DRAFTS, DraftSettings
from ifbbench.engine.request import RequestTable
from ifbbench.kv.adapters import LoraConfig
from ifbbench.kv.attention_window import AttentionWindow, ceil_div
from ifbbench.kv.contiguous import ContiguousCache
from ifbbench.kv.interface import NO_REUSE, KvCache
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.paged import PagedCache
from ifbbench.kv.sequence import ReuseRules
from ifbbench.kv.sizing import WindowLayout
from ifbbench.kv.variable_window import VariableWindowCache
from ifbbench.schedulers.sglang.rules import SglangRules
from ifbbench.schedulers.vllm.rules import VllmRules
from ifbbench.settings.engines import TRTLLM
from ifbbench.settings.modes import BatchingType, Overlap

UNLIMITED = 2**62
OVERLAPPING = 2  # micro batches with overlap partitioned, iterations in flight with overlap async
# Requests fetched beyond the free batch slots, so that one of higher priority is found behind others that wait.
LOOK_AHEAD = 8
# Slots that vLLM's scheduler has at least, for requests that were pre-empted.
MIN_SLOTS = 64
BLOCK_ID_BYTES = 4
# Requests of TensorRT-LLM that are sent at a time, at most: so many for each active one, or so many in all.
SENDING, MIN_SENDING = 2, 64
V1_POLICY = "guaranteed_no_evict"
CONTIGUOUS_POLICY = "max_requests"


def share_of(limit: int | None, ranks: int, unit: int = 1) -> int | None:
    """The share that each of so many ranks has of a limit: whole units, one at least; no limit and 0 stay."""
    return max(limit // ranks // unit, 1) * unit if limit else limit


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """Limits of tokens, requests and blocks. ValueError for settings that contradict each other.

    max_num_tokens: token budget of an iteration; None for no limit.
    chunk_unit: tokens of which the size of a context chunk is a multiple; None for no chunked context.
    overlap: None for none. It has no effect with `pp_size` above 1.
    pp_size: number of pipeline stages, which is also that of the micro batches in flight.
    vocab_size, hidden_size: what token ids and arrays of requests are checked against; None without a model.
    max_queue_size: maximum number of waiting requests; None for no limit.
    windows: attention windows and their blocks, if some layer does not see all tokens; else there is one window of
        num_blocks and num_host_blocks.
    is_contiguous: whether the cache has no blocks.
    tunes_batch_size, tunes_num_tokens, tuning_window: see DynamicLimits.
    lora: adapters; None if requests with LoRA tasks run the base model.
    num_sending: number of further sequence slots, for requests that are not active while their keys and values are sent
        to another engine.
    engine: name of the engine whose scheduler decides.
    vllm, sglang: rules of these engines.
    reads_block_tables: whether the executor reads block tables; otherwise blocks have no ids where nothing else needs
        them.
    attention_dp_size: number of ranks of attention data parallelism, each with requests and limits of its own.
    rank: the rank that has these limits; None for those of all ranks together.
    balances_ranks, attention_dp_time_out_iters, attention_dp_batching_wait_iters: see RanksBalance.
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
    num_sending: int = 0
    engine: str = TRTLLM
    vllm: VllmRules | None = None
    sglang: SglangRules | None = None
    reads_block_tables: bool = True
    attention_dp_size: int = 1
    rank: int | None = None
    balances_ranks: bool = False
    attention_dp_time_out_iters: int = 50
    attention_dp_batching_wait_iters: int = 10

    def __post_init__(self) -> None:
        if self.overlap is not None and self.max_beam_width > 1:
            raise ValueError("overlap works with beam width 1 only")
        if self.reuse.enabled and self.vllm is None and (len(self.windows) > 1 or self.is_contiguous):
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
    def has_one_policy(self) -> bool:
        """Whether the engine has no choice of capacity scheduler policies: vLLM and SGLang."""
        return self.vllm is not None or self.sglang is not None

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
    def generation_budget(self) -> int:
        """Maximum number of tokens in an iteration of requests that generate: SGLang's limit is of prefill batches."""
        return UNLIMITED if self.sglang is not None else self.token_budget

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
    def max_tokens_in_flight(self) -> int:
        return self.max_in_flight * self.token_budget

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
        vLLM and SGLang also requests that were pre-empted or retracted. A rank has one of each `attention_dp_size`."""
        if (of_rank := self.of_any_rank) is not self:
            return of_rank.num_slots
        if self.has_one_policy:
            slots = max(2 * self.max_active, MIN_SLOTS)
        else:
            slots = self.max_active + (0 if self.is_contiguous else LOOK_AHEAD) + self.num_sending
        return slots * self.attention_dp_size

    def make_table(self) -> RequestTable:
        """The table of the requests that run."""
        return RequestTable(self.num_slots, self.rank or 0, 1 if self.rank is None else self.attention_dp_size)

    def of_rank(self, rank: int) -> "BatchingConfig":
        """The limits of one of the ranks of attention data parallelism: its share of those of all of them.

        Limits of SGLang's server that hold for each rank (`max_queue_size`, `max_prefill_tokens`,
        `prefill_max_requests`) stay."""
        ranks, vllm, sglang, longest = self.attention_dp_size, self.vllm, self.sglang, self.max_input_len
        if vllm is not None:
            vllm = replace(
                vllm,
                max_scheduled_tokens=share_of(vllm.max_scheduled_tokens, ranks),
                max_active=share_of(vllm.max_active, ranks),
                watermark_blocks=vllm.watermark_blocks // ranks,
            )
        max_num_tokens = share_of(self.max_num_tokens, ranks)
        if sglang is not None:
            sglang = replace(sglang, chunk_size=share_of(sglang.chunk_size, ranks, self.tokens_per_block))
        elif vllm is None and self.chunk_unit is None and max_num_tokens is not None:
            longest = min(longest, max_num_tokens)  # whole prompts
        windows = [
            replace(one, num_blocks=one.num_blocks // ranks, num_host_blocks=one.num_host_blocks // ranks)
            for one in self.windows
        ]
        return replace(
            self,
            rank=rank,
            max_batch_size=max(self.max_batch_size // ranks, 1),
            max_num_tokens=max_num_tokens,
            max_input_len=longest,
            max_queue_size=self.max_queue_size if vllm is None else share_of(self.max_queue_size, ranks),
            num_blocks=self.num_blocks // ranks,
            num_host_blocks=self.num_host_blocks // ranks,
            windows=tuple(windows),
            num_sending=ceil_div(self.num_sending, ranks),
            vllm=vllm,
            sglang=sglang,
        )

    @property
    def of_any_rank(self) -> "BatchingConfig":
        """The limits that a single request meets: those of a rank."""
        return self.of_rank(0) if self.attention_dp_size > 1 and self.rank is None else self

    def with_slots_to_send(self) -> "BatchingConfig":
        """With slots for requests that are not active while they are sent: TensorRT-LLM gives their own to others, so
        that blocks limit how many they are."""
        if self.has_one_policy:
            return self
        return replace(self, num_sending=min(self.num_blocks, max(SENDING * self.max_active, MIN_SENDING)))

    def with_chunks(self, token_budget: int) -> "BatchingConfig":
        """With prompts of any length, in chunks of whole blocks within this budget."""
        longest = self.max_seq_len - 1
        return replace(self, max_num_tokens=token_budget, chunk_unit=self.tokens_per_block, max_input_len=longest)

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

    def blocks_to_completion(self, prompt_len: int, max_new_tokens: int, beam_width: int) -> list[tuple[int, int]]:
        """Blocks that a request takes until it is complete, and those that there are, of each pool."""
        if self.vllm is not None:
            most = self.vllm.max_blocks(self.tokens_per_block, self.max_tokens_in_flight, self.max_seq_len)
            blocks = ceil_div(prompt_len + max_new_tokens, self.tokens_per_block)
            return [(sum(min(blocks, of_group) for of_group in most), self.num_blocks)]
        return [
            (
                window.blocks_to_completion(prompt_len, max_new_tokens, 0, beam_width)
                + (window.more_for_beams(prompt_len, beam_width) if self.reuse.enabled else 0),
                num_blocks,
            )
            for window, num_blocks in self.pools
        ]

    def vllm_capacity(self, num_blocks: int) -> tuple[int, float]:
        """What vLLM says of so many blocks at its start: how many tokens and how many of the longest requests they hold
        (`GPU KV cache size`, `Maximum concurrency`). It counts its null block, too."""
        assert self.vllm is not None
        most = self.vllm.max_blocks(self.tokens_per_block, self.max_tokens_in_flight, self.max_seq_len)
        concurrency = (num_blocks + 1) / sum(most)
        return int(concurrency * self.max_seq_len), concurrency

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables of blocks, of all slots."""
        blocks = sum(window.max_blocks_per_sequence for window, _ in self.pools)
        return self.num_slots * self.max_beam_width * blocks * BLOCK_ID_BYTES

    @property
    def shares_blocks(self) -> bool:
        """Whether sequences may have blocks in common that are found by their ids: reused ones, and those of beams that
        a wrapping window overwrites."""
        return self.reuse.enabled or (self.max_beam_width > 1 and any(window.wraps for window, _ in self.pools))

    def make_cache(self, has_ids: bool = True) -> KvCache:
        """has_ids: blocks have ids even where they are not shared."""
        cache = self._make_cache(has_ids or self.shares_blocks)
        if self.num_micro_batches > 1:
            cache.look_ahead()
        return cache

    def _make_cache(self, has_ids: bool) -> KvCache:
        if self.is_contiguous:
            return ContiguousCache(self.attention_window, self.num_slots)
        if len(self.windows) > 1:
            return VariableWindowCache(self.windows, self.num_slots, self.num_micro_batches, has_ids)
        num_blocks, num_host_blocks = self.num_blocks, self.num_host_blocks
        if self.windows:
            num_blocks, num_host_blocks = self.windows[0].num_blocks, self.windows[0].num_host_blocks
        window, slots, num_groups = self.attention_window, self.num_slots, self.num_micro_batches
        if has_ids:
            return KvCacheManager(window, num_blocks, slots, num_host_blocks, self.reuse, num_groups)
        return PagedCache(window, num_blocks, slots, num_groups)
