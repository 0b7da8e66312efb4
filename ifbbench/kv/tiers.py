"""The stores beneath the device memory of one engine, from the quickest to the slowest, and what is on its way."""

from collections.abc import Hashable, Sequence
from math import inf
from typing import Any

from ifbbench.clock import Clock
from ifbbench.engine.request import KvLoad, Request
from ifbbench.kv.block_names import BlockNames
from ifbbench.kv.store import KvStore, Transfer


class _Loading:
    """A request that waits for blocks.

    keys: the blocks that it reads from each store.
    """

    def __init__(self, request: Request, begin_s: float, keys: Sequence[Sequence[Hashable]]) -> None:
        self.request, self.begin_s, self.keys = request, begin_s, keys
        self.transfers: list[tuple[KvStore, Transfer]] = []

    @property
    def arrival_s(self) -> float:
        """When all has arrived, or not earlier."""
        return max([store.arrival_of(transfer) for store, transfer in self.transfers])

    @property
    def arrived_s(self) -> float:
        """When all has arrived; infinite before."""
        return max([transfer.arrived_s for _, transfer in self.transfers])


class KvTiers:
    """The stores of an engine, which is number `owner` of those that share some of them: its `KvTransfers`.

    A block is read from the first store that has it, and written to each that has not; one that was read to the quicker
    ones, once the engine takes it in.

    writes_back: whether blocks are written when they are evicted from the device; otherwise once they are computed.
    has_queue: whether requests wait that may look for blocks.
    others_s: time before which no other engine writes to the stores.
    is_awaited: whether the engine waits for transfers other than loads of requests.
    deadline_s: when the engine does something, whatever has come.
    prefetches: whether what only slower stores have is copied to the first one before a request gets blocks.
    """

    def __init__(
        self, stores: Sequence[KvStore], tokens_per_block: int, clock: Clock, writes_back: bool, owner: int = 0
    ) -> None:
        self.stores, self.writes_back, self.owner = stores, writes_back, owner
        self._size, self._clock = tokens_per_block, clock
        self._loading: list[_Loading] = []
        # Blocks so far that no other request can look for. Each is a block of its own.
        self._num_unnamed, self.has_queue, self.others_s = 0, False, inf
        self.is_awaited, self.deadline_s, self.prefetches = False, inf, False
        self._prefetching: dict[Request, _Loading] = {}
        self._prefetched: set[Request] = set()
        self._advanced_s = -inf  # up to when this engine has advanced the stores

    # Asked by the scheduler.

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """The numbers of the stores that have the first blocks of `keys`, up to the first block that none has."""
        self._advance()
        found = list[int]()
        for key in keys:
            number = next((number for number, store in enumerate(self.stores) if store.has(key)), -1)
            if number < 0:
                break
            found.append(number)
        return found

    def load(self, request: Request, keys: Sequence[Hashable], found: Sequence[int]) -> None:
        """Begin to load blocks, which `find` has found in these stores, for `request`."""
        now_s = self._clock.now()
        of_stores = [
            [key for key, other in zip(keys, found, strict=True) if other == number]
            for number in range(len(self.stores))
        ]
        loading = _Loading(request, now_s, of_stores)
        for store, of_store in zip(self.stores, of_stores, strict=True):
            if of_store:
                loading.transfers.append((store, store.load(self.owner, of_store, now_s)))
        self._loading.append(loading)

    def is_loading(self, request: Request) -> bool:
        """Whether blocks are on their way to `request`."""
        return any(one.request is request for one in self._loading)

    def waits_for_prefetch(self, request: Request, keys: Sequence[Hashable]) -> bool:
        """Whether blocks of `keys`, the first that the device has not, are on their way to the first store for a
        request that may start. It is looked for once."""
        if request in self._prefetched:
            return request in self._prefetching
        self._prefetched.add(request)
        found, now_s = self.find(keys), self._clock.now()
        of_stores = [
            [key for key, other in zip(keys, found, strict=False) if other == number and number]
            for number in range(len(self.stores))
        ]
        if not any(of_stores):
            return False
        loading = self._prefetching[request] = _Loading(request, now_s, of_stores)
        for store, of_store in zip(self.stores, of_stores, strict=True):
            if of_store:
                loading.transfers.append((store, store.load(self.owner, of_store, now_s)))
        return True

    def _take_prefetched(self, now_s: float) -> None:
        """Write to the first store what has come for it; what is there, requests no longer wait for."""
        for one in [one for one in self._prefetching.values() if one.arrived_s < inf]:
            keys = [key for of_store in one.keys for key in of_store]
            if keys:
                transfer = self.stores[0].write(self.owner, keys, (), now_s, is_confirmed=True)
                assert transfer is not None
                one.keys, one.transfers = [], [(self.stores[0], transfer)]
            else:
                del self._prefetching[one.request]
                load = KvLoad(one.begin_s, one.arrived_s, {}, one.request.pauses > 0)
                one.request.loads = (*one.request.loads, load)

    def write(self, keys: Sequence[int | None], chain: Sequence[Hashable] = ()) -> None:
        """Write blocks, None for one that holds what no other request can look for. chain: blocks of the same prompt
        before them."""
        self._advance()
        named = list[Hashable]()
        for key in keys:
            named.append((self.owner, self._num_unnamed) if key is None else key)
            self._num_unnamed += key is None
        for store in self.stores:
            store.write(self.owner, named, chain, self._clock.now())

    def write_filled(self, names: BlockNames, request: Request, start: int, end: int) -> None:
        """Tokens `start` to `end` - 1 of a request are computed: write the blocks that they fill."""
        first, last = start // self._size, end // self._size
        if last > first:
            keys = names.shared(request, 0, last)
            new: list[int | None] = [*keys[first:]]
            self.write(new + [None] * (last - first - len(new)), keys[:first])

    def write_received(self, names: BlockNames, request: Request, end: int) -> None:
        """The first `end` tokens of a request have come from another engine: write the blocks that they fill, unless
        the stores have them from that engine. Blocks that no other request can look for are left out: that engine has
        written them under names of its own."""
        if keys := names.shared(request, 0, end // self._size):
            self.write(keys)

    def forget(self, request: Request) -> None:
        """`request` has ended: it waits for nothing."""
        self._loading = [one for one in self._loading if one.request is not request]
        self._prefetching.pop(request, None)
        self._prefetched.discard(request)

    def lose(self, now_s: float) -> None:
        """The engine has failed: what it has not written is lost."""
        for store in self.stores:
            store.lose_writes(self.owner, now_s)

    # Asked by the loop.

    @property
    def next_s(self) -> float:
        """Before this time nothing arrives that a request waits for, or that changes what the queue finds; infinite if
        nothing does."""
        next_s = min([self.deadline_s, *[one.arrival_s for one in self._loading]])
        if not (self.has_queue or self.is_awaited or self._prefetching):
            return next_s
        # Another engine may have advanced a store that they share to the same time: what has arrived there is no next
        # arrival any more, but this engine has not looked yet.
        come = [store.latest_arrival_s for store in self.stores if store.latest_arrival_s > self._advanced_s]
        return min([next_s, *come, *[store.next_arrival_s for store in self.stores]])

    def kept(self, request: Request, now_s: float) -> None:
        """No request is sent on: its blocks are written as they are filled (`write`)."""

    def reserved(self, requests: Sequence[Request], now_s: float) -> None:
        """The scheduler has begun their loads."""

    def take_sent(self) -> Sequence[Request]:
        return ()

    def take_stopped(self) -> Sequence[int]:
        """See KvTransfers. No other engine gets requests of this one."""
        return ()

    def take_received(self) -> Sequence[Request]:
        self._advance()
        if self._prefetching:
            self._take_prefetched(self._clock.now())
        now_s = self._clock.now()
        # Another engine may have advanced a store further.
        arrived = [one for one in self._loading if one.arrived_s <= now_s]
        if not arrived:
            return ()
        self._loading = [one for one in self._loading if one.arrived_s > now_s]
        arrived.sort(key=lambda one: one.arrived_s)
        for one in arrived:
            tokens = {store.name: len(keys) * self._size for store, keys in zip(self.stores, one.keys, strict=True)}
            one.request.loads = (*one.request.loads, KvLoad(one.begin_s, one.arrived_s, tokens, one.request.pauses > 0))
            for number, keys in enumerate(one.keys):
                for quicker in self.stores[:number]:
                    quicker.write(self.owner, keys, (), now_s)
        return [one.request for one in arrived]

    def figures(self) -> dict[str, Any]:
        """What `summary.json` has of the stores, by name."""
        self._advance()
        return {store.name: figures_of(store, self._size) for store in self.stores}

    def now(self) -> float:
        """The time, up to which all has happened."""
        self._advance()
        return self._clock.now()

    def _advance(self) -> None:
        self._advanced_s = now_s = self._clock.now()
        for store in self.stores:
            store.advance(now_s)


def figures_of(store: KvStore, tokens_per_block: int) -> dict[str, int]:
    """What `summary.json` has of a store."""
    counters, size = store.counters, tokens_per_block
    return {
        "tokens": store.capacity * size,
        "used_tokens": len(store) * size,
        "stored_tokens": counters.stored * size,
        "loaded_tokens": counters.loaded * size,
        "evicted_tokens": counters.evicted * size,
        "max_waiting_writes": counters.max_behind,
    }
