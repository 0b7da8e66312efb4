"""From the settings of a user to those of the engine: limits resolved and checked, and the layout of the KV cache."""

import logging
import re
from collections import Counter
from typing import TYPE_CHECKING

from ifbbench.build.adapters import resolve_lora
from ifbbench.build.drafts import as_drafts_need, draft_settings, load_draft_config
from ifbbench.build.engines import as_vllm_needs, check_requests_of_vllm, check_vllm, vllm_rules
from ifbbench.build.sglang import as_sglang_needs, check_sglang, host_pages, sglang_rules
from ifbbench.build.vllm_layout import bytes_per_block, layer_groups, vllm_layout
from ifbbench.engine.drafts import NO_DRAFTS
from ifbbench.errors import InputError
from ifbbench.kv.adapters import LoraConfig
from ifbbench.kv.attention_window import UNLIMITED as ALL_TOKENS
from ifbbench.kv.attention_window import AttentionWindow, ceil_div
from ifbbench.kv.sequence import ReuseRules
from ifbbench.kv.sizing import CacheLayout, WindowLayout, blocks_of_memory
from ifbbench.models.config import ModelConfig
from ifbbench.models.quantization import quantization_of
from ifbbench.schedulers.engines import find_scheduler
from ifbbench.schedulers.limits import UNLIMITED, V1_POLICY, BatchingConfig, share_of
from ifbbench.schedulers.tensorrt_llm.policies import find_policy
from ifbbench.settings.config import RunConfig
from ifbbench.settings.dtypes import DTYPE_BYTES, SIMULATED_DTYPES
from ifbbench.settings.engines import ENGINE_NAMES, LOGGED_ENGINES, SGLANG, VLLM
from ifbbench.settings.fields import memory_size
from ifbbench.settings.groups.kv_cache import DEFAULT_KV_FRACTION
from ifbbench.settings.modes import BatchingType, Overlap
from ifbbench.settings.names import setting
from ifbbench.torch.host import available_host_bytes

if TYPE_CHECKING:
    from ifbbench.torch.model.part import ModelPart

CPU_MAX_BATCH_SIZE = 16
GPU_MAX_BATCH_SIZE = 2048
MAX_BLOCKS = 1 << 24  # each takes some 100 bytes in the engine
LARGE_BYTES = 1 << 28  # less memory is there always
WARM_UP_REQUESTS = 2  # the default of gptManagerBenchmark, too

_log = logging.getLogger("ifbbench")


