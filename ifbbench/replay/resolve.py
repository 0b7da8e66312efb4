"""From what the user asked for to what the engine runs with: every limit resolved and checked against the others."""

from ifbbench.batching.kv_cache.geometry import ceil_div
from ifbbench.batching.manager import BatchingConfig
from ifbbench.config import RunConfig
from ifbbench.errors import InputError

CPU_MAX_BATCH_SIZE = 16
GPU_MAX_BATCH_SIZE = 2048


def resolve_limits(config: RunConfig, model_max_seq_len: int, on_cpu: bool) -> RunConfig:
    """Fill in the limits that depend on the model and the device, all but the size of the KV cache.

    Raises InputError for limits that contradict each other or the model."""
    max_seq_len = config.max_seq_len or model_max_seq_len
    if max_seq_len > model_max_seq_len:
        raise InputError(
            f"--max_seq_len: {max_seq_len} is more than the {model_max_seq_len} positions of model {config.model}; "
            "give a smaller one."
        )
    chunk_unit = config.context_chunk_unit or config.tokens_per_block
    if config.enable_chunked_context and config.max_num_tokens < chunk_unit:
        raise InputError(
            f"--max_num_tokens: {config.max_num_tokens} is less than one context chunk of {chunk_unit} tokens; "
            "raise it, or lower --context_chunk_unit (default: --tokens_per_block)."
        )
    longest = max_seq_len - 1
    if not config.enable_chunked_context:
        # A prompt runs in one piece, and so does that of a resumed request, generated tokens included.
        longest = min(longest, config.max_num_tokens)
    return config.with_values(
        max_batch_size=config.max_batch_size or (CPU_MAX_BATCH_SIZE if on_cpu else GPU_MAX_BATCH_SIZE),
        max_seq_len=max_seq_len,
        max_input_len=min(config.max_input_len or longest, longest),
        context_chunk_unit=chunk_unit,
    )


def batching_config(config: RunConfig, kv_tokens_that_fit: int | None) -> BatchingConfig:
    """The engine's limits of a resolved `config`.

    kv_tokens_that_fit: the KV cache that memory allows, in tokens, None if it takes none; used where the user gave no
    size, and then no larger than a full batch of the longest sequences could fill."""
    limits = (config.max_batch_size, config.max_seq_len, config.max_input_len, config.context_chunk_unit)
    max_batch_size, max_seq_len, max_input_len, chunk_unit = (_resolved(limit) for limit in limits)
    per_block = config.tokens_per_block
    blocks_per_sequence = ceil_div(max_seq_len, per_block)
    if config.max_tokens_in_paged_kvcache is not None:
        num_blocks = ceil_div(config.max_tokens_in_paged_kvcache, per_block)
    else:
        num_blocks = max_batch_size * blocks_per_sequence
        if kv_tokens_that_fit is not None:
            num_blocks = min(num_blocks, kv_tokens_that_fit // per_block)
    if num_blocks < 1:
        raise InputError(
            f"no memory for a single KV cache block of {per_block} tokens; raise --kv_cache_free_gpu_mem_fraction, "
            "free memory, or choose a smaller model."
        )
    return BatchingConfig(
        policy=config.policy,
        max_batch_size=max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=max_seq_len,
        max_input_len=max_input_len,
        tokens_per_block=per_block,
        num_blocks=num_blocks,
        chunk_unit=chunk_unit if config.enable_chunked_context else None,
        chunking_policy=config.context_chunking_policy,
    )


def _resolved(limit: int | None) -> int:
    if limit is None:
        raise ValueError("batching_config() needs a configuration that resolve_limits() has filled in")
    return limit
