"""The command line of `vllm serve` (vLLM 0.32)."""

import json
from collections.abc import Mapping
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.config import VLLM
from ifbbench.settings.fields import number
from ifbbench.settings.names import setting
from ifbbench.settings.server import Server

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
    "seed": "seed",
}
# What no schedule and no time depends on here: options with a value, and options without.
_IGNORED = (
    "host port api-key served-model-name tokenizer tokenizer-mode revision tokenizer-revision download-dir load-format "
    "chat-template uvicorn-log-level allowed-origins ssl-keyfile ssl-certfile max-logprobs root-path tool-call-parser "
    "reasoning-parser chat-template-content-format distributed-executor-backend max-log-len generation-config hf-token "
    "hf-overrides otlp-traces-endpoint"
)
_IGNORED_FLAGS = (
    "trust-remote-code enable-log-requests no-enable-log-requests disable-log-requests disable-log-stats "
    "enable-auto-tool-choice enable-request-id-headers disable-uvicorn-access-log enforce-eager skip-tokenizer-init "
    "enable-logging-iteration-details disable-custom-all-reduce enable-force-include-usage"
)


def _model_len(value: str) -> dict[str, Any]:
    """vLLM takes 8k (8,000) and 8K (8,192), and auto."""
    if value == "auto":
        return {}
    units = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}
    if value and value[-1] in units:
        return {"max_seq_len": int(number(value[:-1], "--max-model-len", from_text=True) * units[value[-1]])}
    return {"max_seq_len": setting("max_seq_len").check(value)}


def _speculation(value: str) -> dict[str, Any]:
    try:
        given = json.loads(value)
    except ValueError as error:
        raise InputError(f"is not valid JSON ({error}).") from error
    if not isinstance(given, dict) or given.get("method") != "ngram":
        raise InputError("expected an object with the method ngram; other kinds of drafts are not simulated.")
    known = {"num_speculative_tokens": "draft_len", "prompt_lookup_max": "draft_ngram"}
    return {known[name]: value for name, value in given.items() if name in known}


VLLM_SERVE = Server(
    engine=VLLM,
    usage="vllm serve MODEL",
    starts=(("vllm", "serve"), ("serve",), ("python", "-m", "vllm.entrypoints.openai.api_server")),
    options=OPTIONS,
    aliases={"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "q": "quantization"},
    converted={"max-model-len": _model_len, "speculative-config": _speculation},
    no_effect=frozenset(_IGNORED.split()),
    no_effect_flags=frozenset(_IGNORED_FLAGS.split()),
    kv_dtypes={"fp8": "fp8", "fp8_e4m3": "fp8", "bfloat16": "bf16", "float16": "fp16"},
)
