"""Settings that only SGLang's scheduler has, by SGLang's names."""

from dataclasses import dataclass
from functools import partial

from ifbbench.settings.fields import declare

# The family of the settings of host memory.
HOST = "host memory"
# Choices of SGLang.
SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "hrrn", "shortest-prefill-first", "random")
EVICTION_POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
RETRACTION_POLICIES = ("length", "priority")
HOST_WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")

_sglang = partial(declare, "sglang")
_host = partial(_sglang, family=HOST)


@dataclass(frozen=True)
class SglangSettings:
    """Settings that only SGLang's scheduler has, by SGLang's names."""

    schedule_policy: str = _sglang(
        SCHEDULE_POLICIES[0],
        "Order of the queue: first come first served, longest prefix match, depth first by weight, longest output, "
        "highest response ratio, shortest prefill, or random.",
        choices=SCHEDULE_POLICIES,
    )
    schedule_conservativeness: float = _sglang(
        1.0, "Factor of the share of their outputs that running requests are expected to need.", minimum=0.0
    )
    reserve_by_ratio: bool = _sglang(
        False,
        "Running requests with ignore_eos are expected to need a share of the rest of their outputs, as others are, "
        "instead of all of it: as SGLang did before 0.5.23 (read in its code; when it changed is not known).",
    )
    max_prefill_tokens: int = _sglang(
        16_384, "Prompt tokens of an iteration, above which no further prompt starts.", minimum=1, unit="tokens"
    )
    prefill_max_requests: int | None = _sglang(
        None, "Maximum number of prompts in an iteration. Default: no maximum.", minimum=1, unit="requests"
    )
    enable_mixed_chunk: bool = _sglang(False, "Running requests generate in the iterations of prompts, too.")
    disable_overlap_schedule: bool = _sglang(
        False, "Schedule an iteration only when the tokens of the one before are known. Always so on a CPU."
    )
    scheduler_recv_interval: int = _sglang(
        1,
        "Receive requests after so many iterations, and after each one with prompts.",
        minimum=1,
        maximum=10_000,
        unit="iterations",
    )
    num_reserved_decode_tokens: int = _sglang(
        512,
        "Tokens of the KV cache that a decode replica (--decode_replicas) keeps free for each of its requests.",
        minimum=0,
        unit="tokens",
    )
    disable_radix_cache: bool = _sglang(False, "Keep no prefixes for other requests.")
    radix_eviction_policy: str = _sglang(
        EVICTION_POLICIES[0], "Which prefix is evicted first.", choices=EVICTION_POLICIES
    )
    enable_hierarchical_cache: bool = _host(False, "Keep prefixes in host memory, too (HiCache).")
    hicache_ratio: float = _host(
        2.0, "Tokens of the host's part of the cache, relative to the device's.", above=0.0, maximum=1000.0
    )
    hicache_size: int = _host(
        0, "Host's part of the cache on each device, in place of a ratio.", minimum=0, maximum=2**20, unit="GB"
    )
    hicache_write_policy: str = _host(
        HOST_WRITE_POLICIES[0],
        "When a prefix is copied to the host: when it is computed, when it is used again, or when it is evicted.",
        choices=HOST_WRITE_POLICIES,
    )
    retraction_policy: str = _sglang(
        RETRACTION_POLICIES[0],
        "Which running request is retracted first: the one with the fewest outputs, or the lowest priority.",
        choices=RETRACTION_POLICIES,
    )
    enable_priority_scheduling: bool = _sglang(False, "Order the queue by the priority of the trace.")
    disable_priority_preemption: bool = _sglang(
        False, "With --enable_priority_scheduling: no request takes the place of running ones."
    )
    priority_scheduling_preemption_threshold: float = _sglang(
        10.0,
        "How much lower the priority of a running request must be for a waiting one to take its place.",
        minimum=0.0,
    )
