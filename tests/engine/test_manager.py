"""The batch manager's loop: stories with known outcomes."""

import dataclasses
import gc

import pytest

from ifbbench.engine.interfaces import SchedulerStalled
from ifbbench.engine.loop import TokenGenerationLoop
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import StopConditions
from ifbbench.kv.manager import KvCacheManager
from ifbbench.schedulers.limits import BatchingConfig
from tests.engine.engine import CheckingExecutor, at_once, limits, run, token_of, with_tokens


def documented_requests():
    return at_once(Request(1, 5, 2), Request(2, 5, 4), Request(3, 5, 4), Request(4, 5, 4), Request(5, 9, 4))


def test_the_documented_example_without_chunks():
    executor = CheckingExecutor(limits().tokens_per_block)
    result = run(limits(), documented_requests(), executor)
    assert executor.frames[:4] == [
        ([(1, 5), (2, 5)], []),
        ([(3, 5), (4, 5)], [1, 2]),
        ([(5, 9)], [2, 3, 4]),
        ([], [2, 3, 4, 5]),
    ]
    assert [record.budget_used for record in result.records[:3]] == [10, 12, 12]
    first, second = (record.left_out for record in result.records[:2])
    assert first is not None
    assert (first.request.request_id, first.limit) == (3, "num_tokens")
    assert second is not None
    assert (second.request.request_id, second.limit) == (5, "batch_size")


def test_the_documented_example_with_chunks():
    config = limits(chunk_unit=1, max_input_len=39)
    executor = CheckingExecutor(config.tokens_per_block)
    run(config, documented_requests(), executor)
    first, second, third = (executor.frames[iteration] for iteration in range(3))
    assert sorted(first[0]) == [(1, 5), (2, 5), (3, 2)]
    assert (sorted(second[0]), second[1]) == ([(3, 3), (4, 5)], [1, 2])
    assert third == ([(5, 9)], [2, 3, 4])


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization", "static_batch"])
def test_generation_requests_are_in_the_batch_by_lora_id_and_then_in_order(policy):
    config = limits(max_batch_size=6, max_num_tokens=24, policy=policy)
    lora_ids = [2, None, 1, 2, None, 1]
    requests = [Request(index, 2, 4, lora_task_id=lora_id) for index, lora_id in enumerate(lora_ids)]
    executor = CheckingExecutor(config.tokens_per_block)
    result = run(config, at_once(*requests), executor)
    assert [request_id for request_id, _ in executor.frames[0][0]] == [1, 4, 2, 5, 0, 3]
    assert [generation for _, generation in executor.frames[1:]] == [[1, 4, 2, 5, 0, 3]] * 3
    assert [response.request.request_id for response in result.responses] == [1, 4, 2, 5, 0, 3]


def test_hardware_parity_28_of_64_requests_run_at_once():
    config = BatchingConfig(
        policy="guaranteed_no_evict",
        max_batch_size=64,
        max_num_tokens=8192,
        max_seq_len=8192,
        max_input_len=8191,
        tokens_per_block=32,
        num_blocks=7319,
    )
    most = 0

    def check(manager, record):
        nonlocal most
        most = max(most, len(record.context) + record.num_generation)
        assert record.paused == []

    result = run(config, [(0, Request(index, 1096, 7000)) for index in range(64)], NullExecutor(), check)
    assert most == 28
    assert len(result.completed) == 64


def test_a_paused_request_resumes_with_its_tokens_joined_and_makes_each_once():
    config = limits(policy="max_utilization", num_blocks=5)
    executor = CheckingExecutor(config.tokens_per_block)
    first, second = Request(0, 4, 16), Request(1, 4, 16)
    result = run(config, at_once(first, second), executor)
    # Both need their third block in the same iteration; one is left, so the second is paused with 5 tokens made.
    assert [pause.victim for record in result.records for pause in record.paused] == [second]
    assert second.prompt_len == 4 + 5
    assert second.recomputed_tokens == 8
    for response in result.responses:
        assert response.output_tokens is not None
        assert response.output_tokens.tolist() == [token_of(response.request, 4 + offset) for offset in range(16)]


def test_tokens_that_do_not_fit_the_resumed_prompt_are_made_and_counted_again():
    config = limits(policy="max_utilization", num_blocks=9, max_num_tokens=12, max_input_len=6)
    executor = CheckingExecutor(config.tokens_per_block)
    second = Request(1, 4, 20)
    result = run(config, at_once(Request(0, 4, 28), second), executor)
    twice = sum(count - 1 for count in executor.computed.values())
    assert second.prompt_len == 6
    assert twice > 6
    assert sum(record.recomputed for record in result.records) == second.recomputed_tokens == twice


