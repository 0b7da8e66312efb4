"""What holds for every batching type, with streams, stop signals and failures at any time."""

import dataclasses
from collections import Counter

from hypothesis import event
from hypothesis import strategies as st

from ifbbench.engine.request import Request
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.modes import BatchingType, Overlap
from tests.drawing import holds
from tests.engine.engine import CheckingExecutor, Loop, Run, assert_nothing_is_held, check_blocks
from tests.engine.executors import FailingExecutor, SpyExecutor
from tests.engine.strategies import Wish, configs, expected_outputs, is_possible, wishes

# Batching type, overlap, and pipeline stages.
BATCHING_TYPES = [
    (BatchingType.V1, None, 1),
    *(
        (batching_type, overlap, pp_size)
        for batching_type in (BatchingType.INFLIGHT, BatchingType.INFLIGHT_FUSED)
        for overlap, pp_size in ((None, 1), (Overlap.PARTITIONED, 1), (Overlap.ASYNC, 1), (None, 2), (None, 4))
    ),
]
MAX_STEPS = 4_000

trouble = {
    "stops": st.dictionaries(st.integers(0, 40), st.lists(st.integers(0, 12), max_size=3), max_size=4),
    "submits": st.sets(st.integers(0, 40), max_size=2),
    "collects": st.sets(st.integers(0, 40), max_size=2),
}
anything = {
    "config": configs(),
    "kind": st.sampled_from(BATCHING_TYPES),
    "wanted": st.lists(wishes(streaming=True), min_size=1, max_size=12),
}


def with_type(config: BatchingConfig, kind: tuple[BatchingType, Overlap | None, int]) -> BatchingConfig:
    batching_type, overlap, pp_size = kind
    if batching_type is BatchingType.V1:
        # Static batches run whole prompts.
        config = dataclasses.replace(
            config, chunk_unit=None, max_input_len=min(config.max_seq_len - 1, config.token_budget)
        )
    return dataclasses.replace(config, batching_type=batching_type, overlap=overlap, pp_size=pp_size)


def may_stream(request: Request, config: BatchingConfig) -> bool:
    """Whether no pause can cut a sent token: the rule for streaming requests."""
    if config.batching_type is BatchingType.V1 or config.policy != "max_utilization" or config.chunk_unit is not None:
        return True
    reserved = min(request.max_new_tokens, config.max_seq_len - request.prompt_len)
    return request.prompt_len + reserved - 1 <= config.max_input_len


def is_taken(request: Request, config: BatchingConfig) -> bool:
    return is_possible(request, config) and (not request.options.streaming or may_stream(request, config))


def run_all(config, wanted, stops, submits=frozenset(), collects=frozenset()) -> tuple[Run, list[Request], SpyExecutor]:
    requests = [wish.request(request_id) for request_id, wish in enumerate(wanted)]
    executor = SpyExecutor(FailingExecutor(CheckingExecutor(config.tokens_per_block), submits, collects))
    arrivals = list(zip((wish.at for wish in wanted), requests, strict=True))
    result = Loop(config, arrivals, executor, stops).run(check_blocks, survives=True, max_steps=MAX_STEPS)
    return result, requests, executor


def check_answers(config: BatchingConfig, wanted: list[Wish], result: Run, requests: list[Request]) -> None:
    """One final response each, the last; requests neither stopped nor failed have all tokens, others the first."""
    assert Counter(response.request.request_id for response in result.responses if response.is_final) == Counter(
        range(len(requests))
    )
    for wish, request in zip(wanted, requests, strict=True):
        expected = expected_outputs(wish, request, config)
        tokens, final = result.tokens(request), result.final(request)
        if final.error is None and request not in result.stopped:
            assert tokens == expected
        else:
            assert tokens == expected[: len(tokens)]
        if not request.options.streaming:
            assert len(result.pieces(request)) <= 1


@holds(100, 2000, **anything)
def test_every_possible_request_gets_all_tokens(config, kind, wanted):
    config = with_type(config, kind)
    taken = {number for number, wish in enumerate(wanted) if is_taken(wish.request(number), config)}
    result, requests, executor = run_all(config, wanted, {})
    assert {request.request_id for request in result.completed} == taken
    check_answers(config, wanted, result, requests)
    assert_nothing_is_held(result.manager)
    assert result.failures == []
    assert executor.max_iterations_in_flight <= config.max_in_flight
    assert executor.in_flight == 0


@holds(100, 10_000, **anything, **trouble)
def test_after_any_failure_every_request_has_one_final_answer_and_nothing_is_kept(
    config, kind, wanted, stops, submits, collects
):
    config = with_type(config, kind)
    result, requests, _ = run_all(config, wanted, stops, submits, collects)
    check_answers(config, wanted, result, requests)
    assert_nothing_is_held(result.manager)
    for request in requests:
        error = result.final(request).error
        if is_taken(wanted[request.request_id].request(0), config):
            assert error is None or "executor failed" in error
    event(f"{kind}, stopped: {bool(result.stopped)}, failed: {bool(result.failures)}")


@holds(15, 500, config=configs(), wanted=st.lists(wishes(), min_size=1, max_size=10))
def test_every_batching_type_gives_the_same_tokens(config, wanted):
    outputs = []
    for kind in BATCHING_TYPES[1:]:
        result, requests, _ = run_all(with_type(config, kind), wanted, {})
        outputs.append([result.tokens(request) for request in requests])
    assert all(output == outputs[0] for output in outputs)


def served(result: Run) -> list[set[int]]:
    """The requests of each static batch."""
    return [{request.request_id for request in record.finished} for record in result.records if record.finished]


@holds(60, 1000, config=configs(), wanted=st.lists(wishes(), min_size=1, max_size=10))
def test_members_of_a_static_batch_start_and_end_together(config, wanted):
    result, _, _ = run_all(with_type(config, BATCHING_TYPES[0]), wanted, {})
    started = [{chunk.request.request_id for chunk in record.context} for record in result.records if record.context]
    assert started == served(result)
    for record in result.records:
        assert not record.context or record.num_generation + record.idle == 0
        assert record.paused == []
