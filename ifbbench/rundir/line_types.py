"""The lines of `iterations.jsonl`, `spans.jsonl` and `requests.jsonl`.

Iterations have two forms: the batch manager's documented statistics, and those of TensorRT-LLM's executor. Both have
`ifbbench`, what no other tool records. Optional fields are left out where they are UNSET.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, TypeVar

from msgspec import UNSET, Struct, UnsetType, convert, field
from msgspec.structs import asdict

from ifbbench.engine.plan import Limit
from ifbbench.engine.records import CacheState, IterationRecord

CACHE_FIELDS = (
    "Max KV cache blocks",
    "Free KV cache blocks",
    "Used KV cache blocks",
    "Tokens per KV cache block",
    "Allocated total KV cache blocks",
    "Allocated new KV cache blocks",
    "Reused KV cache blocks",
)
COMMON_FIELDS = (
    "Timestamp",
    "Iteration Counter",
    "Active Request Count",
    "Max Request Count",
    *CACHE_FIELDS,
    "Scheduled Requests",
    "Context Requests",
)
INFLIGHT_FIELDS = ("Generation Requests", "Total Context Tokens", "MicroBatch ID", "Paused Requests")
STATIC_FIELDS = ("Total Generation Tokens", "Total Context Tokens", "Empty Generation Slots")
TIMESTAMP_FORMAT = "%m-%d-%Y %H:%M:%S"

Filled = TypeVar("Filled", bound=Struct)


@cache
def snake_case(name: str) -> str:
    """The field of a line, and the column of a table, for a documented name such as `Used KV cache blocks`."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


class LeftOutRequest(Struct, gc=False):
    """The first request that did not run in full.

    reason: a limit of the engine, or a user policy's own reason.
    """

    request_id: int
    reason: str


def queue_head_of(record: IterationRecord) -> LeftOutRequest | UnsetType | None:
    """What holds the queue of an iteration, of an engine that says so, where that is not what was left out first:
    running requests that stand aside for prompts hold no queue."""
    head, left_out = record.queue_head, record.left_out
    if head is None:
        return None if left_out is not None and left_out.limit is Limit.PREFILL else UNSET
    return UNSET if head is left_out else LeftOutRequest(head.request.request_id, head.limit)


class PausedRequest(Struct, gc=False):
    """A request that was paused, and the one that it made room for."""

    request_id: int
    beneficiary: int = field(name="for")


class SpecDecodingStats(Struct, rename="camel"):
    """The draft tokens of an iteration, under the names of TensorRT-LLM's executor.

    numAcceptedTokens: drafts that became output.
    acceptanceLength: tokens that a request with drafts got on average.
    iterLatencyMS: latency of the draft model.
    draftOverhead: share of that in the iteration.
    """

    num_draft_tokens: int
    num_accepted_tokens: int
    num_requests_with_draft_tokens: int
    acceptance_length: float
    iter_latency: float = field(name="iterLatencyMS")
    draft_overhead: float


class KvCacheIterationStats(Struct, rename="camel"):
    """The device blocks of one attention window in an iteration, under the names of TensorRT-LLM's iteration
    statistics."""

    primary_max_num_blocks: int
    primary_free_num_blocks: int
    primary_used_num_blocks: int


def stats_of_windows(cache: CacheState) -> dict[str, KvCacheIterationStats]:
    """The blocks of each attention window, by its tokens."""
    return {
        str(window.size): KvCacheIterationStats(
            window.max_blocks, window.max_blocks - window.used_blocks, window.used_blocks
        )
        for window in cache.windows
    }