def test_an_end_token_ends_a_request_early():
    ending = Request(3, 5, 10)
    ending.stop = StopConditions(end_tokens=(1_000_000, token_of(ending, 5 + 2)))
    result = run(limits(), at_once(ending, Request(4, 5, 4)), CheckingExecutor(limits().tokens_per_block))
    outputs = {response.request.request_id: response.output_tokens for response in result.responses}
    lengths = {request_id: len(tokens) for request_id, tokens in outputs.items() if tokens is not None}
    assert lengths == {3: 3, 4: 4}


def test_output_shorter_than_reserved_frees_the_reserve():
    config = limits(num_blocks=6)
    executor = CheckingExecutor(config.tokens_per_block)
    run(config, at_once(Request(0, 4, 20, output_len=2), Request(1, 4, 16)), executor)
    assert executor.frames[:3] == [([(0, 4)], []), ([], [0]), ([(1, 4)], [])]


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request(9, 40, 1), "max_seq_len 40"),
        (Request(9, 13, 1), "max_input_len 12"),
        (Request(9, 12, 28), "needs 10 KV cache blocks until complete, the pool has 8 (kv_blocks)"),
        (Request(9, 0, 4), "at least 1"),
        (Request(9, 4, 0), "at least 1"),
        (Request(1, 4, 4), "request id 1 is in use"),
    ],
)
def test_a_refused_request_gets_an_error_and_the_run_continues(request_, named):
    config = limits(num_blocks=8)
    before, after = Request(1, 5, 3), Request(2, 5, 3)
    result = run(config, at_once(before, request_, after), CheckingExecutor(config.tokens_per_block))
    refusal = result.responses[0]
    assert refusal.request is request_
    assert refusal.is_final
    assert refusal.output_tokens is None
    assert refusal.error is not None
    assert named in refusal.error
    assert result.errors == {request_.request_id: refusal.error}
    assert result.completed == [before, after]


def test_an_id_may_be_used_again_after_the_final_response():
    first, again = Request(1, 5, 3), Request(1, 5, 3)
    arrivals = [(0, with_tokens(first)), (10, with_tokens(again))]
    assert run(limits(), arrivals, CheckingExecutor(limits().tokens_per_block)).completed == [first, again]


def test_new_tokens_are_clamped_to_what_max_seq_len_leaves():
    request = Request(1, 12, 1000)
    run(limits(), at_once(request), NullExecutor())
    assert request.max_new_tokens == 28


def test_higher_priority_enters_beyond_the_limit_and_holds_the_last():
    config = limits(max_batch_size=2)
    executor = CheckingExecutor(config.tokens_per_block)
    arrivals = at_once(Request(0, 2, 6), Request(1, 2, 6), Request(2, 2, 6))
    arrivals.append((2, with_tokens(Request(3, 2, 3, priority=0.9))))
    result = run(dataclasses.replace(config, policy="max_utilization"), arrivals, executor)
    assert executor.frames[:3] == [([(0, 2), (1, 2)], []), ([], [0, 1]), ([(3, 2)], [0])]
    assert [len(record.paused) for record in result.records[:3]] == [0, 0, 1]
    assert result.records[2].active == 3


@pytest.mark.parametrize("name", ["LeavesOutForFairness", "PausesForFairness"])
def test_a_policy_may_give_reasons_of_its_own(name):
    config = limits(policy=f"tests.engine.odd_policies:{name}")
    requests = [Request(index, 4, 3) for index in range(3)]
    result = run(config, at_once(*requests), CheckingExecutor(4))
    assert len(result.completed) == 3
    reasons = {item.limit for record in result.records for item in record.blocked}
    assert reasons == {"fairness"}
    first = result.records[0].left_out
    assert first is not None
    assert (first.request.request_id, first.limit) == (1, "fairness")


def test_a_policy_that_runs_no_request_is_reported_with_its_own_reason():
    config = limits(policy="tests.engine.odd_policies:StandsStill")
    with pytest.raises(SchedulerStalled, match="request 0 by fairness"):
        run(config, at_once(Request(0, 4, 3)), CheckingExecutor(4))


def test_a_loop_is_freed_with_its_last_use():
    """The blocks of a large cache are memory that the next run in the same process needs."""

    def alive() -> int:
        return sum(isinstance(one, TokenGenerationLoop | KvCacheManager) for one in gc.get_objects())

    gc.collect()
    before = alive()  # those that the traceback of another test holds
    gc.disable()  # which would find cycles, at a time that does not depend on their size
    try:
        run(limits(), documented_requests(), NullExecutor())
        assert alive() == before
    finally:
        gc.enable()
