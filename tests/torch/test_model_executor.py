"""The executor's contract: order of tokens, empty batches, slots with new owners, errors."""

import numpy as np
import pytest
import torch

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import NO_OUTPUTS, Batch, StepOutputs
from ifbbench.engine.interfaces import Executor
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.sampling_params import SamplingParams
from ifbbench.torch.cache_windows import one_window_layout
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.weights import random_weights
from ifbbench.torch.model_executor import ModelExecutor
from tests.torch.driving import CPU, SMALL, driver_of, requests_of

NO_REQUESTS = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return LlamaModel(SMALL, random_weights(SMALL, 3, CPU, torch.float32))


def empty_batch(tables: np.ndarray) -> Batch:
    return Batch(0, (), NO_REQUESTS, NO_REQUESTS, tables)


def tokens_of(outputs: StepOutputs) -> IntArray:
    assert outputs.tokens is not None
    return outputs.tokens


def test_tokens_come_for_last_chunks_then_generation_in_batch_order(model: LlamaModel) -> None:
    lengths = [(9, 3), (20, 3), (30, 3), (6, 3)]
    alone = requests_of(lengths, SMALL.vocab_size)
    for request in alone:
        driver_of(model, 1, 16, 40).run([request])
    first, second, third, fourth = requests_of(lengths, SMALL.vocab_size)
    driver = driver_of(model, 4, 16, 40)
    for slot, request in enumerate((third, first, fourth, second)):
        request.slot = slot
    driver.step([(first, 9), (second, 20)], [])
    tokens = tokens_of(driver.step([(third, 12), (fourth, 6)], [second, first]))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [alone[3].outputs[0], alone[1].outputs[1], alone[0].outputs[1]]
    assert tokens_of(driver.step([(third, 18)], [first])).tolist() == [alone[2].outputs[0], alone[0].outputs[2]]


def test_first_chunks_alone_yield_nothing(model: LlamaModel) -> None:
    (request,) = requests_of([(9, 3)], SMALL.vocab_size)
    request.slot = 0
    assert tokens_of(driver_of(model, 1, 4, 16).step([(request, 5)], [])).tolist() == []


def test_empty_batch_and_single_token(model: LlamaModel) -> None:
    driver = driver_of(model, 2, 4, 16)
    assert tokens_of(driver.step([], [])).tolist() == []
    (request,) = requests_of([(1, 1)], SMALL.vocab_size)
    request.slot = 1
    assert len(tokens_of(driver.step([(request, 1)], []))) == 1


def test_meaningless_table_entries_are_never_read(model: LlamaModel) -> None:
    requests = requests_of([(9, 8), (30, 3)], SMALL.vocab_size)
    driver_of(model, 2, 4, 40).run(requests)
    again = requests_of([(9, 8), (30, 3)], SMALL.vocab_size)
    driver = driver_of(model, 2, 4, 40)
    driver.own_blocks[0, 0, -(-16 // 4) :] = -7
    driver.run(again)
    assert [request.outputs for request in again] == [request.outputs for request in requests]


def test_batches_in_flight_are_answered_in_the_order_of_their_submission(model: LlamaModel) -> None:
    sampled = SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=4)
    one_by_one = requests_of([(9, 4), (20, 3)], SMALL.vocab_size, sampling=sampled)
    ahead = requests_of([(9, 4), (20, 3)], SMALL.vocab_size, sampling=sampled)
    waiting, early = driver_of(model, 2, 4, 40), driver_of(model, 2, 4, 40)
    for first, second in (one_by_one, ahead):
        first.slot, second.slot = 0, 1
    plan = [(((0, 9),), ()), (((1, 13),), (0,)), (((1, 7),), (0,)), ((), (1, 0)), ((), (1,))]
    for context, generation in plan:
        waiting.step([(one_by_one[i], size) for i, size in context], [one_by_one[i] for i in generation])
        early.submit([(ahead[i], size) for i, size in context], [ahead[i] for i in generation])
        if len(early.in_flight) == 3:
            early.collect()
    while early.in_flight:
        early.collect()
    assert [request.outputs for request in ahead] == [request.outputs for request in one_by_one]
    assert [len(request.outputs) for request in ahead] == [4, 3]


def test_collect_without_submit_is_an_error(model: LlamaModel) -> None:
    executor = ModelExecutor(model, one_window_layout(SMALL, 4, 4), 1)
    with pytest.raises(RuntimeError, match="no iteration"):
        executor.collect()
    executor.submit(empty_batch(np.zeros((1, 1, 4), np.int32)))
    executor.collect()
    with pytest.raises(RuntimeError, match="no iteration"):
        executor.collect()


def test_a_submit_that_raises_has_started_nothing(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = requests_of([(9, 3), (5, 1)], SMALL.vocab_size)
    first.slot, second.slot = 0, 1
    driver = driver_of(model, 2, 4, 16)
    driver.submit([(first, 9)], [])
    with monkeypatch.context() as broken:
        broken.setattr("ifbbench.torch.model_executor.pack", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.submit([(second, 5)], [first])
    driver.submit([(second, 5)], [first])
    driver.collect()
    driver.collect()
    with pytest.raises(RuntimeError, match="no iteration"):
        driver.executor.collect()
    alone = requests_of([(9, 2), (5, 1)], SMALL.vocab_size)
    driver_of(model, 2, 4, 16).run(alone)
    assert [first.outputs, second.outputs] == [request.outputs for request in alone]


def test_a_collect_that_raises_has_lost_its_batch_alone(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = requests_of([(9, 3), (5, 2)], SMALL.vocab_size)
    first.slot, second.slot = 0, 1
    driver = driver_of(model, 2, 4, 16)
    driver.submit([(first, 9)], [])
    driver.submit([(second, 5)], [])
    with monkeypatch.context() as broken:
        broken.setattr(LlamaModel, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.collect()
    driver.in_flight.popleft()
    driver.collect()
    driver.step([], [second])
    (_, alone) = requests_of([(9, 3), (5, 2)], SMALL.vocab_size)
    driver_of(model, 2, 4, 16).run([alone])
    assert second.outputs == alone.outputs


def test_a_batch_in_flight_is_what_its_requests_were_when_it_was_submitted(model: LlamaModel) -> None:
    """A request may leave and its slot get another owner while a batch of it is still in flight."""
    penalised = SamplingParams(temperature=1.0, repetition_penalty=1.5, seed=4)
    expected = []
    for owner in range(2):
        requests = requests_of([(9, 2), (9, 2)], SMALL.vocab_size, sampling=penalised)
        driver_of(model, 1, 4, 12).run([requests[owner]])
        expected.append(requests[owner].outputs)
    first, second = requests_of([(9, 2), (9, 2)], SMALL.vocab_size, sampling=penalised)
    driver = driver_of(model, 1, 4, 12)
    first.slot = second.slot = 0
    driver.submit([(first, 9)], [])
    driver.submit([], [first])
    first.slot, first.prompt, first.sampling = -1, first.prompt[:0], SamplingParams()
    driver.submit([(second, 9)], [])
    driver.submit([], [second])
    while driver.in_flight:
        driver.collect()
    assert [first.outputs, second.outputs] == expected


def test_null_executor_makes_no_tokens() -> None:
    executor: Executor = NullExecutor()
    executor.submit(empty_batch(np.zeros((1, 1, 1), np.int32)))
    assert executor.collect() is NO_OUTPUTS
    executor.close()
