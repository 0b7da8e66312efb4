"""The free blocks of both memories in the order in which they are taken, and how long blocks are kept.

The lowest retention priority is taken first, then the block that has been free for longest.
"""

from heapq import heappop, heappush
from math import inf

from ifbbench.engine.retention import DEFAULT_PRIORITY, NUM_PRIORITIES

PRIMARY, SECONDARY = 0, 1
NUM_LEVELS = 2
DEFAULT_MIN_OFFLOAD_PRIORITY = 30
_CLAIMED = -1


class EvictionPolicy:
    """A first-in-first-out queue of free blocks for each level, primary (device) and secondary (host), and each
    retention priority from 0 to 100. (TensorRT-LLM's `LRUEvictionPolicy`; the level of a block is stored, as in its
    later version.)

    The queues are doubly linked lists in flat lists of integers, so a block can be removed from the middle, and the
    time of an operation does not depend on the number of blocks. The methods for many blocks are what a prompt of some
    hundred blocks needs: they call nothing for each block.
    """

    def __init__(
        self, num_primary: int, num_secondary: int = 0, min_offload_priority: int = DEFAULT_MIN_OFFLOAD_PRIORITY
    ) -> None:
        num_blocks = num_primary + num_secondary
        self.num_free = [num_primary, num_secondary]
        self._min_offload_priority = min_offload_priority
        # The links of the blocks are followed by those of the queues' ends: a queue is a ring through its end, and the
        # end that a block belongs to stands for its level and its priority.
        self._ends = num_blocks
        self._secondary_ends = num_blocks + NUM_PRIORITIES
        self._next = list(range(num_blocks + NUM_LEVELS * NUM_PRIORITIES))
        self._previous = self._next.copy()
        self._end_of = [self._end(PRIMARY, DEFAULT_PRIORITY)] * num_primary
        self._end_of += [self._end(SECONDARY, DEFAULT_PRIORITY)] * num_secondary
        # One bit for each priority with a queue that is not empty.
        self._filled = [0, 0]
        # For claimed blocks, how long they keep their priority after release; for free ones, when it expires.
        self._durations: dict[int, float] = {}
        self._expiries: dict[int, float] = {}
        self._expiring: list[tuple[float, int]] = []
        # Blocks that became free with a priority above the default one, that returned to it while they were free, and
        # that were taken for others before. Counted once any block has had such a priority.
        self.num_retained = self.num_expired = self.num_lost = 0
        self.any_retained = False
        for first, stop in ((0, num_primary), (num_primary, num_blocks)):
            if first < stop:
                self._fill_queue(first, stop)

    def front(self, level: int) -> int:
        """The block that is taken next; IndexError if none of the level is free."""
        filled = self._filled[level]
        if not filled:
            raise IndexError(f"no block of level {level} is free")
        return self._next[self._end(level, (filled & -filled).bit_length() - 1)]

    def is_worth_offloading(self, block: int) -> bool:
        """Whether the block's priority is high enough for offloading to the host."""
        return self.priority(block) >= self._min_offload_priority

    def is_free(self, block: int) -> bool:
        return self._next[block] != _CLAIMED

    def priority(self, block: int) -> int:
        return (self._end_of[block] - self._ends) % NUM_PRIORITIES

    def level(self, block: int) -> int:
        """PRIMARY or SECONDARY."""
        return PRIMARY if self._end_of[block] < self._secondary_ends else SECONDARY

    def claim(self, block: int, priority: int | None = None, duration_s: float | None = None) -> None:
        """Take the block, and remove it from its queue if it is free. A priority of None leaves it unchanged. The block
        keeps its priority for `duration_s` after its release, without limit if that is None."""
        self.claim_all([block])
        self._retain(block, priority, duration_s)

    def claim_all(self, blocks: list[int]) -> None:
        """`claim` each of `blocks`, and leave its priority unchanged."""
        self._remove(blocks)
        if self._expiries or self._durations:
            for block in blocks:
                self._retain(block, None, None)

    def _remove(self, blocks: list[int]) -> None:
        """Remove those of `blocks` that are free from their queues."""
        following, previous, num_secondary, num_claimed = self._next, self._previous, 0, 0
        for block in blocks:
            after = following[block]
            if after == _CLAIMED:
                continue
            before = previous[block]
            following[before] = after
            previous[after] = before
            following[block] = _CLAIMED
            num_claimed += 1
            end = self._end_of[block]
            if end >= self._secondary_ends:
                num_secondary += 1
            if before == after:
                self._set_filled(end)
        self.num_free[PRIMARY] -= num_claimed - num_secondary
        self.num_free[SECONDARY] -= num_secondary

    def claim_front(self, count: int, priority: int = DEFAULT_PRIORITY, duration_s: float | None = None) -> list[int]:
        """Take the next `count` blocks of the device, of which so many are free."""
        following, taken, left = self._next, list[int](), count
        new_end, keeps_end = self._end(PRIMARY, priority), True
        while left:
            block = self.front(PRIMARY)
            end = self._end_of[block]
            keeps_end = keeps_end and end == new_end
            before = left
            while left and block != end:
                taken.append(block)
                after = following[block]
                following[block] = _CLAIMED
                block = after
                left -= 1
            if self.any_retained and (end - self._ends) % NUM_PRIORITIES > DEFAULT_PRIORITY:
                self.num_lost += before - left
            following[end] = block
            self._previous[block] = end
            if block == end:
                self._set_filled(end)
        self.num_free[PRIMARY] -= count
        self.any_retained |= priority > DEFAULT_PRIORITY
        is_timed = bool(self._expiries or self._durations or duration_s is not None)
        if is_timed or not keeps_end:
            for block in taken:
                self._end_of[block] = new_end
                if is_timed:
                    self._retain(block, None, duration_s)
        return taken

    def release(self, block: int, to_front: bool = False, now_s: float = 0.0) -> None:
        """Put a block without references at the back of its priority's queue, or at its front."""
        self.release_all([block], to_front, now_s)

    def release_all(self, blocks: list[int], to_front: bool = False, now_s: float = 0.0) -> None:
        """`release` each of `blocks`, in this order."""
        following, previous, num_secondary = self._next, self._previous, 0
        for block in blocks:
            end = self._end_of[block]
            before = end if to_front else previous[end]
            after = following[before]
            following[before] = previous[after] = block
            previous[block] = before
            following[block] = after
            if before == after:
                self._set_filled(end)
            if end >= self._secondary_ends:
                num_secondary += 1
        self.num_free[PRIMARY] += len(blocks) - num_secondary
        self.num_free[SECONDARY] += num_secondary
        if self.any_retained:
            self.num_retained += sum([self.priority(block) > DEFAULT_PRIORITY for block in blocks])
        if not self._durations:
            return
        for block in blocks:
            duration_s = self._durations.pop(block, None)
            if duration_s is not None and self.priority(block) != DEFAULT_PRIORITY:
                self._expiries[block] = now_s + duration_s
                heappush(self._expiring, (now_s + duration_s, block))

    def refresh(self, now_s: float) -> None:
        """Move free blocks with an expired priority to the back of the default priority's queue."""
        while self._expiring and self._expiring[0][0] <= now_s:
            expiry_s, block = heappop(self._expiring)
            # The block may have been claimed since, and released with another expiry.
            if self._expiries.get(block) == expiry_s:
                del self._expiries[block]
                self.num_expired += self.priority(block) > DEFAULT_PRIORITY
                self.set_priority(block, DEFAULT_PRIORITY)

    @property
    def next_expiry_s(self) -> float:
        """No priority expires earlier."""
        return self._expiring[0][0] if self._expiring else inf

    def set_priority(self, block: int, priority: int) -> None:
        """Change a block's priority; a free one goes to the back of that queue."""
        is_free = self.is_free(block)
        self._remove([block])
        self._end_of[block] = self._end(self.level(block), priority)
        if is_free:
            self.release(block)

    def swap_levels(self, block: int, other: int) -> None:
        """Two claimed blocks of different levels have exchanged their memory."""
        level, priority, other_priority = self.level(block), self.priority(block), self.priority(other)
        self._end_of[block] = self._end(self.level(other), priority)
        self._end_of[other] = self._end(level, other_priority)

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

    def _fill_queue(self, first: int, stop: int) -> None:
        """Put blocks `first` to `stop - 1`, of one level, into the queue of the default priority."""
        end = self._end_of[first]
        self._next[first:stop] = [*self._next[first + 1 : stop], end]
        self._previous[first:stop] = [end, *self._previous[first : stop - 1]]
        self._next[end], self._previous[end] = first, stop - 1
        self._set_filled(end)

    def _set_filled(self, end: int) -> None:
        """Note whether the queue with this end is empty."""
        level, priority = divmod(end - self._ends, NUM_PRIORITIES)
        is_filled = self._next[end] != end
        self._filled[level] = self._filled[level] & ~(1 << priority) | is_filled << priority

    def _retain(self, block: int, priority: int | None, duration_s: float | None) -> None:
        """Set how long a claimed block keeps its priority after its release, and the priority unless it is None."""
        if priority is not None:
            self._end_of[block] = self._end(self.level(block), priority)
            self.any_retained |= priority > DEFAULT_PRIORITY
        self._expiries.pop(block, None)
        self._durations.pop(block, None)
        if duration_s is not None:
            self._durations[block] = duration_s
