"""Streaming: tokens come back piece by piece, and nothing else changes."""

import pytest
from hypothesis import strategies as st

from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import OutputOptions, StopConditions
from ifbbench.settings.modes import BatchingType
from tests.drawing import holds
from tests.engine.engine import (
    CheckingExecutor,
    Loop,
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

STREAMED = OutputOptions(streaming=True)
INFLIGHT_TYPES = [BatchingType.INFLIGHT, BatchingType.INFLIGHT_FUSED]


@pytest.mark.parametrize("overlap", [None, "partitioned", "async"])
@pytest.mark.parametrize("batching_type", INFLIGHT_TYPES)
def test_each_token_is_a_piece_and_only_the_last_is_final(batching_type, overlap):
    streamed, whole = Request(0, 4, 5, options=STREAMED), Request(1, 4, 5)
    result, _ = checked_run(limits(batching_type=batching_type, overlap=overlap), streamed, whole)
    assert result.pieces(streamed) == [[token] for token in output_of(streamed, 5)]
    assert result.pieces(whole) == [output_of(whole, 5)]
    assert result.final(streamed).error is None


def test_a_piece_is_sent_in_the_iteration_that_makes_it():
    streamed = Request(0, 4, 3, options=STREAMED)
    loop = Loop(limits(), at_once(streamed), CheckingExecutor(4))
    for number in range(1, 4):
        loop.step()
        assert loop.result.tokens(streamed) == output_of(streamed, number)
        assert loop.result.responses[-1].is_final == (number == 3)


def test_nothing_is_sent_before_the_last_chunk_of_the_prompt():
    streamed = Request(0, 8, 2, options=STREAMED)
    config = limits(chunk_unit=3, max_num_tokens=3, max_input_len=39)
    loop = Loop(config, at_once(streamed), CheckingExecutor(4))
    loop.step(2)
    assert loop.result.responses == []
    loop.step()
    assert loop.result.pieces(streamed) == [output_of(streamed, 1)]


def test_one_token_is_one_final_piece():
    streamed = Request(0, 4, 1, options=STREAMED)
    result, _ = checked_run(limits(), streamed)
    assert [(response.is_final, response.error) for response in result.responses] == [(True, None)]
    assert result.tokens(streamed) == output_of(streamed, 1)


@pytest.mark.parametrize("overlap", [None, "partitioned", "async"])
def test_an_end_token_is_in_the_final_piece(overlap):
    streamed = Request(0, 4, 9, options=STREAMED)
    streamed.stop = StopConditions(end_tokens=(token_of(streamed, 4 + 2),))
    result, _ = checked_run(limits(overlap=overlap), streamed)
    assert result.pieces(streamed) == [[token] for token in output_of(streamed, 3)]


@pytest.mark.parametrize("overlap", [None, "partitioned", "async"])
@pytest.mark.parametrize(("chunk_unit", "max_input_len"), [(None, 20), (2, 20), (2, 6)])
def test_nothing_is_sent_again_after_a_pause(chunk_unit, max_input_len, overlap):
    # A resumed prompt of 6 tokens has lost three of those sent: they are made again, and not sent again.
    config = limits(
        policy="max_utilization",
        num_blocks=5,
        chunk_unit=chunk_unit,
        overlap=overlap,
        max_num_tokens=24,
        max_input_len=max_input_len,
    )
    first, second = Request(0, 4, 16, options=STREAMED), Request(1, 4, 16, options=STREAMED)
    result, _ = checked_run(config, first, second)
    assert second.pauses >= 1
    for request in (first, second):
        assert result.pieces(request) == [[token] for token in output_of(request, 16)]
        assert result.final(request).error is None


# A prompt of 4 and 10 tokens reserved: resumed, it may have 13 tokens to run, one less than in all.
@pytest.mark.parametrize(
    ("policy", "chunk_unit", "max_input_len", "is_taken"),
    [
        ("max_utilization", None, 12, False),
        ("max_utilization", None, 13, True),
        ("max_utilization", 4, 12, True),
        ("guaranteed_no_evict", None, 12, True),
        ("static_batch", None, 12, True),
    ],
)
def test_streaming_is_refused_only_where_a_pause_could_cut_sent_tokens(policy, chunk_unit, max_input_len, is_taken):
    config = limits(policy=policy, chunk_unit=chunk_unit, max_num_tokens=13, max_input_len=max_input_len)
    streamed, whole = Request(0, 4, 10, options=STREAMED), Request(1, 4, 10)
    result, _ = checked_run(config, streamed, whole)
    error = result.final(streamed).error
    if is_taken:
        assert error is None
    else:
        assert error is not None
        assert "max_input_len" in error
    assert result.tokens(whole) == output_of(whole, 10)


def test_new_tokens_count_as_clamped_when_streaming_is_judged():
    # 39 of the reserved 1,000 tokens fit max_seq_len.
    config = limits(policy="max_utilization", max_num_tokens=39, max_input_len=39)
    result, _ = checked_run(config, Request(0, 1, 1_000, output_len=3, options=STREAMED))
    assert len(result.completed) == 3


def test_an_executor_without_tokens_streams_empty_pieces():
    streamed = Request(0, 4, 3, options=STREAMED)
    result = run(limits(), [(0, streamed)], NullExecutor())
    assert [(response.is_final, response.tokens) for response in result.responses] == [
        (False, ()),
        (False, ()),
        (True, ()),
    ]


@holds(
    50,
    1000,
    shapes=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 10), st.integers(1, 12), st.integers(1, 12), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization", "static_batch"]),
    batching_type=st.sampled_from(INFLIGHT_TYPES),
    num_blocks=st.integers(6, 16),
    chunk_unit=st.sampled_from([None, 2]),
    overlap=st.sampled_from([None, "partitioned", "async"]),
)
def test_streaming_changes_no_decision_and_no_token(shapes, policy, batching_type, num_blocks, chunk_unit, overlap):
    config = limits(
        policy=policy,
        batching_type=batching_type,
        num_blocks=num_blocks,
        chunk_unit=chunk_unit,
        overlap=overlap,
        max_num_tokens=24,
        max_input_len=24,
    )
    outcomes = []
    for streams in (False, True):
        executor = CheckingExecutor(config.tokens_per_block)
        arrivals = [
            (
                at,
                with_tokens(
                    Request(
                        index,
                        prompt_len,
                        reserved,
                        output_len=length,
                        options=OutputOptions(streaming=streams and is_streamed),
                    )
                ),
            )
            for index, (at, prompt_len, reserved, length, is_streamed) in enumerate(shapes)
        ]
        result = run(config, arrivals, executor, check_blocks)
        paused = [[pause.victim.request_id for pause in record.paused] for record in result.records]
        outcomes.append([executor.frames, paused, [result.tokens(request) for _, request in arrivals]])
        for _, request in arrivals:
            pieces = result.pieces(request)
            assert len(pieces) == (len(result.tokens(request)) if request.options.streaming else 1)
        assert_nothing_is_held(result.manager)
    assert outcomes[0] == outcomes[1]


def test_static_batches_answer_at_their_end_whoever_streams():
    config = limits(batching_type=BatchingType.V1)
    short, long = Request(0, 4, 2, options=STREAMED), Request(1, 4, 4, options=STREAMED)
    result, _ = checked_run(config, short, long)
    assert result.pieces(short) == [output_of(short, 2)]
    assert result.pieces(long) == [output_of(long, 4)]
