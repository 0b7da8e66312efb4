"""Attention windows: cache positions of tokens and their survival, checked token by token."""

import numpy as np
import pytest

from ifbbench.kv.attention_window import AttentionWindow


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(("size", "sink", "tokens_per_block"), [(8, 0, 4), (9, 3, 4), (13, 5, 8), (6, 2, 1)])
def test_cyclic_positions(size: int, sink: int, tokens_per_block: int, beams: int) -> None:
    window = AttentionWindow(tokens_per_block, size, 60, sink, beams)
    positions = np.arange(60)
    lying: dict[int, int] = {}
    for position, stored in enumerate(window.cache_positions(positions).tolist()):
        assert stored < window.capacity
        lying[stored] = position
        visible = np.flatnonzero(window.sees(positions[: position + 1], np.int64(position)))
        assert set(visible.tolist()) <= set(lying.values())
        assert len(visible) == min(size, position + 1)
        outlives = window.outlives(positions[: position + 1], np.int64(position + 1))
        assert np.flatnonzero(outlives).tolist() == sorted(lying.values())


def test_linear_places_leave_the_bubble_out() -> None:
    window = AttentionWindow(4, 8, 20, 3, is_cyclic=False)
    assert window.cache_positions(np.arange(6)).tolist() == [0, 1, 2, 4, 5, 6]
    assert window.cache_positions(np.array([19])).tolist() == [20]
    assert window.outlives(np.arange(6), np.int64(20)).all()


def test_a_window_as_long_as_the_longest_sequence_is_no_limit() -> None:
    window = AttentionWindow(4, 20, 20)
    assert (window.is_limited, window.wraps, window.numbers) == (False, False, (0, 0, 0, 0))
    assert window.is_straight(np.array([1, 20])).all()
    assert AttentionWindow(4, 19, 20).is_straight(np.array([19, 20])).tolist() == [True, False]


def test_rows_follow_the_block_table() -> None:
    window = AttentionWindow(4, 8, 40)
    tables = np.array([[5, 6], [9, 2]], np.int32)
    rows = window.cache_rows(tables, np.array([[0], [1]]), np.array([[0, 3, 4], [8, 13, 39]]))
    assert rows.tolist() == [[20, 23, 24], [36, 9, 11]]


def test_a_contiguous_cache_has_a_place_for_each_position_and_no_bubble() -> None:
    window = AttentionWindow(4, 8, 20, 3).contiguous()
    assert window.cache_positions(np.arange(20)).tolist() == list(range(20))
    assert (window.tokens_per_block, window.size, window.sink, window.wraps) == (20, 8, 3, False)


def test_kernels_get_0_where_nothing_is_limited_or_wraps() -> None:
    assert AttentionWindow(8, 13, 60, 5).numbers == (13, 5, 3, 16)
    assert AttentionWindow(8, 13, 60, 5, is_cyclic=False).numbers == (13, 5, 3, 0)


def test_windows_without_room() -> None:
    with pytest.raises(ValueError, match="4 tokens has no room beside 4 sink tokens"):
        AttentionWindow(4, 4, sink=4)
