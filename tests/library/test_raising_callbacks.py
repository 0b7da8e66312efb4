"""Callbacks that raise, and such that return what they should not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ifbbench import BatchManager, BatchManagerFailed
from tests.library.client import Client
from tests.library.managers import check_nothing_leaked, close_when_ended, manager_of, output_of, request_of

NAMES = ["get_inference_requests", "send_response", "poll_stop_signals", "return_batch_manager_stats"]


class Raising:
    """A callback of `client` that raises in calls of some numbers, counted from 1, before it does anything."""

    def __init__(self, client: Client, name: str, fails: Callable[[int], bool]) -> None:
        self.calls = 0
        self._callback = getattr(client, name)
        self._fails = fails

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self._fails(self.calls):
            raise RuntimeError("the client stumbles")
        return self._callback(*arguments)


def unanswered(client: Client) -> list[int]:
    return [answer.request.request_id for answer in client.answers if answer.finals == 0]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "send_response"])
@pytest.mark.parametrize("fails", [lambda call: call == 1, lambda call: call % 3 != 0], ids=["once", "twice in a row"])
def test_a_callback_that_raises_now_and_then_costs_nothing(name, fails, caplog):
    client = Client(request_of(request_id) for request_id in range(20))
    callback = Raising(client, name, fails)
    with manager_of(client, callbacks={name: callback}) as manager:
        pass
    assert [answer.tokens for answer in client.answers] == [output_of(request_id, 5, 4) for request_id in range(20)]
    assert callback.calls > 3
    assert f"{name} failed: the client stumbles" in caplog.text
    check_nothing_leaked(manager)


@pytest.mark.parametrize("name", NAMES)
def test_a_callback_that_raises_three_times_in_a_row_ends_the_loop(name, caplog):
    client = Client(request_of(request_id, max_new_tokens=30, streaming=request_id < 3) for request_id in range(8))
    manager = manager_of(client, callbacks={name: Raising(client, name, lambda call: 2 <= call < 5)})
    with pytest.raises(BatchManagerFailed, match=f"{name} failed 3 times in a row: the client stumbles"):
        close_when_ended(manager)
    assert not manager.is_running
    fetched = [answer for answer in client.answers if answer.request.request_id not in unanswered(client)]
    assert {answer.finals for answer in client.answers} <= {0, 1}
    if name != "send_response":
        assert len(fetched) + client.queued == 8
        assert all("the batch manager ended" in answer.error for answer in fetched)
    assert f"the batch manager ends: {name} failed 3 times in a row" in caplog.text
    check_nothing_leaked(manager)
    manager.close()


def test_calls_in_a_row_are_counted_for_each_callback_alone():
    client = Client(request_of(request_id, streaming=True) for request_id in range(4))
    callbacks = {name: Raising(client, name, lambda call: call in (1, 2)) for name in NAMES if name != "send_response"}
    with manager_of(client, callbacks=callbacks):
        pass
    assert [answer.tokens for answer in client.answers] == [output_of(request_id, 5, 4) for request_id in range(4)]


def test_a_stream_that_cannot_be_delivered_ends_with_an_error_and_others_go_on(caplog):
    client = Client([request_of(1, streaming=True), request_of(2, streaming=True), request_of(3)])
    manager = manager_of(client, callbacks={"send_response": failing_piece(client, request_id=1, piece=2)})
    manager.close()
    broken = client.answer(1)
    assert (broken.finals, broken.error) == (1, "send_response raised: the client stumbles")
    assert broken.responses[-1] == {}
    assert broken.tokens == output_of(1, 5, 1)
    assert [client.answer(request_id).tokens for request_id in (2, 3)] == [output_of(2, 5, 4), output_of(3, 5, 4)]
    assert "send_response failed for request 1" in caplog.text
    check_nothing_leaked(manager)


def test_a_stream_with_a_hole_does_not_end_well_when_it_is_stopped_in_the_same_iteration():
    client = Client([request_of(1, streaming=True, max_new_tokens=9)])
    manager = manager_of(client, start=False, callbacks={"send_response": failing_piece(client, request_id=1, piece=2)})
    manager.step()
    client.stops.append(1)
    manager.step()
    broken = client.answer(1)
    assert (broken.finals, broken.error) == (1, "send_response raised: the client stumbles")
    assert not manager.step()


def test_a_final_response_that_cannot_be_delivered_is_not_sent_again(caplog):
    client = Client([request_of(1), request_of(2)])
    finals = []

    def send(request_id, tensors, is_final, error):
        finals.append(request_id)
        if request_id == 1:
            raise RuntimeError("the client stumbles")
        client.send_response(request_id, tensors, is_final, error)

    with manager_of(client, callbacks={"send_response": send}) as manager:
        pass
    assert sorted(finals) == [1, 2]
    assert client.answer(2).tokens == output_of(2, 5, 4)
    assert "send_response failed for request 1: the client stumbles" in caplog.text
    check_nothing_leaked(manager)


@pytest.mark.parametrize("rubbish", [None, 5, "requests", object(), [None], [5, object()]])
def test_rubbish_in_place_of_requests_costs_the_others_nothing(rubbish):
    client = Client(request_of(request_id) for request_id in range(6))
    handed_out = iter([[], rubbish, []])
    manager = manager_of(
        client,
        callbacks={
            "get_inference_requests": lambda count: next(handed_out, None) or client.get_inference_requests(count)
        },
    )
    manager.close()
    assert [answer.tokens for answer in client.answers] == [output_of(request_id, 5, 4) for request_id in range(6)]


def test_what_is_no_request_is_left_out_among_requests(caplog):
    client = Client(request_of(request_id) for request_id in range(3))
    asked = []

    def get(count):
        asked.append(count)
        return [None, *client.get_inference_requests(count), "a", 3, object()] if len(asked) == 1 else []

    with manager_of(client, callbacks={"get_inference_requests": get}):
        pass
    assert [answer.tokens for answer in client.answers] == [output_of(request_id, 5, 4) for request_id in range(3)]
    assert "expected InferenceRequest, not NoneType" in caplog.text


def test_a_client_that_hands_out_nothing_but_rubbish_is_given_up():
    manager = manager_of(Client(), callbacks={"get_inference_requests": lambda count: ["rubbish"]})
    with pytest.raises(BatchManagerFailed, match="expected InferenceRequest, not str"):
        close_when_ended(manager)


@pytest.mark.parametrize("rubbish", [None, 5, [[1]], [None], ["1"], np.array([0.5]), (2**70, -3)])
def test_rubbish_in_place_of_ids_to_stop_stops_nothing(rubbish):
    client = Client([request_of(1)])
    signals = iter([rubbish, rubbish])
    with manager_of(client, callbacks={"poll_stop_signals": lambda: next(signals, ())}):
        pass
    assert client.answers[0].tokens == output_of(1, 5, 4)


def test_a_callback_that_asks_the_program_to_exit_ends_the_loop():
    client = Client([request_of(1), request_of(2)])

    def poll():
        raise SystemExit(3)

    manager = manager_of(client, callbacks={"poll_stop_signals": poll})
    with pytest.raises(BatchManagerFailed):
        close_when_ended(manager)
    assert ["the batch manager ended" in answer.error for answer in client.answers] == [True, True]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("starts", [True, False])
def test_a_response_that_asks_the_program_to_exit_costs_no_other_its_own(starts: bool, error: BaseException):
    client, sent = Client(request_of(request_id) for request_id in range(5)), list[int]()

    def send(request_id, tensors, is_final, message):
        sent.append(request_id)
        raise error

    def step_to_the_end(manager: BatchManager):
        while manager.step():
            pass

    manager = manager_of(client, start=starts, callbacks={"send_response": send})
    with pytest.raises(BatchManagerFailed if starts else type(error)):
        close_when_ended(manager) if starts else step_to_the_end(manager)
    assert sorted(sent) == [0, 1, 2, 3, 4]
    manager.close()
    check_nothing_leaked(manager)


def failing_piece(client: Client, request_id: int, piece: int) -> Callable[..., None]:
    """send_response, raising for one response of one request."""
    pieces = []

    def send(responded_id, tensors, is_final, error):
        if responded_id == request_id:
            pieces.append(tensors)
            if len(pieces) == piece:
                raise RuntimeError("the client stumbles")
        client.send_response(responded_id, tensors, is_final, error)

    return send
