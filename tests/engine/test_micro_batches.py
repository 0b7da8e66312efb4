"""Micro batches: with overlap partitioned or pipeline stages, requests are divided among iterations in flight."""

import dataclasses

import numpy as np
import pytest

from ifbbench.engine.request import Request
from ifbbench.rundir.statistics import IterationStatistics
from ifbbench.settings.modes import BatchingType, Overlap
from tests.engine.engine import (
    CheckingExecutor,
    Loop,
    assert_nothing_is_held,
    at_once,
    check_blocks,
    limits,
    output_of,
    run,
    with_tokens,
)
from tests.engine.executors import SpyExecutor

PARTITIONED = limits(overlap="partitioned", max_num_tokens=64)
FORMS = pytest.mark.parametrize(
    ("changes", "count"), [({"overlap": "partitioned"}, 2), ({"pp_size": 2}, 2), ({"pp_size": 4}, 4)]
)


def spied(config, *requests: Request):
    executor = SpyExecutor(CheckingExecutor(config.tokens_per_block))
    result = run(config, at_once(*requests), executor, check_blocks)
    assert_nothing_is_held(result.manager)
    assert executor.in_flight == 0
    for request in requests:
        assert result.tokens(request) == output_of(request, request.output_len)
    return result, executor


def members(executor: SpyExecutor) -> list[tuple[int, set[int]]]:
    """Micro batch and slots of each batch."""
    return [
        (batch.micro_batch, {chunk.request.slot for chunk in batch.context} | set(batch.slots.tolist()))
        for batch in executor.batches
    ]


@FORMS
def test_each_request_runs_in_one_micro_batch_and_all_are_equally_full(changes, count):
    config = limits(max_batch_size=8, max_num_tokens=64, **changes)
    result, executor = spied(config, *(Request(index, 4, 6) for index in range(8)))
    assert executor.max_iterations_in_flight == count
    assert [record.micro_batch for record in result.records] == [number % count for number in range(6 * count)]
    assert [record.num_generation for record in result.records] == [0] * count + [8 // count] * 5 * count
    assert [record.in_flight for record in result.records][count:] == [8 - 8 // count] * 5 * count


@FORMS
def test_a_micro_batch_is_submitted_while_the_others_are_in_flight(changes, count):
    config = limits(max_batch_size=8, max_num_tokens=64, **changes)
    _, executor = spied(config, *(Request(index, 4, 3) for index in range(4)))
    assert executor.log[:count] == [("submit", number) for number in range(count)]
    # The next iteration of a micro batch is submitted after its former one was collected.
    for number in range(count, 3 * count):
        assert executor.log.index(("collect", number - count)) < executor.log.index(("submit", number))


@pytest.mark.parametrize(
    ("changes", "arrivals", "stops"),
    [
        ({"pp_size": 2, "num_blocks": 7}, [(2, 3, 6), (0, 12, 8), (2, 11, 8)], {}),
        ({"overlap": Overlap.PARTITIONED, "num_blocks": 8}, [(3, 11, 8), (4, 1, 12), (3, 9, 12)], {17: [1]}),
    ],
)
def test_a_turn_in_which_only_others_could_run_is_empty(changes, arrivals, stops):
    """An iteration is collected before its turn, so that a request in it can be paused; that completes another one, and
    what remains belongs to the other micro batch."""
    config = limits(policy="max_utilization", max_num_tokens=64, **changes)
    requests = [(at, with_tokens(Request(index, *lengths))) for index, (at, *lengths) in enumerate(arrivals)]
    result = Loop(config, requests, CheckingExecutor(config.tokens_per_block), stops).run(check_blocks)
    assert_nothing_is_held(result.manager)
    assert len(result.completed) == 3, "also the stopped one is answered"


def test_each_micro_batch_has_its_half_of_the_batch_or_with_stages_a_whole_one():
    assert (PARTITIONED.max_active, PARTITIONED.micro_batch_size, PARTITIONED.num_micro_batches) == (4, 2, 2)
    staged = limits(pp_size=3)
    assert (staged.max_active, staged.micro_batch_size, staged.num_micro_batches) == (12, 4, 3)
    both = limits(pp_size=3, overlap="async")
    assert (both.num_micro_batches, both.max_in_flight, both.is_async) == (3, 3, False)
    static = limits(pp_size=3, batching_type=BatchingType.V1)
    assert (static.num_micro_batches, static.max_active) == (1, 4)


def test_as_many_requests_are_active_as_fit_all_stages():
    config = limits(max_batch_size=2, pp_size=2, max_num_tokens=64)
    result, _ = spied(config, *(Request(index, 4, 4) for index in range(9)))
    assert max(record.active for record in result.records) == 4
    assert max(record.num_generation for record in result.records) == 2
    statistics = IterationStatistics(config.batching_type, config.max_active)
    assert {statistics.fields(record)["Max Request Count"] for record in result.records} == {4}


def test_micro_batches_are_levelled_when_requests_leave():
    """Of six requests, two of one micro batch end early; then one of the other three moves over."""
    lengths = [12, 12, 12, 12, 3, 3]
    config = dataclasses.replace(PARTITIONED, max_batch_size=6)
    result, _ = spied(config, *(Request(index, 4, length) for index, length in enumerate(lengths)))
    counts = [record.num_generation for record in result.records if record.num_generation]
    assert counts[:4] == [3, 3, 3, 3]
    assert counts[-6:] == [2] * 6
    assert sum(len(record.held) for record in result.records) == 1


def test_the_turn_of_an_empty_micro_batch_is_an_iteration_without_requests():
    result, executor = spied(PARTITIONED, Request(0, 4, 4))
    assert [record.num_generation + len(record.context) for record in result.records] == [1, 0, 1, 0, 1, 0, 1]
    assert [micro_batch for micro_batch, _ in members(executor)] == [0, 0, 0, 0]
    idle = result.records[1]
    assert idle.start_s <= idle.submit_s == idle.end_s


@FORMS
@pytest.mark.parametrize("chunk_unit", [None, 4])
def test_a_request_in_flight_is_paused_when_its_token_is_there(changes, count, chunk_unit):
    config = limits(
        policy="max_utilization", num_blocks=9, chunk_unit=chunk_unit, max_num_tokens=64, max_input_len=39, **changes
    )
    # The spy fails the test if a request is paused while its batch is in flight.
    result, _ = spied(config, *(Request(index, 4, 16) for index in range(4)))
    assert sum(len(record.paused) for record in result.records) > 0


def test_two_steps_are_looked_ahead():
    requests = [Request(0, 3, 9), Request(1, 4, 9), Request(2, 6, 2)]
    for config, expected in ((limits(), [0, 1, 0]), (PARTITIONED, [1, 1, 0])):
        cache = config.make_cache()
        for slot, request in enumerate(requests):
            request.slot = slot
            cache.add_request(request)
        assert cache.step_needs(np.arange(3)).tolist() == expected


def test_a_block_of_one_token_is_looked_ahead_twice():
    cache = limits(tokens_per_block=1, pp_size=2).make_cache()
    request = Request(0, 3, 9)
    request.slot = 0
    cache.add_request(request)
    assert cache.step_needs(np.array([0])).tolist() == [2]
