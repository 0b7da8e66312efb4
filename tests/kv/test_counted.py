"""A cache that only counts blocks answers and counts as one that gives them ids."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.blocks import OutOfBlocks
from ifbbench.kv.counted import CountedCache
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.paged import PagedCache

SLOTS = 6
WINDOWS = {
    "all tokens": AttentionWindow(4, max_seq_len=64),
    "odd blocks": AttentionWindow(5, max_seq_len=64),
    "wraps": AttentionWindow(4, size=12, max_seq_len=64),
    "with sink tokens": AttentionWindow(4, size=16, max_seq_len=64, sink=3),
    "prompts beyond the window": AttentionWindow(4, size=12, max_seq_len=64, temporary=8),
}


def requests_of(drawn: list[tuple[int, int]]) -> list[Request]:
    """Requests with these lengths of prompt and output, each in its slot."""
    requests = [Request(index, prompt, output) for index, (prompt, output) in enumerate(drawn)]
    for slot, request in enumerate(requests):
        request.slot = slot
    return requests


@pytest.mark.parametrize("name", WINDOWS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equal_to_a_cache_with_block_ids(name: str, data: st.DataObject) -> None:
    """Sequences enter, begin generation, take steps all together or some of them, and leave, in any order."""
    window = WINDOWS[name]
    counted, paged = caches = CountedCache(window, 40, SLOTS), KvCacheManager(window, 40, SLOTS)
    lengths = st.tuples(st.integers(1, 30), st.integers(1, 30))
    requests = requests_of(data.draw(st.lists(lengths, min_size=SLOTS, max_size=SLOTS)))
    waiting, prompts, generating = list(range(SLOTS)), set[int](), set[int]()
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "begin", "all", "all", "some", "many", "remove"]))
        if action == "add" and waiting:
            slot = waiting.pop()
            if paged.first_chunk_need(requests[slot]) > paged.free_blocks:
                with pytest.raises(OutOfBlocks):
                    counted.add_request(requests[slot])
                waiting.append(slot)
                continue
            for cache in caches:
                cache.add_request(requests[slot])
            prompts.add(slot)
        elif action == "begin" and prompts:
            slot = prompts.pop()
            for cache in caches:
                cache.begin_generation(slot)
            generating.add(slot)
        elif action in ("all", "some", "many") and generating:
            chosen = sorted(generating)
            cached = paged.cached_tokens(np.array(chosen)).tolist()
            left = min(_length(requests[slot]) - tokens for slot, tokens in zip(chosen, cached, strict=True))
            if action == "some":
                chosen = data.draw(st.lists(st.sampled_from(chosen), unique=True, min_size=1))
            rows = np.array(chosen)
            if left == 0 or int(paged.step_needs(rows).sum()) > paged.free_blocks:
                continue
            if action == "many":
                steps = counted.fitting_steps(min(data.draw(st.integers(1, 20)), left, counted.max_steps))
                expected = [_step(paged, rows) for _ in range(steps)]
                blocks, places, _ = counted.take(steps)
                assert blocks == [allocated - expected[0][0] for allocated, _ in expected]
                assert places == [filled - expected[0][1] for _, filled in expected]
            else:
                assert counted.add_tokens(rows).tolist() == paged.add_tokens(rows).tolist()
        elif action == "remove" and prompts | generating:
            slot = data.draw(st.sampled_from(sorted(prompts | generating)))
            for cache in caches:
                cache.remove_sequence(slot)
            for group in (prompts, generating):
                group.discard(slot)
            waiting.append(slot)
        check_equal(counted, paged, requests, sorted(generating), prompts)


def _length(request: Request) -> int:
    return request.prompt_len + request.max_new_tokens


def _step(cache: KvCacheManager, rows: np.ndarray) -> tuple[int, int]:
    cache.add_tokens(rows)
    return cache.counters.allocated_total, cache.filled_places


def state_of(cache: PagedCache) -> tuple[int, ...]:
    counters = cache.counters
    return cache.free_blocks, cache.held_places, cache.filled_places, counters.allocated_total, counters.allocated_new


def check_equal(
    counted: CountedCache, paged: KvCacheManager, requests: list[Request], generating: list[int], prompts: set[int]
) -> None:
    assert state_of(counted) == state_of(paged)
    for rows in (np.array(generating, np.int64), np.array(generating[:-1], np.int64)):
        assert counted.reserved_blocks(rows) == paged.reserved_blocks(rows)
        assert counted.step_needs(rows).tolist() == paged.step_needs(rows).tolist()
        assert counted.cached_tokens(rows).tolist() == paged.cached_tokens(rows).tolist()
    for slot in prompts:
        assert counted.blocks_to_completion(requests[slot]) == paged.blocks_to_completion(requests[slot])
    plans = counted.plan_release(), paged.plan_release()
    for slot in [*generating, *prompts]:
        for plan in plans:
            plan.release(slot)
        assert plans[0].free_blocks == plans[1].free_blocks
    counted.check_consistency()
    paged.check_consistency()


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    cache = CountedCache(AttentionWindow(2, max_seq_len=64), 3, SLOTS)
    (first, second) = requests_of([(2, 8), (2, 8)])
    for request in (first, second):
        cache.add_request(request)
        cache.begin_generation(request.slot)
    before = state_of(cache)
    with pytest.raises(OutOfBlocks, match="2 KV cache blocks are needed, 1 of 3 are free"):
        cache.add_tokens(np.array([0, 1]))
    assert state_of(cache) == before
    cache.check_consistency()
