"""The command line of SGLang's server (SGLang 0.5.23)."""

from collections.abc import Mapping
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.config import SGLANG
from ifbbench.settings.names import setting
from ifbbench.settings.server import Server

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
    "seed": "random-seed",
}
# What no schedule and no time depends on here: options with a value, and options without.
_IGNORED = (
    "host port api-key admin-api-key served-model-name tokenizer-path tokenizer-mode tokenizer-backend revision load- "
    "format download-dir chat-template hf-chat-template-name completion-template fastapi-root-path log-level log- "
    "level-http log-requests-level log-requests-format log-requests-target decode-log-interval reasoning-parser tool- "
    "call-parser tool-server sampling-defaults preferred-sampling-params warmups weight-version watchdog-timeout "
    "dist-timeout dist-init-addr nccl-port node-rank base-gpu-id device attention-backend prefill-attention-backend "
    "decode-attention-backend sampling-backend grammar-backend moe-runner-backend model-impl file-storage-path "
    "hicache-io-backend hicache-mem-layout ssl-keyfile ssl-certfile ssl-ca-certs ssl-keyfile-password crash-dump- "
    "folder otlp-traces-endpoint"
)
_IGNORED_FLAGS = (
    "trust-remote-code skip-tokenizer-init skip-server-warmup log-requests show-time-cost enable-metrics "
    "enable-metrics-for-all-schedulers enable-cache-report enable-mfu-metrics enable-trace enable-p2p-check "
    "disable-custom-all-reduce disable-cuda-graph disable-cuda-graph-padding enable-nccl-nvls enable-mscclpp "
    "enable-symm-mem enable-torch-compile sleep-on-idle enable-request-time-stats-logging incremental-streaming-output"
)


def _chunk(value: str) -> dict[str, Any]:
    """SGLang takes -1 for whole prompts."""
    return {"max_num_tokens": None if value == "-1" else setting("max_num_tokens").check(value)}


def _own_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang turns the prefix cache off by an option of its own, and chunks by their size."""
    own = dict(values)
    if values.get("enable_kv_cache_reuse") is False:
        own["disable_radix_cache"] = True
    if values.get("enable_chunked_context") is False or values.get("max_num_tokens", 0) is None:
        own["max_num_tokens"] = -1
    return own


def _only_one(value: str) -> dict[str, Any]:
    if value != "1":
        raise InputError(f"is {value}; expected 1: more is not simulated.")
    return {}


SGLANG_SERVE = Server(
    engine=SGLANG,
    usage="python -m sglang.launch_server --model-path MODEL",
    starts=(("python", "-m", "sglang.launch_server"), ("sglang", "serve"), ("sglang", "launch_server")),
    options=OPTIONS,
    aliases={
        "model-path": "model",
        "tp": "tp-size",
        "tensor-parallel-size": "tp-size",
        "pp": "pp-size",
        "pipeline-parallel-size": "pp-size",
        "dp": "dp-size",
        "data-parallel-size": "dp-size",
        "ep": "ep-size",
        "expert-parallel-size": "ep-size",
    },
    converted={"chunked-prefill-size": _chunk} | dict.fromkeys(("dp-size", "ep-size", "nnodes"), _only_one),
    no_effect=frozenset(_IGNORED.split()),
    no_effect_flags=frozenset(_IGNORED_FLAGS.split()),
    kv_dtypes={"fp8_e4m3": "fp8", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16"},
    has_negations=False,
    model_option="--model-path",
    own_values=_own_values,
)
