"""Limits of the micro-batch scheduler that follow the lengths of active requests (TensorRT-LLM's `DynamicBatchTuner`).

The averages of prompt length and reserved output length over the latest lengths give the number of average requests
that fill the KV cache. The batch size is taken from a table by that number, and the token budget is the one with which
such a batch takes in prompts as fast as requests end. The capacity scheduler keeps the static limits.
"""

from collections import deque
from math import ceil, log2

from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.micro_batch import MicroBatchScheduler

# (capacity, batch size): the first row with a larger capacity decides. Above the table, batch sizes go down to a
# multiple of GRANULARITY where that is less than THRESHOLD away.
BATCH_SIZES = ((144, 128), (336, 256), (672, 512), (832, 768), (1280, 1024), (1664, 1536))
GRANULARITY, THRESHOLD = 512, 128
# (ratio of prompt to output, token budget): the least budget of workloads with a larger ratio.
LEAST_TOKENS = ((2.0, 8192), (0.5, 4096), (0.0, 2048))


def tuned_batch_size(capacity: int) -> int:
    """The batch size where the KV cache has room for `capacity` average requests."""
    for above, batch_size in BATCH_SIZES:
        if capacity < above:
            return batch_size
    rounded = capacity // GRANULARITY * GRANULARITY
    return rounded if capacity < rounded + THRESHOLD else capacity


def tuned_num_tokens(batch_size: int, prompt_len: float, new_tokens: float) -> int:
    """The token budget for `batch_size` requests of these average lengths: a power of two."""
    ratio = prompt_len / new_tokens
    steady = int(batch_size * ratio + batch_size)
    least = next(tokens for above, tokens in LEAST_TOKENS if ratio > above)
    return max(1 << ceil(log2(steady)), least)


class DynamicLimits:
    """Sets the limits of `micro_batch` before each iteration, never above those of `config`.

    As in TensorRT-LLM, every active request counts in each iteration, with what it reserves. Once all of the latest
    lengths are of the same active requests, another iteration with these changes nothing.

    is_settled: whether that is so.
    """

    def __init__(self, config: BatchingConfig, micro_batch: MicroBatchScheduler) -> None:
        self._config = config
        self._micro_batch = micro_batch
        self._lengths: deque[tuple[int, int]] = deque(maxlen=config.tuning_window)
        self.is_settled = False
        # `num_changes` of the active requests at the latest update, and how many lengths were taken in since then.
        self._num_changes, self._taken = -1, 0
        # Whether lengths were taken in after the limits were set.
        self._has_skipped = False

    def update(self, active: ActiveRequests) -> bool:
        """Take in the lengths of all active requests, and set the limits of the next iteration. Returns whether it may
        have changed them."""
        if self._num_changes != active.num_changes:
            self._num_changes, self._taken = active.num_changes, 0
        elif self.is_settled and not self._has_skipped:
            return False
        self._take_in(active)
        self._has_skipped = False
        if self._lengths:
            self._set_limits(active)
        return True

    def skip(self, active: ActiveRequests, updates: int) -> None:
        """Take in the lengths of so many further updates with the same active requests, of which no limit is asked."""
        for _ in range(updates):
            if self.is_settled:
                return
            self._take_in(active)
            self._has_skipped = True

    @property
    def least(self) -> int:
        """The minimum of both limits, in requests and in tokens: whatever the lengths, at least so many fit."""
        batch_size = min(BATCH_SIZES[0][1], self._config.micro_batch_size)
        return min(batch_size, self._config.token_budget, *[tokens for _, tokens in LEAST_TOKENS])

    def _take_in(self, active: ActiveRequests) -> None:
        lengths = [(request.prompt_len, request.max_new_tokens) for request in active]
        self._lengths.extend(lengths)
        self._taken += len(lengths)
        self.is_settled = self._taken >= self._config.tuning_window

    def _set_limits(self, active: ActiveRequests) -> None:
        config, count = self._config, len(self._lengths)
        prompt_len = sum(prompt for prompt, _ in self._lengths) / count
        new_tokens = sum(new for _, new in self._lengths) / count
        if config.tunes_batch_size:
            average = int(prompt_len), int(new_tokens), 0, config.max_beam_width
            capacity = min(blocks // window.blocks_to_completion(*average) for window, blocks in config.pools)
            self._micro_batch.max_batch_size = min(tuned_batch_size(capacity), config.micro_batch_size)
        if config.tunes_num_tokens:
            budget = tuned_num_tokens(self._micro_batch.max_batch_size, prompt_len, new_tokens)
            # What was admitted must fit: a chunk, or a whole prompt, which TensorRT-LLM's scheduler would never run.
            if config.chunk_unit is None:
                budget = max(budget, max((request.prompt_len for request in active.context), default=0))
            else:
                budget = max(budget, config.chunk_unit)
            self._micro_batch.token_budget = min(budget, config.token_budget)
