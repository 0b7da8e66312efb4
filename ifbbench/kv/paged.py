"""The paged KV cache of one attention window: how many blocks sequences hold, take with each step, and still need."""

from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.engine.arrays import Rows
from ifbbench.engine.records import CacheState
from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.blocks import BlockCounters, OutOfBlocks
from ifbbench.kv.interface import NO_REUSE, KvCache
from ifbbench.kv.sequence import ReleaseCount, ReuseRules

NO_LIMIT = np.iinfo(np.int64).max


class StepGroup:
    """Sequences in generation that register their tokens in the same steps: those of a micro batch. The ones that start
    a block in the same steps are counted together, so that a step costs the same for one sequence as for a thousand.

    count: number of sequences.
    tokens: tokens that these have registered together.
    step: number of steps so far.
    settled: the step up to which the sequences' entries of `registered` are counted.
    num_wrapped: number of sequences that have reached the capacity, and take no more blocks.
    growing: [tokens per block], the blocks that sequences start in each step with this remainder.
    wraps: heap of (step before which a sequence reaches the capacity, its slot).
    slots: slots of the sequences.
    """

    def __init__(self, size: int) -> None:
        self.count = self.tokens = self.step = self.settled = self.num_wrapped = 0
        self.growing = [0] * size
        self.wraps: list[tuple[int, int]] = []
        self.slots: set[int] = set()

    def starting(self, steps: int) -> list[int]:
        """[steps], blocks that are started in each of the next steps, while no sequence reaches the capacity."""
        growing, first = self.growing, self.step % len(self.growing)
        if first + steps <= len(growing):
            return growing[first : first + steps]
        repeated = growing[first:] + growing[:first]
        return (repeated * (steps // len(growing) + 1))[:steps]


@mypyc_attr(allow_interpreted_subclasses=True)
class PagedCache(KvCache):
    """A paged cache that counts the blocks of up to `slots` sequences, which is all that a scheduler asks for. Blocks
    have ids in a `KvCacheManager` only, for executors that read them, and where sequences share blocks.

    The blocks of a whole prompt are taken with its first chunk; generation takes a block whenever a token starts one.
    Sequences in generation are in the group of their micro batch, and their entries of `registered` lack the steps
    since `_settle`. A sequence in no group, such as one with draft tokens, takes its steps alone.

    filled_positions: number of cache positions with a token; a token that several sequences share counts for each.
    micro_batches: [slots], the micro batch of each sequence.
    groups: the sequences of each micro batch.
    count: number of sequences in all groups.
    """

    def __init__(
        self,
        attention_window: AttentionWindow,
        num_blocks: int,
        slots: int,
        num_groups: int = 1,
        reuse: ReuseRules = NO_REUSE,
    ) -> None:
        self.attention_window, self.reuse = attention_window, reuse
        self.block_tables = np.zeros((slots, attention_window.max_beam_width, 0), np.int32)
        self.num_blocks = self._free = num_blocks
        self.num_positions = num_blocks * attention_window.tokens_per_block
        self.filled_positions = 0
        self.registered = np.zeros(slots, np.int64)
        self.micro_batches = np.zeros(slots, np.int64)
        self.groups = [StepGroup(attention_window.tokens_per_block) for _ in range(num_groups)]
        self.count = 0
        self._counters = BlockCounters()
        self._size, self._capacity = attention_window.tokens_per_block, attention_window.capacity
        self._slots = set[int]()
        self._group_of: dict[int, StepGroup] = {}
        # By slot: the maximum number of tokens that the request may register, and its beams.
        self._limit = np.zeros(slots, np.int64)
        self._beam_width = np.ones(slots, np.int64)
        # By slot: the blocks of the complete sequence; those that it holds, or held when it entered its group; those
        # that one beam had then. Blocks that beams share count once.
        self._all_blocks = np.zeros(slots, np.int64)
        self._held = np.zeros(slots, np.int64)
        self._of_beam = np.zeros(slots, np.int64)
        # Blocks that the sequences in groups may still take.
        self._reserved = 0
        # By slot, the blocks to completion of requests that have no sequence yet. A request that is stopped leaves its
        # slot to another one.
        self._of_waiting: dict[int, tuple[Request, int]] = {}

    # For schedulers.

    @property
    def free_blocks(self) -> int:
        return self._free

    def first_chunk_need(self, request: Request) -> int:
        if not request.is_first_chunk:
            return 0
        need = self.attention_window.first_chunk_need(
            request.prompt_len, request.max_new_tokens, request.num_draft_tokens, request.beam_width
        )
        return need + self._more_for_beams(request)

    def has_blocks_for(self, count: int) -> bool:
        return count * (1 + self.looks_ahead) <= self.free_blocks

    def step_needs(self, rows: Rows, draft_tokens: Rows | int = 0) -> Rows:
        self._settle()
        window, registered, limit = self.attention_window, self.registered[rows], self._limit[rows]
        if window.max_beam_width == 1 and isinstance(draft_tokens, int) and draft_tokens == 0:
            may_register = np.minimum(limit, window.capacity)
            needs: Rows = ((self._positions_in_block(registered) == 0) & (registered < may_register)).astype(np.int64)
            if self.looks_ahead:
                needs += ((registered + 1) % self._size == 0) & (registered + 1 < may_register)
            return needs
        needs = window.step_needs(registered, limit, draft_tokens, self._beam_width[rows])
        if self.looks_ahead:
            ahead = window.step_needs(registered, limit, draft_tokens, self._beam_width[rows], steps=2)
            needs = np.maximum(needs, ahead)  # of two steps, the second may be beyond the capacity
        for number in np.flatnonzero((registered >= window.capacity) & (registered < limit)).tolist():
            needs[number] = self._overwrite_need(int(rows[number]))
        return needs

    def blocks_to_completion(self, request: Request) -> int:
        if self.holds(request.slot):
            return self._blocks_to_come(request.slot)
        owner, blocks = self._of_waiting.get(request.slot, (None, 0))
        if owner is not request:
            length, reserved, beams = request.prompt_len, request.max_new_tokens, request.beam_width
            blocks = self.attention_window.blocks_to_completion(length, reserved, 0, beams)
            blocks += self._more_for_beams(request)
            self._of_waiting[request.slot] = request, blocks
        return blocks

    def reserved_blocks(self, rows: Rows) -> int:
        if len(rows) == self.count:
            return self._reserved
        if not self.count:
            return int((self._all_blocks[rows] - self._held[rows]).sum())
        return sum([self._blocks_to_come(slot) for slot in rows.tolist()])

    def plan_release(self) -> Any:
        return ReleaseCount(self.free_blocks, self.held_blocks)

    # For the loop.

    def of_windows(self) -> "tuple[PagedCache, ...]":
        return (self,)

    def holds(self, slot: int) -> bool:
        return slot in self._slots

    def cached_tokens(self, rows: Rows) -> Rows:
        self._settle()
        tokens: Rows = self.registered[rows] - self.attention_window.bubble
        return tokens

    def add_request(self, request: Request, now_s: float = 0.0) -> int:
        slot, window, prompt_len, beams = request.slot, self.attention_window, request.prompt_len, request.beam_width
        held = of_beam = window.prompt_blocks(prompt_len)
        if beams > 1:
            held = window.blocks_of_beams(prompt_len, 0, beams)
        reused = self._take_prompt(request, held, now_s)
        self._of_waiting.pop(slot, None)
        self._begin(slot, prompt_len, beams, request.max_new_tokens)
        self._held[slot] = held
        self._all_blocks[slot] = held + window.blocks_to_completion(prompt_len, request.max_new_tokens, of_beam, beams)
        return reused

    def _begin(self, slot: int, prompt_len: int, beam_width: int, max_new_tokens: int | None) -> None:
        """The sequence in `slot` has the blocks of its prompt."""
        self._slots.add(slot)
        self._beam_width[slot] = beam_width
        self.registered[slot] = registered = prompt_len + self.attention_window.bubble
        self._limit[slot] = NO_LIMIT if max_new_tokens is None else registered + max_new_tokens
        self.filled_positions += min(registered, self._capacity)

    def begin_generation(self, slot: int, micro_batch: int = 0) -> None:
        group = self._group_of[slot] = self.groups[micro_batch]
        self.micro_batches[slot] = micro_batch
        registered, step, width = int(self.registered[slot]), group.step, int(self._beam_width[slot])
        self.registered[slot] = registered - (step - group.settled)
        self._of_beam[slot] = self._blocks_of(registered)
        group.slots.add(slot)
        group.count += 1
        group.tokens += registered
        self.count += 1
        self._reserved += int(self._all_blocks[slot] - self._held[slot])
        if registered >= self._capacity:
            group.num_wrapped += 1
            return
        group.growing[(step - registered) % self._size] += width
        if self._limit[slot] >= self._capacity:
            heappush(group.wraps, (step + self._capacity - registered, slot))

    def end_generation(self, slot: int) -> None:
        group = self._group_of.get(slot)
        if group is None:
            return
        registered, held = self._registered(slot), self.held_blocks(slot)
        self._reserved -= int(self._all_blocks[slot]) - held
        self._held[slot] = held
        self.registered[slot] = registered
        del self._group_of[slot]
        group.slots.remove(slot)
        group.count -= 1
        group.tokens -= registered
        self.count -= 1
        if registered >= self._capacity:
            group.num_wrapped -= 1
        else:
            group.growing[(group.step - registered) % self._size] -= int(self._beam_width[slot])

    def join(self, rows: Rows, micro_batch: int) -> None:
        for slot in rows[self.micro_batches[rows] != micro_batch].tolist():
            self.end_generation(slot)
            self.begin_generation(slot, micro_batch)

    def add_tokens(self, rows: Rows) -> Rows:
        """All of `rows` are in one group, or none is in any."""
        self._settle()
        registered: Rows = self.registered[rows]
        if not len(rows):
            return registered
        group = self._group_of.get(int(rows[0]))
        if group is None:
            self._add_alone(rows, registered)
            return registered
        others = group.slots.difference(rows.tolist()) if len(rows) < group.count else set[int]()
        number = self.groups.index(group)
        for slot in others:
            self.end_generation(slot)
        self.take(1, number)
        for slot in others:
            self.begin_generation(slot, number)
        return registered

    def _add_alone(self, rows: Rows, registered: Rows) -> None:
        is_within = registered < self._capacity
        growing = rows[(self._positions_in_block(registered) == 0) & is_within]
        if len(growing):
            widths = self._beam_width[growing]
            self._take(int(widths.sum()))
            self._held[growing] += widths
        self.filled_positions += int(np.count_nonzero(is_within))
        self.registered[rows] = registered + 1

    def rewind(self, rows: Rows, registered: Rows) -> None:
        in_groups = [slot for slot in rows.tolist() if slot in self._group_of]
        for slot in in_groups:
            self.end_generation(slot)
        before = self.registered[rows]
        emptied = -(-before // self._size) - -(-registered // self._size)
        self.filled_positions -= int((before - registered).sum())
        self.registered[rows] = registered
        self._held[rows] -= emptied
        self._return(rows, emptied)
        for slot in in_groups:
            self.begin_generation(slot, int(self.micro_batches[slot]))

    def remove_sequence(self, slot: int, store: int | None = None, now_s: float = 0.0) -> None:
        self.end_generation(slot)
        self._of_waiting.pop(slot, None)  # a resumed request has another prompt
        self._release(slot, store, now_s)
        self._slots.remove(slot)
        self.filled_positions -= min(int(self.registered[slot]), self._capacity)
        self.registered[slot] = 0

    # Several steps at once. Groups take turns, and steps are those of all groups together.

    def take(self, steps: int, first: int = 0) -> tuple[list[int], list[int]]:
        """Register a token of each sequence of a group in each of `steps` steps, before which no sequence reaches the
        capacity. Returns the blocks and the positions that all have taken after each step since the first, [steps]."""
        blocks, count = list(accumulate(self.starting(steps, first))), len(self.groups)
        filled = [0] * steps
        self._take(blocks[-1])
        self._reserved -= blocks[-1]
        for turn in range(min(count, steps)):
            group, its_steps = self.groups[(first + turn) % count], (steps - turn + count - 1) // count
            filling = group.count - group.num_wrapped
            if count > 1:
                filled[turn::count] = [filling] * its_steps
            self.filled_positions += filling * its_steps
            self._advance(group, its_steps)
        before = blocks[0]
        more_blocks = [after - before for after in blocks]
        if count == 1:
            return more_blocks, [step * filling for step in range(steps)]
        filled[0] = 0
        return more_blocks, list(accumulate(filled))

    def _advance(self, group: StepGroup, steps: int) -> None:
        group.step += steps
        group.tokens += group.count * steps
        while group.wraps and group.wraps[0][0] == group.step:
            wrap = heappop(group.wraps)
            is_new = not group.wraps or group.wraps[0] != wrap  # a slot may have been given to another request
            # A sequence that has left, or took no part in a step, does not wrap: it has another entry.
            if is_new and wrap[1] in group.slots and self._registered(wrap[1]) == self._capacity:
                group.growing[(group.step - self._capacity) % self._size] -= int(self._beam_width[wrap[1]])
                group.num_wrapped += 1

    def starting(self, steps: int, first: int) -> list[int]:
        """[steps], blocks that are taken in each of the next steps."""
        count = len(self.groups)
        if count == 1:
            return self.groups[0].starting(steps)
        starting = [0] * steps
        for turn in range(min(count, steps)):
            starting[turn::count] = self.groups[(first + turn) % count].starting((steps - turn + count - 1) // count)
        return starting

    # For records and tests.

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.free_blocks

    @property
    def counters(self) -> BlockCounters:
        return self._counters

    def state(self) -> CacheState:
        counters, used = self.counters, self.num_used
        return CacheState(
            self.num_blocks,
            used,
            self._size,
            counters.allocated_total,
            counters.allocated_new,
            counters.reused,
            self.num_positions,
            used * self._size,
            self.filled_positions,
            counters.missed,
        )

    def held_blocks(self, slot: int) -> int:
        """Blocks of the sequence in `slot`, those that its beams share once."""
        held = int(self._held[slot])
        if slot in self._group_of:
            grown = self._blocks_of(self._registered(slot)) - int(self._of_beam[slot])
            held += grown * int(self._beam_width[slot])
        return held

    def check_consistency(self) -> None:
        """Raise AssertionError unless all sums agree with the sequences."""
        self._settle()
        slots = list(self._slots)
        self._check_blocks()
        filled = np.minimum(self.registered[slots], self._capacity).sum()
        assert self.filled_positions == filled, "the number of filled cache positions disagrees with the sequences"
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

    # What differs where blocks have ids.

    def _take_prompt(self, request: Request, held: int, now_s: float) -> int:
        """Take the blocks of a prompt, `held` of them; returns how many of its tokens they hold already."""
        self._take(held)
        return 0

    def _take(self, count: int) -> None:
        """Take the blocks of a step."""
        if count > self._free:
            raise OutOfBlocks(f"{count} KV cache blocks are needed, {self._free} of {self.num_blocks} are free")
        self._free -= count
        self._counters.allocated_total += count
        self._counters.allocated_new += count

    def _return(self, rows: Rows, counts: Rows) -> None:
        """Release the last `counts` blocks of each of `rows`, which have one beam."""
        self._free += int(counts.sum())

    def _release(self, slot: int, store: int | None, now_s: float) -> None:
        """Release all blocks of the sequence; see `remove_sequence`."""
        self._free += int(self._held[slot])

    def _overwrite_need(self, slot: int) -> int:
        """Blocks that a sequence beyond its capacity takes for its next token."""
        return 0

    def _check_blocks(self) -> None:
        assert self.num_used == sum(map(self.held_blocks, self._slots)), "the number of free blocks is wrong"

    # Arithmetic.

    def _blocks_of(self, registered: int) -> int:
        """Blocks of one beam with so many tokens."""
        return -(-min(registered, self._capacity) // self._size)

    def _positions_in_block(self, registered: Rows) -> Rows:
        size = self._size
        # The remainder of a division takes several times as long.
        return registered & (size - 1) if size & (size - 1) == 0 else registered % size

    def _more_for_beams(self, request: Request) -> int:
        if not self.reuse.enabled:
            return 0
        return self.attention_window.more_for_beams(request.prompt_len, request.beam_width)

    def _blocks_to_come(self, slot: int) -> int:
        """Blocks that the sequence in `slot` may still take."""
        return int(self._all_blocks[slot]) - self.held_blocks(slot)

    def _registered(self, slot: int) -> int:
        """Tokens of a sequence in a group."""
        group = self._group_of[slot]
        return int(self.registered[slot]) + group.step - group.settled

    def _settle(self) -> None:
        for group in self.groups:
            if group.settled < group.step:
                self.registered[np.fromiter(group.slots, np.int64, group.count)] += group.step - group.settled
                group.settled = group.step
