"""The order in which free blocks are taken: examples, and random operations against a list of lists."""

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ifbbench.engine.retention import DEFAULT_PRIORITY
from ifbbench.kv.eviction import PRIMARY, SECONDARY, EvictionPolicy


def taken_in_order(policy: EvictionPolicy, level: int = PRIMARY) -> list[int]:
    """Claim all free blocks."""
    order = []
    while policy.num_free[level]:
        order.append(policy.front(level))
        policy.claim(order[-1])
    return order


def all_claimed(count: int) -> EvictionPolicy:
    policy = EvictionPolicy(count)
    taken_in_order(policy)
    return policy


def test_new_blocks_are_taken_in_the_order_of_their_ids_in_each_level():
    policy = EvictionPolicy(3, 2)
    assert taken_in_order(policy) == [0, 1, 2]
    assert policy.num_free == [0, 2]
    assert taken_in_order(policy, SECONDARY) == [3, 4]
    with pytest.raises(IndexError):
        policy.front(PRIMARY)


def test_the_block_that_was_released_first_is_taken_first():
    policy = all_claimed(3)
    for block in (2, 0, 1):
        policy.release(block)
    assert taken_in_order(policy) == [2, 0, 1]


def test_a_block_released_to_the_front_is_taken_next():
    policy = all_claimed(3)
    policy.release(0)
    policy.release(1)
    policy.release(2, to_front=True)
    assert taken_in_order(policy) == [2, 0, 1]


def test_lower_priorities_are_taken_before_higher_ones():
    policy = EvictionPolicy(4)
    for block, priority in enumerate([100, 0, 36, 35]):
        policy.claim(block, priority)
    for block in range(4):
        policy.release(block)
    assert taken_in_order(policy) == [1, 3, 2, 0]


def test_release_to_the_front_does_not_pass_lower_priorities():
    policy = EvictionPolicy(2)
    policy.claim(0, 10)
    policy.claim(1, 20)
    policy.release(0)
    policy.release(1, to_front=True)
    assert taken_in_order(policy) == [0, 1]


def test_a_block_can_be_claimed_from_the_middle():
    policy = EvictionPolicy(4)
    policy.claim(2)
    assert not policy.is_free(2)
    assert taken_in_order(policy) == [0, 1, 3]


def test_a_claim_without_priority_keeps_the_priority():
    policy = EvictionPolicy(1)
    policy.claim(0, 70)
    policy.release(0)
    policy.claim(0)
    assert policy.priority(0) == 70


def test_a_block_with_an_expired_priority_moves_to_the_back_of_the_default_queue():
    policy = EvictionPolicy(3)
    policy.claim(0, 90, duration_s=10)
    policy.claim(1, 5, duration_s=10)
    policy.claim(2)
    policy.release(0, now_s=100)
    policy.release(1, now_s=101)
    policy.release(2, now_s=102)
    policy.refresh(109.9)
    assert policy.free_blocks(PRIMARY) == [1, 2, 0]
    policy.refresh(110)
    assert (policy.free_blocks(PRIMARY), policy.priority(0)) == ([1, 2, 0], DEFAULT_PRIORITY)
    policy.refresh(111)
    assert policy.free_blocks(PRIMARY) == [2, 0, 1]


def test_a_duration_starts_at_the_release():
    policy = EvictionPolicy(1)
    policy.claim(0, 90, duration_s=10)
    policy.refresh(1000)
    policy.release(0, now_s=1000)
    policy.refresh(1009)
    assert policy.priority(0) == 90
    policy.refresh(1010)
    assert policy.priority(0) == DEFAULT_PRIORITY


def test_a_claim_cancels_the_expiry():
    policy = EvictionPolicy(1)
    policy.claim(0, 90, duration_s=10)
    policy.release(0, now_s=0)
    policy.claim(0, duration_s=100)
    policy.release(0, now_s=5)
    policy.refresh(50)
    assert policy.priority(0) == 90
    policy.refresh(105)
    assert policy.priority(0) == DEFAULT_PRIORITY


def test_a_claim_without_duration_keeps_the_priority_without_limit():
    policy = EvictionPolicy(1)
    policy.claim(0, 90, duration_s=10)
    policy.release(0, now_s=0)
    policy.claim(0)
    policy.release(0, now_s=5)
    policy.refresh(1e9)
    assert policy.priority(0) == 90


def test_a_new_priority_moves_a_free_block_at_once_and_a_held_one_at_its_release():
    policy = EvictionPolicy(3)
    policy.claim(2)
    policy.set_priority(0, 40)
    policy.set_priority(2, 1)
    assert policy.free_blocks(PRIMARY) == [1, 0]
    policy.release(2)
    assert policy.free_blocks(PRIMARY) == [2, 1, 0]


def test_setting_the_same_priority_moves_a_free_block_to_the_back():
    policy = EvictionPolicy(3)
    policy.set_priority(0, DEFAULT_PRIORITY)
    assert policy.free_blocks(PRIMARY) == [1, 2, 0]


def test_blocks_that_swap_levels_swap_queues():
    policy = EvictionPolicy(2, 2)
    policy.claim(0)
    policy.claim(3)
    policy.swap_levels(0, 3)
    policy.release(0)
    policy.release(3)
    assert (policy.free_blocks(PRIMARY), policy.free_blocks(SECONDARY)) == ([1, 3], [2, 0])
    assert policy.num_free == [2, 2]


@pytest.mark.parametrize(("priority", "is_worth_it"), [(29, False), (30, True), (35, True)])
def test_blocks_below_the_minimum_priority_are_not_offloaded(priority, is_worth_it):
    policy = EvictionPolicy(1)
    policy.claim(0, priority)
    assert policy.is_worth_offloading(0) == is_worth_it


