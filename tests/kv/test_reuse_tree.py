"""The reuse tree: examples, and random operations against a dictionary of paths."""

import numpy as np
import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ifbbench.engine.tokens import BlockKey, TokenIds
from ifbbench.kv.reuse_tree import ReuseTree

NUM_BLOCKS = 10
TEXTS = ([1], [2], [1, 1], [1, 2], [1, 2, 3], [2, 300], [256, 1])
TOKENS = TokenIds(np.zeros(0, np.int32))


def key(*tokens: int) -> BlockKey:
    return TokenIds(np.array(tokens, np.int32)).key(0, len(tokens))


def test_a_block_is_found_by_its_tokens_and_parent_only():
    tree = ReuseTree(3)
    tree.link(0, tree.root("a"), key(1, 2))
    tree.link(1, 0, key(1, 2))
    assert tree.child(tree.root("a"), key(1, 2)) == 0
    assert tree.child(0, key(1, 2)) == 1
    assert tree.child(1, key(1, 2)) is None
    assert tree.child(tree.root("a"), key(1)) is None
    assert tree.child(tree.root("b"), key(1, 2)) is None


def test_a_fork_with_one_child_left_collapses():
    tree = ReuseTree(4)
    tree.link(0, tree.root("a"), key(9))
    for block, token in ((1, 1), (2, 2), (3, 3)):
        tree.link(block, 0, key(token))
    tree.unlink(2)
    tree.unlink(1)
    assert list(tree.children(0)) == [3]
    assert (tree.child(0, key(3)), tree.child(0, key(1))) == (3, None)
    tree.unlink(3)
    assert tree.is_leaf(0)
    tree.check_consistency()


def test_a_root_is_removed_with_its_last_block():
    tree = ReuseTree(3)
    for block, identity in enumerate(["a", "a", "b"]):
        tree.link(block, tree.root(identity), key(block))
    tree.unlink(0)
    assert tree.has_root("a")
    tree.unlink(1)
    assert (tree.has_root("a"), tree.has_root("b")) == (False, True)
    tree.link(0, tree.root("a"), key(0))
    assert tree.child(tree.root("a"), key(0)) == 0
    assert tree.child(tree.root("b"), key(0)) is None


def test_unlinking_a_block_that_is_not_linked_changes_nothing():
    tree = ReuseTree(1)
    tree.unlink(0)
    tree.unlink_with_descendants(0)
    assert tree.num_changes == 0
    assert not tree.is_linked(0)


def test_a_stamp_changes_when_a_block_is_unlinked_and_linked_again():
    tree = ReuseTree(2)
    tree.link(0, tree.root("a"), key(1))
    tree.link(1, 0, key(2))
    before = list(tree.stamp)
    tree.unlink_with_descendants(0)
    tree.link(0, tree.root("a"), key(1))
    assert all(now != then for now, then in zip(tree.stamp, before, strict=True))


def test_the_eligible_child_with_the_longest_common_prefix_is_found():
    tree = ReuseTree(4)
    for block, tokens in enumerate([(1, 2, 3, 4), (1, 2, 9, 9), (1, 9, 9, 9), (7, 7, 7, 7)]):
        tree.link(block, tree.root("a"), key(*tokens))

    def best(*tokens: int, but: tuple[int, ...] = ()) -> tuple[int, int] | None:
        return tree.most_common(tree.root("a"), key(*tokens), TOKENS, lambda block: block not in but)

    assert best(1, 2, 3, 5) == (0, 3)
    assert best(1, 2, 3, 5, but=(0,)) == (1, 2)
    assert best(1, 2, 3, 5, but=(0, 1)) == (2, 1)
    assert best(1, 2, 3, 5, but=(0, 1, 2)) is None
    assert best(8, 7, 7, 7) is None


Path = tuple[str, tuple[BlockKey, ...]]


