"""The stores beneath the device memory of an engine, made from the settings."""

from ifbbench.build.resolve import kv_value_bytes
from ifbbench.clock import Clock
from ifbbench.errors import InputError
from ifbbench.kv.store import KvStore
from ifbbench.kv.tiers import KvTiers
from ifbbench.models.config import ModelConfig
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import ENGINES, SGLANG, VLLM
from ifbbench.settings.groups.kv_cache import BEST_EFFORT, BY_TIMEOUT, NO_PREFETCH, TIER_WRITE_POLICIES, WAIT_COMPLETE
from ifbbench.settings.groups.replay import BY_ITERATION
from ifbbench.settings.groups.scheduling import POLICIES

DISK, REMOTE = "disk", "remote"


def check_tiers(config: RunConfig, limits: BatchingConfig) -> None:
    """InputError for stores that are not built, and for settings of stores that are not there. config: resolved, with
    settings of stores."""
    given = config.tier_settings
    for kind in (DISK, REMOTE):
        own = [name for name in given if name.startswith(f"kv_{kind}_")]
        if own and not getattr(config, f"kv_{kind}_bytes"):
            raise InputError(f"--{own[0]}: there is no such store; add --kv_{kind}_bytes, or leave this out.")
    if not has_tiers(config):
        raise InputError(f"--{given[0]}: there is no store; add --kv_disk_bytes or --kv_remote_bytes.")
    if config.engine not in ENGINES:
        raise InputError(f"--{given[0]}: stores are built for --engine {', '.join(ENGINES)}; leave it out.")
    if config.hardware is None:
        raise InputError(
            f"--{given[0]}: --device {config.device} loads no blocks; disk and remote store need a simulated device "
            "(--device sim:PROFILE)."
        )
    refused = _refused_by_engine(config, limits) | {
        "without --enable_kv_cache_reuse nothing is looked for": not config.enable_kv_cache_reuse,
        "attention windows are not built with it": limits.vllm is not None and limits.vllm.windows != (None,),
        "draft tokens are not built with it": config.has_drafts,
        "ranks of --attention_dp_size are not built with it": config.attention_dp_size > 1,
        "loads take time, and --arrival iteration has none": config.arrival == BY_ITERATION,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise InputError(f"--{given[0]}: {reason}; leave out one of the two.")


def _refused_by_engine(config: RunConfig, limits: BatchingConfig) -> dict[str, bool]:
    """What the engine has no rules for, and whether it is asked for."""
    prefetch = config.kv_tier_prefetch
    if config.engine == SGLANG:
        return {
            "SGLang's storage is behind its host memory; add --enable_hierarchical_cache": limits.num_host_blocks == 0,
            "SGLang has one storage backend; --kv_disk_bytes and --kv_remote_bytes together are not built": (
                config.kv_disk_bytes > 0 and config.kv_remote_bytes > 0
            ),
            "SGLang writes what was copied to the host, by --hicache_write_policy (--kv_tier_write_policy)": (
                config.kv_tier_write_policy != TIER_WRITE_POLICIES[0]
            ),
            "SGLang always prefetches (--kv_tier_prefetch none)": prefetch == NO_PREFETCH,
        }
    threshold = config.kv_tier_prefetch_threshold != RunConfig.kv_tier_prefetch_threshold
    refused = {"it is a setting of SGLang (--kv_tier_prefetch_threshold)": threshold}
    if config.engine == VLLM:
        return refused | {
            f"vLLM's connectors have no {prefetch} (--kv_tier_prefetch)": prefetch in (BEST_EFFORT, BY_TIMEOUT),
            "blocks are prefetched from the remote store to the disk; --kv_tier_prefetch needs both": (
                prefetch == WAIT_COMPLETE and not (config.kv_disk_bytes and config.kv_remote_bytes)
            ),
        }
    return refused | {
        "TensorRT-LLM's KV cache connector loads once a prompt is scheduled (--kv_tier_prefetch)": (
            prefetch not in (None, NO_PREFETCH)
        ),
        f"TensorRT-LLM's KV cache connector needs --policy {POLICIES[0]}": config.policy != POLICIES[0],
        "TensorRT-LLM's KV cache connector writes what is computed, not what is evicted (--kv_tier_write_policy)": (
            config.kv_tier_write_policy != TIER_WRITE_POLICIES[0]
        ),
        "several micro batches are not built with it": limits.num_micro_batches > 1,
        "static batches and contiguous caches are not built with it": limits.is_contiguous,
        "beams are not built with it": limits.max_beam_width > 1,
    }


def has_tiers(config: RunConfig) -> bool:
    """Whether there is a store beneath the device memory."""
    return config.kv_disk_bytes > 0 or config.kv_remote_bytes > 0


def remote_store(config: RunConfig, model: ModelConfig) -> KvStore | None:
    """The remote store of a resolved `config`, which several engines may share; None without one."""
    return _store(REMOTE, config, model) if config.kv_remote_bytes else None


def make_tiers(
    config: RunConfig, model: ModelConfig, clock: Clock, remote: KvStore | None, owner: int = 0
) -> KvTiers | None:
    """The stores of an engine with a resolved `config`, None without any. owner: its number among those that share
    `remote`."""
    stores = [_store(DISK, config, model)] if config.kv_disk_bytes else []
    stores += [] if remote is None else [remote]
    writes_back = config.kv_tier_write_policy == TIER_WRITE_POLICIES[1]
    if not stores:
        return None
    tiers = KvTiers(stores, config.tokens_per_block, clock, writes_back, owner)
    tiers.prefetches = config.kv_tier_prefetch == WAIT_COMPLETE and config.engine == VLLM
    return tiers


def _store(kind: str, config: RunConfig, model: ModelConfig) -> KvStore:
    block_bytes = model.kv_bytes_per_token(kv_value_bytes(config)) * config.tokens_per_block
    capacity = int(getattr(config, f"kv_{kind}_bytes") // block_bytes)
    if not capacity:
        raise InputError(
            f"--kv_{kind}_bytes {getattr(config, f'kv_{kind}_bytes')}: is less than the {block_bytes:,.0f} bytes of a "
            "block of keys and values; give more."
        )
    bandwidth, latency_s = getattr(config, f"kv_{kind}_bandwidth"), getattr(config, f"kv_{kind}_latency")
    return KvStore(kind, capacity, block_bytes, bandwidth, latency_s)
