"""Requests with several beams in the engine: blocks, inputs, pauses and results."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.engine.sampling_params import StopConditions
from ifbbench.kv.attention_window import ceil_div
from tests.engine.engine import Loop, Run, assert_nothing_is_held, check_blocks, limits, run, scheduler_of
from tests.engine.executors import SpyExecutor
from tests.engine.scripted_beams import VOCAB, ScriptedBeams, score, searched_alone


def beam_run(config, *requests: Request, stops=None) -> tuple[Run, ScriptedBeams]:
    executor = ScriptedBeams(config.tokens_per_block)
    result = run(config, [(0, request) for request in requests], executor, check_blocks, stops or {})
    assert_nothing_is_held(result.manager)
    return result, executor


def beams_of(response: Response) -> list[tuple[int, ...]]:
    return [tuple(tokens.tolist()) for tokens in response.tokens]


# Blocks. A pool of their own shows how many are in use; blocks have 4 tokens.


def used_blocks(prompt_len: int, length: int, beam_width: int) -> list[int]:
    config = limits(max_beam_width=beam_width)
    result = run(config, [(0, Request(0, prompt_len, length, beam_width=beam_width))], NullExecutor(), check_blocks)
    assert_nothing_is_held(result.manager)
    return [record.cache.used_blocks or 0 for record in result.records]


def test_a_prompt_that_ends_within_a_block_has_that_block_once_for_each_beam():
    # 6 tokens: one block shared, one for each beam; the 9th starts one more for each.
    assert used_blocks(6, 6, beam_width=2) == [3, 3, 3, 5, 5, 5]
    # 3 tokens: nothing is shared.
    assert used_blocks(3, 4, beam_width=3) == [3, 3, 6, 6]


def test_a_prompt_that_fills_its_blocks_shares_them_all():
    assert used_blocks(8, 6, beam_width=2) == [2, 4, 4, 4, 4, 6]


@settings(max_examples=100)
@given(
    prompt_len=st.integers(1, 20),
    length=st.integers(1, 15),
    beam_width=st.integers(1, 4),
    size=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_beams_use_the_blocks_that_were_reckoned_with(prompt_len, length, beam_width, size):
    config = limits(max_beam_width=4, tokens_per_block=size, max_num_tokens=40, max_input_len=39)
    need = config.attention_window.blocks_to_completion(prompt_len, length, 0, beam_width)
    config = limits(max_beam_width=4, tokens_per_block=size, max_num_tokens=40, max_input_len=39, num_blocks=need)
    request = Request(0, prompt_len, length, beam_width=beam_width)
    result = run(config, [(0, request)], NullExecutor(), check_blocks)
    shared = prompt_len // size
    assert [record.cache.used_blocks for record in result.records] == [
        shared + (ceil_div(prompt_len + step, size) - shared) * beam_width for step in range(length)
    ]
    need = config.attention_window.first_chunk_need(prompt_len, length, 0, beam_width)
    assert result.records[0].cache.used_blocks == need


def test_block_tables_name_shared_blocks_for_all_beams_and_private_ones_for_one():
    config = limits(max_beam_width=3, max_batch_size=2)
    requests = [Request(0, 6, 4, beam_width=3), Request(1, 4, 6, beam_width=3)]
    loop = Loop(config, [(0, request) for request in requests], NullExecutor())
    loop.step(4)
    # Cached: 9 and 7 tokens. The first one left with its fourth step.
    tables = scheduler_of(loop.manager).kv_cache.block_tables
    held = tables[requests[1].slot, :, :2]
    assert len(set(held[:, 0].tolist())) == 1
    assert len(set(held[:, 1].tolist())) == 3
    assert set(held[:, 0].tolist()).isdisjoint(held[:, 1].tolist())


# The inputs of the executor. ScriptedBeams checks parents, tokens, scores, private places and every cached token.


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("beam_width", [2, 3, 5])
def test_results_are_those_of_beam_search_by_itself(prompt_len, beam_width):
    config = limits(max_beam_width=5, max_num_tokens=24)
    requests = [Request(index, prompt_len, 3 + 2 * index, beam_width=beam_width) for index in range(4)]
    result, _ = beam_run(config, *requests)
    for request in requests:
        assert beams_of(result.final(request)) == searched_alone(request)


def test_nine_beams_find_the_best_of_all_outputs_of_three_tokens():
    request = Request(7, 5, 3, beam_width=VOCAB**2)
    result, _ = beam_run(limits(max_beam_width=9), request)
    everything = sorted(itertools.product(range(VOCAB), repeat=3), key=lambda path: -score(7, path))
    assert beams_of(result.final(request)) == everything[:9]


def test_end_tokens_end_beams_one_by_one():
    request = Request(3, 5, 12, beam_width=3, stop=StopConditions(end_tokens=(1,)))
    result, _ = beam_run(limits(max_beam_width=3), request)
    beams = beams_of(result.final(request))
    assert beams == searched_alone(request)
    for beam in beams:
        assert 1 not in beam[:-1]
        assert beam[-1] == 1 or len(beam) == 12


def test_chunked_prompts_and_staggered_arrivals_change_no_result():
    config = limits(max_beam_width=2, chunk_unit=2, max_num_tokens=7, max_input_len=39)
    requests = [Request(index, 5 + 3 * index, 6, beam_width=2) for index in range(4)]
    result = run(config, [(2 * number, request) for number, request in enumerate(requests)], ScriptedBeams(4))
    for request in requests:
        assert beams_of(result.final(request)) == searched_alone(request)


def test_beams_count_towards_the_token_budget():
    # 12 tokens: three requests of three beams take 9; the fourth prompt of 4 waits.
    config = limits(max_beam_width=3)
    requests = [Request(index, 4, 5, beam_width=3) for index in range(4)]
    result, executor = beam_run(config, *requests)
    assert executor.ids[:2] == [[0, 1, 2], [0, 1, 2]]
    assert [record.budget_used for record in result.records[:2]] == [12, 9]
    assert max(record.budget_used for record in result.records) <= 12


def test_without_tokens_a_beam_request_runs_its_length():
    config = limits(max_beam_width=2)
    request = Request(0, 4, 6, output_len=4, beam_width=2)
    executor = SpyExecutor(NullExecutor())
    result = run(config, [(0, request)], executor, check_blocks)
    assert [batch.num_tokens for batch in executor.batches] == [4, 2, 2, 2]
    assert all(batch.beams is None for batch in executor.batches)
    assert result.final(request).tokens == ()
    assert_nothing_is_held(result.manager)


# Pauses and stops.


def test_a_pause_throws_the_beams_away_and_the_result_is_the_same():
    # Each has one shared block, and two more for every further 4 tokens; at the ninth token there are too few.
    config = limits(policy="max_utilization", max_beam_width=2, num_blocks=8)
    first, second = Request(0, 4, 9, beam_width=2), Request(1, 4, 10, beam_width=2)
    result, _ = beam_run(config, first, second)
    assert (first.pauses, second.pauses) == (0, 1)
    assert second.prompt_len == 4
    for request in (first, second):
        assert beams_of(result.final(request)) == searched_alone(request)


@settings(max_examples=100)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    widths=st.lists(st.integers(1, 3), min_size=6, max_size=6),
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization", "static_batch"]),
    num_blocks=st.integers(18, 30),
    size=st.sampled_from([1, 2, 4]),
    chunk_unit=st.sampled_from([None, 2]),
)
def test_no_pressure_changes_the_result_of_a_search(shapes, widths, policy, num_blocks, size, chunk_unit):
    config = limits(
        policy=policy,
        max_beam_width=3,
        num_blocks=num_blocks * 4 // size,
        tokens_per_block=size,
        chunk_unit=chunk_unit,
        max_num_tokens=16,
        max_input_len=16,
    )
    arrivals = [
        (at, Request(index, prompt_len, length, beam_width=width))
        for index, ((at, prompt_len, length), width) in enumerate(zip(shapes, widths, strict=False))
    ]
    executor = ScriptedBeams(size)
    result = run(config, arrivals, executor, check_blocks)
    assert_nothing_is_held(result.manager)
    for _, request in arrivals:
        assert result.final(request).error is None
        if request.beam_width > 1:
            assert beams_of(result.final(request)) == searched_alone(request)
        else:
            assert len(result.tokens(request)) == request.output_len


def test_a_search_that_is_stopped_gives_its_beams_as_far_as_they_are():
    request = Request(0, 4, 9, beam_width=2)
    result, _ = beam_run(limits(max_beam_width=2), request, stops={2: [0]})
    assert beams_of(result.final(request)) == searched_alone(Request(0, 4, 3, beam_width=2))


# Widths.


def test_different_widths_never_share_a_batch():
    config = limits(max_beam_width=3)
    widths = [1, 2, 2, 1, 3]
    requests = [Request(index, 3, 4, beam_width=width) for index, width in enumerate(widths)]
    result, executor = beam_run(config, *requests)
    # First come first served: no request overtakes one of another width.
    assert [ids for ids, _ in itertools.groupby(executor.ids)] == [[0], [1, 2], [3], [4]]
    assert [width for width, _ in itertools.groupby(executor.widths)] == [1, 2, 1, 3]
    assert len(result.completed) == 5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"beam_width": 3}, "beam width 3: expected 1 to 2 (max_beam_width)"),
        ({"beam_width": 0}, "beam width 0: expected 1 to 2 (max_beam_width)"),
    ],
)
def test_what_does_not_go_with_beams_is_refused(changes, named):
    refused, other = Request(0, 4, 4, **changes), Request(1, 4, 4, beam_width=2)
    result, _ = beam_run(limits(max_beam_width=2), refused, other)
    error = result.final(refused).error
    assert error is not None
    assert named in error
    assert result.final(other).error is None


def test_overlap_with_beams_is_refused():
    with pytest.raises(ValueError, match="beam"):
        limits(max_beam_width=2, overlap="async")
