"""How a manager ends: close, abort, `with`, and managers without a thread."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from unittest.mock import patch

import pytest

from ifbbench import BatchManagerFailed
from tests.library.client import PATIENCE_S, Client
from tests.library.managers import check_nothing_leaked, manager_of, output_of, request_of, tiny_manager_of

pytestmark = pytest.mark.usefixtures("small_model")

ABORTED = "the batch manager was aborted"


@pytest.mark.parametrize("starts", [True, False])
def test_close_waits_for_requests_that_are_active_or_in_the_queue(starts):
    client = Client(request_of(request_id) for request_id in range(40))
    manager = manager_of(client, start=starts)
    manager.close()
    assert [answer.tokens for answer in client.answers] == [output_of(request_id, 5, 4) for request_id in range(40)]
    assert not manager.is_running
    check_nothing_leaked(manager)


@pytest.mark.parametrize("starts", [True, False])
def test_close_looks_behind_requests_that_are_all_refused(starts):
    bad = [request_of(request_id, prompt_len=50) for request_id in range(40)]
    client = Client([*bad, request_of(77)])
    manager_of(client, start=starts, max_batch_size=1).close()
    assert client.answer(77).tokens == output_of(77, 5, 4)
    assert all(answer.finals == 1 for answer in client.answers)


def test_close_asks_again_when_the_callback_for_requests_raised():
    client = Client([request_of(1)])
    calls = []

    def get(count):
        calls.append(count)
        if len(calls) == 1:
            raise RuntimeError("not now")
        return client.get_inference_requests(count)

    manager_of(client, start=False, callbacks={"get_inference_requests": get}).close()
    assert client.answers[0].tokens == output_of(1, 5, 4)


@pytest.mark.parametrize("starts", [True, False])
def test_abort_answers_all_that_was_fetched_with_an_error(starts):
    client = Client(request_of(request_id, max_new_tokens=30) for request_id in range(30))
    fetched = threading.Event()
    client_polls = client.poll_stop_signals

    def poll():
        fetched.set()
        return client_polls()

    manager = manager_of(client, start=starts, callbacks={"poll_stop_signals": poll})
    if not starts:
        manager.step()
    assert fetched.wait(PATIENCE_S)
    manager.abort()
    assert not manager.is_running
    # Four are active, eight wait, the others stay with the client. Few iterations ran before the abort, or many.
    assert [answer.finals for answer in client.answers] == [1] * (30 - client.queued) + [0] * client.queued
    failed = [answer for answer in client.answers if answer.error]
    assert all(answer.error == ABORTED and answer.responses[-1] == {} for answer in failed)
    if not starts:
        assert (client.queued, len(failed)) == (18, 12)
    check_nothing_leaked(manager)


def test_with_overlap_abort_throws_away_the_iteration_in_flight():
    client = Client(request_of(request_id, max_new_tokens=30) for request_id in range(4))
    manager = manager_of(client, start=False, overlap="async")
    manager.step()
    manager.step()
    manager.abort()
    assert [answer.error for answer in client.answers] == [ABORTED] * 4
    check_nothing_leaked(manager)


def test_leaving_a_with_block_closes():
    client = Client([request_of(1, max_new_tokens=30)])
    with manager_of(client) as manager:
        assert manager.is_running
    assert client.answers[0].tokens == output_of(1, 5, 30)


@pytest.mark.parametrize("starts", [True, False])
def test_leaving_a_with_block_by_an_exception_aborts_and_passes_it_on(starts):
    client = Client(request_of(request_id, max_new_tokens=30) for request_id in range(100))
    with pytest.raises(KeyError), manager_of(client, start=starts) as manager:  # noqa: PT012
        if not starts:
            manager.step()
        raise KeyError("the script's own")
    assert not manager.is_running
    assert starts or client.queued == 88
    assert [answer.finals for answer in client.answers] == [1] * (100 - client.queued) + [0] * client.queued
    check_nothing_leaked(manager)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("maker", [manager_of, tiny_manager_of])
def test_closing_again_does_nothing(maker, starts):
    client = Client([request_of(1)])
    manager = maker(client, start=starts)
    manager.close()
    asked = len(client.asked)
    late = client.submit(request_of(2))
    manager.close()
    manager.abort()
    assert (len(client.asked), late.finals, client.answers[0].finals) == (asked, 0, 1)


@pytest.mark.parametrize(
    "name", ["get_inference_requests", "send_response", "poll_stop_signals", "return_batch_manager_stats"]
)
@pytest.mark.parametrize(("starts", "way"), [(True, "close"), (False, "close"), (True, "abort"), (False, "abort")])
def test_a_callback_may_ask_for_the_end(name, starts, way):
    client = Client(request_of(request_id, max_new_tokens=30) for request_id in range(3))
    callback = getattr(client, name)
    made = threading.Event()

    def ending(*arguments):
        result = callback(*arguments)
        assert made.wait(PATIENCE_S)
        getattr(manager, way)()
        return result

    manager = manager_of(client, start=starts, callbacks={name: ending})
    made.set()
    if not starts:
        manager.step()
    else:
        for answer in client.answers:
            answer.wait()
    manager.close()
    assert [answer.finals for answer in client.answers] == [1, 1, 1]
    # With abort from the last response of all there is nothing left to fail.
    allowed = {""} if way == "close" else {"", ABORTED}
    assert {answer.error for answer in client.answers} <= allowed
    assert not manager.is_running
    check_nothing_leaked(manager)


def test_a_manager_without_a_thread_is_stepped_by_hand():
    client = Client([request_of(1, max_new_tokens=3)])
    manager = manager_of(client, start=False)
    assert not manager.is_running
    assert [manager.step() for _ in range(4)] == [True, True, True, False]
    assert client.threads == {threading.get_ident()}
    assert client.answers[0].tokens == output_of(1, 5, 3)
    client.submit(request_of(2))
    assert manager.step()
    manager.close()
    assert client.answers[1].finals == 1
    with pytest.raises(RuntimeError, match="has ended"):
        manager.step()


def test_a_step_within_a_step_is_refused():
    client, refusals = Client(request_of(request_id) for request_id in range(2)), list[str]()

    def poll():
        with pytest.raises(RuntimeError) as refused:
            manager.step()
        refusals.append(str(refused.value))
        return ()

    manager = manager_of(client, start=False, callbacks={"poll_stop_signals": poll})
    while manager.step():
        pass
    message = "step() is called in one of its callbacks while an iteration runs; call it when that has ended"
    assert set(refusals) == {message}
    assert [answer.tokens for answer in client.answers] == [output_of(index, 5, 4) for index in range(2)]
    manager.close()


def test_of_several_threads_one_steps_and_the_others_are_refused():
    client, refusals = Client(request_of(request_id) for request_id in range(8)), list[str]()

    def step_elsewhere():
        with pytest.raises(RuntimeError) as refused:
            manager.step()
        refusals.append(str(refused.value))

    def poll():
        thread = threading.Thread(target=step_elsewhere)
        thread.start()
        thread.join()
        return ()

    manager = manager_of(client, start=False, callbacks={"poll_stop_signals": poll})
    while manager.step():
        pass
    assert set(refusals) == {"step() is called in another thread while an iteration runs; call it when that has ended"}
    assert [answer.tokens for answer in client.answers] == [output_of(index, 5, 4) for index in range(8)]
    manager.close()
    check_nothing_leaked(manager)


def waits(thread: int) -> bool:
    """Whether a thread waits for an event."""
    frame = sys._current_frames()[thread]
    return frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait"


@pytest.mark.parametrize("way", ["close", "abort"])
def test_ctrl_c_in_close_loses_no_response(way):
    client, is_interrupted = Client(request_of(request_id) for request_id in range(5)), threading.Event()
    closes, main_thread = threading.Event(), threading.get_ident()

    def poll():
        if not is_interrupted.is_set():
            assert closes.wait(PATIENCE_S)
            while not waits(main_thread):  # close() waits for this thread
                time.sleep(0.001)
            signal.pthread_kill(main_thread, signal.SIGINT)
            assert is_interrupted.wait(PATIENCE_S)
        return ()

    manager = manager_of(client, callbacks={"poll_stop_signals": poll})
    closes.set()
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    assert manager.is_running
    is_interrupted.set()
    getattr(manager, way)()
    assert not manager.is_running
    assert [answer.finals for answer in client.answers] == [1] * 5
    assert {answer.error for answer in client.answers} <= ({""} if way == "close" else {"", ABORTED})
    check_nothing_leaked(manager)


def test_the_steps_of_a_manager_with_a_thread_are_its_own():
    with manager_of(Client()) as manager, pytest.raises(RuntimeError, match="start=False"):
        manager.step()


def test_close_tells_once_that_the_loop_ended_early():
    client = Client([request_of(1)])
    manager = manager_of(client, start=False, callbacks={"get_inference_requests": None})
    with pytest.raises(BatchManagerFailed, match="get_inference_requests failed 3 times in a row"):
        manager.close()
    manager.close()


def test_an_executor_stays_its_makers_to_close_and_a_model_does_not():
    closed = []

    class Executor:
        def submit(self, batch):
            raise AssertionError

        def collect(self):
            raise AssertionError

        def close(self):
            closed.append("executor")

    manager_of(Client(), Executor()).close()
    assert closed == []
    manager = tiny_manager_of(Client(), start=False)
    executor = manager._owned_executor
    assert executor is not None
    with patch.object(executor, "close", lambda: closed.append("model")):
        manager.close()
        manager.close()
    assert closed == ["model"]


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_manager_that_is_deleted_ends(is_idle):
    """Its requests get an error response, and the model is closed."""
    client = Client([] if is_idle else [request_of(request_id, max_new_tokens=30) for request_id in range(4)])
    fetched, deleted = threading.Event(), threading.Event()

    def stats(text):
        fetched.set()
        assert deleted.wait(PATIENCE_S)  # no request ends before
        time.sleep(0.02)

    manager = tiny_manager_of(client, callbacks={} if is_idle else {"return_batch_manager_stats": stats})
    if not is_idle:
        assert fetched.wait(PATIENCE_S)
    assert manager._worker is not None
    thread, gone = manager._worker._thread, weakref.ref(manager)
    closed = threading.Event()
    with patch.object(manager._owned_executor, "close", closed.set):
        del manager
        deleted.set()
        gc.collect()
        thread.join(PATIENCE_S)
    assert gone() is None
    assert not thread.is_alive()
    assert closed.is_set()
    assert [answer.error for answer in client.answers] == ["the batch manager was deleted without close()"] * (
        0 if is_idle else 4
    )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_a_manager_refuses_calls():
    client = Client(request_of(request_id) for request_id in range(4))
    with manager_of(client) as manager:
        process = os.fork()
        if not process:
            refused = 0
            for call in (manager.close, manager.abort, manager.step, lambda: manager.truncate_blocks(request_of(1), 1)):
                try:
                    call()
                except RuntimeError as error:
                    refused += "forked from" in str(error)
            os._exit(10 * refused + manager.is_running)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 40
    assert [answer.tokens for answer in client.answers] == [output_of(request_id, 5, 4) for request_id in range(4)]
