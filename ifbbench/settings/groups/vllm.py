"""Settings that only vLLM's scheduler has, by vLLM's names."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ifbbench.settings.fields import declare, or_none

QUEUE_ORDERS = ("fcfs", "priority")
# Versions of vLLM whose rules are known where they differ.
VLLM_VERSIONS = tuple(f"0.{minor}" for minor in range(15, 33))

_vllm = partial(declare, "vllm")


def _minor_version(value: Any) -> Any:
    """0.15 for 0.15.1, a version of vLLM."""
    return ".".join(value.split(".")[:2]) if isinstance(value, str) else value


@dataclass(frozen=True)
class VllmSettings:
    """Settings that only vLLM's scheduler has, by vLLM's names."""

    vllm_version: str = _vllm(
        VLLM_VERSIONS[-1],
        "Version of vLLM whose rules hold, where they changed: 0.15 to 0.32 (docs/engines.md). A replay of a recording "
        "has that of its server.",
        convert=_minor_version,
        choices=VLLM_VERSIONS,
    )
    scheduling_policy: str = _vllm(
        QUEUE_ORDERS[0],
        "Order of the queue and of pre-emption: first come first served, or by the priority of the trace.",
        choices=QUEUE_ORDERS,
    )
    async_scheduling: bool | None = _vllm(
        None,
        "Schedule an iteration before the tokens of the one before are known. Default: on, but not on a CPU or with "
        "drafts.",
    )
    max_num_scheduled_tokens: int | None = _vllm(
        None,
        "Maximum number of tokens that an iteration schedules. Default: max_num_batched_tokens.",
        minimum=1,
        unit="tokens",
    )
    max_num_active_seqs: int | None = _vllm(
        None, "Maximum number of running requests. Default: max_num_seqs.", minimum=1, unit="requests"
    )
    long_prefill_token_threshold: int = _vllm(
        0, "Maximum number of prompt tokens of one request in an iteration; 0 is no maximum.", minimum=0, unit="tokens"
    )
    long_prefill_token_threshold_adaptive: bool = _vllm(
        False, "Raise that maximum to an equal share of the token budget for each request, if that is more."
    )
    scheduler_reserve_full_isl: bool = _vllm(
        True, "Start a prompt only if all its blocks are free, although its first chunk needs fewer."
    )
    watermark: float = _vllm(
        0.0, "Share of the blocks that stay free when a waiting request starts.", minimum=0.0, maximum=1.0
    )
    prefix_cache_retention_interval: int | None = _vllm(
        0,
        "With attention windows: tokens between two places in a prompt after which another request can reuse it; 0 for "
        "ends of prompts and of what they share only, none for every block.",
        minimum=0,
        unit="tokens",
        convert=or_none,
    )
    num_gpu_blocks_override: int | None = _vllm(
        None,
        "Number of KV cache blocks, vLLM's null block included. Default: from free memory.",
        minimum=2,
        maximum=2**32,
        unit="blocks",
    )