def resolve_limits(config: RunConfig, model_max_seq_len: int, on_cpu: bool, trace_beam_width: int = 1) -> RunConfig:
    """Fill in the limits that depend on model, device and trace, except for the size of the KV cache, and force the
    settings that the batching type needs, with a warning for each.

    trace_beam_width: the largest of the trace's requests.
    Raises InputError for settings that contradict each other or the model, and for an unknown policy."""
    if config.engine == VLLM:
        check_vllm(config)
        config = as_vllm_needs(config, on_cpu)
    elif config.engine == SGLANG:
        check_sglang(config)
        config = as_sglang_needs(config, on_cpu)
    config = _as_checkpoint_says(_as_batching_type_needs(config))
    overlap = config.overlap or (Overlap.PARTITIONED.value if config.enable_trt_overlap else None)
    config = config.with_values(overlap=overlap, enable_trt_overlap=overlap is not None)
    if config.has_drafts:
        config = as_drafts_need(config)
    if config.uses_lora or config.lora_rank is not None:
        config = resolve_lora(config)
    find_policy(config.policy)
    find_scheduler(config.engine)
    asked_beam_width = config.beam_width or trace_beam_width
    config = config.with_values(
        max_beam_width=config.max_beam_width or asked_beam_width,
        context_chunk_unit=config.context_chunk_unit or config.tokens_per_block,
    )
    if config.enable_chunked_context is None:  # the default of the command line
        budget = (config.max_num_tokens or UNLIMITED) // config.attention_dp_size
        has_budget = budget >= _resolved(config.context_chunk_unit)
        possible = config.kv_cache_type == "paged" and has_budget and not config.attention_dp_enable_balance
        config = config.with_values(enable_chunked_context=possible)
    _check_settings(config)
    _check_beams(config)
    max_seq_len = config.max_seq_len or model_max_seq_len
    if max_seq_len > model_max_seq_len:
        raise InputError(
            f"--max_seq_len: {max_seq_len} is more than the {model_max_seq_len} positions of model "
            f"{config.model}; give a smaller one."
        )
    longest = max_seq_len - 1
    if config.engine == VLLM:
        check_requests_of_vllm(config, max_seq_len)
    elif config.engine != SGLANG and not (
        config.enable_chunked_context or config.max_num_tokens is None or config.type == BatchingType.V1
    ):
        # A prompt runs in one piece, and so does that of a resumed request, generated tokens included.
        longest = min(longest, _resolved(share_of(config.max_num_tokens, config.attention_dp_size)))
    dtype = config.dtype or ("bf16" if config.hardware and not on_cpu else config.weight_dtype)
    return config.with_values(
        dtype=dtype,
        # Activations have 16 bits beside weights of 4 bits and of blocks, and so have keys and values.
        kv_cache_dtype=config.kv_cache_dtype or ("bf16" if dtype in SIMULATED_DTYPES else dtype),
        max_batch_size=config.max_batch_size or (CPU_MAX_BATCH_SIZE if on_cpu else GPU_MAX_BATCH_SIZE),
        max_seq_len=max_seq_len,
        max_input_len=min(config.max_input_len or longest, longest),
        warm_up=(0 if config.makes_no_tokens else WARM_UP_REQUESTS) if config.warm_up is None else config.warm_up,
    )


def _as_checkpoint_says(config: RunConfig) -> RunConfig:
    """The data types of a quantized model, where none are given. InputError for one that cannot be simulated."""
    found = None if config.dtype or config.device == "null" else quantization_of(config.model)
    if found is None:
        return config
    if found.dtype is None:
        raise InputError(
            f"--model {config.model}: its {found}, are not simulated; choose another model, or give "
            "--dtype to run it in another data type."
        )
    return config.with_values(dtype=found.dtype, kv_cache_dtype=config.kv_cache_dtype or found.kv_cache_dtype)


def _as_batching_type_needs(config: RunConfig) -> RunConfig:
    """Static batches (V1) have one policy, and no streaming, chunking, overlap, reuse or tuning of limits."""
    if config.type != BatchingType.V1:
        return config
    if config.policy != V1_POLICY:
        _log.warning("--type v1 runs under policy %s, not %s.", V1_POLICY, config.policy)
    off = dict.fromkeys(
        (
            "enable_chunked_context",
            "streaming",
            "enable_trt_overlap",
            "enable_kv_cache_reuse",
            "enable_batch_size_tuning",
            "enable_max_num_tokens_tuning",
        ),
        False,
    )
    for name in ("overlap", *off):
        if getattr(config, name):
            _log.warning("--type v1 turns --%s off.", name)
    return config.with_values(policy=V1_POLICY, overlap=None, **off)


def _check_settings(config: RunConfig) -> None:
    """Raise InputError for settings that contradict each other, or that the device does not support."""
    _check_limits(config)
    _check_device(config)
    _check_recording(config)
    _check_cache(config)


