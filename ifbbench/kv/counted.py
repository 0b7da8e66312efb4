"""A paged KV cache of which the blocks are only counted, for simulated devices: they read no block tables."""

from bisect import bisect_right
from heapq import heappop, heappush
from itertools import accumulate

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import UNLIMITED, AttentionWindow, ceil_div
from ifbbench.kv.blocks import BlockCounters, OutOfBlocks
from ifbbench.kv.paged import PagedCache


class StepGroup:
    """Sequences in generation that register their tokens in the same steps: those of a micro batch. The ones that start
    a block in the same steps are counted together, so that a step costs the same for one sequence as for a thousand.

    count: sequences. tokens: that these have registered together. step: steps so far. settled: the step up to which
    their entries of `registered` are counted. slots: of the sequences.
    growing: [tokens per block], the blocks that sequences start in each step with this remainder. wraps: the steps
    before which sequences reach the capacity, with their slots; from then on they take no blocks, and are among
    num_wrapped.
    """

    def __init__(self, size: int) -> None:
        self.count = self.tokens = self.step = self.settled = self.num_wrapped = 0
        self.growing = [0] * size
        self.wraps: list[tuple[int, int]] = []
        self.slots: set[int] = set()

    @property
    def max_steps(self) -> int:
        """In how many steps the next sequence reaches the capacity."""
        return self.wraps[0][0] - self.step if self.wraps else UNLIMITED

    def starting(self, steps: int) -> list[int]:
        """[steps], blocks that are started in each of the next steps, at most `max_steps`."""
        return in_turn(self.growing, self.step % len(self.growing), steps)


