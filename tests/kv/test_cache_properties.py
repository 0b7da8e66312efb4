"""Random operations on the KV cache manager: reused blocks hold what their keys say, and all counts agree."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import event, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ifbbench.engine.batch import BlockCopy, CopyKind
from ifbbench.engine.retention import NO_RETENTION, Retention, RetentionRange
from ifbbench.engine.tokens import KnownTokens, TokenIds
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.blocks import OutOfBlocks
from ifbbench.kv.eviction import PRIMARY, SECONDARY
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules

SLOTS = 4
MAX_SEQ_LEN = 24
IDENTITIES = ("one", "other")
Memory = dict[tuple[int, int], object]

tokens_of_prompts = st.builds(
    lambda prefix, cut, own: (prefix[:cut] + own)[:18] or [0],
    st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4], [1] * 14, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]]),
    st.integers(0, 14),
    st.lists(st.integers(1, 3), max_size=4),
)
retentions = st.sampled_from(
    [
        NO_RETENTION,
        NO_RETENTION,
        Retention([RetentionRange(0, 4, 80), RetentionRange(4, None, 10)], decode_priority=20),
        Retention([RetentionRange(0, None, 60, 5.0)], decode_priority=90, decode_duration_s=2.0),
    ]
)


@dataclass
class Living:
    """A sequence and its expected content."""

    tokens: list[int]
    known: KnownTokens
    beams: int
    reused: int
    prompt_len: int = field(init=False)
    is_computed: bool = False

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    def content(self, position: int, beam: int) -> object:
        """What a model computes at a position: a function of all tokens up to it, and of the beam."""
        own_way = (beam, id(self)) if self.beams > 1 and position >= self.prompt_len else None
        return self.known.identity, tuple(self.tokens[: position + 1]), own_way


def apply(copies: list[BlockCopy], device: Memory, host: Memory) -> None:
    for copy in copies:
        source = host if copy.kind is CopyKind.ONBOARD else device
        destination = host if copy.kind is CopyKind.OFFLOAD else device
        for offset in range(copy.num_tokens):
            destination[copy.destination, offset] = source.get((copy.source, offset))


class CacheMachine(RuleBasedStateMachine):
    """Sequences are added, computed, grown and removed; a model of both memories holds what was written and copied."""

    @initialize(
        size=st.sampled_from([4, 4, 2, 1]),
        num_blocks=st.integers(6, 24),
        host=st.sampled_from([0, 3, 8]),
        partial=st.sampled_from([True, True, True, False]),
        copy=st.sampled_from([True, True, True, False]),
        window=st.sampled_from([MAX_SEQ_LEN, MAX_SEQ_LEN, 12]),
    )
    def start(self, size: int, num_blocks: int, host: int, partial: bool, copy: bool, window: int) -> None:
        self.size, self.rules_of_reuse, self.host_blocks = size, ReuseRules(True, partial, copy), host
        self.attention_window = AttentionWindow(size, window, MAX_SEQ_LEN, max_beam_width=2)
        self.cache = KvCacheManager(self.attention_window, num_blocks, SLOTS, host, self.rules_of_reuse)
        self.living: dict[int, Living] = {}
        self.device: Memory = {}
        self.host: Memory = {}
        self.now_s = 0.0

    @rule(prompts=st.lists(tokens_of_prompts, min_size=1, max_size=4), retention=retentions)
    def serve_one_after_the_other(self, prompts: list[list[int]], retention: Retention) -> None:
        """Requests that are added, computed, removed and stored."""
        self.compute_prompts(set())
        for tokens in prompts:
            slot = self.add(tokens, 1, IDENTITIES[0], retention, True)
            if slot is not None:
                self.compute_prompts(set())
                self.leave(slot, stores=True)

    @precondition(lambda self: len(self.living) < SLOTS)
    @rule(
        tokens=tokens_of_prompts,
        beams=st.sampled_from([1, 1, 1, 2]),
        retention=retentions,
        identity=st.sampled_from(["one"] * 5 + ["other"]),
        may_look_up=st.sampled_from([True] * 4 + [False]),
    )
    def add_one(self, tokens: list[int], beams: int, identity: str, retention: Retention, may_look_up: bool) -> None:
        self.add(tokens, beams, identity, retention, may_look_up)

    def add(self, tokens: list[int], beams: int, identity: str, retention: Retention, may_look_up: bool) -> int | None:
        """The slot of the new sequence; None if it did not fit."""
        slot = next((slot for slot in range(SLOTS) if slot not in self.living), None)
        if slot is None:
            return None
        known = KnownTokens(TokenIds(np.array(tokens, np.int32)), identity)
        before, expected = self.everything(), self.longest_known(tokens, identity)
        counters = self.cache.blocks.counters
        reused_before, missed_before = counters.reused, counters.missed
        blocks_without_reuse = beams * -(-len(tokens) // self.size)
        try:
            reused = self.cache.add_sequence(slot, len(tokens), beams, known, retention, may_look_up)
        except OutOfBlocks:
            event("out of blocks")
            assert self.everything() == before
            assert before[0] < blocks_without_reuse
            return None
        self.living[slot] = Living(list(tokens), known, beams, reused)
        is_cyclic = len(tokens) >= self.attention_window.size
        if not may_look_up or is_cyclic:
            assert reused == 0
        elif beams == 1 and not self.host_blocks:
            self.check_reused(reused, expected)
        if not is_cyclic:
            matched = -(-reused // self.size)
            assert counters.reused - reused_before == matched
            assert counters.missed - missed_before == -(-len(tokens) // self.size) - matched
        event(f"reused: {reused > 0}")
        return slot

    def check_reused(self, reused: int, longest: int) -> None:
        """longest: length of the longest known prefix of the prompt."""
        whole_blocks = longest // self.size * self.size
        if self.rules_of_reuse.partial and self.rules_of_reuse.copy_partial:
            assert reused == longest
        else:
            assert whole_blocks <= reused <= longest

    @rule(fails=st.sampled_from([set(), set(), set(), {0}, {1, 2}]))
    def compute_prompts(self, fails: set[int]) -> None:
        """An iteration with the prompts added so far: copies first, then computation."""
        self.move()
        for slot, sequence in list(self.living.items()):
            if sequence.is_computed:
                continue
            if slot in fails:
                self.forget(slot)
                continue
            for beam in range(sequence.beams):
                for position in range(sequence.prompt_len):
                    self.read_or_write(slot, beam, position, writes=position >= sequence.reused)
            sequence.is_computed = True
            self.cache.store_context(slot)

    @precondition(lambda self: any(sequence.is_computed for sequence in self.living.values()))
    @rule(token=st.integers(1, 3), leaves_out=st.sampled_from([set(), {0}, {1, 2}]), count=st.integers(1, 6))
    def generate(self, token: int, leaves_out: set[int], count: int) -> None:
        for _ in range(count):
            self.generate_one(token, leaves_out)

    def generate_one(self, token: int, leaves_out: set[int]) -> None:
        rows = [
            slot
            for slot, sequence in self.living.items()
            if sequence.is_computed and slot not in leaves_out and len(sequence.tokens) < MAX_SEQ_LEN
        ]
        if not rows or sum(self.living[slot].beams for slot in rows) > self.cache.free_blocks:
            return
        self.cache.add_tokens(np.array(rows))
        self.move()
        for slot in rows:
            sequence = self.living[slot]
            sequence.tokens.append(token)
            if isinstance(sequence.known.tokens, TokenIds):
                sequence.known.tokens.append(np.array([token], np.int32))
            for beam in range(sequence.beams):
                self.read_or_write(slot, beam, len(sequence.tokens) - 1, writes=True)
            if sequence.beams == 1 and len(sequence.tokens) % self.size == 0 and not self.has_come_round(sequence):
                self.cache.store_generated(slot, len(sequence.tokens))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), stores=st.sampled_from([True, True, True, False]))
    def remove(self, data: st.DataObject, stores: bool) -> None:
        self.leave(data.draw(st.sampled_from(sorted(self.living))), stores)

    def leave(self, slot: int, stores: bool) -> None:
        sequence = self.living.pop(slot)
        computed = len(sequence.tokens) if sequence.is_computed else sequence.reused
        self.cache.remove_sequence(slot, computed if stores else None, self.now_s)

    @rule(tokens=tokens_of_prompts, keep=st.integers(0, 12), identity=st.sampled_from(IDENTITIES))
    def truncate(self, tokens: list[int], keep: int, identity: str) -> None:
        known = KnownTokens(TokenIds(np.array(tokens, np.int32)), identity)
        before = set(self.known_prefixes())
        self.cache.truncate(known, len(tokens), keep)
        gone = before - set(self.known_prefixes())
        kept = -(-keep // self.size) * self.size
        for owner, prefix in gone:
            assert (owner, list(prefix)) == (identity, tokens[: len(prefix)])
            assert len(prefix) > kept

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.cache.blocks.eviction.refresh(self.now_s)

    @invariant()
    def everything_is_in_order(self) -> None:
        self.cache.check_consistency()

    @invariant()
    def computed_sequences_keep_what_was_written(self) -> None:
        for slot, sequence in self.living.items():
            if sequence.is_computed and not self.has_come_round(sequence):
                for beam in range(sequence.beams):
                    for position in range(len(sequence.tokens)):
                        self.read_or_write(slot, beam, position, writes=False)

    @invariant()
    def what_can_be_found_is_there(self) -> None:
        device, host = dict(self.device), dict(self.host)
        apply(list(self.cache.blocks.copies), device, host)
        blocks = self.cache.blocks
        for block, identity, start, tokens in self.tree_blocks():
            memory = device if blocks.is_on_device(block) else host
            for position in range(start, len(tokens)):
                content = memory.get((blocks.memory[block], position - start))
                assert content == (identity, tokens[: position + 1], None), f"block {block} holds something else"

    def forget(self, slot: int) -> None:
        held = set(self.cache.sequences[slot].beams[0])
        self.cache.forget_sequence(slot)
        assert held.isdisjoint(block for block, *_ in self.tree_blocks())
        sequence = self.living.pop(slot)
        self.cache.remove_sequence(slot, len(sequence.tokens), self.now_s)
        assert held.isdisjoint(block for block, *_ in self.tree_blocks())

    def move(self) -> None:
        apply(list(self.cache.take_copies()), self.device, self.host)

    def has_come_round(self, sequence: Living) -> bool:
        return len(sequence.tokens) >= self.attention_window.size

    def read_or_write(self, slot: int, beam: int, position: int, writes: bool) -> None:
        capacity, sequence = self.attention_window.capacity, self.living[slot]
        block, offset = divmod(position % capacity, self.size)
        place = int(self.cache.block_tables[slot, beam, block]), offset
        if writes:
            self.device[place] = sequence.content(position, beam)
        assert self.device.get(place) == sequence.content(position, beam), f"position {position} of slot {slot}"

    def tree_blocks(self) -> Iterator[tuple[int, str, int, tuple[int, ...]]]:
        """Each linked block: its identity, its first position, and all tokens up to its last."""
        tree = self.cache.blocks.tree
        nodes = [(tree.root(name), name, ()) for name in IDENTITIES if tree.has_root(name)]
        while nodes:
            node, identity, prefix = nodes.pop()
            for block in tree.children(node):
                key = tree.key[block]
                assert isinstance(key, bytes)
                tokens: tuple = (*prefix, *np.frombuffer(key, ">i4").tolist())
                nodes.append((block, identity, tokens))
                yield block, identity, len(prefix), tokens

    def known_prefixes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for _, identity, _, tokens in self.tree_blocks():
            yield identity, tokens

    def longest_known(self, prompt: list[int], identity: str) -> int:
        """Length of the longest prefix of the prompt, its last token left out, that linked blocks hold."""
        known = [tokens for owner, tokens in self.known_prefixes() if owner == identity]
        return max(
            (length for length in range(len(prompt)) for tokens in known if tokens[:length] == tuple(prompt[:length])),
            default=0,
        )

    def everything(self) -> tuple:
        blocks = self.cache.blocks
        count = len(blocks.memory)
        return (
            self.cache.free_blocks,
            blocks.eviction.free_blocks(PRIMARY),
            blocks.eviction.free_blocks(SECONDARY),
            list(blocks.references),
            list(blocks.memory),
            list(blocks.tree.parent),
            list(blocks.tree.key),
            [blocks.eviction.priority(block) for block in range(count)],
            list(blocks.copies),
            {slot: [*map(tuple, sequence.beams)] for slot, sequence in self.cache.sequences.items()},
            self.cache.registered.tolist(),
            str(blocks.counters),
        )


@pytest.mark.parametrize(
    ("num_runs", "num_steps"), [(60, 35), pytest.param(5000, 60, marks=pytest.mark.slow, id="at length")]
)
def test_reused_blocks_hold_the_prefix_of_their_keys(num_runs: int, num_steps: int) -> None:
    stateful.run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=num_runs, stateful_step_count=num_steps)
    )
