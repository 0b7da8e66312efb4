"""An executor that fails: the requests of its batch get an error, all others are served."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from ifbbench.engine.batch import Batch, BeamCandidates, StepOutputs, check_outputs
from ifbbench.engine.drafts import DraftInputs
from ifbbench.engine.loop import ExecutorFailed
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import OutputOptions
from ifbbench.settings.modes import BatchingType
from tests.engine.engine import (
    CheckingExecutor,
    Loop,
    Run,
    assert_nothing_is_held,
    at_once,
    check_blocks,
    limits,
    output_of,
    with_tokens,
)
from tests.engine.executors import Broken, FailingExecutor, SpyExecutor

NO_INTS, NO_FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)
LIMITS = limits()
OVERLAP = limits(overlap="async")
TWO_PASSES = limits(batching_type=BatchingType.INFLIGHT)


def run_on(config, arrivals, **failing) -> Run:
    """The run continues after failures; each request has one final response, and nothing is left in the engine."""
    executor = FailingExecutor(CheckingExecutor(config.tokens_per_block), **failing)
    result = Loop(config, arrivals, executor).run(check_blocks, survives=True, max_steps=200)
    for _, request in arrivals:
        assert result.final(request).is_final
    assert_nothing_is_held(result.manager)
    return result


def failed(result: Run) -> list[int]:
    return sorted(response.request.request_id for response in result.responses if response.error is not None)


@pytest.mark.parametrize("failing", [{"submits": {1}}, {"collects": {1}}])
def test_all_requests_of_the_batch_get_an_error_and_later_ones_are_served(failing):
    first, second, late = Request(0, 4, 5), Request(1, 4, 5), Request(2, 4, 5)
    result = run_on(LIMITS, [*at_once(first, second), (2, with_tokens(late))], **failing)
    assert failed(result) == [0, 1]
    for request in (first, second):
        error = result.final(request).error
        assert error is not None
        assert "the executor failed" in error
        assert next(iter(failing))[:-1] in error
    assert result.tokens(late) == output_of(late, 5)


@pytest.mark.parametrize("failing", [{"submits": {1}}, {"collects": {1}}])
def test_the_failure_comes_out_of_step_with_its_cause(failing):
    executor = FailingExecutor(CheckingExecutor(4), **failing)
    loop = Loop(LIMITS, at_once(Request(0, 4, 5)), executor)
    loop.step()
    with pytest.raises(ExecutorFailed, match="iteration 1") as failure:
        loop.step()
    assert isinstance(failure.value.__cause__, Broken)
    # The answer went out before.
    assert len(loop.result.responses) == 1
    assert not loop.step()


def test_requests_outside_the_batch_do_not_notice():
    # 12 tokens an iteration: the third prompt does not fit beside the first two.
    outside = Request(2, 6, 4)
    result = run_on(LIMITS, at_once(Request(0, 6, 4), Request(1, 6, 4), outside), collects={0})
    assert failed(result) == [0, 1]
    assert result.tokens(outside) == output_of(outside, 4)


def test_requests_in_the_queue_do_not_notice():
    config = dataclasses.replace(LIMITS, max_batch_size=1)
    waiting = Request(1, 4, 4)
    result = run_on(config, at_once(Request(0, 4, 4), waiting), collects={2})
    assert failed(result) == [0]
    assert result.tokens(waiting) == output_of(waiting, 4)


def test_whoever_was_paused_in_the_iteration_that_failed_is_resumed():
    config = dataclasses.replace(LIMITS, policy="max_utilization", num_blocks=5)
    first, paused = Request(0, 4, 16), Request(1, 4, 16)
    # Iterations 0 to 4 make five tokens each; in iteration 5 the second is paused.
    result = run_on(config, at_once(first, paused), collects={5})
    assert [record.iteration for record in result.records if record.paused] == [5]
    assert failed(result) == [0]
    assert result.tokens(paused) == output_of(paused, 16)


@pytest.mark.parametrize("failing", [{"submits": {1}}, {"submits": {2}}, {"collects": {1}}, {"collects": {2}}])
def test_when_one_of_two_passes_fails_both_do(failing):
    # Iteration 0 has one pass; iteration 1 has two, the second request's context and a step of the first.
    first, second, late = Request(0, 5, 4), Request(1, 6, 4), Request(2, 5, 4)
    arrivals = [(0, with_tokens(first)), (1, with_tokens(second)), (2, with_tokens(late))]
    result = run_on(TWO_PASSES, arrivals, **failing)
    assert failed(result) == [0, 1]
    assert len(result.failures) == 1
    assert result.tokens(late) == output_of(late, 4)


def test_with_overlap_the_batch_submitted_meanwhile_still_serves_the_others():
    # The second request's context is in flight when iteration 1 turns out to have failed.
    first, second = Request(0, 4, 6), Request(1, 4, 6)
    arrivals = [(0, with_tokens(first)), (2, with_tokens(second))]
    result = run_on(OVERLAP, arrivals, collects={1})
    assert failed(result) == [0]
    assert result.tokens(second) == output_of(second, 6)
    assert len(result.failures) == 1


def test_with_overlap_a_failed_submit_spares_the_batch_before_it():
    # The second request's context is submitted, in vain, while the first one's last step is in flight.
    first, second = Request(0, 4, 2), Request(1, 4, 6)
    result = run_on(OVERLAP, [(0, with_tokens(first)), (2, with_tokens(second))], submits={2})
    assert result.tokens(first) == output_of(first, 2)
    assert failed(result) == [1]


@pytest.mark.parametrize("batching_type", [BatchingType.INFLIGHT, BatchingType.INFLIGHT_FUSED])
def test_with_overlap_nothing_is_built_upon_a_batch_that_could_not_be_submitted(batching_type):
    config = dataclasses.replace(OVERLAP, batching_type=batching_type)
    executor = SpyExecutor(FailingExecutor(CheckingExecutor(4), submits={1}))
    Loop(config, at_once(Request(0, 4, 6)), executor).run(check_blocks, survives=True)
    assert [batch.iteration for batch in executor.batches] == [0, 1]


@pytest.mark.parametrize("failing", [{"submits": {1}}, {"collects": {1}}])
def test_with_overlap_the_failure_names_the_iteration_that_failed(failing):
    result = run_on(OVERLAP, at_once(Request(0, 4, 6)), **failing)
    assert "iteration 1" in str(result.failures[0])


def test_slots_of_failed_requests_serve_the_next_at_once():
    config = dataclasses.replace(OVERLAP, max_batch_size=1, num_blocks=3)
    first, second = Request(0, 4, 8), Request(1, 4, 8)
    result = run_on(config, at_once(first, second), collects={1})
    assert failed(result) == [0]
    assert result.tokens(second) == output_of(second, 8)


@pytest.mark.parametrize("config", [LIMITS, OVERLAP, TWO_PASSES])
def test_an_executor_that_always_fails_answers_everybody(config):
    requests = [Request(index, 4, 4) for index in range(9)]
    result = run_on(config, at_once(*requests), collects=range(1_000))
    assert failed(result) == list(range(9))
    result = run_on(config, at_once(*(Request(index, 4, 4) for index in range(9))), submits=range(1_000))
    assert failed(result) == list(range(9))


def test_the_client_keeps_the_pieces_that_it_got():
    streamed = Request(0, 4, 6, options=OutputOptions(streaming=True))
    result = run_on(LIMITS, at_once(streamed), collects={3})
    assert result.pieces(streamed) == [[token] for token in output_of(streamed, 3)]
    assert failed(result) == [0]


@pytest.mark.parametrize("config", [LIMITS, OVERLAP, TWO_PASSES])
def test_failed_iterations_are_recorded_like_others(config):
    requests = [Request(index, 4, 4 + index) for index in range(7)]
    result = run_on(config, at_once(*requests), collects={1, 4})
    # The client of these tests asserts that none is missing or recorded twice.
    assert [record.iteration for record in result.records] == list(range(result.manager.iteration))
    assert len(result.failures) == 2


def test_an_id_can_be_used_again_after_a_failure():
    again = Request(0, 5, 3)
    result = run_on(LIMITS, [*at_once(Request(0, 4, 6)), (3, with_tokens(again))], collects={2})
    assert result.tokens(again) == output_of(again, 3)


@pytest.mark.parametrize("config", [LIMITS, OVERLAP, TWO_PASSES])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_answers_every_fetched_request(config, steps):
    requests = [Request(index, 4, 6) for index in range(8)]
    loop = Loop(config, at_once(*requests), CheckingExecutor(4))
    loop.step(steps)
    fetched = [request for request in requests if (0, request) not in loop.client.waiting]
    loop.manager.abort("the power went off")
    assert len(fetched) == (8 if steps else 0)
    for request in fetched:
        assert loop.result.final(request).error == "the power went off"
    assert_nothing_is_held(loop.manager)


def test_abort_gets_over_an_executor_that_fails_again():
    executor = FailingExecutor(CheckingExecutor(4), collects=range(1, 100))
    loop = Loop(OVERLAP, at_once(Request(0, 4, 6), Request(1, 4, 6)), executor)
    loop.step(2)
    loop.manager.abort("no more")
    assert [response.error for response in loop.result.responses] == ["no more", "no more"]
    assert_nothing_is_held(loop.manager)


@pytest.mark.parametrize("config", [LIMITS, OVERLAP, TWO_PASSES, limits(batching_type=BatchingType.V1)])
def test_wherever_one_call_fails_the_others_are_served(config):
    config = dataclasses.replace(config, max_batch_size=2)
    for kind, number in itertools.product(["submits", "collects"], range(20)):
        requests = [Request(index, 3 + index, 5 - index) for index in range(5)]
        result = run_on(config, at_once(*requests), **{kind: {number}})
        assert len(failed(result)) <= 2
        assert bool(failed(result)) == bool(result.failures)
        # No batching type needs fewer calls than this.
        assert result.failures or number >= 8
        for request in requests:
            if request.request_id not in failed(result):
                assert result.tokens(request) == output_of(request, request.output_len)


class ReturningExecutor(CheckingExecutor):
    """Returns `wrong` in place of the outputs of the second batch."""

    def __init__(self, wrong: Any) -> None:
        super().__init__(LIMITS.tokens_per_block)
        self._wrong, self._num_collected = wrong, 0

    def collect(self) -> Any:
        outputs = super().collect()
        self._num_collected += 1
        return self._wrong if self._num_collected == 2 else outputs


TWO_TOKENS = np.zeros(2, np.int32)


@pytest.mark.parametrize("config", [LIMITS, OVERLAP, TWO_PASSES])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, ".*StepOutputs.*"),
        ([5, 6], ".*StepOutputs.*"),
        ({"tokens": NO_INTS}, r"its tokens is int32\[0\]; expected integers of \[2\]"),
        ({"tokens": np.zeros(3, np.int32)}, r"its tokens is int32\[3\]"),
        ({"tokens": np.zeros((2, 2), np.int32)}, r"its tokens is int32\[2, 2\]"),
        ({"tokens": np.full(2, np.nan)}, r"its tokens is float64\[2\]"),
        ({"log_probs": NO_FLOATS}, r"its log_probs is float32\[0\]; expected floats of \[2\]"),
        ({"log_probs": TWO_TOKENS}, r"its log_probs is int32\[2\]"),
        ({"context_logits": {0: np.zeros((1, 9))}}, "its context_logits has chunk 0"),
        ({"generation_logits": {2: np.zeros((1, 9))}}, "its generation_logits has output 2"),
        ({"generation_logits": {1: np.zeros(9)}}, r".* is float64\[9\]; expected floats of \[any, any\]"),
    ],
)
def test_outputs_that_do_not_fit_their_batch_cost_its_requests_alone(config, wrong, message):
    if isinstance(wrong, dict):
        fields: dict[str, Any] = {"tokens": TWO_TOKENS} | wrong
        wrong = StepOutputs(**fields)
    first, second, late = Request(0, 4, 6), Request(1, 4, 6), Request(2, 4, 5)
    loop = Loop(config, [*at_once(first, second), (4, with_tokens(late))], ReturningExecutor(wrong))
    with pytest.raises(ExecutorFailed, match=rf"the executor failed in iteration 1: {message}"):
        loop.step(4)
    result = loop.run()
    assert failed(result) == [0, 1]
    assert result.tokens(late) == output_of(late, 5)
    assert_nothing_is_held(result.manager)


def batch_of(num_outputs: int, **fields: Any) -> Batch:
    slots = np.arange(num_outputs, dtype=np.int32)
    return Batch(0, (), slots, slots, np.zeros((num_outputs, 1, 1), np.int32), **fields)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": np.zeros(2, np.int32)}, r"its tokens is int32\[2\]; expected integers of \[2, 4\]"),
        ({"log_probs": np.zeros(2, np.float32)}, r"its log_probs is float32\[2\]"),
        ({"accepted": np.zeros(3, np.int32)}, r"its accepted is int32\[3\]; expected integers of \[2\]"),
        ({"accepted": np.array([1, 2], np.int32)}, "its accepted has other numbers of draft tokens"),
        ({"accepted": np.array([-1, 0], np.int32)}, "its accepted has other numbers of draft tokens"),
    ],
)
def test_outputs_with_drafts_are_checked(wrong, message):
    batch = batch_of(2, drafts=DraftInputs(np.array([3, 1], np.int32), np.zeros(4, np.int32)))
    right: dict[str, Any] = {
        "tokens": np.zeros((2, 4), np.int32),
        "log_probs": np.zeros((2, 4), np.float32),
        "accepted": np.array([3, 0], np.int32),
    }
    check_outputs(StepOutputs(**right), batch)
    with pytest.raises(ValueError, match=message):
        check_outputs(StepOutputs(**right | wrong), batch)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": np.zeros((2, 4), np.int32)}, r"its candidates.tokens is int32\[2, 4\]; expected .* \[2, 5\]"),
        ({"scores": np.zeros((2, 5), np.int32)}, r"its candidates.scores is int32\[2, 5\]; expected floats"),
        ({"beams": np.full((2, 5), 2, np.int32)}, "its candidates.beams has other beams than 0 to 1"),
        ({"beams": np.full((2, 5), -1, np.int32)}, "its candidates.beams has other beams than 0 to 1"),
    ],
)
def test_outputs_with_beams_are_checked(wrong, message):
    batch = batch_of(2, beam_width=2, num_candidates=5)
    right: dict[str, Any] = {
        "tokens": np.zeros((2, 5), np.int32),
        "beams": np.ones((2, 5), np.int32),
        "scores": np.zeros((2, 5), np.float32),
    }
    check_outputs(StepOutputs(candidates=BeamCandidates(**right)), batch)
    with pytest.raises(ValueError, match=message):
        check_outputs(StepOutputs(candidates=BeamCandidates(**right | wrong)), batch)
