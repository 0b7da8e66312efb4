"""How far back the earlier uses of prompt tokens are."""

import pytest

from ifbbench.workload.reuse import blocks_seen_before_share, reuse_distances, tokens_seen_before
from ifbbench.workload.trace import TraceRequest


def named(index, prefix_ids, prompt_len=1100, lens=None):
    return TraceRequest(index, 0.0, prompt_len, 10, 10, prefix_ids=prefix_ids, prefix_lens=lens)


def test_distances_in_tokens_since_the_last_use():
    requests = [named(0, (1, 2)), named(1, (3,)), named(2, (1, 2)), named(3, (1, 3))]
    distances, lengths, prompt_tokens = reuse_distances(requests)
    assert distances.tolist() == [2 * 1110, 2 * 1110, 1110]
    assert lengths.tolist() == [512] * 3
    assert prompt_tokens == 4400


def test_a_piece_after_an_unknown_one_is_not_reused():
    distances, _, _ = reuse_distances([named(0, (1, 2)), named(1, (5, 2))])
    assert distances.tolist() == []


def test_recorded_tokens():
    same = tuple(range(130))
    requests = [TraceRequest(i, 0.0, 130, 5, 5, prompt) for i, prompt in enumerate((same, same, (7, *same[1:])))]
    distances, lengths, _ = reuse_distances(requests)
    assert (distances.tolist(), lengths.tolist()) == ([135, 135], [64, 64])


def test_all_lengths_are_the_tokens_seen_before():
    requests = [named(i, (i % 3, 9 + i % 2), 900, (512, 100)) for i in range(12)]
    _, lengths, _ = reuse_distances(requests)
    assert lengths.sum() == tokens_seen_before(requests)


def test_share_of_blocks():
    assert blocks_seen_before_share([named(0, (1, 2)), named(1, (3, 2))]) == 0.25
    assert blocks_seen_before_share([TraceRequest(0, 0.0, 5, 1, 1)]) is None
    assert blocks_seen_before_share([named(0, (1,))]) == pytest.approx(0)
