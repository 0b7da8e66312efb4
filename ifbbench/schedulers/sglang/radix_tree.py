"""SGLang's radix tree: pages of KV cache by the tokens that they hold (`RadixCache` of SGLang 0.5.23).

An edge holds a run of tokens, a multiple of the page. Times are numbers of operations: SGLang reads a clock, of which
only the order decides.
"""

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeAlias

import numpy as np

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.tokens import BlockKey, BlockTokens, KnownTokens

Rank: TypeAlias = tuple[float, ...]


class Node:
    """The end of an edge.

    parent: None of the root. key: the tokens of the edge, `length` of them, in `pages`. children: by `first_page`, the
    tokens of their first pages; of the root with what requests must have in common to share. locks: running requests
    that use it. hits: insertions of other requests that reached it. used, created: times."""

    __slots__ = (
        "children", "created", "first_page", "hits", "key", "length", "locks", "pages", "parent", "priority", "used",
    )  # fmt: skip

    def __init__(
        self,
        parent: "Node | None",
        first_page: Hashable,
        key: BlockKey,
        length: int,
        pages: IntArray,
        now: int,
        priority: float,
    ) -> None:
        self.parent, self.first_page, self.key, self.length, self.pages = parent, first_page, key, length, pages
        self.children: dict[Hashable, Node] = {}
        self.locks = self.hits = 0
        self.used = self.created = now
        self.priority = priority

    @property
    def is_evictable(self) -> bool:
        """Whether it is a leaf that nothing uses."""
        return self.parent is not None and not self.locks and not self.children

    def path(self) -> Iterator["Node"]:
        """The node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


SLRU_PROTECTED_HITS = 2
MIN_LEAVES = 1024
# By --radix_eviction_policy, what decides between leaves: the smallest is evicted first.
RANKS: dict[str, Callable[[Node], Rank]] = {
    "lru": lambda node: (node.used,),
    "lfu": lambda node: (node.hits, node.used),
    "fifo": lambda node: (node.created,),
    "mru": lambda node: (-node.used,),
    "filo": lambda node: (-node.created,),
    "priority": lambda node: (node.priority, node.used),
    "slru": lambda node: (node.hits >= SLRU_PROTECTED_HITS, node.used),
}


class Match(NamedTuple):
    """The longest prefix in the tree: `length` tokens, which end at `node`."""

    length: int
    node: Node


class RadixTree:
    """Pages by their tokens and those before them. free: takes the pages that the tree gives up.

    evictable, protected: tokens in nodes that nothing uses, and in the others.
    """

    def __init__(self, page_size: int, free: Callable[[IntArray], None], eviction_policy: str = "lru") -> None:
        self.page_size = page_size
        self.evictable = self.protected = 0
        self._free, self._rank = free, RANKS[eviction_policy]
        self.root = Node(None, None, b"", 0, np.zeros(0, np.int32), 0, 0.0)
        self._now = 0
        # Leaves that could be evicted when they were added, by rank; entries may be out of date.
        self._leaves: list[tuple[Rank, int, Node]] = []
        self._num_offers, self._max_leaves = 0, MIN_LEAVES

    def match(self, known: KnownTokens, limit: int) -> Match:
        """The longest prefix of the first `limit` tokens, in whole pages. Nodes on the way count as used now; the last
        is split where the prefix ends inside it."""
        return self._walk(known, self._aligned(limit), 0.0)

    def insert(
        self, known: KnownTokens, pages: IntArray, inserted: int = 0, priority: float = 0.0, limit: int | None = None
    ) -> Match:
        """Add the first tokens, those that fill `pages`. Returns how many tokens were there before, whose pages stay
        those of the tree, and the last node.

        inserted: tokens that the same request inserted before, which are no hits. limit: tokens, if fewer than those of
        `pages`."""
        length = len(pages) * self.page_size if limit is None else self._aligned(limit)
        found = self._walk(known, length, priority, inserted)
        if found.length == length:
            return found
        key = known.tokens.key(found.length, length)
        first_page = self._first_page(found.node, known, found.length)
        rest = pages[found.length // self.page_size : length // self.page_size]
        node = Node(found.node, first_page, key, length - found.length, rest, self._tick(), priority)
        node.hits += length > inserted
        found.node.children[first_page] = node
        self.evictable += node.length
        self._offer(node)
        return Match(found.length, node)

    def pages_of(self, node: Node) -> IntArray:
        """[pages] from the root to `node`."""
        parts = [one.pages for one in node.path()]
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)

    def lock(self, node: Node) -> None:
        """A request uses the path to `node`."""
        for one in node.path():
            if not one.locks:
                self.evictable -= one.length
                self.protected += one.length
            one.locks += 1

    def unlock(self, node: Node) -> None:
        """A request no longer uses the path to `node`."""
        for one in node.path():
            one.locks -= 1
            if not one.locks:
                self.evictable += one.length
                self.protected -= one.length
                self._offer(one)

    def evict(self, num_tokens: int) -> int:
        """Give up leaves until they had `num_tokens` tokens or more, or none is left; returns how many they had."""
        evicted = 0
        while evicted < num_tokens and self._leaves:
            rank, _number, node = heappop(self._leaves)
            parent = node.parent
            if parent is None or not node.is_evictable or rank != self._rank(node):
                continue
            self._free(node.pages)
            evicted += node.length
            self.evictable -= node.length
            del parent.children[node.first_page]
            node.parent = None
            self._offer(parent)
        return evicted

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent is not None:
                yield node

    def _walk(self, known: KnownTokens, limit: int, priority: float, inserted: int | None = None) -> Match:
        """Go down along the first `limit` tokens. inserted: see `insert`; None for a lookup, which counts no hit."""
        now, tokens, node, length = self._tick(), known.tokens, self.root, 0
        while length < limit and (child := node.children.get(self._first_page(node, known, length))) is not None:
            child.used = now
            end = min(length + child.length, limit)
            common = self._aligned(tokens.num_common_tokens(child.key, tokens.key(length, end)))
            node = child if common == child.length else self._split(child, tokens, common)
            length += common
            if inserted is not None:
                node.priority = max(node.priority, priority)
                node.hits += length > inserted
            self._offer(child)
        return Match(length, node)

    def _split(self, child: Node, tokens: BlockTokens, length: int) -> Node:
        """A new node for the first `length` tokens of the edge to `child`; what uses or hit one did so with both."""
        parent = child.parent
        assert parent is not None
        first, rest = tokens.split_key(child.key, length)
        pages = length // self.page_size
        node = Node(parent, child.first_page, first, length, child.pages[:pages], self._tick(), child.priority)
        node.hits, node.locks = child.hits, child.locks
        parent.children[node.first_page] = node
        child.parent, child.key, child.length, child.pages = node, rest, child.length - length, child.pages[pages:]
        child.first_page, _rest = tokens.split_key(rest, self.page_size)
        node.children[child.first_page] = child
        return node

    def _first_page(self, node: Node, known: KnownTokens, length: int) -> Hashable:
        """The key, among the children of `node`, of tokens of which the first `length` end there."""
        page = known.tokens.key(length, length + self.page_size)
        return page if node.parent is not None else (known.identity, page)

    def _offer(self, node: Node) -> None:
        """Note what may be evicted, as it ranks now."""
        if not node.is_evictable:
            return
        self._num_offers += 1
        heappush(self._leaves, (self._rank(node), self._num_offers, node))
        if len(self._leaves) > self._max_leaves:  # most entries are out of date
            self._leaves = [(self._rank(one), index, one) for index, one in enumerate(self.nodes()) if one.is_evictable]
            heapify(self._leaves)
            self._max_leaves = 2 * len(self._leaves) + MIN_LEAVES

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _aligned(self, length: int) -> int:
        return length - length % self.page_size
