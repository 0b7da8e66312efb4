"""Settings of every engine's scheduler."""

from dataclasses import dataclass
from functools import partial

from ifbbench.settings.bounds import MAX_BATCH, MAX_BEAMS, MAX_WAIT_MS
from ifbbench.settings.engines import ENGINES
from ifbbench.settings.fields import declare, or_none

# The family of settings that limit requests and batches.
LIMITS = "limits"
POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")
CHUNKING_POLICIES = ("first_come_first_served", "equal_progress")
BATCHING_TYPES = ("v1", "inflight_unfused", "inflight_fused")
BATCHING_TYPE_ALIASES = {
    "static": "v1",
    "IFB": "inflight_fused",
    "inflight": "inflight_fused",
    "InflightFusedBatching": "inflight_fused",
    "UIFB": "inflight_unfused",
    "InflightBatching": "inflight_unfused",
}
OVERLAPS = ("partitioned", "async")
DEFAULT_MAX_NUM_TOKENS = 8192

_scheduling = partial(declare, "scheduling")


@dataclass(frozen=True)
class SchedulingSettings:
    """Settings of every engine's scheduler."""

    engine: str = _scheduling(
        ENGINES[0],
        "The engine whose scheduler decides, with the defaults of that engine.",
        choices=ENGINES,
        value_aliases={"tensorrt_llm": "trtllm", "TensorRT-LLM": "trtllm"},
        other_texts=".+",
        others="package.module:ClassName or the name of an installed one",
        elsewhere="serving_engine runtime",
        is_common=True,
    )
    type: str = _scheduling(
        "inflight_fused",
        "Batching type: static batches (v1, static); requests that join and leave in every "
        "iteration (inflight_fused, inflight, IFB); the same with a pass for each phase (inflight_unfused, UIFB).",
        choices=BATCHING_TYPES,
        value_aliases=BATCHING_TYPE_ALIASES,
        elsewhere="batching_type batching",
    )
    policy: str = _scheduling(
        "guaranteed_no_evict",
        "Capacity scheduler policy.",
        choices=POLICIES,
        other_texts=".+",
        others="package.module:ClassName or the name of an installed one",
        aliases=("scheduler_policy",),
        elsewhere="scheduler capacity_scheduler_policy",
        is_common=True,
    )
    max_batch_size: int | None = _scheduling(
        None,
        "Maximum number of requests in one batch. Default: 16 on a CPU, else 2048.",
        minimum=1,
        maximum=MAX_BATCH,
        unit="requests",
        aliases=("max_num_sequences", "max_num_requests", "max_num_seqs", "max_running_requests"),
        elsewhere="batch_size parallel",
        family=LIMITS,
        is_common=True,
    )
    max_queue_size: int | None = _scheduling(
        None,
        "Maximum number of requests that wait for a place in the engine; more are refused. Default: no maximum.",
        minimum=0,
        unit="requests",
        aliases=("max_num_queued_reqs", "max_queued_requests"),
        elsewhere="queue_size max_waiting_requests",
    )
    max_num_tokens: int | None = _scheduling(
        DEFAULT_MAX_NUM_TOKENS,
        "Maximum number of tokens in the batch of one iteration; none is no limit. Static "
        "batches (V1), which are padded, have none.",
        minimum=1,
        unit="tokens",
        convert=or_none,
        aliases=("max_num_batched_tokens", "chunked_prefill_size"),
        elsewhere="token_budget n_batch",
        family=LIMITS,
        is_common=True,
    )
    enable_batch_size_tuning: bool = _scheduling(
        False, "Lower the batch size in each iteration to what the KV cache holds of the average active request."
    )
    enable_max_num_tokens_tuning: bool = _scheduling(
        False, "Lower the token budget in each iteration to what the average active request needs."
    )
    dynamic_batch_moving_average_window: int = _scheduling(
        128,
        "With tuning of batch size or tokens: average over the latest N lengths.",
        minimum=1,
        maximum=MAX_BATCH,
        unit="requests",
    )
    enable_chunked_context: bool | None = _scheduling(
        False,
        "Split prompts into context chunks that fill the token budget; not with --type v1, a contiguous cache, "
        "or --max_num_tokens below one chunk.",
        command_line_default=None,
        aliases=("enable_chunked_prefill",),
        elsewhere="chunked_prefill",
        opposites="disable_chunked_prefill",
        is_common=True,
    )
    context_chunking_policy: str = _scheduling(
        "first_come_first_served", "How the token budget is divided among context chunks.", choices=CHUNKING_POLICIES
    )
    context_chunk_unit: int | None = _scheduling(
        None,
        "Context chunks are multiples of this, except the last one of a prompt; the first one after reused "
        "tokens ends with a block. Default: tokens_per_block.",
        minimum=1,
        unit="tokens",
    )
    max_seq_len: int | None = _scheduling(
        None,
        "Maximum length of prompt plus output. Default: the model's.",
        minimum=2,
        unit="tokens",
        aliases=("max_model_len", "context_length"),
        elsewhere="ctx_size max_length max_sequence_length n_ctx",
        family=LIMITS,
    )
    max_input_len: int | None = _scheduling(
        None,
        "Maximum prompt length. Default: max_seq_len - 1; without chunked context max_num_tokens, if that is less.",
        minimum=1,
        unit="tokens",
        elsewhere="max_prompt_length max_input_length",
        family=LIMITS,
    )
    max_beam_width: int | None = _scheduling(
        None,
        "Maximum beam width of a request. Default: the largest of the trace.",
        minimum=1,
        maximum=MAX_BEAMS,
        unit="beams",
        family=LIMITS,
    )
    enable_trt_overlap: bool = _scheduling(
        False,
        "Hide the host's work behind the device's: --overlap partitioned, unless --overlap says otherwise.",
        elsewhere="enable_overlap enable_overlap_schedule",
    )
    overlap: str | None = _scheduling(
        None,
        "Form of overlap: two micro batches, each with a part of the requests, in flight in turn (partitioned); "
        "or all requests, each iteration submitted before the tokens of the one before are known (async).",
        choices=OVERLAPS,
    )
    static_emulated_batch_size: int | None = _scheduling(
        None, "Emulate static batching: hand out N requests when none is running.", minimum=1, unit="requests"
    )
    static_emulated_timeout: int = _scheduling(
        500,
        "With --static_emulated_batch_size: how long a request waits for a full batch.",
        minimum=0,
        maximum=MAX_WAIT_MS,
        unit="ms",
    )
