"""InflightBatching: context and generation run in a pass each, and nothing else changes."""

import dataclasses
from typing import Any

from hypothesis import strategies as st

from ifbbench.engine.request import Request
from ifbbench.settings.modes import BatchingType
from tests.drawing import holds
from tests.engine.engine import CheckingExecutor, Run, at_once, check_blocks, limits, run, with_tokens
from tests.engine.executors import SpyExecutor

TWO_PASSES = limits(batching_type=BatchingType.INFLIGHT)

Decisions = list[tuple[list[tuple[int, int]], list[int]]]


def spied(config, arrivals) -> tuple[Run, SpyExecutor, CheckingExecutor]:
    checking = CheckingExecutor(config.tokens_per_block)
    spy = SpyExecutor(checking)
    return run(config, arrivals, spy, check_blocks), spy, checking


def test_an_iteration_with_both_phases_submits_the_context_then_the_generation():
    arrivals = [(0, with_tokens(Request(0, 5, 4))), (1, with_tokens(Request(1, 6, 2)))]
    result, spy, checking = spied(TWO_PASSES, arrivals)
    assert checking.frames == [([(0, 5)], []), ([(1, 6)], []), ([], [0]), ([], [0, 1]), ([], [0])]
    assert [batch.iteration for batch in spy.batches] == [0, 1, 1, 2, 3]
    assert spy.log[2:6] == [("submit", 1), ("submit", 1), ("collect", 1), ("collect", 1)]
    # Only the one of two passes has the time between them.
    assert [record.context_end_s is not None for record in result.records] == [False, True, False, False]


def test_both_passes_count_towards_one_budget():
    # 12 tokens: beside a generation request there is room for a prompt of 11.
    later = [Request(1, 11, 2), Request(2, 1, 1)]
    arrivals = at_once(Request(0, 5, 4)) + [(1, with_tokens(request)) for request in later]
    result, _, _ = spied(TWO_PASSES, arrivals)
    assert [record.budget_used for record in result.records] == [5, 12, 3, 1]
    assert len(result.completed) == 3


def decisions(result: Run, checking: CheckingExecutor, spy: SpyExecutor) -> list[Any]:
    """What ran in each iteration, its passes joined, and what was paused."""
    merged: dict[int, Any] = {}
    for batch, (context, generation) in zip(spy.batches, checking.frames, strict=True):
        before = merged.get(batch.iteration, ([], []))
        merged[batch.iteration] = (before[0] + context, before[1] + generation)
    paused = [[pause.victim.request_id for pause in record.paused] for record in result.records]
    return [merged, paused]


@holds(
    40,
    1000,
    shapes=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 12), st.integers(1, 15), st.integers(1, 15)), min_size=1, max_size=8
    ),
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization", "static_batch"]),
    num_blocks=st.integers(7, 20),
    chunk_unit=st.sampled_from([None, 2]),
    overlap=st.sampled_from([None, "partitioned", "async"]),
)
def test_tokens_and_decisions_are_those_of_the_fused_type(shapes, policy, num_blocks, chunk_unit, overlap):
    fused = limits(policy=policy, num_blocks=num_blocks, chunk_unit=chunk_unit, overlap=overlap)
    outcomes = []
    for batching_type in (BatchingType.INFLIGHT_FUSED, BatchingType.INFLIGHT):
        arrivals = [
            (at, with_tokens(Request(index, prompt_len, reserved, output_len=length)))
            for index, (at, prompt_len, reserved, length) in enumerate(shapes)
        ]
        result, spy, checking = spied(dataclasses.replace(fused, batching_type=batching_type), arrivals)
        outputs = {request.request_id: result.tokens(request) for _, request in arrivals}
        outcomes.append([outputs, *decisions(result, checking, spy)])
    assert outcomes[0] == outcomes[1]


def test_without_a_second_phase_there_is_one_pass():
    result, spy, _ = spied(TWO_PASSES, at_once(Request(0, 5, 3), Request(1, 6, 3)))
    assert [batch.iteration for batch in spy.batches] == [0, 1, 2]
    assert all(record.context_end_s is None for record in result.records)
