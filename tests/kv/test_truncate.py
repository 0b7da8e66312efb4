"""Truncation of stored conversations."""

import numpy as np

from ifbbench.engine.tokens import KnownTokens, TokenIds
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules

TRUNK = [1, 2, 3, 4, 5, 6, 7, 8]
LEFT, RIGHT = [*TRUNK, 11, 12, 13, 14, 15], [*TRUNK, 21, 22, 23, 24, 25]


def known(tokens: list[int], identity: str = "") -> KnownTokens:
    return KnownTokens(TokenIds(np.array(tokens, np.int32)), identity)


def serve(cache: KvCacheManager, tokens: list[int]) -> int:
    """Number of `tokens` found; all of them are stored afterwards."""
    reused = cache.add_sequence(0, len(tokens), known=known(tokens))
    cache.store_context(0)
    cache.remove_sequence(0, len(tokens))
    cache.check_consistency()
    return reused


def found(cache: KvCacheManager, tokens: list[int]) -> int:
    """Number of `tokens` in full blocks that would be found."""
    reused = cache.add_sequence(0, len(tokens), known=known(tokens))
    cache.remove_sequence(0)
    return reused // 4 * 4


def cache_with(*conversations: list[int], num_blocks: int = 16) -> KvCacheManager:
    cache = KvCacheManager(AttentionWindow(4, 64, 64), num_blocks, 2, reuse=ReuseRules(True))
    for conversation in conversations:
        serve(cache, conversation)
    return cache


def test_only_blocks_beyond_the_kept_tokens_are_forgotten():
    cache = cache_with(LEFT)
    cache.truncate(known(LEFT), len(LEFT), keep=8)
    cache.check_consistency()
    assert found(cache, LEFT) == 8


def test_the_block_with_the_last_kept_token_stays():
    cache = cache_with(LEFT)
    cache.truncate(known(LEFT), len(LEFT), keep=5)
    assert found(cache, LEFT) == 8


def test_other_branches_and_their_prefixes_stay():
    cache = cache_with(LEFT, RIGHT)
    cache.truncate(known(LEFT), len(LEFT), keep=0)
    cache.check_consistency()
    assert found(cache, RIGHT) == 12
    assert found(cache, LEFT) == 8


def test_with_nothing_kept_and_no_branches_all_is_forgotten():
    cache = cache_with(LEFT)
    cache.truncate(known(LEFT), len(LEFT), keep=0)
    assert found(cache, LEFT) == 0


def test_unknown_conversations_and_other_identities_change_nothing():
    cache = cache_with(LEFT)
    cache.truncate(known([9, 9, 9, 9, 9]), 5, keep=0)
    cache.truncate(known(LEFT, "other"), len(LEFT), keep=0)
    assert found(cache, LEFT) == 12


def test_forgotten_blocks_are_evicted_before_older_ones():
    cache = cache_with(RIGHT, [31, 32, 33, 34, 35], num_blocks=6)
    # Four blocks of the older conversation and two of the newer one: all are in use or stored.
    cache.truncate(known([31, 32, 33, 34, 35]), 5, keep=0)
    cache.add_sequence(0, 8)
    assert cache.num_used == 2
    cache.remove_sequence(0)
    assert found(cache, RIGHT) == 12


def test_blocks_of_a_running_sequence_can_be_forgotten_and_are_stored_again_at_its_end():
    cache = cache_with()
    cache.add_sequence(0, len(LEFT), known=known(LEFT))
    cache.store_context(0)
    cache.truncate(known(LEFT), len(LEFT), keep=0)
    cache.check_consistency()
    assert cache.num_used == 4
    cache.remove_sequence(0, len(LEFT))
    cache.check_consistency()
    assert found(cache, LEFT) == 12
