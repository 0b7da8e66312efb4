"""The command line of `vllm serve` (vLLM 0.32)."""

import json
from collections.abc import Mapping
from typing import Any

from ifbbench.settings.engines import VLLM
from ifbbench.settings.fields import integer, number
from ifbbench.settings.names import setting
from ifbbench.settings.server import (
    ACCEPTANCE,
    MODEL,
    Given,
    HasExperts,
    Line,
    Server,
    json_table,
    number_of,
    of_all_ranks,
    of_each_rank,
)

# The settings that `vllm serve` has, each with vLLM's name.
OPTIONS: Mapping[str, str] = {
    "max_seq_len": "max-model-len",
    "max_batch_size": "max-num-seqs",
    "max_num_tokens": "max-num-batched-tokens",
    "max_num_scheduled_tokens": "max-num-scheduled-tokens",
    "max_num_active_seqs": "max-num-active-seqs",
    "max_queue_size": "max-num-queued-reqs",
    "scheduling_policy": "scheduling-policy",
    "enable_chunked_context": "enable-chunked-prefill",
    "long_prefill_token_threshold": "long-prefill-token-threshold",
    "long_prefill_token_threshold_adaptive": "long-prefill-token-threshold-adaptive",
    "scheduler_reserve_full_isl": "scheduler-reserve-full-isl",
    "watermark": "watermark",
    "async_scheduling": "async-scheduling",
    "enable_kv_cache_reuse": "enable-prefix-caching",
    "tokens_per_block": "block-size",
    "gpu_memory_utilization": "gpu-memory-utilization",
    "num_gpu_blocks_override": "num-gpu-blocks-override",
    "prefix_cache_retention_interval": "prefix-cache-retention-interval",
    "kv_cache_dtype": "kv-cache-dtype",
    "dtype": "dtype",
    "tp_size": "tensor-parallel-size",
    "pp_size": "pipeline-parallel-size",
    "enable_two_batch_overlap": "enable-dbo",
    "stream_interval": "stream-interval",
    "seed": "seed",
}
# Limits of each rank of --data-parallel-size; ours are those of all ranks.
OF_A_RANK = (
    "max_batch_size",
    "max_num_tokens",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "max_queue_size",
    "num_gpu_blocks_override",
)
RANKS, EXPERTS, DRAFTS = "data-parallel-size", "enable-expert-parallel", "speculative-config"
# Shorter options for the keys of --speculative-config.
DRAFT_KEYS = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
REDUNDANT = "num_redundant_experts"


def _model_len(value: str) -> dict[str, Any]:
    """vLLM takes 8k (8,000) and 8K (8,192), and auto."""
    if value in ("auto", "-1"):
        return {}
    units = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}
    if value and value[-1] in units:
        return {"max_seq_len": int(number(value[:-1], "--max-model-len", from_text=True) * units[value[-1]])}
    return {"max_seq_len": setting("max_seq_len").check(value)}


def _redundant(value: str) -> dict[str, Any]:
    given = json_table(value, "eplb-config")
    return {"redundant_experts": setting("redundant_experts").check(given[REDUNDANT])} if REDUNDANT in given else {}


def _join(given: Given, line: Line, has_experts: HasExperts) -> None:
    """Ranks of data parallelism share the experts of a model; without experts they are replicas."""
    values, ranks, is_shared = line.values, number_of(given, RANKS), given.get(EXPERTS) is True
    if ranks > 1 and (is_shared or has_experts(str(values[MODEL]))):
        values |= {"tp_size": values.get("tp_size", 1) * ranks, "attention_dp_size": ranks}
        values |= of_all_ranks(values, OF_A_RANK, ranks)
        line.notes.append(
            f"--{RANKS}: tp_size and the limits of requests, tokens and blocks are those of all {ranks} ranks."
        )
    elif ranks > 1:
        values |= {"replicas": ranks, "router": "least_requests"}
    if is_shared:
        values["ep_size"] = values.get("tp_size", 1)
    _take_drafts(given, line)


def _take_drafts(given: Given, line: Line) -> None:
    """The layer for multi-token prediction or the EAGLE head, or look-up in the prompt."""
    asked = json_table(given[DRAFTS], DRAFTS) if DRAFTS in given else {}
    asked |= {key: given[option] for option, key in DRAFT_KEYS.items() if option in given}
    if not asked:
        return
    names = "eagle" if "eagle" in str(asked.get("model", "")).lower() else "draft_model"
    method = str(asked.get("method", names)).lower()
    count = integer(asked.get("num_speculative_tokens", 1), f"--{DRAFTS}: num_speculative_tokens", 1, from_text=True)
    if method == "ngram":
        line.values["draft_len"] = count
        if (longest := asked.get("prompt_lookup_max")) is not None:
            line.values["draft_ngram"] = setting("draft_ngram").check(longest)
    elif method.endswith("mtp") or method.startswith("eagle"):
        line.values["draft_mtp"] = count
        line.notes.append(f"--{DRAFTS}: {ACCEPTANCE}")
    else:
        line.not_simulated.append(f"{DRAFTS} ({method})")


def _own_words(values: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any]]:
    """Ranks, experts and drafts as vLLM says them."""
    words, own = list[str](), dict(values)
    ranks, replicas = values.get("attention_dp_size") or 1, values.get("replicas") or 1
    if ranks > 1:
        own["tp_size"] = values.get("tp_size", ranks) // ranks
        own |= of_each_rank(own, OF_A_RANK, ranks)
    if ranks * replicas > 1:
        words += [f"--{RANKS}", str(ranks * replicas)]
    if (values.get("ep_size") or 1) > 1:
        words.append(f"--{EXPERTS}")
    drafts: dict[str, Any] = {}
    if values.get("draft_mtp") is not None:
        drafts = {"method": "mtp", "num_speculative_tokens": values["draft_mtp"]}
    elif values.get("draft_ngram") is not None:
        drafts = {"method": "ngram", "prompt_lookup_max": values["draft_ngram"]}
        drafts |= {"num_speculative_tokens": values["draft_len"]} if values.get("draft_len") is not None else {}
    if drafts:
        words += [f"--{DRAFTS}", json.dumps(drafts)]
    if values.get("redundant_experts"):
        words += ["--enable-eplb", "--eplb-config", json.dumps({REDUNDANT: values["redundant_experts"]})]
    return words, own


VLLM_SERVE = Server(
    engine=VLLM,
    version="0.32",
    usage="vllm serve MODEL",
    starts=(("vllm", "serve"), ("serve",), ("python", "-m", "vllm.entrypoints.openai.api_server")),
    images=("vllm/vllm-openai",),
    options=OPTIONS,
    aliases={
        "tp": "tensor-parallel-size",
        "pp": "pipeline-parallel-size",
        "dp": RANKS,
        "ep": EXPERTS,
        "q": "quantization",
        "sc": DRAFTS,
        "cc": "compilation-config",
        "device-memory-utilization": "gpu-memory-utilization",
    },
    converted={"max-model-len": _model_len, "eplb-config": _redundant},
    joint=frozenset((RANKS, DRAFTS, *DRAFT_KEYS)),
    joint_flags=frozenset((EXPERTS, "enable-eplb")),
    join=_join,
    kv_dtypes={
        "fp8": "fp8",
        "fp8_e4m3": "fp8",
        "fp8_e5m2": "fp8",
        "fp8_inc": "fp8",
        "fp8_ds_mla": "fp8",
        "bfloat16": "bf16",
        "float16": "fp16",
    },
    of_a_rank=OF_A_RANK,
    own_words=_own_words,
)
