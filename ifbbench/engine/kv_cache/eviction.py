"""Which free block is taken next: the lowest retention priority first, then the one that has been free for longest."""

from array import array
from heapq import heappop, heappush

PRIMARY, SECONDARY = 0, 1
NUM_LEVELS = 2
DEFAULT_PRIORITY = 35
NUM_PRIORITIES = 101
DEFAULT_MIN_OFFLOAD_PRIORITY = 30
_CLAIMED = -1


class EvictionPolicy:
    """The free blocks of both levels, primary (device) and secondary (host): a first-in-first-out queue for each
    retention priority from 0 to 100.

    The queues are doubly linked lists in flat arrays, so any block can be taken out of the middle, and every operation
    takes the same time however many blocks there are. (TensorRT-LLM's `LRUEvictionPolicy`. Like its later version this
    one remembers in which level's queue a block lies.)
    """

    def __init__(
        self, num_primary: int, num_secondary: int = 0, min_offload_priority: int = DEFAULT_MIN_OFFLOAD_PRIORITY
    ) -> None:
        num_blocks = num_primary + num_secondary
        self.num_free = [num_primary, num_secondary]
        self._min_offload_priority = min_offload_priority
        self._priority = array("b", [DEFAULT_PRIORITY]) * num_blocks
        self._level = array("b", [PRIMARY]) * num_primary + array("b", [SECONDARY]) * num_secondary
        # Behind the blocks' links lie those of the queues' ends: a queue is a ring through its end.
        self._ends = num_blocks
        links = range(num_blocks + NUM_LEVELS * NUM_PRIORITIES)
        self._next, self._previous = array("i", links), array("i", links)
        # A bit for each priority whose queue is not empty.
        self._filled = [0, 0]
        self._string_up(PRIMARY, 0, num_primary)
        self._string_up(SECONDARY, num_primary, num_blocks)
        # How long a claimed block is to keep its priority once it is free, and when free ones lose it.
        self._durations: dict[int, float] = {}
        self._expiries: dict[int, float] = {}
        self._expiring: list[tuple[float, int]] = []

    def front(self, level: int) -> int:
        """The block to be taken next; IndexError if none of the level is free."""
        filled = self._filled[level]
        if not filled:
            raise IndexError(f"no block of level {level} is free")
        lowest = (filled & -filled).bit_length() - 1
        return self._next[self._end(level, lowest)]

    def is_worth_offloading(self, block: int) -> bool:
        """Whether the block's priority is high enough to keep it on the host."""
        return self._priority[block] >= self._min_offload_priority

    def is_free(self, block: int) -> bool:
        return self._next[block] != _CLAIMED

    def priority(self, block: int) -> int:
        return self._priority[block]

    def level(self, block: int) -> int:
        """PRIMARY or SECONDARY."""
        return self._level[block]

    def claim(self, block: int, priority: int | None = None, duration_s: float | None = None) -> None:
        """Take the block, out of its queue if it is free. A priority of None leaves it its own; it keeps it for
        `duration_s` after its release, None being for ever."""
        if self.is_free(block):
            self._take_out(block)
            self._expiries.pop(block, None)
        if priority is not None:
            self._priority[block] = priority
        self._durations.pop(block, None)
        if duration_s is not None:
            self._durations[block] = duration_s

    def take_front(self, level: int, priority: int, duration_s: float | None = None) -> int:
        """`front` and `claim` in one, for what is done most often."""
        filled = self._filled[level]
        if not filled:
            raise IndexError(f"no block of level {level} is free")
        lowest = filled & -filled
        end = self._end(level, lowest.bit_length() - 1)
        block = self._next[end]
        after = self._next[block]
        self._next[end], self._previous[after] = after, end
        self._next[block] = _CLAIMED
        if after == end:
            self._filled[level] = filled & ~lowest
        self.num_free[level] -= 1
        self._priority[block] = priority
        if self._expiries:
            self._expiries.pop(block, None)
        if self._durations:
            self._durations.pop(block, None)
        if duration_s is not None:
            self._durations[block] = duration_s
        return block

    def release(self, block: int, to_front: bool = False, now_s: float = 0.0) -> None:
        """Put a block that nobody holds any more to the back of its priority's queue, or to its front."""
        self._put_in(block, to_front)
        duration_s = self._durations.pop(block, None)
        if duration_s is not None and self._priority[block] != DEFAULT_PRIORITY:
            self._expiries[block] = now_s + duration_s
            heappush(self._expiring, (now_s + duration_s, block))

    def refresh(self, now_s: float) -> None:
        """Free blocks whose time is over go to the back of the default priority's queue."""
        while self._expiring and self._expiring[0][0] <= now_s:
            expiry_s, block = heappop(self._expiring)
            # It may have been claimed since, and released with another time.
            if self._expiries.get(block) != expiry_s:
                continue
            del self._expiries[block]
            self.set_priority(block, DEFAULT_PRIORITY)

    def set_priority(self, block: int, priority: int) -> None:
        """Change a block's priority; a free one goes to the back of that queue."""
        free = self.is_free(block)
        if free:
            self._take_out(block)
        self._priority[block] = priority
        if free:
            self._put_in(block, to_front=False)

    def swap_levels(self, block: int, other: int) -> None:
        """Two claimed blocks of different levels have exchanged their memory."""
        self._level[block], self._level[other] = self._level[other], self._level[block]

    def free_blocks(self, level: int) -> list[int]:
        """All free blocks of a level, in the order in which they would be taken."""
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

    def _string_up(self, level: int, first: int, stop: int) -> None:
        """Put blocks `first` to `stop - 1` into the queue of the default priority."""
        if first == stop:
            return
        end = self._end(level, DEFAULT_PRIORITY)
        self._next[first:stop] = array("i", range(first + 1, stop + 1))
        self._previous[first:stop] = array("i", range(first - 1, stop - 1))
        self._next[stop - 1] = self._previous[first] = end
        self._next[end], self._previous[end] = first, stop - 1
        self._filled[level] |= 1 << DEFAULT_PRIORITY

    def _put_in(self, block: int, to_front: bool) -> None:
        level, priority = self._level[block], self._priority[block]
        end = self._end(level, priority)
        before = end if to_front else self._previous[end]
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self._filled[level] |= 1 << priority
        self.num_free[level] += 1

    def _take_out(self, block: int) -> None:
        level, priority = self._level[block], self._priority[block]
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = _CLAIMED
        end = self._end(level, priority)
        if self._next[end] == end:
            self._filled[level] &= ~(1 << priority)
        self.num_free[level] -= 1
