"""The command line of SGLang's server (SGLang 0.5.23)."""

from collections.abc import Mapping
from typing import Any

from ifbbench.settings.engines import SGLANG
from ifbbench.settings.names import setting
from ifbbench.settings.server import ACCEPTANCE, Given, HasExperts, Line, Server, number_of, of_all_ranks, of_each_rank

# The settings that the server has, each with SGLang's name.
OPTIONS: Mapping[str, str] = {
    "max_seq_len": "context-length",
    "max_batch_size": "max-running-requests",
    "max_queue_size": "max-queued-requests",
    "max_num_tokens": "chunked-prefill-size",
    "max_prefill_tokens": "max-prefill-tokens",
    "prefill_max_requests": "prefill-max-requests",
    "enable_mixed_chunk": "enable-mixed-chunk",
    "schedule_policy": "schedule-policy",
    "schedule_conservativeness": "schedule-conservativeness",
    "retraction_policy": "retraction-policy",
    "enable_priority_scheduling": "enable-priority-scheduling",
    "disable_priority_preemption": "disable-priority-preemption",
    "priority_scheduling_preemption_threshold": "priority-scheduling-preemption-threshold",
    "disable_overlap_schedule": "disable-overlap-schedule",
    "scheduler_recv_interval": "scheduler-recv-interval",
    "num_reserved_decode_tokens": "num-reserved-decode-tokens",
    "disable_radix_cache": "disable-radix-cache",
    "radix_eviction_policy": "radix-eviction-policy",
    "enable_hierarchical_cache": "enable-hierarchical-cache",
    "hicache_ratio": "hicache-ratio",
    "hicache_size": "hicache-size",
    "hicache_write_policy": "hicache-write-policy",
    "tokens_per_block": "page-size",
    "max_tokens_in_paged_kvcache": "max-total-tokens",
    "gpu_memory_utilization": "mem-fraction-static",
    "kv_cache_dtype": "kv-cache-dtype",
    "dtype": "dtype",
    "tp_size": "tp-size",
    "pp_size": "pp-size",
    "enable_two_batch_overlap": "enable-two-batch-overlap",
    "redundant_experts": "ep-num-redundant-experts",
    "stream_interval": "stream-interval",
    "seed": "random-seed",
}
# Data parallelism: ranks that share the experts, or replicas.
RANKS, SHARES_ATTENTION, EXPERTS = "dp-size", "enable-dp-attention", "ep-size"
ATTENTION_RANKS = "attn-dp-size"  # the same as both of the first
# Limits of all ranks that share experts, of which the server gives each rank an equal part.
DIVIDED = ("max_batch_size", "max_num_tokens")
# Limits of each of these ranks; ours are those of all ranks.
OF_A_RANK = ("max_tokens_in_paged_kvcache",)
# What makes the experts those of all GPUs: a backend that passes tokens between them, and options of earlier versions.
ALL_TO_ALL, EARLIER_EXPERTS = "moe-a2a-backend", ("enable-ep-moe", "enable-deepep-moe")
ALGORITHM, STEPS, BRANCHES, VERIFIED = (
    "speculative-algorithm",
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
)
# The head has the shape of a layer of the model, whatever its weights.
DRAFT_WEIGHTS = ("speculative-draft-model-path", "speculative-draft-model")


def _chunk(value: str) -> dict[str, Any]:
    """SGLang takes -1 for whole prompts."""
    return {"max_num_tokens": None if value == "-1" else setting("max_num_tokens").check(value)}


def _join(given: Given, line: Line, _has_experts: HasExperts) -> None:
    """Ranks of data parallelism share all but the attention, or are replicas."""
    values, ranks, attention_ranks = line.values, number_of(given, RANKS), number_of(given, ATTENTION_RANKS)
    gpus = values.get("tp_size", 1)
    if attention_ranks > 1 or (ranks > 1 and given.get(SHARES_ATTENTION) is True):
        values["attention_dp_size"] = ranks = max(ranks, attention_ranks)
        values |= of_all_ranks(values, OF_A_RANK, ranks)
    elif ranks > 1:
        values |= {"replicas": ranks, "router": "round_robin"}
    is_all = given.get(ALL_TO_ALL, "none") != "none" or any(given.get(name) is True for name in EARLIER_EXPERTS)
    if (parts := gpus if is_all else number_of(given, EXPERTS)) > 1:
        values["ep_size"] = parts
    _take_drafts(given, line)


