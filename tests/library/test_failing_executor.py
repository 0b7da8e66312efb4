"""An executor that fails in some step, or always."""

from collections.abc import Callable

import numpy as np
import pytest

from ifbbench import BatchManagerFailed
from ifbbench.engine.batch import StepOutputs
from tests.library.client import Client
from tests.library.managers import (
    FailingExecutor,
    check_nothing_leaked,
    close_when_ended,
    manager_of,
    output_of,
    request_of,
)

WAYS = [
    ("V1", False),
    ("InflightBatching", False),
    ("InflightFusedBatching", False),
    ("InflightFusedBatching", True),
    ("InflightBatching", True),
]


@pytest.mark.parametrize("at", ["submit", "collect"])
@pytest.mark.parametrize(("model_type", "overlaps"), WAYS)
def test_one_failing_step_costs_its_requests_alone(model_type, overlaps, at, caplog):
    client = Client(request_of(request_id) for request_id in range(3))
    executor = FailingExecutor(lambda step: step == 2, at)
    with manager_of(client, executor, model_type=model_type, overlap="async" if overlaps else None) as manager:
        for answer in client.answers:
            answer.wait()
        later = client.submit(request_of(9)).wait()
    assert later.tokens == output_of(9, 5, 4)
    errors = [answer.error for answer in client.answers if answer.error]
    assert errors == ["the executor failed: out of luck"] * 3
    assert all(answer.finals == 1 for answer in client.answers)
    assert "the executor failed in iteration" in caplog.text
    check_nothing_leaked(manager)


def test_requests_that_were_not_in_the_failing_step_go_on():
    client = Client(request_of(request_id, prompt_len=20) for request_id in range(2))
    executor = FailingExecutor(lambda step: step == 1, "collect")
    with manager_of(client, executor) as manager:
        pass
    assert [answer.error for answer in client.answers] == ["the executor failed: out of luck", ""]
    assert client.answer(1).tokens == output_of(1, 20, 4)
    check_nothing_leaked(manager)


def test_an_id_may_be_used_again_after_the_executor_failed_it():
    client = Client([request_of(5)])
    with manager_of(client, FailingExecutor(lambda step: step == 2, "collect")):
        client.answers[0].wait()
        again = client.submit(request_of(5)).wait()
    assert (client.answers[0].error, again.error) == ("the executor failed: out of luck", "")
    assert again.tokens == output_of(5, 5, 4)


@pytest.mark.parametrize("at", ["submit", "collect"])
@pytest.mark.parametrize(("model_type", "overlaps"), WAYS)
def test_an_executor_that_fails_always_ends_the_loop(model_type, overlaps, at):
    client = Client()
    executor = FailingExecutor(lambda step: True, at)
    manager = manager_of(client, executor, model_type=model_type, overlap="async" if overlaps else None)
    # One at a time, so that the loop is idle between the failures.
    while manager.is_running:
        assert len(client.answers) < 10
        answer = client.submit(request_of(len(client.answers)))
        while manager.is_running and not answer.is_done.wait(0.01):
            pass
    with pytest.raises(BatchManagerFailed, match=r"the executor failed in iteration \d+: out of luck"):
        manager.close()
    fetched = client.answers[: len(client.answers) - client.queued]
    assert {answer.error for answer in fetched} == {"the executor failed: out of luck"}
    check_nothing_leaked(manager)


def test_an_executor_that_works_in_between_may_fail_often():
    client = Client()
    with manager_of(client, FailingExecutor(lambda step: step % 2 == 0, "collect")) as manager:
        for request_id in range(12):
            # The first step makes the only token of every other request.
            client.submit(request_of(request_id, max_new_tokens=1 + request_id % 2)).wait()
    assert sum(bool(answer.error) for answer in client.answers) > 3
    assert any(answer.error == "" for answer in client.answers)
    check_nothing_leaked(manager)


def test_all_that_was_fetched_gets_an_error_when_the_executor_is_given_up():
    client = Client(request_of(request_id, prompt_len=30) for request_id in range(10))
    manager = manager_of(client, FailingExecutor(lambda step: True, "collect"))
    with pytest.raises(BatchManagerFailed):
        close_when_ended(manager)
    failed, ended = client.answers[:3], client.answers[3:]
    assert {answer.error for answer in failed} == {"the executor failed: out of luck"}
    assert all(answer.error.startswith("the batch manager ended: the executor failed") for answer in ended)
    assert {answer.finals for answer in client.answers} == {1}


def test_by_hand_the_step_itself_raises_once_the_executor_is_given_up():
    client = Client(request_of(request_id, prompt_len=30) for request_id in range(5))
    manager = manager_of(client, FailingExecutor(lambda step: True, "collect"), start=False)
    assert manager.step()
    assert manager.step()
    with pytest.raises(Exception, match="out of luck"):
        manager.step()
    assert {answer.finals for answer in client.answers} == {1}
    with pytest.raises(RuntimeError, match="has ended"):
        manager.step()
    with pytest.raises(BatchManagerFailed, match="out of luck"):
        manager.close()


class WrongOutputs(FailingExecutor):
    """Makes one token more than the batch asks for in steps of some numbers."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        super().__init__(lambda step: False, "collect")
        self._is_wrong = fails

    def collect(self) -> StepOutputs:
        tokens = super().collect().tokens
        assert tokens is not None
        return StepOutputs(np.append(tokens, 0) if self._is_wrong(self._collected) else tokens)


def test_outputs_that_do_not_fit_cost_their_requests_alone_and_end_the_loop_if_they_never_fit():
    client = Client(request_of(request_id) for request_id in range(2))
    with manager_of(client, WrongOutputs(lambda step: step == 2)) as manager:
        for answer in client.answers:
            answer.wait()
        later = client.submit(request_of(9)).wait()
    assert later.tokens == output_of(9, 5, 4)
    assert all(answer.error.startswith("the executor failed: its tokens is int") for answer in client.answers[:2])
    check_nothing_leaked(manager)

    client = Client(request_of(request_id, prompt_len=30) for request_id in range(10))
    manager = manager_of(client, WrongOutputs(lambda step: True))
    with pytest.raises(BatchManagerFailed, match="its tokens is int"):
        close_when_ended(manager)
    assert {answer.finals for answer in client.answers} == {1}