class IterationDetails(Struct, gc=False, kw_only=True):
    """What a line of `iterations.jsonl` adds to the batch manager's statistics, under "ifbbench".

    host_ms, device_ms: latency_ms before and after the batch was submitted.
    context_pass_ms, generation_pass_ms: times of the passes of iterations with a pass for each phase.
    schedule_ms to bytes: times and work of a profiled run.
    queued: number of requests that have arrived and are not active.
    waiting: number of requests that have arrived and are not scheduled.
    queue_head: the request that all in the queue wait for, and the limit that holds it, in iterations in which it is
        not first_left_out; None if nothing holds the queue.
    missed_blocks: blocks of prompts that were looked up and not found, since the start.
    first_step, last_step: first and last line of a whole static batch in `steps.jsonl`.
    lora_loads: LoRA tasks with adapters that were copied to the device.
    spec_decoding: counts of iterations with draft tokens.
    kv_cache_iteration_stats: counts of runs with several attention windows, by the tokens of each.
    delivery_ms: time from the end of the iteration until its tokens reach the clients, behind a serving process
        (`--engine_overhead`).
    """

    start_s: float
    latency_ms: float
    host_ms: float
    device_ms: float
    context_pass_ms: float | UnsetType = UNSET
    generation_pass_ms: float | UnsetType = UNSET
    schedule_ms: float | UnsetType = UNSET
    prepare_ms: float | UnsetType = UNSET
    launch_ms: float | UnsetType = UNSET
    collect_ms: float | UnsetType = UNSET
    device_busy_ms: float | UnsetType = UNSET
    flops: float | UnsetType = UNSET
    bytes: float | UnsetType = UNSET
    queued: int
    waiting: int
    bound_by: str
    first_left_out: LeftOutRequest | None
    queue_head: LeftOutRequest | UnsetType | None = UNSET
    paused: list[PausedRequest]
    tokens_recomputed: int
    budget_used: int
    padding_tokens: int | UnsetType = UNSET
    missed_blocks: int | None
    kv_fragmentation: float
    first_step: int | UnsetType = UNSET
    last_step: int | UnsetType = UNSET
    lora_loads: list[int] | UnsetType = UNSET
    spec_decoding: SpecDecodingStats | UnsetType = UNSET
    kv_cache_iteration_stats: dict[str, KvCacheIterationStats] | UnsetType = UNSET
    delivery_ms: float | UnsetType = UNSET


class IterationLine(Struct, gc=False, rename={snake_case(name): name for name in COMMON_FIELDS}):
    """A line of `iterations.jsonl`: the documented statistics of the batch manager, in their order; those of the
    batching type and `ifbbench` follow. Counts of blocks are None for a contiguous cache."""

    timestamp: str
    iteration_counter: int
    active_request_count: int
    max_request_count: int
    max_kv_cache_blocks: int | None
    free_kv_cache_blocks: int | None
    used_kv_cache_blocks: int | None
    tokens_per_kv_cache_block: int | None
    allocated_total_kv_cache_blocks: int | None
    allocated_new_kv_cache_blocks: int | None
    reused_kv_cache_blocks: int | None
    scheduled_requests: int
    context_requests: int


class InflightLine(IterationLine, rename={snake_case(name): name for name in INFLIGHT_FIELDS}):
    """With in-flight batching."""

    generation_requests: int
    total_context_tokens: int
    microbatch_id: int
    paused_requests: int
    ifbbench: IterationDetails


class StaticLine(IterationLine, rename={snake_case(name): name for name in STATIC_FIELDS}):
    """With static batches (V1)."""

    total_generation_tokens: int
    total_context_tokens: int
    empty_generation_slots: int
    ifbbench: IterationDetails


class KvCacheStats(
    Struct,
    rename={
        "max_kv_cache_blocks": "maxNumBlocks",
        "free_kv_cache_blocks": "freeNumBlocks",
        "used_kv_cache_blocks": "usedNumBlocks",
        "tokens_per_kv_cache_block": "tokensPerBlock",
        "allocated_total_kv_cache_blocks": "allocTotalBlocks",
        "allocated_new_kv_cache_blocks": "allocNewBlocks",
        "reused_kv_cache_blocks": "reusedBlocks",
        "missed_blocks": "missedBlocks",
        "cache_hit_rate": "cacheHitRate",
    },
):
    """The paged KV cache, in the executor's form. cacheHitRate: reused blocks of those looked up, since the start."""

    max_kv_cache_blocks: int
    free_kv_cache_blocks: int
    used_kv_cache_blocks: int
    tokens_per_kv_cache_block: int
    allocated_total_kv_cache_blocks: int
    allocated_new_kv_cache_blocks: int
    reused_kv_cache_blocks: int
    missed_blocks: int | None
    cache_hit_rate: float


class StaticBatchingStats(
    Struct,
    rename={
        "scheduled_requests": "numScheduledRequests",
        "context_requests": "numContextRequests",
        "total_context_tokens": "numCtxTokens",
        "total_generation_tokens": "numGenTokens",
        "empty_generation_slots": "emptyGenSlots",
    },
):
    """Static batches (V1), in the executor's form."""

    scheduled_requests: int
    context_requests: int
    total_context_tokens: int
    total_generation_tokens: int
    empty_generation_slots: int


