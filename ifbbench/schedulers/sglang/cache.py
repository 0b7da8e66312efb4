"""SGLang's KV cache: the pages of each request, and the radix tree in which other requests find them
(`alloc_for_extend`, `alloc_for_decode`, `checkpoint` and `release_kv_cache` of SGLang 0.5.23)."""

from collections.abc import Callable

import numpy as np

from ifbbench.engine.arrays import IntArray, Rows
from ifbbench.engine.records import CacheState
from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import ceil_div
from ifbbench.kv.blocks import BlockCounters
from ifbbench.schedulers.sglang.free_pages import FreePages
from ifbbench.schedulers.sglang.host_pages import HostPages
from ifbbench.schedulers.sglang.radix_tree import Match, Node, RadixTree


class _Held:
    """What a request holds in the tree.

    node: end of the path that it locks.
    tokens: tokens from the root to `node`.
    inserted: number of tokens that it has published.
    """

    __slots__ = ("inserted", "node", "tokens")

    def __init__(self, node: Node | None, tokens: int) -> None:
        self.node, self.tokens, self.inserted = node, tokens, 0


class SglangCache:
    """The pages of each running request, by table row. docs/engines.md, SGLang: Radix cache.

    host: pages in host memory, None without any.
    free: pages that hold nothing.
    tree: the radix cache, None without one.
    held: [rows], number of pages of each request.
    block_tables: [rows, 1, pages per sequence], the ids of the first `named` of them; further entries are meaningless.
        While generation requests run jointly (`JointGeneration`), their pages are counted, and get ids once one is
        read.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        rows: int,
        max_seq_len: int,
        keeps_prefixes: bool,
        eviction_policy: str = "lru",
        host: HostPages | None = None,
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.free = FreePages(num_pages)
        self.host = host if keeps_prefixes else None
        self.tree = RadixTree(page_size, self.free.give_up, eviction_policy, self.host) if keeps_prefixes else None
        self.held, self.named = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.block_tables = np.zeros((rows, 1, ceil_div(max_seq_len, page_size)), np.int32)
        self.counters = BlockCounters()
        self.filled_tokens = 0
        self._in_tree: dict[int, _Held] = {}
        self.held_by_storage: Callable[[], list[int]] = list  # pages of the host, for `check_consistency`

    @property
    def free_tokens(self) -> int:
        """Tokens that fit into pages that hold nothing."""
        return self.free.count * self.page_size

    @property
    def available(self) -> int:
        """Tokens that fit into pages that no running request holds."""
        return self.free_tokens + (0 if self.tree is None else self.tree.evictable)

    @property
    def num_used(self) -> int:
        """Pages that running requests hold."""
        return self.num_pages - self.available // self.page_size

    def holds(self, row: int) -> bool:
        return row in self._in_tree

    def match(self, request: Request, limit: int) -> Match | None:
        """The longest prefix of the first `limit` tokens of a request that is in the tree, which counts as used now."""
        known = None if self.tree is None or request.options.return_context_logits else request.known_tokens()
        return None if known is None or self.tree is None else self.tree.match(known, limit)

    def lock(self, match: Match | None) -> None:
        """A request that is judged, or runs, uses a prefix: it cannot be evicted."""
        if match is not None and self.tree is not None:
            self.tree.lock(match.node)

    def unlock(self, match: Match | None) -> None:
        """A request that was judged is not taken."""
        if match is not None and self.tree is not None:
            self.tree.unlock(match.node)

    def load(self, match: Match) -> Match:
        """Bring what only the host has of a match to the device. A request that is taken has locked the match, and
        there is room."""
        assert self.tree is not None
        self.tree.lock(match.host_node)
        self.make_room(match.host_length)
        new = self.counters.allocated_new
        loaded = self.tree.load(match, self._take(match.host_length // self.page_size).copy())
        self.counters.allocated_new = new  # they have known tokens
        self.tree.unlock(match.node)
        return loaded

    def forget(self) -> None:
        """Give up all that no request uses, in both memories."""
        if self.tree is not None:
            self.tree.evict(self.num_pages * self.page_size)
            if self.host is not None:
                self.tree.evict_host(self.host.num_pages * self.page_size)

    def start(self, request: Request, match: Match | None) -> None:
        """A waiting request enters with a prefix, which it has locked."""
        row, tokens = request.slot, 0 if match is None else match.length
        self._in_tree[row] = _Held(None if match is None else match.node, tokens)
        pages = tokens // self.page_size
        if match is not None and self.tree is not None:
            self.block_tables[row, 0, :pages] = self.tree.pages_of(match.node)
        self.held[row] = self.named[row] = pages
        self.counters.reused += pages
        self.counters.missed += max(0, (request.prompt_len - 1) // self.page_size - pages)
        self.filled_tokens += tokens

    def restart(self, row: int) -> None:
        """The request in `row`, which has lost its pages, is to get them again."""
        self._in_tree[row] = _Held(None, 0)

    def make_room(self, tokens: int) -> bool:
        """Evict what no request uses until `tokens` tokens fit into free pages; whether they do."""
        if self.tree is not None and tokens > self.free_tokens:
            self.tree.evict(tokens - self.free_tokens)
            if tokens > self.free_tokens:
                self.tree.evict(tokens - self.free_tokens, is_forced=True)
        return tokens <= self.free_tokens

    def missing(self, row: int, tokens: int) -> int:
        """Pages that the request in `row` lacks for its first `tokens` tokens."""
        return max(0, ceil_div(tokens, self.page_size) - int(self.held[row]))

    def grow(self, row: int, count: int) -> None:
        """Take `count` free pages for the request in `row`."""
        held = int(self.held[row])
        self.block_tables[row, 0, held : held + count] = self._take(count)
        self.held[row] = self.named[row] = held + count

    def reserve(self, count: int) -> None:
        """Take so many free pages for requests that run jointly."""
        self._count_taken(count)
        self.free.reserve(count)

    def name_pages(self, row: int) -> None:
        """All pages of the request in `row`, which `held` has, get ids."""
        named, held = int(self.named[row]), int(self.held[row])
        if named < held:
            self.block_tables[row, 0, named:held] = self.free.take_reserved(held - named)
            self.named[row] = held

    def grow_each(self, rows: Rows, count: int = 1) -> None:
        """Take so many free pages for each of `rows`."""
        held = self.held[rows]
        pages = self._take(len(rows) * count)
        if count == 1:
            self.block_tables[rows, 0, held] = pages
        else:
            self.block_tables[rows[:, None], 0, held[:, None] + np.arange(count)] = pages.reshape(len(rows), count)
        self.held[rows] = self.named[rows] = held + count

    def grow_to(self, rows: Rows, tokens: Rows) -> None:
        """Take the free pages that each of `rows` lacks for so many tokens."""
        held = self.held[rows]
        counts = -(-tokens // self.page_size) - held
        total, before = int(counts.sum()), counts.cumsum() - counts
        columns = np.arange(total) + np.repeat(held - before, counts)
        self.block_tables[np.repeat(rows, counts), 0, columns] = self._take(total)
        self.held[rows] = self.named[rows] = held + counts

    def publish(self, request: Request, tokens: int, is_complete: bool = False) -> None:
        """Put the first `tokens` tokens of a running request into the tree, in whole pages. Where the tree has them
        already, the request's own pages become free and it uses those of the tree.

        The leaf is split where the prompt ends, so that outputs can be evicted without it. is_complete: the request is
        about to release what it holds."""
        known = request.known_tokens()
        if self.tree is None or known is None:
            return
        tree, row, held = self.tree, request.slot, self._in_tree[request.slot]
        length = min(tokens, len(known.tokens))
        length -= length % self.page_size
        if is_complete:
            self.name_pages(row)
        pages = self.block_tables[row, 0, : length // self.page_size].copy()
        found = tree.insert(known, pages, held.inserted, request.priority)
        held.inserted = max(held.inserted, length)
        prompt = min(request.original_prompt_len, length)
        prompt -= prompt % self.page_size
        if 0 < prompt < length:
            tree.insert(known, pages, prompt, request.priority + 1, prompt)
        self.free.give_up(pages[held.tokens // self.page_size : found.length // self.page_size])
        tree.lock(found.node)
        if held.node is not None:
            tree.unlock(held.node)
        if found.length > held.tokens and not is_complete:
            self.block_tables[row, 0, : len(pages)] = tree.pages_of(found.node)
        held.node, held.tokens = found.node, length

    def release(self, row: int, tokens: int) -> None:
        """Release what the request in `row` holds: its pages that the tree does not own become free. tokens: those in
        its pages."""
        held, named = self._in_tree.pop(row), int(self.named[row])
        self.free.give_up(self.block_tables[row, 0, held.tokens // self.page_size : named])
        self.free.give_up_reserved(int(self.held[row]) - named)
        if held.node is not None and self.tree is not None:
            self.tree.unlock(held.node)
        self.held[row] = self.named[row] = 0
        self.filled_tokens -= tokens

    def state(self) -> CacheState:
        size, counters = self.page_size, self.counters
        used = self.num_used
        return CacheState(
            self.num_pages,
            used,
            size,
            counters.allocated_total,
            counters.allocated_new,
            counters.reused,
            self.num_pages * size,
            used * size,
            self.filled_tokens,
            counters.missed,
        )

    def check_consistency(self) -> None:
        """Raise AssertionError unless every page is free, in the tree, or held by one request."""
        pages = self.free.ids()
        if self.tree is not None:
            nodes = list(self.tree.nodes())
            pages += [page for node in nodes for page in node.pages.tolist()]
            evictable = sum(node.length for node in nodes if not node.locks and node.is_on_device)
            if self.host is not None:
                kept = [node.host_pages for node in nodes if node.host_pages is not None]
                own = (
                    self.host.free.ids()
                    + self.held_by_storage()
                    + [page for of_node in kept for page in of_node.tolist()]
                )
                assert sorted(own) == list(range(self.host.num_pages)), "a page of the host has no owner, or two"
            assert self.tree.evictable == evictable, f"evictable tokens are {self.tree.evictable}, expected {evictable}"
        for row, held in self._in_tree.items():
            pages += self.block_tables[row, 0, held.tokens // self.page_size : int(self.named[row])].tolist()
        if not self.free.num_reserved:
            assert (self.held == self.named).all(), "a page has no id"
        assert sorted(pages) == list(range(self.num_pages)), "a page has no owner, or two"

    def _take(self, count: int) -> IntArray:
        """So many free pages, a view that the next release overwrites. The caller has made room."""
        self._count_taken(count)
        return self.free.take(count)

    def _count_taken(self, count: int) -> None:
        self.counters.allocated_total += count
        self.counters.allocated_new += count
