"""What `--engine` decides beside the scheduler: the defaults of that engine, and the settings that it does not have."""

from collections.abc import Mapping
from typing import Any

from ifbbench.build.missing_settings import refuse_missing
from ifbbench.build.sglang import sglang_defaults
from ifbbench.errors import InputError
from ifbbench.kv.attention_window import UNLIMITED
from ifbbench.kv.sizing import CacheLayout
from ifbbench.schedulers.vllm.rules import VllmRules
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import ENGINES, SGLANG, VLLM
from ifbbench.settings.groups.kv_cache import DEFAULT_KV_FRACTION
from ifbbench.settings.groups.vllm import QUEUE_ORDERS
from ifbbench.settings.modes import Overlap
from ifbbench.settings.names import setting, usual_settings
from ifbbench.simulated.engines import load_overhead
from ifbbench.simulated.hardware import load_hardware

GIB = 1 << 30
# Settings, beside engine and device, on which the defaults of others depend.
DECIDING = ("tp_size", "attention_dp_size", "max_num_tokens", "kv_cache_free_gpu_mem_fraction")
# Why a setting has no meaning under vLLM's scheduler, and what has: of those that differ from their defaults.
_SCHEDULED = "vLLM has one rule: running requests first, then the queue, each with what is left of the token budget"
NOT_IN_VLLM: Mapping[str, str] = {
    "policy": "vLLM pre-empts the last running request when blocks are short; --scheduling_policy orders the queue",
    "type": "vLLM has no static batches and no pass for each phase",
    "enable_trt_overlap": "vLLM's own form is --async_scheduling",
    "context_chunking_policy": _SCHEDULED,
    "context_chunk_unit": _SCHEDULED,
    "enable_batch_size_tuning": _SCHEDULED,
    "enable_max_num_tokens_tuning": _SCHEDULED,
    "attention_dp_enable_balance": "vLLM has no such rule",
    "max_beam_width": "beams are no part of vLLM's scheduler",
    "beam_width": "beams are no part of vLLM's scheduler",
    "enable_partial_reuse": "vLLM reuses whole blocks only",
    "copy_on_partial_reuse": "vLLM reuses whole blocks only",
    "kv_cache_type": "vLLM's KV cache is paged",
    "window_mode": "vLLM releases blocks that a window has left",
    "sink_token_len": "vLLM has no sink tokens",
    "kv_host_cache_bytes": "KV offloading is not built for this engine",
    "kv_retention_priority": "vLLM evicts the least recently used blocks and has no retention priorities of requests",
    "kv_retention_s": "vLLM evicts the least recently used blocks and has no retention priorities of requests",
    "pp_size": "pipeline stages are not built for this engine",
    "num_loras": "LoRA adapters are not built for this engine",
    "lora_dir": "LoRA adapters are not built for this engine",
    "lora_device_mem_fraction": "LoRA adapters are not built for this engine",
    "draft_model": "draft models are not built for this engine; --draft_ngram is",
}


def engine_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are the defaults of the engine that `values` name with --engine, or come closest to those of
    --engine_overhead; none of TensorRT-LLM. values: those given, by setting name, texts included; or all of a run."""
    engine = setting("engine").check(values.get("engine") or ENGINES[0])
    overhead = setting("engine_overhead").check(values.get("engine_overhead"))
    device = str(setting("device").check(values.get("device") or "auto"))
    found: dict[str, Any] = {}
    if engine in (VLLM, SGLANG) and overhead in (None, engine) and RunConfig(device=device).hardware is not None:
        found["engine_overhead"] = overhead = engine
    if overhead is not None:
        found |= load_overhead(overhead).settings
    if engine not in (VLLM, SGLANG):
        return found
    for name in ("policy", "overlap", "kv_cache_free_gpu_mem_fraction"):
        found.pop(name, None)
    memory_bytes, is_a100 = _memory_of(device)
    if engine == VLLM:
        found |= _vllm_defaults(memory_bytes, is_a100, values)
    else:
        found |= sglang_defaults(memory_bytes, values)
    if float(values.get("kv_cache_free_gpu_mem_fraction", DEFAULT_KV_FRACTION)) != DEFAULT_KV_FRACTION:
        found.pop("gpu_memory_utilization", None)
    return found


def usual_beside(config: RunConfig) -> dict[str, Any]:
    """The value that each setting of `config` has if a command line names only those that decide defaults of others
    (DECIDING), where they are not the usual ones themselves."""
    given: dict[str, Any] = {"engine": config.engine, "device": config.device}
    if config.engine_overhead is not None:  # None is none, not what the engine decides
        given["engine_overhead"] = config.engine_overhead
    usual = usual_settings(engine_defaults(given))
    given |= {name: value for name in DECIDING if (value := getattr(config, name)) != usual[name]}
    return usual_settings(engine_defaults(given))


def _vllm_defaults(memory_bytes: int | None, is_a100: bool, values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of `vllm serve` (`EngineArgs.get_batch_defaults` and the fields of `SchedulerConfig` and `CacheConfig`,
    vLLM 0.32)."""
    if memory_bytes is None:  # a CPU
        tokens, requests = 2048, 128
    elif memory_bytes >= 160 * GIB:
        tokens, requests = 16_384, 1024
    elif memory_bytes >= 70 * GIB and not is_a100:
        tokens, requests = 8192, 1024
    else:
        tokens, requests = 2048, 256
    # Each rank of data parallelism has a scheduler with these limits; ours are those of all ranks.
    ranks = setting("attention_dp_size").check(values.get("attention_dp_size", 1))
    tokens, requests = tokens * ranks, requests * ranks
    given_tokens = setting("max_num_tokens").check(values.get("max_num_tokens", tokens))
    return {
        "max_num_tokens": tokens,
        "max_batch_size": min(requests, given_tokens or requests),
        "enable_chunked_context": True,
        "enable_kv_cache_reuse": True,
        "tokens_per_block": 16,
        "gpu_memory_utilization": 0.92,
    }


