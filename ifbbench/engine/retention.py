"""How long the KV blocks of a request are kept after its end: their retention priorities."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

DEFAULT_PRIORITY = 35
NUM_PRIORITIES = 101


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """Prompt tokens `start` to `end` - 1 (None: to its end) have this priority, from 0 to 100, for `duration_s` seconds
    after their release (None: without limit)."""

    start: int
    end: int | None
    priority: int
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention priorities of a request's blocks (TensorRT-LLM's `KvCacheRetentionConfig`)."""

    ranges: Sequence[RetentionRange] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_s: float | None = None

    def problem(self) -> str | None:
        """What is wrong with the ranges or priorities, or None."""
        for item in self.ranges:
            if item.start < 0 or (item.end is not None and item.end <= item.start):
                return f"retention range {item.start} to {item.end}: expected a positive length"
        if any(item.end is None for item in self.ranges[:-1]):
            return "retention ranges: only the last one may have no end"
        for first, second in pairwise(self.ranges):
            if first.end is not None and second.start < first.end:
                return f"retention ranges: {second.start} is before the end {first.end} of the previous range"
        for priority in (self.decode_priority, *(item.priority for item in self.ranges)):
            if not 0 <= priority < NUM_PRIORITIES:
                return f"retention priority {priority}: expected 0 to {NUM_PRIORITIES - 1}"
        return None

    def of_block(self, index: int, tokens_per_block: int) -> tuple[int | None, float | None]:
        """Priority and duration of the prompt's block `index`: those of the range with its first token, or None."""
        first_token = index * tokens_per_block
        for item in self.ranges:
            if item.start <= first_token and (item.end is None or first_token < item.end):
                return item.priority, item.duration_s
        return None, None


NO_RETENTION = Retention()
