"""From what the user asked for to what the engine runs with: every limit resolved and checked against the others."""

import logging

from ifbbench.batching.batching_config import V1_POLICY, BatchingConfig
from ifbbench.batching.batching_type import BatchingType
from ifbbench.batching.capacity import find_policy
from ifbbench.batching.kv_cache.geometry import ceil_div
from ifbbench.config import RunConfig
from ifbbench.errors import InputError

CPU_MAX_BATCH_SIZE = 16
GPU_MAX_BATCH_SIZE = 2048

_log = logging.getLogger("ifbbench")


def resolve_limits(config: RunConfig, model_max_seq_len: int, on_cpu: bool, trace_beam_width: int = 1) -> RunConfig:
    """Fill in the limits that depend on the model, the device and the trace, all but the size of the KV cache, and
    force the settings that the batching type leaves no choice of, with a warning each.

    trace_beam_width: the most beams that a request of the trace asks for.
    Raises InputError for settings that contradict each other or the model, and for a policy that there is not."""
    config = _as_batching_type_needs(config)
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
    return config.with_values(
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
    if config.device == "null":
        for name in ("return_log_probs", "return_context_logits", "return_generation_logits"):
            if getattr(config, name):
                raise InputError(f"--{name}: --device null makes no tokens; leave one of them out.")
    _check_beams(config)


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
    """Static batches (V1) leave no choice of policy, and no streaming, chunking or overlap."""
    if config.type != BatchingType.V1:
        return config
    if config.policy != V1_POLICY:
        _log.warning("--type v1 runs under policy %s, not %s.", V1_POLICY, config.policy)
    for name in ("enable_chunked_context", "streaming", "enable_trt_overlap"):
        if getattr(config, name):
            _log.warning("--type v1 turns --%s off.", name)
    return config.with_values(
        policy=V1_POLICY, enable_chunked_context=False, streaming=False, enable_trt_overlap=False
    )


def _chunk_unit(config: RunConfig) -> int:
    return config.context_chunk_unit or config.tokens_per_block


def batching_config(config: RunConfig, kv_tokens_that_fit: int | None, vocab_size: int | None) -> BatchingConfig:
    """The engine's limits of a resolved `config`.

    kv_tokens_that_fit: the KV cache that memory allows, in tokens, None if it takes none; used where the user gave no
    size, and then no larger than a full batch of the longest sequences could fill.
    vocab_size: the model's, in tokens; None for an executor that makes none."""
    for name in ("eos_id", "pad_id"):
        token = getattr(config, name)
        if vocab_size is not None and token is not None and token >= vocab_size:
            raise InputError(
                f"--{name}: {token} is not a token id of model {config.model}; expected at most {vocab_size - 1}."
            )
    max_batch_size, max_beam_width = _resolved(config.max_batch_size), _resolved(config.max_beam_width)
    return BatchingConfig(
        batching_type=BatchingType(config.type),
        policy=config.policy,
        max_batch_size=max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=_resolved(config.max_seq_len),
        max_input_len=_resolved(config.max_input_len),
        tokens_per_block=config.tokens_per_block,
        num_blocks=_num_blocks(config, max_batch_size * max_beam_width, kv_tokens_that_fit),
        chunk_unit=_resolved(config.context_chunk_unit) if config.enable_chunked_context else None,
        chunking_policy=config.context_chunking_policy,
        max_beam_width=max_beam_width,
        enable_overlap=config.enable_trt_overlap,
        vocab_size=vocab_size,
    )


def _num_blocks(config: RunConfig, num_beams: int, kv_tokens_that_fit: int | None) -> int:
    """num_beams: of a full batch."""
    per_block = config.tokens_per_block
    if config.max_tokens_in_paged_kvcache is not None:
        return ceil_div(config.max_tokens_in_paged_kvcache, per_block)
    num_blocks = num_beams * ceil_div(_resolved(config.max_seq_len), per_block)
    if kv_tokens_that_fit is not None:
        num_blocks = min(num_blocks, kv_tokens_that_fit // per_block)
    if num_blocks < 1:
        raise InputError(
            f"no memory for a single KV cache block of {per_block} tokens; raise --kv_cache_free_gpu_mem_fraction, "
            "free memory, or choose a smaller model."
        )
    return num_blocks


def _resolved(limit: int | None) -> int:
    if limit is None:
        raise ValueError("batching_config() needs a configuration that resolve_limits() has filled in")
    return limit
