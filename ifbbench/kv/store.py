"""A memory beneath that of the device, which keeps blocks of keys and values by what they hold: a disk, or a store that
the replicas of a fleet share."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush, nsmallest
from math import inf

from ifbbench.virtual_clock import tick, to_seconds


class Transfer:
    """Bytes on their way to a store or from it.

    owner: number of the replica.
    writes: keys of the blocks that the store has once it has arrived; none of a load.
    chain: blocks of the same prompt before these.
    is_write: whether it is one of the writes of its replica, which go in turn.
    is_dropped: whether it does not begin any more.
    end: bytes that all transfers of its link have moved when its last byte has left; infinite before it begins.
    arrived_s: when it has arrived; infinite before.
    """

    def __init__(self, owner: int, size: float, writes: Sequence[Hashable], chain: Sequence[Hashable]) -> None:
        self.owner, self.size, self.writes, self.chain = owner, size, writes, chain
        self.is_write = self.is_dropped = False
        self.end = self.arrived_s = inf


class SharedLink:
    """A link of which all transfers at a time have equal shares.

    A transfer ends when each transfer has moved as many bytes as it has left. `_moved` counts these, so that a new
    transfer, or one that ends, changes nothing of the others."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._moved = self._since_s = 0.0
        self._ends: list[tuple[float, int, Transfer]] = []
        self._num_begun = 0

    def begin(self, transfer: Transfer, now_s: float) -> None:
        """Begin a transfer; those that end before `now_s` have been taken."""
        if self._ends:
            self._moved += (now_s - self._since_s) * self._bandwidth / len(self._ends)
        self._since_s = now_s
        transfer.end = self._moved + transfer.size
        self._num_begun += 1
        heappush(self._ends, (transfer.end, self._num_begun, transfer))

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way."""
        return len(self._ends) > 0

    @property
    def next_s(self) -> float:
        """When the next transfer ends; infinite if there is none."""
        return self._after(self._since_s, self._moved, self._ends[0][0], len(self._ends)) if self._ends else inf

    def take(self) -> Transfer:
        """The transfer that ends next, at `next_s`."""
        self._since_s = self.next_s
        self._moved, _, transfer = heappop(self._ends)
        return transfer

    def end_of(self, transfer: Transfer) -> float:
        """When a transfer on its way ends if no other one begins before."""
        time_s, moved, left = self._since_s, self._moved, len(self._ends)
        for end, _, other in nsmallest(left, self._ends):
            time_s, moved, left = self._after(time_s, moved, end, left), end, left - 1
            if other is transfer:
                break
        return time_s

    def _after(self, time_s: float, moved: float, end: float, sharing: int) -> float:
        """When `sharing` transfers, which have moved so many bytes each at `time_s`, have moved `end`."""
        return to_seconds(tick(time_s + max(0.0, end - moved) * sharing / self._bandwidth))


class StoreCounters:
    """What a store did so far, in blocks: written to it, read from it, and given up for others.

    max_behind: the largest number of writes of a replica that waited for one before them.
    """

    def __init__(self) -> None:
        self.stored = self.loaded = self.evicted = self.max_behind = 0


class KvStore:
    """Blocks by key, at most `capacity` of them, the least recently used given up first.

    A block can be found once its write has arrived, and is used when it is loaded, and when further blocks of its
    prompt are written; of the blocks of a prompt, the first ones count as used last. All transfers share the bandwidth
    (bytes per second); the writes of a replica go one after another. What leaves arrives a latency later.

    Methods with a time are called in the order of their times.

    latest_arrival_s: when something has arrived last."""

    def __init__(self, name: str, capacity: int, block_bytes: float, bandwidth: float, latency_s: float) -> None:
        self.name, self.capacity, self.block_bytes = name, capacity, block_bytes
        self.counters, self.latest_arrival_s = StoreCounters(), -inf
        self._link, self._latency_s = SharedLink(bandwidth), latency_s
        # In the order of their last use. To find the first key of a dict takes long after many were deleted.
        self._blocks = OrderedDict[Hashable, None]()
        self._writing: set[Hashable] = set()
        # By replica, its writes that have not ended: the first of them is on its way.
        self._writes: dict[int, deque[Transfer]] = {}
        # By replica, its reads that go in turn: the first of them is on its way.
        self._reads: dict[int, deque[Transfer]] = {}
        self._arriving: deque[tuple[float, Transfer]] = deque()

    def __len__(self) -> int:
        """Blocks that it has."""
        return len(self._blocks)

    def has(self, key: Hashable) -> bool:
        """Whether the block can be found. Called after `advance`."""
        return key in self._blocks

    def advance(self, now_s: float) -> None:
        """Take in what has happened by now."""
        while True:
            end_s, arrival_s = self._link.next_s, self._arriving[0][0] if self._arriving else inf
            if min(end_s, arrival_s) > now_s:
                return
            if end_s > arrival_s:
                self._arrive(*self._arriving.popleft())
                continue
            transfer = self._link.take()
            self._arriving.append((to_seconds(tick(end_s + self._latency_s)), transfer))
            if transfer.is_write:
                writes = self._writes[transfer.owner]
                writes.popleft()
                if writes:
                    self._link.begin(writes[0], end_s)

    def _arrive(self, arrival_s: float, transfer: Transfer) -> None:
        transfer.arrived_s = self.latest_arrival_s = arrival_s
        if transfer.writes:
            self._keep(transfer)
        elif (reads := self._reads.get(transfer.owner)) and reads[0] is transfer:
            reads.popleft()
            self._begin_reads(reads, arrival_s)

    def _begin_reads(self, reads: deque[Transfer], now_s: float) -> None:
        """Begin the first of these reads that was not dropped; those before it count as arrived."""
        while reads and reads[0].is_dropped:
            reads.popleft().arrived_s = now_s
        if reads:
            self.counters.loaded += round(reads[0].size / self.block_bytes)
            self._link.begin(reads[0], now_s)

    def load(self, owner: int, keys: Sequence[Hashable], now_s: float) -> Transfer:
        """Begin to read blocks that it has."""
        transfer = Transfer(owner, len(keys) * self.block_bytes, (), ())
        self._link.begin(transfer, now_s)
        self.counters.loaded += len(keys)
        self._use(keys)
        return transfer

    def load_in_turn(self, owner: int, batches: Sequence[Sequence[Hashable]], now_s: float) -> list[Transfer]:
        """Read blocks that it has, a batch once the one before has arrived, and behind all that this replica reads so.
        Of a batch that has not begun, `is_dropped` may be set."""
        reads = self._reads.setdefault(owner, deque())
        is_idle = not reads
        transfers = [Transfer(owner, len(keys) * self.block_bytes, (), ()) for keys in batches]
        for keys in batches:
            self._use([key for key in keys if key in self._blocks])
        reads += transfers
        if is_idle:
            self._begin_reads(reads, now_s)
        return transfers

    def drop(self, transfers: Sequence[Transfer]) -> None:
        """Reads in turn that have not begun never do."""
        for transfer in transfers:
            transfer.is_dropped = transfer.arrived_s == inf and transfer.end == inf

    def write(
        self,
        owner: int,
        keys: Sequence[Hashable],
        chain: Sequence[Hashable],
        now_s: float,
        is_confirmed: bool = False,
    ) -> Transfer | None:
        """Write those of these blocks that it neither has nor is about to get. Returns None if there are none, unless
        the answer that there are none `is_confirmed`. chain: the blocks of the same prompt before them."""
        new = [key for key in dict.fromkeys(keys) if key not in self._blocks and key not in self._writing]
        if not new and not is_confirmed:
            return None
        transfer = Transfer(owner, len(new) * self.block_bytes, new, chain)
        transfer.is_write = True
        self._writing.update(new)
        writes = self._writes.setdefault(owner, deque())
        writes.append(transfer)
        if len(writes) == 1:
            self._link.begin(transfer, now_s)
        self.counters.max_behind = max(self.counters.max_behind, len(writes) - 1)
        return transfer

    def lose_writes(self, owner: int, now_s: float) -> None:
        """A replica has failed: what it has not written by now never comes. Bytes on their way keep their share of the
        link until they would have left."""
        self.advance(now_s)
        arriving = [transfer for _, transfer in self._arriving if transfer.owner == owner]
        for transfer in [*self._writes.pop(owner, ()), *arriving]:
            self._writing.difference_update(transfer.writes)
            transfer.writes, transfer.is_write = (), False

    def arrival_of(self, transfer: Transfer) -> float:
        """When a load arrives if no other transfer begins before; it is not earlier."""
        if transfer.arrived_s < inf:
            return transfer.arrived_s
        for arrival_s, other in self._arriving:
            if other is transfer:
                return arrival_s
        return to_seconds(tick(self._link.end_of(transfer) + self._latency_s))

    @property
    def next_arrival_s(self) -> float:
        """Before this time nothing arrives."""
        if self._arriving:
            return self._arriving[0][0]
        return to_seconds(tick(self._link.next_s + self._latency_s)) if self._link.is_busy else inf

    def _keep(self, transfer: Transfer) -> None:
        """A write has arrived."""
        self._writing.difference_update(transfer.writes)
        self.counters.stored += len(transfer.writes)
        for key in reversed(transfer.writes):
            self._blocks[key] = None
        self._use([key for key in transfer.chain if key in self._blocks])
        for _ in range(len(self._blocks) - self.capacity):
            self._blocks.popitem(last=False)
            self.counters.evicted += 1

    def _use(self, keys: Sequence[Hashable]) -> None:
        """These blocks, of one prompt and in order, were used."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)
