"""Settings of the KV cache."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ifbbench.settings.bounds import MAX_BATCH
from ifbbench.settings.dtypes import KV_CACHE_DTYPES
from ifbbench.settings.fields import declare

# The family of the settings of stores beneath the device memory.
TIERS = "tiers"
WINDOW_MODES = ("cyclic", "linear")
TIER_WRITE_POLICIES = ("write_through", "write_back")
TIER_PREFETCHES = NO_PREFETCH, BEST_EFFORT, WAIT_COMPLETE, BY_TIMEOUT = (
    "none",
    "best_effort",
    "wait_complete",
    "timeout",
)
DEFAULT_TOKENS_PER_BLOCK = 32
DEFAULT_KV_FRACTION = 0.9

_cache = partial(declare, "kv cache")
_tier = partial(_cache, family=TIERS)


def _windows(value: Any) -> Any:
    """Window sizes as text, where they are given as an integer or a list."""
    return str(value) if isinstance(value, int | list | tuple) and not isinstance(value, bool) else value


@dataclass(frozen=True)
class CacheSettings:
    """Settings of the KV cache."""

    tokens_per_block: int = _cache(
        DEFAULT_TOKENS_PER_BLOCK,
        "Tokens in one KV cache block.",
        minimum=1,
        maximum=MAX_BATCH,
        unit="tokens",
        aliases=("block_size", "page_size"),
        elsewhere="kv_block_size",
    )
    max_tokens_in_paged_kvcache: int | None = _cache(
        None,
        "Size of the paged KV cache. Default: from free memory.",
        minimum=1,
        maximum=2**53,
        unit="tokens",
        aliases=("max_tokens", "max_total_tokens"),
        elsewhere="kv_cache_tokens kv_cache_size",
        is_common=True,
    )
    kv_cache_free_gpu_mem_fraction: float = _cache(
        DEFAULT_KV_FRACTION,
        "Share of free memory for the KV cache.",
        above=0.0,
        maximum=0.99,
        aliases=("free_gpu_memory_fraction",),
        elsewhere="kv_cache_free_gpu_memory_fraction",
        is_common=True,
    )
    gpu_memory_utilization: float | None = _cache(
        None,
        "Share of all device memory for weights, activations and the KV cache, in place of a share of what is free.",
        above=0.0,
        maximum=1.0,
        aliases=("mem_fraction_static",),
    )
    enable_kv_cache_reuse: bool = _cache(
        False,
        "Reuse KV cache blocks of equal prefixes.",
        aliases=("enable_block_reuse", "enable_prefix_caching"),
        elsewhere="prefix_caching enable_radix_cache kv_cache_reuse",
        is_common=True,
    )
    enable_partial_reuse: bool = _cache(True, "With reuse: also blocks that are equal only at their beginning.")
    copy_on_partial_reuse: bool = _cache(True, "With partial reuse: copy blocks that other requests use, too.")
    max_attention_window: str | None = _cache(
        None,
        "Attend to the last N tokens only; N1,N2,… repeat over the layers. Default: the model's.",
        unit="tokens",
        convert=_windows,
        elsewhere="sliding_window attention_window max_attention_window_size",
    )
    sink_token_len: int = _cache(
        0,
        "Number of first tokens that stay in the window (StreamingLLM).",
        minimum=0,
        unit="tokens",
        aliases=("sink_token_length",),
        elsewhere="attention_sink sink_tokens",
    )
    window_mode: str = _cache(
        "cyclic", "Blocks of tokens that have left the window: overwritten, or kept.", choices=WINDOW_MODES
    )
    kv_host_cache_bytes: int = _cache(
        0,
        "KV cache in host memory, for blocks evicted from the device.",
        minimum=0,
        maximum=2**53,
        unit="bytes",
        aliases=("host_cache_size",),
        elsewhere="swap_space cpu_offload_gb secondary_cache_size",
    )
    kv_retention_priority: int | None = _cache(
        None,
        "Retention priority, above 35, of the blocks of requests that another turn of their session comes after.",
        minimum=36,
        maximum=100,
        elsewhere="decode_retention_priority retention_priority kv_cache_retention_config",
    )
    kv_retention_s: float | None = _cache(
        None,
        "How long such blocks keep that priority after the end of their request. Default: without limit.",
        minimum=0.0,
        maximum=1e9,
        unit="s",
        elsewhere="decode_duration_ms retention_duration_ms kv_time_to_live kv_ttl",
    )
    kv_disk_bytes: int = _tier(
        0,
        "A disk beneath the memory of each engine, which keeps the blocks of prefixes.",
        minimum=0,
        maximum=2**60,
        unit="bytes",
        elsewhere="max_local_disk_size nvme_kv_cache_size",
    )
    kv_disk_bandwidth: float = _tier(
        6e9, "What the disk reads and writes, in all.", above=0.0, maximum=1e18, unit="bytes/s"
    )
    kv_disk_latency: float = _tier(
        1e-4, "From the last byte of a transfer of the disk to its arrival.", minimum=0.0, maximum=3600.0, unit="s"
    )
    kv_remote_bytes: int = _tier(
        0,
        "A remote store of the blocks of prefixes, which the replicas of a fleet share.",
        minimum=0,
        maximum=2**60,
        unit="bytes",
        elsewhere="kv_store_size remote_storage_size",
    )
    kv_remote_bandwidth: float = _tier(
        2.5e10, "What the remote store sends and receives, of all replicas.", above=0.0, maximum=1e18, unit="bytes/s"
    )
    kv_remote_latency: float = _tier(
        1e-3,
        "From the last byte of a transfer of the remote store to its arrival.",
        minimum=0.0,
        maximum=3600.0,
        unit="s",
    )
    kv_tier_write_policy: str = _tier(
        TIER_WRITE_POLICIES[0],
        "When blocks are written to disk and remote store: when they are computed, or when they are evicted from the "
        "device.",
        choices=TIER_WRITE_POLICIES,
    )
    kv_tier_prefetch: str | None = _tier(
        None,
        "Whether blocks are fetched to quicker memory while a request waits in the queue, and how long this keeps it "
        "there: not at all, until all have come, or for a time. Default: timeout with SGLang, else none.",
        choices=TIER_PREFETCHES,
        elsewhere="hicache_storage_prefetch_policy enable_async_loading",
    )
    kv_tier_prefetch_threshold: int = _tier(
        256,
        "SGLang: fewer tokens are not prefetched.",
        minimum=1,
        maximum=2**30,
        unit="tokens",
        elsewhere="prefetch_threshold",
    )
    kv_cache_dtype: str | None = _cache(
        None,
        "Data type of the KV cache. Default: that of the weights.",
        choices=KV_CACHE_DTYPES,
        elsewhere="kv_dtype cache_dtype cache_type_k kv_cache_data_type",
    )
    kv_cache_type: str = _cache(
        "paged",
        "Blocks, or contiguous memory for the maximum sequence length of each request.",
        choices=("paged", "contiguous"),
    )
