"""Random operations on SGLang's `UnifiedRadixCache`, and random passes of its `PrefillAdder`, with their answers, as
cases that `tests.conformance.sglang` replays. Imported by sglang_oracle.py, which makes SGLang importable."""

import random
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from ifbbench.settings.groups.sglang import EVICTION_POLICIES

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def draw_operations(seed: int, count: int) -> dict[str, Any]:
    """`count` operations on one tree: lookups, insertions, evictions, and locks that are held for a while."""
    draw = random.Random(seed)
    page, policy = draw.choice(PAGE_SIZES), draw.choice(EVICTION_POLICIES)
    freed = list[int]()
    allocator = SimpleNamespace(
        device="cpu", free_segment=lambda slots, start_pos=0: freed.extend((slots[::page] // page).tolist())
    )
    tree = UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            eviction_policy=policy,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="python",
        )
    )
    longest, first_page = page * draw.choice([3, 8, 20]) + 3, 0
    # A page holds one token again and again, so that prompts differ by pages; the last one may be partial.
    known = [[0] * draw.randint(1, longest)]
    locks = dict[int, Any]()
    operations = list[list[Any]]()
    for index in range(count):
        name = draw.choices(["match", "insert", "evict", "lock", "unlock"], [25, 40, 12, 14, 9])[0]
        base = draw.choice(known)
        tokens = base[: draw.randint(0, len(base))]
        while len(tokens) < longest and draw.random() < 0.8:
            tokens = tokens + [draw.randrange(4)] * draw.choice([1, page, 2 * page])
        tokens = tokens[:longest]
        key = RadixKey(array("q", tokens))
        given: Any = tokens
        if name == "match":
            found = tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
        elif name == "insert":
            num_pages = len(tokens) // page
            inserted = draw.choice([0, 0, draw.randint(0, num_pages) * page])
            given = {
                "tokens": tokens,
                "first_page": first_page,
                "inserted": inserted,
                "priority": draw.choice([0, 1, 5]),
            }
            slots = torch.arange(first_page * page, (first_page + num_pages) * page)
            first_page += num_pages
            params = InsertParams(key=key, value=slots, priority=given["priority"], inserted_len=inserted)
            found = tree.insert(params).prefix_len
            freed.clear()  # the tree frees what the request has twice; ours leaves that to the cache
            known.append(tokens)
        elif name == "evict":
            given = draw.randint(1, 3 * longest)
            found = tree.evict(EvictParams(num_tokens=given)).num_tokens_evicted
        elif name == "lock":
            match = tree.match_prefix(MatchPrefixParams(key=key))
            locks[index], found = tree.lock(match.last_device_node), match.device_prefix_len
        elif locks:
            given = draw.choice(list(locks))
            tree.unlock(locks.pop(given))
            found = 0
        else:
            continue
        operations.append([name, given, found, tree.evictable_size(), tree.protected_size(), list(freed)])
        if name == "lock":  # by its number among those that are kept
            locks[len(operations) - 1] = locks.pop(index)
        freed.clear()
    return {"kind": "radix_cache", "page_size": page, "eviction_policy": policy, "operations": operations}


class _Adder(PrefillAdder):  # type: ignore[misc]
    def _account_prefill_cache_admission(self, req: Any, prefix_len: int) -> None:
        """Only counts for the log."""

    def _defer_staged_for_capacity_if_idle(self, req: Any, *, pool: str) -> None:
        """Servers that share a cache call this."""


class _Waiting(SimpleNamespace):
    """The attributes of a request that `PrefillAdder` reads."""

    @property
    def extend_len(self) -> int:
        return int(self.extend_end - self.prefix_len)

    def needs_host_load_back(self) -> bool:
        return False


def _request(prompt_len: int, outputs: int, max_new_tokens: int, ignore_eos: bool, cached: int = 0) -> _Waiting:
    return _Waiting(
        sampling_params=SimpleNamespace(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos),
        origin_input_ids=range(prompt_len),
        output_ids=range(outputs),
        full_untruncated_fill_ids=range(prompt_len + outputs),
        prefix_len=cached,
        last_node=cached,
        extend_end=0,
        retracted_stain=False,
        kv=SimpleNamespace(req_pool_idx=None, holds_mamba=False),
        **dict.fromkeys(
            (
                "host_hit_length",
                "swa_host_hit_length",
                "auxiliary_swa_host_hit_length",
                "mamba_host_hit_length",
                "storage_hit_length",
                "already_computed",
                "cached_tokens",
                "host_loaded_length",
            ),
            0,
        ),
    )


