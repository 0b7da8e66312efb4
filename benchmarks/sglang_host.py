"""Random operations on SGLang's `UnifiedRadixCache` with host memory (HiCache), with their answers, as cases that
`tests.conformance.sglang` replays. Imported by sglang_oracle.py, which makes SGLang importable.

SGLang's own code are the tree, what is copied to the host and when, loading back, and eviction from both memories.
Pools and copies are replaced: a copy is done when the operation that asked for it ends.
"""

import random
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from ifbbench.settings.groups.sglang import EVICTION_POLICIES, HOST_WRITE_POLICIES

PAGE_SIZES = (1, 2, 8, 16, 64)
DONE = SimpleNamespace(query=lambda: True, synchronize=lambda: None)


class Slots:
    """A pool of so many tokens, on the device or the host."""

    def __init__(self, num_pages: int, page: int) -> None:
        self.page, self.device = page, "cpu"
        self._free = list(range(num_pages))

    def alloc(self, tokens: int) -> torch.Tensor | None:
        count = tokens // self.page
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        pages = torch.tensor(taken, dtype=torch.int64) * self.page
        return (pages[:, None] + torch.arange(self.page)).reshape(-1)

    def free(self, slots: torch.Tensor, **_pool: Any) -> None:
        self._free += (slots[:: self.page] // self.page).tolist()

    def free_segment(self, slots: torch.Tensor, start_pos: int = 0) -> None:
        self.free(slots)

    def available_size(self) -> int:
        return len(self._free) * self.page

    def mamba_full_cache_donor(self) -> None:
        return None


class Controller:
    """Makes the copies of SGLang's `HiCacheController`, at once."""

    def __init__(self, device: Any, host: Slots, write_policy: str) -> None:
        self._device, self.write_policy, self.pp_prefetch_command_group = device, write_policy, None
        self.mem_pool_host = SimpleNamespace(
            available_size=host.available_size,
            anchor_entry=SimpleNamespace(host_pool=SimpleNamespace(shared_allocation_domain=None), host_evict_fn=None),
        )
        self._host = host
        self.ack_write_queue = list[Any]()
        self.ack_load_queue = list[Any]()

    def write(self, slots: torch.Tensor, node_id: int, **_more: Any) -> torch.Tensor | None:
        own = self._host.alloc(len(slots))
        if own is not None:
            self.ack_write_queue.append(_ack(node_id))
        return own

    def load(self, host_indices: torch.Tensor, node_id: int, **_more: Any) -> torch.Tensor | None:
        slots = self._device.alloc(len(host_indices))
        if slots is not None:
            self.ack_load_queue.append(_ack(node_id))
        return slots

    def start_writing(self) -> None:
        """Nothing is left to copy."""

    def start_loading(self) -> int:
        """Nothing is left to copy, so that no batch waits."""
        return -1


def _ack(node_id: int) -> Any:
    return SimpleNamespace(
        node_ids=[node_id],
        finish_event=DONE,
        start_event=DONE,
        num_tokens_by_pool={},
        num_bytes=0,
        timing_enabled=False,
    )


def make_tree(page: int, policy: str, device: Slots, host: Slots, write_policy: str) -> UnifiedRadixCache:
    """SGLang's tree with host memory."""
    tree = UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=device,
            page_size=page,
            eviction_policy=policy,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="python",
        )
    )
    attach_host(tree, device, host, write_policy)
    return tree


def attach_host(tree: UnifiedRadixCache, device: Any, host: Slots, write_policy: str) -> None:
    """Give a tree host memory, as `init_hicache` does. device: the allocator of its pages."""
    tree.cache_controller = Controller(device, host, write_policy)
    tree.host_pool_group = host
    tree.components[ComponentType.FULL]._full_kv_pool_host = host
    tree.tree_core.set_hicache_enabled()
    tree.write_through_threshold = 1 if write_policy == "write_through" else 2
    tree.is_write_back = write_policy == "write_back"
    tree.load_back_threshold = 10


def draw_host_operations(seed: int, count: int) -> dict[str, Any]:
    """`count` operations on one tree with host memory: lookups, insertions, evictions, loads, and locks that are held
    for a while."""
    draw = random.Random(seed)
    page, policy, write_policy = (
        draw.choice(PAGE_SIZES),
        draw.choice(EVICTION_POLICIES),
        draw.choice(HOST_WRITE_POLICIES),
    )
    longest = page * draw.choice([3, 8, 20]) + 3
    num_pages, num_host_pages = draw.choice([30, 80]), draw.choice([5, 30, 200])
    device, host = Slots(num_pages, page), Slots(num_host_pages, page)
    tree = make_tree(page, policy, device, host, write_policy)
    known = [[0] * draw.randint(1, longest)]
    locks = dict[int, Any]()
    operations = list[list[Any]]()
    while len(operations) < count:
        name = draw.choices(["match", "insert", "evict", "load", "lock", "unlock"], [15, 40, 12, 15, 10, 8])[0]
        base = draw.choice(known[-12:])
        tokens = base[: draw.randint(0, len(base))] if draw.random() < 0.6 else base
        while len(tokens) < longest and draw.random() < 0.6:
            tokens = tokens + [draw.randrange(4)] * draw.choice([1, page, 2 * page])
        tokens = tokens[:longest]
        key = RadixKey(array("q", tokens))
        given: Any = tokens
        found: Any = None
        if name == "insert":
            given = {"tokens": tokens, "inserted": 0, "priority": draw.choice([0, 1, 5])}
            length = len(tokens) // page * page
            if device.available_size() + tree.evictable_size() < length:
                continue
            if device.available_size() < length:
                tree.evict_for_alloc(EvictParams(num_tokens=length - device.available_size()))
            given["inserted"] = draw.choice([0, 0, draw.randint(0, length // page) * page])
            slots = device.alloc(length)
            params = InsertParams(key=key, value=slots, priority=given["priority"], inserted_len=given["inserted"])
            tree.insert(params)  # what was there before is seen in the free tokens
            known.append(tokens)
        elif name == "evict":
            given = draw.randint(1, 2 * longest)
            found = tree.evict(EvictParams(num_tokens=given)).num_tokens_evicted
        elif name == "unlock":
            if not locks:
                continue
            given = draw.choice(list(locks))
            tree.unlock(locks.pop(given))
        else:
            match = tree.match_prefix(MatchPrefixParams(key=key))
            found = [match.device_prefix_len, match.host_hit_length]
            if name == "lock":
                locks[len(operations)] = tree.lock(match.last_device_node)
            elif name == "load":
                found = _load(tree, match, found)
        tree.writing_check()
        tree.loading_check()
        state = [tree.evictable_size(), tree.protected_size(), device.available_size(), host.available_size()]
        operations.append([name, given, found, *state])
    return {
        "kind": "host_cache",
        "page_size": page,
        "eviction_policy": policy,
        "write_policy": write_policy,
        "num_pages": num_pages,
        "num_host_pages": num_host_pages,
        "operations": operations,
    }


def _load(tree: UnifiedRadixCache, match: Any, found: list[int]) -> list[int]:
    """A request with this match is taken: it locks what the device has, and what the host has is loaded."""
    lock = tree.lock(match.last_device_node)
    request = SimpleNamespace(
        last_node=match.last_device_node,
        swa_host_hit_length=0,
        mamba_host_hit_length=0,
        rid="0",
        kv=SimpleNamespace(mamba_pool_idx=None),
    )
    params = InitLoadBackParams(
        best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, mem_quota=None, req=request
    )
    loaded, _node = tree.init_load_back(params)
    tree.unlock(lock)
    return [*found, loaded]
