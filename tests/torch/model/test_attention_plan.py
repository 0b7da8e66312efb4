"""The plan covers every query once, in few calls, with little padding, and masks hidden keys."""

import numpy as np
import pytest
import torch

from ifbbench.torch.model.attention_plan import AttentionGroup, QuerySpans, plan_attention

CPU = torch.device("cpu")


def plan(lengths: list[int], starts: list[int], tokens_per_block: int = 16) -> tuple[AttentionGroup, ...]:
    sizes = np.array(lengths, np.int64)
    spans = QuerySpans(np.cumsum(sizes) - sizes, sizes, np.array(starts, np.int64), np.arange(len(sizes)))
    width = -(-max(length + start for length, start in zip(lengths, starts, strict=True)) // tokens_per_block)
    tables = np.arange(len(lengths) * width, dtype=np.int32).reshape(len(lengths), width)
    return plan_attention(spans, tables, tokens_per_block, CPU, num_rows=sum(lengths))


def padded_queries(groups: tuple[AttentionGroup, ...]) -> int:
    return sum(len(group.query_rows) for group in groups)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([1], [0]), ([5], [0]), ([700], [900]), ([40, 1, 300, 1, 1, 513, 2], [0, 6, 64, 500, 0, 0, 31])],
)
def test_every_query_has_one_result(lengths: list[int], starts: list[int]) -> None:
    groups = plan(lengths, starts)
    total = sum(lengths)
    results = torch.cat([group.output_rows for group in groups])
    assert sorted(results[results < total].tolist()) == list(range(total))
    for group in groups:
        real = group.output_rows < total
        assert torch.equal(group.output_rows[real], group.query_rows[real])
        assert group.query_rows.max() < total


def test_masks_show_each_query_its_past_and_itself() -> None:
    (prompt,) = plan([20], [0])
    assert prompt.mask is None
    assert prompt.block_ids is None
    (chunk,) = plan([3], [18])
    assert chunk.mask is not None
    assert chunk.mask.sum(-1).flatten().tolist() == [19, 20, 21]
    assert chunk.mask.shape == (1, 1, 3, 32)


def test_padding_always_sees_a_key() -> None:
    for group in plan([3, 9, 1, 1], [18, 20, 3, 60]):
        assert group.mask is not None
        assert group.mask.any(-1).all()


def test_similar_lengths_share_a_call() -> None:
    assert len(plan([1] * 100, list(range(100, 200)))) <= 2
    assert len(plan(list(range(50, 90)), [0] * 40)) <= 5


def test_calls_grow_with_the_range_of_lengths_not_with_the_requests() -> None:
    random = np.random.default_rng(0)
    counts = [len(plan([1] * number, random.integers(1, 500, number).tolist(), 16)) for number in (50, 500, 2000)]
    assert max(counts) <= 20


def test_padding_of_uneven_prompts_is_bounded() -> None:
    lengths = [14_000, 9000, 3000, 2900, 700, 640, 64, 12, 3]
    groups = plan(lengths, [0] * len(lengths))
    assert padded_queries(groups) < 1.15 * sum(lengths)


def test_long_later_chunks_are_tiled() -> None:
    groups = plan([5000], [9000], 32)
    assert all(group.mask is not None and group.mask.shape[2] <= 256 for group in groups)
    cells = sum(group.mask.numel() for group in groups if group.mask is not None)
    assert cells < 1.2 * 5000 * 11_500


def test_entries_beyond_a_sequence_are_replaced_by_its_own_first_block() -> None:
    (group,) = plan([1, 1], [40, 3])
    assert isinstance(group.block_ids, torch.Tensor)
    assert group.block_ids.tolist() == [[0, 1, 2], [3, 3, 3]]


def test_consecutive_sequences_of_one_block_are_a_slice() -> None:
    ones = np.ones(3, np.int64)
    tables = np.arange(8, dtype=np.int32)[:, None]
    for rows, expected in (([4, 2, 3], slice(2, 5)), ([1, 2, 4], None), ([2, 2, 4], None)):
        spans = QuerySpans(np.arange(3), ones, np.array([40, 41, 44]), np.array(rows))
        (group,) = plan_attention(spans, tables, 64, CPU, num_rows=3, is_contiguous=True)
        assert group.num_block_keys == 45
        assert group.mask is not None
        assert group.mask.shape == (3, 1, 1, 45)
        if expected is not None:
            assert group.block_ids == expected
            assert group.query_rows.tolist() == [1, 2, 0]
        else:
            assert isinstance(group.block_ids, torch.Tensor)
            assert group.block_ids.tolist() == [[row] for row in rows]
