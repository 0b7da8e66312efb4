"""A cache that only counts blocks answers and counts as one that gives them ids."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.blocks import OutOfBlocks
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.paged import PagedCache
from ifbbench.schedulers.tensorrt_llm.repetition import fitting_steps, max_steps

SLOTS = 6
WINDOWS = {
    "all tokens": AttentionWindow(4, max_seq_len=64),
    "odd blocks": AttentionWindow(5, max_seq_len=64),
    "wraps": AttentionWindow(4, size=12, max_seq_len=64),
    "with sink tokens": AttentionWindow(4, size=16, max_seq_len=64, sink=3),
    "beams": AttentionWindow(4, max_seq_len=64, max_beam_width=3),
    "prompts beyond the window": AttentionWindow(4, size=12, max_seq_len=64, temporary=8),
}


def requests_of(drawn: list[tuple[int, int]], max_beam_width: int = 1) -> list[Request]:
    """Requests with these lengths of prompt and output, each in its slot, of 1 to `max_beam_width` beams."""
    requests = [
        Request(index, prompt, output, beam_width=1 + index % max_beam_width)
        for index, (prompt, output) in enumerate(drawn)
    ]
    for slot, request in enumerate(requests):
        request.slot = slot
    return requests


@pytest.mark.parametrize("name", WINDOWS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), groups=st.sampled_from([1, 1, 2, 3]))
def test_equal_to_a_cache_with_block_ids(name: str, data: st.DataObject, groups: int) -> None:
    """Sequences enter, begin generation, take steps all together or some of them, and leave, in any order. With several
    groups, each has its turn, and a sequence may join another one. They are compared with sequences in no group, each
    of which has its tokens and blocks counted in each step."""
    window = WINDOWS[name]
    counted = PagedCache(window, 40, SLOTS, groups)
    grouped = KvCacheManager(window, 40, SLOTS, num_groups=groups)
    alone = KvCacheManager(window, 40, SLOTS)
    caches = counted, grouped, alone
    group_of: dict[int, int] = {}
    lengths = st.tuples(st.integers(1, 30), st.integers(1, 30))
    requests = requests_of(data.draw(st.lists(lengths, min_size=SLOTS, max_size=SLOTS)), window.max_beam_width)
    waiting, prompts, generating = list(range(SLOTS)), set[int](), set[int]()
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "begin", "all", "all", "some", "many", "join", "remove"]))
        if action == "add" and waiting:
            slot = waiting.pop()
            if alone.first_chunk_need(requests[slot]) > alone.free_blocks:
                with pytest.raises(OutOfBlocks):
                    counted.add_request(requests[slot])
                waiting.append(slot)
                continue
            for cache in caches:
                cache.add_request(requests[slot])
            prompts.add(slot)
        elif action == "begin" and prompts:
            slot = prompts.pop()
            group_of[slot] = data.draw(st.integers(0, groups - 1))
            for cache in caches[:2]:
                cache.begin_generation(slot, group_of[slot])
            generating.add(slot)
        elif action == "join" and generating:
            slot = data.draw(st.sampled_from(sorted(generating)))
            group_of[slot] = data.draw(st.integers(0, groups - 1))
            for cache in caches[:2]:
                cache.join(np.array([slot]), group_of[slot])
        elif action in ("all", "some", "many") and generating:
            first = group_of[data.draw(st.sampled_from(sorted(generating)))]
            chosen = sorted(slot for slot in generating if group_of[slot] == first)
            cached = alone.cached_tokens(np.array(sorted(generating))).tolist()
            left = min(
                _length(requests[slot]) - tokens for slot, tokens in zip(sorted(generating), cached, strict=True)
            )
            if action == "some":
                chosen = data.draw(st.lists(st.sampled_from(chosen), unique=True, min_size=1))
            rows = np.array(chosen)
            if left == 0 or int(alone.step_needs(rows).sum()) > alone.free_blocks:
                continue
            if action == "many":
                at_most = min(data.draw(st.integers(1, 20)), left * groups, max_steps(counted, first))
                steps = fitting_steps(counted, at_most, first=first)
                expected = []
                for step in range(steps):
                    turn = sorted(slot for slot in generating if group_of[slot] == (first + step) % groups)
                    expected.append(_step(alone, np.array(turn, np.int64)))
                    grouped.add_tokens(np.array(turn, np.int64))
                blocks, positions = counted.take(steps, first)
                assert blocks == [allocated - expected[0][0] for allocated, _ in expected]
                assert positions == [filled - expected[0][1] for _, filled in expected]
            else:
                expected = alone.add_tokens(rows).tolist()
                assert counted.add_tokens(rows).tolist() == grouped.add_tokens(rows).tolist() == expected
        elif action == "remove" and prompts | generating:
            slot = data.draw(st.sampled_from(sorted(prompts | generating)))
            for cache in caches:
                cache.remove_sequence(slot)
            for group in (prompts, generating):
                group.discard(slot)
            waiting.append(slot)
        check_equal(counted, alone, requests, sorted(generating), prompts)
        check_equal(grouped, alone, requests, sorted(generating), prompts)


def _length(request: Request) -> int:
    return request.prompt_len + request.max_new_tokens


def _step(cache: KvCacheManager, rows: np.ndarray) -> tuple[int, int]:
    cache.add_tokens(rows)
    return cache.counters.allocated_total, cache.filled_positions


def state_of(cache: PagedCache) -> tuple[int, ...]:
    counters = cache.counters
    return (
        cache.free_blocks,
        cache.state().held_tokens,
        cache.filled_positions,
        counters.allocated_total,
        counters.allocated_new,
    )


def check_equal(
    counted: PagedCache, paged: KvCacheManager, requests: list[Request], generating: list[int], prompts: set[int]
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
    cache = PagedCache(AttentionWindow(2, max_seq_len=64), 3, SLOTS)
    (first, second) = requests_of([(2, 8), (2, 8)])
    for request in (first, second):
        cache.add_request(request)
        cache.begin_generation(request.slot)
    before = state_of(cache)
    with pytest.raises(OutOfBlocks, match="2 KV cache blocks are needed, 1 of 3 are free"):
        cache.add_tokens(np.array([0, 1]))
    assert state_of(cache) == before
    cache.check_consistency()