class InflightBatchingStats(
    Struct,
    rename={
        "scheduled_requests": "numScheduledRequests",
        "context_requests": "numContextRequests",
        "generation_requests": "numGenRequests",
        "paused_requests": "numPausedRequests",
        "total_context_tokens": "numCtxTokens",
        "microbatch_id": "microBatchId",
        "decoded_tokens": "avgNumDecodedTokensPerIter",
    },
):
    """In-flight batching, in the executor's form. avgNumDecodedTokensPerIter: of each generation request."""

    scheduled_requests: int
    context_requests: int
    generation_requests: int
    paused_requests: int
    total_context_tokens: int
    microbatch_id: int
    decoded_tokens: float


class ExecutorLine(
    Struct,
    rename={
        "iteration_counter": "iter",
        "latency_ms": "iterLatencyMS",
        "active_request_count": "numActiveRequests",
        "queued": "numQueuedRequests",
        "completed": "numCompletedRequests",
        "max_request_count": "maxNumActiveRequests",
        "kv_cache": "kvCacheStats",
        "static": "staticBatchingStats",
        "inflight": "inflightBatchingStats",
        "spec_decoding": "specDecodingStats",
        "kv_cache_iteration_stats": "kvCacheIterationStats",
    },
):
    """The statistics of an iteration under the names of TensorRT-LLM's executor.

    kvCacheStats: None for a contiguous cache. Of staticBatchingStats and inflightBatchingStats, that of the other
    batching type is None.

    ifbbench: in `iterations.jsonl`, not in an `--iteration_log`.
    """

    timestamp: str
    iteration_counter: int
    latency_ms: float
    active_request_count: int
    queued: int
    completed: int
    max_request_count: int
    kv_cache: KvCacheStats | None
    static: StaticBatchingStats | None
    inflight: InflightBatchingStats | None
    spec_decoding: SpecDecodingStats | UnsetType
    kv_cache_iteration_stats: dict[str, KvCacheIterationStats] | UnsetType
    ifbbench: IterationDetails | UnsetType


def executor_line(line: InflightLine | StaticLine, completed: int) -> ExecutorLine:
    """`line` in the executor's form. completed: the requests that were completed in the iteration."""
    details = line.ifbbench
    known = asdict(line) | {
        "latency_ms": details.latency_ms,
        "queued": details.queued,
        "missed_blocks": details.missed_blocks,
        "completed": completed,
        "spec_decoding": details.spec_decoding,
        "kv_cache_iteration_stats": details.kv_cache_iteration_stats,
    }
    return executor_statistics(known, details)


def executor_statistics(known: Mapping[str, Any], details: IterationDetails | UnsetType = UNSET) -> ExecutorLine:
    """An iteration's line in the executor's form. known: fields of InflightLine or StaticLine and of IterationDetails,
    and `completed`; those that are missing, in runs of other versions, are None."""
    reused, missed = known.get("reused_kv_cache_blocks"), known.get("missed_blocks")
    drafts = known.get("spec_decoding", UNSET)
    if isinstance(drafts, dict):  # of a line that was read
        drafts = convert(drafts, SpecDecodingStats)
    derived = {
        "cache_hit_rate": reused / (reused + missed) if reused and missed is not None else 0.0,
        "decoded_tokens": _decoded_tokens(known, drafts),
        "spec_decoding": drafts,
        "kv_cache_iteration_stats": known.get("kv_cache_iteration_stats", UNSET),
        "static": None,
        "inflight": None,
        "kv_cache": None,
        "ifbbench": details,
    }
    fields = {**known, **derived}
    if "microbatch_id" in known:
        fields["inflight"] = _filled(InflightBatchingStats, fields)
    else:
        fields["static"] = _filled(StaticBatchingStats, fields)
    if known.get("max_kv_cache_blocks") is not None:
        fields["kv_cache"] = _filled(KvCacheStats, fields)
    return _filled(ExecutorLine, fields)


def _decoded_tokens(known: Mapping[str, Any], drafts: SpecDecodingStats | UnsetType) -> float:
    """Tokens that a generation request got on average: one without draft tokens."""
    requests = known.get("generation_requests") or 0
    accepted = 0 if drafts is UNSET else drafts.num_accepted_tokens
    return 1.0 + accepted / requests if requests else 0.0


def _filled(struct: type[Filled], fields: Mapping[str, Any]) -> Filled:
    return struct(*(fields.get(name) for name in struct.__struct_fields__))


def documented_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """The batch manager's fields of a line of either form, in snake_case and in their order, without `ifbbench`."""
    if "iter" not in row:
        return {snake_case(name): value for name, value in row.items() if name != "ifbbench"}
    static, inflight, kv_cache = (row.get(f"{name}Stats") for name in ("staticBatching", "inflightBatching", "kvCache"))
    line_type = StaticLine if static else InflightLine
    groups = (
        (ExecutorLine, row),
        (KvCacheStats, kv_cache),
        (StaticBatchingStats, static),
        (InflightBatchingStats, inflight),
    )
    values = {
        name: group.get(encoded)
        for struct, group in groups
        if group
        for name, encoded in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    }
    return {name: values.get(name) for name in line_type.__struct_fields__ if name != "ifbbench"}