NUM_PRIMARY, NUM_SECONDARY = 6, 4


class EvictionMachine(RuleBasedStateMachine):
    """The policy beside a list of free blocks for each level and priority. Durations differ: no two expire at once."""

    @initialize()
    def start(self) -> None:
        self.policy = EvictionPolicy(NUM_PRIMARY, NUM_SECONDARY)
        self.queues: list[list[list[int]]] = [[[] for _ in range(101)] for _ in range(2)]
        self.queues[PRIMARY][35] = list(range(NUM_PRIMARY))
        self.queues[SECONDARY][35] = list(range(NUM_PRIMARY, NUM_PRIMARY + NUM_SECONDARY))
        self.priority = [35] * (NUM_PRIMARY + NUM_SECONDARY)
        self.level = [PRIMARY] * NUM_PRIMARY + [SECONDARY] * NUM_SECONDARY
        self.duration: dict[int, float] = {}
        self.expiry: dict[int, float] = {}
        self.now_s, self.claims = 0.0, 0

    def queue(self, block: int) -> list[int]:
        return self.queues[self.level[block]][self.priority[block]]

    def is_free(self, block: int) -> bool:
        return block in self.queue(block)

    @rule(blocks=st.lists(st.integers(0, NUM_PRIMARY + NUM_SECONDARY - 1), unique=True))
    def claim_all(self, blocks: list[int]) -> None:
        self.policy.claim_all(blocks)
        for block in blocks:
            self.remove(block)

    @rule(count=st.integers(0, NUM_PRIMARY), priority=st.sampled_from([0, 35, 36]), timed=st.booleans())
    def claim_front(self, count: int, priority: int, timed: bool) -> None:
        self.claims += 1
        free = [block for queue in self.queues[PRIMARY] for block in queue][:count]
        duration_s = 1.0 + self.claims / 2**20 if timed and len(free) == 1 else None
        assert self.policy.claim_front(len(free), priority, duration_s) == free
        for block in free:
            self.remove(block)
            self.priority[block] = priority
            if duration_s is not None:
                self.duration[block] = duration_s

    def remove(self, block: int) -> None:
        if self.is_free(block):
            self.queue(block).remove(block)
        self.expiry.pop(block, None)
        self.duration.pop(block, None)

    @rule(
        block=st.integers(0, NUM_PRIMARY + NUM_SECONDARY - 1),
        priority=st.sampled_from([None, 0, 34, 35, 36, 100]),
        duration=st.sampled_from([None, 1.0, 4.0]),
    )
    def claim(self, block: int, priority: int | None, duration: float | None) -> None:
        self.claims += 1
        duration_s = None if duration is None else duration + self.claims / 2**20
        self.policy.claim(block, priority, duration_s)
        self.remove(block)
        if priority is not None:
            self.priority[block] = priority
        if duration_s is not None:
            self.duration[block] = duration_s

    @precondition(lambda self: any(not self.is_free(block) for block in range(NUM_PRIMARY + NUM_SECONDARY)))
    @rule(data=st.data(), to_front=st.booleans())
    def release(self, data: st.DataObject, to_front: bool) -> None:
        held = [block for block in range(NUM_PRIMARY + NUM_SECONDARY) if not self.is_free(block)]
        block = data.draw(st.sampled_from(held))
        self.policy.release(block, to_front, self.now_s)
        self.queue(block).insert(0 if to_front else len(self.queue(block)), block)
        duration_s = self.duration.pop(block, None)
        if duration_s is not None and self.priority[block] != 35:
            self.expiry[block] = self.now_s + duration_s

    @rule(block=st.integers(0, NUM_PRIMARY + NUM_SECONDARY - 1), priority=st.sampled_from([0, 34, 35, 36, 100]))
    def set_priority(self, block: int, priority: int) -> None:
        self.policy.set_priority(block, priority)
        is_free = self.is_free(block)
        if is_free:
            self.queue(block).remove(block)
        self.priority[block] = priority
        if is_free:
            self.queue(block).append(block)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.5, 10.0]))
    def refresh(self, seconds: float) -> None:
        self.now_s += seconds
        self.policy.refresh(self.now_s)
        for expiry_s, block in sorted((expiry_s, block) for block, expiry_s in self.expiry.items()):
            if expiry_s <= self.now_s:
                del self.expiry[block]
                self.queue(block).remove(block)
                self.priority[block] = 35
                self.queue(block).append(block)

    @rule()
    def swap_levels(self) -> None:
        held = [[b for b, of in enumerate(self.level) if of == level and not self.is_free(b)] for level in range(2)]
        if all(held):
            block, other = held[PRIMARY][0], held[SECONDARY][0]
            self.policy.swap_levels(block, other)
            self.level[block], self.level[other] = SECONDARY, PRIMARY

    @invariant()
    def free_blocks_agree(self) -> None:
        for level in (PRIMARY, SECONDARY):
            expected = [block for queue in self.queues[level] for block in queue]
            assert self.policy.free_blocks(level) == expected
            assert self.policy.num_free[level] == len(expected)
            if expected:
                assert self.policy.front(level) == expected[0]
        for block, priority in enumerate(self.priority):
            assert self.policy.priority(block) == priority
            assert self.policy.level(block) == self.level[block]
            assert self.policy.is_free(block) == self.is_free(block)


@pytest.mark.parametrize("num_runs", [40, pytest.param(1_000, marks=pytest.mark.slow)])
def test_random_operations_agree_with_a_list_for_each_priority(num_runs):
    stateful.run_state_machine_as_test(
        EvictionMachine, settings=settings(max_examples=num_runs, stateful_step_count=40)
    )
