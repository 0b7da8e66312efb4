"""Retention priorities of requests."""

import numpy as np
import pytest

from ifbbench.engine.retention import DEFAULT_PRIORITY, Retention, RetentionRange
from ifbbench.engine.tokens import KnownTokens, TokenIds
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules


@pytest.mark.parametrize(
    ("retention", "complaint"),
    [
        (Retention([RetentionRange(4, 4, 50)]), "expected a positive length"),
        (Retention([RetentionRange(8, 4, 50)]), "expected a positive length"),
        (Retention([RetentionRange(-1, 4, 50)]), "expected a positive length"),
        (Retention([RetentionRange(0, None, 50), RetentionRange(8, 9, 50)]), "only the last one may have no end"),
        (Retention([RetentionRange(0, 8, 50), RetentionRange(7, 9, 50)]), "7 is before the end 8"),
        (Retention([RetentionRange(8, 9, 50), RetentionRange(0, 8, 50)]), "0 is before the end 9"),
        (Retention([RetentionRange(0, 8, 101)]), "retention priority 101: expected 0 to 100"),
        (Retention([RetentionRange(0, 8, -1)]), "retention priority -1: expected 0 to 100"),
        (Retention(decode_priority=101), "retention priority 101: expected 0 to 100"),
    ],
)
def test_invalid_retention_is_explained(retention, complaint):
    assert complaint in retention.problem()


@pytest.mark.parametrize(
    "retention",
    [
        Retention(),
        Retention([RetentionRange(0, 8, 0), RetentionRange(8, None, 100, 3.5)], decode_priority=0),
        Retention([RetentionRange(4, 5, 50), RetentionRange(90, 91, 50)]),
    ],
)
def test_ranges_in_order_are_valid(retention):
    assert retention.problem() is None


def test_a_block_belongs_to_the_range_of_its_first_token():
    retention = Retention([RetentionRange(0, 5, 80, 9.0), RetentionRange(6, 12, 20), RetentionRange(16, None, 90)])
    found = [retention.of_block(index, 4) for index in range(6)]
    # Tokens 0, 4, 8, 12, 16, 20; a range that begins within a block does not count for it.
    assert found == [(80, 9.0), (80, 9.0), (20, None), (None, None), (90, None), (90, None)]


SIZE = 4


def cache(num_blocks: int = 8) -> KvCacheManager:
    return KvCacheManager(AttentionWindow(SIZE, 64, 64), num_blocks, 4, reuse=ReuseRules(True))


def add(manager: KvCacheManager, slot: int, tokens: list[int], retention: Retention | None = None) -> int:
    known = KnownTokens(TokenIds(np.array(tokens, np.int32)))
    return manager.add_sequence(slot, len(tokens), known=known, retention=retention or Retention())


def blocks_of(manager: KvCacheManager, slot: int) -> list[int]:
    return manager.sequences[slot].beams[0]


def test_prompt_blocks_have_range_priorities_and_output_blocks_the_decode_priority():
    manager = cache()
    add(manager, 0, list(range(12)), Retention([RetentionRange(0, 4, 80), RetentionRange(4, 8, 0)], decode_priority=60))
    manager.add_tokens(np.array([0]))
    priorities = [manager.blocks.eviction.priority(block) for block in blocks_of(manager, 0)]
    assert priorities == [80, 0, DEFAULT_PRIORITY, 60]


def test_a_matched_block_keeps_its_priority_unless_the_request_sets_one():
    manager = cache()
    prompt = list(range(9))
    add(manager, 0, prompt, Retention([RetentionRange(0, 8, 80)]))
    manager.store_context(0)
    first, second, _ = blocks_of(manager, 0)
    assert add(manager, 1, prompt) == 8
    assert manager.blocks.eviction.priority(first) == 80
    assert add(manager, 2, prompt, Retention([RetentionRange(0, 4, 10)])) == 8
    assert [manager.blocks.eviction.priority(block) for block in (first, second)] == [10, 80]


def test_a_prompt_of_high_priority_is_kept_until_its_priority_expires():
    manager = cache(num_blocks=6)
    kept, others, high = [1] * 9, [2] * 9, Retention([RetentionRange(0, None, 90, 10.0)])
    for slot, (prompt, retention) in enumerate([(kept, high), (others, None)]):
        add(manager, slot, prompt, retention)
        manager.store_context(slot)
        manager.remove_sequence(slot, 9, now_s=0.0)
    for number in range(3, 6):
        add(manager, 0, [number] * 9)
        manager.remove_sequence(0, 9, now_s=5.0)
    assert add(manager, 0, kept) == 8
    assert add(manager, 1, others) == 0
    manager.remove_sequence(0, 9, now_s=6.0)
    manager.remove_sequence(1, 9, now_s=6.0)


def test_a_prompt_with_an_expired_priority_is_evicted_like_any_other():
    manager = cache(num_blocks=6)
    kept = [1] * 9
    add(manager, 0, kept, Retention([RetentionRange(0, None, 90, 10.0)]))
    manager.store_context(0)
    manager.remove_sequence(0, 9, now_s=0.0)
    manager.blocks.eviction.refresh(11.0)
    for number in range(3, 6):
        add(manager, 0, [number] * 9)
        manager.remove_sequence(0, 9, now_s=12.0)
    assert add(manager, 0, kept) == 0
