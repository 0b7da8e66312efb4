"""Static batching (V1): no request joins a batch that runs, and its members leave together."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import StopConditions
from ifbbench.rundir.statistics import IterationStatistics
from ifbbench.settings.modes import BatchingType, Overlap
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
from tests.engine.executors import Broken, FailingExecutor, SpyExecutor

STATIC = limits(batching_type=BatchingType.V1)


def three_requests() -> list[Request]:
    """Their outputs take 3, 1 and 5 steps, whatever is reserved."""
    return [Request(0, 4, 3), Request(1, 4, 6, output_len=1), Request(2, 4, 5)]


def fields(result: Run) -> list[dict[str, Any]]:
    statistics = IterationStatistics(BatchingType.V1, STATIC.max_batch_size)
    return [statistics.fields(record) for record in result.records]


def test_nothing_joins_a_running_batch_though_there_is_room():
    executor = CheckingExecutor(STATIC.tokens_per_block)
    first, late = Request(0, 4, 4), Request(1, 4, 2)
    result = run(STATIC, [(0, with_tokens(first)), (1, with_tokens(late))], executor)
    alone: list[Any] = [([(0, 4)], [])] + [([], [0])] * 3
    assert executor.frames == [*alone, ([(1, 4)], []), ([], [1])]
    for record in result.records[1:4]:
        assert record.left_out is not None
        assert (record.left_out.request, record.left_out.limit) == (late, "static_batch")


def test_all_members_leave_at_the_end_of_the_step_in_which_the_last_is_complete():
    requests = three_requests()
    loop = Loop(STATIC, at_once(*requests), CheckingExecutor(STATIC.tokens_per_block))
    loop.step(4)
    assert loop.result.responses == []
    loop.step()
    assert {response.request for response in loop.result.responses} == set(requests)
    assert loop.result.records[-1].finished != []
    assert_nothing_is_held(loop.manager)
    assert not loop.step()
    assert [loop.result.tokens(request) for request in requests] == [
        output_of(request, length) for request, length in zip(requests, [3, 1, 5], strict=True)
    ]


def test_the_documented_statistics_count_tokens_and_empty_slots():
    result, _ = checked_run(STATIC, *three_requests())
    assert [line["Scheduled Requests"] for line in fields(result)] == [3, 3, 3, 3, 3]
    assert [line["Context Requests"] for line in fields(result)] == [3, 0, 0, 0, 0]
    assert [line["Total Context Tokens"] for line in fields(result)] == [12, 0, 0, 0, 0]
    assert [line["Total Generation Tokens"] for line in fields(result)] == [3, 2, 2, 1, 1]
    assert [line["Empty Generation Slots"] for line in fields(result)] == [0, 1, 1, 2, 2]
    assert [record.idle for record in result.records] == [0, 1, 1, 2, 2]


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_empty_slots_are_requests_times_steps_less_the_tokens_made(lengths):
    result, _ = checked_run(STATIC, *(Request(index, 3, 12, output_len=n) for index, n in enumerate(lengths)))
    assert len(result.records) == max(lengths)
    assert sum(line["Empty Generation Slots"] for line in fields(result)) == len(lengths) * max(lengths) - sum(lengths)
    assert sum(line["Total Generation Tokens"] for line in fields(result)) == sum(lengths)


@pytest.mark.parametrize("batching_type", BatchingType)
def test_only_static_batches_ask_for_padded_prompts(batching_type):
    config = dataclasses.replace(STATIC, batching_type=batching_type)
    executor = SpyExecutor(CheckingExecutor(config.tokens_per_block))
    result = run(config, at_once(Request(0, 5, 3), Request(1, 2, 3), Request(2, 4, 3)), executor)
    is_static = batching_type is BatchingType.V1
    assert {batch.padded for batch in executor.batches} == {is_static}
    # The longest prompt has 5 tokens: 0, 3 and 1 are computed beside them.
    assert [record.padding for record in result.records] == [4 if is_static else 0, 0, 0]


def test_members_that_are_complete_take_no_more_blocks():
    result, _ = checked_run(STATIC, Request(0, 4, 9, output_len=1), Request(1, 4, 8))
    # The first keeps its one block of 4 tokens; the second caches 4 to 11 tokens: 1, then 2, then 3 blocks.
    assert [record.cache.used_blocks for record in result.records] == [2, 3, 3, 3, 3, 4, 4, 4]


def test_a_batch_that_does_not_fit_the_budget_starts_with_those_that_do():
    result, executor = checked_run(STATIC, Request(0, 5, 2), Request(1, 6, 1), Request(2, 5, 2))
    assert executor.frames == [([(0, 5), (1, 6)], []), ([], [0, 1]), ([(2, 5)], []), ([], [2])]
    assert len(result.completed) == 3


def test_an_end_token_makes_a_member_wait_like_any_other():
    ending = Request(0, 4, 9)
    ending.stop = StopConditions(end_tokens=(token_of(ending, 4 + 1),))
    result, _ = checked_run(STATIC, ending, Request(1, 4, 5))
    assert [record.idle for record in result.records] == [0, 0, 1, 1, 1]
    assert result.tokens(ending) == output_of(ending, 2)


def test_a_complete_member_that_is_stopped_takes_its_tokens_along():
    first, second, third = three_requests()
    loop = Loop(STATIC, at_once(first, second, third), CheckingExecutor(4), stops={1: [1]})
    loop.step(2)
    assert [response.request for response in loop.result.responses] == [second]
    assert loop.result.tokens(second) == output_of(second, 1)
    result = loop.run(check_blocks)
    assert [record.idle for record in result.records] == [0, 1, 0, 1, 1]
    assert result.tokens(first) == output_of(first, 3)
    assert result.tokens(third) == output_of(third, 5)
    assert_nothing_is_held(result.manager)


def test_stopping_the_last_running_member_ends_the_batch():
    first, second, third = three_requests()
    loop = Loop(STATIC, at_once(first, second, third), CheckingExecutor(4), stops={3: [2]})
    result = loop.run(check_blocks, max_steps=7)
    assert result.tokens(third) == output_of(third, 4)
    assert result.tokens(first) == output_of(first, 3)
    assert result.tokens(second) == output_of(second, 1)
    assert result.stopped == [third]
    assert_nothing_is_held(result.manager)


def test_no_step_is_spent_on_complete_members_alone():
    config, (first, second, third) = STATIC, three_requests()
    executor = SpyExecutor(CheckingExecutor(config.tokens_per_block))
    result = run(config, at_once(first, second, third), executor, check_blocks, stops={3: [2]})
    assert len(result.completed) == 3
    # The first two are complete after the third step; the third request made the fourth one necessary.
    assert len(executor.batches) == 4


def test_a_failure_in_the_middle_ends_the_batch_and_not_the_loop():
    first, second, third = three_requests()
    late = Request(3, 4, 2)
    executor = FailingExecutor(CheckingExecutor(4), collects={2})
    result = Loop(STATIC, at_once(first, second, third, late), executor).run(check_blocks, survives=True, max_steps=20)
    assert len(result.failures) == 1
    assert result.final(first).error is not None
    assert result.final(third).error is not None
    # The second was complete before: it has its token.
    assert result.tokens(second) == output_of(second, 1)
    assert result.tokens(late) == output_of(late, 2)
    assert_nothing_is_held(result.manager)


def test_an_executor_that_fails_for_good_does_not_keep_complete_members_for_ever():
    executor = FailingExecutor(CheckingExecutor(4), collects=range(2, 1_000))
    requests = three_requests()
    result = Loop(STATIC, at_once(*requests), executor).run(check_blocks, survives=True, max_steps=20)
    assert all(result.final(request).is_final for request in requests)
    assert isinstance(result.failures[0].__cause__, Broken)
    assert_nothing_is_held(result.manager)


def test_overlap_is_refused():
    with pytest.raises(ValueError, match="V1"):
        dataclasses.replace(STATIC, overlap=Overlap.ASYNC)


def test_beams_that_do_not_all_fit_the_token_budget_do_not_hang_the_batch():
    # Three prompts of one token fit the budget of 4 together; three times two beams do not.
    config = dataclasses.replace(STATIC, max_beam_width=2, max_num_tokens=4, max_input_len=4)
    loop = Loop(config, [(0, Request(index, 1, 3, beam_width=2)) for index in range(3)], NullExecutor())
    assert len(loop.run(check_blocks, max_steps=50).completed) == 3
