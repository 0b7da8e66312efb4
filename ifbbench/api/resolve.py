"""From what the user asked for to what the engine runs with: every limit resolved and checked against the others."""

import logging

from ifbbench.api.cache_layout import parse_windows
from ifbbench.config import RunConfig
from ifbbench.engine.batching_config import V1_POLICY, BatchingConfig
from ifbbench.engine.batching_type import BatchingType
from ifbbench.engine.kv_cache.sequence import ReuseRules
from ifbbench.engine.kv_cache.sizing import CacheLayout
from ifbbench.engine.policies import find_policy
from ifbbench.errors import InputError

CPU_MAX_BATCH_SIZE = 16
GPU_MAX_BATCH_SIZE = 2048

_log = logging.getLogger("ifbbench")


def resolve_limits(config: RunConfig, model_max_seq_len: int, on_cpu: bool, trace_beam_width: int = 1) -> RunConfig:
    """Fill in the limits that depend on the model, the device and the trace, all but the size of the KV cache, and
    force the settings that the batching type leaves no choice of, with a warning each.

    trace_beam_width: the most beams that a request of the trace asks for.
    Raises InputError for settings that contradict each other or the model, and for a policy that there is not."""
    config = _with_chunking(_as_batching_type_needs(config))
    find_policy(config.policy)
    asked_beam_width = config.beam_width or trace_beam_width
    config = config.with_values(max_beam_width=config.max_beam_width or asked_beam_width)
    check_settings(config)
    max_seq_len = config.max_seq_len or model_max_seq_len
    if max_seq_len > model_max_seq_len:
        raise InputError(
            f"--max_seq_len: {max_seq_len} is more than the {model_max_seq_len} positions of model {config.model}; "
            "give a smaller one."
        )
    longest = max_seq_len - 1
    if not config.enable_chunked_context:
        # A prompt runs in one piece, and so does that of a resumed request, generated tokens included.
        longest = min(longest, config.max_num_tokens)
    dtype = config.dtype or ("bf16" if config.hardware and not on_cpu else config.weight_dtype)
    return config.with_values(
        dtype=dtype,
        # Weights of 4 bits are multiplied in 16, and so are keys and values.
        kv_cache_dtype=config.kv_cache_dtype or ("bf16" if dtype == "int4" else dtype),
        max_batch_size=config.max_batch_size or (CPU_MAX_BATCH_SIZE if on_cpu else GPU_MAX_BATCH_SIZE),
        max_seq_len=max_seq_len,
        max_input_len=min(config.max_input_len or longest, longest),
        context_chunk_unit=_chunk_unit(config),
    )


def check_settings(config: RunConfig) -> None:
    """Raise InputError for settings that contradict each other. A `max_beam_width` of None counts as `beam_width`."""
    if config.concurrency is not None and config.static_emulated_batch_size is not None:
        raise InputError(
            "--concurrency: --static_emulated_batch_size says already how many requests are outstanding; leave out one "
            "of them."
        )
    if config.enable_chunked_context and config.max_num_tokens < _chunk_unit(config):
        raise InputError(
            f"--max_num_tokens: {config.max_num_tokens} is less than one context chunk of {_chunk_unit(config)} "
            "tokens; raise it, or lower --context_chunk_unit (default: --tokens_per_block)."
        )
    _check_device(config)
    _check_profile(config)
    if config.makes_no_tokens:
        for name in ("return_log_probs", "return_context_logits", "return_generation_logits"):
            if getattr(config, name):
                raise InputError(f"--{name}: --device {config.device} makes no tokens; leave one of them out.")
    _check_beams(config)
    _check_cache(config)


def _check_device(config: RunConfig) -> None:
    """What only simulated devices can do."""
    if config.hardware is not None:
        return
    for name in ("tp_size", "pp_size"):
        if getattr(config, name) > 1:
            raise InputError(
                f"--{name}: {getattr(config, name)} GPUs run on simulated devices only; leave it out, or choose "
                "--device sim:PROFILE."
            )
    if config.dtype == "int4" or (config.dtype == "fp8" and config.device == "cpu"):
        where = "on simulated devices only" if config.dtype == "int4" else "on GPUs and simulated devices only"
        raise InputError(
            f"--dtype: weights in {config.dtype} run {where}; choose float32, bf16 or fp16, or --device sim:PROFILE."
        )


def _check_profile(config: RunConfig) -> None:
    if not config.profile:
        return
    if config.makes_no_tokens:
        raise InputError(
            f"--profile: nothing is computed on --device {config.device}; choose cpu or cuda, or leave it out."
        )
    if config.iteration_stats_every > 1:
        raise InputError("--profile: needs the times of every iteration; leave out --iteration_stats_every.")