class Phase:
    """What a request does in an iteration."""

    WAITING: Final = "waiting"
    CONTEXT: Final = "context"
    RECOMPUTE: Final = "recompute"
    GENERATION: Final = "generation"
    SKIPPED: Final = "skipped"
    PAUSED: Final = "paused"


RUNNING = frozenset((Phase.CONTEXT, Phase.RECOMPUTE, Phase.GENERATION))
# Phases of a request that has a batch slot, whether it runs or not.
IN_BATCH = frozenset((*RUNNING, Phase.SKIPPED))


class SpanLine(Struct, gc=False):
    """A line of `spans.jsonl`: consecutive iterations of a micro batch in which one request does one thing.

    cause: why it waits, or the id of the request that it was paused for.
    first_output: position of the output token of the first iteration of a generation span.
    chunks: tokens of each iteration of context and recompute.
    produced: output tokens that were not there before.
    every: number of micro batches, where there are several, of a span in which the request runs: it runs in each so
        many iterations, from the first to the last.
    steps: tokens of each iteration of generation, where draft tokens make it more than one in some.
    """

    request_id: int
    phase: str
    first_iteration: int
    last_iteration: int
    tokens: int
    cause: str | int | None
    first_output: int | UnsetType
    chunks: list[int] | UnsetType
    produced: int | UnsetType
    every: int | UnsetType = UNSET
    steps: list[int] | UnsetType = UNSET


class RequestLine(Struct, gc=False):
    """A line of `requests.jsonl`. Times are None, and attribution_s is empty, unless the request completed.

    attribution_s: seconds by what the request did or waited for, which add up to e2e_s.
    max_new_tokens: number of output tokens requested.
    class, priority: where the trace gives them, the default priority left out.
    slo_met: whether the request met every objective of each request, where there are any.
    draft_tokens, accepted_draft_tokens: those verified, and those that became output, of requests with any.
    replica: number of the replica that ran it, in a fleet.
    offers: what the router saw of each replica when the request arrived, [replicas], where it looked: requests and
        prompt tokens that were not answered, tokens of this prompt that were expected there (hit_tokens), tokens of
        prompts without a first token that were not (prefill_tokens), and as the replica reported them, requests in its
        queue and the share of its KV cache in use; None of those that took no requests.
    name: what a recorded engine calls the request.
    retries, lost_tokens: how often it was sent again because its replica had failed, and its tokens that had been
        computed there for nothing; where there were any.
    host_reused_tokens: number of reused tokens that were copied from host memory, where there were any.
    prefill_replica, decode_replica: numbers of the replicas that computed the prompt and that generated, with prefill
        and decode apart; None where none did.
    transfer_tokens, transfer_start_s, transfer_end_s: number and times of the keys and values that went from one to the
        other, where they did; or that were loaded from stores beneath the device memory, of which disk_reused_tokens
        and remote_reused_tokens are parts, as they are of reused_tokens.
    """

    request_id: int
    index: int
    arrival_s: float
    prompt_len: int
    output_len: int
    queue_time_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    first_scheduled_s: float | None
    first_token_s: float | None
    end_s: float | None
    max_new_tokens: int
    pauses: int
    recomputed_tokens: int
    reused_tokens: int
    attribution_s: dict[str, float]
    outcome: str
    error: str | None
    request_class: str | UnsetType = field(default=UNSET, name="class")
    priority: float | UnsetType = UNSET
    slo_met: bool | UnsetType = UNSET
    draft_tokens: int | UnsetType = UNSET
    accepted_draft_tokens: int | UnsetType = UNSET
    replica: int | UnsetType = UNSET
    offers: dict[str, list[float | None]] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    retries: int | UnsetType = UNSET
    lost_tokens: int | UnsetType = UNSET
    prefill_replica: int | UnsetType | None = UNSET
    decode_replica: int | UnsetType | None = UNSET
    transfer_tokens: int | UnsetType = UNSET
    transfer_start_s: float | UnsetType = UNSET
    transfer_end_s: float | UnsetType = UNSET
    host_reused_tokens: int | UnsetType = UNSET
    disk_reused_tokens: int | UnsetType = UNSET
    remote_reused_tokens: int | UnsetType = UNSET
