"""The tree of blocks that hold known tokens. A path from a root is a prefix, so a match implies the same prefix."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict

from ifbbench.engine.tokens import BlockKey, BlockTokens, KnownTokens, block_ranges
from ifbbench.kv.attention_window import ceil_div

UNLINKED = -1
_NO_CHILD = -1
_SEVERAL = -2


@dataclass(slots=True)
class MissingBlockSearch:
    """How far the search for a request's first missing block has come: `depth` blocks were found, the last is `node`.

    request: the search is valid for this request only. A request that is stopped before it starts leaves its slot, and
        this search, to another one.
    known: tokens of the request, None if its blocks are not shared.
    """

    request: Hashable
    known: KnownTokens | None
    depth: int = 0
    node: int = 0
    stamp: int = 0
    num_changes: int = -1
    missing: tuple[Hashable, BlockKey] | None = None


class ReuseTree:
    """Blocks by the tokens that they hold (TensorRT-LLM's `KVCacheBlock` links).

    Nodes are block ids. Roots are numbers below -1, one for each identity (kind of tokens, LoRA task, cache salt),
    because keys and values differ with it. Most nodes have one child, which is an array element; only forks have
    objects of their own. A fork also keeps its keys in order, so that the best partial match is a neighbour and needs
    no search through all children.

    key: [blocks], what each block holds, None where unknown. It remains when a block is unlinked.
    parent: [blocks], the node above, UNLINKED for blocks outside the tree.
    stamp: [blocks], changes whenever a block leaves the tree: a remembered node with another stamp is invalid.
    num_changes: number of links and unlinks.
    num_evicted: blocks that were taken for others while they were linked.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int = 1) -> None:
        self.key: list[BlockKey | None] = [None] * num_blocks
        self.parent = [UNLINKED] * num_blocks
        self.stamp = [0] * num_blocks
        self.num_changes = self.num_evicted = 0
        self._size = tokens_per_block
        self._child = [_NO_CHILD] * num_blocks
        # The children of roots and of nodes with several: blocks by key, in the order of keys.
        self._forks: dict[int, SortedDict[BlockKey, int]] = {}
        self._roots: dict[Hashable, int] = {}
        self._identities: dict[int, Hashable] = {}
        self._next_root = -2

    def root(self, identity: Hashable) -> int:
        """The root of all prefixes with this identity, which is made if there is none."""
        if identity not in self._roots:
            self._roots[identity] = self._next_root
            self._forks[self._next_root] = SortedDict()
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
        only = _SEVERAL if node < 0 else self._child[node]
        if only == _NO_CHILD:
            return None
        if only == _SEVERAL:
            found: int | None = self._forks[node].get(key)
            return found
        return only if self.key[only] == key else None

    def follow(self, node: int, keys: list[BlockKey]) -> list[int]:
        """The child of `node` with the first of `keys`, its child with the second, and so on until there is none."""
        only_child, key_of, found = self._child, self.key, list[int]()
        for key in keys:
            only = only_child[node] if node >= 0 else _SEVERAL
            if only == _SEVERAL:
                only = self._forks[node].get(key, _NO_CHILD)
            elif only != _NO_CHILD and key_of[only] != key:
                break
            if only == _NO_CHILD:
                break
            found.append(only)
            node = only
        return found

    def children(self, node: int) -> list[int]:
        """All children of `node`."""
        only = _SEVERAL if node < 0 else self._child[node]
        if only == _SEVERAL:
            return list(self._forks[node].values())
        return [] if only == _NO_CHILD else [only]

    def most_common(
        self, node: int, key: BlockKey, tokens: BlockTokens, is_eligible: Callable[[int], bool]
    ) -> tuple[int, int] | None:
        """The eligible child of `node` with the longest common prefix with `key`, and its number of tokens; None if no
        child has even one token in common."""
        for block in self._by_common_prefix(node, key, tokens):
            other = self.key[block]
            assert other is not None
            common = tokens.num_common_tokens(key, other)
            if common == 0:
                return None
            if is_eligible(block):
                return block, common
        return None

    # Changes.

    def link(self, block: int, node: int, key: BlockKey) -> None:
        """Make `block`, which is outside the tree, the child of `node` that holds `key`."""
        self.key[block] = key
        self.parent[block] = node
        self.num_changes += 1
        only = _SEVERAL if node < 0 else self._child[node]
        if only == _NO_CHILD:
            self._child[node] = block
            return
        if only != _SEVERAL:
            only_key = self.key[only]
            assert only_key is not None
            self._forks[node] = SortedDict({only_key: only})
            self._child[node] = _SEVERAL
        self._forks[node][key] = block

    def store(self, blocks: list[int], node: int, keys: list[BlockKey]) -> int:
        """Make `blocks` findable below `node`, one below the other. Where there is a block with the same key, that one
        remains instead. Returns the last of these nodes."""
        found = self.follow(node, keys)
        if found:
            node = found[-1]
        if len(found) == len(blocks):
            return node
        parent, only_child, key_of = self.parent, self._child, self.key
        for index in range(len(found), len(blocks)):
            block, key = blocks[index], keys[index]
            if parent[block] != UNLINKED:
                self.unlink_with_descendants(block)
            if index == len(found):
                self.link(block, node, key)
            else:  # nothing is below a block that was linked just now
                key_of[block] = key
                parent[block] = node
                only_child[node] = block
            node = block
        self.num_changes += len(blocks)
        return node

    def unlink(self, block: int) -> None:
        """Take a block out of the tree. Its children stay below it, and the caller must unlink them too."""
        node, key = self.parent[block], self.key[block]
        if node == UNLINKED:
            return
        assert key is not None
        self._mark_unlinked(block)
        if node >= 0 and self._child[node] == block:
            self._child[node] = _NO_CHILD
            return
        fork = self._forks[node]
        del fork[key]
        if node < 0:
            if not fork:
                del self._forks[node], self._roots[self._identities.pop(node)]
        elif len(fork) == 1:
            (self._child[node],) = fork.values()
            del self._forks[node]

    def _mark_unlinked(self, block: int) -> None:
        self.parent[block] = UNLINKED
        self.stamp[block] += 1
        self.num_changes += 1

    def unlink_with_descendants(self, block: int) -> None:
        """Take a block and all below it out of the tree: without the block, no prefix leads to them."""
        self.unlink(block)
        if self._child[block] == _NO_CHILD:
            return
        nodes = [block]
        while nodes:
            node = nodes.pop()
            children = self.children(node)
            for child in children:
                self._mark_unlinked(child)
            self._forks.pop(node, None)
            self._child[node] = _NO_CHILD
            nodes += children

    def unlink_evicted(self, blocks: list[int]) -> None:
        """`unlink_with_descendants` for each of `blocks`. Sequences release their last blocks first, so most blocks are
        leaves when their turn comes."""
        parent, only_child, stamp = self.parent, self._child, self.stamp
        for block in blocks:
            node = parent[block]
            if node == UNLINKED:
                continue
            self.num_evicted += 1
            if node < 0 or only_child[node] != block or only_child[block] != _NO_CHILD:
                self.unlink_with_descendants(block)
                continue
            only_child[node] = _NO_CHILD
            parent[block] = UNLINKED
            stamp[block] += 1
            self.num_changes += 1

    def truncate(self, known: KnownTokens, length: int, keep: int) -> list[int]:
        """Unlink the blocks of a conversation of `length` tokens beyond its first `keep`, the last ones first, up to
        one with other descendants; returns them."""
        unlinked = []
        for block in reversed(self._path(known, length)[ceil_div(keep, self._size) :]):
            if not self.is_leaf(block):
                break
            self.unlink(block)
            unlinked.append(block)
        return unlinked

    # Prefixes.

    def matched_blocks(self, known: KnownTokens, num_tokens: int) -> list[int]:
        """Full blocks that hold a prefix of the first `num_tokens` tokens."""
        if not self.has_root(known.identity):
            return []
        return self.follow(self.root(known.identity), known.block_keys(num_tokens // self._size, self._size))

    def find_missing(self, search: MissingBlockSearch, length: int) -> tuple[Hashable, BlockKey] | None:
        """The first full block of a prompt of `length` tokens that is not stored: its parent and its key; None if all
        are. `search` remembers how far the last call came, so that a prompt is walked through once."""
        known, size = search.known, self._size
        if search.num_changes == self.num_changes or known is None:
            return search.missing
        search.num_changes = self.num_changes
        if not self.has_root(known.identity):
            # Until a first block is stored there is no root, and the identity represents it.
            search.missing = (known.identity, known.tokens.key(0, size)) if length >= size else None
            search.depth = 0
            return search.missing
        root = self.root(known.identity)
        is_valid = self.stamp[search.node] == search.stamp if search.depth else search.node == root
        if not is_valid:
            search.depth, search.node = 0, root
        elif search.missing is not None and self.child(search.node, search.missing[1]) is None:
            return search.missing
        keys = known.block_keys(length // size, size)
        found = self.follow(search.node, keys[search.depth :])
        if found:
            search.depth += len(found)
            search.node, search.stamp = found[-1], self.stamp[found[-1]]
        search.missing = (search.node, keys[search.depth]) if search.depth < len(keys) else None
        return search.missing

    def _path(self, known: KnownTokens, length: int) -> list[int]:
        """The known blocks of a conversation; the last one may be partial."""
        tokens = known.tokens
        path: list[int] = []
        if not self.has_root(known.identity):
            return path
        node = self.root(known.identity)
        for start, stop in block_ranges(length, self._size):
            key = tokens.key(start, stop)
            child = self.child(node, key)
            if child is None:
                found = self.most_common(node, key, tokens, lambda block: True)
                held = found and self.key[found[0]]
                if found and held is not None and tokens.num_tokens(held) == found[1]:
                    path.append(found[0])
                break
            path.append(child)
            node = child
        return path

    def _by_common_prefix(self, node: int, key: BlockKey, tokens: BlockTokens) -> Iterator[int]:
        """Children of `node`, those with the longest common prefix first."""
        only = _SEVERAL if node < 0 else self._child[node]
        if only != _SEVERAL:
            yield from self.children(node)
            return
        fork = self._forks[node]
        keys = fork.keys()
        right = fork.bisect_left(key)
        left = right - 1
        while left >= 0 or right < len(keys):
            common_left = tokens.num_common_tokens(key, keys[left]) if left >= 0 else -1
            common_right = tokens.num_common_tokens(key, keys[right]) if right < len(keys) else -1
            if common_left > common_right:
                yield fork[keys[left]]
                left -= 1
            else:
                yield fork[keys[right]]
                right += 1

    def check_consistency(self) -> None:
        """Raise AssertionError unless links downward and upward agree."""
        linked = {block for block, node in enumerate(self.parent) if node != UNLINKED}
        found: set[int] = set()
        for node in [*self._roots.values(), *range(len(self.parent))]:
            for block in self.children(node):
                assert self.parent[block] == node, f"block {block} is below {node}, its parent is {self.parent[block]}"
                assert block not in found, f"block {block} is below two nodes"
                found.add(block)
        assert found == linked, "a block is not among the children of its parent"
        for node, fork in self._forks.items():
            assert node < 0 or len(fork) > 1
            assert all(self.key[block] == key for key, block in fork.items())
