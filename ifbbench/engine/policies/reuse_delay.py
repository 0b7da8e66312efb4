"""Delay for reuse: who lacks a block that another request is about to compute waits until it can be shared."""

from collections.abc import Hashable

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.kv_cache.token_keys import BlockKey
from ifbbench.engine.request import Request


class ReuseDelay:
    """One iteration's expectations: the first missing block of every request that computes its prompt already, and of
    those let in so far.

    A request whose own first missing block is expected waits: it would compute what it can have a moment later. (The
    rule is that of TensorRT-LLM's `beneficialToSkip`; it looks at all full blocks of the prompt, while storing leaves
    the last token out, so of three equal prompts that fill their blocks one starts each iteration.)
    """

    def __init__(self, active: ActiveRequests, kv_cache: KvCache) -> None:
        self._kv_cache = kv_cache
        self._expected: set[tuple[Hashable, BlockKey]] = set()
        self._is_on = kv_cache.reuse.enabled
        if self._is_on:
            for request in active.context:
                if not request.is_first_chunk and (missing := kv_cache.missing_block(request)) is not None:
                    self._expected.add(missing)

    def is_worth_waiting(self, request: Request) -> bool:
        """Whether `request`, which has not started, had better wait. If not, its own missing block is expected now."""
        if not self._is_on or not request.in_context or not request.is_first_chunk:
            return False
        missing = self._kv_cache.missing_block(request)
        if missing is None:
            return False
        if missing in self._expected:
            return True
        self._expected.add(missing)
        return False
