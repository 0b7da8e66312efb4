"""A literal simulation of replicas with stores beneath their KV caches, for a device on which each iteration takes the
same time: vLLM's rules for prompts that share blocks, and stores that are lists, with transfers that have equal
shares."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any, NamedTuple

BLOCK = 16
Key = Any


class Job(NamedTuple):
    """A request: its prompt begins with the named pieces of 512 tokens. output_len: at most the tokens that fit behind
    the prompt into its last block."""

    arrival_s: float
    pieces: tuple[int, ...]
    prompt_len: int
    output_len: int

    def key(self, number: int, index: int) -> Key:
        """What block `index` holds."""
        piece = index * BLOCK // 512
        return (self.pieces[: piece + 1], index) if piece < len(self.pieces) else ("own", number, index)


@dataclass
class Flow:
    """A transfer. left: bytes."""

    owner: int
    left: float
    keys: list[Key]
    chain: list[Key]
    request: int | None = None
    prefetch: int | None = None  # of which request


class LiteralStore:
    """Blocks in the order of their last use."""

    def __init__(self, capacity: int, block_bytes: float, bandwidth: float, latency_s: float) -> None:
        self.capacity, self.block_bytes, self.bandwidth, self.latency_s = capacity, block_bytes, bandwidth, latency_s
        self.blocks: list[Key] = []
        self.flows: list[Flow] = []
        self.behind: list[Flow] = []
        self.arriving: list[tuple[float, Flow]] = []
        self.now = 0.0

    def next_s(self) -> float:
        rate = self.bandwidth / max(1, len(self.flows))
        ends = [self.now + flow.left / rate for flow in self.flows]
        return min([*ends, *[time for time, _ in self.arriving]], default=inf)

    def advance(self, now: float) -> list[Flow]:
        """Move to `now`, which is not after `next_s`; returns the loads and prefetches that have arrived."""
        rate = self.bandwidth / max(1, len(self.flows))
        for flow in self.flows:
            flow.left -= rate * (now - self.now)
        self.now = now
        # A write of nothing that begins behind one that ends now ends now, too.
        while ending := [flow for flow in self.flows if flow.left <= self.bandwidth * 2e-9]:
            flow = ending[0]
            self.flows.remove(flow)
            self.arriving.append((now + self.latency_s, flow))
            if flow.request is None:
                later = [one for one in self.behind if one.owner == flow.owner]
                if later:
                    self.behind.remove(later[0])
                    self.flows.append(later[0])
        loaded = []
        for time, flow in list(self.arriving):
            if time > now + 2e-9:
                continue
            self.arriving.remove((time, flow))
            if flow.request is not None or flow.prefetch is not None:
                loaded.append(flow)
            if flow.request is not None:
                continue
            self.blocks += reversed(flow.keys)
            self.use(flow.chain)
            self.blocks = self.blocks[-self.capacity :]
        return loaded

    def use(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.remove(key)
                self.blocks.append(key)

    def load(self, owner: int, keys: list[Key], request: int, prefetch: int | None = None) -> None:
        self.use(keys)
        self.flows.append(Flow(owner, len(keys) * self.block_bytes, [], [], request, prefetch))

    def write(self, owner: int, keys: Sequence[Key], chain: Sequence[Key], prefetch: int | None = None) -> None:
        on_the_way = [
            key for flow in (*self.flows, *self.behind, *[one for _, one in self.arriving]) for key in flow.keys
        ]
        new = [key for key in dict.fromkeys(keys) if key not in self.blocks and key not in on_the_way]
        if new or prefetch is not None:
            flow = Flow(owner, len(new) * self.block_bytes, new, list(chain), None, prefetch)
            is_busy = any(one.owner == owner and one.request is None for one in self.flows)
            (self.behind if is_busy else self.flows).append(flow)


@dataclass(eq=False)
class _Block:
    key: Key = None
    references: int = 0


@dataclass
class _Request:
    number: int
    job: Job
    blocks: list[_Block] = field(default_factory=list)
    position: int = 0
    produced: int = 0
    missing: int = 0  # stores that a load has not come from yet
    loading: tuple[float, int] = (0.0, 0)  # since when, and up to which block


@dataclass
class Times:
    """What became of a request. loads: from when to when."""

    first_token_s: float = 0.0
    end_s: float = 0.0
    loads: list[tuple[float, float]] = field(default_factory=list)
    from_stores: list[int] = field(default_factory=list)  # tokens


class _Replica:
    def __init__(self, num_blocks: int) -> None:
        self.free = [_Block() for _ in range(num_blocks)]
        self.found: dict[Key, list[_Block]] = {}
        self.queue: list[_Request] = []
        self.loading: list[_Request] = []
        self.ready: list[tuple[int, _Request]] = []
        self.running: list[_Request] = []
        self.chunks: list[tuple[_Request, int, int]] = []
        self.generating: list[_Request] = []
        self.busy_until: float | None = None
        self.evicted: list[Key] = []
        self.received: list[int] = []  # requests of which a load has come, and which are not taken in
        self.num_loads = 0
        # Each request is at 0 before a prefetch, 1 while it reads, 2 once that has come, 3 while it is written, then 4.
        self.prefetches: dict[int, int] = {}
        self.order: dict[int, int] = {}

    def take(self, count: int) -> list[_Block]:
        taken = [self.free.pop(0) for _ in range(count)]
        for block in taken:
            if block.key is not None:
                self.evicted.append(block.key)
                self.found[block.key].remove(block)
            block.key, block.references = None, 1
        return taken

    def name(self, block: _Block, key: Key) -> None:
        block.key = key
        self.found.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[_Block]) -> None:
        gone = []
        for block in reversed(blocks):
            block.references -= 1
            if not block.references:
                gone.append(block)
        self.free = [one for one in gone if one.key is None] + self.free + [one for one in gone if one.key is not None]


class LiteralTiers:
    """Requests go to replicas in turn. stores: of each replica, from the quickest to the slowest; some are shared."""

    def __init__(
        self,
        jobs: Sequence[Job],
        iteration_s: float,
        sizes: tuple[int, int, int],
        stores: Sequence[Sequence[LiteralStore]],
        writes_back: bool,
        prefetches: bool = False,
    ) -> None:
        """sizes: blocks of a replica, tokens of an iteration, and requests that run."""
        self.jobs, self.iteration_s, self.stores, self.writes_back = jobs, iteration_s, stores, writes_back
        self.prefetches = prefetches
        self.num_blocks, self.tokens, self.requests = sizes
        self.replicas = [_Replica(self.num_blocks) for _ in stores]
        self.times = [Times() for _ in jobs]
        self.all_stores = list({id(store): store for of_replica in stores for store in of_replica}.values())
        self.sources: dict[int, list[list[Key]]] = {}  # what each request loads, by store
        self.ended = 0

    def run(self) -> list[Times]:
        arrived, now = 0, 0.0
        while self.ended < len(self.jobs):
            for store in self.all_stores:
                for flow in store.advance(now):
                    if flow.prefetch is not None:
                        self.replicas[flow.owner].prefetches[flow.prefetch] += 1
                    elif flow.request is not None:
                        self._loaded(flow.request, now)
            for owner, one in enumerate(self.replicas):
                if one.busy_until is not None and one.busy_until <= now + 1e-12:
                    self._end(owner, one, now)
            while arrived < len(self.jobs) and self.jobs[arrived].arrival_s <= now:
                self.replicas[arrived % len(self.replicas)].queue.append(_Request(arrived, self.jobs[arrived]))
                arrived += 1
            for owner, one in enumerate(self.replicas):
                if one.busy_until is None:
                    self._begin(owner, one, now)
            times = [one.busy_until for one in self.replicas if one.busy_until is not None]
            times += [store.next_s() for store in self.all_stores]
            times += [self.jobs[arrived].arrival_s] if arrived < len(self.jobs) else []
            now = max(now, min(times, default=now))
        return self.times

    def _loaded(self, number: int, now: float) -> None:
        one = self.replicas[number % len(self.replicas)]
        request = next(request for request in one.loading if request.number == number)
        request.missing -= 1
        if request.missing:
            return
        one.loading.remove(request)
        begin, end = request.loading
        for index in range(len(request.blocks)):
            if request.blocks[index].key is None:
                one.name(request.blocks[index], request.job.key(number, index))
        request.position = end * BLOCK
        one.ready.append((one.order[number], request))
        one.ready.sort(key=lambda pair: pair[0])
        self.times[number].loads.append((begin, now))
        one.received.append(number)

    def _begin(self, owner: int, one: _Replica, now: float) -> None:
        left = self.tokens
        one.chunks, one.generating = [], []
        for number in [number for number, phase in one.prefetches.items() if phase == 2]:
            one.prefetches[number] = 3
            self.stores[owner][0].write(owner, self.sources[number][1], (), number)
        for number in one.received:
            for slower, keys in enumerate(self.sources[number]):
                for store in self.stores[owner][:slower]:
                    store.write(owner, keys, ())
        one.received = []
        for request in one.running:
            if not left:
                break
            tokens = min(left, request.job.prompt_len - request.position) or 1
            left -= tokens
            if request.position < request.job.prompt_len:
                self._compute(one, request, tokens)
            else:
                one.generating.append(request)
        skipped = list[_Request]()
        while left and (one.ready or one.queue) and len(one.running) < self.requests:
            request = one.ready[0][1] if one.ready else one.queue[0]
            if self.prefetches and not one.ready and self._prefetches(owner, one, request):
                skipped.append(one.queue.pop(0))
                continue
            hits = list[_Block]()
            if not one.ready:
                hits = self._hits(one, request)
                found = self._found(owner, request, len(hits))
                if found:
                    if not self._load(owner, one, request, hits, found, now):
                        break
                    continue
                request.position = len(hits) * BLOCK
            tokens = min(left, request.job.prompt_len - request.position)
            held = hits or request.blocks
            room = len(one.free) - sum(not block.references for block in hits)
            if ceil(request.job.prompt_len / BLOCK) - len(held) > room:
                break
            (one.ready if one.ready else one.queue).pop(0)
            self._hold(one, request, hits)
            one.running.append(request)
            self._compute(one, request, tokens)
            left -= tokens
        one.queue = skipped + one.queue
        if self.writes_back and one.evicted:
            for store in self.stores[owner]:
                store.write(owner, one.evicted[::-1], ())
        one.evicted = []
        if one.chunks or one.generating:
            one.busy_until = round(now + self.iteration_s, 9)

    def _prefetches(self, owner: int, one: _Replica, request: _Request) -> bool:
        """Whether blocks of a request are on their way from the second store to the first."""
        if request.number not in one.prefetches:
            first, one.prefetches[request.number] = len(self._hits(one, request)), 4
            found = self._found(owner, request, first)
            if keys := [request.job.key(request.number, first + index) for index, at in enumerate(found) if at]:
                one.prefetches[request.number], self.sources[request.number] = 1, [[], keys]
                self.stores[owner][1].load(owner, keys, request.number, request.number)
        return one.prefetches[request.number] < 4

    def _hits(self, one: _Replica, request: _Request) -> list[_Block]:
        hits = list[_Block]()
        for index in range((request.job.prompt_len - 1) // BLOCK):
            blocks = one.found.get(request.job.key(request.number, index))
            if not blocks:
                break
            hits.append(blocks[0])
        return hits

    def _found(self, owner: int, request: _Request, first: int) -> list[int]:
        found = list[int]()
        for index in range(first, (request.job.prompt_len - 1) // BLOCK):
            key = request.job.key(request.number, index)
            stores = [number for number, store in enumerate(self.stores[owner]) if key in store.blocks]
            if not stores:
                break
            found.append(stores[0])
        return found

    def _load(
        self, owner: int, one: _Replica, request: _Request, hits: list[_Block], found: list[int], now: float
    ) -> bool:
        room = len(one.free) - sum(not block.references for block in hits)
        others = [*one.loading, *[other for _, other in one.ready], *one.running]
        reserved = sum(max(0, ceil(other.job.prompt_len / BLOCK) - len(other.blocks)) for other in others)
        if len(found) > room - reserved or ceil(request.job.prompt_len / BLOCK) - len(hits) > room:
            return False
        one.queue.pop(0)
        self._hold(one, request, hits)
        request.blocks += one.take(len(found))
        one.order[request.number] = one.num_loads
        one.num_loads += 1
        self._read_stores(owner, one, request, len(hits), found, now)
        return True

    def _read_stores(
        self, owner: int, one: _Replica, request: _Request, first: int, found: list[int], now: float
    ) -> None:
        """Blocks from `first` on come from the stores of these numbers."""
        keys = [request.job.key(request.number, first + index) for index in range(len(found))]
        sources = [[key for key, at in zip(keys, found, strict=True) if at == number] for number in (0, 1)]
        self.sources[request.number] = sources
        for store, of_store in zip(self.stores[owner], sources, strict=False):
            if of_store:
                store.load(owner, of_store, request.number)
                request.missing += 1
        request.loading = (now, first + len(found))
        one.loading.append(request)
        self.times[request.number].from_stores = [len(of_store) * BLOCK for of_store in sources]

    def _hold(self, one: _Replica, request: _Request, hits: list[_Block]) -> None:
        for block in hits:
            if not block.references:
                one.free.remove(block)
            block.references += 1
        request.blocks += hits

    def _compute(self, one: _Replica, request: _Request, tokens: int) -> None:
        start, request.position = request.position, request.position + tokens
        request.blocks += one.take(ceil(request.position / BLOCK) - len(request.blocks))
        for index in range(start // BLOCK, request.position // BLOCK):
            one.name(request.blocks[index], request.job.key(request.number, index))
        one.chunks.append((request, start, request.position))

    def _end(self, owner: int, one: _Replica, now: float) -> None:
        one.busy_until = None
        done = list[_Request]()
        for request, start, end in one.chunks:
            self._write(owner, request, start // BLOCK, end // BLOCK)
        # In the order in which the batch ran them: generation requests run in the order of `running`, too.
        ended = [request for request, _, end in one.chunks if end == request.job.prompt_len]
        for request in sorted([*one.generating, *ended], key=one.running.index):
            request.produced += 1
            if request.produced == 1:
                self.times[request.number].first_token_s = now
            if request.produced == request.job.output_len:
                done.append(request)
        for request in done:
            job = request.job
            known = job.prompt_len + job.output_len - 1
            self._write(owner, request, job.prompt_len // BLOCK, known // BLOCK)
            for index in range(job.prompt_len // BLOCK, known // BLOCK):
                one.name(request.blocks[index], ("output", request.number, index))
            self.times[request.number].end_s = now
            one.running.remove(request)
            one.release(request.blocks)
            self.ended += 1

    def _write(self, owner: int, request: _Request, first: int, last: int) -> None:
        if self.writes_back:
            return
        keys = [request.job.key(request.number, index) for index in range(last)]
        named = [key for key in keys[:first] if key[0] != "own"]
        for store in self.stores[owner]:
            store.write(owner, keys[first:], named)


class LiteralConnector(LiteralTiers):
    """The same with TensorRT-LLM's rules, for device memory that forgets nothing. sizes: the second is not read."""

    def _loaded(self, number: int, now: float) -> None:
        one = self.replicas[number % len(self.replicas)]
        request = next(request for request in one.loading if request.number == number)
        request.missing -= 1
        if not request.missing:
            one.loading.remove(request)
            one.running.append(request)
            begin, end = request.loading
            request.position = end * BLOCK
            self.times[number].loads.append((begin, now))
            one.received.append(number)

    def _begin(self, owner: int, one: _Replica, now: float) -> None:
        for number in one.received:
            for slower, keys in enumerate(self.sources[number]):
                for store in self.stores[owner][:slower]:
                    store.write(owner, keys, ())
        one.received = []
        # `running` are all active requests but those that load: `max_batch_size` of both.
        while one.queue and len(one.running) + len(one.loading) < self.requests:
            one.running.append(one.queue.pop(0))
        one.running.sort(key=lambda request: request.number)
        one.generating = [request for request in one.running if request.position == request.job.prompt_len]
        while self._decide(owner, one, now) and not (one.chunks or one.generating):
            pass  # all that would run waits for stores: the next iteration begins at once
        for request, _, _ in one.chunks:
            request.position = request.job.prompt_len
            request.blocks = one.take(ceil(request.job.prompt_len / BLOCK))
            for index in range((request.job.prompt_len - 1) // BLOCK):
                one.found.setdefault(request.job.key(request.number, index), []).append(_Block())
        if one.chunks or one.generating:
            one.busy_until = round(now + self.iteration_s, 9)

    def _decide(self, owner: int, one: _Replica, now: float) -> bool:
        """Find the prompts that run; whether any begins to load instead."""
        prompts = [request for request in one.running if request.position < request.job.prompt_len]
        expected = [self._missing(one, request) for request in prompts if request.position]
        chunks = list[_Request]()
        for request in prompts:
            if not request.position:
                missing = self._missing(one, request)
                if missing is not None and missing in expected:
                    continue
                expected.append(missing)
            chunks.append(request)
        one.chunks, num_loading = [], len(one.loading)
        for request in chunks:
            if not request.position:
                hits = self._hits(one, request)
                if found := self._found(owner, request, len(hits)):
                    self._begin_load(owner, one, request, len(hits), found, now)
                    continue
                request.position = len(hits) * BLOCK
            one.chunks.append((request, request.position, request.job.prompt_len))
        return len(one.loading) > num_loading

    def _missing(self, one: _Replica, request: _Request) -> Key | None:
        """The first full block of a prompt that the device has not."""
        keys = [request.job.key(request.number, index) for index in range(request.job.prompt_len // BLOCK)]
        return next((key for key in keys if key not in one.found), None)

    def _begin_load(
        self, owner: int, one: _Replica, request: _Request, first: int, found: list[int], now: float
    ) -> None:
        one.running.remove(request)
        self._read_stores(owner, one, request, first, found, now)
