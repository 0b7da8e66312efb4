"""Prompts that wait until each rank has one (TensorRT-LLM's `attention_dp_config`, `enable_balance`).

Ranks wait for each other in every layer, so that a prompt in one of them costs all ranks its time. This rule lets
prompts run in an iteration in which each rank has one. Read in `PyExecutor._balance_adp_requests` of TensorRT-LLM 1.2
(tensorrt_llm/_torch/pyexecutor/py_executor.py), not compared with runs of it.
"""

from collections.abc import Sequence

from ifbbench.kv.attention_window import UNLIMITED
from ifbbench.schedulers.limits import BatchingConfig


class RanksBalance:
    """The state of the rule from one iteration to the next.

    Where each rank has a prompt to run, they run; if each rank is in generation too, after `batching_wait_iters` more
    iterations, in which further prompts may join. Where some rank has none, prompts wait, but not while a rank has
    nothing else to do. The iterations without a prompt in each rank are counted whether a prompt waits or not: with
    every `time_out_iters`-th one prompts run, so that one which arrives alone waits for a part of that.
    """

    def __init__(self, config: BatchingConfig) -> None:
        """config: limits of a rank."""
        self._max_batch_size = config.max_batch_size
        self._time_out_iters = config.attention_dp_time_out_iters
        self._batching_wait_iters = config.attention_dp_batching_wait_iters
        self._waited = self._batched = 0
        # The latest decision: whether prompts were held back, whether for further ones, and whether all ranks generate.
        self.holds = self._is_batching = self._all_generate = False

    def lets_run(self, context: Sequence[int], generation: Sequence[int]) -> bool:
        """Whether the prompts that are scheduled run in this iteration.

        context, generation: number of requests of each rank in these phases.
        """
        self._all_generate = min(generation) > 0
        have_room = max(generation) < self._max_batch_size
        have_prompts = min(context) > 0
        self._is_batching = False
        if have_prompts and have_room:
            self._waited = 0
            if self._all_generate:
                self._is_batching = self._batched < self._batching_wait_iters
                self._batched = self._batched + 1 if self._is_batching else 0
            runs = not self._is_batching
        else:
            self._waited += 1
            runs = self._waited >= self._time_out_iters or not self._all_generate
            if runs:
                self._waited = 0
        self.holds = max(context) > 0 and not runs
        return runs

    @property
    def certain(self) -> int:
        """In how many iterations, the latest one included, prompts are held back as long as the requests are the
        same."""
        if not self.holds:
            return UNLIMITED
        if self._is_batching:
            return self._batching_wait_iters - self._batched + 1
        return self._time_out_iters - self._waited

    def skip(self, iterations: int) -> None:
        """So many more iterations run like the latest one, of which nothing is asked."""
        if self._is_batching:
            self._batched += iterations
        elif self._all_generate:
            self._waited = (self._waited + iterations) % max(self._time_out_iters, 1)
        else:
            self._waited = 0