def _take_drafts(given: Given, line: Line) -> None:
    """The layer for multi-token prediction or the EAGLE head, each token of which is verified: a chain."""
    algorithm, verified = str(given.get(ALGORITHM, "none")).lower(), number_of(given, VERIFIED)
    if algorithm == "none":
        return
    steps = number_of(given, STEPS, default=verified - 1 or 1)
    if algorithm not in ("eagle", "eagle3", "nextn", "mtp"):
        line.not_simulated.append(f"{ALGORITHM} ({algorithm})")
        return
    line.values["draft_mtp"] = steps
    line.notes.append(f"--{ALGORITHM}: {ACCEPTANCE}")
    if STEPS not in given and VERIFIED not in given:
        line.notes.append(f"--{STEPS}: SGLang chooses it by the model; correct draft_mtp, which is {steps}.")
    if number_of(given, BRANCHES) > 1:
        line.notes.append(f"--{BRANCHES}: a tree of draft tokens is simulated as a chain of {steps}.")


def _own_words(values: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any]]:
    """What SGLang says by other options: the prefix cache off, whole prompts, ranks, experts, drafts."""
    words, own = list[str](), dict(values)
    if values.get("enable_kv_cache_reuse") is False:
        own["disable_radix_cache"] = True
    if values.get("enable_chunked_context") is False or values.get("max_num_tokens", 0) is None:
        own["max_num_tokens"] = -1
    ranks, replicas = values.get("attention_dp_size") or 1, values.get("replicas") or 1
    if ranks > 1:
        words += [f"--{RANKS}", str(ranks), f"--{SHARES_ATTENTION}"]
        own |= {name: max(ranks, own[name]) for name in of_each_rank(values, DIVIDED, ranks) if own[name] != -1}
        own |= of_each_rank(values, OF_A_RANK, ranks)
    elif replicas > 1:
        words += [f"--{RANKS}", str(replicas)]
    if (parts := values.get("ep_size") or 1) > 1:
        words += [f"--{EXPERTS}", str(parts)]
    if (steps := values.get("draft_mtp")) is not None:
        words += [f"--{ALGORITHM}", "EAGLE", f"--{STEPS}", str(steps), f"--{BRANCHES}", "1"]
        words += [f"--{VERIFIED}", str(steps + 1)]
    return words, own


SGLANG_SERVE = Server(
    engine=SGLANG,
    version="0.5.23",
    usage="python -m sglang.launch_server --model-path MODEL",
    starts=(("python", "-m", "sglang.launch_server"), ("sglang", "serve"), ("sglang", "launch_server")),
    options=OPTIONS,
    aliases={
        "model-path": "model",
        "tp": "tp-size",
        "tensor-parallel-size": "tp-size",
        "pp": "pp-size",
        "pipeline-parallel-size": "pp-size",
        "dp": RANKS,
        "data-parallel-size": RANKS,
        "ep": EXPERTS,
        "expert-parallel-size": EXPERTS,
        "attention-data-parallel-size": ATTENTION_RANKS,
        "enable-hicache": "enable-hierarchical-cache",
    },
    converted={"chunked-prefill-size": _chunk},
    joint=frozenset(
        (RANKS, ATTENTION_RANKS, EXPERTS, ALL_TO_ALL, ALGORITHM, STEPS, BRANCHES, VERIFIED, *DRAFT_WEIGHTS)
    ),
    joint_flags=frozenset((SHARES_ATTENTION, *EARLIER_EXPERTS)),
    join=_join,
    kv_dtypes={"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16"},
    has_negations=False,
    model_option="--model-path",
    of_a_rank=DIVIDED + OF_A_RANK,
    own_words=_own_words,
)