def _check_limits(config: RunConfig) -> None:
    """InputError for limits of requests, memory and context chunks that exclude each other."""
    if config.concurrency is not None and config.static_emulated_batch_size is not None:
        raise InputError(
            "--concurrency: --static_emulated_batch_size sets the number of outstanding requests too; "
            "leave out one of them."
        )
    if config.gpu_memory_utilization is not None and config.kv_cache_free_gpu_mem_fraction != DEFAULT_KV_FRACTION:
        raise InputError(
            "--gpu_memory_utilization: is a share of all memory, and --kv_cache_free_gpu_mem_fraction one of what is "
            "free; leave out one of them."
        )
    unit = _resolved(config.context_chunk_unit)
    if config.engine not in (VLLM, SGLANG) and config.enable_chunked_context and unit % config.tokens_per_block:
        raise InputError(
            f"--context_chunk_unit: {unit} tokens are no whole number of KV cache blocks; expected a "
            f"multiple of --tokens_per_block {config.tokens_per_block}. With --tokens_per_block 1 any "
            "unit is one."
        )
    if config.enable_chunked_context and (config.max_num_tokens or UNLIMITED) < unit:
        raise InputError(
            f"--max_num_tokens: {config.max_num_tokens} is less than one context chunk of "
            f"{config.context_chunk_unit} tokens; raise it, or lower --context_chunk_unit (default: "
            "--tokens_per_block)."
        )
    _check_parts(config)


def _check_device(config: RunConfig) -> None:
    """InputError for what the device does not compute, or times that it does not have."""
    if config.hardware is None:
        for name in ("tp_size", "pp_size"):
            if getattr(config, name) > 1 and config.makes_no_tokens:
                raise InputError(
                    f"--{name}: nothing is computed on --device {config.device}; leave it out, or choose "
                    "cpu, cuda or sim:PROFILE."
                )
        if config.pp_size > 1 and config.profile:
            raise InputError(
                "--profile: times whole passes, and a pipeline stage runs a part of each; leave out "
                "--pp_size or --profile."
            )
        is_simulated_only = config.dtype in SIMULATED_DTYPES
        if is_simulated_only or (config.dtype == "fp8" and config.device == "cpu"):
            where = "on simulated devices only" if is_simulated_only else "on GPUs and simulated devices only"
            raise InputError(
                f"--dtype: weights in {config.dtype} run {where}; choose float32, bf16 or fp16, or "
                "--device sim:PROFILE."
            )
    if config.engine_overhead is not None:
        if config.hardware is None:
            raise InputError(
                "--engine_overhead: adds predicted times, which only simulated devices have; leave it "
                "out, or choose --device sim:PROFILE."
            )
        if config.static_emulated_batch_size is not None:
            raise InputError(
                "--engine_overhead: --static_emulated_batch_size hands requests to the engine without a "
                "server; leave out one of them."
            )
    elif config.stream_interval > 1:
        raise InputError(
            "--stream_interval: is of a serving process, which only --engine_overhead adds; add it, or leave this out."
        )
    if config.profile and config.makes_no_tokens:
        raise InputError(
            f"--profile: nothing is computed on --device {config.device}; choose cpu or cuda, or leave it out."
        )


def _check_recording(config: RunConfig) -> None:
    """InputError for files and figures that need more than is recorded, and for outputs without tokens."""
    if config.profile and config.iteration_stats_every > 1:
        raise InputError("--profile: needs the times of every iteration; leave out --iteration_stats_every.")
    if config.recording == "summary":
        for name in ("profile", "enable_steady_state", "iteration_log", "result_json", "result_format"):
            if getattr(config, name):
                raise InputError(
                    f"--{name}: needs the record of each iteration, which --recording summary leaves out; "
                    "choose --recording full."
                )
    if (logged := config.iteration_stats_format) in LOGGED_ENGINES:
        if config.engine != logged:
            raise InputError(
                f"--iteration_stats_format {logged}: writes the log of {ENGINE_NAMES[logged]}'s server; add --engine "
                f"{logged}, or choose another."
            )
        if config.recording == "summary" or config.iteration_stats_every > 1:
            raise InputError(
                f"--iteration_stats_format {logged}: needs the record of each iteration; leave out --recording summary "
                "and --iteration_stats_every."
            )
    for name in ("return_log_probs", "return_context_logits", "return_generation_logits"):
        if config.makes_no_tokens and getattr(config, name):
            raise InputError(f"--{name}: --device {config.device} makes no tokens; leave one of them out.")


