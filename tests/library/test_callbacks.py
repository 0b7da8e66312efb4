"""When, from where and with what the callbacks are called."""

import re
import threading

import numpy as np
import pytest

from ifbbench import InferenceRequest
from tests.library.client import Client
from tests.library.managers import CountingExecutor, manager_of, output_of, request_of

ALWAYS = {"Timestamp", "Iteration Counter", "Active Request Count", "Max Request Count"}
PAGED_KV_CACHE = {
    "Max KV cache blocks",
    "Free KV cache blocks",
    "Used KV cache blocks",
    "Tokens per KV cache block",
    "Scheduled Requests",
    "Allocated total KV cache blocks",
    "Allocated new KV cache blocks",
    "Reused KV cache blocks",
}
INFLIGHT = {
    "Scheduled Requests",
    "Context Requests",
    "Generation Requests",
    "Total Context Tokens",
    "MicroBatch ID",
    "Paused Requests",
}
STATIC = {
    "Scheduled Requests",
    "Context Requests",
    "Total Generation Tokens",
    "Total Context Tokens",
    "Empty Generation Slots",
}


def test_all_callbacks_are_called_from_the_worker_thread_alone():
    client = Client([request_of(1, streaming=True), request_of(2), request_of(3, prompt_len=50)])
    with manager_of(client):
        client.answer(2).wait()
    assert set(client.events) == {"get", "send", "poll", "stats"}
    assert len(client.threads) == 1
    assert threading.get_ident() not in client.threads


def test_an_iteration_asks_for_requests_then_tells_its_statistics_then_responds_then_polls():
    client = Client([request_of(1, max_new_tokens=2, streaming=True), request_of(2, max_new_tokens=2)])
    manager = manager_of(client, start=False)
    assert manager.step()
    assert client.events == ["get", "stats", "send", "poll"]
    client.events.clear()
    assert manager.step()
    assert client.events == ["get", "stats", "send", "send", "poll"]


def test_a_refused_request_is_answered_before_the_iteration_runs():
    client = Client([request_of(1, prompt_len=50), request_of(2, pad_id=0.5), request_of(3)])
    manager = manager_of(client, start=False)
    assert manager.step()
    # The second call asks for requests in place of those refused.
    assert client.events == ["get", "send", "send", "get", "stats", "poll"]
    assert [answer.finals for answer in client.answers] == [1, 1, 0]


def test_an_idle_iteration_only_asks_for_requests():
    client = Client()
    manager = manager_of(client, start=False)
    assert not manager.step()
    assert client.events == ["get"]


def test_with_overlap_an_iteration_is_told_of_when_its_tokens_are_there():
    client = Client([request_of(1, max_new_tokens=2)])
    manager = manager_of(client, start=False, overlap="async")
    events = []
    while manager.step():
        events.append(client.events.copy())
        client.events.clear()
    assert events == [["get", "poll"], ["get", "stats", "poll"], ["get", "stats", "send", "poll"]]


def test_as_many_requests_are_asked_for_as_there_are_places_and_a_few_to_look_ahead():
    client = Client()
    manager = manager_of(client, start=False, max_batch_size=4)
    manager.step()
    for request_id in range(3):
        client.submit(request_of(request_id))
    manager.step()
    manager.step()
    assert client.asked == [12, 12, 9]


def test_fewer_requests_than_asked_for_may_come_and_none():
    client = Client(request_of(request_id) for request_id in range(9))
    manager = manager_of(
        client,
        start=False,
        callbacks={"get_inference_requests": lambda count: client.get_inference_requests(min(count, 1))},
    )
    manager.close()
    assert [answer.tokens for answer in client.answers] == [output_of(request_id, 5, 4) for request_id in range(9)]


def test_more_requests_than_asked_for_are_served_all_the_same():
    client = Client(request_of(request_id) for request_id in range(50))
    manager = manager_of(
        client, start=False, callbacks={"get_inference_requests": lambda count: client.get_inference_requests(-1)}
    )
    manager.close()
    assert [answer.tokens for answer in client.answers] == [output_of(request_id, 5, 4) for request_id in range(50)]


