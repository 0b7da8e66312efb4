"""The tree of blocks that hold known tokens: a path from a root is a prefix, so a match means the same prefix."""

from array import array
from collections.abc import Callable, Hashable, Iterator

from sortedcontainers import SortedList

from ifbbench.engine.kv_cache.token_keys import BlockKey, BlockTokens

UNLINKED = -1
_NO_CHILD = -1
_MANY = -2


class _Fork:
    """The children of a node that has several: by key, and in the order of keys."""

    __slots__ = ("blocks", "keys")

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, int] = {}
        self.keys: SortedList[BlockKey] = SortedList()

    def add(self, key: BlockKey, block: int) -> None:
        self.blocks[key] = block
        self.keys.add(key)

    def remove(self, key: BlockKey) -> None:
        del self.blocks[key]
        self.keys.remove(key)


class ReuseTree:
    """Blocks under the tokens that they hold.

    Nodes are block ids, roots are numbers below -1: one for each identity (kind of tokens, LoRA task, cache salt), for
    keys and values differ with it however equal the tokens are. Most nodes have one child, which takes no more than a
    place in an array; only forks have objects of their own. (TensorRT-LLM's `KVCacheBlock` links; the order of a fork's
    keys is added here, so that the best partial match is a neighbour and not a search through all children.)

    key: [blocks], what each block holds, None where unknown. It stays when a block is unlinked.
    parent: [blocks], the node above, UNLINKED for blocks outside the tree.
    stamp: [blocks], changes whenever a block leaves the tree, so that who remembers a node sees whether it is there.
    num_changes: how often anything was linked or unlinked.
    """

    def __init__(self, num_blocks: int) -> None:
        self.key: list[BlockKey | None] = [None] * num_blocks
        self.parent = array("i", [UNLINKED]) * num_blocks
        self.stamp = array("I", [0]) * num_blocks
        self.num_changes = 0
        self._child = array("i", [_NO_CHILD]) * num_blocks
        self._forks: dict[int, _Fork] = {}
        self._roots: dict[Hashable, int] = {}
        self._identities: dict[int, Hashable] = {}
        self._next_root = -2

    def root(self, identity: Hashable) -> int:
        """The root of all prefixes with this identity."""
        if identity not in self._roots:
            self._roots[identity] = self._next_root
            self._forks[self._next_root] = _Fork()
            self._identities[self._next_root] = identity
            self._next_root -= 1
        return self._roots[identity]

    def has_root(self, identity: Hashable) -> bool:
        """Whether any block is known under this identity."""
        return identity in self._roots

    def is_linked(self, block: int) -> bool:
        return self.parent[block] != UNLINKED

    def is_leaf(self, block: int) -> bool:
        return self._child[block] == _NO_CHILD

    def child(self, node: int, key: BlockKey) -> int | None:
        """The child of `node` with exactly this key."""
        only = _MANY if node < 0 else self._child[node]
        if only == _NO_CHILD:
            return None
        if only == _MANY:
            return self._forks[node].blocks.get(key)
        return only if self.key[only] == key else None

    def children(self, node: int) -> Iterator[int]:
        """All children of `node`."""
        only = _MANY if node < 0 else self._child[node]
        if only == _MANY:
            yield from self._forks[node].blocks.values()
        elif only != _NO_CHILD:
            yield only

    def most_common(
        self, node: int, key: BlockKey, tokens: BlockTokens, is_eligible: Callable[[int], bool]
    ) -> tuple[int, int] | None:
        """The eligible child of `node` that begins with most of the tokens of `key`, and with how many; None if none
        begins with even one."""
        for block in self._by_likeness(node, key, tokens):
            other = self.key[block]
            assert other is not None
            common = tokens.num_common_tokens(key, other)
            if common == 0:
                return None
            if is_eligible(block):
                return block, common
        return None

    def link(self, block: int, node: int, key: BlockKey) -> None:
        """Make `block`, which is outside the tree, the child of `node` that holds `key`."""
        self.key[block] = key
        self.parent[block] = node
        self.num_changes += 1
        only = _MANY if node < 0 else self._child[node]
        if only == _NO_CHILD:
            self._child[node] = block
            return
        if only != _MANY:
            fork = self._forks[node] = _Fork()
            only_key = self.key[only]
            assert only_key is not None
            fork.add(only_key, only)
            self._child[node] = _MANY
        self._forks[node].add(key, block)

    def unlink(self, block: int) -> None:
        """Take a block out of the tree. Its children stay below it: they are to be unlinked too, or it linked again."""
        node, key = self.parent[block], self.key[block]
        if node == UNLINKED:
            return
        assert key is not None
        self._mark_gone(block)
        if node >= 0 and self._child[node] == block:
            self._child[node] = _NO_CHILD
            return
        fork = self._forks[node]
        fork.remove(key)
        if node < 0:
            self._forget_empty_root(node)
        elif len(fork.blocks) == 1:
            (self._child[node],) = fork.blocks.values()
            del self._forks[node]

    def _mark_gone(self, block: int) -> None:
        self.parent[block] = UNLINKED
        self.stamp[block] = (self.stamp[block] + 1) & 0xFFFF_FFFF
        self.num_changes += 1

    def _forget_empty_root(self, node: int) -> None:
        if not self._forks[node].blocks:
            del self._forks[node], self._roots[self._identities.pop(node)]

    def unlink_with_descendants(self, block: int) -> None:
        """Take a block and all below it out of the tree: without the block, nothing leads to them."""
        self.unlink(block)
        nodes = [block]
        while nodes:
            node = nodes.pop()
            children = list(self.children(node))
            for child in children:
                self._mark_gone(child)
            self._forks.pop(node, None)
            self._child[node] = _NO_CHILD
            nodes += children

    def check_consistency(self) -> None:
        """Raise AssertionError unless links downward and upward agree."""
        linked = {block for block, node in enumerate(self.parent) if node != UNLINKED}
        found: set[int] = set()
        for node in [*self._roots.values(), *range(len(self.parent))]:
            for block in self.children(node):
                assert self.parent[block] == node, f"block {block} is below {node} and says {self.parent[block]}"
                assert block not in found, f"block {block} is below two nodes"
                found.add(block)
        assert found == linked, "a block has a parent that does not know it"
        for node, fork in self._forks.items():
            assert list(fork.keys) == sorted(fork.blocks)
            assert node < 0 or len(fork.blocks) > 1
            assert all(self.key[block] == key for key, block in fork.blocks.items())

    def _by_likeness(self, node: int, key: BlockKey, tokens: BlockTokens) -> Iterator[int]:
        """Children of `node`, those with the longest common beginning first."""
        only = _MANY if node < 0 else self._child[node]
        if only == _NO_CHILD:
            return
        if only != _MANY:
            yield only
            return
        fork = self._forks[node]
        right = fork.keys.bisect_left(key)
        left = right - 1
        while left >= 0 or right < len(fork.keys):
            likeness_left = tokens.num_common_tokens(key, fork.keys[left]) if left >= 0 else -1
            likeness_right = tokens.num_common_tokens(key, fork.keys[right]) if right < len(fork.keys) else -1
            if likeness_left > likeness_right:
                yield fork.blocks[fork.keys[left]]
                left -= 1
            else:
                yield fork.blocks[fork.keys[right]]
                right += 1
