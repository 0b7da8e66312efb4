"""An iteration's statistics under the names of TensorRT-LLM's batch manager."""

from time import gmtime, strftime
from typing import Any

from ifbbench.batching.batching_type import BatchingType
from ifbbench.batching.records import CacheState, IterationRecord

CACHE_FIELDS = (
    "Max KV cache blocks", "Free KV cache blocks", "Used KV cache blocks", "Tokens per KV cache block",
    "Allocated total KV cache blocks", "Allocated new KV cache blocks", "Reused KV cache blocks",
)  # fmt: skip
TIMESTAMP_FORMAT = "%m-%d-%Y %H:%M:%S"


class IterationStatistics:
    """Makes the documented fields of each iteration, those of the batching type included.

    max_requests: the engine's limit of active requests.
    """

    def __init__(self, batching_type: BatchingType, max_requests: int) -> None:
        self._is_static = batching_type is BatchingType.V1
        self._max_requests = max_requests
        self._second = -1
        self._timestamp = ""

    def fields(self, record: IterationRecord) -> dict[str, Any]:
        """Documented name to value. Blocks and tokens are counts; the time stamp is in UTC."""
        return {
            "Timestamp": self._format_timestamp(record.timestamp),
            "Iteration Counter": record.iteration,
            "Active Request Count": record.active,
            "Max Request Count": self._max_requests,
            **_cache_fields(record.cache),
            "Scheduled Requests": len(record.context) + record.num_generation + record.idle,
            "Context Requests": len(record.context),
            **(self._static(record) if self._is_static else self._inflight(record)),
        }

    def _inflight(self, record: IterationRecord) -> dict[str, int]:
        return {
            "Generation Requests": record.num_generation,
            "Total Context Tokens": record.num_context_tokens,
            "MicroBatch ID": record.micro_batch,
            "Paused Requests": len(record.paused),
        }

    def _static(self, record: IterationRecord) -> dict[str, int]:
        """Each step of a static batch is an iteration: its members make a token each, or leave their slot empty."""
        return {
            "Total Generation Tokens": len(record.context) + record.num_generation,
            "Total Context Tokens": record.num_context_tokens,
            "Empty Generation Slots": record.idle,
        }

    def _format_timestamp(self, timestamp: float) -> str:
        """Formatted once a second."""
        if int(timestamp) != self._second:
            self._second = int(timestamp)
            self._timestamp = strftime(TIMESTAMP_FORMAT, gmtime(self._second))
        return self._timestamp


def _cache_fields(cache: CacheState) -> dict[str, int | None]:
    """Blocks; null of a cache that has none."""
    if cache.max_blocks is None or cache.used_blocks is None or cache.counters is None:
        return dict.fromkeys(CACHE_FIELDS)
    counters = cache.counters
    values = (
        cache.max_blocks, cache.max_blocks - cache.used_blocks, cache.used_blocks, cache.tokens_per_block,
        counters.allocated_total, counters.allocated_new, counters.reused,
    )  # fmt: skip
    return dict(zip(CACHE_FIELDS, values, strict=True))
