"""The settings that only SGLang's scheduler has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SglangRules:
    """Settings of SGLang's `ServerArgs`, beside those that all engines have.

    schedule_policy: how the queue is ordered.
    conservativeness: factor of the share of the outputs that running requests are expected to need.
    chunk_size: tokens of prompts in an iteration, beyond which the last prompt is cut; None does not cut prompts.
    max_prefill_tokens: tokens of prompts in an iteration, above which no further prompt starts.
    prefill_max_requests: prompts of an iteration; None is no limit.
    mixes_chunks: whether prefill batches include the decode tokens of running requests.
    eviction_policy: which leaf of the tree is evicted first.
    write_policy: when a leaf is copied to the host, if that has memory for it.
    prefetch_policy: how long a request waits for what storage has of its prompt.
    prefetch_threshold: number of tokens below which nothing is prefetched.
    retracts_by_priority: whether the lowest priority is retracted first; otherwise the request with the fewest outputs
        is.
    is_priority: whether the queue is ordered by priority.
    preempts: whether a waiting request may take the place of running ones whose priority is lower by more than
        `preemption_threshold`.
    receive_interval: iterations without prompts after which requests that have arrived are received.
    reserved_tokens: tokens of the cache kept free for each request whose prompt another engine computes.
    ignores_eos: whether outputs whose maximum length is the actual one have it for certain, as no end token ends them.
    reserves_by_ratio: whether such requests, while they run, are nevertheless expected to need a share of the rest
        only.
    seed: seed of the random order.
    """

    schedule_policy: str = "fcfs"
    conservativeness: float = 1.0
    chunk_size: int | None = 8192
    max_prefill_tokens: int = 16_384
    prefill_max_requests: int | None = None
    mixes_chunks: bool = False
    eviction_policy: str = "lru"
    write_policy: str = "write_through"
    prefetch_policy: str = "timeout"
    prefetch_threshold: int = 256
    retracts_by_priority: bool = False
    is_priority: bool = False
    preempts: bool = False
    preemption_threshold: float = 10.0
    receive_interval: int = 1
    reserved_tokens: int = 512
    ignores_eos: bool = False
    reserves_by_ratio: bool = False
    seed: int = 0