def _check_cache(config: RunConfig) -> None:
    """InputError for settings that need a paged KV cache of one attention window, where there is another."""
    is_contiguous = config.kv_cache_type == "contiguous"
    if is_contiguous and config.policy == "max_utilization":
        raise InputError(
            "--kv_cache_type contiguous: policy max_utilization pauses for blocks, and there are none; "
            "choose another --policy (it then counts requests only) or a paged cache."
        )
    if is_contiguous and config.enable_chunked_context:
        raise InputError("--enable_chunked_context: works with a paged cache; leave it out, or --kv_cache_type.")
    if is_contiguous and config.enable_batch_size_tuning:
        raise InputError(
            "--enable_batch_size_tuning: follows the blocks of a paged cache; leave it out, or --kv_cache_type."
        )
    has_windows = config.engine != VLLM and len(set(parse_windows(config.max_attention_window))) > 1
    for name in ("enable_kv_cache_reuse", "kv_host_cache_bytes"):
        if getattr(config, name) and (is_contiguous or has_windows):
            raise InputError(
                f"--{name}: works with a paged cache and one attention window; leave it out, or the other setting."
            )
    if config.kv_retention_s is not None and config.kv_retention_priority is None:
        raise InputError("--kv_retention_s: no block has a priority that expires; add --kv_retention_priority.")
    if config.kv_retention_priority is not None and not config.enable_kv_cache_reuse:
        raise InputError(
            "--kv_retention_priority: no block is kept without --enable_kv_cache_reuse; add it, or leave this out."
        )


def _check_parts(config: RunConfig) -> None:
    """InputError for settings of experts and of attention data parallelism that do not fit the others."""
    for name in ("attention_dp_size", "expert_load", "redundant_experts", "enable_two_batch_overlap"):
        if config.hardware is None and getattr(config, name) != setting(name).default:
            raise InputError(f"--{name}: is simulated only; leave it out, or choose --device sim:PROFILE.")
    if config.hardware is None and config.ep_size > 1 and config.makes_no_tokens:
        raise InputError(f"--ep_size: nothing is computed on --device {config.device}; leave it out.")
    if config.attention_dp_size > 1:
        refused = {
            "pp_size": config.pp_size > 1,
            "beam_width": (config.beam_width or config.max_beam_width or 1) > 1,
            "lora_dir": config.lora_dir,
            "num_loras": config.num_loras,
            "type": config.type == BatchingType.V1,
            "overlap": config.overlap == Overlap.PARTITIONED,
        }
        for name, is_given in refused.items():
            if is_given:
                raise InputError(f"--attention_dp_size: is not built with --{name}; leave one of them out.")
    if config.attention_dp_enable_balance and config.attention_dp_size == 1:
        raise InputError(
            "--attention_dp_enable_balance: is about the ranks of --attention_dp_size; add it, or leave this out."
        )
    if config.attention_dp_enable_balance and config.enable_chunked_context:
        raise InputError(
            "--attention_dp_enable_balance: is not built with --enable_chunked_context; leave one of them out."
        )
    if config.enable_two_batch_overlap and config.attention_dp_size == 1:
        raise InputError(
            "--enable_two_batch_overlap: hides the exchange of tokens between experts, which only --attention_dp_size "
            "needs; add it, or leave this out."
        )
    if config.redundant_experts and config.ep_size == 1:
        raise InputError("--redundant_experts: are divided among the parts of --ep_size; add it, or leave this out.")


def _check_beams(config: RunConfig) -> None:
    max_beam_width = config.max_beam_width or 1
    if config.beam_width is not None and config.beam_width > max_beam_width:
        raise InputError(
            f"--max_beam_width: {max_beam_width} is less than --beam_width {config.beam_width}; raise "
            "it or leave it out."
        )
    if config.max_num_tokens is not None and config.max_num_tokens < max_beam_width:
        raise InputError(
            f"--max_num_tokens: {config.max_num_tokens} is less than the {max_beam_width} beams of one "
            "request, each of which runs a token in an iteration; raise it."
        )
    reasons = {
        "enable_trt_overlap": config.enable_trt_overlap and "the next tokens depend on all beams",
        "draft_len": config.draft_len and "draft tokens continue one sequence",
    }
    for name, reason in reasons.items():
        if max_beam_width > 1 and reason:
            raise InputError(
                f"--{name}: refused with beam width above 1 (here {max_beam_width}), because {reason}; "
                "leave one of them out."
            )