def draw_pass(seed: int) -> dict[str, Any]:
    """An admission pass with the answers of SGLang's `PrefillAdder`."""
    draw = random.Random(seed)
    page, disables_tree = draw.choice(PAGE_SIZES), draw.random() < 0.3
    chunk = draw.choice([None, 128, 256, 512, 2048, 8192])
    running: list[dict[str, Any]] = [
        {
            "prompt_len": draw.randint(1, 2000),
            "outputs": (outputs := draw.randint(0, 200)),
            "max_new_tokens": outputs + draw.randint(0, draw.choice([50, 1000, 6000])),
            "ignore_eos": draw.random() < 0.4,
        }
        for _ in range(draw.choice([0, 1, 5, 30]))
    ]
    case: dict[str, Any] = {
        "kind": "admission",
        "page_size": page,
        "disable_radix_cache": disables_tree,
        "free_tokens": draw.choice([500, 3000, 9000, 40_000]) // page * page,
        "evictable_tokens": 0 if disables_tree else draw.choice([0, 1000, 5000]) // page * page,
        "new_token_ratio": draw.choice([0.098, 0.3, 0.65537, 1.0]),
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": draw.choice([512, 4096, 16_384]),
        "mixed_decode_tokens": len(running) if draw.random() < 0.3 else 0,
        "prefill_max_requests": draw.choice([None, None, 3]),
        "running": running,
        "continuing": None,
        "waiting": [],
    }
    locked = [0]

    def lock(cached: int) -> int:
        locked[0] += cached
        return cached

    def unlock(cached: int) -> None:
        locked[0] -= cached

    tree = SimpleNamespace(
        disable=disables_tree,
        evictable_size=lambda: case["evictable_tokens"] - locked[0],
        supports_mamba=lambda: False,
        supports_prefix_sharing=lambda: not disables_tree,
        lock=lock,
        unlock=unlock,
    )
    pool = SimpleNamespace(
        page_size=page, available_size=lambda: case["free_tokens"], request_slot_reserve=lambda **_given: 0
    )
    pool.create_prefill_budget = lambda cache, **more: PrefillBudget(pool, cache, **more)
    adder = _Adder(
        page,
        tree,
        pool,
        SimpleNamespace(reqs=[_request(**one) for one in running]),
        case["new_token_ratio"],
        case["max_prefill_tokens"],
        chunk,
        case["mixed_decode_tokens"],
        prefill_max_requests=case["prefill_max_requests"],
    )
    if chunk is not None and chunk > case["mixed_decode_tokens"] and draw.random() < 0.3:
        computed = draw.randint(1, 20) * page
        request = _request(computed + draw.randint(1, 4000), 0, draw.choice([10, 500, 5000]), False, computed)
        adder.add_chunked_req(request)
        case["continuing"] = {
            "prompt_len": len(request.origin_input_ids),
            "computed": computed,
            "max_new_tokens": request.sampling_params.max_new_tokens,
            "tokens": request.extend_len,
        }
    for _ in range(draw.randint(1, 12)):
        if adder.budget_state() is AddReqResult.OTHER:
            break
        known, outputs = draw.randint(1, draw.choice([60, 600, 6000])), draw.choice([0, 0, 0, 40])
        cached = 0 if disables_tree else draw.choice([0, draw.randint(0, known - 1)]) // page * page
        cached = min(cached, case["evictable_tokens"] - locked[0])
        one = {
            "prompt_len": known + outputs,
            "outputs": outputs,
            "cached": cached,
            "max_new_tokens": outputs + draw.choice([1, 100, 1000, 6000]),
            "ignore_eos": draw.random() < 0.3,
        }
        request = _request(known, outputs, one["max_new_tokens"], one["ignore_eos"], cached)
        before = len(adder.can_run_list)
        result = adder.add_one_req(request, False, None)
        is_taken = len(adder.can_run_list) > before
        case["waiting"].append({**one, "result": result.name, "tokens": request.extend_len if is_taken else None})
        # The scheduler tries no other once a prompt was cut.
        if result is not AddReqResult.CONTINUE or adder.new_chunked_req is not None:
            break
    return case