@pytest.mark.parametrize("given", [tuple, iter, set, lambda requests: requests or None])
def test_requests_may_come_in_any_collection(given):
    waiting = [InferenceRequest(1, (1, 2), 3), InferenceRequest(2, (1, 2), 3)]
    client = Client(waiting)
    manager = manager_of(
        client,
        CountingExecutor(),
        start=False,
        callbacks={"get_inference_requests": lambda count: given(client.get_inference_requests(count))},
    )
    manager.close()
    assert [answer.error for answer in client.answers] == ["", ""]


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [("V1", STATIC), ("InflightBatching", INFLIGHT), ("InflightFusedBatching", INFLIGHT)],
)
def test_statistics_have_the_documented_fields(model_type, fields):
    client = Client(request_of(request_id) for request_id in range(6))
    with manager_of(client, model_type=model_type) as manager:
        pass
    assert client.statistics
    for statistics in client.statistics:
        assert set(statistics) == ALWAYS | PAGED_KV_CACHE | fields
        assert re.fullmatch(r"\d\d-\d\d-\d{4} \d\d:\d\d:\d\d", statistics["Timestamp"])
        assert statistics["Max Request Count"] == 4
        assert statistics["Max KV cache blocks"] == manager.config.num_blocks == 40
        assert statistics["Used KV cache blocks"] + statistics["Free KV cache blocks"] == 40
    counters = [statistics["Iteration Counter"] for statistics in client.statistics]
    assert counters == list(range(len(counters)))


@pytest.mark.parametrize(
    ("overlap", "ids", "scheduled"),
    [(None, [0] * 4, [1] * 4), ("async", [0, 1] * 2, [1] * 4), ("partitioned", [0, 1] * 3 + [0], [1, 0] * 3 + [1])],
)
def test_the_micro_batch_alternates_with_overlap(overlap, ids, scheduled):
    client = Client([request_of(1, max_new_tokens=4)])
    with manager_of(client, overlap=overlap):
        pass
    assert [statistics["MicroBatch ID"] for statistics in client.statistics] == ids
    assert [statistics["Scheduled Requests"] for statistics in client.statistics] == scheduled


def test_a_static_batch_is_reported_once():
    client = Client([request_of(1, prompt_len=5, max_new_tokens=4), request_of(2, prompt_len=3, max_new_tokens=2)])
    manager = manager_of(client, model_type="V1", start=False, max_num_tokens=4)  # which limits no padded input
    manager.close()
    (statistics,) = client.statistics
    names = (
        "Scheduled Requests",
        "Context Requests",
        "Total Context Tokens",
        "Total Generation Tokens",
        "Empty Generation Slots",
        "Iteration Counter",
    )
    assert [statistics[name] for name in names] == [2, 2, 8, 6, 2, 0]


def test_there_are_no_statistics_while_nothing_is_active():
    client = Client()
    with manager_of(client):
        while len(client.asked) < 5:
            client.submit(request_of(1)).wait()
            client.submit(request_of(2, prompt_len=50)).wait()
    assert all(statistics["Active Request Count"] > 0 for statistics in client.statistics)


def test_statistics_and_stop_signals_may_be_left_out():
    client = Client([request_of(1)])
    with manager_of(client, callbacks={"poll_stop_signals": None, "return_batch_manager_stats": None}):
        pass
    assert client.answers[0].tokens == output_of(1, 5, 4)
    assert set(client.events) == {"get", "send"}


@pytest.mark.parametrize("given", [np.array, set, iter, lambda ids: [np.uint64(one) for one in ids]])
def test_ids_to_stop_may_come_in_any_collection(given):
    client = Client([request_of(1), request_of(2), request_of(3)])
    manager = manager_of(client, start=False, callbacks={"poll_stop_signals": lambda: given([1, 3])})
    manager.step()
    assert [answer.finals for answer in client.answers] == [1, 0, 1]


def test_a_stopped_request_gets_what_it_has_and_others_go_on():
    client = Client([request_of(1, max_new_tokens=30), request_of(2, max_new_tokens=6)])
    manager = manager_of(client, start=False)
    manager.step()
    manager.step()
    client.stops += [1, 77, 1]
    manager.step()
    stopped = client.answer(1)
    assert (stopped.finals, stopped.error) == (1, "")
    assert stopped.tokens == output_of(1, 5, 3)
    manager.close()
    assert client.answer(2).tokens == output_of(2, 5, 6)


def test_a_request_stopped_while_it_waits_gets_its_prompt_back():
    client = Client([request_of(1), request_of(2), request_of(3, streaming=True)])
    client.stops += [2, 3]
    manager = manager_of(client, start=False, max_batch_size=1)
    manager.step()
    for request_id in (2, 3):
        stopped = client.answer(request_id)
        assert (stopped.finals, stopped.error, stopped.tokens) == (1, "", [])
    manager.close()
    assert client.answer(1).tokens == output_of(1, 5, 4)
