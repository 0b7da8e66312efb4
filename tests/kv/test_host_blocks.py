"""Copies: blocks that are offloaded and onboarded, and prefixes of blocks in use."""

import numpy as np
import pytest

from ifbbench.engine.batch import BlockCopy, CopyKind
from ifbbench.engine.retention import NO_RETENTION, Retention, RetentionRange
from ifbbench.engine.tokens import KnownTokens, TokenIds
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.blocks import OutOfBlocks
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules

A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
OTHERS = list(range(100, 112))


def cache_of(num_blocks: int, host: int) -> KvCacheManager:
    return KvCacheManager(AttentionWindow(4, 64, 64), num_blocks, 4, host, ReuseRules(True))


def add(cache: KvCacheManager, slot: int, tokens: list[int], retention: Retention = NO_RETENTION) -> int:
    return cache.add_sequence(slot, len(tokens), 1, KnownTokens(TokenIds(np.array(tokens, np.int32))), retention)


def serve(cache: KvCacheManager, tokens: list[int], retention: Retention = NO_RETENTION) -> int:
    reused = add(cache, 0, tokens, retention)
    cache.store_context(0)
    cache.remove_sequence(0)
    cache.check_consistency()
    return reused


def test_evicted_blocks_are_found_on_the_host():
    cache = cache_of(num_blocks=3, host=3)
    serve(cache, [*A, *B, 0])
    serve(cache, OTHERS)
    # Block 2 held the last token, which was not stored; block 1 is the tail of the known prefix and is evicted first.
    assert cache.take_copies() == (
        BlockCopy(CopyKind.OFFLOAD, 1, 0, 4),
        BlockCopy(CopyKind.OFFLOAD, 0, 1, 4),
    )
    assert add(cache, 1, [*A, *B, 0]) == 8
    brought_back = [(copy.source, copy.num_tokens) for copy in cache.take_copies() if copy.kind is CopyKind.ONBOARD]
    assert brought_back == [(1, 4), (0, 4)]
    cache.check_consistency()


def test_without_host_blocks_evicted_blocks_are_lost():
    cache = cache_of(num_blocks=3, host=0)
    serve(cache, [*A, *B, 0])
    serve(cache, OTHERS)
    assert cache.take_copies() == ()
    assert add(cache, 1, [*A, *B, 0]) == 0


def test_blocks_of_low_priority_are_not_offloaded():
    cache = cache_of(num_blocks=3, host=3)
    serve(cache, [*A, *B, 0], Retention([RetentionRange(0, None, 29)]))
    serve(cache, OTHERS)
    assert cache.take_copies() == ()
    assert add(cache, 1, [*A, *B, 0]) == 0


def test_a_full_host_pool_evicts_its_oldest_block():
    cache = cache_of(num_blocks=2, host=1)
    serve(cache, [*A, 0])
    serve(cache, [*B, 0])
    serve(cache, OTHERS[:8])
    assert add(cache, 0, [*A, 0]) == 0
    cache.remove_sequence(0)


def test_the_matching_prefix_of_a_block_in_use_is_copied():
    cache = cache_of(num_blocks=6, host=0)
    add(cache, 0, [*A, *B, 0])
    cache.store_context(0)
    assert add(cache, 1, [*A, *B[:3], 0, 0]) == 7
    source, destination = (int(cache.block_tables[slot, 0, 1]) for slot in (0, 1))
    assert cache.take_copies() == (BlockCopy(CopyKind.DEVICE, source, destination, 3),)
    assert cache.take_copies() == ()


def test_a_free_leaf_with_a_matching_prefix_is_taken_over_without_a_copy():
    cache = cache_of(num_blocks=6, host=0)
    serve(cache, [*A, *B, 0])
    assert add(cache, 1, [*A, *B[:3], 0, 0]) == 7
    assert cache.take_copies() == ()
    assert cache.sequences[1].beams[0][:2] == [0, 1]
    # What it held beyond the prefix is lost.
    assert add(cache, 0, [*A, *B, 0]) == 4


def test_a_prefix_is_copied_from_the_host_while_its_block_stays_there():
    cache = cache_of(num_blocks=3, host=1)
    serve(cache, [*A, *B, 0])
    cache.blocks.eviction.set_priority(0, 30)
    cache.blocks.eviction.set_priority(1, 90)
    serve(cache, OTHERS[:8])
    assert cache.take_copies() == (BlockCopy(CopyKind.OFFLOAD, 0, 0, 4),)
    # B is still below A, so a prefix of A is copied. The block evicted for it does not fit on the host.
    assert add(cache, 1, [*A[:2], 0]) == 2
    assert cache.take_copies() == (BlockCopy(CopyKind.ONBOARD, 0, int(cache.block_tables[1, 0, 0]), 2),)
    cache.check_consistency()
    cache.remove_sequence(1)
    assert add(cache, 1, [*A, *B, 0]) == 8


def test_a_source_that_is_evicted_for_its_own_copy_is_not_copied():
    cache = cache_of(num_blocks=4, host=0)
    serve(cache, [*A, *B, 0])
    serve(cache, [*A, *C, 0])
    cache.blocks.eviction.set_priority(0, 0)
    assert add(cache, 1, [*A[:2], 0]) == 2
    assert cache.take_copies() == ()
    assert cache.sequences[1].beams[0] == [0]
    cache.check_consistency()


def test_eviction_from_the_host_unlinks_the_descendants():
    cache = cache_of(num_blocks=3, host=1)
    serve(cache, [*A, *B, 0])
    # Only A is offloaded to the host; then another block evicts it there.
    cache.blocks.eviction.set_priority(0, 30)
    add(cache, 1, [0])
    cache.remove_sequence(1)
    cache.blocks.eviction.set_priority(1, 90)
    serve(cache, [*OTHERS[:4], 0])
    serve(cache, [*OTHERS[4:8], 0])
    assert add(cache, 1, [*A, *B, 0]) == 0
    cache.check_consistency()


def test_too_few_free_blocks_change_nothing_even_if_onboarding_would_evict_a_match():
    cache = cache_of(num_blocks=7, host=2)
    # Two sequences compute the same; block C of the second is linked below A and B of the first.
    add(cache, 0, [*A, *B, 0])
    add(cache, 1, [*A, *B, *C, 0])
    cache.store_context(0)
    cache.store_context(1)
    cache.remove_sequence(0)
    # A and B are offloaded to the host, which is full now.
    serve(cache, OTHERS)
    assert cache.free_blocks == 3
    before = cache.free_blocks, list(cache.blocks.references)
    # C is in use already, but onboarding A evicts B from the host and unlinks C: all four blocks would be taken.
    with pytest.raises(OutOfBlocks):
        add(cache, 2, [*A, *B, *C, 0])
    assert (cache.free_blocks, list(cache.blocks.references)) == before
    cache.check_consistency()


def test_a_prompt_that_does_not_fit_changes_nothing():
    cache = cache_of(num_blocks=4, host=2)
    add(cache, 0, [*A, *B, 0])
    cache.store_context(0)
    before = cache.free_blocks, list(cache.blocks.references), list(cache.blocks.tree.parent)
    with pytest.raises(OutOfBlocks):
        add(cache, 1, [*A, *B, *OTHERS])
    assert (cache.free_blocks, list(cache.blocks.references), list(cache.blocks.tree.parent)) == before
    assert cache.take_copies() == ()
    with pytest.raises(ValueError, match="slot 0"):
        add(cache, 0, A)
    cache.check_consistency()
