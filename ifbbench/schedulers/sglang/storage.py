"""Storage behind the host memory of SGLang (HiCache's L3, `--hicache-storage-backend`): pages are written there once
they were copied to the host, and prefetched to the host while a request waits (`prefetch_from_storage`,
`check_prefetch_progress` and `drain_storage_control_queues` of SGLang 0.5.23)."""

from collections import deque
from math import inf

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.request import KvLoad, Request
from ifbbench.engine.tokens import KnownTokens
from ifbbench.kv.block_names import block_names
from ifbbench.kv.store import Transfer
from ifbbench.kv.tiers import KvTiers
from ifbbench.schedulers.sglang.cache import SglangCache
from ifbbench.schedulers.sglang.host_pages import HostPages
from ifbbench.schedulers.sglang.radix_tree import Match, Node, RadixTree
from ifbbench.schedulers.sglang.rules import SglangRules

# Pages of one read (`STORAGE_BATCH_SIZE`).
BATCH_PAGES = 128
# Prefetches hold at most this share of the tokens of the host (`prefetch_capacity_limit`).
PREFETCH_SHARE = 0.5
# What a request waits at most for a prefetch, and for each further 1,024 tokens (`prefetch_timeout_base` and
# `prefetch_timeout_per_ki_token`).
TIMEOUT_S, TIMEOUT_PER_KI_TOKEN_S = 1.0, 0.25
# How often a request that has lost what it matched is looked up again
# (`--hicache-storage-prefetch-retry-max-attempts`).
MAX_ATTEMPTS = 8


class Prefetch:
    """Pages on their way from storage to the host.

    known: the tokens, of which those from `begin` on, `asked` of them, were looked for below `node`, which is locked.
    names: names of the pages that storage has of them.
    own: its pages of the host, none before storage has answered.
    transfers: the reads of `own`, in batches.
    completed: number of pages of `own` that have come, as far as the scheduler knows.
    """

    def __init__(self, node: Node, locked: tuple[Node, int], known: KnownTokens, begin: int, asked: int) -> None:
        self.node, self.locked, self.known, self.begin, self.asked = node, locked, known, begin, asked
        self.names: list[int] = []
        self.own: IntArray | None = None
        self.transfers: list[Transfer] = []
        self.completed = 0


class Waiting:
    """What storage has to do with a request in the queue.

    matched: tokens that it matched when it was looked up.
    attempts: how often it was looked up again.
    prefetch: what is on its way, None if nothing is.
    held_s: since when the prefetch keeps it from being tried; None if it does not.
    timeout_s: how long the prefetch may keep it.
    is_expired: whether that time has passed.
    span: first and end position of the tokens that came from storage.
    waited_s: begin and end of the time in which it was kept waiting.
    """

    def __init__(self) -> None:
        self.matched = self.attempts = 0
        self.prefetch: Prefetch | None = None
        self.held_s: float | None = None
        self.timeout_s = inf
        self.is_expired = False
        self.span = 0, 0
        self.waited_s: tuple[float, float] | None = None


