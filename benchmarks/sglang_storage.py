"""Random operations on SGLang's `UnifiedRadixCache` with host memory and storage behind it (HiCache's L3), with their
answers, as cases that `tests.conformance.sglang` replays. Imported by sglang_oracle.py, which makes SGLang importable.

SGLang's own code are the tree, prefetches (`prefetch_from_storage`, `check_prefetch_progress` and the queues between
them), writes, eviction from both memories, and what keeps pages there. Replaced are pools, copies, the store, and the
threads that read and write: each "io" operation reads one batch of pages, and completes all writes.
"""

import random
from array import array
from collections import deque
from queue import Queue
from typing import Any

from sglang.srt.managers.cache_controller import PrefetchAck
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation, PrefetchSubmission
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from benchmarks.sglang_host import Controller, Slots, make_tree
from ifbbench.settings.groups.sglang import EVICTION_POLICIES, HOST_WRITE_POLICIES

PAGE_SIZES = (1, 2, 16)


class StoringController(Controller):
    """`HybridCacheController` with a store that has room for all."""

    def __init__(self, device: Any, host: Slots, write_policy: str, threshold: int, limit: int) -> None:
        super().__init__(device, host, write_policy)
        self.mem_pool_host.alloc, self.mem_pool_host.free = host.alloc, host.free
        self.prefetch_threshold, self.prefetch_capacity_limit, self.prefetch_tokens_occupied = threshold, limit, 0
        self.pp_prefetch_decisions: dict[str, Any] = {}
        self.stored = set[str]()
        self.reading, self.writing = deque[list[Any]](), list[tuple[int, list[str]]]()
        self.prefetch_hit_queue, self.ack_prefetch_queue = Queue[Any](), Queue[Any]()
        self.ack_backup_queue, self.host_mem_release_queue = Queue[Any](), Queue[Any]()
        self.prefetch_buffer = self
        self._page, self._num_written = host.page, 0

    def prefetch_rate_limited(self) -> bool:
        return self.prefetch_tokens_occupied >= self.prefetch_capacity_limit

    def get_prefetch_submission(self, _rid: str) -> None:
        return None

    def submit_prefetch(self, handle: Any, key: Any, last_hash: Any, *_more: Any, **_others: Any) -> Any:
        operation = PrefetchOperation(handle, key, last_hash)
        names = get_storage_hash_str(key, last_hash, page_size=self._page)
        count = next((index for index, name in enumerate(names) if name not in self.stored), len(names))
        operation.hash_value, operation.storage_hit_count = names[:count], count * self._page
        self.prefetch_hit_queue.put(operation)
        return PrefetchSubmission(operation=operation)

    def terminate_prefetch(self, operation: Any) -> tuple[int, list[str]]:
        operation.mark_terminate()
        return operation.completed_tokens, operation.hash_value

    def append_host_mem_release(self, host_indices: Any = None, extra_pools: Any = None) -> None:
        if host_indices is not None and len(host_indices):
            self.host_mem_release_queue.put(host_indices)

    def allocate_storage_hit(
        self, _operation: Any, hit: int, *, allow_partial: bool, min_tokens: int, evict_host: Any
    ) -> tuple[Any, int]:
        """As in SGLang, for pools of one kind."""
        own = self._host.alloc(hit)
        if own is None:
            evict_host(hit)
            own = self._host.alloc(hit)
        if own is not None:
            return own, hit
        available = self._host.available_size()
        count = min(hit, available - available % self._page)
        return (self._host.alloc(count) if allow_partial and count >= min_tokens else None), count

    def put(self, operation: Any) -> None:
        """A prefetch is to be read."""
        self.reading.append([operation, 0])
        if len(self.reading) == 1:
            self._skip()

    def write_storage(self, _own: Any, _tokens: Any, names: list[str], *_more: Any, **_others: Any) -> int:
        self._num_written += 1
        self.writing.append((self._num_written, list(names)))
        return self._num_written

    def io(self) -> None:
        """One batch is read, and all is written."""
        for number, names in self.writing:
            self.stored.update(names)
            self.ack_backup_queue.put(_Written(number))
        self.writing = []
        if self.reading:
            operation, done = self.reading[0]
            done = self.reading[0][1] = min(done + STORAGE_BATCH_SIZE, len(operation.hash_value))
            self._ack(operation, done * self._page)
            if done == len(operation.hash_value):
                self._ack(operation)
                self.reading.popleft()
            self._skip()

    def _skip(self) -> None:
        """Go on to the next operation that was not ended."""
        while self.reading and self.reading[0][0].is_terminated():
            self._ack(self.reading.popleft()[0])

    def _ack(self, operation: Any, completed: int | None = None) -> None:
        ack = PrefetchAck(
            rid=operation.request_id, completed_tokens=completed, operation=operation, completed_req=completed is None
        )
        self.ack_prefetch_queue.put(ack)


