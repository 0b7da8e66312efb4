"""The free blocks of both memories in the order in which they are taken, and how long blocks are kept.

The lowest retention priority is taken first, then the block that has been free for longest.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

PRIMARY, SECONDARY = 0, 1
NUM_LEVELS = 2
DEFAULT_PRIORITY = 35
NUM_PRIORITIES = 101
DEFAULT_MIN_OFFLOAD_PRIORITY = 30
_CLAIMED = -1


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


class EvictionPolicy:
    """A first-in-first-out queue of free blocks for each level, primary (device) and secondary (host), and each
    retention priority from 0 to 100. (TensorRT-LLM's `LRUEvictionPolicy`; the level of a block is stored, as in its
    later version.)

    The queues are doubly linked lists in flat arrays, so a block can be removed from the middle, and the time of an
    operation does not depend on the number of blocks.
    """

    def __init__(
        self, num_primary: int, num_secondary: int = 0, min_offload_priority: int = DEFAULT_MIN_OFFLOAD_PRIORITY
    ) -> None:
        num_blocks = num_primary + num_secondary
        self.num_free = [num_primary, num_secondary]
        self._min_offload_priority = min_offload_priority
        self._priority = array("b", [DEFAULT_PRIORITY]) * num_blocks
        self._level = array("b", [PRIMARY]) * num_primary + array("b", [SECONDARY]) * num_secondary
        # The links of the blocks are followed by those of the queues' ends: a queue is a ring through its end.
        self._ends = num_blocks
        links = range(num_blocks + NUM_LEVELS * NUM_PRIORITIES)
        self._next, self._previous = array("i", links), array("i", links)
        # One bit for each priority with a queue that is not empty.
        self._filled = [0, 0]
        self._fill_queue(PRIMARY, 0, num_primary)
        self._fill_queue(SECONDARY, num_primary, num_blocks)
        # For claimed blocks, how long they keep their priority after release; for free ones, when it expires.
        self._durations: dict[int, float] = {}
        self._expiries: dict[int, float] = {}
        self._expiring: list[tuple[float, int]] = []

    def front(self, level: int) -> int:
        """The block that is taken next; IndexError if none of the level is free."""
        filled = self._filled[level]
        if not filled:
            raise IndexError(f"no block of level {level} is free")
        lowest = (filled & -filled).bit_length() - 1
        return self._next[self._end(level, lowest)]

    def is_worth_offloading(self, block: int) -> bool:
        """Whether the block's priority is high enough for offloading to the host."""
        return self._priority[block] >= self._min_offload_priority

    def is_free(self, block: int) -> bool:
        return self._next[block] != _CLAIMED

    def priority(self, block: int) -> int:
        return self._priority[block]

    def level(self, block: int) -> int:
        """PRIMARY or SECONDARY."""
        return self._level[block]

    def claim(self, block: int, priority: int | None = None, duration_s: float | None = None) -> None:
        """Take the block, and remove it from its queue if it is free. A priority of None leaves it unchanged. The block
        keeps its priority for `duration_s` after its release, without limit if that is None."""
        if self.is_free(block):
            self._remove(block)
            if self._expiries:
                self._expiries.pop(block, None)
        if priority is not None:
            self._priority[block] = priority
        if self._durations:
            self._durations.pop(block, None)
        if duration_s is not None:
            self._durations[block] = duration_s

    def release(self, block: int, to_front: bool = False, now_s: float = 0.0) -> None:
        """Put a block without references at the back of its priority's queue, or at its front."""
        self._insert(block, to_front)
        duration_s = self._durations.pop(block, None)
        if duration_s is not None and self._priority[block] != DEFAULT_PRIORITY:
            self._expiries[block] = now_s + duration_s
            heappush(self._expiring, (now_s + duration_s, block))

    def refresh(self, now_s: float) -> None:
        """Move free blocks with an expired priority to the back of the default priority's queue."""
        while self._expiring and self._expiring[0][0] <= now_s:
            expiry_s, block = heappop(self._expiring)
            # The block may have been claimed since, and released with another expiry.
            if self._expiries.get(block) != expiry_s:
                continue
            del self._expiries[block]
            self.set_priority(block, DEFAULT_PRIORITY)

    def set_priority(self, block: int, priority: int) -> None:
        """Change a block's priority; a free one goes to the back of that queue."""
        free = self.is_free(block)
        if free:
            self._remove(block)
        self._priority[block] = priority
        if free:
            self._insert(block, to_front=False)

    def swap_levels(self, block: int, other: int) -> None:
        """Two claimed blocks of different levels have exchanged their memory."""
        self._level[block], self._level[other] = self._level[other], self._level[block]

    def free_blocks(self, level: int) -> list[int]:
        """All free blocks of a level, in the order in which they will be taken."""
        blocks = []
        for priority in range(NUM_PRIORITIES):
            end = self._end(level, priority)
            block = self._next[end]
            while block != end:
                blocks.append(block)
                block = self._next[block]
        return blocks

    def _end(self, level: int, priority: int) -> int:
        return self._ends + level * NUM_PRIORITIES + priority

    def _fill_queue(self, level: int, first: int, stop: int) -> None:
        """Put blocks `first` to `stop - 1` into the queue of the default priority."""
        if first == stop:
            return
        end = self._end(level, DEFAULT_PRIORITY)
        self._next[first:stop] = array("i", range(first + 1, stop + 1))
        self._previous[first:stop] = array("i", range(first - 1, stop - 1))
        self._next[stop - 1] = self._previous[first] = end
        self._next[end], self._previous[end] = first, stop - 1
        self._filled[level] |= 1 << DEFAULT_PRIORITY

    def _insert(self, block: int, to_front: bool) -> None:
        level, priority = self._level[block], self._priority[block]
        end = self._end(level, priority)
        before = end if to_front else self._previous[end]
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self._filled[level] |= 1 << priority
        self.num_free[level] += 1

    def _remove(self, block: int) -> None:
        level, priority = self._level[block], self._priority[block]
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = _CLAIMED
        end = self._end(level, priority)
        if self._next[end] == end:
            self._filled[level] &= ~(1 << priority)
        self.num_free[level] -= 1
