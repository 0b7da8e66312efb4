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


class CountedCache(PagedCache):
    """Does what `KvCacheManager` does without reuse for sequences with one beam, but gives blocks no ids.

    The sequences in generation register their tokens in the same steps, so the ones that start a block in the same
    steps are counted together, and a step costs the same for one sequence as for a thousand. Their entries of
    `registered` lack the steps since `_settle`.

    count: sequences in generation. tokens: that these have registered together.
    """

    def __init__(self, attention_window: AttentionWindow, num_blocks: int, slots: int) -> None:
        super().__init__(attention_window, num_blocks, slots)
        self.block_tables = np.zeros((slots, 1, 0), np.int32)
        self.count = self.tokens = 0
        self._size, self._capacity = attention_window.tokens_per_block, attention_window.capacity
        self._free = num_blocks
        self._counters = BlockCounters()
        # By slot, the blocks of the complete sequence, and those that it held before it was in generation.
        self._all_blocks: dict[int, int] = {}
        self._held_before: dict[int, int] = {}
        self._generating: set[int] = set()
        self._step = self._settled = 0
        # [tokens per block], the sequences in generation that start a block in each step with this remainder.
        self._growing = [0] * self._size
        # The steps before which sequences reach the capacity, with their slots. From then on they take no blocks.
        self._wraps: list[tuple[int, int]] = []
        self._num_wrapped = 0
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
        slot, window, prompt_len = request.slot, self.attention_window, request.prompt_len
        self._of_waiting.pop(slot, None)
        self._take(held := window.prompt_blocks(prompt_len))
        self._held_before[slot] = held
        self._all_blocks[slot] = held + window.blocks_to_completion(prompt_len, request.max_new_tokens, held)
        self.registered[slot] = registered = prompt_len + window.bubble
        self._limit[slot] = registered + request.max_new_tokens
        self._filled += min(registered, self._capacity)
        return 0

    def begin_generation(self, slot: int) -> None:
        registered, step = int(self.registered[slot]), self._step
        self.registered[slot] = registered - (step - self._settled)
        self._generating.add(slot)
        self.count += 1
        self.tokens += registered
        self._reserved += self._all_blocks[slot] - self._held_before[slot]
        if registered >= self._capacity:
            self._num_wrapped += 1
            return
        self._growing[(step - registered) % self._size] += 1
        if self._limit[slot] >= self._capacity:
            heappush(self._wraps, (step + self._capacity - registered, slot))

    def end_generation(self, slot: int) -> None:
        registered, step = self._registered(slot), self._step
        self._reserved -= self._blocks_to_come(slot)
        self._held_before[slot] = self.held_blocks(slot)
        self._generating.remove(slot)
        self.registered[slot] = registered
        self.count -= 1
        self.tokens -= registered
        if registered >= self._capacity:
            self._num_wrapped -= 1
        else:
            self._growing[(step - registered) % self._size] -= 1

    def add_tokens(self, rows: Rows) -> Rows:
        self._settle()
        registered: Rows = self.registered[rows]
        others = self._generating.difference(rows.tolist()) if len(rows) < self.count else set[int]()
        for slot in others:
            self.end_generation(slot)
        self.take(1)
        for slot in others:
            self.begin_generation(slot)
        return registered

    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None:
        if slot in self._generating:
            self.end_generation(slot)
        self._of_waiting.pop(slot, None)  # a resumed request has another prompt
        self._free += self._held_before.pop(slot)
        self._filled -= min(int(self.registered[slot]), self._capacity)
        self.registered[slot] = 0
        del self._all_blocks[slot]

    # Many steps at once.

    @property
    def max_steps(self) -> int:
        """In how many steps the next sequence reaches the capacity."""
        return self._wraps[0][0] - self._step if self._wraps else UNLIMITED

    def fitting_steps(self, steps: int, until_block: bool = False) -> int:
        """How many of the next `steps` steps, at most `max_steps`, take no more blocks than are free; with
        `until_block`, none after the first one."""
        if not until_block and self.count * ceil_div(steps, self._size) <= self._free:
            return steps
        return fitting_steps(self._blocks_ahead(steps), self._free, until_block)

    def take(self, steps: int) -> tuple[list[int], list[int], list[int]]:
        """Register a token of each sequence in generation in each of `steps` steps, at most those of `fitting_steps`.
        Returns the blocks, the places and the blocks without known tokens (which all are) that all together have taken
        after each step since the first, [steps]."""
        blocks, filling = self._blocks_ahead(steps), self.count - self._num_wrapped
        first = blocks[0]
        self._take(blocks[steps - 1])
        self._reserved -= blocks[steps - 1]
        self._step += steps
        self.tokens += self.count * steps
        self._filled += filling * steps
        while self._wraps and self._wraps[0][0] == self._step:
            wrap = heappop(self._wraps)
            is_new = not self._wraps or self._wraps[0] != wrap  # a slot may have been given to another request
            # Not if the sequence has left, or took no part in a step: then it has another entry.
            if is_new and wrap[1] in self._generating and self._registered(wrap[1]) == self._capacity:
                self._growing[(self._step - self._capacity) % self._size] -= 1
                self._num_wrapped += 1
        more_blocks = [after - first for after in blocks]
        return more_blocks, [step * filling for step in range(steps)], more_blocks

    def _blocks_ahead(self, steps: int) -> list[int]:
        """[steps], blocks that all sequences together take up to each of the next steps, at most `max_steps`."""
        return blocks_ahead(self._growing, self._step % self._size, steps)

    # For records and tests.

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._free

    @property
    def counters(self) -> BlockCounters:
        return self._counters

    @property
    def held_places(self) -> int:
        return self.num_used * self._size

    @property
    def filled_places(self) -> int:
        return self._filled

    def held_blocks(self, slot: int) -> int:
        """Blocks of the sequence in `slot`."""
        held = self._held_before[slot]
        if slot in self._generating:
            held = max(held, ceil_div(min(self._registered(slot), self._capacity), self._size))
        return held

    def check_consistency(self) -> None:
        """Raise AssertionError unless all sums agree with the sequences."""
        self._settle()
        slots, generating = list(self._all_blocks), sorted(self._generating)
        assert self.num_used == sum(self.held_blocks(slot) for slot in slots), "the number of free blocks is wrong"
        filled = np.minimum(self.registered[slots], self._capacity).sum()
        assert self._filled == filled, "the number of filled places disagrees with the sequences"
        assert (self.count, self.tokens) == (len(generating), self.registered[generating].sum()), "sums are wrong"
        assert self._reserved == sum(self._blocks_to_come(slot) for slot in generating), "reserved blocks are wrong"
        growing = [slot for slot in generating if self.registered[slot] < self._capacity]
        remainders = (self._step - self.registered[growing]) % self._size
        assert self._growing == np.bincount(remainders, minlength=self._size).tolist(), "coming blocks are wrong"

    def _take(self, count: int) -> None:
        if count > self._free:
            raise OutOfBlocks(f"{count} KV cache blocks are needed, {self._free} of {self.num_blocks} are free")
        self._free -= count
        self._counters.allocated_total += count
        self._counters.allocated_new += count

    def _blocks_to_come(self, slot: int) -> int:
        return self._all_blocks[slot] - self.held_blocks(slot)

    def _registered(self, slot: int) -> int:
        """Tokens of a sequence in generation."""
        return int(self.registered[slot]) + self._step - self._settled

    def _settle(self) -> None:
        if self._settled < self._step:
            self.registered[list(self._generating)] += self._step - self._settled
            self._settled = self._step


def blocks_ahead(growing: list[int], first: int, steps: int) -> list[int]:
    """[steps], blocks that sequences take up to each step, the first of which is number `first`. growing: [tokens per
    block], how many of them take one in the steps with each remainder of their number."""
    if first + steps <= len(growing):
        return list(accumulate(growing[first : first + steps]))
    in_turn = growing[first:] + growing[:first]
    return list(accumulate((in_turn * ceil_div(steps, len(growing)))[:steps]))


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
