"""Prompts that wait until every part of the devices has one (TensorRT-LLM's `attention_dp_config`, `enable_balance`).

Parts wait for each other in every layer, so that a prompt in one of them costs all parts its time. This rule lets
prompts run in an iteration in which each part has one. Read in `PyExecutor._balance_adp_requests` of TensorRT-LLM 1.2
(tensorrt_llm/_torch/pyexecutor/py_executor.py), not compared with runs of it.
"""

from collections.abc import Sequence

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import UNLIMITED, ceil_div
from ifbbench.schedulers.limits import BatchingConfig


class PartsBalance:
    """The state of the rule from one iteration to the next.

    Where each part has a prompt to run, they run; if each part is in generation too, after `batching_wait_iters` more
    iterations, in which further prompts may join. Where some part has none, prompts wait, but not while a part has
    nothing else to do. The iterations without a prompt in each part are counted whether a prompt waits or not: with
    every `time_out_iters`-th one prompts run, so that one which arrives alone waits for a part of that.
    """

    def __init__(self, config: BatchingConfig) -> None:
        self.num_parts = config.attention_dp_size
        self._share = ceil_div(config.max_batch_size, self.num_parts)
        self._time_out_iters = config.attention_dp_time_out_iters
        self._batching_wait_iters = config.attention_dp_batching_wait_iters
        self._waited = self._batched = 0
        # The latest decision: whether prompts were held back, whether for further ones, and whether all parts generate.
        self.holds = self._is_batching = self._all_generate = False

    def lets_run(self, context: Sequence[Request], generation: Rows) -> bool:
        """Whether the prompts that are scheduled run in this iteration, beside the generation requests in these
        rows."""
        parts = self.num_parts
        running = np.bincount(generation % parts, minlength=parts)
        self._all_generate = int(running.min()) > 0
        have_room = int(running.max()) < self._share
        have_prompts = len({request.slot % parts for request in context}) == parts
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
        self.holds = len(context) > 0 and not runs
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
