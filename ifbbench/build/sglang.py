"""SGLang's defaults, the settings that it does not have, and its rules (`ServerArgs` of SGLang 0.5.23)."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ifbbench.build.missing_settings import refuse_missing
from ifbbench.errors import InputError
from ifbbench.schedulers.sglang.rules import SglangRules
from ifbbench.settings.config import HOST_SETTINGS, RunConfig
from ifbbench.settings.groups.kv_cache import BY_TIMEOUT
from ifbbench.settings.groups.sglang import RETRACTION_POLICIES
from ifbbench.settings.modes import Overlap
from ifbbench.settings.names import setting

GIB, MIB = 1 << 30, 1 << 20
HICACHE_UNIT_BYTES = 10**9
DEFAULT_MAX_RUNNING, DEFAULT_MAX_PREFILL = 2048, 16_384
# With draft tokens, unless --max-running-requests says otherwise.
MAX_RUNNING_WITH_DRAFTS = 48


class _OfMemory(NamedTuple):
    """Defaults of a GPU with less than `below` GiB.

    chunk: chunked prefill size.
    graph_batch, graph_batch_of_4: requests of the largest decode CUDA graph, the latter with TP 4 or more.
    """

    below: float
    chunk: int
    graph_batch: int
    graph_batch_of_4: int


BY_MEMORY = (
    _OfMemory(20, 2048, 8, 8),
    _OfMemory(35, 4096, 48, 160),
    _OfMemory(60, 4096, 32, 160),
    _OfMemory(160, 8192, 256, 512),
    _OfMemory(math.inf, 16_384, 512, 512),
)
CHUNK_WITHOUT_GPU = 4096
# What SGLang multiplies --schedule-conservativeness with, with attention data parallelism.
OF_ATTENTION_DP = 0.3
_SCHEDULED = "SGLang runs a prefill batch where it can make one, else a decode batch of all running requests"
_RETAINED = (
    "SGLang keeps no blocks for a time; --radix_eviction_policy priority evicts those of requests with a lower "
    "priority first"
)
NOT_IN_SGLANG: Mapping[str, str] = {
    "policy": "SGLang retracts requests when the cache is full; --schedule_policy orders the queue",
    "type": "SGLang has no static batches and no pass for each phase",
    "enable_trt_overlap": "SGLang overlaps in a form of its own; see --disable_overlap_schedule",
    "context_chunking_policy": _SCHEDULED,
    "context_chunk_unit": _SCHEDULED,
    "enable_batch_size_tuning": _SCHEDULED,
    "enable_max_num_tokens_tuning": _SCHEDULED,
    "attention_dp_enable_balance": "SGLang has no such rule",
    "max_beam_width": "beams are not built for this engine",
    "beam_width": "beams are not built for this engine",
    "enable_partial_reuse": "SGLang reuses whole pages; see --page_size",
    "copy_on_partial_reuse": "SGLang reuses whole pages; see --page_size",
    "kv_cache_type": "SGLang's KV cache is paged",
    "window_mode": "windows are not built for this engine",
    "sink_token_len": "SGLang has no sink tokens",
    "max_attention_window": "windows are not built for this engine",
    "kv_host_cache_bytes": "SGLang's host memory is --enable_hierarchical_cache, of --hicache_size or --hicache_ratio",
    "kv_retention_priority": _RETAINED,
    "kv_retention_s": _RETAINED,
    "pp_size": "pipeline stages are not built for this engine",
    "num_loras": "LoRA adapters are not built for this engine",
    "lora_dir": "LoRA adapters are not built for this engine",
    "lora_device_mem_fraction": "LoRA adapters are not built for this engine",
    "draft_model": "draft models are not built for this engine; --draft_mtp is",
    "draft_ngram": "draft tokens by look-up are not built for this engine; --draft_mtp is",
}


def sglang_defaults(memory_bytes: int | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of `sglang.launch_server` on a GPU with so much memory (`arg_groups/memory_hook.py`).

    memory_bytes: None of a CPU.
    values: the settings that are given.
    """
    defaults: dict[str, Any] = {
        "max_num_tokens": CHUNK_WITHOUT_GPU,
        "max_batch_size": MAX_RUNNING_WITH_DRAFTS if values.get("draft_mtp") else DEFAULT_MAX_RUNNING,
        "enable_chunked_context": True,
        "enable_kv_cache_reuse": True,
        "tokens_per_block": 1,
    }
    if memory_bytes is None:
        return defaults
    facts = next(one for one in BY_MEMORY if memory_bytes < one.below * GIB)
    # All but what activations and CUDA graphs are expected to take is for weights and KV cache.
    tp_size = setting("tp_size").check(values.get("tp_size", 1))
    chunk = setting("max_num_tokens").check(values.get("max_num_tokens", facts.chunk))
    graph_batch = facts.graph_batch if tp_size < 4 else facts.graph_batch_of_4
    reserved_mib = 512 + 1.5 * max(chunk or DEFAULT_MAX_PREFILL, 2048) + tp_size / 8 * 1024 + 2 * graph_batch
    if memory_bytes > 60 * GIB:
        reserved_mib = max(reserved_mib, 10 * 1024)
    return defaults | {
        "max_num_tokens": facts.chunk,
        "gpu_memory_utilization": round(1 - reserved_mib * MIB / memory_bytes, 3),
    }


