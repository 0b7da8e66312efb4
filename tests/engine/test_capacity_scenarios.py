"""Capacity policies, one small story each. See `scenario.py` for how to read a timeline."""

import numpy as np
import pytest

from ifbbench.schedulers.tensorrt_llm.policies import LoraLimits
from tests.engine.scenario import Pool, asks, capacity_timeline

NO_EVICT, UTILIZE, STATIC = "guaranteed_no_evict", "max_utilization", "static_batch"
ALL_POLICIES = (NO_EVICT, UTILIZE, STATIC)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_all_policies_run_what_fits_to_the_end(policy):
    adapters = [asks(10, 80, lora_task_id=1), asks(10, 80, lora_task_id=2)]
    assert capacity_timeline(policy, 2, Pool(20), adapters, LoraLimits(15, 100)) == "1:ab 79:AB"
    assert capacity_timeline(policy, 2, Pool(20), [asks(50, 40, chunk=20)] * 2) == "3:ab 39:AB"
    assert capacity_timeline(policy, 2, Pool(10, max_seq_len=50), [asks(20, 5)] * 2) == "1:ab 4:AB"


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_an_adapter_used_twice_takes_its_pages_once(policy):
    requests = [asks(10, 50, lora_task_id=task) for task in (7, 8, 7)]
    assert capacity_timeline(policy, 4, Pool(21), requests, LoraLimits(15, 30)) == "1:abc 49:ABC"


@pytest.mark.parametrize(
    ("policy", "timeline"),
    [(NO_EVICT, "1:abd 49:ABD 1:c 49:C"), (UTILIZE, "1:ab 49:AB 1:cd 49:CD"), (STATIC, "1:abd 49:ABD 1:c 49:C")],
)
def test_missing_adapter_pages_pass_a_request_over_but_stop_max_utilization(policy, timeline):
    requests = [asks(10, 50, lora_task_id=task) for task in (1, 2, 3, 1)]
    assert capacity_timeline(policy, 4, Pool(24), requests, LoraLimits(15, 30)) == timeline


@pytest.mark.parametrize(
    ("policy", "timeline"),
    [(NO_EVICT, "1:a 79:A 1:b 79:B"), (UTILIZE, "1:ab 40:AB 1:A-B 38:A 1:b 38:B"), (STATIC, "1:a 79:A 1:b 79:B")],
)
def test_two_requests_that_cannot_both_be_completed_in_the_pool(policy, timeline):
    assert capacity_timeline(policy, 2, Pool(10), [asks(10, 80)] * 2) == timeline


@pytest.mark.parametrize(
    ("policy", "timeline"),
    [
        (NO_EVICT, "2:a 59:A 2:b 59:B"),
        # A paused request resumes with its whole prompt as one chunk.
        (UTILIZE, "2:ab 20:AB 1:A-B 38:A 1:b 38:B"),
        (STATIC, "2:a 59:A 2:b 59:B"),
    ],
)
def test_the_same_with_prompts_in_chunks(policy, timeline):
    assert capacity_timeline(policy, 2, Pool(10), [asks(30, 60, chunk=20)] * 2) == timeline


def test_draft_tokens_enlarge_the_need_so_the_pause_comes_earlier():
    requests = [asks(10, 80, num_draft_tokens=5), asks(10, 80, num_draft_tokens=10)]
    assert capacity_timeline(UTILIZE, 2, Pool(10), requests) == "1:ab 30:AB 1:A-B 48:A 1:b 48:B"


LATE = [asks(10, 80), asks(10, 80), asks(10, 80, at=10), asks(10, 80, at=10)]
LATE_BUT_URGENT = [asks(10, 80), asks(10, 80), asks(10, 80, at=10, priority=0.6), asks(10, 80, at=10, priority=0.7)]


@pytest.mark.parametrize(
    ("sink", "timeline"),
    [
        (
            0,
            "1:ab 9:AB 1:ABcd 10:ABCD 1:AB-D-C 19:AB 1:A-B 38:A 1:bc 9:BC 1:B-C 28:B 1:cd 19:CD 1:C-D 38:C 1:d 48:D",
        ),
        (
            4,
            "1:ab 9:AB 1:ABcd 4:ABCD 1:AB-D-C 19:AB 1:A-B 44:A 1:bc 9:BC 1:B-C 34:B 1:cd 19:CD 1:C-D 44:C 1:d 54:D",
        ),
    ],
)
def test_max_utilization_pauses_late_arrivals_first(sink, timeline):
    assert capacity_timeline(UTILIZE, 4, Pool(10, sink=sink), LATE) == timeline


@pytest.mark.parametrize(
    ("sink", "timeline"),
    [
        (
            0,
            "1:ab 9:AB 1:dcAB 10:DCAB 1:DCA-B 9:DCA 1:DC-A 19:DC 1:D-C 38:D 1:c 38:C 1:ab 9:AB 1:A-B 38:A 1:b 48:B",
        ),
        (
            4,
            "1:ab 9:AB 1:dcAB 4:DCAB 1:DCA-B 9:DCA 1:DC-A 19:DC 1:D-C 44:D 1:c 44:C 1:ab 9:AB 1:A-B 44:A 1:b 54:B",
        ),
    ],
)
def test_max_utilization_pauses_low_priority_first_even_if_it_was_there_before(sink, timeline):
    assert capacity_timeline(UTILIZE, 4, Pool(10, sink=sink), LATE_BUT_URGENT) == timeline