def _check_cache(config: RunConfig) -> None:
    is_contiguous = config.kv_cache_type == "contiguous"
    if is_contiguous and config.policy == "max_utilization":
        raise InputError(
            "--kv_cache_type contiguous: policy max_utilization pauses for blocks, and there are none; choose another "
            "--policy (it then counts requests only) or a paged cache."
        )
    windows = set(parse_windows(config.max_attention_window))
    if config.enable_chunked_context and is_contiguous:
        raise InputError("--enable_chunked_context: works with a paged cache; leave it out, or --kv_cache_type.")
    for name in ("enable_kv_cache_reuse", "kv_host_cache_bytes"):
        if getattr(config, name) and (is_contiguous or len(windows) > 1):
            raise InputError(
                f"--{name}: works with a paged cache and one attention window; leave it out, or the other setting."
            )


def _check_beams(config: RunConfig) -> None:
    max_beam_width = config.max_beam_width or config.beam_width or 1
    if config.beam_width is not None and config.beam_width > max_beam_width:
        raise InputError(
            f"--max_beam_width: {max_beam_width} is less than --beam_width {config.beam_width}; raise it or leave it "
            "out."
        )
    if config.max_num_tokens < max_beam_width:
        raise InputError(
            f"--max_num_tokens: {config.max_num_tokens} is less than the {max_beam_width} beams of one request, each "
            "of which runs a token in an iteration; raise it."
        )
    if max_beam_width == 1:
        return
    if config.enable_trt_overlap:
        raise InputError(
            f"--enable_trt_overlap: refused with beam width above 1 (here {max_beam_width}); leave one of them out."
        )
    if config.streaming:
        raise InputError(
            f"--streaming: refused with beam width above 1 (here {max_beam_width}), for a beam search may still change "
            "what was sent; leave one of them out."
        )
    if config.temperature > 0 or config.repetition_penalty != 1:
        name = "temperature" if config.temperature > 0 else "repetition_penalty"
        raise InputError(
            f"--{name}: beam search (here with {max_beam_width} beams) goes by plain probabilities; leave "
            "one of them out."
        )


def _as_batching_type_needs(config: RunConfig) -> RunConfig:
    """Static batches (V1) leave no choice of policy, and no streaming, chunking, overlap or reuse."""
    if config.type != BatchingType.V1:
        return config
    if config.policy != V1_POLICY:
        _log.warning("--type v1 runs under policy %s, not %s.", V1_POLICY, config.policy)
    off = dict.fromkeys(("enable_chunked_context", "streaming", "enable_trt_overlap", "enable_kv_cache_reuse"), False)
    for name in off:
        if getattr(config, name):
            _log.warning("--type v1 turns --%s off.", name)
    return config.with_values(policy=V1_POLICY, **off)


def _with_chunking(config: RunConfig) -> RunConfig:
    """Chunked context that is neither on nor off (the default of the command line) is on where it can be."""
    if config.enable_chunked_context is not None:
        return config
    can_be = config.kv_cache_type == "paged" and config.max_num_tokens >= _chunk_unit(config)
    return config.with_values(enable_chunked_context=can_be)


def _chunk_unit(config: RunConfig) -> int:
    return config.context_chunk_unit or config.tokens_per_block


def batching_config(config: RunConfig, layout: CacheLayout, vocab_size: int | None) -> BatchingConfig:
    """The engine's limits of a resolved `config`.

    layout: the KV cache. vocab_size: the model's, in tokens; None for an executor that makes none."""
    for name in ("eos_id", "pad_id"):
        token = getattr(config, name)
        if vocab_size is not None and token is not None and token >= vocab_size:
            raise InputError(
                f"--{name}: {token} is not a token id of model {config.model}; expected at most {vocab_size - 1}."
            )
    first = layout.windows[0]
    is_limited = len(layout.windows) > 1 or first.attention_window.size < _resolved(config.max_seq_len)
    return BatchingConfig(
        batching_type=BatchingType(config.type),
        policy=config.policy,
        max_batch_size=_resolved(config.max_batch_size),
        max_num_tokens=config.max_num_tokens,
        max_seq_len=_resolved(config.max_seq_len),
        max_input_len=_resolved(config.max_input_len),
        tokens_per_block=config.tokens_per_block,
        num_blocks=first.num_blocks,
        num_host_blocks=first.num_host_blocks,
        chunk_unit=_resolved(config.context_chunk_unit) if config.enable_chunked_context else None,
        chunking_policy=config.context_chunking_policy,
        max_beam_width=_resolved(config.max_beam_width),
        enable_overlap=config.enable_trt_overlap,
        vocab_size=vocab_size,
        reuse=ReuseRules(config.enable_kv_cache_reuse, config.enable_partial_reuse, config.copy_on_partial_reuse),
        windows=layout.windows if is_limited else (),
        is_contiguous=layout.is_contiguous,
    )


def _resolved(limit: int | None) -> int:
    if limit is None:
        raise ValueError("batching_config() needs a configuration that resolve_limits() has filled in")
    return limit
