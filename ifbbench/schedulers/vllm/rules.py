"""The settings that only vLLM's scheduler has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VllmRules:
    """Settings of vLLM's `SchedulerConfig`, beside those that all engines have.

    is_priority: the queue is ordered by priority, and the lowest is pre-empted; else by arrival, and the last.
    max_scheduled_tokens: token budget of an iteration where it is below the input budget (max_num_batched_tokens).
    max_active: running requests, where fewer than max_num_seqs may run.
    long_prefill_threshold: maximum number of prompt tokens of a request in an iteration, 0 for none.
    is_threshold_adaptive: an equal share of the input budget is allowed, if that is more.
    reserves_full_prompt: a prompt starts only if all its blocks are free.
    watermark_blocks: blocks that stay free when a waiting request starts beside others.
    cuts_prompts: chunked prefill.
    """

    is_priority: bool = False
    max_scheduled_tokens: int | None = None
    max_active: int | None = None
    long_prefill_threshold: int = 0
    is_threshold_adaptive: bool = False
    reserves_full_prompt: bool = True
    watermark_blocks: int = 0
    cuts_prompts: bool = True