def batching_config(
    config: RunConfig,
    layout: CacheLayout,
    vocab_size: int | None,
    hidden_size: int | None = None,
    lora: LoraConfig | None = None,
    reads_block_tables: bool = True,
    sends: bool = False,
) -> BatchingConfig:
    """The engine's limits of a resolved `config`.

    layout: the KV cache.
    vocab_size, hidden_size: the model's; None for an executor that makes no tokens.
    reads_block_tables: whether the executor reads block tables.
    sends: whether keys and values are sent to another engine.
    """
    for name in ("eos_id", "pad_id"):
        token = getattr(config, name)
        if vocab_size is not None and token is not None and token >= vocab_size:
            raise InputError(
                f"--{name}: {token} is not a token id of model {config.model}; expected at most {vocab_size - 1}."
            )
    first = layout.windows[0]
    is_limited = len(layout.windows) > 1 or first.attention_window.size < _resolved(config.max_seq_len)
    limits = BatchingConfig(
        batching_type=BatchingType(config.type),
        policy=config.policy,
        max_batch_size=_resolved(config.max_batch_size),
        max_num_tokens=None if config.type == BatchingType.V1 else config.max_num_tokens,
        max_seq_len=_resolved(config.max_seq_len),
        max_input_len=_resolved(config.max_input_len),
        tokens_per_block=config.tokens_per_block,
        num_blocks=first.num_blocks,
        num_host_blocks=first.num_host_blocks,
        chunk_unit=_resolved(config.context_chunk_unit) if config.enable_chunked_context else None,
        chunking_policy=config.context_chunking_policy,
        max_beam_width=_resolved(config.max_beam_width),
        # With a layer for multi-token prediction only the host's time is hidden, see SimulatedExecutor.
        overlap=None if config.overlap is None or config.draft_len else Overlap(config.overlap),
        pp_size=config.pp_size,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_queue_size=config.max_queue_size,
        reuse=ReuseRules(config.enable_kv_cache_reuse, config.enable_partial_reuse, config.copy_on_partial_reuse),
        windows=layout.windows if is_limited else (),
        is_contiguous=layout.is_contiguous,
        tunes_batch_size=config.enable_batch_size_tuning,
        tunes_num_tokens=config.enable_max_num_tokens_tuning,
        tuning_window=config.dynamic_batch_moving_average_window,
        lora=lora,
        drafts=draft_settings(config, layout) if config.draft_len else NO_DRAFTS,
        engine=config.engine,
        vllm=vllm_rules(config, layout) if config.engine == VLLM else None,
        sglang=sglang_rules(config) if config.engine == SGLANG else None,
        reads_block_tables=reads_block_tables,
        attention_dp_size=config.attention_dp_size,
        balances_ranks=config.attention_dp_enable_balance,
        attention_dp_time_out_iters=config.attention_dp_time_out_iters,
        attention_dp_batching_wait_iters=config.attention_dp_batching_wait_iters,
    )
    limits = limits.with_slots_to_send() if sends else limits
    if limits.table_bytes > LARGE_BYTES and limits.table_bytes > (free := available_host_bytes()):
        raise InputError(
            f"--max_batch_size: the block tables of {limits.num_slots:,} requests of at most "
            f"{limits.max_seq_len:,} tokens take {memory_size(limits.table_bytes)}, but "
            f"{memory_size(free)} are free; lower it, --max_seq_len or --max_beam_width, or raise "
            "--tokens_per_block."
        )
    return limits


def _resolved(limit: int | None) -> int:
    if limit is None:
        raise ValueError("the limits of this configuration are not resolved; call resolve_limits() first")
    return limit


# The KV cache.


