"""The work of an iteration, compared with counting query-key pairs one by one, and the least work of a batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.simulated.step_work import StepWork, least_work
from tests.simulated.batches import batch_of, cost_model

CHUNKS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.booleans()), max_size=4)
WINDOWS = st.none() | st.integers(1, 50)
WORKS = [
    StepWork.of_lengths([], [500, 20]),
    StepWork.of_lengths([(0, 1000, True), (64, 30, False)], [500]),
    StepWork.of_lengths([(0, 8, False)], []),
]


def _seen(position: int, window: int | None) -> range:
    """The positions that a query at `position` sees."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


@given(CHUNKS, st.lists(st.integers(1, 80), max_size=5), WINDOWS)
def test_sums_are_those_of_counting(chunks, kv_lengths, window):
    work = StepWork.of_lengths(chunks, kv_lengths, window)

    seen = [[_seen(position, window) for position in range(start, start + length)] for start, length, _ in chunks]
    assert work.attention_pairs == sum(len(keys) for queries in seen for keys in queries)
    assert work.context_kv_tokens == sum(len(set().union(*queries)) for queries in seen)
    assert work.generation_kv_tokens == sum(len(_seen(length - 1, window)) for length in kv_lengths)
    assert work.num_tokens == sum(length for _, length, _ in chunks) + len(kv_lengths)
    assert work.outputs == len(kv_lengths) + sum(is_last for *_, is_last in chunks)


@given(CHUNKS, st.lists(st.integers(1, 80), max_size=5), WINDOWS)
def test_a_batch_is_its_lengths(chunks, kv_lengths, window):
    assert StepWork.of_batch(batch_of(chunks, kv_lengths), window) == StepWork.of_lengths(chunks, kv_lengths, window)


def test_every_beam_is_a_token_with_keys_of_its_own():
    work = StepWork.of_batch(batch_of([], [10, 20], beam_width=3))

    assert (work.generation_tokens, work.generation_kv_tokens, work.outputs) == (6, 90, 6)


def test_padded_prompts_are_as_long_as_the_longest():
    padded = StepWork.of_batch(batch_of([(0, 5, True), (0, 8, True)], [], padded=True))

    assert padded == StepWork.of_lengths([(0, 8, True), (0, 8, True)])


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("name", ["tiny", "llama-3.1-8b", "qwen3-0.6b"])
def test_flops_are_those_of_all_operations_and_bytes_are_fewer(name: str, work: StepWork) -> None:
    model = cost_model(name, "h100-sxm", "bf16")
    operations = model.operations(work)
    least = least_work(model.shard, work)
    assert least.flops == pytest.approx(sum(operation.flops for operation in operations), rel=1e-12)
    assert 0 < least.bytes < sum(operation.bytes for operation in operations) + work.num_tokens * 65_536 * 2


def test_bytes_of_one_generation_step_by_hand() -> None:
    shard = cost_model("llama-3.1-8b", "h100-sxm", "bf16").shard
    weights = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336) + 4096 * 128_256
    assert least_work(shard, StepWork.of_lengths([], [500])).bytes == 2 * weights + 501 * 131_072


def test_nothing_asks_for_nothing() -> None:
    shard = cost_model("tiny", "h100-sxm", "bf16").shard
    assert least_work(shard, StepWork()) == (0.0, 0.0)
