"""SGLang's radix tree: pages of KV cache by the tokens that they hold (`RadixCache` of SGLang 0.5.23).

An edge holds a run of tokens, a multiple of the page. Times are numbers of operations: SGLang reads a clock, of which
only the order decides. With host memory (HiCache), what is evicted from the device may stay there: below a node that
only the host has are only such nodes.
"""

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias

import numpy as np

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.tokens import BlockKey, BlockTokens, KnownTokens
from ifbbench.kv.block_names import block_names
from ifbbench.schedulers.sglang.host_pages import HostPages

Rank: TypeAlias = tuple[float, ...]


class Node:
    """A node of the tree: an edge, and where its tokens are.

    parent: None for the root.
    key: the tokens of the edge.
    length: number of tokens of the edge.
    pages: pages of the device that hold them, if `is_on_device`.
    host_pages: pages of the host that hold them, None if none do.
    children: by `first_page`, the tokens of their first pages; those of the root, with what requests must have in
        common to share.
    locks: number of running requests that use it.
    hits: number of insertions of other requests that reached it.
    num_on_device: number of children that are on the device.
    host_locks: number of those that keep its `host_pages`.
    segment: number of a node that `lock_host` has locked, which the uppermost part keeps when it is split.
    names: names of its pages in storage, if nodes have them.
    used, created: when it was used last, and created.
    """

    __slots__ = (
        "children", "created", "first_page", "hits", "host_locks", "host_pages", "is_on_device", "key", "length",
        "locks", "names", "num_on_device", "pages", "parent", "priority", "segment", "used",
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
        self.locks = self.hits = self.num_on_device = self.host_locks = self.segment = 0
        self.names: list[int] = []
        self.is_on_device = True
        self.host_pages: IntArray | None = None
        self.used = self.created = now
        self.priority = priority

    @property
    def is_evictable(self) -> bool:
        """Whether it is a leaf of those on the device, and nothing uses it."""
        return self.parent is not None and self.is_on_device and not self.locks and not self.num_on_device

    @property
    def is_host_leaf(self) -> bool:
        """Whether only the host has it, as a leaf that nothing uses."""
        is_used = self.locks or self.host_locks or self.children
        return self.parent is not None and not self.is_on_device and not is_used

    def path(self) -> Iterator["Node"]:
        """The node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


SLRU_PROTECTED_HITS = 2
MIN_LEAVES = 1024
NO_PAGES = np.zeros(0, np.int32)
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


class Match:
    """The longest prefix in the tree: `length` tokens on the device, which end at `node`, and `host_length` further
    ones that only the host has, which end at `host_node`."""

    def __init__(self, length: int, node: Node, host_length: int, host_node: Node) -> None:
        self.length, self.node, self.host_length, self.host_node = length, node, host_length, host_node

    def on_device(self) -> "Match":
        """The part on the device."""
        return Match(self.length, self.node, 0, self.node)


def _is_locked_below(node: Node) -> bool:
    """Whether something keeps what the host has below a node."""
    return any(one.locks or one.host_locks or _is_locked_below(one) for one in node.children.values())


class RadixTree:
    """Pages by their tokens and those before them.

    free: takes the pages that the tree gives up.
    host: None without host memory.

    evictable, protected: tokens on the device, in nodes that nothing uses, and in the others.
    keeps_names: whether nodes know what storage calls their pages.
    owner: see `block_names`.
    copied: called with each node that was copied to the host.
    """

    def __init__(
        self,
        page_size: int,
        free: Callable[[IntArray], None],
        eviction_policy: str = "lru",
        host: HostPages | None = None,
    ) -> None:
        self.page_size, self.host = page_size, host
        self.evictable = self.protected = 0
        self._free, self._rank = free, RANKS[eviction_policy]
        self.root = Node(None, None, b"", 0, np.zeros(0, np.int32), 0, 0.0)
        self._now = 0
        # Nodes that may have become evictable since the latest eviction, and those that were then: rank, number, node;
        # entries may be out of date.
        self._offered: dict[Node, None] = {}
        self._leaves: list[tuple[Any, ...]] = []
        self._num_offers, self._max_leaves = 0, MIN_LEAVES
        self.keeps_names, self.owner = False, 0
        self.copied: Callable[[Node], None] | None = None
        self._num_segments = 0
        # Nodes that the present insertion copies to the host.
        self._to_store: list[Node] = []
        # Nodes in both memories, those first that were so first; entries may be out of date.
        self._in_both: dict[Node, None] = {}

    def match(self, known: KnownTokens, limit: int) -> Match:
        """The longest prefix of the first `limit` tokens, in whole pages. Nodes on the way count as used now; the last
        is split where the prefix ends inside it."""
        return self._walk(known, self._aligned(limit), 0.0)[0]

    def insert(
        self, known: KnownTokens, pages: IntArray, inserted: int = 0, priority: float = 0.0, limit: int | None = None
    ) -> Match:
        """Add the first tokens, those that fill `pages`. Returns how many tokens were there before, whose pages stay
        those of the tree, and the last node.

        inserted: tokens that the same request inserted before, which are no hits.
        limit: tokens, if fewer than those of `pages`.
        """
        end = len(pages) * self.page_size if limit is None else self._aligned(limit)
        found, begin = self._walk(known, end, priority, inserted, pages)
        node = found.node
        if begin < end:
            key, first_page = known.tokens.key(begin, end), self._first_page(node, known, begin)
            rest = pages[begin // self.page_size : end // self.page_size]
            parent, node = node, Node(node, first_page, key, end - begin, rest, self._tick(), priority)
            self._name(node, known, begin, end)
            parent.children[first_page] = node
            parent.num_on_device += 1
            self.evictable += node.length
            self._count_hit(node, end > inserted)
            self._offer(node)
        for one in self._to_store:
            self._store_path(one)
        self._to_store.clear()
        return Match(found.length, node, 0, node)

    def pages_of(self, node: Node) -> IntArray:
        """[pages] from the root to `node`."""
        parts = [one.pages for one in node.path()]
        return np.concatenate(parts[::-1]) if parts else NO_PAGES

    def load(self, match: Match, pages: IntArray) -> Match:
        """Copy what only the host has of a match to `pages` of the device."""
        host, first, node = self.host, len(pages), match.host_node
        assert host is not None
        while not node.is_on_device and node.parent is not None and node.host_pages is not None:
            first -= len(node.host_pages)
            self._put_on_device(node, pages[first : first + len(node.host_pages)])
            host.load(node.host_pages, node.pages)
            node = node.parent
        return Match(match.length + match.host_length, match.host_node, 0, match.host_node)

    def lock(self, node: Node) -> None:
        """A request uses the path to `node`."""
        for one in node.path():
            if not one.locks and one.is_on_device:
                self.evictable -= one.length
                self.protected += one.length
            one.locks += 1

    def unlock(self, node: Node) -> None:
        """A request no longer uses the path to `node`."""
        for one in node.path():
            one.locks -= 1
            if not one.locks and one.is_on_device:
                self.evictable += one.length
                self.protected -= one.length
                self._offer(one)

    def evict(self, num_tokens: int, is_forced: bool = False) -> int:
        """Give up leaves of the device until they had `num_tokens` tokens or more, or none is left; returns how many
        they had. What the host has of them stays in the tree. A leaf that the host has no room for, with parts below it
        that something keeps there, stays, unless `is_forced` (SGLang fails then)."""
        kept = list[tuple[Any, ...]]()
        evicted, host = 0, self.host
        for node in self._offered:
            self._rank_leaf(node)
        self._offered.clear()
        while evicted < num_tokens and self._leaves:
            entry = heappop(self._leaves)
            node = entry[-1]
            parent = node.parent
            if parent is None or not node.is_evictable or entry[:-2] != self._rank(node):
                continue
            is_due = host is not None and host.writes_back and node.host_pages is None
            if is_due and not self._store(node) and not is_forced and _is_locked_below(node):
                kept.append(entry)
                continue
            self._free(node.pages)
            evicted += node.length
            self.evictable -= node.length
            parent.num_on_device -= 1
            if node.host_pages is None:
                self._remove(node)
            else:
                node.is_on_device, node.pages = False, NO_PAGES
            self._rank_leaf(parent)
        for entry in kept:
            heappush(self._leaves, entry)
        return evicted

    def evict_host(self, num_tokens: int) -> int:
        """Give up leaves that only the host has, likewise. SGLang collects and ranks them each time. With write-back,
        what the device has too is given up first."""
        evicted = self._give_up_copies(num_tokens)
        leaves = [(self._rank(one), index, one) for index, one in enumerate(self.nodes()) if one.is_host_leaf]
        heapify(leaves)
        while evicted < num_tokens and leaves:
            _rank, number, node = heappop(leaves)
            parent = node.parent
            evicted += node.length
            self._remove(node)
            if parent is not None and parent.is_host_leaf:
                heappush(leaves, (self._rank(parent), number, parent))
        return evicted

    def _give_up_copies(self, num_tokens: int) -> int:
        """Give up what the device has too until it had `num_tokens` tokens: first of nodes that are not about to be
        evicted there, in the order in which the copies came to be. Returns how many they had."""
        host, given_up = self.host, 0
        if host is None or not host.writes_back:
            return 0
        for spares_evictable in (True, False):
            for node in list(self._in_both):
                if given_up >= num_tokens:
                    return given_up
                if not node.is_on_device or node.host_pages is None or node.parent is None:
                    del self._in_both[node]
                elif not (node.host_locks or (spares_evictable and node.is_evictable)):
                    given_up += node.length
                    host.release(node.host_pages)
                    node.host_pages = None
                    del self._in_both[node]
        return given_up

    def _note_copy(self, node: Node) -> None:
        """The device and the host have `node` now."""
        is_copy = self.host is not None and self.host.writes_back and node.host_pages is not None
        if is_copy and node not in self._in_both:  # one that is out of date keeps its place
            self._in_both[node] = None

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent is not None:
                yield node

    def _walk(
        self, known: KnownTokens, limit: int, priority: float, inserted: int | None = None, pages: IntArray = NO_PAGES
    ) -> tuple[Match, int]:
        """Go down along the first `limit` tokens; returns also how many were found, on the device or not. inserted,
        pages: see `insert`, which puts what only the host has on the device again; None for a lookup, which counts no
        hit."""
        now, tokens, node, length = self._tick(), known.tokens, self.root, 0
        on_device, num_on_device, size = self.root, 0, self.page_size
        while length < limit and (child := node.children.get(self._first_page(node, known, length))) is not None:
            child.used = now
            end = min(length + child.length, limit)
            common = self._aligned(tokens.num_common_tokens(child.key, tokens.key(length, end)))
            node = child if common == child.length else self._split(child, tokens, common)
            length += common
            if node.is_on_device:
                on_device, num_on_device = node, length
            if inserted is not None:
                node.priority = max(node.priority, priority)
                if not node.is_on_device:
                    self._put_on_device(node, pages[(length - common) // size : length // size])
                self._count_hit(node, length > inserted)
            self._offer(child)
            if node is not child:  # it is a leaf of the device if only the host has the rest
                self._offer(node)
        if inserted is not None:
            return Match(num_on_device, node, 0, node), length
        return Match(num_on_device, on_device, length - num_on_device, node), length

    def _count_hit(self, node: Node, is_hit: bool) -> None:
        """A request has inserted `node`, for the first time if `is_hit`."""
        host = self.host
        if host is None:
            node.hits += is_hit
        elif is_hit and not host.writes_back:
            node.hits += 1
            if node.host_pages is None and node.hits >= host.min_hits:
                self._to_store.append(node)

    def _put_on_device(self, node: Node, pages: IntArray) -> None:
        """`pages` have from now on what only the host had."""
        node.is_on_device, node.pages = True, pages
        self._note_copy(node)
        if node.parent is not None:
            node.parent.num_on_device += 1
        if node.locks:
            self.protected += node.length
        else:
            self.evictable += node.length
            self._offer(node)

    def _store_path(self, node: Node) -> None:
        """Copy what the host does not have of the path to `node`, as far as it has room."""
        for one in [one for one in node.path() if one.host_pages is None][::-1]:
            if not self._store(one):
                return

    def _store(self, node: Node) -> bool:
        """Copy a node to the host, if that has room, or can make some."""
        host = self.host
        assert host is not None
        missing = (len(node.pages) - host.free.count) * self.page_size
        if missing > 0 and self.evict_host(missing) < missing:
            return False
        node.host_pages = host.store(node.pages)
        self._note_copy(node)
        if self.copied is not None:
            self.copied(node)
        return True

    # Storage behind the host.

    def _name(self, node: Node, known: KnownTokens, begin: int, end: int) -> None:
        """`node` holds these tokens: what storage calls its pages."""
        if self.keeps_names and node.parent is not None:
            size, before = self.page_size, node.parent.names[-1] if node.parent.names else None
            node.names = block_names(known, begin // size, end // size, size, before, self.owner)

    def lock_host(self, node: Node) -> tuple[Node, int]:
        """What the host has of a node stays there; returns what `unlock_host` needs. Parts of it stay, too, once it is
        split."""
        if node.host_pages is None:
            return node, 0
        if not node.segment:
            self._num_segments += 1
            node.segment = self._num_segments
        node.host_locks += 1
        return node, node.segment

    def unlock_host(self, locked: tuple[Node, int]) -> None:
        node, segment = locked
        while segment and node.host_pages is not None and node.parent is not None:
            node.host_locks -= 1
            if node.segment == segment:
                return
            node = node.parent

    def insert_host(self, node: Node, known: KnownTokens, begin: int, own: IntArray) -> int:
        """Add the tokens from `begin` on, those that fill the pages `own` of the host, below `node`; returns how many
        of them came to be. Pages that the tree does not take become free (`insert_host` of SGLang's
        `UnifiedTreeCore`)."""
        host, size, tokens, length = self.host, self.page_size, known.tokens, begin
        assert host is not None
        if node.parent is None and node is not self.root:  # given up for lack of host memory
            host.free.give_up(own)
            return 0
        end, added = begin + len(own) * size, 0
        node.used = self._tick()
        self._offer(node)
        while length < end and (child := node.children.get(self._first_page(node, known, length))) is not None:
            child.used = self._tick()
            until = min(length + child.length, end)
            common = self._aligned(tokens.num_common_tokens(child.key, tokens.key(length, until)))
            node = child if common == child.length else self._split(child, tokens, common)
            part = own[(length - begin) // size : (length - begin + common) // size]
            length += common
            if node.host_pages is None and not host.writes_back:
                node.host_pages = part.copy()
                added += common
            else:
                host.free.give_up(part)
            self._offer(child)
            if node is not child:
                self._offer(node)
        rest = own[(length - begin) // size :]
        if not len(rest):
            return added
        if node.parent is not None and node.host_pages is None and not host.writes_back:
            host.free.give_up(rest)
            return added
        first_page = self._first_page(node, known, length)
        new = Node(node, first_page, tokens.key(length, end), end - length, NO_PAGES, self._tick(), node.priority)
        new.is_on_device, new.host_pages = False, rest.copy()
        self._name(new, known, length, end)
        node.children[first_page] = new
        return added + end - length

    def _remove(self, node: Node) -> None:
        """Take a node that is not on the device out of the tree, and what the host has below it."""
        parent = node.parent
        assert parent is not None
        for child in list(node.children.values()):
            self._remove(child)
        if node.host_pages is not None and self.host is not None:
            self.host.release(node.host_pages)
            node.host_pages = None
        del parent.children[node.first_page]
        node.parent = None

    def _split(self, child: Node, tokens: BlockTokens, length: int) -> Node:
        """A new node for the first `length` tokens of the edge to `child`; what uses or hit one did so with both."""
        parent = child.parent
        assert parent is not None
        first, rest = tokens.split_key(child.key, length)
        pages = length // self.page_size
        node = Node(parent, child.first_page, first, length, child.pages[:pages], self._tick(), child.priority)
        node.created, node.hits, node.locks = child.created, child.hits, child.locks
        node.host_locks, node.segment, child.segment = child.host_locks, child.segment, 0
        node.names, child.names = child.names[:pages], child.names[pages:]
        node.is_on_device, node.num_on_device = child.is_on_device, int(child.is_on_device)
        if child.host_pages is not None:
            node.host_pages, child.host_pages = child.host_pages[:pages], child.host_pages[pages:]
            if node.is_on_device:
                self._note_copy(node)
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
        """Note what may be evicted from now on. Most of it is used again before the next eviction."""
        self._offered[node] = None

    def _rank_leaf(self, node: Node) -> None:
        """Note what may be evicted, as it ranks now."""
        if not node.is_evictable:
            return
        self._num_offers += 1
        heappush(self._leaves, (*self._rank(node), self._num_offers, node))
        if len(self._leaves) > self._max_leaves:  # most entries are out of date
            evictable = [one for one in self.nodes() if one.is_evictable]
            self._leaves = [(*self._rank(one), index, one) for index, one in enumerate(evictable)]
            heapify(self._leaves)
            self._max_leaves = 2 * len(self._leaves) + MIN_LEAVES

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _aligned(self, length: int) -> int:
        return length - length % self.page_size