class _Written:
    def __init__(self, number: int) -> None:
        self.id, self.completed_tokens = number, 0


def draw_storage_operations(seed: int, count: int) -> dict[str, Any]:
    """`count` operations on one tree: requests join the queue, are tried and leave it; prompts are inserted, pages
    evicted, and read and written."""
    draw = random.Random(seed)
    page, policy, write_policy = (
        draw.choice(PAGE_SIZES),
        draw.choice(EVICTION_POLICIES),
        draw.choice(HOST_WRITE_POLICIES),
    )
    prefetch = draw.choice(["best_effort", "wait_complete"])
    longest = page * draw.choice([8, 20, 300]) + 3
    num_pages, num_host_pages = 2 * longest // page, draw.choice([1, 2, 6]) * longest // page
    threshold = page * draw.choice([1, 3])
    device, host = Slots(num_pages, page), Slots(num_host_pages, page)
    tree = make_tree(page, policy, device, host, write_policy)
    limit = int(0.5 * num_host_pages * page)
    store = tree.cache_controller = StoringController(device, host, write_policy, threshold, limit)
    tree.enable_storage, tree.prefetch_stop_policy, tree.prefetch_threshold = True, prefetch, threshold
    known = [[0] * draw.randint(2, longest)]
    waiting = dict[int, tuple[CacheRequestHandle, list[int]]]()
    operations = list[list[Any]]()
    names = ["look_up", "insert", "evict", "evict_host", "io", "check", "try", "leave"]
    while len(operations) < count:
        name = draw.choices(names, [20, 25, 12, 12, 35, 30, 15, 3])[0]
        base = draw.choice(known[-12:])
        tokens = base[: draw.randint(0, len(base))] if draw.random() < (0.1 if name == "look_up" else 0.5) else base
        while len(tokens) < longest and draw.random() < 0.6:
            tokens = tokens + [draw.randrange(3)] * draw.choice([1, page, 4 * page, longest // 2])
        tokens = tokens[:longest]
        given: Any = None
        found: Any = None
        if name == "look_up":
            if len(tokens) < 2:
                continue
            given, handle = tokens, CacheRequestHandle(str(len(operations)), 0)
            match = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens[:-1]))))
            matched = match.device_prefix_len + match.host_hit_length
            node = match.last_host_node
            if tree.is_backuped(node) or tree.is_root(node):
                tree.prefetch_from_storage(
                    handle, node, array("q", tokens[matched:-1]), tree.get_last_hash_value(node), None, tokens[:matched]
                )
            waiting[len(operations)] = handle, tokens
            found = matched
        elif name == "insert":
            length = len(tokens) // page * page
            given = {"tokens": tokens}
            if device.available_size() + tree.evictable_size() < length:
                continue
            if device.available_size() < length:
                tree.evict_for_alloc(EvictParams(num_tokens=length - device.available_size()))
            if device.available_size() < length:
                break  # SGLang fails here
            tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=device.alloc(length), priority=0))
            known.append(tokens)
        elif name == "evict":
            given = draw.randint(1, 2 * longest)
            found = tree.evict(EvictParams(num_tokens=given)).num_tokens_evicted
        elif name == "evict_host":
            given = draw.randint(1, 2 * longest)
            found = tree.evict_host(given)
        elif name == "io":
            store.io()
        elif name == "check":
            tree.drain_storage_control_queues()
        else:
            if not waiting:
                continue
            given = draw.choice(list(waiting))
            handle, tokens = waiting[given]
            if name == "leave":
                tree.release_aborted_request(handle)
                del waiting[given]
            else:
                found = [tree.check_prefetch_progress(handle), 0]
                if found[0]:
                    found[1] = tree.pop_prefetch_loaded_tokens(handle)
                    del waiting[given]
        tree.writing_check()
        state = [tree.evictable_size(), device.available_size(), host.available_size(), store.prefetch_tokens_occupied]
        operations.append([name, given, found, *state])
    return {
        "kind": "storage",
        "page_size": page,
        "eviction_policy": policy,
        "write_policy": write_policy,
        "prefetch_policy": prefetch,
        "prefetch_threshold": threshold,
        "num_pages": num_pages,
        "num_host_pages": num_host_pages,
        "operations": operations,
    }