def test_no_evict_starts_late_arrivals_when_their_turn_comes():
    chunked = [asks(30, 60, chunk=20, at=at) for at in (0, 0, 10, 10)]
    assert capacity_timeline(NO_EVICT, 4, Pool(10), chunked) == "2:a 59:A 2:b 59:B 2:c 59:C 2:d 59:D"
    assert capacity_timeline(NO_EVICT, 4, Pool(10), LATE_BUT_URGENT) == "1:a 79:A 1:d 79:D 1:c 79:C 1:b 79:B"


def test_a_static_batch_drains_before_others_start():
    requests = [asks(10, 80), asks(10, 40), asks(10, 80)]
    assert capacity_timeline(STATIC, 2, Pool(20), requests) == "1:ab 39:AB 40:A 1:c 79:C"
    assert capacity_timeline(NO_EVICT, 2, Pool(30), requests) == "1:ab 39:AB 1:Ac 39:AC 40:C"


def test_a_static_batch_leaves_unfinished_chunks_waiting_while_another_generates():
    requests = [asks(10, 4), asks(20, 4, chunk=10), asks(10, 2, at=1)]
    assert capacity_timeline(STATIC, 4, Pool(20), requests) == "1:ab 3:A 1:bc 1:BC 2:B"
    assert capacity_timeline(NO_EVICT, 4, Pool(20), requests) == "1:ab 1:Abc 1:ABC 1:AB 1:B"


def test_victims_come_from_the_tail_and_a_request_may_be_its_own():
    requests = [asks(2, 4)] * 4
    timeline = capacity_timeline(UTILIZE, 4, Pool(4, tokens_per_block=2, max_seq_len=20), requests)
    assert timeline == "1:abcd 1:AB-D-C 1:AB 1:A-B 1:b 1:cd 1:CD 1:C-D 1:d"


def test_a_context_request_past_its_first_chunk_can_be_a_victim():
    assert capacity_timeline(UTILIZE, 4, Pool(5), [asks(10, 15), asks(40, 5, chunk=10)]) == "1:ab 1:A-B 13:A 1:b 4:B"


@pytest.mark.parametrize(
    ("policy", "timeline"),
    [(NO_EVICT, "1:ab 4:AB 1:c 2:C"), (UTILIZE, "1:ab 1:AB 1:cA-B 2:CA 1:b 2:B"), (STATIC, "1:ab 4:AB 1:c 2:C")],
)
def test_priority_beyond_the_request_limit_pauses_under_max_utilization_alone(policy, timeline):
    """Blocks are plenty; only the number of requests binds, and still the last started request loses its blocks."""
    requests = [asks(10, 5), asks(10, 5), asks(10, 3, at=2, priority=0.9)]
    assert capacity_timeline(policy, 2, Pool(20), requests) == timeline


@pytest.mark.parametrize("policy", [NO_EVICT, STATIC])
def test_a_new_higher_priority_takes_the_reserve_of_unfinished_chunks_and_stalls_them(policy):
    requests = [asks(40, 10, chunk=10), asks(30, 20, chunk=30, at=1, priority=0.9)]
    assert capacity_timeline(policy, 4, Pool(9), requests) == "1:a 1:b 19:B 3:a 9:A"


def test_a_waiting_higher_priority_blocks_unfinished_chunks_while_others_generate():
    requests = [asks(20, 8), asks(40, 10, chunk=10), asks(30, 50, chunk=30, at=1, priority=0.9)]
    timeline = capacity_timeline(NO_EVICT, 4, Pool(13), requests)
    assert timeline == "1:ab 7:A 1:cb 2:Cb 9:CB 38:C"


@pytest.mark.parametrize("policy", [NO_EVICT, STATIC])
def test_unfinished_chunks_go_on_where_a_higher_priority_waits_for_their_blocks(policy):
    requests = [asks(40, 10, chunk=10), asks(30, 30, chunk=30, at=1, priority=0.9), asks(10, 10, at=1)]
    assert capacity_timeline(policy, 4, Pool(9), requests, until=14) == "4:a 9:A 1:bc"


@pytest.mark.parametrize("policy", [NO_EVICT, UTILIZE])
def test_a_prefix_search_ends_with_its_request(policy):
    """Request d gets the slot of request b; it must be delayed until c has stored the block that both need."""
    prompts = [[1, 9], [1, 5, 6], [7, 8] * 3, [7, 8]]
    requests = [
        asks(len(prompt), 1, at=at, chunk=1 if at in (1, 2) else None, prompt_tokens=np.array(prompt, np.int32))
        for at, prompt in enumerate(prompts)
    ]
    pool = Pool(40, tokens_per_block=1, max_seq_len=10, reuse=True)
    assert capacity_timeline(policy, 4, pool, requests) == "1:a 1:b 1:bc 5:c 1:d"