def cache_layout(
    config: RunConfig, model: ModelConfig, memory_bytes: int | None, part: "ModelPart | None" = None
) -> CacheLayout:
    """The KV cache of a `config` with resolved limits.

    memory_bytes: memory for keys and values on the device; None for devices without memory. Where the user gives a
        size, the cache has it, reduced to what memory holds; otherwise that of a simulated device has all this memory,
        and others have at most a full batch of the longest sequences.
    part: the part of the model that has its keys and values in this memory; None if all.

    InputError if not a single block fits.
    """
    longest = _resolved(config.max_seq_len)
    size = config.tokens_per_block
    own, stored = (model, range(model.num_layers)) if part is None else (part.config, part.layers)
    per_layer = own.kv_values_per_layer * kv_value_bytes(config)
    if config.engine == VLLM:
        return _vllm_cache_layout(config, model, memory_bytes, per_layer)
    layers = _layers_of_window(config, model, longest)
    bytes_per_token = {
        window: float(sum(layer in stored for layer in members) * per_layer) for window, members in layers.items()
    }
    if config.draft_model is not None or config.draft_mtp is not None:  # each block has room for both models
        more = load_draft_config(config, model).kv_bytes_per_token(kv_value_bytes(config))
        bytes_per_token = {window: value + more for window, value in bytes_per_token.items()}
    host = blocks_of_memory(0, bytes_per_token, size, host_bytes=config.kv_host_cache_bytes)
    available = None if memory_bytes is None else blocks_of_memory(memory_bytes, bytes_per_token, size)
    full_batch = (config.max_batch_size or 1) * (config.max_beam_width or 1)
    windows = []
    for window, members in layers.items():
        is_limited = window < longest
        attention = AttentionWindow(
            size,
            window,
            longest,
            config.sink_token_len if is_limited else 0,
            config.max_beam_width or 1,
            is_cyclic=config.window_mode == "cyclic" or not is_limited,
        )
        in_memory = None if available is None else available[window].primary
        host_blocks = host[window].secondary
        blocks = _num_blocks(config, full_batch * attention.max_blocks_per_sequence, in_memory, host_blocks)
        if config.engine == SGLANG:
            host_blocks = host_pages(config, blocks, bytes_per_token[window])
            if host_blocks > MAX_BLOCKS:
                raise InputError(
                    f"the KV cache has {host_blocks:,} pages in host memory; expected at most {MAX_BLOCKS:,}. Lower "
                    "--hicache_size or --hicache_ratio, or raise --page_size."
                )
        windows.append(WindowLayout(tuple(members), attention, blocks, host_blocks))
    return CacheLayout(tuple(windows), is_contiguous=config.kv_cache_type == "contiguous")


def _vllm_cache_layout(
    config: RunConfig, model: ModelConfig, memory_bytes: int | None, layer_bytes: int
) -> CacheLayout:
    """The groups of layers of vLLM, and their common blocks. layer_bytes: in this memory, of a token in one layer."""
    longest, size = _resolved(config.max_seq_len), config.tokens_per_block
    most = max(longest, model.max_position_embeddings)  # of which the run's sequences may have fewer
    layers = _layers_of_window(config, model, most)
    groups = layer_groups({ALL_TOKENS if window == most else window: members for window, members in layers.items()})
    in_memory = None
    if memory_bytes is not None:  # the first block is vLLM's null block
        block_bytes = bytes_per_block(groups, layer_bytes, size)
        if config.draft_mtp is not None:
            block_bytes += load_draft_config(config, model).kv_bytes_per_token(kv_value_bytes(config)) * size
        in_memory = memory_bytes // block_bytes - 1
    full_batch = (config.max_batch_size or 1) * len(groups) * ceil_div(longest, size)
    return vllm_layout(groups, longest, size, _num_blocks(config, full_batch, in_memory))