def _memory_of(device: str) -> tuple[int | None, bool]:
    """Bytes of the device's memory, None of a CPU, and whether it is an A100."""
    if device == "null":
        return 80 * GIB, False
    if (profile := RunConfig(device=device).hardware) is not None:
        hardware = load_hardware(profile)
        return (None if hardware.is_cpu else hardware.memory_bytes), "A100" in hardware.title
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None, False
    properties = torch.cuda.get_device_properties(0)
    return properties.total_memory, "A100" in properties.name


def check_vllm(config: RunConfig) -> None:
    """InputError for settings that vLLM does not have. config: with that engine."""
    refuse_missing(config, NOT_IN_VLLM)
    if config.overlap == Overlap.PARTITIONED:
        raise InputError("--overlap: --engine vllm has no micro batches; leave it out (see --async_scheduling).")
    tokens, requests = config.max_num_tokens, config.max_batch_size
    if tokens is None:
        raise InputError("--max_num_tokens: none is no limit of vLLM; give max_num_batched_tokens a number.")
    if (interval := config.prefix_cache_retention_interval) and interval % config.tokens_per_block:
        raise InputError(
            f"--prefix_cache_retention_interval: {interval} tokens are no whole number of blocks; expected a multiple "
            f"of the {config.tokens_per_block} of --tokens_per_block."
        )
    if requests is not None and requests > tokens:
        raise InputError(
            f"--max_batch_size: {requests} requests (max_num_seqs) are more than the {tokens} tokens of an iteration "
            "(max_num_batched_tokens), which vLLM refuses; lower it, or raise --max_num_tokens."
        )


def as_vllm_needs(config: RunConfig, on_cpu: bool) -> RunConfig:
    """The settings of vLLM that have another name here too. config: checked by `check_vllm`."""
    is_known = config.has_drafts and config.draft_mtp is None
    is_async = not (on_cpu or is_known) if config.async_scheduling is None else config.async_scheduling
    if is_async and is_known:
        raise InputError(
            "--async_scheduling: n-gram drafts continue tokens that are not known yet; leave out one of the two."
        )
    values: dict[str, Any] = {
        "async_scheduling": is_async,
        "overlap": Overlap.ASYNC.value if is_async else None,
        "context_chunk_unit": 1,
    }
    if config.num_gpu_blocks_override is not None:
        values["max_tokens_in_paged_kvcache"] = (config.num_gpu_blocks_override - 1) * config.tokens_per_block
    return config.with_values(**values)


def check_requests_of_vllm(config: RunConfig, max_seq_len: int) -> None:
    """InputError for a trace with beams, and where vLLM does not cut prompts and an iteration has fewer tokens than the
    longest prompt."""
    if (config.max_beam_width or 1) > 1:
        raise InputError(
            f"--engine vllm: the trace has requests with {config.max_beam_width} beams, which are no part of vLLM's "
            "scheduler; add --beam_width 1, or choose another engine."
        )
    limits = {
        "--max_num_tokens": config.max_num_tokens or 0,
        "--max_num_scheduled_tokens": config.max_num_scheduled_tokens,
    }
    for name, limit in limits.items():
        if config.enable_chunked_context is False and limit is not None and limit < max_seq_len:
            raise InputError(
                f"--enable_chunked_context: without it vLLM needs the {max_seq_len} tokens of --max_seq_len "
                f"(max_model_len) in one iteration, and {name} is {limit}; raise that, or lower --max_seq_len."
            )


def vllm_rules(config: RunConfig, layout: CacheLayout) -> VllmRules:
    """The rules of a resolved `config` with this KV cache."""
    sizes = [window.attention_window.size for window in layout.windows]
    version = int(config.vllm_version.partition(".")[2])  # of 0.N
    return VllmRules(
        is_priority=config.scheduling_policy == QUEUE_ORDERS[1],
        max_scheduled_tokens=config.max_num_scheduled_tokens,
        max_active=config.max_num_active_seqs,
        long_prefill_threshold=config.long_prefill_token_threshold,
        is_threshold_adaptive=config.long_prefill_token_threshold_adaptive,
        spares_single=version >= 31,
        reserves_full_prompt=config.scheduler_reserve_full_isl,
        watermark_blocks=int(config.watermark * (layout.windows[0].num_blocks + 1)),
        cuts_prompts=bool(config.enable_chunked_context),
        takes_new_first=version >= 23,
        windows=tuple(None if size == UNLIMITED else size for size in sizes),
        retention_interval=config.prefix_cache_retention_interval,
    )
