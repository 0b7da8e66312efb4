"""Which part of the devices a new request goes to, with attention data parallelism: each engine's rule.

Only read, not compared: `DefaultADPRouter` of TensorRT-LLM (tensorrt_llm/_torch/pyexecutor/scheduler/adp_router.py),
`DPLBAsyncMPClient.get_core_engine_for_request` of vLLM (vllm/v1/engine/core_client.py), and `round_robin` of
`DataParallelController` of SGLang (python/sglang/srt/managers/data_parallel_controller.py), as of 2026.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.arrays import Rows
from ifbbench.engine.request import Request, RequestTable
from ifbbench.kv.attention_window import ceil_div
from ifbbench.settings.engines import SGLANG, VLLM


class Parts:
    """The parts of the devices with requests of their own. The request in a row belongs to part row % number.

    A request is given to a part when it enters the running set, one after the other. Requests and prompt tokens of each
    part are counted as requests enter and leave; those whose keys and values are only sent to another engine have left
    (TensorRT-LLM takes them out of `active_requests`), though they keep their rows."""

    def __init__(self, table: RequestTable, number: int, engine: str) -> None:
        self._table, self._number = table, number
        self._requests, self._tokens = [0] * number, [0] * number
        self._prompts: dict[int, int] = {}  # by row, the prompt tokens of the requests that are counted
        self._next = 0
        rules: dict[str, Callable[[list[int]], int]] = {VLLM: self._fewest_requests, SGLANG: self._in_turn}
        self._rule = rules.get(engine, self._fewest_tokens)

    def take(self, request: Request) -> int:
        """A free row of the part that `request` goes to, removed from the free rows. IndexError if there is none."""
        free_rows = self._table.free_rows
        by_part: dict[int, int] = {}  # the index of the last free row of each part
        for index in range(len(free_rows) - 1, -1, -1):
            by_part.setdefault(free_rows[index] % self._number, index)
            if len(by_part) == self._number:
                break
        if not by_part:
            raise IndexError("no row is free")
        row = free_rows.pop(by_part[self._rule(sorted(by_part))])
        self._prompts[row] = request.original_prompt_len
        self._requests[row % self._number] += 1
        self._tokens[row % self._number] += request.original_prompt_len
        return row

    def leave(self, row: int) -> None:
        """The request in `row` leaves its part, if it has not left before."""
        prompt_len = self._prompts.pop(row, None)
        if prompt_len is not None:
            self._requests[row % self._number] -= 1
            self._tokens[row % self._number] -= prompt_len

    def _fewest_requests(self, parts: list[int]) -> int:
        """vLLM: requests that wait count fourfold, but none waits for a part here."""
        return min(parts, key=lambda part: self._requests[part])

    def _in_turn(self, parts: list[int]) -> int:
        """SGLang."""
        chosen = min(parts, key=lambda part: (part - self._next) % self._number)
        self._next = (chosen + 1) % self._number
        return chosen

    def _fewest_tokens(self, parts: list[int]) -> int:
        """TensorRT-LLM: the fewest prompt tokens, among parts with fewer requests than each may have if they are
        divided evenly. It sorts several requests that arrive together by length first; here they come in order."""
        running, tokens = self._requests, self._tokens
        expected = max(ceil_div(sum(running) + 1, self._number), max(running))
        open_parts = [part for part in parts if running[part] < expected] or parts
        return min(open_parts, key=lambda part: (tokens[part], running[part]))


def sums_of_parts(rows: Rows, number: int, values: NDArray[np.int64] | None) -> list[int]:
    """The sums of `values`, by row of the table, over the requests of each part that are in `rows`; how many these are
    without values."""
    sums = np.bincount(rows % number, None if values is None else values[rows], number)
    found: list[int] = sums.astype(np.int64).tolist()
    return found