def _num_blocks(config: RunConfig, full_batch: int, in_memory: int | None, host_blocks: int = 0) -> int:
    """The number of blocks: as many as memory has room for, and no more than the user asks for, or, on devices that are
    not simulated, than a full batch takes. InputError if that is none, or too many."""
    max_tokens, size = config.max_tokens_in_paged_kvcache, config.tokens_per_block
    if max_tokens is not None:
        wanted = ceil_div(max_tokens, size)
    else:
        wanted = MAX_BLOCKS if config.hardware is not None else min(full_batch, MAX_BLOCKS)
    blocks = wanted if in_memory is None else min(wanted, in_memory)
    if max_tokens is not None and blocks < wanted:
        _log.warning(
            "--max_tokens_in_paged_kvcache %d: memory has room for %d blocks of %d tokens only.",
            max_tokens,
            blocks,
            size,
        )
    if max(blocks, host_blocks) > MAX_BLOCKS:
        raise InputError(
            f"the KV cache has {max(blocks, host_blocks):,} blocks; expected at most {MAX_BLOCKS:,}. Lower "
            "--max_tokens_in_paged_kvcache or --kv_host_cache_bytes, or raise --tokens_per_block."
        )
    if blocks < 1:
        raise InputError(
            f"no memory for a single KV cache block of {size} tokens; raise "
            "--kv_cache_free_gpu_mem_fraction, free memory, or choose a smaller model."
        )
    return blocks


def windows_of_layers(layout: CacheLayout, model: ModelConfig) -> list[tuple[int | None, float]]:
    """For each window the number of positions up to its own that a query sees, None for all, and its share of the
    layers with attention. The cache may keep more of a sequence than a layer attends to."""
    layers = Counter[int | None]()
    for window in layout.windows:
        attention = window.attention_window
        for layer in window.layers:
            own = model.windows[layer] if model.windows else None
            kept = attention.size if attention.is_limited else None
            layers[kept if own is None else own if kept is None else min(own, kept)] += 1
    total = sum(layers.values())
    return [(size, count / total) for size, count in layers.items()]


def kv_value_bytes(config: RunConfig) -> int:
    """Bytes of one value in the KV cache."""
    return int(DTYPE_BYTES[config.kv_cache_dtype or config.weight_dtype])


def parse_windows(text: str | None) -> tuple[int, ...]:
    """The windows of `--max_attention_window`, in tokens; none for None."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.strip("[]() ").split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part) and int(part) > 0 for part in parts):
        raise InputError(
            f"--max_attention_window: {text!r} is not valid; expected a number of tokens of at least 1, "
            "or several separated by commas, which the layers take in turn."
        )
    return tuple(map(int, parts))


def _has_windows_of_blocks(config: RunConfig) -> bool:
    """Whether layers with windows of their own release or overwrite the blocks that they have left. Where blocks are
    reused, only vLLM's cache does; the others keep whole sequences in all layers."""
    if config.engine == VLLM:
        return True
    keeps = config.enable_kv_cache_reuse or config.kv_host_cache_bytes or config.draft_len
    return config.engine != SGLANG and config.kv_cache_type == "paged" and not keeps


def _layers_of_window(config: RunConfig, model: ModelConfig, longest: int) -> dict[int, list[int]]:
    """The layers of each attention window (tokens), longest window first. Windows of at least `longest`, the longest
    sequence, count as one."""
    asked = parse_windows(config.max_attention_window) or (model.sliding_window or longest,)
    if model.windows and config.max_attention_window is None and _has_windows_of_blocks(config):
        asked = tuple(window or longest for window in model.windows)
    if model.sliding_window is not None and max(asked) > model.sliding_window:
        raise InputError(
            f"--max_attention_window: {max(asked)} is more than the sliding window of model "
            f"{config.model}; expected at most {model.sliding_window} (tokens). Lower it or leave it "
            "out."
        )
    layers: dict[int, list[int]] = {}
    for layer in model.attention_layers:
        layers.setdefault(min(asked[layer % len(asked)], longest), []).append(layer)
    for window in layers:
        if config.sink_token_len >= window:
            raise InputError(
                f"--sink_token_len: {config.sink_token_len} first tokens fill the attention window of "
                f"{window}; expected fewer than its tokens. Lower it, or raise --max_attention_window."
            )
    return dict(sorted(layers.items(), reverse=True))
