"""An iteration's statistics under the names of TensorRT-LLM's batch manager."""

from time import gmtime, strftime
from typing import Any

from ifbbench.engine.batching_type import BatchingType
from ifbbench.engine.records import CacheState, IterationRecord

CACHE_FIELDS = (
    "Max KV cache blocks", "Free KV cache blocks", "Used KV cache blocks", "Tokens per KV cache block",
    "Allocated total KV cache blocks", "Allocated new KV cache blocks", "Reused KV cache blocks",
)  # fmt: skip
COMMON_FIELDS = (
    "Timestamp", "Iteration Counter", "Active Request Count", "Max Request Count", *CACHE_FIELDS, "Scheduled Requests",
    "Context Requests",
)  # fmt: skip
INFLIGHT_FIELDS = ("Generation Requests", "Total Context Tokens", "MicroBatch ID", "Paused Requests")
STATIC_FIELDS = ("Total Generation Tokens", "Total Context Tokens", "Empty Generation Slots")
TIMESTAMP_FORMAT = "%m-%d-%Y %H:%M:%S"


class IterationStatistics:
    """Makes the documented fields of each iteration, those of the batching type included.

    max_requests: the engine's limit of active requests. names: of the fields, in their order.
    """

    def __init__(self, batching_type: BatchingType, max_requests: int) -> None:
        self._is_static = batching_type is BatchingType.V1
        self._max_requests = max_requests
        self.names = (*COMMON_FIELDS, *(STATIC_FIELDS if self._is_static else INFLIGHT_FIELDS))
        self._second = -1
        self._timestamp = ""

    def fields(self, record: IterationRecord) -> dict[str, Any]:
        """Documented name to value. Blocks and tokens are counts; the time stamp is in UTC."""
        return dict(zip(self.names, self.values(record), strict=True))

    def values(self, record: IterationRecord) -> tuple[str | int | None, ...]:
        """The fields' values, in the order of `names`."""
        chunks = len(record.context)
        scheduled = chunks + record.num_generation + record.idle
        # Each step of a static batch is an iteration: its members make a token each, or leave their slot empty.
        of_type = (
            (chunks + record.num_generation, record.num_context_tokens, record.idle)
            if self._is_static
            else (record.num_generation, record.num_context_tokens, record.micro_batch, len(record.paused))
        )
        return (
            self.format_timestamp(record.timestamp), record.iteration, record.active, self._max_requests,
            *_cache_values(record.cache), scheduled, chunks, *of_type,
        )  # fmt: skip

    def format_timestamp(self, timestamp: float) -> str:
        """Month-day-year hour:minute:second of seconds since the Unix epoch, in UTC. Formatted once a second."""
        if not self._second <= timestamp < self._second + 1:
            self._second = int(timestamp)
            self._timestamp = strftime(TIMESTAMP_FORMAT, gmtime(self._second))
        return self._timestamp


def _cache_values(cache: CacheState) -> tuple[int | None, ...]:
    """Blocks; None of a cache that has none."""
    most, used, size, total, new, reused, *_ = cache
    free = None if most is None or used is None else most - used
    return most, free, used, size, total, new, reused