class TreeMachine(RuleBasedStateMachine):
    """A dictionary has the block of each path."""

    @initialize()
    def start(self) -> None:
        self.tree = ReuseTree(NUM_BLOCKS)
        self.paths: dict[Path, int] = {}
        self.stamps = list(self.tree.stamp)

    def node(self, path: Path) -> int:
        return self.paths[path] if path[1] else self.tree.root(path[0])

    def drop(self, gone: list[Path]) -> None:
        for path in gone:
            block = self.paths.pop(path)
            assert self.tree.stamp[block] != self.stamps[block]
            self.stamps[block] = self.tree.stamp[block]

    @precondition(lambda self: len(self.paths) < NUM_BLOCKS)
    @rule(data=st.data(), text=st.sampled_from(TEXTS), identity=st.sampled_from(["a", "b"]))
    def link(self, data: st.DataObject, text: list[int], identity: str) -> None:
        parent = data.draw(st.sampled_from([(identity, ()), *self.paths]))
        block = data.draw(st.sampled_from([block for block in range(NUM_BLOCKS) if block not in self.paths.values()]))
        path = parent[0], (*parent[1], key(*text))
        changes = self.tree.num_changes
        if path not in self.paths:
            self.tree.link(block, self.node(parent), key(*text))
            self.paths[path] = block
            assert self.tree.num_changes > changes

    @rule(data=st.data(), texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4))
    def store_a_prompt(self, data: st.DataObject, texts: list[list[int]]) -> None:
        path = data.draw(st.sampled_from([("a", ()), *self.paths]))
        free = [block for block in range(NUM_BLOCKS) if block not in self.paths.values()]
        keys = [key(*text) for text in texts][: len(free)]
        if not keys:
            return
        stored = [(path[0], path[1] + tuple(keys[:end])) for end in range(1, len(keys) + 1)]
        found = [self.paths[one] for one in stored if one in self.paths]
        node = self.node(path)
        assert self.tree.follow(node, keys) == found
        for block, one in zip(free, stored, strict=False):
            self.paths.setdefault(one, block)
        assert self.tree.store(free[: len(keys)], node, keys) == self.paths[stored[-1]]

    @rule(blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True))
    def evict(self, blocks: list[int]) -> None:
        self.tree.unlink_evicted(blocks)
        evicted = [path for path, block in self.paths.items() if block in blocks]
        self.drop(
            [
                (owner, keys)
                for owner, keys in self.paths
                if any(owner == identity and keys[: len(above)] == above for identity, above in evicted)
            ]
        )

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def unlink_a_leaf(self, data: st.DataObject) -> None:
        inner = {(identity, keys[:-1]) for identity, keys in self.paths}
        path = data.draw(st.sampled_from([path for path in self.paths if path not in inner]))
        self.tree.unlink(self.paths[path])
        self.drop([path])

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def unlink_with_descendants(self, data: st.DataObject) -> None:
        identity, keys = data.draw(st.sampled_from(list(self.paths)))
        changes = self.tree.num_changes
        self.tree.unlink_with_descendants(self.paths[identity, keys])
        self.drop([path for path in self.paths if path[0] == identity and path[1][: len(keys)] == keys])
        assert self.tree.num_changes > changes

    @rule(data=st.data(), text=st.sampled_from(TEXTS), eligible=st.sets(st.integers(0, NUM_BLOCKS - 1)))
    def look_for_the_most_alike(self, data: st.DataObject, text: list[int], eligible: set[int]) -> None:
        parent = data.draw(st.sampled_from([("a", ()), *self.paths]))
        if not parent[1] and not self.tree.has_root(parent[0]):
            return
        common = {
            block: TOKENS.num_common_tokens(key(*text), keys[-1])
            for (identity, keys), block in self.paths.items()
            if (identity, keys[:-1]) == parent and block in eligible
        }
        found = self.tree.most_common(self.node(parent), key(*text), TOKENS, lambda block: block in eligible)
        if found is None:
            assert not any(common.values())
        else:
            assert found[1] == common[found[0]] == max(common.values()) > 0

    @invariant()
    def tree_and_paths_agree(self) -> None:
        self.tree.check_consistency()
        assert {block for block in range(NUM_BLOCKS) if self.tree.is_linked(block)} == set(self.paths.values())
        assert list(self.tree.stamp) == self.stamps
        for identity in ("a", "b"):
            assert self.tree.has_root(identity) == any(owner == identity for owner, _ in self.paths)
        for path in [("a", ()), ("b", ()), *self.paths]:
            if not path[1] and not self.tree.has_root(path[0]):
                continue
            node = self.node(path)
            children = {keys[-1]: block for (owner, keys), block in self.paths.items() if (owner, keys[:-1]) == path}
            assert sorted(self.tree.children(node)) == sorted(children.values())
            assert [self.tree.child(node, key(*text)) for text in TEXTS] == [children.get(key(*text)) for text in TEXTS]
            if path[1]:
                assert self.tree.is_leaf(node) == (not children)
                assert self.tree.parent[node] == self.node((path[0], path[1][:-1]))


@pytest.mark.parametrize("num_runs", [40, pytest.param(1_000, marks=pytest.mark.slow)])
def test_random_operations_agree_with_a_dictionary_of_paths(num_runs):
    stateful.run_state_machine_as_test(TreeMachine, settings=settings(max_examples=num_runs, stateful_step_count=40))
