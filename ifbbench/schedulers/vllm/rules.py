"""The settings that only vLLM's scheduler has."""

from dataclasses import dataclass

from ifbbench.kv.attention_window import ceil_div

# Requests whose numbers differ in the remainder of this only arrived together.
TOGETHER = 2**20


@dataclass(frozen=True, slots=True)
class VllmRules:
    """Settings of vLLM's `SchedulerConfig`, beside those that all engines have.

    is_priority: the queue is ordered by priority, and the lowest is pre-empted; else by arrival, and the last.
    max_scheduled_tokens: token budget of an iteration where it is below the input budget (max_num_batched_tokens).
    max_active: running requests, where fewer than max_num_seqs may run.
    long_prefill_threshold: maximum number of prompt tokens of a request in an iteration, 0 for none.
    is_threshold_adaptive: an equal share of the input budget is allowed, if that is more.
    spares_single: that maximum does not hold for a request that is alone.
    reserves_full_prompt: a prompt starts only if all its blocks are free.
    watermark_blocks: blocks that stay free when a waiting request starts beside others.
    cuts_prompts: chunked prefill.
    takes_new_first: free blocks without content are taken before all others; else free blocks are taken in the order in
    which they became free.
    windows: attention window of each group of layers, in tokens; None for all tokens.
    retention_interval: tokens between two places of a prompt from which another request can go on in groups with a
    window; 0 for the ends of prompts and of what they share only, None for every block.
    """

    is_priority: bool = False
    max_scheduled_tokens: int | None = None
    max_active: int | None = None
    long_prefill_threshold: int = 0
    is_threshold_adaptive: bool = False
    spares_single: bool = True
    reserves_full_prompt: bool = True
    watermark_blocks: int = 0
    cuts_prompts: bool = True
    takes_new_first: bool = True
    windows: tuple[int | None, ...] = (None,)
    retention_interval: int | None = 0

    def max_blocks(self, tokens_per_block: int, max_in_flight: int, max_seq_len: int) -> list[int]:
        """Maximum number of blocks of a request in each group, with so many tokens in flight."""
        return [
            ceil_div(max_seq_len, tokens_per_block)
            if window is None
            # One more, because the window may begin within a block.
            else ceil_div(min(window - 1 + max_in_flight, max_seq_len), tokens_per_block) + 1
            for window in self.windows
        ]
