"""Stop signals, and what ends a request by itself: end tokens and stop sequences."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import OutputOptions, StopConditions
from ifbbench.settings.modes import BatchingType
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

BOTH_WAYS = pytest.mark.parametrize("overlap", [None, "async"])


# Stop signals.


def test_a_waiting_request_is_stopped_before_it_starts():
    config = limits(max_batch_size=1)
    first, waiting = Request(0, 4, 4), Request(1, 4, 4)
    result = run(config, at_once(first, waiting), CheckingExecutor(4), check_blocks, stops={1: [1]})
    assert result.tokens(waiting) == []
    assert result.final(waiting).error is None
    assert result.stopped == [waiting]
    assert result.tokens(first) == output_of(first, 4)
    assert_nothing_is_held(result.manager)


@BOTH_WAYS
def test_a_request_is_stopped_between_two_chunks_of_its_prompt(overlap):
    config = limits(chunk_unit=2, max_num_tokens=4, max_input_len=39, overlap=overlap)
    cut, other = Request(0, 12, 4), Request(1, 3, 4)
    executor = CheckingExecutor(4)
    result = run(config, at_once(cut, other), executor, check_blocks, stops={1: [0]})
    assert executor.frames[:3] == [([(0, 4)], []), ([(0, 4)], []), ([(1, 3)], [])]
    assert result.tokens(cut) == []
    assert result.final(cut).error is None
    assert result.tokens(other) == output_of(other, 4)
    assert_nothing_is_held(result.manager)


@BOTH_WAYS
def test_a_generating_request_is_stopped_with_the_tokens_that_are_there(overlap):
    config = limits(overlap=overlap)
    stopped, other = Request(0, 4, 9), Request(1, 4, 9)
    result = run(config, at_once(stopped, other), CheckingExecutor(4), check_blocks, stops={4: [0]})
    # Five iterations were submitted; with overlap the last of them is not collected yet.
    assert result.tokens(stopped) == output_of(stopped, 4 if overlap else 5)
    assert result.final(stopped).error is None
    assert result.tokens(other) == output_of(other, 9)
    assert_nothing_is_held(result.manager)


@BOTH_WAYS
def test_a_streaming_request_that_is_stopped_gets_an_empty_final_piece(overlap):
    streamed = Request(0, 4, 9, options=OutputOptions(streaming=True))
    config = limits(overlap=overlap)
    result = run(config, at_once(streamed), CheckingExecutor(4), check_blocks, stops={4: [0]})
    made = 4 if overlap else 5
    assert result.pieces(streamed) == [[token] for token in output_of(streamed, made)] + [[]]
    assert result.final(streamed).error is None


@BOTH_WAYS
def test_a_paused_request_is_stopped_with_the_tokens_made_before(overlap):
    # Both want a third block after their fifth token; the second is paused then.
    config = limits(policy="max_utilization", num_blocks=5, overlap=overlap)
    first, paused = Request(0, 4, 16), Request(1, 4, 16)
    loop = Loop(config, at_once(first, paused), CheckingExecutor(4), stops={8: [1]})
    result = loop.run(check_blocks)
    assert paused.pauses == 1
    assert result.tokens(paused) == output_of(paused, 5)
    assert result.tokens(first) == output_of(first, 16)
    assert result.stopped == [paused]
    assert_nothing_is_held(result.manager)


def test_a_request_with_its_last_step_in_flight_is_stopped():
    parked = Request(0, 4, 3)
    result = run(limits(overlap="async"), at_once(parked), CheckingExecutor(4), check_blocks, stops={2: [0]})
    assert result.tokens(parked) == output_of(parked, 2)
    assert result.stopped == [parked]
    assert_nothing_is_held(result.manager)


def test_just_finished_unknown_and_repeated_ids_are_ignored():
    first, second = Request(0, 4, 2), Request(1, 4, 6)
    result = run(limits(), at_once(first, second), CheckingExecutor(4), stops={1: [0, 77], 2: [0, 1, 1], 3: [1]})
    assert result.tokens(first) == output_of(first, 2)
    assert result.tokens(second) == output_of(second, 3)
    assert result.stopped == [second]
    assert len(result.responses) == 2


@BOTH_WAYS
def test_an_id_can_be_used_again_after_a_stop(overlap):
    config = limits(overlap=overlap, max_batch_size=1)
    stopped, again = Request(5, 4, 9), Request(5, 6, 7)
    arrivals = [(0, with_tokens(stopped)), (3, with_tokens(again))]
    result = run(config, arrivals, CheckingExecutor(4), check_blocks, stops={2: [5]})
    assert result.tokens(stopped) == output_of(stopped, 2 if overlap else 3)
    assert result.tokens(again) == output_of(again, 7)
    assert result.final(again).error is None
    assert_nothing_is_held(result.manager)


def test_all_can_be_stopped_at_once_and_the_loop_is_idle_then():
    requests = [Request(index, 4, 9) for index in range(6)]
    loop = Loop(limits(overlap="async"), at_once(*requests), CheckingExecutor(4), stops={2: range(6)})
    result = loop.run(check_blocks, max_steps=6)
    assert result.stopped == requests
    assert all(result.final(request).is_final for request in requests)
    assert_nothing_is_held(result.manager)


def test_stopping_after_an_iteration_that_only_paused_keeps_the_tokens():
    config = limits(policy="tests.engine.odd_policies:PausesAllOnce")
    request = Request(0, 4, 6)
    result = run(config, at_once(request), CheckingExecutor(4), check_blocks, stops={2: [0]})
    assert request.pauses == 1
    assert result.tokens(request) == output_of(request, 2)


# End tokens.


@BOTH_WAYS
def test_any_of_many_end_tokens_ends_a_request(overlap):
    request = Request(0, 4, 10)
    request.stop = StopConditions(end_tokens=(2000, 2001, 2002, 2003, token_of(request, 4 + 3)))
    few = Request(1, 4, 6)
    few.stop = StopConditions(end_tokens=(token_of(few, 4 + 1),))
    result, _ = checked_run(limits(overlap=overlap), request, few, Request(2, 4, 5))
    assert result.tokens(request) == output_of(request, 4)
    assert result.tokens(few) == output_of(few, 2)


@BOTH_WAYS
@pytest.mark.parametrize("batching_type", [BatchingType.INFLIGHT, BatchingType.INFLIGHT_FUSED])
def test_the_first_token_can_be_the_end(batching_type, overlap):
    by_token, by_sequence = Request(0, 4, 10), Request(1, 4, 10)
    by_token.stop = StopConditions(end_tokens=(token_of(by_token, 4),))
    by_sequence.stop = StopConditions(stop_sequences=((token_of(by_sequence, 4),),))
    result, _ = checked_run(limits(batching_type=batching_type, overlap=overlap), by_token, by_sequence)
    for request in (by_token, by_sequence):
        assert result.tokens(request) == output_of(request, 1)
    assert_nothing_is_held(result.manager)


def test_the_end_token_of_one_request_does_not_end_another_in_its_place():
    config = limits(max_batch_size=1)
    first, second = Request(0, 4, 8), Request(1, 4, 8)
    first.stop = StopConditions(end_tokens=tuple(output_of(second, 8)))
    result, _ = checked_run(config, first, second)
    assert result.tokens(second) == output_of(second, 8)


# Stop sequences.


def outputs_with(sequences, *, overlap=None, length=8) -> list[int]:
    request = Request(0, 4, length)
    request.stop = StopConditions(stop_sequences=tuple(tuple(sequence) for sequence in sequences))
    result, _ = checked_run(limits(overlap=overlap), request)
    assert_nothing_is_held(result.manager)
    return result.tokens(request)


PLAIN = output_of(Request(0, 4, 8), 8)
PROMPT = [token_of(Request(0, 4, 8), offset) for offset in range(4)]


@BOTH_WAYS
def test_a_stop_sequence_ends_the_output_and_is_part_of_it(overlap):
    assert outputs_with([PLAIN[2:5]], overlap=overlap) == PLAIN[:5]


def test_a_stop_sequence_does_not_begin_in_the_prompt():
    assert outputs_with([PROMPT[-1:] + PLAIN[:1]]) == PLAIN
    assert outputs_with([PROMPT]) == PLAIN


def test_a_stop_sequence_longer_than_the_output_never_matches():
    assert outputs_with([[*PLAIN, 1], [9] * 100]) == PLAIN
    assert outputs_with([PLAIN]) == PLAIN


def test_of_two_sequences_the_one_that_is_complete_first_counts():
    assert outputs_with([PLAIN[1:5], PLAIN[1:3]]) == PLAIN[:3]
    assert outputs_with([PLAIN[1:3], PLAIN[1:5]]) == PLAIN[:3]
    assert outputs_with([PLAIN[1:4], PLAIN[3:4]]) == PLAIN[:4]


def test_a_stop_sequence_that_almost_matches_does_not_count():
    assert outputs_with([[PLAIN[1], PLAIN[3]], PLAIN[3:1:-1]]) == PLAIN


@BOTH_WAYS
def test_a_stop_sequence_may_lie_across_a_pause(overlap):
    # The second is paused with five tokens made.
    config = limits(policy="max_utilization", num_blocks=5, overlap=overlap)
    first, paused = Request(0, 4, 16), Request(1, 4, 16)
    paused.stop = StopConditions(stop_sequences=(tuple(output_of(paused, 7)[3:]),))
    result, _ = checked_run(config, first, paused)
    assert paused.pauses == 1
    assert result.tokens(paused) == output_of(paused, 7)


@settings(max_examples=150)
@given(
    sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=3),
    ends=st.lists(st.integers(0, 3), max_size=2),
    length=st.integers(1, 12),
    overlap=st.sampled_from([None, "partitioned", "async"]),
    is_streamed=st.booleans(),
)
def test_the_output_ends_with_the_first_end_there_is(sequences, ends, length, overlap, is_streamed):
    """`stops_at` looks for it in the whole output, unlike an engine that gets one token after the other."""
    plain = output_of(Request(0, 4, length), length)
    alphabet = [*sorted(set(plain)), 5000, 5001, 5002, 5003]
    stop = StopConditions(
        tuple(alphabet[end] for end in ends),
        tuple(tuple(alphabet[item] for item in sequence) for sequence in sequences),
    )
    request = Request(0, 4, length, stop=stop, options=OutputOptions(streaming=is_streamed))
    result, _ = checked_run(limits(overlap=overlap), request)
    assert result.tokens(request) == plain[: stops_at(plain, stop)]


def stops_at(plain: list[int], stop: StopConditions) -> int:
    lengths = [offset + 1 for offset, token in enumerate(plain) if token in stop.end_tokens]
    for sequence in stop.stop_sequences:
        lengths += [
            end for end in range(len(sequence), len(plain) + 1) if tuple(plain[end - len(sequence) : end]) == sequence
        ]
    return min(lengths, default=len(plain))


def test_more_end_tokens_than_before_do_not_disturb_those_that_run():
    early, late = Request(0, 4, 9), Request(1, 4, 9)
    early.stop = StopConditions(end_tokens=(token_of(early, 4 + 6),))
    late.stop = StopConditions(end_tokens=(3000, 3001, 3002, 3003, token_of(late, 4 + 1)))
    arrivals = [(0, with_tokens(early)), (3, with_tokens(late))]
    result = run(limits(), arrivals, CheckingExecutor(4), check_blocks)
    assert result.tokens(early) == output_of(early, 7)
    assert result.tokens(late) == output_of(late, 2)
