"""How a token budget is cut into chunks, and which draft tokens are left."""

import pytest

from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import UNLIMITED
from ifbbench.schedulers.tensorrt_llm.chunks import ChunkLimits, size_chunks

FCFS, EQUAL = "first_come_first_served", "equal_progress"


def prefill(policy, prompts, iterations, *, budget=UNLIMITED, unit, longest=UNLIMITED, drafts=()):
    """Context positions after each of `iterations` iterations, and the draft tokens left at the end."""
    requests = [Request(index, prompt, 1) for index, prompt in enumerate(prompts)]
    for request, count in zip(requests, drafts, strict=bool(drafts)):
        request.set_draft_tokens(count)
    positions = []
    for _ in range(iterations):
        unfinished = [request for request in requests if request.remaining_context]
        size_chunks(unfinished, policy, budget, ChunkLimits(unit, longest))
        for request in unfinished:
            request.advance_context()
        positions.append(tuple(request.position for request in requests))
    return positions, [request.num_draft_tokens for request in requests]


@pytest.mark.parametrize("policy", [FCFS, EQUAL])
def test_less_than_a_unit_is_nothing_unless_it_ends_the_prompt(policy):
    assert prefill(policy, [25, 25], 1, unit=100, longest=20)[0] == [(0, 0)]
    assert prefill(policy, [25, 25], 1, unit=20, budget=10)[0] == [(0, 0)]
    assert prefill(policy, [10, 25], 2, unit=10, longest=20)[0] == [(10, 20), (10, 25)]
    assert prefill(policy, [8], 1, unit=20, budget=10)[0] == [(8,)]


@pytest.mark.parametrize(
    ("policy", "prompts", "budget", "positions"),
    [
        (EQUAL, [25, 15], 30, [(15, 15), (25, 15)]),
        (FCFS, [25, 15], 30, [(25, 5), (25, 15)]),
        (EQUAL, [25, 25], 15, [(10, 5), (20, 10), (25, 20), (25, 25)]),
        (FCFS, [25, 25], 15, [(15, 0), (25, 5), (25, 20), (25, 25)]),
    ],
)
def test_order_of_service(policy, prompts, budget, positions):
    assert prefill(policy, prompts, len(positions), budget=budget, unit=5)[0] == positions


def test_a_long_prompt_rounded_to_nothing_leaves_the_budget_to_those_behind():
    assert prefill(FCFS, [25, 3, 25], 1, budget=4, unit=5)[0] == [(0, 3, 0)]


@pytest.mark.parametrize("policy", [FCFS, EQUAL])
@pytest.mark.parametrize(
    ("prompts", "options", "iterations", "kept"),
    [
        pytest.param([17, 17], {"budget": 30, "unit": 5}, 2, [3, 3], id="rest of the unit"),
        pytest.param([23, 17], {"budget": 20, "unit": 5}, 2, [0, 0], id="budget is used up"),
        pytest.param([25, 25], {"budget": 50, "unit": 5}, 1, [0, 0], id="exact multiple leaves no room"),
        pytest.param([25, 25], {"unit": 5}, 1, [0, 0], id="exact multiple leaves no room, no budget"),
        pytest.param([30, 28], {"unit": 10}, 1, [0, 2], id="exact multiple beside one with room"),
        pytest.param([25, 25], {"budget": 30, "unit": 10}, 2, [5, 5], id="nothing to cut"),
        pytest.param([29, 29], {"unit": 10, "longest": 29}, 1, [0, 0], id="longest context leaves no room"),
    ],
)
def test_drafts_never_open_a_new_unit(policy, prompts, options, iterations, kept):
    _, drafts = prefill(policy, prompts, iterations, drafts=[5, 5], **options)
    assert drafts == kept


@pytest.mark.parametrize("policy", [FCFS, EQUAL])
def test_the_longest_context_cuts_drafts_before_the_unit_does(policy):
    assert prefill(policy, [4127], 1, unit=64, longest=4128, drafts=[3]) == ([(4127,)], [1])


def test_room_for_drafts_is_taken_from_the_budget_in_order():
    assert prefill(FCFS, [3, 3, 3], 1, budget=12, unit=4, drafts=[2, 2, 2]) == ([(3, 3, 3)], [1, 1, 1])
    assert prefill(FCFS, [3, 3, 3], 1, budget=11, unit=4, drafts=[2, 2, 2]) == ([(3, 3, 3)], [1, 1, 0])