class Storage:
    """The store of an engine, and what is on its way. Lookups take no time, and one that finds nothing is not repeated.

    occupied: tokens that were looked for, and may come.
    """

    def __init__(self, tiers: KvTiers, cache: SglangCache, rules: SglangRules) -> None:
        assert cache.tree is not None
        assert cache.host is not None
        self.tiers, self._cache, self._rules = tiers, cache, rules
        self._tree: RadixTree = cache.tree
        self._host: HostPages = cache.host
        self._store, self._size = tiers.stores[0], cache.page_size
        self._threshold = max(rules.prefetch_threshold, self._size)
        self._limit = int(PREFETCH_SHARE * self._host.num_pages * self._size)
        self.occupied = 0
        self.waiting: dict[Request, Waiting] = {}
        self._asked: list[Request] = []  # of which storage has not answered
        self._writing: deque[tuple[Transfer, tuple[Node, int]]] = deque()  # they arrive in this order
        # Prefetches that were ended before all had come, and pages that they hold until the read on its way has.
        self._ended: list[tuple[list[Transfer], IntArray]] = []
        self._to_free: list[IntArray] = []  # by the next check
        self._tree.keeps_names, self._tree.owner, self._tree.copied = True, tiers.owner, self._write

    @property
    def is_freeing(self) -> bool:
        """Whether the next check gives up pages of the host."""
        return len(self._to_free) > 0

    def held_pages(self) -> list[int]:
        """Pages of the host that are in no tree (for `check_consistency`)."""
        parts = [own for _, own in self._ended] + self._to_free
        parts += [one.prefetch.own for one in self.waiting.values() if one.prefetch and one.prefetch.own is not None]
        return [page for part in parts for page in part.tolist()]

    # Writes.

    def _write(self, node: Node) -> None:
        """A node was copied to the host: write it, and keep it there until it has arrived (`write_backup_storage`)."""
        now_s = self.tiers.now()
        chain = [name for one in [*node.path()][:0:-1] for name in one.names]
        transfer = self._store.write(self.tiers.owner, node.names, chain, now_s, is_confirmed=True)
        assert transfer is not None
        self._writing.append((transfer, self._tree.lock_host(node)))

    # Prefetches.

    def look_up(self, request: Request) -> None:
        """A request has joined the queue: prefetch what storage has behind its prefix (`_prefetch_kvcache`)."""
        waiting = self.waiting[request] = Waiting()
        self._look_up(request, waiting)

    def _look_up(self, request: Request, waiting: Waiting) -> None:
        known, match = request.known_tokens(), self._cache.match(request, request.prompt_len - 1)
        if known is None or match is None:
            return
        begin = waiting.matched = match.length + match.host_length
        node = match.host_node
        if waiting.is_expired or waiting.prefetch is not None or (node.parent is not None and node.host_pages is None):
            return
        asked = min(request.prompt_len - 1, len(known.tokens)) - begin
        asked -= asked % self._size
        if asked < self._threshold or self.occupied >= self._limit:
            return
        prefetch = waiting.prefetch = Prefetch(node, self._tree.lock_host(node), known, begin, asked)
        size, before = self._size, node.names[-1] if node.names else None
        names = block_names(known, begin // size, (begin + asked) // size, size, before, self.tiers.owner)
        prefetch.names = names[: len(self.tiers.find(names))]
        self.occupied += asked
        self._asked.append(request)

    def check(self) -> None:
        """An iteration begins: take in what has happened (`check_hicache_events`)."""
        now_s = self.tiers.now()
        for request in self._asked:
            if (waiting := self.waiting.get(request)) is not None and waiting.prefetch is not None:
                self._begin(waiting, waiting.prefetch, now_s)
        self._asked = []
        for waiting in self.waiting.values():
            if (prefetch := waiting.prefetch) is not None and prefetch.own is not None:
                come = sum([transfer.arrived_s <= now_s for transfer in prefetch.transfers])
                prefetch.completed = min(come * BATCH_PAGES, len(prefetch.own))
                if come == len(prefetch.transfers):
                    self._insert(waiting, prefetch, max([one.arrived_s for one in prefetch.transfers]))
        while self._writing and self._writing[0][0].arrived_s <= now_s:
            self._tree.unlock_host(self._writing.popleft()[1])
        for own in self._to_free:
            self._host.free.give_up(own)
        self._to_free = []
        ended, self._ended = self._ended, []
        for one in ended:
            if all(transfer.arrived_s <= now_s for transfer in one[0]):
                self._to_free.append(one[1])
            else:
                self._ended.append(one)
        self._note_waits()

    def _begin(self, waiting: Waiting, prefetch: Prefetch, now_s: float) -> None:
        """Storage has answered: read the pages that it has, as many as the host has room for. Few are not worth it."""
        size, names, count = self._size, prefetch.names, len(prefetch.names)
        if count * size >= self._threshold:
            if count > self._host.free.count:
                self._tree.evict_host(count * size)
            count = min(count, self._host.free.count)
        if count * size < self._threshold:
            self._retire(waiting, prefetch)
            return
        prefetch.own = self._host.free.take(count).copy()
        batches = [names[index : min(index + BATCH_PAGES, count)] for index in range(0, count, BATCH_PAGES)]
        prefetch.transfers = self._store.load_in_turn(self.tiers.owner, batches, now_s)

    def _retire(self, waiting: Waiting, prefetch: Prefetch) -> None:
        """Nothing is on its way for a request any more."""
        self._tree.unlock_host(prefetch.locked)
        self.occupied -= prefetch.asked
        waiting.prefetch = None

    def _insert(self, waiting: Waiting, prefetch: Prefetch, until_s: float) -> None:
        """Put what has come into the tree (`_handle_prefetch_result`). until_s: when it had."""
        own = prefetch.own
        assert own is not None
        added = 0
        if prefetch.completed:
            added = self._tree.insert_host(prefetch.node, prefetch.known, prefetch.begin, own[: prefetch.completed])
        self._retire(waiting, prefetch)
        end = prefetch.begin + prefetch.completed * self._size
        waiting.span = end - added, end
        if waiting.held_s is not None:
            waiting.waited_s = waiting.held_s, max(waiting.held_s, until_s)

    def _end(self, waiting: Waiting, prefetch: Prefetch, keeps: bool) -> None:
        """End a prefetch, of which not all has come; what has is kept, if `keeps`."""
        own, now_s = prefetch.own, self.tiers.now()
        if own is None:
            self._retire(waiting, prefetch)
        else:
            self._store.drop(prefetch.transfers)
            self._ended.append((prefetch.transfers, own[prefetch.completed :]))
            if not keeps:
                self._to_free.append(own[: prefetch.completed])
                prefetch.completed = 0
            self._insert(waiting, prefetch, now_s)
        if waiting.held_s is not None:
            waiting.waited_s = waiting.held_s, now_s

    def may_try(self, request: Request) -> bool:
        """Whether a request of the queue is tried now, or waits for what is on its way
        (`check_prefetch_progress`)."""
        waiting = self.waiting[request]
        prefetch, policy = waiting.prefetch, self._rules.prefetch_policy
        if prefetch is None:
            return True
        now_s = self.tiers.now()
        if policy == "best_effort" or (policy == "timeout" and self._has_expired(waiting, prefetch, now_s)):
            waiting.is_expired = policy == "timeout"
            self._end(waiting, prefetch, keeps=True)
            return True
        if waiting.held_s is None:
            waiting.held_s = now_s
            if policy == "timeout":
                per_page_s = TIMEOUT_PER_KI_TOKEN_S * self._size / 1024
                waiting.timeout_s = TIMEOUT_S + prefetch.asked // self._size * per_page_s
            self._note_waits()
        return False

    def _has_expired(self, waiting: Waiting, prefetch: Prefetch, now_s: float) -> bool:
        if prefetch.own is not None and prefetch.completed == len(prefetch.own):
            return False
        # SGLang asks whether more time has passed. Here the clock may stop at the deadline, and wait for it again.
        return waiting.held_s is not None and now_s >= waiting.held_s + waiting.timeout_s

    def has_lost(self, request: Request, match: Match | None) -> bool:
        """Whether a request matches less than when it was looked up, so that it is looked up again and not tried now
        (`_prefetch_after_device_hit_loss`)."""
        waiting, matched = self.waiting[request], 0 if match is None else match.length + match.host_length
        if not waiting.matched or matched >= waiting.matched:
            return False
        if waiting.attempts >= MAX_ATTEMPTS:
            waiting.matched = matched
            return False
        waiting.attempts += 1
        self._look_up(request, waiting)
        return True

    def started(self, request: Request, reused: int) -> None:
        """A request of the queue runs, of which so many tokens were found."""
        waiting = self.waiting.pop(request)
        first, end = waiting.span
        tokens = max(0, min(end, reused) - first)
        if tokens or waiting.waited_s is not None:
            begin_s, end_s = waiting.waited_s or (self.tiers.now(),) * 2
            load = KvLoad(begin_s, end_s, {self._store.name: tokens}, request.pauses > 0)
            request.loads = (*request.loads, load)
        self._note_waits()

    def leave(self, request: Request) -> None:
        """A request leaves the queue without having run (`release_aborted_request`)."""
        if (waiting := self.waiting.pop(request, None)) is not None and waiting.prefetch is not None:
            self._end(waiting, waiting.prefetch, keeps=False)

    def _note_waits(self) -> None:
        """When the engine has something to do for its store."""
        prefetching = [one for one in self.waiting.values() if one.prefetch is not None]
        held = [one.held_s + one.timeout_s for one in prefetching if one.held_s is not None]
        is_ended = bool(self._ended or self._to_free)
        self.tiers.is_awaited = bool(prefetching or self._writing or is_ended or self._asked)
        self.tiers.deadline_s = min(held, default=inf)
