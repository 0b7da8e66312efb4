"""When the blocks of a sequence are found by other sequences."""

import numpy as np
import pytest

from ifbbench.engine.request import Request, RequestTable
from ifbbench.engine.tokens import KnownTokens, TokenIds
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


def cache_of(rules: ReuseRules | None = None) -> KvCacheManager:
    return KvCacheManager(AttentionWindow(4, 64, 64, max_beam_width=2), 32, 4, reuse=rules or ReuseRules(True))


def add(cache: KvCacheManager, slot: int, tokens: list[int], beams: int = 1, may_look_up: bool = True) -> int:
    known = KnownTokens(TokenIds(np.array(tokens, np.int32)))
    return cache.add_sequence(slot, len(tokens), beams, known, may_look_up=may_look_up)


def test_nothing_is_found_before_it_is_computed():
    cache = cache_of()
    add(cache, 0, TEXT)
    assert add(cache, 1, [*TEXT, 9]) == 0


def test_full_blocks_of_a_computed_prompt_are_found_but_one_that_its_last_token_fills():
    cache = cache_of()
    add(cache, 0, TEXT)
    cache.store_context(0)
    assert add(cache, 1, [*TEXT, 9]) == 4


def test_a_block_filled_by_output_is_found():
    cache = cache_of()
    add(cache, 0, TEXT[:7])
    cache.store_context(0)
    known = cache.sequences[0].known
    assert known is not None
    assert isinstance(known.tokens, TokenIds)
    known.tokens.append(np.array(TEXT[7:], np.int32))
    cache.add_tokens(np.array([0]))
    cache.store_generated(0, 8)
    assert add(cache, 1, [*TEXT, 9]) == 8


def test_a_partial_last_block_is_found_after_its_sequence_is_removed():
    cache = cache_of()
    add(cache, 0, TEXT[:6])
    cache.store_context(0)
    assert add(cache, 1, TEXT) == 4
    cache.remove_sequence(1)
    cache.remove_sequence(0, store=6)
    assert add(cache, 1, TEXT) == 6


def test_a_sequence_removed_without_storing_adds_nothing():
    cache = cache_of()
    add(cache, 0, TEXT)
    cache.store_context(0)
    cache.remove_sequence(0)
    assert add(cache, 1, [*TEXT, 9]) == 4


def test_beams_share_matched_blocks_but_not_the_last_one():
    cache = cache_of()
    add(cache, 0, [*TEXT, 9])
    cache.store_context(0)
    assert add(cache, 1, [*TEXT, 9], beams=2) == 8
    first, second = cache.sequences[1].beams
    assert first[:2] == second[:2] == cache.sequences[0].beams[0][:2]
    assert len({first[2], second[2], cache.sequences[0].beams[0][2]}) == 3
    cache.check_consistency()


def test_a_request_that_may_not_look_up_still_stores():
    cache = cache_of()
    assert add(cache, 0, TEXT, may_look_up=False) == 0
    cache.store_context(0)
    assert add(cache, 1, TEXT, may_look_up=False) == 0
    assert add(cache, 2, TEXT) > 0


@pytest.mark.parametrize(
    ("rules", "reused"),
    [
        (ReuseRules(False), 0),
        (ReuseRules(True, partial=False), 4),
        # The second block is in use: its prefix can only be copied.
        (ReuseRules(True, copy_partial=False), 4),
        (ReuseRules(True), 6),
    ],
    ids=["no reuse", "whole blocks", "nothing copied", "all"],
)
def test_reuse_rules(rules, reused):
    cache = cache_of(rules)
    add(cache, 0, [*TEXT, 9])
    cache.store_context(0)
    assert add(cache, 1, [*TEXT[:6], 0, 0, 0]) == reused
    cache.check_consistency()


def test_a_prefix_search_is_not_inherited_by_the_next_request_of_a_slot():
    cache, active = cache_of(), ActiveRequests(RequestTable(rows=1))
    add(cache, 1, TEXT)
    cache.store_context(1)
    missing = []
    for request_id, prompt in enumerate(([*TEXT[:4], 9, 9, 9, 9], [9] * 8)):
        request = Request(request_id, len(prompt), 1, prompt_tokens=np.array(prompt, np.int32))
        active.add(request)
        missing.append(cache.missing_block(request))
        active.remove(request)
    fresh = Request(2, 8, 1, prompt_tokens=np.array([9] * 8, np.int32))
    active.add(fresh)
    assert missing[1] == cache.missing_block(fresh) != missing[0]