def check_sglang(config: RunConfig) -> None:
    """InputError for settings that SGLang does not have, or refuses. config: with that engine."""
    refuse_missing(config, NOT_IN_SGLANG)
    if config.overlap == Overlap.PARTITIONED:
        raise InputError("--overlap: --engine sglang has no micro batches; leave it out.")
    chunk, page = config.max_num_tokens, config.tokens_per_block
    if config.enable_chunked_context and chunk is not None and chunk % page:
        raise InputError(
            f"--max_num_tokens: a chunk of {chunk} tokens (chunked_prefill_size) is no multiple of the {page} tokens "
            "of a page (page_size), which SGLang refuses; give such a multiple, or another --tokens_per_block."
        )
    keeps_prefixes = config.enable_kv_cache_reuse and not config.disable_radix_cache
    if config.schedule_policy == "shortest-prefill-first" and not keeps_prefixes:
        raise InputError("--schedule_policy shortest-prefill-first: needs the radix cache; leave one of them out.")
    if config.enable_priority_scheduling and config.schedule_policy not in ("fcfs", "lof"):
        raise InputError(
            f"--schedule_policy {config.schedule_policy}: SGLang orders by priority with fcfs or lof only; choose one, "
            "or leave out --enable_priority_scheduling."
        )
    if config.enable_hierarchical_cache and not keeps_prefixes:
        raise InputError("--enable_hierarchical_cache: needs the radix cache; leave one of them out.")
    for name in HOST_SETTINGS:
        if getattr(config, name) != setting(name).default and not config.enable_hierarchical_cache:
            raise InputError(f"--{name}: needs --enable_hierarchical_cache; add it, or leave this out.")
    for name in ("retraction_policy", "disable_priority_preemption", "priority_scheduling_preemption_threshold"):
        if getattr(config, name) != setting(name).default and not config.enable_priority_scheduling:
            raise InputError(f"--{name}: needs --enable_priority_scheduling; add it, or leave this out.")


def as_sglang_needs(config: RunConfig, on_cpu: bool) -> RunConfig:
    """The settings of SGLang that have another name here too. config: checked by `check_sglang`."""
    overlaps = not (config.disable_overlap_schedule or on_cpu)
    return config.with_values(
        overlap=Overlap.ASYNC.value if overlaps else None,
        disable_overlap_schedule=not overlaps,
        enable_kv_cache_reuse=config.enable_kv_cache_reuse and not config.disable_radix_cache,
        enable_chunked_context=bool(config.enable_chunked_context) and config.max_num_tokens is not None,
        context_chunk_unit=1,
    )


def host_pages(config: RunConfig, num_pages: int, bytes_per_token: float) -> int:
    """Pages of the hierarchical cache in host memory, beside `num_pages` on the device."""
    if not config.enable_hierarchical_cache:
        return 0
    tokens = num_pages * config.tokens_per_block * config.hicache_ratio
    if config.hicache_size:
        tokens = config.hicache_size * HICACHE_UNIT_BYTES // bytes_per_token
    return int(tokens) // config.tokens_per_block


def sglang_rules(config: RunConfig) -> SglangRules:
    """The rules of a resolved `config`."""
    return SglangRules(
        schedule_policy=config.schedule_policy,
        conservativeness=config.schedule_conservativeness * (OF_ATTENTION_DP if config.attention_dp_size > 1 else 1),
        chunk_size=config.max_num_tokens if config.enable_chunked_context else None,
        max_prefill_tokens=config.max_prefill_tokens,
        prefill_max_requests=config.prefill_max_requests,
        mixes_chunks=config.enable_mixed_chunk and bool(config.enable_chunked_context) and not config.has_drafts,
        eviction_policy=config.radix_eviction_policy,
        write_policy=config.hicache_write_policy,
        prefetch_policy=config.kv_tier_prefetch or BY_TIMEOUT,
        prefetch_threshold=config.kv_tier_prefetch_threshold,
        retracts_by_priority=config.retraction_policy == RETRACTION_POLICIES[1],
        is_priority=config.enable_priority_scheduling,
        preempts=config.enable_priority_scheduling and not config.disable_priority_preemption,
        preemption_threshold=config.priority_scheduling_preemption_threshold,
        receive_interval=config.scheduler_recv_interval,
        reserved_tokens=config.num_reserved_decode_tokens,
        ignores_eos=config.ignore_eos and not config.stop_at_end_token,
        reserves_by_ratio=config.reserve_by_ratio,
        seed=config.seed,
    )