class CountedCache(PagedCache):
    """Does what `KvCacheManager` does without reuse, but gives blocks no ids. Sequences with several beams must not
    reach the capacity: the blocks that beams share would have to be known then.

    groups: the sequences in generation, those of each micro batch. Their entries of `registered` lack the steps since
    `_settle`. count: how many they are. micro_batches: by slot.
    """

    def __init__(self, attention_window: AttentionWindow, num_blocks: int, slots: int, num_groups: int = 1) -> None:
        super().__init__(attention_window, num_blocks, slots)
        self.block_tables = np.zeros((slots, attention_window.max_beam_width, 0), np.int32)
        self._size, self._capacity = attention_window.tokens_per_block, attention_window.capacity
        self.groups = [StepGroup(self._size) for _ in range(num_groups)]
        self.count = 0
        self._free = num_blocks
        self._counters = BlockCounters()
        # By slot, the blocks of the complete sequence, and those that it held before it was in generation. Blocks that
        # its beams share count once.
        self._all_blocks: dict[int, int] = {}
        self._held_before: dict[int, int] = {}
        # By slot, of sequences with several beams: their number, and blocks of one beam before it was in generation.
        self._beams: dict[int, tuple[int, int]] = {}
        self._group_of: dict[int, StepGroup] = {}
        self.micro_batches = np.zeros(slots, np.int64)
        # Blocks that the sequences in generation may still take.
        self._reserved = 0

    # For schedulers.

    @property
    def free_blocks(self) -> int:
        return self._free

    def step_needs(self, rows: Rows, draft_tokens: Rows | int = 0) -> Rows:
        self._settle()
        return super().step_needs(rows, draft_tokens)

    def reserved_blocks(self, rows: Rows) -> int:
        if len(rows) == self.count:
            return self._reserved
        return sum([self._blocks_to_come(slot) for slot in rows.tolist()])

    def plan_release(self) -> "CountedRelease":
        return CountedRelease(self)

    # For the loop.

    def holds(self, slot: int) -> bool:
        return slot in self._all_blocks

    def cached_tokens(self, rows: Rows) -> Rows:
        self._settle()
        return super().cached_tokens(rows)

    def add_request(self, request: Request, now_s: float = 0.0) -> int:
        slot, window, prompt_len, beams = request.slot, self.attention_window, request.prompt_len, request.beam_width
        self._of_waiting.pop(slot, None)
        held = of_beam = window.prompt_blocks(prompt_len)
        if beams > 1:
            held = window.blocks_of_beams(prompt_len, 0, beams)
        self._take(held)
        if beams > 1:
            self._beams[slot] = beams, of_beam
        self._beam_width[slot] = beams
        self._held_before[slot] = held
        to_come = window.blocks_to_completion(prompt_len, request.max_new_tokens, of_beam, beams)
        self._all_blocks[slot] = held + to_come
        self.registered[slot] = registered = prompt_len + window.bubble
        self._limit[slot] = registered + request.max_new_tokens
        self._filled += min(registered, self._capacity)
        return 0

    def begin_generation(self, slot: int, micro_batch: int = 0) -> None:
        group = self._group_of[slot] = self.groups[micro_batch]
        self.micro_batches[slot] = micro_batch
        registered, step = int(self.registered[slot]), group.step
        self.registered[slot] = registered - (step - group.settled)
        group.slots.add(slot)
        group.count += 1
        group.tokens += registered
        self.count += 1
        self._reserved += self._all_blocks[slot] - self._held_before[slot]
        if registered >= self._capacity:
            group.num_wrapped += 1
            return
        group.growing[(step - registered) % self._size] += self._width(slot)
        if self._limit[slot] >= self._capacity:
            heappush(group.wraps, (step + self._capacity - registered, slot))

    def end_generation(self, slot: int) -> None:
        group, registered = self._group_of[slot], self._registered(slot)
        self._reserved -= self._blocks_to_come(slot)
        self._held_before[slot] = self.held_blocks(slot)
        if slot in self._beams:
            self._beams[slot] = self._width(slot), ceil_div(registered, self._size)
        del self._group_of[slot]
        group.slots.remove(slot)
        self.registered[slot] = registered
        group.count -= 1
        group.tokens -= registered
        self.count -= 1
        if registered >= self._capacity:
            group.num_wrapped -= 1
        else:
            group.growing[(group.step - registered) % self._size] -= self._width(slot)

    def join(self, rows: Rows, micro_batch: int) -> None:
        """The sequences in `rows`, which are in generation, are in this micro batch from now on."""
        for slot in rows[self.micro_batches[rows] != micro_batch].tolist():
            self.end_generation(slot)
            self.begin_generation(slot, micro_batch)

    def add_tokens(self, rows: Rows) -> Rows:
        """All of `rows` are in one micro batch."""
        self._settle()
        registered: Rows = self.registered[rows]
        if not len(rows):
            return registered
        group = self._group_of[int(rows[0])]
        others = group.slots.difference(rows.tolist()) if len(rows) < group.count else set[int]()
        number = self.groups.index(group)
        for slot in others:
            self.end_generation(slot)
        self.take(1, number)
        for slot in others:
            self.begin_generation(slot, number)
        return registered

    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None:
        if slot in self._group_of:
            self.end_generation(slot)
        self._of_waiting.pop(slot, None)  # a resumed request has another prompt
        self._free += self._held_before.pop(slot)
        self._filled -= min(int(self.registered[slot]), self._capacity)
        self.registered[slot] = 0
        del self._all_blocks[slot]
        self._beams.pop(slot, None)

    # Many steps at once. With several groups, each has its turn, and steps are those of all groups together.

    def tokens_of(self, group: int) -> int:
        """Tokens that the sequences of a group have registered together."""
        return self.groups[group].tokens

    def max_steps(self, first: int = 0) -> int:
        """The maximum number of steps from now on, up to the one with which a sequence reaches the capacity. first: the
        group that has its turn."""
        count = len(self.groups)
        return min([turn + self.groups[(first + turn) % count].max_steps * count for turn in range(count)])

    def fitting_steps(self, steps: int, until_block: bool = False, first: int = 0) -> int:
        """How many of the next `steps` steps, at most `max_steps`, take no more blocks than are free; with
        `until_block`, none after the first one."""
        width = self.attention_window.max_beam_width
        if not until_block and self.count * width * ceil_div(steps, self._size) <= self._free:
            return steps
        return fitting_steps(list(accumulate(self._starting(steps, first))), self._free, until_block)

    def take(self, steps: int, first: int = 0) -> tuple[list[int], list[int], list[int]]:
        """Register a token of each sequence of a group in each of `steps` steps, at most those of `fitting_steps`.
        Returns the blocks, the positions and the blocks without known tokens (which all are) that all together have
        taken after each step since the first, [steps]."""
        blocks, count = list(accumulate(self._starting(steps, first))), len(self.groups)
        filled = [0] * steps
        self._take(blocks[-1])
        self._reserved -= blocks[-1]
        for turn in range(min(count, steps)):
            group, its_steps = self.groups[(first + turn) % count], ceil_div(steps - turn, count)
            filling = group.count - group.num_wrapped
            if count > 1:
                filled[turn::count] = [filling] * its_steps
            self._filled += filling * its_steps
            self._advance(group, its_steps)
        before = blocks[0]
        more_blocks = [after - before for after in blocks]
        if count == 1:
            return more_blocks, [step * filling for step in range(steps)], more_blocks
        filled[0] = 0
        return more_blocks, list(accumulate(filled)), more_blocks

    def _advance(self, group: StepGroup, steps: int) -> None:
        group.step += steps
        group.tokens += group.count * steps
        while group.wraps and group.wraps[0][0] == group.step:
            wrap = heappop(group.wraps)
            is_new = not group.wraps or group.wraps[0] != wrap  # a slot may have been given to another request
            # Not if the sequence has left, or took no part in a step: then it has another entry.
            if is_new and wrap[1] in group.slots and self._registered(wrap[1]) == self._capacity:
                group.growing[(group.step - self._capacity) % self._size] -= 1
                group.num_wrapped += 1

    def _starting(self, steps: int, first: int) -> list[int]:
        """[steps], blocks that are taken in each of the next steps."""
        count = len(self.groups)
        if count == 1:
            return self.groups[0].starting(steps)
        starting = [0] * steps
        for turn in range(min(count, steps)):
            starting[turn::count] = self.groups[(first + turn) % count].starting(ceil_div(steps - turn, count))
        return starting

    # For records and tests.

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._free

    @property
    def counters(self) -> BlockCounters:
        return self._counters

    @property
    def held_positions(self) -> int:
        return self.num_used * self._size

    @property
    def filled_positions(self) -> int:
        return self._filled

    def held_blocks(self, slot: int) -> int:
        """Blocks of the sequence in `slot`, those that its beams share once."""
        held = self._held_before[slot]
        if slot not in self._group_of:
            return held
        if slot in self._beams:
            beams, before = self._beams[slot]
            held += beams * (ceil_div(self._registered(slot), self._size) - before)
        else:
            held = max(held, ceil_div(min(self._registered(slot), self._capacity), self._size))
        return held

    def check_consistency(self) -> None:
        """Raise AssertionError unless all sums agree with the sequences."""
        self._settle()
        slots = list(self._all_blocks)
        assert self.num_used == sum(self.held_blocks(slot) for slot in slots), "the number of free blocks is wrong"
        filled = np.minimum(self.registered[slots], self._capacity).sum()
        assert self._filled == filled, "the number of filled cache positions disagrees with the sequences"
        assert self.count == len(self._group_of), "the number of sequences in generation is wrong"
        assert self._reserved == sum(self._blocks_to_come(slot) for slot in self._group_of), "reserved blocks are wrong"
        for group in self.groups:
            its = sorted(group.slots)
            assert its == sorted(slot for slot in self._group_of if self._group_of[slot] is group), "groups are wrong"
            assert (group.count, group.tokens) == (len(its), self.registered[its].sum()), "sums are wrong"
            growing = [slot for slot in its if self.registered[slot] < self._capacity]
            remainders, widths = (group.step - self.registered[growing]) % self._size, self._beam_width[growing]
            coming = np.bincount(remainders, widths, minlength=self._size).tolist()
            assert group.growing == coming, "coming blocks are wrong"

    def _take(self, count: int) -> None:
        if count > self._free:
            raise OutOfBlocks(f"{count} KV cache blocks are needed, {self._free} of {self.num_blocks} are free")
        self._free -= count
        self._counters.allocated_total += count
        self._counters.allocated_new += count

    def _blocks_to_come(self, slot: int) -> int:
        return self._all_blocks[slot] - self.held_blocks(slot)

    def _width(self, slot: int) -> int:
        """Beams of the sequence in `slot`."""
        return self._beams[slot][0] if slot in self._beams else 1

    def _registered(self, slot: int) -> int:
        """Tokens of a sequence in generation."""
        group = self._group_of[slot]
        return int(self.registered[slot]) + group.step - group.settled

    def _settle(self) -> None:
        for group in self.groups:
            if group.settled < group.step:
                self.registered[list(group.slots)] += group.step - group.settled
                group.settled = group.step


def in_turn(numbers: list[int], first: int, count: int) -> list[int]:
    """[count], `numbers` from the one at `first` on, again and again."""
    if first + count <= len(numbers):
        return numbers[first : first + count]
    repeated = numbers[first:] + numbers[:first]
    return (repeated * ceil_div(count, len(numbers)))[:count]


def fitting_steps(blocks: list[int], free: int, until_block: bool) -> int:
    """How many steps take no more blocks than are free; with `until_block`, none after the first one. blocks: [steps],
    those taken up to each step."""
    limit = min(free, blocks[0] if until_block else blocks[-1])
    return len(blocks) if blocks[-1] <= limit else bisect_right(blocks, limit)


class CountedRelease:
    """The free blocks after planned removals of sequences."""

    def __init__(self, cache: CountedCache) -> None:
        self.free_blocks = cache.free_blocks
        self._cache = cache

    def release(self, slot: int) -> None:
        """Plan the removal of the sequence in `slot`."""
        self.free_blocks += self._cache.held_blocks(slot)
