"""Overlap: an iteration is submitted before the tokens of the one before are there."""

import dataclasses

import pytest

from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import StopConditions
from ifbbench.settings.modes import BatchingType
from tests.engine.engine import (
    CheckingExecutor,
    Loop,
    Run,
    assert_nothing_is_held,
    at_once,
    check_blocks,
    checked_run,
    limits,
    output_of,
    run,
    token_of,
    with_tokens,
)
from tests.engine.executors import SpyExecutor

OVERLAP = limits(overlap="async")


def spied_run(config, *requests: Request) -> tuple[Run, SpyExecutor]:
    executor = SpyExecutor(CheckingExecutor(config.tokens_per_block))
    result = run(config, at_once(*requests), executor, check_blocks)
    assert_nothing_is_held(result.manager)
    assert executor.in_flight == 0
    return result, executor


def test_each_iteration_is_submitted_before_the_one_before_is_collected():
    _, executor = spied_run(OVERLAP, Request(0, 4, 5))
    assert executor.log == [
        ("submit", 0),
        *(call for number in range(4) for call in (("submit", number + 1), ("collect", number))),
        ("collect", 4),
    ]


def test_without_overlap_each_iteration_is_collected_before_the_next_is_submitted():
    _, executor = spied_run(limits(), Request(0, 4, 3))
    assert executor.log == [(what, number) for number in range(3) for what in ("submit", "collect")]


@pytest.mark.parametrize("batching_type", [BatchingType.INFLIGHT, BatchingType.INFLIGHT_FUSED])
def test_at_most_two_iterations_are_in_flight(batching_type):
    config = dataclasses.replace(OVERLAP, batching_type=batching_type, max_batch_size=2)
    _, executor = spied_run(config, *(Request(index, 3 + index, 2 + index) for index in range(6)))
    assert executor.max_iterations_in_flight == 2


def test_micro_batch_ids_alternate():
    result, _ = spied_run(OVERLAP, Request(0, 4, 5))
    assert [record.micro_batch for record in result.records] == [0, 1, 0, 1, 0]
    result, _ = spied_run(limits(), Request(0, 4, 3))
    assert [record.micro_batch for record in result.records] == [0, 0, 0]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_length_known_in_advance_costs_no_discarded_step(length):
    request = Request(0, 4, length)
    result, executor = checked_run(OVERLAP, request)
    assert executor.frames == [([(0, 4)], [])] + [([], [0])] * (length - 1)
    assert result.tokens(request) == output_of(request, length)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_an_end_found_late_costs_one_step_and_its_token_is_dropped(length):
    by_length = Request(0, 4, 5, output_len=length)
    by_token = Request(1, 4, 5)
    by_token.stop = StopConditions(end_tokens=(token_of(by_token, 4 + length - 1),))
    for request in (by_length, by_token):
        result, executor = checked_run(OVERLAP, request)
        assert len(executor.frames) == length + 1
        assert result.tokens(request) == output_of(request, length)
        assert_nothing_is_held(result.manager)


def test_another_request_continues_with_a_token_that_is_not_on_the_host_yet():
    first, second = Request(0, 4, 9, output_len=2), Request(1, 4, 6)
    result, executor = checked_run(OVERLAP, first, second)
    assert [frame[1] for frame in executor.frames] == [[], [0, 1], [0, 1], [1], [1], [1]]
    assert result.tokens(second) == output_of(second, 6)


def test_blocks_and_slot_of_a_late_end_serve_the_next_request_at_once():
    # Each may need the whole pool; with one slot in the batch, the second gets the first one's slot too.
    config = dataclasses.replace(OVERLAP, num_blocks=3, max_batch_size=1)
    first, second = Request(0, 4, 8, output_len=2), Request(1, 5, 7)
    loop = Loop(config, at_once(first, second), executor := CheckingExecutor(4))
    result = loop.run(check_blocks)
    # Its discarded step is in flight when the second starts.
    assert executor.frames[:4] == [([(0, 4)], []), ([], [0]), ([], [0]), ([(1, 5)], [])]
    assert result.tokens(first) == output_of(first, 2)
    assert result.tokens(second) == output_of(second, 7)
    assert_nothing_is_held(result.manager)


def pressed(**changes):
    """Two of four blocks each, when both want a third one the last to arrive is paused."""
    return dataclasses.replace(OVERLAP, policy="max_utilization", num_blocks=5, **changes)


@pytest.mark.parametrize("batching_type", [BatchingType.INFLIGHT, BatchingType.INFLIGHT_FUSED])
@pytest.mark.parametrize("chunk_unit", [None, 2])
def test_a_pause_waits_until_nothing_is_in_flight_and_the_resumed_tokens_are_right(batching_type, chunk_unit):
    first, second = Request(0, 4, 16), Request(1, 4, 16)
    config = pressed(batching_type=batching_type, chunk_unit=chunk_unit, max_input_len=39 if chunk_unit else 12)
    # The spy fails the test if a request is paused while its batch is in flight.
    result, executor = spied_run(config, first, second)
    (paused_in,) = [record.iteration for record in result.records if record.paused]
    assert second.pauses == 1
    before = executor.log[: executor.log.index(("submit", paused_in))]
    assert before.count(("submit", paused_in - 1)) == before.count(("collect", paused_in - 1)) > 0
    assert result.tokens(first) == output_of(first, 16)
    assert result.tokens(second) == output_of(second, 16)


def test_the_one_to_be_paused_may_turn_out_to_be_complete():
    # When both want a third block, the token in flight is the second one's last.
    first, second = Request(0, 4, 16), Request(1, 4, 16, output_len=5)
    result, _ = spied_run(pressed(), first, second)
    assert second.pauses == 0
    assert result.tokens(first) == output_of(first, 16)
    assert result.tokens(second) == output_of(second, 5)


def test_when_nothing_can_be_scheduled_the_iteration_in_flight_is_collected():
    # The second needs the blocks of the first, whose last step is in flight.
    config = dataclasses.replace(OVERLAP, num_blocks=2)
    first, second = Request(0, 4, 3), Request(1, 4, 3)
    result, executor = spied_run(config, first, second)
    one_after_the_other = [("submit", 2), ("collect", 1), ("collect", 2), ("submit", 3)]
    offset = executor.log.index(("submit", 2))
    assert executor.log[offset : offset + 4] == one_after_the_other
    assert result.completed == [first, second]


def test_requests_that_come_after_a_lull_are_served():
    early, late = Request(0, 4, 3), Request(1, 4, 3)
    executor = SpyExecutor(CheckingExecutor(4))
    result = run(OVERLAP, [(0, with_tokens(early)), (20, with_tokens(late))], executor)
    assert result.completed == [early, late]
    assert executor.in_flight == 0


def test_a_stop_signal_discards_what_is_in_flight():
    first, second = Request(0, 4, 9), Request(1, 4, 9)
    executor = CheckingExecutor(4)
    result = run(OVERLAP, at_once(first, second), executor, check_blocks, stops={3: [0]})
    # After step 3, iterations 0 to 2 are collected and iteration 3 is in flight.
    assert result.tokens(first) == output_of(first, 3)
    assert result.tokens(second) == output_of(second, 9)
    assert [frame[1] for frame in executor.frames[3:5]] == [[0, 1], [1]]
    assert_nothing_is_held(result.manager)
