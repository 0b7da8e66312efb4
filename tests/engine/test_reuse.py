"""Reuse of KV cache blocks changes nothing but the work: runs in which prompts share prefixes of all kinds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import event
from hypothesis import strategies as st

from ifbbench.engine.batch import CopyKind
from ifbbench.engine.request import Request, ReuseIdentity
from ifbbench.engine.sampling_params import OutputOptions
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.modes import BatchingType
from tests.drawing import holds
from tests.engine.engine import Loop, Run, scheduler_of
from tests.engine.executors import FailingExecutor
from tests.engine.reuse_executor import VOCABULARY, ReuseExecutor, greedy

CONFIG = BatchingConfig(
    "guaranteed_no_evict",
    max_batch_size=4,
    max_num_tokens=64,
    max_seq_len=64,
    max_input_len=63,
    tokens_per_block=4,
    num_blocks=64,
    reuse=ReuseRules(enabled=True),
)
SYSTEM_PROMPT = [1, 2, 3, 4, 0, 1, 2, 3, 4, 0]


def request_of(request_id: int, prompt: list[int], new_tokens: int) -> Request:
    return Request(request_id, len(prompt), new_tokens, prompt_tokens=np.array(prompt, np.int32), index=request_id)


def serve(config: BatchingConfig, arrivals: list[tuple[int, Request]]) -> tuple[Run, ReuseExecutor]:
    """Serve all; their tokens are what they are without anything reused."""
    wanted = {request.request_id: request.max_new_tokens for _, request in arrivals}
    executor = ReuseExecutor(config.tokens_per_block)
    run = Loop(config, arrivals, executor).run(
        lambda manager, record: scheduler_of(manager).kv_cache.check_consistency()
    )
    assert scheduler_of(run.manager).kv_cache.free_blocks == config.num_blocks
    assert len(run.completed) == len(arrivals)
    for request in run.completed:
        assert request.prompt_tokens is not None
        length = min(wanted[request.request_id], config.max_seq_len - request.original_prompt_len)
        assert run.tokens(request) == greedy(request.prompt_tokens.tolist(), length)
    return run, executor


def test_a_second_request_starts_behind_the_full_blocks_and_the_beginning_of_one_that_it_shares():
    first, second = request_of(0, [*SYSTEM_PROMPT, 2, 2, 2], 3), request_of(1, [*SYSTEM_PROMPT, 3, 3], 3)
    run, executor = serve(CONFIG, [(0, first), (1, second)])
    # Blocks 0 to 3 and 4 to 7 are equal, and 8, 9 of the third.
    assert (first.reused_tokens, second.reused_tokens) == (0, 10)
    assert executor.computed == 13 + 2 + 2 + 2
    counters = scheduler_of(run.manager).kv_cache.counters
    assert (counters.reused, counters.missed) == (3, 4)


def test_the_first_chunk_after_reused_tokens_ends_with_a_block_and_those_behind_it_are_whole_units():
    """As in TensorRT-LLM, chunks are sized before the reused tokens are known."""
    config = dataclasses.replace(CONFIG, chunk_unit=8, max_num_tokens=9)
    prompts = [SYSTEM_PROMPT + [2] * 3, SYSTEM_PROMPT + [3] * 32]
    run, _ = serve(config, [(0, request_of(0, prompts[0], 1)), (5, request_of(1, prompts[1], 1))])
    chunks = [(chunk.start, chunk.length) for record in run.records for chunk in record.context if chunk.request.index]
    assert chunks == [(10, 6), (16, 8), (24, 8), (32, 8), (40, 2)]
    for reused in range(1, 40):
        for chunk in range(4, 40):
            request = request_of(0, [1] * 40, 1)
            request.set_chunk(chunk)
            request.set_prepopulated(reused, tokens_per_block=4)
            end = reused + chunk
            assert request.chunk == (end // 4 * 4 if end < 40 else 40) - reused


def test_the_last_token_of_a_repeated_prompt_is_computed_again():
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    _, executor = serve(CONFIG, [(0, request_of(0, prompt, 1)), (4, request_of(1, prompt, 1))])
    assert executor.computed == 8 + 1


@pytest.mark.parametrize("overlap", [None, "async"])
def test_a_block_filled_by_generation_is_findable_after_the_scheduling_of_the_next_iteration(overlap):
    """Three equal prompts of one block: the first token of request 0 completes it, and it is stored when iteration 1 is
    submitted. Request 1, which starts in iteration 1, does not find it yet; request 2 does."""
    requests = [request_of(index, [1, 2, 3, 4], 8) for index in range(3)]
    config = dataclasses.replace(CONFIG, overlap=overlap)
    run, _ = serve(config, [(0, request) for request in requests])
    ran = [[(chunk.request.request_id, chunk.length) for chunk in record.context] for record in run.records]
    assert ran[:4] == [[(0, 4)], [(1, 4)], [(2, 1)], []]


@pytest.mark.parametrize("overlap", [None, "async"])
def test_a_block_that_output_fills_is_findable_one_iteration_later(overlap):
    """Iteration 2 computes the fourth position, so the block is stored when iteration 3 is submitted."""
    answer = greedy([1, 2], 3)
    config = dataclasses.replace(CONFIG, overlap=overlap)
    for at, reused in ((3, 0), (4, 4)):
        first, second = request_of(0, [1, 2], 9), request_of(1, [1, 2, *answer], 2)
        run, _ = serve(config, [(0, first), (at, second)])
        started = next(record.iteration for record in run.records if second in [c.request for c in record.context])
        assert (started, second.reused_tokens) == (at, reused)


def test_output_is_reused_by_a_prompt_that_repeats_it():
    first = request_of(0, SYSTEM_PROMPT, 9)
    answer = greedy(SYSTEM_PROMPT, 9)
    second = request_of(1, [*SYSTEM_PROMPT, *answer, 1], 2)
    serve(CONFIG, [(0, first), (30, second)])
    # All that was computed: the last token of an answer never is.
    assert second.reused_tokens == len(SYSTEM_PROMPT) + 8


def test_a_request_that_needs_a_block_in_computation_waits_for_it():
    requests = [request_of(index, [*SYSTEM_PROMPT, index], 4) for index in range(3)]
    run, _ = serve(CONFIG, [(0, request) for request in requests])
    started = {chunk.request.request_id: record.iteration for record in run.records for chunk in record.context}
    assert started == {0: 0, 1: 1, 2: 1}
    first = run.records[0].left_out
    assert first is not None
    assert (first.request.request_id, first.limit) == (1, "reuse_delay")
    # The third block is not full, and so not found before its owner leaves.
    assert [request.reused_tokens for request in requests] == [0, 8, 8]


def test_requests_with_another_lora_task_or_salt_share_nothing():
    plain, lora, salted = (request_of(index, [*SYSTEM_PROMPT, 1], 2) for index in range(3))
    lora.lora_task_id = 0
    salted.reuse = ReuseIdentity(cache_salt="tenant")
    serve(CONFIG, [(0, plain), (5, lora), (10, salted)])
    assert (lora.reused_tokens, salted.reused_tokens) == (0, 0)


def test_a_request_that_wants_its_prompts_logits_stores_blocks_and_looks_none_up():
    first, second, third = (request_of(index, [*SYSTEM_PROMPT, 1], 2) for index in range(3))
    for request in (first, second):
        request.options = OutputOptions(return_context_logits=True)
    serve(CONFIG, [(0, first), (5, second), (10, third)])
    assert (first.reused_tokens, second.reused_tokens, third.reused_tokens) == (0, 0, 10)


def test_a_resumed_request_finds_its_own_blocks():
    config = dataclasses.replace(CONFIG, policy="max_utilization", num_blocks=7)
    first, second = request_of(0, [1, 2, 3, 4], 16), request_of(1, [4, 3, 2, 1], 12)
    run, executor = serve(config, [(0, first), (0, second)])
    assert sum(len(record.paused) for record in run.records) > 0
    assert second.reused_tokens == 0, "only what its own pause left was found"
    # Without reuse its whole prompt and output would have been computed again.
    assert executor.computed < (4 + 15) + (4 + 11) + second.recomputed_tokens + 8


def test_blocks_evicted_to_the_host_are_onboarded_again():
    config = dataclasses.replace(CONFIG, num_blocks=6, num_host_blocks=12, max_batch_size=1)
    conversations = [[offset % VOCABULARY for offset in range(start, start + 13)] for start in range(4)]
    arrivals = [(0, request_of(index, prompt, 2)) for index, prompt in enumerate(conversations * 2)]
    _, executor = serve(config, arrivals)
    kinds = {copy.kind for copy in executor.copies}
    assert {CopyKind.OFFLOAD, CopyKind.ONBOARD} <= kinds
    without = dataclasses.replace(config, num_host_blocks=0)
    reused = [request.reused_tokens for _, request in arrivals]
    again = [(0, request_of(index, prompt, 2)) for index, prompt in enumerate(conversations * 2)]
    serve(without, again)
    assert sum(reused) > sum(request.reused_tokens for _, request in again)


def test_a_failed_step_leaves_nothing_to_be_found():
    executor = FailingExecutor(ReuseExecutor(CONFIG.tokens_per_block), collects={0})
    first, second = request_of(0, [*SYSTEM_PROMPT, 1], 2), request_of(1, [*SYSTEM_PROMPT, 1], 2)
    loop = Loop(CONFIG, [(0, first), (3, second)], executor)
    loop.run(survives=True)
    assert second.reused_tokens == 0


prompts = st.builds(
    lambda prefix, cut, own: (prefix[:cut] + own)[:40] or [0],
    st.sampled_from([SYSTEM_PROMPT * 3, [0] * 30, [1, 0] * 15, []]),
    st.integers(0, 30),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=10),
)


@st.composite
def configs(draw) -> BatchingConfig:
    """All policies, with pools so small that eviction, pauses and offloading all happen."""
    max_num_tokens = draw(st.integers(41, 80))
    chunk_unit = draw(st.one_of(st.none(), st.integers(1, 8)))
    return BatchingConfig(
        policy=draw(st.sampled_from(["guaranteed_no_evict", "max_utilization", "static_batch"])),
        max_batch_size=draw(st.integers(1, 5)),
        max_num_tokens=max_num_tokens if chunk_unit is None else draw(st.integers(8, 30)),
        max_seq_len=60,
        max_input_len=59 if chunk_unit else min(59, max_num_tokens),
        tokens_per_block=(size := draw(st.sampled_from([1, 2, 4, 8]))),
        num_blocks=draw(st.integers(-(-60 // size), 3 * -(-60 // size))),
        chunk_unit=chunk_unit,
        batching_type=draw(st.sampled_from([BatchingType.INFLIGHT, BatchingType.INFLIGHT_FUSED])),
        overlap=draw(st.sampled_from([None, "partitioned", "async"])),
        reuse=ReuseRules(True, draw(st.booleans()), draw(st.booleans())),
        num_host_blocks=draw(st.sampled_from([0, 0, 3, 40])),
    )


@st.composite
def arrivals(draw) -> list[tuple[int, Request]]:
    wanted = draw(st.lists(st.tuples(st.integers(0, 30), prompts, st.integers(1, 16)), min_size=1, max_size=12))
    return [(at, request_of(index, prompt, new)) for index, (at, prompt, new) in enumerate(wanted)]


@holds(60, 10_000, config=configs(), arrivals=arrivals())
def test_reuse_changes_no_token_and_shares_nothing_by_mistake(config, arrivals):
    run, executor = serve(config, arrivals)
    event(f"pauses: {any(record.paused for record in run.records)}")
    event(f"copies: {sorted({copy.kind.value for copy in executor.copies})}")
    event(f"reused: {any(request.reused_tokens for _, request in arrivals)}")
